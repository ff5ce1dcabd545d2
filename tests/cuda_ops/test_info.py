from __future__ import annotations

import pytest

from cuda_ops.info import main, report


def test_the_report_says_what_runs_and_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_OPS", "off")
    assert main() == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == report()
    assert "cpu: pure torch (CUDA_OPS=off)" in printed
    assert any(line.startswith("nvcc: ") for line in printed)
