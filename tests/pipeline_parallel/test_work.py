"""What a rank computes is what one process computes: losses, counts, logits, and every gradient."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from goose_strategy.errors import BatchError, ScheduleError
from goose_strategy.pipeline_parallel.config import PipelineConfig
from tests.harness.compare import assert_close_named
from tests.pipeline_parallel.cases import (
    batch_of,
    model_of,
    reference,
)
from tests.pipeline_parallel.test_engine import check, split
from tests.pipeline_parallel.threads import make_pipeline


def freeze(model: Any, part: str) -> None:
    prefixes = {
        "first": ("model.embed_tokens", "model.layers.0."),
        "middle": ("model.layers.1.", "model.layers.2."),
        "last": ("model.layers.3.", "model.norm", "lm_head"),
        "all but one": ("model.embed_tokens", "model.layers.1.", "model.layers", "lm_head"),
    }[part]
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(prefixes))


@pytest.mark.parametrize("part", ["first", "middle", "last", "all but one"])
@pytest.mark.parametrize("tied", [False, True])
def test_frozen_parts(part: str, tied: bool) -> None:
    model = model_of("llama", tied=tied)
    freeze(model, part)
    check(make_pipeline(model, 3), model, split(batch_of(4), 4))


def test_gradients_accumulate_over_calls() -> None:
    model = model_of("llama")
    pipeline = make_pipeline(model, 2)
    first, second = split(batch_of(4, seed=1), 2), split(batch_of(4, seed=2), 3)
    pipeline.run(first, train=True)
    pipeline.run(second, train=True)
    assert_close_named(pipeline.gradients(), reference(model, [*first, *second])[1], 1e-14)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_evaluation(mode: Any) -> None:
    model = model_of("llama").eval()
    pipeline = make_pipeline(model, 3)
    batch = batch_of(5)
    parts = split(batch, 4)
    with mode():
        first, middle, last = pipeline.run(parts, train=False, want_logits=True)
    expected = [model(**part, use_cache=False) for part in parts]
    assert torch.equal(last.loss, sum(output.loss for output in expected).detach())
    for mine, output in zip(last.logits, expected, strict=True):
        assert torch.equal(mine, output.logits)
        assert not mine.requires_grad
    for empty in (first, middle):
        assert (empty.loss, empty.count, empty.logits) == (None, None, None)
    assert pipeline.gradients() == {}


def test_training_and_evaluation_take_turns() -> None:
    model = model_of("llama", attention_dropout=0.5).eval()
    pipeline = make_pipeline(model, 2)
    parts = split(batch_of(4), 2)
    for train in (True, False, True, False):
        if train:
            check(pipeline, model, parts)
        else:
            (*_, last) = pipeline.run(parts, train=False)
            assert torch.equal(last.loss, reference(model, parts)[0])


def test_no_labels_no_loss() -> None:
    pipeline = make_pipeline(model_of("llama"), 2)
    parts = [{"input_ids": batch_of(2)["input_ids"]}]
    (*_, last) = pipeline.run(parts, train=False, want_logits=True)
    assert last.loss is None
    assert [tuple(logits.shape) for logits in last.logits] == [(2, 12, 97)]
    with pytest.raises(ScheduleError, match="1F0 failed: BatchError: the model returned no loss"):
        pipeline.run(parts, train=True)


def test_training_can_return_logits() -> None:
    model = model_of("llama")
    pipeline = make_pipeline(model, 2)
    parts = split(batch_of(4), 2)
    assert pipeline.run(parts, train=True)[-1].logits is None
    (*_, last) = pipeline.run(parts, train=True, want_logits=True)
    assert torch.equal(torch.cat(last.logits), torch.cat([model(**p).logits for p in parts]))


def test_a_loss_function_of_the_users() -> None:
    def squares(outputs: Any, microbatch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        mask = microbatch["attention_mask"]
        return (outputs.logits.pow(2).sum(-1) * mask).sum(), mask.sum()

    model = model_of("llama")
    pipeline = make_pipeline(model, 2, config=PipelineConfig(loss_fn=squares))
    batch = batch_of(4)
    parts = split({name: batch[name] for name in ("input_ids", "attention_mask")}, 3)
    (*_, last) = pipeline.run(parts, train=True)
    total = sum(squares(model(**part), part)[0] for part in parts)
    total.backward()
    assert torch.equal(last.loss, total.detach())
    assert last.count == batch["attention_mask"].sum()
    gradients = {name: param.grad for name, param in model.named_parameters()}
    assert_close_named(pipeline.gradients(), gradients, 1e-13)
    assert pipeline.run(parts, train=False, want_loss=False)[-1].loss is None


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda out, _: out.logits.sum(), r"returned Tensor of shape \(\); it must return \(sum"),
        (lambda out, _: out.logits, r"returned Tensor of shape \(2, .*; it must return \(sum"),
        (lambda out, _: (out.logits.sum(-1), 4), "returned tuple; .* a tensor with one element"),
        (lambda out, _: (out.logits.sum().item(), 4), "returned tuple; it must"),
        (lambda _out, _: None, "returned NoneType; it must"),
    ],
)
def test_a_loss_function_returns_a_sum_and_a_count(wrong: Any, text: str) -> None:
    pipeline = make_pipeline(model_of("llama"), 2, config=PipelineConfig(loss_fn=wrong))
    with pytest.raises((BatchError, ScheduleError), match=text):
        pipeline.run(split(batch_of(4), 2), train=True)


def test_autocast_is_that_of_one_process() -> None:
    model = model_of("llama", dtype=torch.float32)
    pipeline = make_pipeline(model, 3)
    parts = split(batch_of(4), 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipeline.run(parts, train=True)
    model.zero_grad()
    for part in parts:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**part).loss
        loss.backward()
    expected = {name: param.grad for name, param in model.named_parameters()}
    mine = pipeline.gradients()
    assert all(torch.equal(mine[name], gradient) for name, gradient in expected.items())


def test_a_split_backward_needs_a_store() -> None:
    model = model_of("llama")
    pipeline = make_pipeline(model, 2, config=PipelineConfig(schedule="ZBH1"))
    for engine in pipeline.engines:
        engine.worker.store = None
    with pytest.raises(ScheduleError, match="splits the backward, but the engine has no store"):
        pipeline.run(split(batch_of(4), 4), train=True)


def test_input_gradients_leave_the_weights_alone() -> None:
    model = model_of("llama")
    pipeline = make_pipeline(model, 2, config=PipelineConfig(schedule="ZBH1"))
    weight = pipeline.parts[0].module.model.layers[0].mlp.up_proj.weight  # type: ignore[union-attr]
    engine = pipeline.engines[0]
    seen: list[tuple[str, bool]] = []

    @contextmanager
    def guard(what: str, **_: Any) -> Any:
        before = None if weight.grad is None else weight.grad.clone()
        yield
        same = (
            before is None
            if weight.grad is None
            else before is not None and torch.equal(before, weight.grad)
        )
        if what[1] in "IWB":
            seen.append((what, same))

    engine.guard = guard
    check(pipeline, model, split(batch_of(4), 4))
    assert {what[1] for what, _ in seen} == {"I", "W"}
    assert all(same == (what[1] == "I") for what, same in seen)
    assert [what for what, _ in seen if what[1] == "W"] == [f"0W{number}" for number in range(4)]
