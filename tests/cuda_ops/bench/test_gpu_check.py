"""The check of a card runs without one up to the card; where there is one, it passes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cuda_ops import sources
from cuda_ops.bench import gpu_check
from cuda_ops.bench.cases import Variant, variants
from cuda_ops.bench.gpu_check import check_bits, check_reference, main, parts_of
from cuda_ops.bench.parts import Clock, Outcome
from cuda_ops.bench.place import Place
from cuda_ops.bindings import Library
from cuda_ops.reference.calls import Reference


@pytest.fixture
def found(cpu: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the check find the library that the tests have built."""
    monkeypatch.setattr(sources, "folders", lambda: (cpu.path.parent,))
    monkeypatch.delenv("CUDA_OPS", raising=False)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Sequence[str]]]:
    """Keep the programs of other packages from running; they have tests of their own."""
    ran: list[tuple[str, Sequence[str]]] = []

    def command(module: str, flags: Sequence[str], _clock: Clock) -> Outcome:
        ran.append((module, flags))
        return [f"{module} ran"], False

    monkeypatch.setattr(gpu_check, "command", command)
    return ran


@pytest.mark.usefixtures("found")
def test_dry_run(
    commands: list[tuple[str, Sequence[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "bits as on the CPU: 256 of 256 runs" in printed
    assert "pure torch beside the library: 6 of 6" in printed
    assert "no stream (dry run): the same bits" in printed
    assert "| default | 20.00 |" in printed
    assert "| gradients cast, clipped, fused, copied |" in printed
    assert commands == [
        ("goose_strategy.bench.shared_card", ["--dry-run"]),
        ("goose_strategy.bench.one_card", ["--dry-run"]),
    ]
    assert "goose_strategy.bench.one_card ran" in printed


def test_the_programs_that_it_runs_exist() -> None:
    from importlib.util import find_spec

    assert find_spec(gpu_check._SHARED_CARD) is not None
    assert find_spec(gpu_check._ONE_CARD) is not None


@pytest.mark.usefixtures("found")
def test_a_part_that_fails_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(module: str, _flags: Sequence[str], _clock: Clock) -> Outcome:
        return [module], "shared" in module

    def broken(_place: Place) -> Any:
        raise RuntimeError("no such stream")

    monkeypatch.setattr(gpu_check, "command", command)
    monkeypatch.setattr(gpu_check, "check_streams", broken)
    monkeypatch.setattr(gpu_check, "variants", lambda: variants()[:2])
    assert main(["--dry-run"]) == 1
    printed = capsys.readouterr().out
    assert "bits as on the CPU: 4 of 4 runs" in printed
    assert "order: FAILED, RuntimeError: no such stream" in printed
    assert "goose_strategy.bench.one_card" in printed


def test_other_bits_are_reported(cpu: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Reference):
        def reduce_partials(self, partials: torch.Tensor, out: torch.Tensor) -> None:
            out.copy_(partials.sum() * (1 + 1e-15))

    monkeypatch.setattr(gpu_check, "variants", _one_variant)
    place = Place(torch.device("cpu"), 4096, cpu, Wrong())
    (first, *wrong), failed = check_bits(place, Clock(60))
    assert failed
    assert first == "bits as on the CPU: 0 of 2 runs"
    assert "norm2" in wrong[0]


def _one_variant() -> list[Variant]:
    return variants()[:1]


def test_what_the_time_does_not_allow_is_left_out(cpu: Library) -> None:
    place = Place(torch.device("cpu"), 4096, cpu, Reference())
    assert check_bits(place, Clock(0)) == (
        ["bits as on the CPU: 0 of 0 runs, cut after 0 s: 256 left out"],
        False,
    )
    assert check_reference(place, Clock(0)) == (
        ["pure torch beside the library: 0 of 0, cut after 0 s"],
        False,
    )


def test_the_parts_fit_into_two_minutes(cpu: Library) -> None:
    place = Place(torch.device("cpu"), 4096, cpu, Reference())
    assert gpu_check._ALL_S <= 120
    card = Place(torch.device("cuda"), 4096, cpu, Reference())
    assert sum(part.seconds for part in parts_of(card)) <= gpu_check._ALL_S + 2
    assert [part.name for part in parts_of(card)] == [part.name for part in parts_of(place)]


@pytest.mark.usefixtures("found")
def test_without_a_card_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert "torch sees no card" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_on_a_card() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if shutil.which("nvcc") is None and sources.find_library("cuda") is None:
        pytest.skip("no CUDA library: python -m cuda_ops.build --only cuda")
    assert main([]) == 0
