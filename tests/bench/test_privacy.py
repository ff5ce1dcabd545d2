"""The costs of private training: the same numbers from every contender, and one line of JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from goose_strategy.bench import privacy
from goose_strategy.bench.privacy import Work, make, parser
from goose_strategy.errors import ConfigError
from tests.harness.worker import Context
from tests.harness.world import run_ranks

SMALL = Work(width=64, layers=1, tokens=16, rows=2, microbatches=2, rounds=1)


def norms_of(ctx: Context) -> dict[str, torch.Tensor | None]:
    """Run every contender's step in a world of one."""
    privacy._prepare()
    return {name: make(name, SMALL)() for name in privacy.CONTENDERS}


@pytest.fixture(scope="module")
def norms() -> dict[str, torch.Tensor | None]:
    return run_ranks(norms_of, 1, isolated=True)[0]


def test_both_private_contenders_see_the_same_norms(norms: Any) -> None:
    assert norms["ordinary"] is None
    assert norms["torch"] is None
    assert torch.allclose(norms["private"], norms["opacus"], rtol=1e-5)
    assert float(norms["private"].min()) > 0


def whole(ctx: Context) -> dict[str, float]:
    """Run the report in a world of one."""
    privacy._prepare()
    return privacy.report(Work(width=64, layers=1, rows=2, rounds=1), quiet=True)


def test_a_report_has_every_figure() -> None:
    (line,) = run_ranks(whole, 1, isolated=True, timeout_s=55.0)
    assert set(line) == {"parity", "cost_short", "cost_any", "opacus_ghost_cost", "memory"}
    assert line["parity"] <= 1e-5
    assert all(value > 0 for name, value in line.items() if name != "parity")
    assert line["cost_any"] >= line["cost_short"]
    assert json.loads(json.dumps(line)) == line


@pytest.mark.parametrize(
    ("settings", "match"),
    [({"width": 65}, "width=65"), ({"rows": 0}, "rows=0"), ({"rounds": -1}, "rounds=-1")],
)
def test_wrong_numbers_are_named(settings: dict[str, int], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Work(**settings)


def test_an_unknown_option_or_contender_is_named() -> None:
    with pytest.raises(ConfigError, match="--rows"):
        parser().parse_args(["--rows", "3"])
    with pytest.raises(ConfigError, match="contender='ghost'"):
        make("ghost", SMALL)
    assert not dist.is_initialized()
