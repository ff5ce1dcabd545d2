"""All stages of a pipeline in one process, a thread each: the engine without process groups."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from goose_strategy.grads.store import WeightGradStore
from goose_strategy.pipeline_parallel.balance import count_work
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.pipeline_parallel.engine import Engine, StepResult
from goose_strategy.pipeline_parallel.links import StageLinks
from goose_strategy.pipeline_parallel.partition import partition_layers
from goose_strategy.pipeline_parallel.probe import probe_model
from goose_strategy.pipeline_parallel.program import splits_backward
from goose_strategy.pipeline_parallel.stage import ModelPart, PipelineStage, cut_model
from goose_strategy.pipeline_parallel.tables.chunks import Chunks
from goose_strategy.tensor_parallel.defer import defer_weight_gradients

WAIT_S = 20.0


class Sent:
    def wait(self) -> None: ...


class QueueLink:
    """Both ends of one direction between two stages."""

    def __init__(self) -> None:
        self.queue: queue.Queue[tuple[Hashable, list[Tensor]]] = queue.Queue()
        self.posted = 0
        self.most_posted = 0
        self.shapes: list[list[tuple[int, ...]]] = []

    def send(self, tensors: Sequence[Tensor], *, key: Hashable = None) -> Sent:
        self.shapes.append([tuple(tensor.shape) for tensor in tensors])
        self.queue.put((key, [tensor.detach().clone() for tensor in tensors]))
        return Sent()

    def receive(self, *, key: Hashable, expected: Any = None) -> Expected:
        self.posted += 1
        self.most_posted = max(self.most_posted, self.posted)
        return Expected(self, key, expected)


@dataclass
class Expected:
    link: QueueLink
    key: Hashable
    expected: Any

    def wait(self) -> tuple[Tensor, ...]:
        key, tensors = self.link.queue.get(timeout=WAIT_S)
        self.link.posted -= 1
        assert key == self.key, (key, self.key)
        metas = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        assert self.expected is None or tuple(self.expected) == metas, (self.expected, metas)
        return tuple(tensors)


@dataclass
class Ends:
    """One rank's end of the two directions between two ranks."""

    out: QueueLink
    into: QueueLink

    def send(self, tensors: Sequence[Tensor], *, key: Hashable = None) -> Sent:
        return self.out.send(tensors, key=key)

    def receive(self, *, key: Hashable, expected: Any = None) -> Expected:
        return self.into.receive(key=key, expected=expected)


@dataclass
class Pipeline:
    """The ranks of one model, cut from copies of it.

    ``forward`` and ``backward`` are the directions in use, by the stage before the boundary.
    """

    parts: list[ModelPart]
    engines: list[Engine]
    forward: dict[int, QueueLink] = field(default_factory=dict)
    backward: dict[int, QueueLink] = field(default_factory=dict)

    @property
    def stages(self) -> list[PipelineStage]:
        return sorted((s for part in self.parts for s in part.stages), key=lambda s: s.index)

    def run(
        self, microbatches: Sequence[Mapping[str, Any]], *, train: bool, **options: Any
    ) -> list[StepResult]:
        """Run all stages under the caller's grad mode and autocast; raise the first error."""
        return in_threads(
            [lambda e=e: e.run(microbatches, train=train, **options) for e in self.engines]
        )

    def gradients(self) -> dict[str, Tensor]:
        """Gradients by the whole model's names; those of tied copies are summed."""
        out: dict[str, Tensor] = {}
        for part in self.parts:
            for name, param in part.module.named_parameters():
                if param.grad is not None:
                    whole = part.tied_copies.get(name, name)
                    out[whole] = out[whole] + param.grad if whole in out else param.grad.clone()
        return out

    def zero_grad(self) -> None:
        for part in self.parts:
            part.module.zero_grad()


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call each function in a thread of its own, under this thread's modes."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    autocast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def call(index: int) -> None:
        try:
            with (
                torch.inference_mode(inference),
                torch.set_grad_enabled(grad),
                torch.autocast("cpu", dtype=dtype, enabled=autocast),
            ):
                results[index] = calls[index]()
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            errors.append(error)

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not errors:
        for thread in threads:
            thread.join(0.02)
    if errors:
        raise errors[0]
    return results


def make_pipeline(
    model: nn.Module,
    pp: int,
    *,
    config: PipelineConfig | None = None,
    example: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Cut copies of a model into stages and link them; ``model`` itself stays whole."""
    config = config or PipelineConfig()
    chunks = config.chunks(pp)
    info = probe_model(model, example)
    bounds = partition_layers(config.partition, count_work(model, info), chunks)
    forward: dict[tuple[int, int], QueueLink] = {}
    backward: dict[tuple[int, int], QueueLink] = {}
    parts, engines = [], []
    for rank in range(pp):
        copied = copy.deepcopy(model)
        part = cut_model(copied, info, bounds, rank, chunks)
        if splits_backward(config.schedule):
            part = replace(part, store=WeightGradStore())
            defer_weight_gradients(copied, part.store)
        peers = _peers(chunks, rank)
        links = StageLinks(
            {stage: _ends(forward, rank, peer) for stage, peer in peers},
            {stage: _ends(backward, rank, peer) for stage, peer in peers},
        )
        parts.append(part)
        engines.append(Engine(part, links, config, rank=rank))
    ends = {
        stage: (chunks.rank_of(stage), chunks.rank_of(stage + 1))
        for stage in range(chunks.stages - 1)
        if not chunks.is_local(stage)
    }
    return Pipeline(
        parts,
        engines,
        {stage: forward[pair] for stage, pair in ends.items()},
        {stage: backward[pair[::-1]] for stage, pair in ends.items()},
    )


def _peers(chunks: Chunks, rank: int) -> list[tuple[int, int]]:
    """Return the boundaries at which messages leave or reach a rank, with the other rank."""
    found = []
    for stage in range(chunks.stages - 1):
        ends = {chunks.rank_of(stage), chunks.rank_of(stage + 1)}
        if rank in ends and len(ends) == 2:
            found.append((stage, *(ends - {rank})))
    return found


def _ends(ways: dict[tuple[int, int], QueueLink], rank: int, peer: int) -> Ends:
    out = ways.setdefault((rank, peer), QueueLink())
    return Ends(out, ways.setdefault((peer, rank), QueueLink()))
