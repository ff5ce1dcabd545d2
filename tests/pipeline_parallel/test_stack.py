"""What is sent, injected and refused, on facts written down by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from goose_strategy.errors import PlanError
from goose_strategy.pipeline_parallel.stack import LayerCall, Reach, StackInfo, TensorFact
from goose_strategy.pipeline_parallel.template import Place


def fact(
    known_at: int,
    reach: Reach | None = None,
    *,
    carried: bool = True,
    dtype: torch.dtype = torch.float32,
) -> TensorFact:
    return TensorFact(
        dtype=dtype,
        shape=(2, 8),
        differentiable=carried and dtype.is_floating_point,
        carried=carried,
        known_at=known_at,
        made_by=known_at - 1 if known_at > 0 else None,
        reach=reach or Reach(),
    )


def reach(*tensors: int, parameters: tuple[str, ...] = ()) -> Reach:
    return Reach(frozenset(tensors), frozenset(parameters))


# Hidden states 0 -> 2 -> 3 -> 5 through three layers; 1 is a mask, 4 an index from layer 0.
TENSORS = (
    fact(0, reach(parameters=("embed.weight",))),
    fact(0, carried=False),
    fact(1, reach(0, parameters=("layers.0.w",))),
    fact(2, reach(2, parameters=("layers.1.w",))),
    fact(1, dtype=torch.int64),
    fact(3, reach(3, parameters=("layers.2.w",))),
)


def info(third: dict[tuple[int | str, ...], int], outputs: Reach) -> StackInfo:
    second = {(0,): 2, ("mask",): 1, ("index",): 4}
    return StackInfo(
        stack="layers",
        layers=(
            LayerCall("layers.0", {(0,): 0, ("mask",): 1}, (0,), frozenset(), Place.HIDDEN),
            LayerCall("layers.1", second, (0,), frozenset(), Place.HIDDEN),
            LayerCall("layers.2", third, (0,), frozenset(), Place.HIDDEN),
        ),
        tensors=TENSORS,
        outputs=outputs,
        segments={},
    )


HEAD = reach(5, parameters=("head.weight",))


def test_what_is_sent_and_where_it_goes() -> None:
    stack = info({(0,): 3, ("mask",): 1, ("index",): 4}, HEAD)
    assert [(tensor.path, tensor.differentiable) for tensor in stack.cut(1)] == [
        ((0,), True),
        (("index",), False),
    ]
    assert stack.injections(1, 1) == {(0,): 0, ("index",): 1}
    assert stack.injections(1, 2) == {("index",): 1}
    stack.check_stage(1, 3)


def test_a_tensor_in_two_places_is_sent_once() -> None:
    stack = info({(0,): 3, ("again",): 3}, HEAD)
    assert [tensor.path for tensor in stack.cut(2)] == [(0,)]
    assert stack.injections(2, 2) == {(0,): 0, ("again",): 0}


def test_parameters_behind_a_stage() -> None:
    stack = info({(0,): 3}, HEAD)
    assert stack.reached(0, 1) == {"embed.weight", "layers.0.w"}
    assert stack.reached(1, 2) == {"layers.1.w"}
    assert stack.reached(0, 2) == {"embed.weight", "layers.0.w", "layers.1.w"}
    assert stack.reached(2, 3) == {"layers.2.w", "head.weight"}


def test_an_index_that_skips_the_first_layer_is_refused() -> None:
    stack = info({(0,): 3, ("index",): 4}, HEAD)
    stack.check_stage(1, 3)
    skipping = StackInfo(
        stack="layers",
        layers=(
            stack.layers[0],
            LayerCall("layers.1", {(0,): 2}, (0,), frozenset(), Place.HIDDEN),
            stack.layers[2],
        ),
        tensors=TENSORS,
        outputs=HEAD,
        segments={},
    )
    with pytest.raises(PlanError, match=r"cut before layers\.1: .*layers\.2 takes index"):
        skipping.check_stage(1, 3)
    skipping.check_stage(0, 3)


@pytest.mark.parametrize("first", [1, 2])
def test_a_skip_from_an_earlier_layer_is_refused(first: int) -> None:
    """Even if the stage receives that very tensor: the head reads a variable, not an argument."""
    stack = info({(0,): 3}, reach(5, 2, parameters=("head.weight",)))
    message = rf"cut before layers\.{first}: .*the model's head depends on layers\.[01]\.w"
    with pytest.raises(PlanError, match=message):
        stack.check_stage(first, 3)


def test_a_sum_kept_between_layers_is_refused() -> None:
    """Tensor 6 is made between the layers from 3, which layer 2 takes, and goes into layer 3."""
    stack = info({(0,): 3}, HEAD)
    kept = fact(3, reach(3))
    assert kept.made_by is not None
    kept = dataclasses.replace(kept, made_by=None)
    fourth = LayerCall("layers.3", {(0,): 5, ("kept",): 6}, (0,), frozenset(), Place.HIDDEN)
    stack = dataclasses.replace(
        stack,
        layers=(*stack.layers, fourth),
        tensors=(*TENSORS, kept, fact(4, reach(5, 6, parameters=("layers.3.w",)))),
        outputs=reach(7, parameters=("head.weight",)),
    )
    stack.check_stage(3, 4)
    stack.check_stage(1, 4)
    with pytest.raises(PlanError, match=r"cut before layers\.2: .*head depends on layers\.[01]\.w"):
        stack.check_stage(2, 4)


def test_a_container_that_earlier_layers_fill_is_refused() -> None:
    """The received tensor would have no place in a dict that is still empty."""
    stack = info({(0,): 3, ("shared", "key"): 4}, HEAD)
    *others, last = stack.layers
    filled = LayerCall(last.name, last.inputs, (0,), frozenset([("shared", "key")]), Place.HIDDEN)
    stack = dataclasses.replace(stack, layers=(*others, filled))
    message = r"cut before layers\.1: .*layers\.2 takes shared\['key'\], which they fill"
    with pytest.raises(PlanError, match=message):
        stack.check_stage(1, 2)
    with pytest.raises(PlanError, match=message):
        stack.check_stage(1, 3)
    stack.check_stage(0, 3)
