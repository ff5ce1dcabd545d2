"""One rank refuses, and all raise: the rank its own error, the others the same class."""

from __future__ import annotations

from typing import Any

import pytest

from goose_strategy.errors import ConfigError, GooseError, PeerError, PlanError
from goose_strategy.runtime.verdict import agreed, equal_everywhere
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.runtime.start import mesh_of, message


def _refuse(ctx: Context) -> list[Any]:
    found: list[Any] = []
    with mesh_of(pp=2) as mesh:
        found.append(agreed(mesh, lambda: ctx.rank))
        for error in (PlanError("no", axis="tp"), ConfigError("wrong", rank=1), KeyError("bug")):

            def step(error: Exception = error) -> None:
                if ctx.rank == 1:
                    raise error

            try:
                agreed(mesh, step)
            except (GooseError, KeyError) as raised:
                found.append((type(raised), str(raised)))
    return found


def test_all_ranks_raise_what_one_refuses() -> None:
    first, second = run_ranks(_refuse, 2)
    assert first[0] == 0
    assert second[0] == 1
    assert second[1:] == [
        (PlanError, "no [axis tp]"),
        (ConfigError, "wrong [rank 1]"),
        (KeyError, "'bug'"),
    ]
    assert first[1:] == [
        (PlanError, "no [axis tp] [on rank 1]"),
        (ConfigError, "wrong [rank 1]"),
        (PeerError, "set-up failed on rank 1: KeyError: 'bug'"),
    ]


def _alone(ctx: Context) -> None:
    with mesh_of() as mesh:
        assert agreed(mesh, lambda: 3) == 3
        with pytest.raises(KeyError):
            agreed(mesh, lambda: {}["bug"])


def test_a_rank_alone_asks_nobody() -> None:
    run_ranks(_alone, 1)


def _compare(ctx: Context) -> str:
    with mesh_of(dp=2) as mesh:
        equal_everywhere(mesh, [1, 2], "a list")
        return message(lambda: equal_everywhere(mesh, ctx.rank, "a number"), PlanError)


def test_all_ranks_refuse_what_one_sees_otherwise() -> None:
    expected = "rank 1 and rank 0 see different things as a number: 1 and 0; give"
    assert all(text.startswith(expected) for text in run_ranks(_compare, 2))
