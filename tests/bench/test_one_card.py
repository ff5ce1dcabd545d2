"""A Llama on one card: a tiny one on a CPU, what fits where, and what is called wrong."""

from __future__ import annotations

import pytest
import torch

from goose_strategy.bench import one_card
from goose_strategy.bench.one_card import Figures, build, disagreement, main, rows_for, table
from tests.harness.worker import Context
from tests.harness.world import run_ranks

GIB = 2**30


def _dry_run(_ctx: Context) -> tuple[int, str]:
    written: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_card.sys.stdout, "write", written.append)
        return main(["--dry-run"]), "".join(written)


def test_dry_run() -> None:
    ((status, printed),) = run_ranks(_dry_run, 1, isolated=True)
    assert status == 0, printed
    lines = printed.splitlines()
    assert lines[0].startswith("0.000 billion parameters, bf16-true, 2 x 32 tokens on CPU")
    names = [line.split("|")[1].strip() for line in lines if line.startswith("|")]
    assert names == ["", "---", "goose3d", "plain Fabric"]


def test_the_shape_is_that_of_llama_3_2_1b() -> None:
    model = build(torch.device("meta"), dry=False)
    assert sum(param.numel() for param in model.parameters()) == 1_235_814_400
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("free", "rows"), [(15, 0), (20.4, 0), (23, 1), (31, 4), (46, 8), (78, 16), (139, 16)]
)
def test_rows_that_fit(free: float, rows: int) -> None:
    assert rows_for(int(free * GIB)) == rows


def test_figures() -> None:
    figures = Figures("goose3d", [3.0, 2.0], [0.5, 0.1, 0.25], 3 * GIB)
    (*_, row) = table([figures], tokens=1000, flops=2e9, peak=1e14)
    assert row == "| goose3d | 250.0 | 4,000 | 8.0 | 8.0 % | 3.00 |"
    assert "| unknown |" in table([figures], tokens=1000, flops=2e9, peak=None)[-1]


def _figures(name: str, *losses: float) -> Figures:
    return Figures(name, list(losses), [0.1], 0)


@pytest.mark.parametrize(
    ("other", "wrong"),
    [
        ((3.01, 2.9), None),
        ((3.1, 2.9), "the first losses differ: a 3.0, b 3.1"),
        ((3.0, 3.0), "b: the losses do not fall"),
        ((3.0, float("nan")), "b: the losses are no numbers"),
        ((3.0, float("-inf")), "b: the losses are no numbers"),
    ],
)
def test_what_counts_as_wrong(other: tuple[float, ...], wrong: str | None) -> None:
    found = disagreement([_figures("a", 3.0, 2.0), _figures("b", *other)])
    assert (found is None) == (wrong is None)
    assert wrong is None or (found or "").startswith(wrong)


def test_a_card_that_is_too_small_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (12 * GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    assert main([]) == 3
    assert capsys.readouterr().out == "12.0 GiB are free, 20.5 are needed\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 3
    assert "torch sees no card" in capsys.readouterr().out
