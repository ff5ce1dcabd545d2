from __future__ import annotations

from typing import Any

from goose_strategy.checkpoint.agree import collect
from goose_strategy.errors import CheckpointError
from tests.checkpoint.toy import make_mesh
from tests.harness.world import run_ranks


def gather_squares(context: Any) -> list[int]:
    mesh = make_mesh(1, 1, 4)
    values = collect(mesh, "squaring", lambda: mesh.rank**2)
    mesh.close()
    return values


def test_every_rank_gets_all_values() -> None:
    assert run_ranks(gather_squares, 4) == [[0, 1, 4, 9]] * 4


def fail_on_two(context: Any) -> tuple[str, int | None, str]:
    mesh = make_mesh(1, 1, 4)

    def step() -> None:
        if mesh.rank >= 2:
            raise OSError(28, f"no space left for rank {mesh.rank}")

    try:
        collect(mesh, "writing", step)
    except CheckpointError as err:
        # The group is still in step afterwards.
        assert collect(mesh, "again", lambda: 1) == [1] * 4
        mesh.close()
        return str(err), err.rank, type(err.__cause__).__name__
    raise AssertionError


def test_all_ranks_raise_the_first_cause() -> None:
    text = "writing failed: OSError: [Errno 28] no space left for rank 2 [rank 2]"
    causes = ["NoneType", "NoneType", "OSError", "OSError"]
    assert run_ranks(fail_on_two, 4) == [(text, 2, cause) for cause in causes]
