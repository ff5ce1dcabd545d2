"""A training step of a Llama of 1.2 billion parameters on one card, beside plain Fabric.

``python -m goose_strategy.bench.one_card`` builds Llama-3.2-1B's shape with random weights, and
trains it in ``bf16-true`` with goose3d and with Fabric alone (torch's fused AdamW): tokens per
second, TFLOP/s, share of the card's dense bf16 peak, peak memory. The two differ in what they keep:
goose3d sums gradients in fp32 and steps fp32 main weights, plain Fabric rounds both to bf16.

FLOPs are those of ``flops_per_token``: ``6 N + 12 L h d T`` per token, attention counted in full
and nothing that is computed again. ``--dry-run`` does the same with a tiny model on a CPU.

Ends with 1 if a loss is no number or the two disagree, with 3 if the card is too small.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from goose_strategy.strategies.fabric import Goose3DStrategy
from goose_strategy.strategies.progress import dense_peak, flops_per_token

LLAMA_1B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
_TINY = LLAMA_1B | {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128}
_DRY: dict[str, Any] = _TINY | {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}

# Weights, gradients and the optimizer's state under goose3d (12 bytes per parameter), with what the
# allocator and the libraries take; and what 1024 tokens need at once, most of it logits.
_FIXED_GIB = 17.0
_ROW_GIB = 3.5
_COLUMNS = 1024
_MOST_ROWS = 16

_WARM = 2
_STEPS = 10
_TIMED_S = 8.0
_AGREE = 0.02


@dataclass(frozen=True)
class Figures:
    """What one contender measured.

    Attributes:
        name: Of the contender.
        losses: Of every step.
        step_s: Wall time of the timed steps.
        peak_bytes: Peak of the memory of tensors; 0 on a CPU.
    """

    name: str
    losses: list[float]
    step_s: list[float]
    peak_bytes: int


def rows_for(free_bytes: int) -> int:
    """Return how many rows of 1024 tokens fit, a power of two up to 16; 0 if not even one does."""
    fit = int((free_bytes / 2**30 - _FIXED_GIB) // _ROW_GIB)
    return min(_MOST_ROWS, 1 << (fit.bit_length() - 1)) if fit > 0 else 0


def build(device: torch.device, *, dry: bool) -> LlamaForCausalLM:
    """Build the model on the device, in bf16 and with the same weights every time."""
    config = LlamaConfig(
        **(_DRY if dry else LLAMA_1B),
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def batch_of(rows: int, columns: int, device: torch.device, *, dry: bool) -> dict[str, Tensor]:
    """Return random tokens, whose labels are themselves."""
    generator = torch.Generator().manual_seed(2)
    vocabulary = (_DRY if dry else LLAMA_1B)["vocab_size"]
    ids = torch.randint(0, vocabulary, (rows, columns), generator=generator).to(device)
    return {"input_ids": ids, "labels": ids}


def train(name: str, rows: int, columns: int, *, dry: bool) -> Figures:
    """Train with one contender, ``"goose3d"`` or ``"plain Fabric"``.

    Returns:
        Its figures; the model is gone afterwards.
    """
    mine = name == "goose3d"
    fabric = Fabric(
        accelerator="cpu" if dry else "cuda",
        devices=1,
        precision="bf16-true",
        strategy=Goose3DStrategy() if mine else "auto",
    )
    fabric.launch()
    device = fabric.device
    cuda = device.type == "cuda"
    whole = build(device, dry=dry)
    # goose3d steps by itself whatever is handed over; beside it torch shall do its best.
    options: dict[str, Any] = {} if mine else {"fused": True}
    model, optimizer = fabric.setup(whole, torch.optim.AdamW(whole.parameters(), 1e-4, **options))
    batch = batch_of(rows, columns, device, dry=dry)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    losses, seconds = [], []
    for number in range(_WARM + _STEPS):
        started = time.perf_counter()
        loss = model(**batch).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if cuda:
            torch.cuda.synchronize(device)
        if number >= _WARM:
            seconds.append(time.perf_counter() - started)
        if sum(seconds) > _TIMED_S:
            break
    peak = torch.cuda.max_memory_allocated(device) if cuda else 0
    fabric.strategy.teardown()
    del fabric, model, optimizer, whole, batch, loss
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return Figures(name, losses, seconds, peak)


def table(every: Sequence[Figures], tokens: int, flops: float, peak: float | None) -> list[str]:
    """Return the lines about all contenders.

    Args:
        every: Their figures.
        tokens: Of one step.
        flops: Per token.
        peak: FLOP/s of the card; ``None`` where it is unknown.
    """
    lines = ["| | ms | tokens/s | TFLOP/s | MFU | peak GiB |", "|---|---|---|---|---|---|"]
    for one in every:
        step = statistics.median(one.step_s)
        share = "unknown" if peak is None else f"{100 * tokens / step * flops / peak:.1f} %"
        lines.append(
            f"| {one.name} | {1e3 * step:.1f} | {tokens / step:,.0f} "
            f"| {tokens / step * flops / 1e12:.1f} | {share} | {one.peak_bytes / 2**30:.2f} |"
        )
    return lines


def disagreement(every: Sequence[Figures]) -> str | None:
    """Return what is wrong with the losses: no numbers, not falling, or far from each other."""
    for one in every:
        if not all(map(math.isfinite, one.losses)):
            return f"{one.name}: the losses are no numbers: {one.losses}"
        if one.losses[-1] >= one.losses[0]:
            return f"{one.name}: the losses do not fall: {one.losses}"
    first = every[0].losses[0]
    for one in every[1:]:
        if abs(one.losses[0] - first) > _AGREE * abs(first):
            return f"the first losses differ: {every[0].name} {first}, {one.name} {one.losses[0]}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with both, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with a tiny model")
    dry = parser.parse_args(arguments).dry_run
    rows, columns, name = 2, 32, "CPU"
    if not dry:
        if not torch.cuda.is_available():
            sys.stdout.write("torch sees no card; --dry-run goes without one\n")
            return 3
        free, _ = torch.cuda.mem_get_info()
        rows, columns, name = rows_for(free), _COLUMNS, torch.cuda.get_device_name()
        if not rows:
            need = _FIXED_GIB + _ROW_GIB
            sys.stdout.write(f"{free / 2**30:.1f} GiB are free, {need:.1f} are needed\n")
            return 3
    with torch.device("meta"):
        shape = build(torch.device("meta"), dry=dry)
    flops = flops_per_token(shape, columns)
    count = sum(param.numel() for param in shape.parameters())
    every = [train(who, rows, columns, dry=dry) for who in ("goose3d", "plain Fabric")]
    wrong = disagreement(every)
    head = f"{count / 1e9:.3f} billion parameters, bf16-true, {rows} x {columns} tokens on {name}"
    tail = f"{flops / 1e9:.2f} GFLOP per token (6 N + 12 L h d T)"
    lines = [f"{head}, {tail}", "", *table(every, rows * columns, flops, dense_peak(name))]
    sys.stdout.write("\n".join([*lines, *([f"WRONG: {wrong}"] if wrong else [])]) + "\n")
    return int(wrong is not None)


if __name__ == "__main__":
    raise SystemExit(main())
