"""What a stage holds at its peak, each storage counted once, is what its table says."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from goose_strategy.pipeline_parallel import engine as engine_module
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.pipeline_parallel.program import program
from goose_strategy.pipeline_parallel.tables.catalogue import CATALOGUE
from goose_strategy.pipeline_parallel.tables.peaks import peak_memory
from tests.pipeline_parallel.cases import batch_of, model_of
from tests.pipeline_parallel.test_just_in_time import SCHEDULES, full, split
from tests.pipeline_parallel.threads import Pipeline, make_pipeline


class Held:
    """Counts the bytes of the storages that autograd and the engine hold, each once."""

    def __init__(self, part: Any) -> None:
        own = (*part.module.parameters(), *part.module.buffers())
        self.ignored = {t.untyped_storage().data_ptr() for t in own}
        self.saved: weakref.WeakSet[Any] = weakref.WeakSet()
        self.step: Any = None
        self.peak = 0
        self.after: dict[str, int] = {}

    def pack(self, tensor: Tensor) -> Any:
        box = _Box(tensor)
        self.saved.add(box)
        return box

    def bytes(self) -> int:
        tensors = [box.tensor for box in self.saved]
        for kept in (*self.step.work._kept.values(), *self.step.work._held.values()):
            tensors += kept.received
        for work in self.step.work._put_off.values():
            tensors += [tensor for owed in work._owed or () for tensor in owed.held]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        return sum(s.nbytes() for at, s in storages.items() if at not in self.ignored)

    def look(self) -> None:
        self.peak = max(self.peak, self.bytes())


class _Box:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def held_at_peak(
    pipeline: Pipeline, parts: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], list[int]]:
    """Return per rank the bytes held at the peak, and those of one microbatch's graph."""
    watched, single = watch(pipeline, parts, monkeypatch)
    return [held.peak for held in watched], single


def watch(
    pipeline: Pipeline, parts: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Held], list[int]]:
    watched = [Held(part) for part in pipeline.parts]
    single = [0] * len(watched)
    init = engine_module._Step.__init__

    def noted(step: Any, engine: Any, *args: Any, **kwargs: Any) -> None:
        init(step, engine, *args, **kwargs)
        watched[engine.part.rank].step = step

    monkeypatch.setattr(engine_module._Step, "__init__", noted)

    def looking(held: Held, index: int) -> Any:
        @contextmanager
        def guard(what: str, **_: Any) -> Any:
            before = held.bytes()
            yield
            held.look()
            held.after[what] = held.bytes() - before
            if single[index] == 0 and what[1] == "R":
                others = [kept.received for kept in held.step.work._kept.values()]
                single[index] = held.bytes() - sum(t.nbytes for r in others for t in r)

        return guard

    def wrapped(run: Callable[..., Any], held: Held) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(held.pack, lambda box: box.tensor):
                return run(*args, **kwargs)

        return SimpleNamespace(run=call)

    engines = pipeline.engines
    for index, (one, held) in enumerate(zip(engines, watched, strict=True)):
        one.guard = looking(held, index)
        engines[index] = wrapped(one.run, held)  # type: ignore[call-overload]
    pipeline.run(parts, train=True)
    return watched, single


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_peak_is_that_of_the_table(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", layers=8)
    parts = split(batch_of(16, seq_len=16, padded=False), 8)
    pipeline = make_pipeline(model, 4, config=full(schedule, partition="uniform"))
    # Hidden states of the two rows of a microbatch, in fp64; the first stage's are the user's own.
    inputs = [0, *[2 * 16 * 32 * 8] * 3]
    peaks, graphs = held_at_peak(pipeline, parts, monkeypatch)
    table = program(schedule, 4, 8, recompute=True)
    if schedule == "1F1B":
        # Nothing is computed again there.
        graphs[-1] = peaks[-1]
    predicted = peak_memory(table, graphs, inputs)
    for peak, expected in zip(peaks, predicted, strict=True):
        assert abs(peak - expected) <= 0.02 * expected
    kept = make_pipeline(model, 4, config=PipelineConfig(schedule=schedule, partition="uniform"))  # type: ignore[arg-type]
    without, _ = held_at_peak(kept, parts, monkeypatch)
    bare = program(schedule, 4, 8)
    for more, expected in zip(without, peak_memory(bare, graphs), strict=True):
        assert abs(more - expected) <= 0.02 * expected
    assert peaks[0] < 0.3 * without[0]


def test_a_forward_that_keeps_its_graph_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = split(batch_of(8, seq_len=16, padded=False), 4)
    right, wrong = (make_pipeline(model_of("llama"), 2, config=full("GPipe")) for _ in range(2))
    stage, graphs = wrong.stages[0], []
    forward = stage.forward

    def keeping(*args: Any) -> Any:
        with torch.enable_grad():
            graphs.append(forward(*args))
        return graphs[-1]

    stage.forward = keeping  # type: ignore[method-assign]
    held = [held_at_peak(one, parts, monkeypatch)[0][0] for one in (right, wrong)]
    assert held[1] > 3 * held[0]


@pytest.mark.parametrize("schedule", list(CATALOGUE))
def test_the_peak_of_every_schedule_is_that_of_its_table(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama", layers=16)
    config = PipelineConfig(schedule=schedule, partition="uniform")
    chunks = config.chunks(4)
    one, many = (split(batch_of(rows, seq_len=16, padded=False), rows // 2) for rows in (2, 16))
    # What a stage keeps of one microbatch, and from I on, is measured where there is only one.
    alone, _ = watch(make_pipeline(model, 4, config=config), one, monkeypatch)
    grown = [alone[chunks.rank_of(stage)].after for stage in range(chunks.stages)]
    graphs = [grown[stage][f"{stage}F0"] for stage in range(chunks.stages)]
    left = [graphs[stage] + grown[stage].get(f"{stage}I0", 0) for stage in range(chunks.stages)]
    peaks, _ = held_at_peak(make_pipeline(model, 4, config=config), many, monkeypatch)
    table = program(schedule, chunks, 8)
    predicted = peak_memory(table, graphs, put_off=left)
    for rank, (peak, expected) in enumerate(zip(peaks, predicted, strict=True)):
        assert abs(peak - expected) <= 0.02 * expected, (rank, peak, expected)
    # What a backward leaves to its W is less than its activations.
    split_stages = [stage for stage in range(chunks.stages) if f"{stage}I0" in grown[stage]]
    assert all(left[stage] < graphs[stage] for stage in split_stages)
    assert bool(split_stages) == CATALOGUE[schedule].splits
