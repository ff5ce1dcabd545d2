"""The engine computes what one process computes, to the last bit, in every order.

All stages run in one process, a thread each; `test_links` and `test_oracle` use process groups.
"""

from __future__ import annotations

import itertools
import weakref
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from goose_strategy.errors import PeerError, ScheduleError
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.pipeline_parallel.microbatch import split_batch
from goose_strategy.pipeline_parallel.tables.catalogue import CATALOGUE
from tests.harness.compare import assert_close_named
from tests.pipeline_parallel.cases import (
    batch_of,
    counted,
    model_of,
    reference,
    toy,
    toy_batch,
    toy_reference,
)
from tests.pipeline_parallel.threads import Pipeline, make_pipeline

FAMILIES = ["llama", "qwen2", "mistral", "qwen3"]


def split(batch: Any, number: int, **options: Any) -> list[dict[str, Any]]:
    return split_batch(batch, PipelineConfig(num_microbatches=number, **options), stages=2)


def check(pipeline: Pipeline, model: Any, microbatches: list[dict[str, Any]]) -> None:
    """Loss and gradients are bitwise those of one process; tied ones up to the order of a sum."""
    pipeline.zero_grad()
    results = pipeline.run(microbatches, train=True)
    (last,) = [r for r, part in zip(results, pipeline.parts, strict=True) if part.has_loss]
    others = [result for result in results if result is not last]
    loss, gradients = reference(model, microbatches)
    assert torch.equal(last.loss, loss)
    assert not last.loss.requires_grad
    assert all(result.loss is None for result in others)
    mine = pipeline.gradients()
    assert mine.keys() == gradients.keys()
    # On one rank the sum of a tied weight has another order, too.
    tied = {name for name in gradients if name == "model.embed_tokens.weight"}
    for name, gradient in gradients.items():
        if name not in tied:
            assert torch.equal(mine[name], gradient), name
    assert_close_named(mine, gradients, 1e-14)


@pytest.mark.parametrize(
    ("tied", "pp", "schedule"),
    [
        (False, 2, "1F1B"),
        (True, 3, "GPipe"),
        (True, 3, "1F1B"),
        (False, 4, "GPipe"),
        (True, 4, "1F1B"),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_is_matched(family: str, tied: bool, pp: int, schedule: str) -> None:
    model = model_of(family, tied=tied)
    pipeline = make_pipeline(model, pp, config=PipelineConfig(schedule=schedule))
    # Seven rows in five parts: uneven ones.
    check(pipeline, model, split(batch_of(7), 5))


def numbers_for(schedule: str) -> list[int | None]:
    return [None, 3] if CATALOGUE[schedule].most is None else [None]


SEVERAL = [name for name in CATALOGUE if name not in ("GPipe", "1F1B")]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize(
    ("schedule", "per_rank"), [(name, v) for name in SEVERAL for v in numbers_for(name)]
)
def test_several_stages_per_rank_and_split_backwards(
    schedule: str, per_rank: int | None, pp: int, recompute: Any
) -> None:
    model = model_of("llama", layers=13, tied=pp == 4)
    config = PipelineConfig(schedule=schedule, stages_per_rank=per_rank, recompute=recompute)
    pipeline = make_pipeline(model, pp, config=config)
    held = [len(part.stages) for part in pipeline.parts]
    assert held == [per_rank or CATALOGUE[schedule].least] * pp
    # Uneven microbatches, fewer than ranks too.
    check(pipeline, model, split(batch_of(7), 5))
    check(pipeline, model, split(batch_of(3), 3))
    with torch.no_grad():
        (*_, expected) = [model(**part, use_cache=False).loss for part in split(batch_of(4), 1)]
    results = pipeline.run(split(batch_of(4), 2), train=False)
    losses = [result.loss for result in results if result.loss is not None]
    assert len(losses) == 1
    assert abs(losses[0] - expected) <= 1e-12 * abs(expected)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("number", range(1, 9))
def test_any_number_of_microbatches(number: int, schedule: str) -> None:
    model = model_of("llama")
    pipeline = make_pipeline(model, 4, config=PipelineConfig(schedule=schedule))
    check(pipeline, model, split(batch_of(8), number))


@pytest.mark.parametrize("family", ["gpt2", "bloom", "opt"])
@pytest.mark.parametrize("pp", [2, 3])
def test_other_families_need_no_code_of_their_own(family: str, pp: int) -> None:
    model = model_of(family)
    check(make_pipeline(model, pp), model, split(batch_of(5), 3))


def test_listed_partitions() -> None:
    model = model_of("llama", layers=5)
    pipeline = make_pipeline(model, 3, config=PipelineConfig(partition=[1, 3, 1]))
    assert [list(stage.layers) for stage in pipeline.stages] == [[0], [1, 2, 3], [4]]
    check(pipeline, model, split(batch_of(4), 4))


def test_lengths_change_from_call_to_call_and_within_one() -> None:
    model = model_of("qwen3")
    pipeline = make_pipeline(model, 3)
    for rows, seq_len in ((4, 12), (4, 5), (3, 9), (4, 12)):
        check(pipeline, model, split(batch_of(rows, seq_len=seq_len), 3))
    parts = [batch_of(1 + n % 2, seq_len=length) for n, length in enumerate((12, 3, 7, 7, 12))]
    check(pipeline, model, split(counted(parts), 1))


def test_trimmed_padding_changes_nothing_but_the_work() -> None:
    model = model_of("llama")
    pipeline = make_pipeline(model, 2)
    batch = batch_of(4, seq_len=16, seed=1)
    batch["attention_mask"][2:, 9:] = 0
    batch["labels"][2:, 9:] = -100
    batch = counted([batch])[0]
    trimmed = split(batch, 2, trim_padding=True)
    assert [part["input_ids"].shape[1] for part in trimmed] == [16, 9]
    (*_, last) = pipeline.run(trimmed, train=True)
    loss, gradients = reference(model, split(batch, 2))
    assert abs(last.loss - loss) <= 1e-12 * abs(loss)
    assert_close_named(pipeline.gradients(), gradients, 1e-10)
    assert pipeline.forward[0].shapes == [[(2, 16, 32)], [(2, 9, 32)]]


@pytest.mark.parametrize("positions", ["none", "shared", "per row"])
@pytest.mark.parametrize("padded", [True, False])
def test_masks_and_positions(positions: str, padded: bool) -> None:
    model = model_of("llama")
    batch = batch_of(4, padded=padded)
    if positions == "shared":
        batch["position_ids"] = torch.arange(12)[None]
    if positions == "per row":
        batch["position_ids"] = torch.arange(12)[None] + 3 * torch.arange(4)[:, None]
    check(make_pipeline(model, 2), model, split(batch, 3))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    model = model_of("llama")
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    pipeline = make_pipeline(model, 3)
    check(pipeline, model, split(batch_of(4), 4))


def test_checkpointing_switched_on_in_a_cut_model() -> None:
    model = model_of("llama")
    pipeline = make_pipeline(model, 2)
    recomputed = []
    for stage in pipeline.stages:
        stage.module.activation_checkpointing_enable()
        for layer in stage.module.model.layers:
            layer.mlp.register_forward_pre_hook(lambda *_: recomputed.append(1))
    check(pipeline, model, split(batch_of(4), 4))
    assert len(recomputed) == 2 * 4 * 4


def test_several_tensors_travel() -> None:
    model = toy("pair")
    pipeline = make_pipeline(model, 3, example={"input_ids": toy_batch()["input_ids"]})
    parts = split(toy_batch(5), 4)
    pipeline.run(parts, train=True)
    assert_close_named(pipeline.gradients(), toy_reference(model, parts), 1e-14)
    # Hidden states, embeddings (passed through the middle stage) and a mask; two gradients back.
    assert pipeline.forward[1].shapes[0] == [(2, 6, 8), (2, 6, 8), (2, 6, 1)]
    assert pipeline.backward[0].shapes[0] == [(2, 6, 8), (2, 6, 8)]


@pytest.mark.parametrize("habit", ["first_skip", "pair_skip"])
def test_a_head_that_recomputes_the_embeddings(habit: str) -> None:
    """In both cases the head reads the embeddings from a variable, though one receives them."""
    model = toy(habit)
    pipeline = make_pipeline(model, 2, example={"input_ids": toy_batch()["input_ids"]})
    parts = split(toy_batch(), 2)
    pipeline.run(parts, train=True)
    assert pipeline.parts[1].tied_copies == {"embed.weight": "embed.weight"}
    assert_close_named(pipeline.gradients(), toy_reference(model, parts), 1e-14)


def test_the_last_backward_is_announced_once_per_stage() -> None:
    pipeline = make_pipeline(model_of("llama"), 2)
    done: list[int] = []
    announced: list[int] = []
    head = pipeline.stages[1].module.lm_head.weight
    head.register_post_accumulate_grad_hook(lambda _: done.append(1))
    engine = pipeline.engines[1]

    @contextmanager
    def completing(stage: int) -> Any:
        assert stage == 1
        announced.append(len(done))
        yield
        announced.append(len(done))

    pipeline.engines[1] = _Completing(engine, completing)
    pipeline.run(split(batch_of(4), 4), train=True)
    assert announced == [3, 4]
    pipeline.run(split(batch_of(4), 4), train=False)
    assert announced == [3, 4]


class _Completing:
    def __init__(self, engine: Any, completing: Any) -> None:
        self.engine, self.completing = engine, completing

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine.run(*args, completing=self.completing, **kwargs)


def test_few_receives_are_posted_and_outputs_are_freed_once_sent() -> None:
    pipeline = make_pipeline(model_of("llama"), 4)
    outputs: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    stage = pipeline.stages[0]
    forward = stage.forward

    def watched(*args: Any) -> Any:
        alive.append(sum(ref() is not None for ref in outputs))
        out = forward(*args)
        outputs.extend(weakref.ref(tensor) for tensor in out)
        return out

    stage.forward = watched  # type: ignore[method-assign]
    pipeline.run(split(batch_of(8), 8), train=True)
    assert alive == [0] * 8
    links = [*pipeline.forward.values(), *pipeline.backward.values()]
    assert all(link.most_posted <= 2 for link in links)
    assert all(link.posted == 0 for link in links)


def test_an_error_says_where_it_arose() -> None:
    pipeline = make_pipeline(model_of("llama"), 3)
    calls = itertools.count()

    def broken(*_: Any) -> None:
        if next(calls) == 2:
            raise ArithmeticError("lost a digit")

    pipeline.stages[1].module.model.layers[1].register_forward_hook(broken)
    with pytest.raises(ScheduleError, match="1F2 failed: ArithmeticError: lost a digit") as caught:
        pipeline.run(split(batch_of(4), 4), train=True)
    error = caught.value
    assert isinstance(error.__cause__, ArithmeticError)
    assert (error.rank, error.stage, error.microbatch) == (1, 1, 2)


def test_a_lost_neighbour_is_reported_as_such() -> None:
    pipeline = make_pipeline(model_of("llama"), 2)

    def lost(*_: Any) -> None:
        raise PeerError("rank 1 was killed")

    pipeline.stages[0].module.model.layers[0].register_forward_hook(lost)
    with pytest.raises(PeerError, match="rank 1 was killed"):
        pipeline.run(split(batch_of(2), 2), train=True)


def test_every_action_is_guarded() -> None:
    pipeline = make_pipeline(model_of("llama"), 2)
    seen: list[tuple[str, int | None, int | None]] = []

    @contextmanager
    def guard(what: str, *, stage: int | None = None, microbatch: int | None = None) -> Any:
        seen.append((what, stage, microbatch))
        yield

    pipeline.engines[1].guard = guard
    pipeline.run(split(batch_of(2), 1), train=True)
    assert seen == [
        ("1RECV_F0", 1, 0),
        ("1F0", 1, 0),
        ("1B0", 1, 0),
        ("1SEND_B0", 1, 0),
        ("end of the step", 1, None),
    ]


def test_training_is_refused_in_inference_mode() -> None:
    pipeline = make_pipeline(model_of("llama"), 2)
    with (
        torch.inference_mode(),
        pytest.raises(ScheduleError, match=r"inside torch\.inference_mode"),
    ):
        pipeline.engines[0].run(split(batch_of(2), 1), train=True)
