"""Every family with a plan of its own, on the meshes that cut it, equal to one process.

The four families of Llama's shape are in the grid; here are those whose layers are fused,
transposed, or of another kind, and the layouts of attention that are kept whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from goose_strategy.comm.collectives import DONE, Pending, all_reduce
from goose_strategy.data_parallel import bucket
from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.tensor_parallel import counts, experts, parallelize
from goose_strategy.tensor_parallel.plan import TensorPlan
from goose_strategy.tensor_parallel.slicing import Slicer
from tests.parity.grid import Case, assert_parity

FAMILIES = ("bloom", "falcon", "gemma", "gpt2", "gpt_neox", "mixtral", "opt", "phi3")
MESHES = (
    {"tp": 2},
    {"pp": 2},
    {"tp": 2, "pp": 2},
    {"tp": 2, "pp": 2, "dp": 2, "tied": True, "max_norm": 0.5, "accumulate": 2},
)
CASES = [Case(family=family, steps=3, **mesh) for family in FAMILIES for mesh in MESHES]
OLD_FALCON = (
    ("new_decoder_architecture", False),
    ("multi_query", False),
    ("alibi", True),
    ("num_kv_heads", 4),
)
SHARED_FALCON = (("new_decoder_architecture", False), ("multi_query", True))
WHOLE = (("allow_replicated_attention", True),)
ODD_HEADS = (("heads", 3), ("num_key_value_heads", 3))
CUBE = {"tp": 2, "pp": 2, "dp": 2, "steps": 3}
OTHERS = {
    "falcon with alibi": Case(family="falcon", settings=OLD_FALCON, **CUBE),
    "falcon with one key head": Case(family="falcon", settings=SHARED_FALCON, tensor=WHOLE, **CUBE),
    "opt with norms last": Case(
        family="opt", settings=(("do_layer_norm_before", False),), tp=2, steps=3
    ),
    "one key head": Case(settings=(("num_key_value_heads", 1),), **CUBE),
    "two key heads on four ranks": Case(settings=(("num_key_value_heads", 2),), tp=4, steps=3),
    "one key head with biases and norms": Case(
        family="qwen3",
        settings=(("num_key_value_heads", 1), ("attention_bias", True)),
        tp=4,
        steps=3,
    ),
    "gemma with one key head": Case(
        family="gemma", settings=(("num_key_value_heads", 1),), tp=2, steps=3
    ),
    "attention whole": Case(settings=ODD_HEADS, tensor=WHOLE, **CUBE),
    "fused attention whole": Case(
        family="phi3", settings=ODD_HEADS, tensor=WHOLE, tp=2, pp=2, steps=3
    ),
    "gpt2 with attention whole": Case(
        family="gpt2", settings=(("heads", 3),), tensor=WHOLE, tp=2, steps=3
    ),
    "grouped experts": Case(
        family="mixtral", settings=(("experts_implementation", "batched_mm"),), tp=2, steps=3
    ),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_family_equals_one_process(case: Case) -> None:
    assert_parity(case)


@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS.keys())
def test_a_layout_equals_one_process(case: Case) -> None:
    assert_parity(case)


# -- one planted error for each kind of plan -------------------------------------------------------


def parts_not_cut_apart(_mesh: ParallelMesh) -> AbstractContextManager[object]:
    """A fused matrix is cut as if it were one."""
    cut = Slicer.cut
    return patch.object(Slicer, "cut", lambda self, param, dim, packed=(): cut(self, param, dim))


def partial_gradient_not_summed(mesh: ParallelMesh) -> AbstractContextManager[object]:
    """Each rank steps the shared key heads by the gradient of its own queries."""

    def reduce(tensor: Tensor, group: Any, **settings: Any) -> Pending:
        return DONE if group is mesh.tp else all_reduce(tensor, group, **settings)

    return patch.object(bucket, "all_reduce", reduce)


def head_of_another_rank(_mesh: ParallelMesh) -> AbstractContextManager[object]:
    """Every rank takes the biases of the first rank's heads."""
    local = counts.local_heads

    def first(tensor: Any, **place: Any) -> Any:
        return local(tensor, **{**place, "index": 0})

    return patch.object(parallelize, "local_heads", first)


def router_sees_its_share(_mesh: ParallelMesh) -> AbstractContextManager[object]:
    """The gradient of the router's weights is not summed over the shares of the experts."""
    entered = experts._entered

    def only_hidden(value: Any, group: Any) -> Any:
        is_weights = isinstance(value, Tensor) and value.shape[-1] == 2
        return value if is_weights else entered(value, group)

    return patch.object(experts, "_entered", only_hidden)


@contextmanager
def whole_attention_counted_twice(_mesh: ParallelMesh) -> Iterator[None]:
    """What stays whole is taken for a share, and summed."""
    without = TensorPlan.without_attention

    def islands_kept(self: TensorPlan) -> TensorPlan:
        return replace(without(self), islands=self.islands)

    with patch.object(TensorPlan, "without_attention", islands_kept):
        yield


PLANTED = [
    (parts_not_cut_apart, Case(family="phi3", tp=2, steps=1)),
    (parts_not_cut_apart, Case(family="gpt2", tp=2, steps=1)),
    (parts_not_cut_apart, Case(family="mixtral", tp=2, steps=1)),
    (partial_gradient_not_summed, replace(OTHERS["one key head"], steps=1)),
    (head_of_another_rank, Case(family="bloom", tp=2, steps=1)),
    (head_of_another_rank, replace(OTHERS["falcon with alibi"], steps=1)),
    (router_sees_its_share, Case(family="mixtral", tp=2, steps=1)),
    (whole_attention_counted_twice, replace(OTHERS["attention whole"], steps=1)),
]


@pytest.mark.parametrize(("plant", "case"), PLANTED, ids=[f"{p.__name__}-{c}" for p, c in PLANTED])
def test_a_planted_error_is_found(plant: Any, case: Case) -> None:
    with pytest.raises(AssertionError):
        assert_parity(case, plant=plant)
