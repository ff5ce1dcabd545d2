"""Low-rank adapters on every mesh, equal to one process; and errors in them that are found."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from goose_strategy.comm.collectives import DONE, Pending, all_reduce
from goose_strategy.data_parallel import bucket
from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.tensor_parallel import linear, lora, parallelize
from goose_strategy.tensor_parallel.lora import Adapted
from goose_strategy.tensor_parallel.plan import Style, TensorPlan
from goose_strategy.tensor_parallel.slicing import Slicer
from tests.parity.grid import Case, assert_parity
from tests.parity.lora import ATTENTION, LAYERS, LoraCase
from tests.parity.session import Session
from tests.parity.test_precision import BF16, LOOSE, assert_as_close_as_one

MESHES = (
    {"tp": 2},
    {"pp": 2},
    {"tp": 2, "pp": 2},
    {"tp": 2, "pp": 2, "dp": 2, "max_norm": 0.5, "accumulate": 2},
)
SQUARE = {"tp": 2, "pp": 2, "steps": 3}
WHOLE = (("allow_replicated_attention", True),)
ENDS = (*LAYERS, "embed_tokens", "lm_head")
TARGETS = {
    "bloom": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "falcon": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "gpt2": ("c_attn", "c_proj", "c_fc", "wte"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "embed_out"),
    "mixtral": ATTENTION,
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
}
LAYOUTS = {
    "embedding and head": LoraCase(targets=ENDS, **SQUARE),
    "tied embedding and head": LoraCase(targets=ENDS, tied=True, **SQUARE),
    "embedding and head over replicas": LoraCase(targets=ENDS, tp=2, dp=2, steps=3),
    "scaled embedding": LoraCase(family="gemma", targets=("embed_tokens", "q_proj"), **SQUARE),
    "one key head": LoraCase(settings=(("num_key_value_heads", 1),), **SQUARE),
    "attention whole": LoraCase(
        settings=(("heads", 3), ("num_key_value_heads", 3)), tensor=WHOLE, **SQUARE
    ),
    "feed-forward only": LoraCase(targets=("up_proj", "down_proj"), **SQUARE),
    "queries only": LoraCase(targets=("q_proj",), **SQUARE),
    "biases": LoraCase(
        settings=(("attention_bias", True), ("mlp_bias", True)),
        lora=(("lora_bias", True), ("use_rslora", True)),
        **SQUARE,
    ),
    "an inactive adapter": LoraCase(adapters=("first", "second"), **SQUARE),
    "a saved head": LoraCase(lora=(("modules_to_save", ("lm_head", "norm")),), **SQUARE),
    "a saved embedding": LoraCase(lora=(("modules_to_save", ("embed_tokens",)),), **SQUARE),
    # AutoModel's issue 3096 is about such stages: only one of them saved its adapter.
    "a stage without adapters": LoraCase(lora=(("layers_to_transform", (3,)),), **SQUARE),
    "layers that run again": LoraCase(recompute=True, **SQUARE),
    # Variants are refused with tp only.
    "DoRA": LoraCase(lora=(("use_dora", True),), pp=2, dp=2, steps=3),
    "four stages": LoraCase(tp=2, pp=4, microbatches=5, steps=3),
}


@pytest.mark.parametrize("case", [LoraCase(**mesh) for mesh in MESHES], ids=str)
def test_every_mesh_equals_one_process(case: LoraCase) -> None:
    assert_parity(case)


@pytest.mark.parametrize("family", TARGETS)
def test_every_kind_of_layer_equals_one_process(family: Any) -> None:
    assert_parity(LoraCase(family=family, targets=TARGETS[family], **SQUARE))


@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_layout_equals_one_process(case: LoraCase) -> None:
    assert_parity(case)


def train_with_masks(session: Session, case: Case) -> None:
    """Train; dropout starts from the same state in every call."""
    for index, batch in enumerate(case.batches()):
        torch.manual_seed(index)
        session.backward(session.loss(batch))
        session.step()


@pytest.mark.parametrize("targets", [("q_proj", "up_proj"), ("o_proj", "down_proj"), LAYERS])
@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_draws_the_masks_of_one_process(targets: tuple[str, ...], recompute: bool) -> None:
    dropout = (("lora_dropout", 0.3),)
    case = LoraCase(targets=targets, lora=dropout, recompute=recompute, tp=2, steps=3)
    assert_parity(case, scenario=train_with_masks)


@pytest.mark.parametrize("precision", BF16)
def test_lower_precisions_are_as_close_as_one_process(precision: str) -> None:
    case = LoraCase(tp=2, pp=2, steps=3, optimizer="sgd", **BF16[precision])
    # One process is up to 2 % off in the norms itself.
    assert_as_close_as_one(case, replace(LOOSE, norm=0.05))


# -- planted errors --------------------------------------------------------------------------------


def a_not_summed(mesh: ParallelMesh) -> AbstractContextManager[object]:
    """mcore-bridge's issue 173: each rank steps A by the gradient of its own rows of B."""

    def reduce(tensor: Tensor, group: Any, **settings: Any) -> Pending:
        return DONE if group is mesh.tp else all_reduce(tensor, group, **settings)

    return patch.object(bucket, "all_reduce", reduce)


def a_taken_for_replicated(_mesh: ParallelMesh) -> AbstractContextManager[object]:
    """A of a column layer is taken to have its whole gradient on every rank."""
    cut = lora.cut_adapters

    def forget(*args: Any) -> Adapted:
        return replace(cut(*args), shares=[])

    return patch.object(parallelize, "cut_adapters", forget)


def b_counted_partial(_mesh: ParallelMesh) -> AbstractContextManager[object]:
    """B of a row layer is taken for a share, and summed."""
    style = TensorPlan.whole_style

    def whole_style(plan: TensorPlan, parameter: str) -> Style:
        return Style.PARTIAL if "lora_B" in parameter else style(plan, parameter)

    return patch.object(TensorPlan, "whole_style", whole_style)


def b_cut_as_one_matrix(_mesh: ParallelMesh) -> AbstractContextManager[object]:
    """B of a fused layer is cut as if it were one matrix."""
    cut = Slicer.cut

    def ignore(self: Slicer, param: Tensor, dim: int, *, packed: tuple[int, ...] = ()) -> Any:
        return cut(self, param, dim, packed=() if param.shape[-1] == 4 else packed)

    return patch.object(Slicer, "cut", ignore)


def a_of_row_not_summed(_mesh: ParallelMesh) -> AbstractContextManager[object]:
    """What A of a row layer computes from a slice of the input is taken for the whole."""
    leave = linear.leave_island

    def only_wide(x: Tensor, group: Any) -> Tensor:
        return x if x.shape[-1] == 4 else leave(x, group)

    return patch.object(linear, "leave_island", only_wide)


def slices_dropped_alike(_mesh: ParallelMesh) -> AbstractContextManager[object]:
    """Each rank drops its slice of a row layer's input by a mask of that size."""
    return patch.object(lora, "_slice_dropouts", lambda *_args: None)


PLANTED = [
    (a_not_summed, LoraCase(targets=("q_proj",), tp=2, steps=1)),
    (a_taken_for_replicated, LoraCase(targets=("q_proj",), tp=2, steps=1)),
    (b_counted_partial, LoraCase(targets=("o_proj",), tp=2, steps=1)),
    (b_cut_as_one_matrix, LoraCase(family="phi3", targets=("qkv_proj",), tp=2, steps=1)),
    (b_cut_as_one_matrix, LoraCase(family="gpt2", targets=("c_attn",), tp=2, steps=1)),
    (
        slices_dropped_alike,
        LoraCase(targets=("o_proj",), lora=(("lora_dropout", 0.5),), tp=2, steps=1),
    ),
    (a_of_row_not_summed, LoraCase(targets=("down_proj",), tp=2, steps=1)),
]


@pytest.mark.parametrize(("plant", "case"), PLANTED, ids=[f"{p.__name__}-{c}" for p, c in PLANTED])
def test_a_planted_error_is_found(plant: Any, case: LoraCase) -> None:
    assert_parity(case, scenario=train_with_masks)
    with pytest.raises(AssertionError):
        assert_parity(case, scenario=train_with_masks, plant=plant)
