"""Does a small Llama learn as well where its optimizer keeps fewer bits?

    python recipes/presets.py                      # seven runs of 1200 steps, 15 minutes
    python recipes/presets.py --steps=60 --folder=runs/try

Three seeds in fp32 say how far apart runs are anyway; every preset is one run in bf16-true with the
first of these seeds. Losses go to FOLDER/losses.json, the picture to FOLDER/presets.png.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from lightning import Fabric
from lm import LlamaSize, StdlibText, build_llama
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from goose_strategy import Goose3DFabricStrategy, ZeroConfig

FP32 = {"fp32, seed 1": 1, "fp32, seed 2": 2, "fp32, seed 3": 3}
NARROW = {
    "preset=fp32": {"preset": "fp32"},
    "preset=default": {"preset": "default"},
    "preset=compact": {"preset": "compact"},
    "main=bf16": {"main": "bf16", "exp_avg": "bf16", "exp_avg_sq": "bf16"},
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line can change."""

    steps: int = 1200
    every: int = 100  # steps between two validations
    rows: int = 8
    validation_rows: int = 256
    sequence_length: int = 64
    learning_rate: float = 3e-3
    beta2: float = 0.999  # where second moments in bf16 freeze unless they are rounded by chance
    folder: str = "runs/presets"
    data_folder: str = "runs/quickstart/data"
    size: LlamaSize = field(
        default_factory=lambda: LlamaSize(
            hidden_size=96, intermediate_size=256, num_hidden_layers=3
        )
    )


def main(settings: Settings) -> None:
    text = StdlibText(
        settings.data_folder, settings.size.vocab_size, settings.sequence_length, settings.rows
    )
    text.prepare_data()
    text.setup("fit")
    curves = {}
    for name, seed in FP32.items():
        curves[name] = train(settings, text, seed, "32-true", {})
        print(f"{name:16s} {curves[name][-1][1]:.4f}", flush=True)
    for name, zero in NARROW.items():
        curves[name] = train(settings, text, 1, "bf16-true", zero)
        print(f"{name:16s} {curves[name][-1][1]:.4f}", flush=True)
    folder = Path(settings.folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "losses.json").write_text(json.dumps(curves, indent=1) + "\n")
    draw(curves, folder / "presets.png")
    ends = [curves[name][-1][1] for name in FP32]
    print(f"the seeds are up to {max(ends) - min(ends):.4f} apart")
    for name in NARROW:
        print(f"{name:16s} {curves[name][-1][1] - ends[0]:+.4f} from fp32 with the same seed")


def train(
    settings: Settings, text: StdlibText, seed: int, precision: Any, zero: dict[str, Any]
) -> list[tuple[int, float]]:
    """Train from a seed; return steps and validation losses."""
    strategy = Goose3DFabricStrategy(zero=ZeroConfig(**zero))
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy, precision=precision)
    fabric.launch()
    fabric.seed_everything(seed, verbose=False)
    model = build_llama(settings.size)
    optimizer = AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, settings.beta2))
    schedule = LambdaLR(optimizer, lambda step: rate(step, settings.steps))
    model, optimizer = fabric.setup(model, optimizer)
    order = torch.randperm(len(text.splits["train"]), generator=torch.Generator().manual_seed(seed))
    held_out = text.splits["test"]["input_ids"][: settings.validation_rows]
    curve = []
    for step in range(1, settings.steps + 1):
        place = (step - 1) * settings.rows % (len(order) - settings.rows)
        ids = text.splits["train"][order[place : place + settings.rows]]["input_ids"]
        fabric.backward(model(input_ids=ids, labels=ids).loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % settings.every == 0 or step == settings.steps:
            curve.append((step, validated(model, held_out, settings.rows)))
    strategy.teardown()
    return curve


def validated(model: Any, held_out: torch.Tensor, rows: int) -> float:
    """Return the mean loss over held-out rows."""
    with torch.no_grad():
        losses = [model(input_ids=ids, labels=ids).loss for ids in held_out.split(rows * 4)]
    return torch.stack(losses).double().mean().item()


def rate(step: int, steps: int) -> float:
    """Return the share of the learning rate: a short warm-up, then a cosine."""
    return min(1.0, (step + 1) / 30) * 0.5 * (1 + math.cos(math.pi * min(step / steps, 1.0)))


def draw(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Draw all curves, and their ends enlarged."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    whole, end = figure.subplots(1, 2, width_ratios=(3, 2))
    colours = dict(zip(NARROW, ("#4c78a8", "#f58518", "#e45756", "#72b7b2"), strict=True))
    for axes, tail in ((whole, 0), (end, -4)):
        seeds = [curves[name][tail:] for name in FP32]
        steps = [step for step, _ in seeds[0]]
        losses = list(zip(*([loss for _, loss in curve] for curve in seeds), strict=True))
        low, high = [min(at) for at in losses], [max(at) for at in losses]
        axes.fill_between(steps, low, high, color="#dddddd", label="three seeds in fp32")
        for name, colour in colours.items():
            points = curves[name][tail:]
            axes.plot([s for s, _ in points], [v for _, v in points], color=colour, label=name)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
    whole.set_ylabel("validation loss")
    whole.legend(frameon=False)
    figure.savefig(path, format="png", pil_kwargs={"optimize": True})


if __name__ == "__main__":
    main(auto_cli(Settings, as_positional=False))
