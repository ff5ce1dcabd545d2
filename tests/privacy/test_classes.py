"""Every trainable parameter has a class and a rule, or the set-up is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from goose_strategy.errors import PlanError
from goose_strategy.grads.store import WeightGradStore
from goose_strategy.mesh.shard import ShardSpec
from goose_strategy.privacy.classes import (
    check_samples,
    reason_against,
    share_of,
    tell_samples_apart,
)
from goose_strategy.tensor_parallel.defer import defer_weight_gradients
from tests.harness.models import batches, tiny_model

WHOLE = ShardSpec.replicated("w", torch.zeros(4))
PARTIAL = ShardSpec.replicated("w", torch.zeros(4), tp_partial=True)
CUT = ShardSpec(
    name="w", global_shape=(8,), offsets=(0,), local_shape=(4,), dtype=torch.float32, tp_dim=0
)


@pytest.mark.parametrize(
    ("spec", "tp", "kind"),
    [
        (WHOLE, 2, "replicated"),
        (PARTIAL, 2, "partial"),
        (CUT, 2, "shard"),
        (None, 2, "replicated"),
        (WHOLE, 1, "shard"),
        (PARTIAL, 1, "shard"),
    ],
)
def test_kinds(spec: Any, tp: int, kind: str) -> None:
    share = share_of(spec, "w", torch.zeros(4), tp=tp)
    assert share.kind == kind
    assert not share.narrow
    assert share_of(spec, "w", torch.zeros(4).bfloat16(), tp=tp).narrow


class Offset(nn.Module):
    """Adds a bias; nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset


class MixesRows(nn.Module):
    """Subtracts the mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0, keepdim=True)) * self.weight


class Flattens(Offset):
    """Uses its parameter on rows that are no samples any more."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.reshape(-1, 6) + self.offset).view(x.shape)


class Squares(Offset):
    """Uses its parameter twice."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.offset * self.offset


class TwoInputs(Offset):
    """Takes more than one input."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x + other + self.offset


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(6),
        nn.LayerNorm(6, bias=False),
        nn.RMSNorm(6),
        LlamaRMSNorm(6),
        GemmaRMSNorm(6),
        Offset(),
        Squares(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_modules_whose_samples_can_be_told_apart(module: nn.Module) -> None:
    before = {name: param.detach().clone() for name, param in module.named_parameters()}
    state = torch.get_rng_state()
    assert reason_against(module) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())


def test_modules_on_the_meta_device_are_tried_too() -> None:
    with torch.device("meta"):
        module = LlamaRMSNorm(6)
    assert reason_against(module) is None
    assert module.weight.is_meta


class TwoSizes(Offset):
    """Has parameters of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.ones(3))


class Nested(Offset):
    """Has a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(6, 6)


class Matrix(nn.Module):
    """Has a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (nn.GroupNorm(2, 6), "cannot be tried on one input"),
        (MixesRows(), "are not those of its rows"),
        (Flattens(), "cannot be tried|are not those"),
        (TwoInputs(), "cannot be tried on one input"),
        (TwoSizes(), "different sizes"),
        (Nested(), "beside submodules"),
        (Matrix(), "only linear layers"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_modules_that_are_refused(module: nn.Module, match: str) -> None:
    import re

    reason = reason_against(module)
    assert reason is not None
    assert re.search(match, reason), reason


def test_a_replaced_forward_is_refused() -> None:
    module = Offset()
    module.forward = lambda x: x  # type: ignore[method-assign, assignment]
    assert reason_against(module) == "its forward was replaced on the instance"


class Model(nn.Module):
    """A model with one module that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.odd = Matrix()
        self.norm = nn.LayerNorm(6)


def test_a_parameter_without_a_rule_is_named_before_anything_changes() -> None:
    model = Model()
    with pytest.raises(PlanError, match=r"1 trainable parameters .* odd.weight \(Matrix\)"):
        check_samples(model)
    assert type(model.norm) is nn.LayerNorm
    model.odd.requires_grad_(False)
    check_samples(model)


def test_a_refusal_takes_back_what_it_has_done() -> None:
    model, store = Model(), WeightGradStore(per_sample=True)
    restore = defer_weight_gradients(model, store)
    with pytest.raises(PlanError, match=r"odd\.weight"):
        tell_samples_apart(model, store)
    assert type(model.norm) is nn.LayerNorm
    restore()


def test_a_model_gives_gradients_per_sample_and_comes_back() -> None:
    model, plain = tiny_model("gpt2"), tiny_model("gpt2")
    kinds = [type(module) for module in model.modules()]
    store = WeightGradStore(per_sample=True)
    restore = [defer_weight_gradients(model, store), tell_samples_apart(model, store)]
    batch = batches(1, padded=False)[0]
    with store.collecting():
        model(**batch).loss.backward()
    assert all(param.grad is None for param in model.parameters())
    store.take().run()
    plain(**batch).loss.backward()
    theirs = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        # transformers takes its loss from fp32 logits.
        assert torch.allclose(param.grad, theirs[name].grad, rtol=1e-6, atol=1e-9), name  # type: ignore[arg-type]
    for undo in reversed(restore):
        undo()
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(6), nn.BatchNorm1d(6, affine=False), nn.SyncBatchNorm(6)], ids=str
)
def test_batch_norms_are_refused_also_without_parameters(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(6, 6), norm.requires_grad_(False))
    with pytest.raises(PlanError, match=r"^1 \(\w*BatchNorm\w*\): a batch norm lets samples"):
        check_samples(model)
