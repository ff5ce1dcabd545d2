"""What else a training loop may do between two steps, equal to one process.

Each scenario is a function of a session, run on the mesh and in one process.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from goose_strategy.pipeline_parallel.microbatch import _warn_few_rows
from tests.harness.models import IGNORED, Batch, batches
from tests.parity.grid import Case, Scenario, assert_parity, run_case, train
from tests.parity.session import MeshSession, Session, token_sum

TP, PP, DP = Case(tp=2, steps=2), Case(pp=2, steps=2), Case(dp=2, steps=2)
CUBE = Case(tp=2, pp=2, dp=2, steps=2)
V = replace(PP, schedule="ZBVZeroBubble")
STAGED = [V, replace(PP, tp=2, schedule="GPipe"), CUBE]
MESHES = [TP, DP, *STAGED]
HIDDEN = 32


def batch_of(length: int, *, rows: int = 8, seed: int = 0) -> Batch:
    return batches(1, batch_size=rows, seq_len=length, seed=seed + length)[0]


def learn(session: Session, batch: Batch | list[Batch], **settings: Any) -> None:
    session.backward(session.loss(batch, **settings))
    session.step()


def on(*cases: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=str)


# -- shapes ----------------------------------------------------------------------------------------


def lengths_change(session: Session, _case: Case) -> None:
    for length in (12, 7, 16, 5, 12):
        learn(session, batch_of(length))


@on(*MESHES)
def test_length_changes_from_call_to_call(case: Case) -> None:
    assert_parity(case, scenario=lengths_change)


def listed(session: Session, _case: Case) -> None:
    learn(session, [batch_of(12, rows=4), batch_of(7, rows=2), batch_of(9, rows=6)])
    learn(session, [batch_of(5, rows=2)])
    learn(session, [batch_of(6, rows=4), batch_of(16, rows=4)])


@on(*MESHES, Case(pp=4))
def test_list_of_microbatches_of_different_shapes(case: Case) -> None:
    assert_parity(case, scenario=listed)


@on(*STAGED)
def test_trimmed_padding_changes_nothing_but_the_messages(case: Case) -> None:
    run = assert_parity(replace(case, pipeline=(("trim_padding", True),)))
    messages = [one.shape for one in run.recorders[0].launches if one.op == "send"]
    lengths = {shape[1] for shape in messages if shape[-1] == HIDDEN}
    assert min(lengths) < 12 == max(lengths)


@on(*(replace(case, rows=rows) for case in MESHES for rows in (3, 7) if case.world_size < 8))
def test_rows_that_nothing_divides(case: Case) -> None:
    assert_parity(case)


def last_batch_is_short(session: Session, _case: Case) -> None:
    learn(session, batch_of(12))
    _warn_few_rows.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(2):
            learn(session, batch_of(12, rows=3, seed=seed))
    texts = {str(one.message) for one in caught}
    # One replica has two rows, the other one; each says so once.
    assert len(caught) == len(texts) == (1 if isinstance(session, MeshSession) else 0)
    assert all("num_microbatches=3 but the batch has only" in text for text in texts)
    learn(session, batch_of(12))


@on(CUBE, replace(PP, dp=2, schedule="GPipe"))
def test_short_last_batch_warns_once(case: Case) -> None:
    assert_parity(case, scenario=last_batch_is_short)


@on(
    *(
        replace(PP, pp=pp, schedule=schedule, microbatches=number, rows=5)
        for pp in (2, 4)
        for schedule in ("GPipe", "1F1B")
        for number in (1, 2, 3, 4, None)
    )
)
def test_any_number_of_microbatches(case: Case) -> None:
    assert_parity(case)


# -- inputs ----------------------------------------------------------------------------------------


def positions_given(session: Session, _case: Case) -> None:
    batch = batch_of(12)
    generator = torch.Generator().manual_seed(3)
    gaps = torch.randint(1, 4, batch["input_ids"].shape, generator=generator)
    # Rotary embeddings see distances only, so the gaps differ from row to row.
    learn(session, {**batch, "position_ids": gaps.cumsum(1)})
    learn(session, {**batch, "position_ids": 2 * torch.arange(12)[None, :]})
    learn(session, batch)


@on(*MESHES)
def test_positions_per_row_and_for_all_rows(case: Case) -> None:
    assert_parity(case, scenario=positions_given)


def masks_left_out(session: Session, _case: Case) -> None:
    for batch in batches(2, batch_size=8, padded=False):
        learn(session, batch)


@on(*MESHES)
def test_without_attention_mask(case: Case) -> None:
    assert_parity(case, scenario=masks_left_out)


def count_given(session: Session, _case: Case) -> None:
    for length in (12, 9):
        batch = batch_of(length)
        count = (batch["labels"][:, 1:] != IGNORED).sum()
        learn(session, batch, **({"num_items_in_batch": count} if is_mesh(session) else {}))


def is_mesh(session: Session) -> bool:
    return isinstance(session, MeshSession)


@on(*MESHES)
def test_number_of_items_given_by_the_caller(case: Case) -> None:
    assert_parity(case, scenario=count_given)


# -- labels ----------------------------------------------------------------------------------------


@contextmanager
def told_that_nothing_is_learned(session: Session) -> Iterator[None]:
    if not is_mesh(session):
        yield
        return
    with pytest.warns(UserWarning, match="Every label of the global batch is -100"):
        yield


def nothing_to_learn(session: Session, _case: Case) -> None:
    batch = batch_of(12)
    learn(session, batch)
    with told_that_nothing_is_learned(session):
        loss = session.loss({**batch, "labels": torch.full_like(batch["labels"], IGNORED)})
    assert loss.item() == 0.0
    session.backward(loss)
    session.step()
    # They are zero, so that nothing could be compared.
    for found in session.record.gradients.pop().values():
        gradient = found[1] if is_mesh(session) else found
        assert not gradient.any()
    learn(session, batch)


@on(*MESHES)
def test_batch_without_any_label_has_loss_zero_and_a_warning(case: Case) -> None:
    assert_parity(case, scenario=nothing_to_learn)


def some_learn_nothing(session: Session, _case: Case) -> None:
    for rows in (slice(0, 4), slice(4, 8), slice(2, 3)):
        batch = batch_of(12)
        # Half of the replicas, or a microbatch, have no label at all.
        batch["labels"][rows] = IGNORED
        learn(session, batch)


@on(*MESHES)
def test_replica_or_microbatch_without_labels(case: Case) -> None:
    assert_parity(case, scenario=some_learn_nothing)


# -- calls without gradients -----------------------------------------------------------------------


def evaluate_in_between(session: Session, case: Case) -> None:
    first, second, third = case.batches()
    learn(session, first)
    session.model.eval()
    with torch.no_grad():
        assert not session.loss(second).requires_grad
    with torch.inference_mode():
        session.loss(third)
    session.model.train()
    loss = session.loss(second)
    with torch.no_grad():
        session.loss(third)
    session.backward(loss)
    session.step()


@on(*(replace(case, steps=3) for case in MESHES))
def test_evaluation_between_steps(case: Case) -> None:
    assert_parity(case, scenario=evaluate_in_between)


def switch_dropout(session: Session, case: Case) -> None:
    batch, _ = case.batches()
    session.model.eval()
    exact = session.loss(batch)
    session.model.train()
    drawn, _ = session.call(batch)
    assert abs(drawn.item() - exact.item()) > 1e-4
    session.backward(drawn)
    session.zero_grad()
    session.model.eval()
    learn(session, batch)


@on(*(replace(case, settings=(("attention_dropout", 0.5),)) for case in MESHES))
def test_train_and_eval_reach_every_stage(case: Case) -> None:
    assert_parity(case, scenario=switch_dropout)


def ask_for_logits(session: Session, case: Case) -> None:
    for batch in case.batches():
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        loss, logits = session.call(inputs)
        assert loss is None
        session.keep_logits(logits)
        with torch.inference_mode():
            session.keep_logits(session.call(inputs)[1])
        learn(session, batch)


@on(*MESHES)
def test_logits_without_labels(case: Case) -> None:
    run = assert_parity(case, scenario=ask_for_logits)
    assert len(run.logits[0]) == 2 * case.steps


def logits_beside_the_loss(session: Session, case: Case) -> None:
    for batch in case.batches():
        loss, logits = session.call(batch)
        session.keep_logits(logits)
        session.backward(loss)
        session.step()


@on(TP, *STAGED)
def test_logits_of_training_calls(case: Case) -> None:
    case = replace(case, tensor=(("gather_logits", True),), pipeline=(("return_logits", True),))
    run = assert_parity(case, scenario=logits_beside_the_loss)
    assert len(run.logits[0]) == case.steps


def logits_of_a_list(session: Session, _case: Case) -> None:
    listed_batches = [batch_of(12, rows=4), batch_of(7, rows=2)]
    loss, logits = session.call(listed_batches)
    session.keep_logits(logits)
    session.backward(loss)
    session.step()


@on(*STAGED)
def test_logits_of_different_lengths(case: Case) -> None:
    case = replace(case, pipeline=(("return_logits", True),))
    assert_parity(case, scenario=logits_of_a_list)


# -- losses ----------------------------------------------------------------------------------------


def two_losses_one_backward(session: Session, case: Case) -> None:
    first, second, third = case.batches()
    chosen, rejected = session.loss(first), session.loss(second)
    session.backward(chosen - 0.3 * rejected)
    session.step(0.5)
    learn(session, third)


@on(*(replace(case, steps=3) for case in MESHES))
def test_two_forwards_before_one_backward(case: Case) -> None:
    assert_parity(case, scenario=two_losses_one_backward)


def backwards_in_other_order(session: Session, case: Case) -> None:
    first, second, third = case.batches()
    losses = [session.loss(first), session.loss(second)]
    session.backward(losses.pop())
    session.backward(session.loss(third))
    session.backward(2 * losses.pop())
    session.step()


@on(*(replace(case, steps=3) for case in MESHES))
def test_backwards_in_another_order_than_the_forwards(case: Case) -> None:
    assert_parity(case, scenario=backwards_in_other_order)


def losses_dropped(session: Session, case: Case) -> None:
    first, second, third = case.batches()
    session.loss(first)
    learn(session, second)
    kept = session.loss(first)
    learn(session, third)
    del kept
    learn(session, first)


@on(*(replace(case, steps=3) for case in MESHES))
def test_losses_whose_backward_never_comes(case: Case) -> None:
    assert_parity(case, scenario=losses_dropped)


def cleared_anywhere(session: Session, case: Case) -> None:
    first, second, third = case.batches()
    session.zero_grad()
    learn(session, first)
    loss = session.loss(second)
    # Lightning's Trainer clears here, which must not lose what the schedule has computed.
    session.zero_grad()
    session.backward(loss)
    session.step()
    session.backward(session.loss(first))
    session.zero_grad()
    learn(session, third)


@on(*(replace(case, steps=3) for case in MESHES))
def test_gradients_cleared_before_between_and_after(case: Case) -> None:
    assert_parity(case, scenario=cleared_anywhere)


def own_loss(outputs: Any, microbatch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What the one process computes, as a loss of the user's own."""
    total, count = token_sum(outputs.logits, microbatch["labels"])
    return total, torch.tensor(count)


@on(*STAGED)
def test_own_loss_on_the_last_stage(case: Case) -> None:
    assert_parity(replace(case, pipeline=(("loss_fn", own_loss),)))


# -- recomputed layers -----------------------------------------------------------------------------


def recompute(model: Any) -> Any:
    # transformers renames it: the old name warns, the new one is not in its oldest releases.
    (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )()
    return model


class Checkpointed(Case):
    """A case whose layers are recomputed in the backward."""

    def model(self) -> Any:
        return recompute(super().model())


def checkpoint_later(session: Session, case: Case) -> None:
    recompute(session.model)
    train(session, case)


@on(*MESHES)
@pytest.mark.parametrize("scenario", [train, checkpoint_later], ids=["before", "after"])
def test_gradient_checkpointing(case: Case, scenario: Scenario) -> None:
    kind = Checkpointed if scenario is train else Case
    run = assert_parity(kind(**vars(case)), scenario=scenario)
    if case.tp > 1:
        # The layers' sums over tp are launched once more.
        assert tp_launches(run) > tp_launches(run_case(case))


def tp_launches(run: Any) -> int:
    return sum(one.group.startswith("goose_tp") for one in run.recorders[0].launches)
