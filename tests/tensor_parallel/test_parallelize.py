"""Every family, whole, against one process: losses and all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness.compare import assert_close_named, assert_close_numbers
from tests.harness.models import tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.tensor_parallel.helpers import (
    Step,
    awkward_batch,
    cut,
    one_step,
    reference,
    tp_mesh,
    whole,
)

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama tied": {"family": "llama", "tied": True},
    "llama biases": {"family": "llama", "attention_bias": True, "mlp_bias": True, "kv_heads": 4},
    "llama even vocabulary": {"family": "llama", "vocab": 96},
    "qwen2": {"family": "qwen2"},
    "mistral": {"family": "mistral", "sliding_window": 4},
    "qwen3": {"family": "qwen3"},
    "qwen3 tied": {"family": "qwen3", "tied": True, "attention_bias": True},
}


def _settings(case: str, tp: int, **more: Any) -> dict[str, Any]:
    """tp=4 needs four heads of each kind."""
    settings = {"layers": 2, **MODELS[case], **more}
    return settings if tp == 2 else {**settings, "heads": 8, "kv_heads": 4}


def _step(ctx: Context, settings: dict[str, Any]) -> Step:
    model = tiny_model(**settings)
    specs = cut(model, tp_mesh(ctx.world_size))
    return one_step(model, specs, awkward_batch(settings.get("vocab", 97)))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("case", MODELS)
def test_fp64_equals_one_process(case: str, tp: int) -> None:
    settings = _settings(case, tp)
    expected = reference(**settings)
    steps = run_ranks(_step, tp, settings)
    assert len({step.loss for step in steps}) == 1
    assert_close_numbers([steps[0].loss], expected.losses, 1e-10)
    assert_close_named(whole([s.gradients for s in steps]), expected.gradients[0], 1e-10)


@pytest.mark.parametrize("case", ["llama biases", "qwen3 tied"])
def test_fp32_is_close_to_fp64(case: str) -> None:
    settings = _settings(case, 2)
    expected = reference(**settings)
    steps = run_ranks(_step, 2, {**settings, "dtype": torch.float32})
    assert_close_numbers([steps[0].loss], expected.losses, 1e-6)
    assert_close_named(whole([s.gradients for s in steps]), expected.gradients[0], 1e-4)
