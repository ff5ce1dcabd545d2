"""All stages of a pipeline in one process, a thread each: the engine without process groups."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from goose_strategy.pipeline_parallel.balance import count_work
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.pipeline_parallel.engine import Engine, StepResult
from goose_strategy.pipeline_parallel.links import StageLinks
from goose_strategy.pipeline_parallel.partition import partition_layers
from goose_strategy.pipeline_parallel.probe import probe_model
from goose_strategy.pipeline_parallel.stage import PipelineStage, cut_model
from goose_strategy.pipeline_parallel.tables.chunks import Chunks

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
class Pipeline:
    """The stages of one model, cut from copies of it."""

    stages: list[PipelineStage]
    engines: list[Engine]
    forward: list[QueueLink] = field(default_factory=list)
    backward: list[QueueLink] = field(default_factory=list)

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
        for stage in self.stages:
            for name, param in stage.module.named_parameters():
                if param.grad is not None:
                    whole = stage.tied_copies.get(name, name)
                    out[whole] = out[whole] + param.grad if whole in out else param.grad.clone()
        return out

    def zero_grad(self) -> None:
        for stage in self.stages:
            stage.module.zero_grad()


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
    info = probe_model(model, example)
    bounds = partition_layers(config.partition, count_work(model, info), Chunks(pp))
    stages = [cut_model(copy.deepcopy(model), info, bounds, stage) for stage in range(pp)]
    forward = [QueueLink() for _ in range(pp - 1)]
    backward = [QueueLink() for _ in range(pp - 1)]
    engines = [
        Engine(
            stage,
            StageLinks(
                from_previous=forward[index - 1] if index > 0 else None,
                to_previous=backward[index - 1] if index > 0 else None,
                to_next=forward[index] if index < pp - 1 else None,
                from_next=backward[index] if index < pp - 1 else None,
            ),
            config,
            rank=index,
        )
        for index, stage in enumerate(stages)
    ]
    return Pipeline(stages, engines, forward, backward)
