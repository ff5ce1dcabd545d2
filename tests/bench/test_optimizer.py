"""The figures are those of the report, and a short real run has their shape; never their size."""

from __future__ import annotations

import json

import pytest
import torch

from goose_strategy.bench import optimizer
from goose_strategy.bench.optimizer import Report, make, ratios, table
from goose_strategy.errors import ConfigError

NAMES = ("fp32_over_torch_fused", "default_over_torch_fused", "recipe_over_fp32", "compact_ns")


def test_figures() -> None:
    times = {"torch_fused": 0.5, "fp32": 0.55, "default": 0.8, "compact": 2.0}
    report = Report(4096, "made up", times | {"recipe": 3.0, "fp32_whole": 0.6})
    assert ratios(report) == dict(zip(NAMES, (1.1, 1.6, 5.0, 2.0), strict=True))
    printed = table(report)
    assert "4096 parameters, one thread; cuda_ops: made up" in printed
    assert (
        "default: bf16 + 16-bit remainder, bf16 moments                  0.80            1.60"
        in (printed)
    )


def test_every_contender_moves_its_weights() -> None:
    contenders = make(4096)
    fp32 = contenders["fp32"].__self__._shard.rest  # type: ignore[attr-defined]
    for name, step in contenders.items():
        ours = getattr(step, "__self__", None)
        weight = (
            fp32
            if ours is None
            else (ours._shard.rest if name[:4] == "fp32" else ours._shard.weight)
        )
        before = weight.clone()
        for _ in range(3):
            step()
        assert not torch.equal(weight, before), name


def test_a_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert optimizer.main(["--parameters", "10000", "--rounds", "1"]) == 0
    assert torch.get_num_threads() == threads
    *printed, line = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("AdamW on 8192 parameters")
    found = json.loads(line)
    assert tuple(found) == NAMES
    assert all(value > 0 for value in found.values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--parameters", "100"], "parameters=100 must be at least 2048"),
        (["--rounds", "0"], "rounds=0 must be greater than 0"),
        (["--steps", "3"], "see goose3d bench optimizer --help"),
    ],
)
def test_wrong_settings_are_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        optimizer.main(arguments)
