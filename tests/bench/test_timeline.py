"""``goose3d timeline`` writes what its ending says, prints the figures, and refuses the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from goose_strategy import cli
from tests.bench.recorded import record


def test_figures_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, 4, 8)
    assert cli.main(["timeline", str(tmp_path), "--step", "1"]) == 0
    told = capsys.readouterr().out
    assert "step 1 of 1F1B, 4 stages, 8 microbatches, 4 ranks" in told
    assert "bubble 27.3% measured, 27.3% predicted" in told
    assert "recorded      steps 1, 2" in told
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".jsonl"] * 4


@pytest.mark.parametrize(
    ("ending", "begins"), [("png", b"\x89PNG"), ("html", b"<!doctype html>"), ("json", b'{"trace')]
)
def test_the_ending_decides(
    tmp_path: Path, ending: str, begins: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    if ending == "png":
        pytest.importorskip("matplotlib")
    record(tmp_path / "in", 2, 2)
    out = tmp_path / f"x.{ending}"
    assert cli.main(["timeline", str(tmp_path / "in"), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(begins)
    assert f"written       {out}" in capsys.readouterr().out
    if ending == "json":
        assert json.loads(out.read_text())["otherData"]["step"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["in", "--out", "x.svg"], "out='x.svg' must end with one of .png, .html, .json"),
        (["in", "--out", "no/x.png"], "lies in a folder that does not exist"),
        (["in", "--step", "9"], "step=9 is not recorded"),
        (["in", "--step", "two"], "invalid int value: 'two'; see goose3d timeline --help"),
        (["out"], "DIR='out' is no folder"),
        ([], "required: DIR; see goose3d timeline --help"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "in", 2, 2)
    assert cli.main(["timeline", *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
