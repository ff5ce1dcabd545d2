"""Every parameter is on the stage that computes with it."""

from __future__ import annotations

import pytest
from torch import nn

from goose_strategy.errors import PlanError
from goose_strategy.pipeline_parallel.placement import Placement
from goose_strategy.pipeline_parallel.probe import probe_model
from tests.pipeline_parallel.cases import Toy, model_of, toy, toy_batch

EXAMPLE = {"input_ids": toy_batch()["input_ids"]}


def kept(placement: Placement, stage: int) -> set[str]:
    """Names of the modules outside the stack that keep something on a stage."""
    missing = placement.missing(stage)
    return {
        slot.module
        for slot in placement.slots
        if slot.attribute not in missing.get(slot.module, []) and ".layers." not in slot.module
    }


def placed(model: nn.Module, bounds: tuple[int, ...], example: dict | None = None) -> Placement:
    return Placement(model, probe_model(model, example), bounds)


def test_embedding_first_head_last() -> None:
    placement = placed(model_of("llama"), (0, 1, 3, 4))
    assert kept(placement, 0) == {"model.embed_tokens"}
    assert kept(placement, 1) == set()
    assert kept(placement, 2) == {"model.norm", "lm_head"}
    assert placement.shared() == {}


def test_every_parameter_is_kept_once() -> None:
    model = model_of("qwen3")
    placement = placed(model, (0, 1, 3, 4))
    names = [
        f"{slot.module}.{slot.attribute}"
        for stage in range(3)
        for slot in placement.slots
        if slot.attribute not in placement.missing(stage).get(slot.module, [])
    ]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_a_tied_head_is_a_copy_on_the_last_stage() -> None:
    placement = placed(model_of("llama", tied=True), (0, 2, 4))
    assert kept(placement, 0) == {"model.embed_tokens"}
    assert kept(placement, 1) == {"model.norm", "lm_head"}
    assert placement.shared() == {"model.embed_tokens.weight": (0, 1)}
    assert placement.local_name("model.embed_tokens.weight", 1) == "lm_head.weight"


def test_all_of_a_prologue_stays_on_the_first_stage() -> None:
    placement = placed(model_of("opt"), (0, 2, 4))
    decoder = "model.decoder"
    first = {f"{decoder}.{name}" for name in ("embed_tokens", "embed_positions", "project_in")}
    last = {f"{decoder}.{name}" for name in ("project_out", "final_layer_norm")}
    assert kept(placement, 0) == first
    assert kept(placement, 1) == last | {"lm_head"}


def test_what_the_head_recomputes_is_kept_there() -> None:
    placement = placed(toy("first_skip"), (0, 2, 4), EXAMPLE)
    assert placement.shared() == {"embed.weight": (0, 1)}
    assert "weight" not in placement.missing(1).get("embed", [])


def test_unused_modules_go_to_the_near_end() -> None:
    class Model(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.unused_behind = nn.Linear(2, 2)

    model = Model().double()
    model._modules = {"unused_before": nn.Linear(2, 2), **model._modules}
    placement = placed(model, (0, 2, 4), EXAMPLE)
    assert "unused_before" in kept(placement, 0) - kept(placement, 1)
    assert "unused_behind" in kept(placement, 1) - kept(placement, 0)


def test_a_weight_on_a_middle_stage_cannot_be_shared() -> None:
    class Model(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(8, 8, bias=False)
            for layer in self.layers:
                # Not registered as a child: a module outside the stack that layers call.
                layer.__dict__["shared"] = self.shared
                layer.forward = lambda h, layer=layer: layer.shared(layer.linear(h))

    with pytest.raises(PlanError, match=r"shared\.weight is used on the stages \[0, 1, 2\]"):
        placed(Model().double(), (0, 1, 2, 4), EXAMPLE).shared()


@pytest.mark.parametrize("bounds", [(0, 2), (0, 2, 2, 4), (1, 2, 4), (0, 5)])
def test_wrong_bounds(bounds: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="must rise from 0 to the number of layers, 4"):
        placed(toy(), bounds, EXAMPLE)
