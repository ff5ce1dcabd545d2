"""``recompute="full"``: the same numbers, the memory of one graph, R while the gradient travels.

All stages run in one process, a thread each; dropout needs processes (``tests/parity``).
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from goose_strategy.errors import ScheduleError
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.pipeline_parallel.hooks import PipelineCallback, PipelineEvent
from goose_strategy.pipeline_parallel.microbatch import split_batch
from tests.pipeline_parallel.cases import (
    batch_of,
    counted,
    model_of,
    reference,
    toy,
    toy_batch,
    toy_reference,
)
from tests.pipeline_parallel.test_engine import check
from tests.pipeline_parallel.test_work import freeze
from tests.pipeline_parallel.threads import Pipeline, make_pipeline

SCHEDULES = ["1F1B", "GPipe"]


def full(schedule: str = "1F1B", **settings: Any) -> PipelineConfig:
    return PipelineConfig(schedule=schedule, recompute="full", **settings)  # type: ignore[arg-type]


def split(batch: Any, number: int) -> list[dict[str, Any]]:
    return split_batch(batch, PipelineConfig(num_microbatches=number), stages=2)


def forwards_of(pipeline: Pipeline) -> list[list[int]]:
    """Count the calls of a layer of each stage, from now on."""
    calls: list[list[int]] = [[] for _ in pipeline.stages]
    for stage, seen in zip(pipeline.stages, calls, strict=True):
        layer = stage.module.model.layers[stage.layers.start]  # type: ignore[union-attr, index]
        layer.mlp.register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
    return calls


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("family", "pp"), [("llama", 2), ("qwen3", 4), ("mistral", 3)])
def test_one_process_is_matched(family: str, pp: int, schedule: str) -> None:
    model = model_of(family, tied=True)
    pipeline = make_pipeline(model, pp, config=full(schedule))
    calls = forwards_of(pipeline)
    check(pipeline, model, split(batch_of(7), 5))
    last = 10 if schedule == "GPipe" else 5
    assert [len(seen) for seen in calls] == [10] * (pp - 1) + [last]
    # A second call, of other lengths, on the same engines.
    check(pipeline, model, counted([batch_of(1 + n % 2, seq_len=n) for n in (12, 3, 7)]))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_any_number_of_microbatches(number: int, schedule: str) -> None:
    model = model_of("llama")
    pipeline = make_pipeline(model, 4, config=full(schedule))
    calls = forwards_of(pipeline)
    check(pipeline, model, split(batch_of(8), number))
    # With one microbatch every backward follows its forward, so all is kept.
    assert len(calls[0]) == (1 if number == 1 else 2 * number)


@pytest.mark.parametrize("part", ["first", "middle", "all but one"])
def test_frozen_parts(part: str) -> None:
    model = model_of("llama")
    freeze(model, part)
    check(make_pipeline(model, 3, config=full()), model, split(batch_of(4), 4))


def test_several_tensors_travel() -> None:
    model = toy("pair")
    example = {"input_ids": toy_batch()["input_ids"]}
    pipeline = make_pipeline(model, 3, config=full("GPipe"), example=example)
    parts = split(toy_batch(5), 4)
    pipeline.run(parts, train=True)
    mine, expected = pipeline.gradients(), toy_reference(model, parts)
    assert all(torch.equal(mine[name], gradient) for name, gradient in expected.items())


def test_evaluation_computes_nothing_twice() -> None:
    model = model_of("llama").eval()
    pipeline = make_pipeline(model, 2, config=full("GPipe"))
    calls = forwards_of(pipeline)
    parts = split(batch_of(4), 2)
    (*_, last) = pipeline.run(parts, train=False, want_logits=True)
    assert torch.equal(last.loss, reference(model, parts)[0])
    assert [len(seen) for seen in calls] == [2, 2]


def test_a_loss_and_its_count_are_counted_once() -> None:
    calls: list[bool] = []

    def squares(outputs: Any, microbatch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        calls.append(torch.is_grad_enabled())
        mask = microbatch["attention_mask"]
        return (outputs.logits.pow(2).sum(-1) * mask).sum(), mask.sum()

    model = model_of("llama")
    batch = batch_of(4)
    parts = split({name: batch[name] for name in ("input_ids", "attention_mask")}, 3)
    pipeline = make_pipeline(model, 2, config=full("GPipe", loss_fn=squares))
    (*_, last) = pipeline.run(parts, train=True, want_logits=True)
    assert calls == [False] * 3 + [True] * 3
    total = sum(squares(model(**part), part)[0] for part in parts)
    total.backward()
    assert torch.equal(last.loss, total.detach())
    assert last.count == batch["attention_mask"].sum()
    assert torch.equal(torch.cat(last.logits), torch.cat([model(**p).logits for p in parts]))
    mine = pipeline.gradients()
    assert all(torch.allclose(mine[n], p.grad, rtol=1e-12) for n, p in model.named_parameters())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_autocast_is_that_of_one_process(schedule: str) -> None:
    model = model_of("llama", dtype=torch.float32)
    pipeline = make_pipeline(model, 3, config=full(schedule))
    parts = split(batch_of(4), 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipeline.run(parts, train=True)
    model.zero_grad()
    for part in parts:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**part).loss
        loss.backward()
    mine = pipeline.gradients()
    assert all(torch.equal(mine[name], param.grad) for name, param in model.named_parameters())


def test_layers_may_be_checkpointed_inside() -> None:
    model = model_of("llama")
    model.activation_checkpointing_enable({"use_reentrant": False})
    pipeline = make_pipeline(model, 2, config=full("GPipe"))
    calls = forwards_of(pipeline)
    check(pipeline, model, split(batch_of(4), 4))
    assert [len(seen) for seen in calls] == [12, 12]


class Running(nn.Module):
    """Adds a running mean of what it sees, and counts."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, hidden: Tensor) -> Any:
        out = self.layer(hidden) + self.mean
        if self.training:
            self.mean.lerp_(hidden.detach().mean((0, 1)), 0.25)
            self.calls += 1
        return out


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_buffers_change_once_and_are_found_as_they_were(schedule: str) -> None:
    model = toy()
    model.layers = nn.ModuleList([Running(layer) for layer in model.layers])
    example = {"input_ids": toy_batch()["input_ids"]}
    parts = split(toy_batch(5), 4)
    pipeline = make_pipeline(model, 2, config=full(schedule), example=example)
    pipeline.run(parts, train=True)
    expected = toy_reference(model, parts)
    mine = pipeline.gradients()
    assert all(torch.equal(mine[name], gradient) for name, gradient in expected.items())
    for stage in pipeline.stages:
        for number in stage.layers:
            own, theirs = stage.module.layers[number], model.layers[number]  # type: ignore[index]
            assert torch.equal(own.mean, theirs.mean)
            assert own.calls == theirs.calls == 4


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rotary_table_that_grows_is_found_as_it_was(schedule: str) -> None:
    """It keeps its length in an attribute, and its frequencies in a buffer that it replaces."""
    settings = {"rope_parameters": DYNAMIC, "max_position_embeddings": 8}
    parts = counted([batch_of(2, seq_len=n) for n in (6, 12, 5, 16)])
    pipeline = make_pipeline(
        model_of("llama", **settings), 2, config=full(schedule), example=parts[0] | {"labels": None}
    )
    model = model_of("llama", **settings)
    seen = {id(model.model.rotary_emb.inv_freq)}
    model.model.rotary_emb.register_forward_hook(
        lambda module, *_: seen.add(id(module.inv_freq)), always_call=True
    )
    check(pipeline, model, parts)
    assert len(seen) > 1, "the table did not grow"


def test_a_forward_that_writes_into_its_inputs_is_refused() -> None:
    model = model_of("llama")
    pipeline = make_pipeline(model, 2, config=full())
    first = pipeline.stages[0].module

    def shift(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        kwargs["attention_mask"][:, -1] = 0

    first.model.register_forward_pre_hook(shift, with_kwargs=True)  # type: ignore[union-attr]
    with pytest.raises(ScheduleError, match="0R0 failed: ScheduleError: the inputs of this"):
        pipeline.run(split(batch_of(4), 2), train=True)


def test_a_model_that_answers_otherwise_is_refused() -> None:
    model = toy()
    pipeline = make_pipeline(
        model, 2, config=full(), example={"input_ids": toy_batch()["input_ids"]}
    )
    layer = pipeline.stages[0].module.layers[1]  # type: ignore[index]
    layer.register_forward_hook(
        lambda _module, _args, out: out[:, :-1] if torch.is_grad_enabled() else out
    )
    with pytest.raises(ScheduleError, match=r"0R0 failed: .*outputs of other shapes or types"):
        pipeline.run(split(toy_batch(), 2), train=True)


# -- time ------------------------------------------------------------------------------------------


def traced(pipeline: Pipeline, stage: int) -> list[tuple[str, float, float]]:
    """Note when the actions of a stage start and end, and when a gradient is waited for."""
    seen: list[tuple[str, float, float]] = []

    @contextmanager
    def guard(what: str, **_: Any) -> Any:
        start = time.monotonic()
        yield
        seen.append((what, start, time.monotonic()))

    pipeline.engines[stage].guard = guard
    return seen


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_recompute_runs_while_its_gradient_is_late(schedule: str) -> None:
    model = model_of("llama")
    pipeline = make_pipeline(model, 2, config=full(schedule))
    seen = traced(pipeline, 0)
    arrived: list[float] = []
    send = pipeline.backward[0].send

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.15)
        arrived.append(time.monotonic())
        return send(*args, **kwargs)

    pipeline.backward[0].send = late  # type: ignore[method-assign]
    pipeline.run(split(batch_of(3), 3), train=True)
    at = {what: (start, end) for what, start, end in seen}
    for number in range(3):
        posted, again, backward = (at[f"0{kind}{number}"] for kind in ("RECV_B", "R", "B"))
        assert posted[1] <= again[0]
        assert again[1] <= arrived[number] <= backward[1]
        assert again[1] <= backward[0]


class Told(PipelineCallback):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def before_recompute(self, event: PipelineEvent) -> None:
        self.seen.append(f"R{event.microbatch}")

    def after_recompute(self, event: PipelineEvent) -> None:
        self.seen.append(f"/R{event.microbatch}")

    def after_receive(self, event: PipelineEvent) -> None:
        self.seen.append(f"{event.kind}{event.microbatch}")

    def before_backward(self, event: PipelineEvent) -> None:
        self.seen.append(f"B{event.microbatch}")


def test_callbacks_are_told_of_it_before_the_gradient_is_there() -> None:
    pipeline = make_pipeline(model_of("llama"), 2, config=full())
    told = Told()
    pipeline.engines[0].hooks.add(told)
    pipeline.run(split(batch_of(2), 2), train=True)
    assert told.seen == ["R0", "/R0", "RECV_B0", "B0", "R1", "/R1", "RECV_B1", "B1"]
