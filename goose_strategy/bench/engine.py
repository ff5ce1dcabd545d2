"""``goose3d bench engine``: what a pipelined step takes beyond its schedule's bound.

The stages sleep instead of computing, so that ranks which share cores do not slow each other down:
what is left above the bound is messages, wake-ups and the engine. torch's own runtime runs the same
stages in the same processes, a step of one after a step of the other.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from typing_extensions import override

from goose_strategy import validate
from goose_strategy.bench import world
from goose_strategy.bench.engine_worker import CASES
from goose_strategy.bench.job import EngineJob
from goose_strategy.errors import ConfigError
from goose_strategy.pipeline_parallel.program import chunks_of, program
from goose_strategy.pipeline_parallel.tables.simulate import Costs, simulate

RUNTIMES = ("ours", "torch")


@dataclass(frozen=True)
class Timing:
    """One runtime's steps of one case.

    Attributes:
        wall_ms: The fastest step, from the first rank's start to the last one's end.
        cpu_ms: CPU time per stage and microbatch, all threads, of the step that used the least.
    """

    wall_ms: float
    cpu_ms: float


@dataclass(frozen=True)
class Line:
    """One case on one number of ranks.

    Attributes:
        case: Its name.
        ranks: Number of ranks.
        per_rank: Stages of every rank.
        bound_ms: The step's time by the simulator, with messages that take no time.
        ours: What the engine took.
        torch: What torch's runtime took; ``None`` where it has no such schedule.
    """

    case: str
    ranks: int
    per_rank: int
    bound_ms: float
    ours: Timing
    torch: Timing | None

    @property
    def same_model_ms(self) -> float:
        """What the step would take if the sleep of one stage were that of the whole rank."""
        return self.ours.wall_ms / self.per_rank

    @property
    def ratio(self) -> float:
        """The engine's time over the bound."""
        return self.ours.wall_ms / self.bound_ms


@dataclass(frozen=True)
class Report:
    """What was measured.

    Attributes:
        lines: Per number of ranks, all cases.
        shared_memory: Whether the engine sent through shared memory.
        load: The machine's load (mean of a minute) before and after each number of ranks.
    """

    lines: list[Line]
    shared_memory: bool
    load: list[float]


def main(argv: Sequence[str]) -> int:
    """Run the benchmark.

    Args:
        argv: Options, see ``goose3d bench engine --help``.

    Returns:
        The exit code.

    Raises:
        ConfigError: If a setting is wrong.
    """
    options = parser().parse_args(argv)
    jobs = make_jobs(options)
    report = measure(jobs, options.timeout)
    if not options.json:
        sys.stdout.write(table(report, jobs[0]))
    sys.stdout.write(json.dumps(ratios(report)) + "\n")
    return 0


class _Parser(argparse.ArgumentParser):
    @override
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see goose3d bench engine --help.")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    options = _Parser(
        prog="goose3d bench engine",
        description="Time pipelined steps whose stages sleep (30 ms forward, 60 ms backward), "
        "under goose3d's engine and under torch.distributed.pipelining.",
        epilog="The ratios are wall time over the bound of the schedule: 1 is perfect. The last "
        "line is JSON with those of goose3d, by schedule and number of ranks.",
    )
    add = options.add_argument
    add(
        "--ranks",
        type=int,
        nargs="+",
        default=[2, 4],
        help="numbers of ranks, one process each (default: 2 4)",
    )
    add("--microbatches", type=int, default=8, help="per step (default: %(default)s)")
    add("--steps", type=int, default=5, help="timed steps, of which the fastest counts (5)")
    add("--warmup", type=int, default=1, help="steps before them (default: %(default)s)")
    add("--no-shared-memory", action="store_true", help="let goose3d send through gloo, as torch")
    add("--timeout", type=float, default=600, help="seconds per number of ranks (600)")
    add("--json", action="store_true", help="print the JSON line only, not the table")
    return options


def make_jobs(options: argparse.Namespace) -> list[EngineJob]:
    """Return one job per number of ranks.

    Raises:
        ConfigError: If a setting is wrong.
    """
    validate.positive(timeout=options.timeout)
    return [
        EngineJob(
            devices=ranks,
            microbatches=options.microbatches,
            steps=options.steps,
            warmup=options.warmup,
            shared_memory=not options.no_shared_memory,
        )
        for ranks in dict.fromkeys(options.ranks)
    ]


def measure(
    jobs: Sequence[EngineJob],
    timeout_s: float,
    *,
    run: Callable[..., list[dict[str, Any]]] = world.run_engine,
) -> Report:
    """Run all jobs, one after another."""
    lines: list[Line] = []
    load = [os.getloadavg()[0]]
    shared = True
    for job in jobs:
        ranks = run(job, timeout_s=timeout_s)
        lines += [read_line(name, ranks, job) for name in CASES]
        shared &= all(rank["shared_memory"] for rank in ranks)
        load.append(os.getloadavg()[0])
        sys.stderr.write(f"{job.devices} ranks measured at load {load[-1]:.1f}\n")
    return Report(lines, shared, load)


def read_line(name: str, ranks: Sequence[dict[str, Any]], job: EngineJob) -> Line:
    """Merge what the ranks measured of one case."""
    found = [rank["cases"][name] for rank in ranks]
    timings = {
        runtime: _timing([one[runtime] for one in found], job.microbatches)
        for runtime in RUNTIMES
        if runtime in found[0]
    }
    return Line(
        name,
        job.devices,
        chunks_of(CASES[name].schedule, job.devices).per_rank,
        bound_ms(name, job),
        timings["ours"],
        timings.get("torch"),
    )


def _timing(ranks: Sequence[Sequence[dict[str, float]]], microbatches: int) -> Timing:
    steps = list(zip(*ranks, strict=True))
    walls = [max(r["end"] for r in step) - min(r["start"] for r in step) for step in steps]
    cpus = [sum(rank["cpu"] for rank in step) / len(step) for step in steps]
    return Timing(1000 * min(walls), 1000 * min(cpus) / microbatches)


def bound_ms(name: str, job: EngineJob) -> float:
    """Return the least time of a step, in milliseconds.

    For GPipe and 1F1B that is ``(microbatches + stages - 1) * (F + B)``.
    """
    case = CASES[name]
    chunks = chunks_of(case.schedule, job.devices)
    chosen = program(case.schedule, chunks, job.microbatches, recompute=case.recompute)
    sleep = 1000 * job.forward_s
    costs = Costs.even(chunks.stages, forward=sleep, backward_input=sleep, backward_weight=sleep)
    return simulate(chosen, costs, chunks).makespan


def ratios(report: Report) -> dict[str, dict[str, float]]:
    """Return the engine's wall time over the bound, as ``{case: {"p2": ratio}}``."""
    found: dict[str, dict[str, float]] = {}
    for line in report.lines:
        found.setdefault(line.case, {})[f"p{line.ranks}"] = round(line.ratio, 4)
    return found


def table(report: Report, job: EngineJob) -> str:
    """Return the report for people.

    Args:
        report: What was measured.
        job: Any of its jobs.
    """
    sent = "shared memory" if report.shared_memory else "gloo"
    sleep = 1000 * job.forward_s
    load = ", ".join(f"{value:.1f}" for value in report.load)
    lines = [
        f"Stages that sleep {sleep:g} ms in the forward and {2 * sleep:g} ms in the backward, "
        f"{job.microbatches} microbatches, fastest of {job.steps} steps after {job.warmup}; "
        f"ours sends through {sent}, torch's runtime through gloo; load {load} on "
        f"{os.cpu_count()} cores",
        "",
        "                              wall ms   bound     wall / bound   same model  CPU ms, mb",
        "schedule               p  v      ours      ms     ours   torch      ms     ours  torch",
    ]
    for line in report.lines:
        other, bound = line.torch, line.bound_ms
        ratio = f"{other.wall_ms / bound:7.3f}" if other else "      -"
        cpu = f"{other.cpu_ms:6.2f}" if other else "     -"
        lines.append(
            f"{line.case:21} {line.ranks:2} {line.per_rank:2} {line.ours.wall_ms:9.1f} "
            f"{bound:7.0f} {line.ratio:8.3f} {ratio} {line.same_model_ms:7.0f} "
            f"{line.ours.cpu_ms:8.2f} {cpu}"
        )
    notes = [
        "",
        "p: ranks. v: stages per rank, each with a sleep of its own. wall: until the last rank "
        "ends. bound: the schedule with messages that take no time. same model: the wall time over "
        "v, as if the stages of a rank were parts of one. CPU ms, mb: per rank and microbatch, all "
        "threads, the sleeping layers' few operations included.",
        "",
    ]
    return "\n".join(lines + notes)
