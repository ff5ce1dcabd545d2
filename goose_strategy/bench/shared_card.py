"""Four ranks on one card, beside one process on it: ``python -m goose_strategy.bench.shared_card``.

A machine with one card cannot run NCCL between ranks, but it can run everything else that several
cards would: streams and events, late copies, kernels of four processes at once. Here a small Llama
is trained by four ranks whose tensors go through the host (``comm.staged``), in two layouts, and by
one process on the same card. ``--dry-run`` does the same on a CPU, where nothing is staged.

Ends with 1 if a number is out of bounds, or two runs differ in any bit.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from goose_strategy.comm.collectives import all_gather_objects
from goose_strategy.mesh.lane import LANES
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.strategies.fabric import Goose3DStrategy

RANKS = 4
STEPS = 3
LAYOUTS = (("tp2 x pp2", 2, 2), ("dp2 x pp2", 1, 2))
_ROWS = 8
_MICROBATCHES = 4
_CARD = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 8192}
_DRY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 128}

BOUNDS = {"loss": 1e-5, "norm": 1e-4, "parameters": 1e-4}
"""Largest relative differences from one process, in fp32: sums are taken in another order."""


@dataclass
class Training:
    """What one training saw.

    Attributes:
        losses: Of every step.
        norms: Of every step.
        parameters: After the last one, by name, on the CPU.
        step_ms: Wall time of every step.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    step_ms: list[float] = field(default_factory=list)

    def differs(self, other: Training) -> bool:
        """Whether any bit of the numbers and parameters is another."""
        if (self.losses, self.norms) != (other.losses, other.norms):
            return True
        mine, theirs = self.parameters, other.parameters
        return mine.keys() != theirs.keys() or any(
            not torch.equal(tensor, theirs[name]) for name, tensor in mine.items()
        )


def build(*, dry: bool) -> nn.Module:
    """Build the model on the CPU; the same weights in every process."""
    sizes: dict[str, Any] = _DRY if dry else _CARD
    settings = sizes | {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "use_cache": False,
        "tie_word_embeddings": True,
        # The fused kernels add up gradients in the order in which blocks happen to finish.
        "attn_implementation": "eager",
    }
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**settings))


def batches(*, dry: bool) -> list[dict[str, Tensor]]:
    """Return the global batches of all steps, with some labels that do not count."""
    vocabulary, columns = (_DRY if dry else _CARD)["vocab_size"], 16 if dry else 256
    generator = torch.Generator().manual_seed(2)
    made = []
    for _ in range(STEPS):
        ids = torch.randint(0, vocabulary, (_ROWS, columns), generator=generator)
        labels = ids.clone()
        labels[torch.rand(ids.shape, generator=generator) < 0.2] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW, with an eps that keeps tiny gradients from becoming signs."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


def train_alone(device: torch.device, *, dry: bool) -> Training:
    """Train in this process alone, with torch only."""
    model = build(dry=dry).to(device)
    optimizer, seen = optimizer_of(model), Training()
    for batch in batches(dry=dry):
        loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
        loss.backward()
        seen.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        seen.losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    seen.parameters = {name: p.detach().cpu() for name, p in model.named_parameters()}
    return seen


def train_shared(fabric: Fabric, *, dry: bool) -> tuple[Training, dict[str, Any]]:
    """Train with all ranks.

    Returns:
        What this rank saw, and which part of each whole parameter its own are (`ShardSpec`).
    """
    door: Any = fabric.strategy
    model: Any
    whole = build(dry=dry)
    model, optimizer = fabric.setup(whole, optimizer_of(whole))
    rank, size = door.data_parallel_rank, door.data_parallel_size
    seen = Training()
    for batch in batches(dry=dry):
        started = time.perf_counter()
        rows = {k: v.chunk(size)[rank].to(fabric.device) for k, v in batch.items()}
        loss = model(**rows).loss
        fabric.backward(loss)
        norm: Any = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        # Reading waits for the card: the step is over on this rank.
        seen.losses.append(float(loss.detach()))
        seen.norms.append(float(norm.detach()))
        door.synchronize_parameters()
        if fabric.device.type == "cuda":
            torch.cuda.synchronize(fabric.device)
        seen.step_ms.append(1e3 * (time.perf_counter() - started))
    handle = door.runtime.model_of(whole)
    seen.parameters = {name: p.detach().cpu().clone() for name, p in whole.named_parameters()}
    return seen, {name: handle.surgery.specs[name] for name in seen.parameters}


def errors(seen: Training, specs: dict[str, Any], alone: Training) -> dict[str, float]:
    """Return the largest relative differences of this rank from one process, by kind."""
    found = {
        "loss": _worst(seen.losses, alone.losses),
        "norm": _worst(seen.norms, alone.norms),
        "parameters": 0.0,
    }
    for name, tensor in seen.parameters.items():
        spec = specs[name]
        whole = alone.parameters[spec.tie if spec.tie in alone.parameters else name]
        for box, piece in spec.pieces(tensor):
            place = tuple(slice(at, at + n) for at, n in zip(*box, strict=True))
            error = float((piece - whole[place]).norm() / whole[place].norm().clamp(min=1e-12))
            found["parameters"] = max(found["parameters"], error)
    return found


def _worst(mine: Sequence[float], theirs: Sequence[float]) -> float:
    pairs = zip(mine, theirs, strict=True)
    return max(abs(one - other) / max(abs(other), 1e-12) for one, other in pairs)


def row_of(name: str, ms: float, worst: dict[str, float], *, repeats: bool) -> tuple[str, bool]:
    """Return the line of a layout, and whether anything in it is wrong.

    Args:
        name: Of the layout.
        ms: Wall time of a step.
        worst: Largest relative difference of all ranks by kind; NaN counts as wrong.
        repeats: Whether two runs gave the same bits.
    """
    cells = [f"{value:.1e}" for value in worst.values()]
    good = repeats and all(worst[kind] <= bound for kind, bound in BOUNDS.items())
    bits = "the same bits" if repeats else "OTHER BITS"
    return f"| {name} | {ms:.0f} | {' | '.join(cells)} | {bits} |", not good


def measure(layout: tuple[str, int, int], alone: Training | None, *, dry: bool) -> tuple[Any, ...]:
    """Train twice in one layout, and compare.

    Returns:
        The training of one process, the line of the layout, whether it is wrong, and how many
        groups went through the host.
    """
    name, tp, pp = layout
    device = torch.device("cpu") if dry else torch.device("cuda", 0)
    strategy = Goose3DStrategy(
        tp,
        pp,
        pipeline=PipelineConfig(schedule="1F1B", num_microbatches=_MICROBATCHES),
        parallel_devices=[device] * RANKS,
        process_group_backend="gloo",
    )
    fabric = Fabric(accelerator=device.type, devices=RANKS if dry else 1, strategy=strategy)
    fabric.launch()
    try:
        alone = alone or train_alone(device, dry=dry)
        staged = len(LANES)
        (first, specs), (second, _) = (train_shared(fabric, dry=dry) for _ in range(2))
        mine = (errors(first, specs, alone), not first.differs(second), min(second.step_ms))
        every = all_gather_objects(mine, strategy.runtime.mesh.control)
    finally:
        strategy.runtime.stop()
    # Not max(): it would drop a NaN that comes second.
    worst = {
        kind: float(torch.tensor([found[kind] for found, _, _ in every]).max()) for kind in BOUNDS
    }
    ms = max(rank_ms for _, _, rank_ms in every)
    line, bad = row_of(name, ms, worst, repeats=all(repeats for _, repeats, _ in every))
    return alone, line, bad, staged


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both layouts on every rank; the first one prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with a tiny model")
    dry = parser.parse_args(arguments).dry_run
    if not dry and not torch.cuda.is_available():
        sys.stdout.write("torch sees no card; --dry-run goes without one\n")
        return 3
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    first_rank = int(os.environ.get("LOCAL_RANK", "0")) == 0

    def say(line: str) -> None:
        if first_rank:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    say("| 4 ranks | ms per step | loss off by | norm | parameters | two runs |")
    say("|---|---|---|---|---|---|")
    alone, bad, staged = None, False, 0
    for layout in LAYOUTS:
        alone, line, wrong, staged = measure(layout, alone, dry=dry)
        bad |= wrong
        say(line)
    say(f"groups through the host: {staged}; bounds, relative to one process: {BOUNDS}")
    if not dry and staged == 0:
        say("NOTHING went through the host")
        bad = True
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
