"""The check of a card runs without one up to the card; where there is one, it passes."""

from __future__ import annotations

import shutil

import pytest
import torch

from cuda_ops import sources
from cuda_ops.bench import gpu_check
from cuda_ops.bench.gpu_check import check_bits, find_place, main, traffic
from cuda_ops.bindings import Library
from cuda_ops.layout import Main, Moment
from cuda_ops.reference.calls import Reference


def test_dry_run(
    cpu: Library,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sources, "folders", lambda: (cpu.path.parent,))
    monkeypatch.delenv("CUDA_OPS", raising=False)
    assert main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "bits as on the CPU: 256 of 256 runs" in printed
    assert "pure torch beside the library: 6 of 6" in printed
    assert "| default | 20.00 |" in printed
    assert "| gradients cast, clipped, fused, copied |" in printed


def test_other_bits_are_reported(
    cpu: Library, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Wrong(Reference):
        def reduce_partials(self, partials: torch.Tensor, out: torch.Tensor) -> None:
            out.copy_(partials.sum() * (1 + 1e-15))

    monkeypatch.setattr(gpu_check, "variants", lambda: gpu_check_variants()[:1])
    place = gpu_check.Place(torch.device("cpu"), 4096, cpu, Wrong())
    first, *wrong = check_bits(place)
    assert first == "bits as on the CPU: 0 of 2 runs"
    assert "norm2" in wrong[0]


def gpu_check_variants() -> list[gpu_check.Variant]:
    from cuda_ops.bench.cases import variants

    return variants()


def test_without_a_card_it_says_so(
    cpu: Library, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sources, "folders", lambda: (cpu.path.parent,))
    monkeypatch.delenv("CUDA_OPS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert "torch sees no card" in capsys.readouterr().err
    monkeypatch.setenv("CUDA_OPS", "off")
    with pytest.raises(RuntimeError, match="the CPU library does not run: CUDA_OPS=off"):
        find_place(dry=True)


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_on_a_card() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if shutil.which("nvcc") is None and sources.find_library("cuda") is None:
        pytest.skip("no CUDA library: python -m cuda_ops.build --only cuda")
    assert main([]) == 0


@pytest.mark.parametrize(
    ("storage", "size"),
    [
        ((Main.FP32, Moment.FP32, Moment.FP32, torch.float32), 28.0),
        ((Main.SPLIT16, Moment.BF16, Moment.BF16, torch.bfloat16), 18.0),
        ((Main.SPLIT8, Moment.BLOCK8, Moment.BLOCK8, torch.bfloat16), 12 + 2 * 6 / 64),
    ],
)
def test_traffic(storage: tuple[Main, Moment, Moment, torch.dtype], size: float) -> None:
    assert traffic(*storage) == pytest.approx(size)
