"""The partition as a table for people: who has which layers, and how even that is.

Megatron and DeepSpeed print the layers of each stage, not what they cost. A rank that has a third
more to do than the others makes the whole pipeline a third slower and shows nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.tables.chunks import Chunks

_MIB = 2**20


@dataclass(frozen=True)
class StageFigures:
    """What one stage has.

    Attributes:
        stage: Its number.
        rank: The rank that holds it.
        layers: Numbers of its layers.
        parameters: Number of its parameters, before tensor parallelism.
        share: Its part of the work of all stages.
        time: Nanoseconds of one microbatch, forward and backward; ``None`` if they were counted
            and not measured.
        resident: Bytes of weights, gradients and the optimizer's state.
        activations: Bytes of all microbatches that it holds at once; ``None`` if not measured.
    """

    stage: int
    rank: int
    layers: range
    parameters: int
    share: float
    time: int | None
    resident: int
    activations: int | None


@dataclass(frozen=True)
class PartitionReport:
    """The stages of a pipeline.

    Attributes:
        schedule: Name of the schedule.
        partition: How the layers were shared out.
        chunks: Which rank holds which stages.
        stages: The figures of every stage.
        choice: The figures of the schedules that were compared, as text, if any were.
    """

    schedule: str
    partition: str | Sequence[int]
    chunks: Chunks
    stages: tuple[StageFigures, ...]
    choice: str = ""

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank by that of the mean rank: 1 is even."""
        ranks = [0.0] * self.chunks.ranks
        for figures in self.stages:
            ranks[figures.rank] += figures.share
        return max(ranks) * len(ranks) / sum(ranks)

    def __str__(self) -> str:
        given = self.partition if isinstance(self.partition, str) else list(self.partition)
        lines = [
            f"schedule={self.schedule!r} with {self.chunks.stages} stages on {self.chunks.ranks} "
            f"ranks, partition={given!r}: the busiest rank has {self.imbalance:.3f} times the mean",
            f"{'stage':>5} {'rank':>4} {'layers':>9} {'parameters':>14} {'work':>7} "
            f"{'time':>10} {'resident':>11} {'activations':>11}",
        ]
        lines += [_line(figures) for figures in self.stages]
        return "\n".join([*([self.choice] if self.choice else []), *lines])


def _line(figures: StageFigures) -> str:
    layers = f"{figures.layers.start}-{figures.layers.stop - 1}"
    time = "-" if figures.time is None else f"{figures.time / 1e6:.2f} ms"
    return (
        f"{figures.stage:>5} {figures.rank:>4} {layers:>9} {figures.parameters:>14,} "
        f"{figures.share:>7.1%} {time:>10} {_mib(figures.resident):>11} "
        f"{_mib(figures.activations):>11}"
    )


def _mib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / _MIB:,.1f} MiB"
