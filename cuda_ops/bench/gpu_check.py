"""One run on one card, at most two minutes: ``python -m cuda_ops.bench.gpu_check``.

What can be checked without a card is checked by the tests: bits under an emulator, machine code,
loading, the order of copies. This script checks the rest, and prints Markdown tables for
``README.md`` beside it: bits of the card, streams, CUDA graphs, bandwidth, a step of four ranks
that share the card, and a step of a Llama of 1.2 billion parameters. The last two are programs of
goose_strategy, run apart. ``--dry-run`` goes the same way on a CPU.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
from collections.abc import Sequence
from functools import partial

import torch

from cuda_ops.bench.cases import Run, Variant, differences, train, variants
from cuda_ops.bench.order import check_graph, check_streams
from cuda_ops.bench.parts import Clock, Outcome, Part, command, run_parts
from cuda_ops.bench.place import Place, find_place
from cuda_ops.bench.speed import SHOWN, copy_bandwidth, time_torch, time_variants
from cuda_ops.reference.calls import Reference
from cuda_ops.state import Algorithm

_ALL_S = 118.0
_SHARED_CARD = "goose_strategy.bench.shared_card"
_ONE_CARD = "goose_strategy.bench.one_card"


def check_bits(place: Place, clock: Clock) -> Outcome:
    """Step every variant, whole and in shards, beside the other library."""
    cases = [
        (variant, shards, numel)
        for shards, numel in ((1, 2048 * 3 + 448), (4, 2048 * 8))
        for variant in variants()
    ]
    wrong, done = [], 0
    for variant, shards, numel in cases:
        if clock.left <= 0:
            break
        here = Run(shards=shards, numel=numel, device=str(place.device))
        there = Run(shards=1, numel=numel)
        found = differences(
            train(place.compiled, variant, here), train(place.other, variant, there)
        )
        wrong += [f"  {variant} in {shards} shards: {', '.join(found)}"] if found else []
        done += 1
    cut = f", cut after {clock.passed:.0f} s: {len(cases) - done} left out"
    line = f"bits as on the CPU: {done - len(wrong)} of {done} runs"
    return [line + (cut if done < len(cases) else ""), *wrong], bool(wrong)


def check_reference(place: Place, clock: Clock) -> Outcome:
    """Step with pure torch on the device, the fallback without a library."""
    wrong, done = [], 0
    for _, main, first, second, grad in SHOWN:
        if clock.left <= 0:
            break
        variant = Variant(Algorithm.ADAM, main, first, second, grad)
        here = train(Reference(), variant, device=str(place.device))
        found = differences(here, train(place.compiled, variant, device=str(place.device)))
        wrong += [f"  {variant}: {', '.join(found)}"] if found else []
        done += 1
    cut = f", cut after {clock.passed:.0f} s" if done < len(SHOWN) else ""
    return [f"pure torch beside the library: {done - len(wrong)} of {done}{cut}", *wrong], bool(
        wrong
    )


def check_order(place: Place, _clock: Clock) -> Outcome:
    """Check streams and CUDA graphs."""
    streams, graph = check_streams(place), check_graph(place)
    return [*streams[0], *graph[0]], streams[1] or graph[1]


def measure_speed(place: Place, clock: Clock) -> Outcome:
    """Time the steps beside a copy and beside torch's."""
    copy = copy_bandwidth(place)
    lines = [f"copy: {copy / 1e12:.3f} TB/s", "", *time_variants(place, copy), ""]
    if clock.left <= 0:
        return [*lines, f"torch's steps: not run, cut after {clock.passed:.0f} s"], False
    return [*lines, *time_torch(place)], False


def parts_of(place: Place) -> list[Part]:
    """Return the parts of the check, with their seconds."""
    flags = ["--dry-run"] if place.dry else []
    # Nobody pays for a CPU by the second, and it may have other things to do.
    scale = 10 if place.dry else 1
    return [
        Part("bits", 30 * scale, partial(check_bits, place)),
        Part("pure torch", 5 * scale, partial(check_reference, place)),
        Part("order", 5 * scale, partial(check_order, place)),
        Part("speed", 15 * scale, partial(measure_speed, place)),
        Part("four ranks on the card", 35 * scale, partial(_apart, place, _SHARED_CARD, flags)),
        Part("a Llama of 1.2 billion", 30 * scale, partial(_apart, place, _ONE_CARD, flags)),
    ]


def _apart(place: Place, module: str, flags: Sequence[str], clock: Clock) -> Outcome:
    """Run a program after the memory of the timed shards was given back."""
    if not place.dry:
        torch.cuda.empty_cache()
    return command(module, flags, clock)


def heading(place: Place) -> str:
    """Return card, date and versions."""
    name = platform.processor() or platform.machine()
    if not place.dry:
        name = torch.cuda.get_device_name(place.device)
    today = datetime.datetime.now(tz=datetime.UTC).date()
    built = place.compiled.built_for
    return (
        f"{name}, {today}, torch {torch.__version__}, library for {built}, {place.numel} elements"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; returns 1 if any bit differs or a part fails."""
    parser = argparse.ArgumentParser(prog="python -m cuda_ops.bench.gpu_check", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with small shards")
    options = parser.parse_args(arguments)
    clock = Clock(_ALL_S * (10 if options.dry_run else 1))
    try:
        place = find_place(dry=options.dry_run)
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return 2

    def say(lines: Sequence[str]) -> None:
        sys.stdout.write("\n".join(lines) + "\n\n")
        sys.stdout.flush()

    say([heading(place)])
    bad = run_parts(parts_of(place), clock, say)
    say([f"{clock.passed:.0f} s in all"])
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
