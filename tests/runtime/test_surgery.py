"""Which models of a module are cut, what is left of it, and that it is put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaModel

from goose_strategy.errors import PlanError
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.runtime.settings import RuntimeConfig
from goose_strategy.runtime.surgery import PLACEHOLDER, operate
from tests.harness.models import tiny_config, tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.runtime.start import mesh_of, message


class Distillation(nn.Module):
    """A frozen teacher beside the student, and a frozen head of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = tiny_model("llama", layers=2, seed=1).requires_grad_(False)
        self.student = tiny_model("llama")
        self.probe = nn.Linear(2, 2).requires_grad_(False)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = tiny_model("llama", layers=2)
        self.second = tiny_model("qwen2", layers=2)


def cut(module: nn.Module, mesh: Any, **sizes: int) -> Any:
    return operate(module, mesh, RuntimeConfig(**sizes), count=lambda: None)


def _chosen(ctx: Context) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with mesh_of(pp=2) as mesh:
        module = Distillation()
        surgery = cut(module, mesh, pp=2)
        found["student"] = [name for name, _ in surgery.models]
        found["layers"] = len(list(module.teacher.parameters())) > 0
        found["names"] = sorted(surgery.specs)
        found["stage"] = [(stage.index, list(stage.layers)) for stage in surgery.part.stages]
        found["trains"] = surgery.trains
        found["dtype"] = surgery.loss_dtype
        frozen = tiny_model("llama").requires_grad_(False)
        found["frozen"] = cut(frozen, mesh, pp=2).trains
        found["two"] = message(lambda: cut(Two(), mesh, pp=2), PlanError)
        found["none"] = message(
            lambda: cut(nn.ModuleList([LlamaModel(tiny_config("llama"))]), mesh, pp=2), PlanError
        )
    with mesh_of(tp=2) as mesh:
        found["both"] = [name for name, _ in cut(Two(), mesh, tp=2).models]
        narrow = cut(tiny_model("llama", dtype=torch.bfloat16), mesh, tp=2)
        found["narrow"] = (narrow.loss_dtype, narrow.part, narrow.head is not None)
    with mesh_of(dp=2) as mesh:
        found["any"] = (cut(nn.Linear(1, 1), mesh).models, cut(nn.Linear(1, 1), mesh).head)
    return found


def test_the_trainable_models_are_cut() -> None:
    for rank, found in enumerate(run_ranks(_chosen, 2)):
        assert found["student"] == ["student"]
        assert found["layers"]
        assert found["stage"] == [(rank, [0, 1] if rank == 0 else [2, 3])]
        student = [name for name in found["names"] if name.startswith("student.model.layers.")]
        assert {int(name.split(".")[3]) for name in student} == set(found["stage"][0][1])
        assert "probe.weight" in found["names"]
        assert found["trains"] is True
        assert found["frozen"] is False
        assert found["dtype"] == torch.float64
        assert found["narrow"] == (torch.float32, None, True)
        assert found["both"] == ["first", "second"]
        assert found["any"] == ([], None)
        assert (
            "2 are trainable: first (LlamaForCausalLM), second (Qwen2ForCausalLM)" in found["two"]
        )
        assert "holds ['LlamaModel']" in found["none"]


def _placeholders(ctx: Context) -> dict[str, Any]:
    with mesh_of(pp=2) as mesh:
        model = tiny_model("llama")
        surgery = cut(model, mesh, pp=2)
        before = [name for name, _ in model.named_parameters()]
        with surgery.placeholders():
            head = [tuple(p.shape) for p in model.lm_head.parameters()]
            norm = [tuple(p.shape) for p in model.model.norm.parameters()]
        after = [name for name, _ in model.named_parameters()]
        with pytest.raises(ZeroDivisionError), surgery.placeholders():
            raise ZeroDivisionError
        clean = [name for name, _ in model.named_parameters()]
    return {"head": head, "norm": norm, "same": before == after == clean, "names": before}


def test_an_emptied_module_has_a_parameter_while_optimizers_are_made() -> None:
    first, last = run_ranks(_placeholders, 2)
    assert first["head"] == [(0,)]
    assert first["norm"] == [(0,)]
    assert last["head"] == [(97, 32)]
    assert first["same"] and last["same"]
    assert not any(PLACEHOLDER in name for name in first["names"] + last["names"])


def _undone(ctx: Context) -> dict[str, Any]:
    whole, model = tiny_model("llama"), tiny_model("llama")
    before = model.loss_function
    with mesh_of(tp=2) as mesh:
        surgery = cut(model, mesh, tp=2)
        during = model.loss_function
        local = tuple(model.lm_head.weight.shape)
        surgery.close()
        surgery.close()
    expected = dict(whole.named_parameters())
    return {
        "local": local,
        "loss": (during is not before, model.loss_function is before),
        "values": all(torch.equal(p, expected[name]) for name, p in model.named_parameters()),
        "classes": [type(m) for m in model.modules()] == [type(m) for m in whole.modules()],
    }


def test_closing_puts_the_model_back() -> None:
    for rank, found in enumerate(run_ranks(_undone, 2)):
        assert found["local"] == ((49, 32) if rank == 0 else (48, 32))
        assert found["loss"] == (True, True)
        assert found["values"]
        assert found["classes"]


def _refused_before_anything(ctx: Context) -> tuple[str, bool]:
    """tp that does not divide the heads is found before the pipeline frees layers."""
    model = tiny_model("llama", heads=3, kv_heads=3)
    names = [name for name, _ in model.named_parameters()]
    with mesh_of(tp=2, pp=2) as mesh:
        text = message(lambda: cut(model, mesh, tp=2, pp=2), PlanError)
    return text, names == [name for name, _ in model.named_parameters()]


def test_a_refusal_leaves_the_model_whole() -> None:
    for text, same in run_ranks(_refused_before_anything, 4):
        assert "tp=2 does not divide num_attention_heads=3" in text
        assert same


def _random_layers(ctx: Context) -> tuple[str, bool]:
    model = tiny_model("opt", layerdrop=0.5)
    before = sorted(name for name, _ in model.named_parameters())
    with mesh_of(pp=2) as mesh:
        text = message(lambda: cut(model, mesh, pp=2), PlanError)
    return text, before == sorted(name for name, _ in model.named_parameters())


def test_layers_that_are_skipped_at_random_cannot_be_cut_into_stages() -> None:
    for text, unchanged in run_ranks(_random_layers, 2):
        assert "pp=2 cannot cut OPTForCausalLM" in text
        assert "model.decoder.layerdrop=0.5" in text
        assert unchanged


def _recomputed(ctx: Context) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def patched(module: nn.Module) -> list[str]:
        return [name for name, one in module.named_modules() if "forward" in vars(one)]

    with mesh_of(pp=2) as mesh:
        for recompute in ("layer", ["model.layers.*.mlp"], "full"):
            module = Distillation()
            config = RuntimeConfig(pp=2, pipeline=PipelineConfig(recompute=recompute))  # type: ignore[arg-type]
            surgery = operate(module, mesh, config, count=lambda: None)
            before = set(patched(module))
            surgery.close()
            found[str(recompute)] = sorted(before - set(patched(module)))
    return found


def test_own_layers_of_the_trained_model_are_recomputed_until_it_is_closed() -> None:
    for rank, found in enumerate(run_ranks(_recomputed, 2)):
        layers = [f"student.model.layers.{number}" for number in (2 * rank, 2 * rank + 1)]
        assert found["layer"] == layers
        assert found["['model.layers.*.mlp']"] == [f"{layer}.mlp" for layer in layers]
        assert found["full"] == []
