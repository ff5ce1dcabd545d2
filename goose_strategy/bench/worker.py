"""One rank of a benchmark run: ``python -m goose_strategy.bench.worker RESULT < job.json``.

The process group's coordinates come from the environment, as under ``torchrun``. A run is always a
fresh set of processes, so no contender profits from memory or caches that another one warmed.
"""

from __future__ import annotations

import inspect
import json
import os
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning import Fabric
from lightning.fabric.strategies import ParallelStrategy
from torch import Tensor

from goose_strategy.bench import workload
from goose_strategy.bench.job import Job, load

_MIB = 2**20


def main(result: Path) -> None:
    """Run the job on standard input as this rank; write what was measured to ``result``."""
    job = load(sys.stdin.read())
    torch.set_num_threads(job.threads)
    precision: Any = job.precision  # one of a list of literals, which Fabric checks
    fabric = Fabric(
        accelerator=job.accelerator,
        devices=job.devices,
        strategy=_strategy(job),
        precision=precision,
    )
    fabric.launch()
    fabric.seed_everything(job.seed, workers=True, verbose=False)
    measured = measure(fabric, workload.build(job), job)
    fabric.barrier()  # nobody leaves while a peer still talks
    result.write_text(json.dumps(measured))


def measure(fabric: Fabric, work: workload.Workload, job: Job) -> dict[str, Any]:
    """Train all steps and return the clock, CPU time and loss at the end of each.

    There is no barrier between steps: a step ends, in the report, when its last rank ends it.
    """
    replica = _replica(fabric)
    parts = [workload.share(batch, **replica) for batch in work.batches]
    parts = [{key: fabric.to_device(value) for key, value in part.items()} for part in parts]
    model, optimizer = fabric.setup(work.module, work.optimizer)
    model.train()
    takes_index = "batch_idx" in inspect.signature(work.module.training_step).parameters
    losses: list[Tensor] = []
    ends: list[float] = []
    cpu: list[float] = []
    memory = PeakMemory(fabric.device)
    for index, part in enumerate(parts):
        out = model.training_step(part, index) if takes_index else model.training_step(part)
        loss = out if isinstance(out, Tensor) else out["loss"]
        fabric.backward(loss)
        if job.clip:
            fabric.clip_gradients(model, optimizer, max_norm=job.clip)
        optimizer.step()
        optimizer.zero_grad()
        for scheduler in work.schedulers:
            scheduler.step()
        losses.append(loss.detach().clone())
        if fabric.device.type == "cuda":
            torch.cuda.synchronize(fabric.device)
        ends.append(time.perf_counter())  # one clock for all processes of a machine
        cpu.append(time.process_time())  # all threads of this rank
    rows = next(iter(work.batches[0].values()))
    return {
        "ends": ends,
        "cpu": cpu,
        "losses": [float(loss) for loss in losses],
        "peak_mib": memory.peak_mib(),
        "tokens": rows.shape[0] * (rows.shape[1] if rows.ndim > 1 else 1),
    }


class PeakMemory:
    """The peak of this process from now on: of the device on CUDA, else resident memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._can_reset = True
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        except OSError:
            self._can_reset = False

    def peak_mib(self) -> float:
        """Return the peak in MiB; of the process's whole life where the system cannot reset it."""
        if self._device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self._device)) / _MIB
        if self._can_reset:
            status = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) / 1024 for line in status if "VmHWM" in line)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _MIB


def _replica(fabric: Fabric) -> dict[str, int]:
    """Return this process's data-parallel rank and the number of replicas."""
    strategy = fabric.strategy
    kwargs = strategy.distributed_sampler_kwargs if isinstance(strategy, ParallelStrategy) else None
    return {"rank": 0, "replicas": 1} | (
        {"rank": kwargs["rank"], "replicas": kwargs["num_replicas"]} if kwargs else {}
    )


def _strategy(job: Job) -> Any:
    if job.contender == "single":
        return "auto"
    if job.contender == "ddp":
        return "ddp"
    from goose_strategy import Goose3DFabricStrategy, PipelineConfig, TensorConfig, ZeroConfig

    rooms = {"pipeline": PipelineConfig, "tensor": TensorConfig, "zero": ZeroConfig}
    settings = {
        name: rooms[name](**value) if name in rooms else value
        for name, value in job.strategy.items()
    }
    return Goose3DFabricStrategy(**settings)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
    # The result is written. At an ordinary exit, threads of gloo under ddp are now and then
    # destroyed while they run, which aborts the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
