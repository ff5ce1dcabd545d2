"""The recipe that compares the optimizer's presets trains, validates and draws."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset

from tests.harness.worker import Context
from tests.harness.world import run_ranks

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
STEPS = 6


def _trained(ctx: Context) -> dict[str, Any]:
    sys.path.insert(0, str(RECIPES))
    presets, lm = importlib.import_module("presets"), importlib.import_module("lm")
    size = lm.LlamaSize(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    settings = presets.Settings(steps=STEPS, every=3, rows=4, validation_rows=8, size=size)
    generator = torch.Generator().manual_seed(0)
    # Sentences of two words: there is something to learn.
    ids = torch.randint(0, 2, (64, 16), generator=generator) * 9 + 5
    rows = Dataset.from_dict({"input_ids": ids.tolist()}).with_format("torch")
    text = SimpleNamespace(splits={"train": rows, "test": rows})
    narrow = {
        name: presets.train(settings, text, 1, "bf16-true", zero)
        for name, zero in presets.NARROW.items()
    }
    wide = {
        name: presets.train(settings, text, seed, "32-true", {})
        for name, seed in presets.FP32.items()
    }
    presets.draw({**wide, **narrow}, ctx.tmp_path / "presets.png")
    return {**wide, **narrow, "picture": (ctx.tmp_path / "presets.png").stat().st_size}


@pytest.mark.recipes
@pytest.mark.timeout(120)
def test_every_run_learns() -> None:
    pytest.importorskip("matplotlib")
    (curves,) = run_ranks(_trained, 1, isolated=True, timeout_s=100)
    assert curves.pop("picture") > 5000
    assert len(curves) == 7
    for name, curve in curves.items():
        assert [step for step, _ in curve] == [3, STEPS], name
        assert curve[-1][1] < curve[0][1] < 4.3, name
    ends = [curves[f"fp32, seed {seed}"][-1][1] for seed in (1, 2, 3)]
    assert len(set(ends)) == 3, "seeds differ"
