"""What is measured is what the model does, and the model does not notice."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from goose_strategy.errors import PlanError
from goose_strategy.pipeline_parallel.measure import Sample, measure
from goose_strategy.pipeline_parallel.probe import call_settings, probe_model
from goose_strategy.pipeline_parallel.profile import Profile
from tests.harness.models import FAMILIES, tiny_model

CPU = torch.device("cpu")
SHAPE = (3, 16)


def measured(model: nn.Module, *, timed: bool = False) -> Profile:
    return measure(model, probe_model(model), Sample(SHAPE, CPU, timed=timed))


def saved_by(model: nn.Module) -> int:
    """What the whole model keeps for its backward, by storages."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = 4 + torch.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE) % 90
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids.clone(), **call_settings(model)).loss
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_keep_what_the_whole_model_keeps(family: Any) -> None:
    model = tiny_model(family)
    profile = measured(model)
    parts = profile.before.saved + profile.after.saved
    parts += sum(layer.saved for layer in profile.layers)
    # What all layers take is kept once, as far as it is kept.
    assert 0 <= saved_by(model) - parts <= profile.shared
    assert profile.shared > 0
    # Hidden states of 32 channels in fp64.
    assert profile.hidden == SHAPE[0] * SHAPE[1] * 32 * 8
    assert profile.work() == (0, (0, 0, 0, 0), 0)


class Slow(nn.Module):
    """Takes its time, forward and backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Sleep.apply(self.inner(x))
        return out


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(0.03)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(0.05)
        return grad


def test_a_slow_layer_is_found() -> None:
    model = tiny_model("llama")
    model.model.layers[2].mlp.down_proj = Slow(model.model.layers[2].mlp.down_proj)
    profile = measured(model, timed=True)
    slow = profile.layers[2]
    assert 30e6 < slow.forward < 100e6
    assert 50e6 < slow.backward_input < 150e6
    # What both gradients together take beyond the first, not that once more.
    assert slow.backward_weight < 50e6
    assert profile.layers[0] == profile.layers[1] == profile.layers[3]
    assert 0 < profile.layers[0].time < slow.time - 60e6


def test_a_slow_head_and_a_slow_embedding_are_found() -> None:
    model = tiny_model("llama")
    model.lm_head = Slow(model.lm_head)
    profile = measured(model, timed=True)
    assert 30e6 < profile.after.forward < 100e6
    assert profile.after.backward_input > 50e6
    assert profile.before.time < profile.after.time
    other = tiny_model("gpt2")
    other.transformer.wpe = Slow(other.transformer.wpe)
    profile = measured(other, timed=True)
    assert 30e6 < profile.before.forward < 100e6
    assert profile.before.backward_input == 0
    assert profile.before.backward_weight > 50e6


def test_one_layer_of_each_kind_runs_and_the_model_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama", layers=6)
    model.model.layers[5].mlp.act_fn = nn.ReLU()
    model.eval()
    calls: list[bool] = []
    hooks: list[str] = []
    info = probe_model(model)
    kind = type(model.model.layers[0].self_attn)
    forward = kind.forward

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(self.training)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", counted)
    model.model.layers[0].register_forward_hook(lambda *_: hooks.append("layer"))
    model.lm_head.register_forward_hook(lambda *_: hooks.append("head"))
    before = {name: param.clone() for name, param in model.state_dict().items()}
    random = torch.get_rng_state()
    measure(model, info, Sample(SHAPE, CPU))
    # Two kinds: once for the memory, once to warm up, five times timed.
    assert calls == [True] * 14
    assert hooks == []
    assert not any(module.training for module in model.modules())
    assert all(param.grad is None for param in model.parameters())
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], param) for name, param in model.state_dict().items())


def test_frozen_weights_cost_no_gradients() -> None:
    model = tiny_model("llama").requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    profile = measured(model, timed=True)
    assert profile.before.backward_weight == 0
    assert profile.layers[0].backward_input > 0
    # Nothing but the time of taking the same gradient twice.
    assert profile.layers[0].backward_weight < profile.layers[0].backward_input


def test_a_part_that_does_not_run_is_refused() -> None:
    model = tiny_model("gpt2", max_position_embeddings=12)
    with pytest.raises(
        PlanError, match=r"could not be measured on 3 x 16 tokens on cpu.*example_s"
    ):
        measured(model)
