"""``goose3d bench step``: what a training step costs beside one process and Fabric's ddp.

Machines drift (clocks, neighbours), so the contenders alternate within one command, in turned
order, and each round gives its own ratio; the median of those is reported, not a ratio of two
numbers measured minutes apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from goose_strategy import validate
from goose_strategy.bench import workload, world
from goose_strategy.bench.job import CONTENDERS, Job, read_recipe, settings_of
from goose_strategy.errors import ConfigError

Rounds = list[dict[str, world.Run]]

_ROOMS = ("tp", "pp", "pipeline", "tensor", "zero")


def main(argv: Sequence[str]) -> int:
    """Run the benchmark.

    Args:
        argv: Options, see ``goose3d bench step --help``.

    Returns:
        The exit code.

    Raises:
        ConfigError: If a setting is wrong.
    """
    options = parser().parse_args(argv)
    validate.at_least(1, rounds=options.rounds)
    job = make_job(options)
    workload.prepare(job)
    report = summarise(measure(job, options.rounds, options.timeout), job)
    if not options.json:
        sys.stdout.write(table(report))
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    options = argparse.ArgumentParser(
        prog="goose3d bench step",
        description="Time a training step under goose3d, in one process and under Fabric's ddp.",
        epilog="Every contender trains the same global batches with the same weights. over_single "
        "and over_ddp are ratios of step times, medians over rounds: below 1, goose3d is faster.",
    )
    add = options.add_argument
    add(
        "--config",
        help="LightningCLI config with model:, data: and trainer:; default: a small Llama",
    )
    add("--tp", type=int, help="tensor parallel size (default: the config's, or 1)")
    add("--pp", type=int, help="pipeline parallel size (default: the config's, or 2)")
    add("--microbatches", type=int, help="num_microbatches (default: the config's)")
    add("--devices", type=int, help="processes of goose3d and of ddp (default: the config's, or 4)")
    add("--accelerator", help="cpu or cuda (default: the config's, or cpu)")
    add("--rounds", type=int, default=3, help="rounds of all contenders (default: %(default)s)")
    add("--steps", type=int, default=10, help="timed steps per run (default: %(default)s)")
    add("--warmup", type=int, default=3, help="steps before them (default: %(default)s)")
    add("--threads", type=int, default=1, help="threads per process (default: %(default)s)")
    add("--timeout", type=float, default=600, help="seconds per run (default: %(default)s)")
    add("--json", action="store_true", help="print the JSON line only, not the table")
    return options


def make_job(options: argparse.Namespace) -> Job:
    """Combine the recipe's settings with the options, which win.

    Raises:
        ConfigError: If the sizes do not multiply to the devices.
    """
    settings: dict[str, Any] = {"strategy": {"pp": 2}}
    if options.config:
        settings = settings_of(read_recipe(options.config))
    strategy = {key: value for key, value in settings.pop("strategy", {}).items() if key in _ROOMS}
    strategy |= {key: getattr(options, key) for key in ("tp", "pp") if getattr(options, key)}
    if options.microbatches:
        pipeline = strategy.get("pipeline") or {}
        strategy["pipeline"] = pipeline | {"num_microbatches": options.microbatches}
    given = {key: getattr(options, key) for key in ("devices", "accelerator")}
    settings |= {key: value for key, value in given.items() if value is not None}
    devices = settings.get("devices", 4)
    validate.whole(devices=devices)
    tp, pp = strategy.get("tp", 1), strategy.get("pp", 1)
    validate.at_least(1, tp=tp, pp=pp, devices=devices)
    if devices % (tp * pp):
        raise ConfigError(
            f"devices={devices} is no multiple of tp * pp = {tp} * {pp}; "
            f"choose devices as a multiple of {tp * pp}."
        )
    return Job(
        **settings | {"devices": devices},
        strategy=strategy,
        replicas=devices // (tp * pp),
        config=options.config and os.path.abspath(options.config),
        steps=options.steps,
        warmup=options.warmup,
        threads=options.threads,
    )


def measure(
    job: Job, rounds: int, timeout_s: float, *, run: Callable[..., world.Run] = world.run
) -> Rounds:
    """Run all contenders in every round, in the reverse order in every other one."""
    found: Rounds = []
    for index in range(rounds):
        order = CONTENDERS if index % 2 == 0 else CONTENDERS[::-1]
        found.append({})
        for name in order:
            devices = 1 if name == "single" else job.devices
            result = run(replace(job, contender=name, devices=devices), timeout_s=timeout_s)
            found[-1][name] = result
            sys.stderr.write(f"round {index + 1}/{rounds} {name}: {result.median_ms:.0f} ms/step\n")
    return found


def summarise(rounds: Rounds, job: Job) -> dict[str, Any]:
    """Return the report: per contender medians over rounds, and the ratios round by round."""
    report: dict[str, Any] = {
        name: _figures([found[name] for found in rounds], rounds[0]["single"])
        for name in CONTENDERS
    }
    for name in ("single", "ddp"):
        ratios = [found["goose3d"].median_ms / found[name].median_ms for found in rounds]
        report[f"over_{name}"] = statistics.median(ratios)
        report[f"over_{name}_rounds"] = ratios
    tp, pp = job.strategy.get("tp", 1), job.strategy.get("pp", 1)
    return report | {
        "layout": {"tp": tp, "pp": pp, "dp": job.replicas, "devices": job.devices},
        "tokens_per_step": rounds[0]["single"].tokens,
        "precision": job.precision,
        "threads": job.threads,
        "cores": os.cpu_count(),
    }


def _figures(runs: list[world.Run], single: world.Run) -> dict[str, float]:
    step_ms = statistics.median(run.median_ms for run in runs)
    return {
        "step_ms": step_ms,
        "step_ms_min": min(min(run.step_ms) for run in runs),
        "tokens_per_s": 1000 * runs[0].tokens / step_ms,
        "cpu_s": statistics.median(statistics.median(run.cpu_s) for run in runs),
        "peak_mib": statistics.median(run.peak_mib for run in runs),
        "loss_first": runs[0].losses[0],
        "loss_last": runs[0].losses[-1],
        "loss_off": max(
            abs(mine - other)
            for run in runs
            for mine, other in zip(run.losses, single.losses, strict=True)
        ),
    }


def table(report: dict[str, Any]) -> str:
    """Return the report for people."""
    layout = report["layout"]
    head = (
        "contender   ms/step     min   tokens/s   CPU s/step   peak MiB   loss first -> last   off"
    )
    lines = [
        f"goose3d tp{layout['tp']} pp{layout['pp']} dp{layout['dp']}, ddp on {layout['devices']} "
        f"processes, single on 1; {report['tokens_per_step']} tokens per step, "
        f"{report['threads']} thread(s) per process on {report['cores']} cores",
        "",
        head,
    ]
    for name in CONTENDERS:
        row = report[name]
        lines.append(
            f"{name:9} {row['step_ms']:9.1f} {row['step_ms_min']:7.1f} "
            f"{row['tokens_per_s']:10,.0f} {row['cpu_s']:12.3f} {row['peak_mib']:10.0f}   "
            f"{row['loss_first']:8.4f} -> {row['loss_last']:.4f} {row['loss_off']:9.0e}"
        )
    ratios = [
        f"over_{name} {report[f'over_{name}']:.2f} "
        f"(rounds {', '.join(f'{ratio:.2f}' for ratio in report[f'over_{name}_rounds'])})"
        for name in ("single", "ddp")
    ]
    notes = [
        "",
        *ratios,
        "off: largest difference of a loss to the single process's. CPU s: all ranks together. "
        "Peak: of the worst rank, its libraries included on the CPU.",
        "",
    ]
    return "\n".join(lines + notes)
