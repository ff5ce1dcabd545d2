"""The stream of a model's calls: kept, the caller's own, or refused."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from goose_strategy.errors import ConfigError
from goose_strategy.runtime.dropout import DropoutStream
from tests.harness.models import batches, rows_of, tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.runtime.start import mesh_of, message, started

SEED = 5


def quiet(_what: str) -> Any:
    return nullcontext()


def drawn(stream: DropoutStream, *, training: bool = True) -> list[float]:
    with stream(training=training):
        return torch.rand(2).tolist()


def _streams(ctx: Context, tp: int, pp: int, dp: int) -> dict[str, Any]:
    torch.manual_seed(SEED)
    with mesh_of(tp=tp, pp=pp, dp=dp) as mesh:
        stream, other = (DropoutStream(mesh, ordinal, quiet) for ordinal in (1, 2))
        first = drawn(stream)
        user = torch.rand(2).tolist()
        saved = stream.state_dict()
        second = drawn(stream)
        stream.load_state_dict({k: v.clone() for k, v in saved.items()})
        return {
            "place": tuple(mesh.coordinates),
            "first": first,
            "second": second,
            "again": drawn(stream),
            "other": drawn(other),
            "user": user,
            "saved": sorted(saved),
        }


@pytest.mark.parametrize("axis", ["pp", "dp"])
def test_stages_and_replicas_draw_their_own_and_the_caller_nothing(axis: str) -> None:
    ranks = run_ranks(_streams, 4, 2, *((2, 1) if axis == "pp" else (1, 2)))
    torch.manual_seed(SEED)
    untouched = torch.rand(2).tolist()
    for rank in ranks:
        assert rank["user"] == untouched
        assert rank["first"] != untouched
        assert rank["again"] == rank["second"] != rank["first"]
        assert rank["other"] != rank["first"], "two models of one script repeat each other"
        assert rank["saved"] == ["cpu"]
        twin = next(r for r in ranks if r["place"][:2] == rank["place"][:2])
        assert rank["first"] == twin["first"], "tp ranks of one stage share a stream"
    assert len({tuple(rank["first"]) for rank in ranks}) == 2


@pytest.mark.parametrize("tp", [1, 2])
def test_where_nothing_is_to_be_told_apart_the_stream_is_the_callers(tp: int) -> None:
    torch.manual_seed(SEED)
    expected = [torch.rand(2).tolist() for _ in range(3)]
    for rank in run_ranks(_streams, tp, tp, 1, 1):
        assert [rank["first"], rank["user"], rank["second"]] == expected
        assert rank["saved"] == []


def _drifting(ctx: Context) -> dict[str, Any]:
    torch.manual_seed(SEED + ctx.rank)
    with mesh_of(tp=2) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stream = DropoutStream(mesh, 1, quiet)
        first = drawn(stream)
        torch.rand(ctx.rank + 1)
        second = drawn(stream)
        return {"drawn": [first, second], "warned": [str(w.message) for w in caught]}


def test_tp_ranks_that_drew_apart_are_brought_together() -> None:
    first, second = run_ranks(_drifting, 2)
    assert first["drawn"] == second["drawn"]
    assert len(first["warned"]) == 2
    assert all("first rank's random state is used" in text for text in first["warned"])
    assert not second["warned"]


def _compared(ctx: Context) -> list[int]:
    """How often states were compared after calls that draw nothing, and after one that does."""
    counts = []
    with mesh_of(tp=2) as mesh:
        exchanges: list[str] = []

        def watch(what: str) -> Any:
            exchanges.append(what)
            return nullcontext()

        stream = DropoutStream(mesh, 1, watch)
        for training in (False, True, True, False):
            with stream(training=training):
                counts.append(len(exchanges))
        drawn(stream)
        drawn(stream)
        return [*counts, len(exchanges)]


def test_models_that_draw_nothing_are_compared_once_per_mode() -> None:
    assert run_ranks(_compared, 2) == [[1, 2, 2, 2, 3]] * 2


def _failing(ctx: Context) -> bool:
    torch.manual_seed(SEED)
    with mesh_of(tp=2, pp=2) as mesh:
        stream = DropoutStream(mesh, 1, quiet)
        saved = stream.state_dict()

        def fail() -> None:
            with stream(training=True):
                torch.rand(1 + mesh.tp_rank)
                raise ArithmeticError

        with pytest.raises(ArithmeticError):
            fail()
        user = torch.rand(2).tolist()
        torch.manual_seed(SEED)
        return torch.equal(saved["cpu"], stream.state_dict()["cpu"]) and (
            user == torch.rand(2).tolist()
        )


def test_a_failed_call_has_drawn_nothing() -> None:
    assert run_ranks(_failing, 4) == [True] * 4


def _checkpointed(ctx: Context, dropout: float, reentrant: bool) -> dict[str, Any]:
    """The whole model under torch's checkpoint, in the user's own code."""
    with started() as runtime:
        model = tiny_model("llama", attention_dropout=dropout)
        runtime.shard_module(model)
        mine = rows_of(batches(1)[0], ctx.rank, 2)

        def call(weight: Tensor) -> Tensor:
            loss: Tensor = model(**mine).loss
            return loss + 0 * weight

        loss = checkpoint(call, torch.ones((), requires_grad=True), use_reentrant=reentrant)

        if dropout:
            # Outside of runtime.backward(), whose watchdog would end this rank.
            return {"refused": message(loss.backward, ConfigError)}
        with runtime.backward(loss):
            loss.backward()
        return {"refused": ""}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_whole_model_that_is_computed_again_with_dropout_is_refused(reentrant: bool) -> None:
    for rank in run_ranks(_checkpointed, 2, 0.1, reentrant):
        assert "dp=2, pp=1" in rank["refused"]
        assert "gradient_checkpointing_enable" in rank["refused"]
    assert [rank["refused"] for rank in run_ranks(_checkpointed, 2, 0.0, True)] == ["", ""]
