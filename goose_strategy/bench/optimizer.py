"""``goose3d bench optimizer``: what a step of the optimizer takes per parameter, on one CPU thread.

The contenders are torch's fused AdamW and the usual bf16 recipe around it (gradients cast to fp32,
clipped, stepped, copied back), and the storages of ``cuda_ops``. The CPU time of the thread counts,
so that a busy machine disturbs less; contenders alternate, and the fastest of all rounds counts.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor
from typing_extensions import override

from cuda_ops import ops
from cuda_ops.layout import CHUNK, Main, Moment, Segment, Segments, Shard, chunks_of
from cuda_ops.load import examine
from cuda_ops.state import Algorithm, Hyper, StepState
from goose_strategy import validate
from goose_strategy.errors import ConfigError

_HYPER = {
    Hyper.LR: 1e-3,
    Hyper.BETA1: 0.9,
    Hyper.BETA2: 0.999,
    Hyper.EPS: 1e-8,
    Hyper.WEIGHT_DECAY: 0.01,
    Hyper.DECOUPLED: 1.0,
}

PRESETS = {
    "fp32": (Main.FP32, Moment.FP32, Moment.FP32),
    "default": (Main.SPLIT16, Moment.BF16, Moment.BF16),
    "compact": (Main.SPLIT8, Moment.BLOCK8, Moment.BLOCK8),
}


@dataclass(frozen=True)
class Report:
    """What was measured.

    Attributes:
        parameters: How many there were.
        backend: What ran ``cuda_ops``, in words.
        ns: Nanoseconds of CPU time per parameter, by contender; the fastest round.
    """

    parameters: int
    backend: str
    ns: dict[str, float]


class _Parser(argparse.ArgumentParser):
    @override
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see goose3d bench optimizer --help.")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    options = _Parser(
        prog="goose3d bench optimizer",
        description="Time a step of AdamW on one CPU thread: torch's fused kernel, the usual bf16 "
        "recipe around it, and the storages of cuda_ops.",
        epilog="The last line is JSON: times over torch's, the recipe's over ours, and compact's "
        "nanoseconds per parameter.",
    )
    add = options.add_argument
    add("--parameters", type=int, default=50_000_000, help="how many (default: %(default)s)")
    add("--rounds", type=int, default=5, help="of which the fastest counts (default: %(default)s)")
    add("--json", action="store_true", help="print the JSON line only, not the table")
    return options


def main(argv: Sequence[str]) -> int:
    """Run the benchmark.

    Args:
        argv: Options, see ``goose3d bench optimizer --help``.

    Returns:
        The exit code.

    Raises:
        ConfigError: If a setting is wrong.
    """
    options = parser().parse_args(argv)
    validate.at_least(CHUNK, parameters=options.parameters)
    validate.positive(rounds=options.rounds)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        report = measure(options.parameters // CHUNK * CHUNK, options.rounds)
    finally:
        torch.set_num_threads(threads)
    if not options.json:
        sys.stdout.write(table(report))
    sys.stdout.write(json.dumps(ratios(report)) + "\n")
    return 0


def measure(parameters: int, rounds: int) -> Report:
    """Time all contenders, in turn.

    Args:
        parameters: A multiple of 2048.
        rounds: How often each steps, after one step that does not count.
    """
    contenders = make(parameters)
    best = dict.fromkeys(contenders, math.inf)
    for number in range(rounds + 1):
        for name, step in contenders.items():
            started = time.thread_time()
            step()
            if number:
                best[name] = min(best[name], time.thread_time() - started)
    library, why = examine(torch.device("cpu"))
    backend = f"compiled for {library.built_for}" if library else f"pure torch: {why}"
    return Report(parameters, backend, {name: 1e9 * t / parameters for name, t in best.items()})


def make(parameters: int) -> dict[str, Callable[[], None]]:
    """Return a step of every contender. What is fp32 is shared, so that memory holds them all.

    Args:
        parameters: A multiple of 2048.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(parameters, generator=generator) * 0.02)
    grad = torch.randn(parameters, generator=generator) * 1e-3
    half_grad, half_weight = grad.bfloat16(), weight.detach().bfloat16()
    optimizer = torch.optim.AdamW([weight], lr=1e-3, fused=True)
    weight.grad = grad
    optimizer.step()
    held = optimizer.state[weight]

    def fused() -> None:
        weight.grad = grad
        optimizer.step()

    def recipe() -> None:
        weight.grad = half_grad.float()
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()
        half_weight.copy_(weight.detach())

    shared = Shard(
        main=Main.FP32,
        weight=None,
        rest=weight.detach(),
        exp_avg=held["exp_avg"],
        exp_avg_sq=held["exp_avg_sq"],
    )
    # fp32 main weights without a second copy of their upper halves: what the recipe's work needs.
    split = Shard(
        main=Main.SPLIT16,
        weight=half_weight.clone(),
        rest=torch.zeros(parameters, dtype=torch.int16),
        exp_avg=shared.exp_avg,
        exp_avg_sq=shared.exp_avg_sq,
    )
    contenders: dict[str, Callable[[], None]] = {"torch_fused": fused, "recipe": recipe}
    contenders["fp32"] = _Ours(shared, grad).step
    contenders["fp32_whole"] = _Ours(split, half_grad).step_with_norm
    for name in ("default", "compact"):
        main, first, second = PRESETS[name]
        shard = Shard.allocate(parameters, main=main, exp_avg=first, exp_avg_sq=second)
        ops.split_main(shard, weight.detach())
        contenders[name] = _Ours(shard, grad).step
    return contenders


class _Ours:
    """A shard with one group, stepped with clipping."""

    def __init__(self, shard: Shard, grad: Tensor) -> None:
        self._shard, self._grad = shard, grad
        numel = grad.numel()
        self._segments = Segments.build(numel, [Segment(start=0)])
        self._state = StepState.allocate(Algorithm.ADAM, 1)
        for column, value in _HYPER.items():
            self._state.hyper[0, column] = value
        self._partials = torch.empty(chunks_of(numel), dtype=torch.float64)
        self._norm2 = torch.ones(1, dtype=torch.float64)
        ops.prepare(self._state, self._norm2, max_norm=1.0)

    def step(self) -> None:
        ops.step(self._shard, self._grad, segments=self._segments, state=self._state)

    def step_with_norm(self) -> None:
        ops.sum_of_squares(self._grad, self._segments, out=self._partials)
        ops.reduce_partials(self._partials, out=self._norm2)
        ops.prepare(self._state, self._norm2, max_norm=1.0)
        self.step()


def ratios(report: Report) -> dict[str, float]:
    """Return the figures of the JSON line."""
    ns = report.ns
    return {
        "fp32_over_torch_fused": round(ns["fp32"] / ns["torch_fused"], 4),
        "default_over_torch_fused": round(ns["default"] / ns["torch_fused"], 4),
        "recipe_over_fp32": round(ns["recipe"] / ns["fp32_whole"], 4),
        "compact_ns": round(ns["compact"], 4),
    }


_WORDS = {
    "torch_fused": "torch AdamW(fused=True), fp32",
    "fp32": "fp32: weights and moments fp32",
    "default": "default: bf16 + 16-bit remainder, bf16 moments",
    "compact": "compact: bf16 + 8-bit remainder, 8-bit moments",
    "recipe": "bf16 gradient cast, clipped, fused step, copied to bf16",
    "fp32_whole": "the same by cuda_ops: norm, clip and step, bf16 + remainder",
}


def table(report: Report) -> str:
    """Return the report for people."""
    lines = [
        f"AdamW on {report.parameters} parameters, one thread; cuda_ops: {report.backend}",
        "",
        f"{'':62}    ns   / torch fused",
    ]
    for name, words in _WORDS.items():
        ns = report.ns[name]
        lines.append(f"{words:62}{ns:6.2f}{ns / report.ns['torch_fused']:16.2f}")
    lines += ["", "CPU time of the thread per parameter; the fastest round of each.", ""]
    return "\n".join(lines)
