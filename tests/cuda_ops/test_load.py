"""Whatever is wrong with a library, pure torch runs, and one message says why."""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cuda_ops import load, sources
from cuda_ops.bindings import Library
from cuda_ops.load import examine, library_for
from cuda_ops.sources import library_name
from tests.cuda_ops.compiled import CXX

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, the only one that is searched."""
    monkeypatch.setattr(sources, "folders", lambda: (tmp_path,))
    for name in ("CUDA_OPS", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    library_for.cache_clear()
    yield tmp_path
    library_for.cache_clear()


def test_nothing_built_is_one_message_with_the_command(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="cuda_ops"):
        assert library_for(CPU) is None
        assert library_for(CPU) is None
    (record,) = caplog.records
    assert "python -m cuda_ops.build --only cpu" in record.getMessage()


def test_only_one_rank_speaks(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert library_for(CPU) is None
    assert caplog.records == []


def test_off_is_silent(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_OPS", "off")
    assert library_for(CPU) is None
    assert caplog.records == []


def test_a_library_is_found_and_named(folder: Path, cpu: Library) -> None:
    shutil.copy(cpu.path, folder)
    library, why = examine(CPU)
    assert library is not None
    assert str(folder / library_name("cpu")) in why


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"half of a library"])
def test_a_broken_library_is_refused(folder: Path, content: bytes) -> None:
    (folder / library_name("cpu")).write_bytes(content)
    library, why = examine(CPU)
    assert library is None
    assert "--force" in why


def test_a_library_for_another_machine_is_refused(folder: Path, cpu: Library) -> None:
    image = bytearray(cpu.path.read_bytes())
    image[18:20] = (0xF3).to_bytes(2, "little")  # e_machine: RISC-V
    (folder / library_name("cpu")).write_bytes(image)
    library, why = examine(CPU)
    assert library is None
    assert "--force" in why


def test_a_library_of_other_sources_is_not_found(
    folder: Path, cpu: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(cpu.path, folder / "libgoose_cpu-x86_64-000000000000.so")
    library, why = examine(CPU)
    assert library is None
    assert "none is built for these sources" in why


def compile_c(folder: Path, text: str) -> None:
    if CXX is None:
        pytest.skip("no C++ compiler")
    source = folder / "made.cpp"
    source.write_text(f'extern "C" {{ {text} }}', encoding="utf-8")
    out = folder / library_name("cpu")
    subprocess.run([CXX, "-shared", "-fPIC", str(source), "-o", str(out)], check=True)


def test_another_interface_is_refused(folder: Path) -> None:
    compile_c(folder, "int goose_abi_version() { return 999; }")
    library, why = examine(CPU)
    assert library is None
    assert "has interface 999, this package 1" in why


def test_a_foreign_library_is_refused(folder: Path) -> None:
    compile_c(folder, "int nothing() { return 0; }")
    library, why = examine(CPU)
    assert library is None
    assert "is no library of cuda_ops" in why


def test_a_driver_that_is_too_old_falls_back(folder: Path) -> None:
    # What the probe's launch returns there: cudaErrorInsufficientDriver.
    compile_c(
        folder,
        "int goose_abi_version() { return 1; }"
        'const char* goose_build() { return "sm_90"; }'
        'const char* goose_error(int) { return "CUDA driver version is insufficient"; }'
        "int goose_probe(int) { return 35; } int goose_reduce() { return 0; }"
        "int goose_sum_of_squares() { return 0; } int goose_prepare() { return 0; }"
        "int goose_step() { return 0; } int goose_unpack() { return 0; }"
        "int goose_split_main() { return 0; } int goose_join_main() { return 0; }"
        "int goose_write_moment() { return 0; } int goose_read_moment() { return 0; }",
    )
    library, why = examine(CPU)
    assert library is None
    assert (
        "built for sm_90, does not run here: CUDA driver version is insufficient (code 35)" in why
    )


def test_other_devices_have_no_library(folder: Path) -> None:
    library, why = examine(torch.device("meta"))
    assert library is None
    assert why == "no library for meta"


def test_cpu_mode_leaves_cards_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_OPS", "cpu")
    assert examine(torch.device("cuda")) == (None, "CUDA_OPS=cpu")


def test_one_rank_speaks_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert load._speaks()
