"""Builds that fail say why, builds that race end, and what is half-written is never loaded."""

from __future__ import annotations

import fcntl
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cuda_ops import build as module
from cuda_ops.bindings import Library
from cuda_ops.build import (
    BuildError,
    build,
    build_what_is_possible,
    find_cxx,
    lock_file,
    main,
    nvcc_command,
)
from cuda_ops.sources import library_name
from tests.architecture.rules import ROOT

NOWHERE = "/nonexistent"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler anywhere."""
    monkeypatch.setenv("PATH", NOWHERE)
    for name in ("CXX", "CUDA_HOME", "CUDA_PATH", "CUDA_OPS"):
        monkeypatch.delenv(name, raising=False)


def fake_compiler(folder: Path, text: str) -> Path:
    path = folder / "cxx"
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# A compiler that writes its output slowly, and counts how often it was called to link.
SLOW = """
for word in "$@"; do [ "$last" = "-o" ] && out="$word"; last="$word"; done
printf half > "$out"; sleep 0.1; printf whole > "$out"
case "$*" in *-shared*) echo x >> "$COUNT";; esac
"""


@pytest.mark.usefixtures("bare")
def test_without_compilers_auto_builds_nothing_and_says_so(tmp_path: Path) -> None:
    outcome = build_what_is_possible(tmp_path)
    assert "no C++ compiler" in outcome["cpu"]
    assert "no nvcc" in outcome["cuda"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("mode", "words"), [("cpu", "no C\\+\\+ compiler"), ("cuda", "no C\\+\\+")]
)
def test_what_was_asked_for_by_name_fails(
    mode: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_OPS", mode)
    with pytest.raises(BuildError, match=words):
        build_what_is_possible(tmp_path)


def test_cuda_without_nvcc_fails_clearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", NOWHERE)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    with pytest.raises(BuildError, match=r"no nvcc was found: .* set CUDA_HOME"):
        build(["cuda"], folder=tmp_path)


@pytest.mark.usefixtures("bare")
def test_off_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_OPS", "off")
    assert build_what_is_possible(tmp_path) == dict.fromkeys(
        ("cpu", "cuda"), "not built: CUDA_OPS=off"
    )


def test_a_wrong_mode_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_OPS", "fast")
    with pytest.raises(ValueError, match="CUDA_OPS=fast: allowed are auto, cpu, cuda, off"):
        build_what_is_possible(tmp_path)


def test_a_broken_compiler_is_quoted_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = fake_compiler(tmp_path, "echo 'error: out of ideas' >&2; exit 3")
    monkeypatch.setenv("CXX", str(compiler))
    target = tmp_path / "lib"
    with pytest.raises(BuildError, match=r"failed \(3\):\nerror: out of ideas"):
        build(["cpu"], folder=target)
    assert list(target.iterdir()) == []


def test_a_compiler_that_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_bytes(b"\x7fELF of another machine")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(BuildError, match="could not be run"):
        build(["cpu"], folder=tmp_path / "lib")


def test_two_builds_at_once_build_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = tmp_path / "count"
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, SLOW)))
    monkeypatch.setenv("COUNT", str(count))
    target = tmp_path / "lib"
    program = (
        "import sys; from pathlib import Path; from cuda_ops.build import build; "
        "build(['cpu'], folder=Path(sys.argv[1]))"
    )
    builds = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(target)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    seen = set()
    while any(b.poll() is None for b in builds):
        path = target / library_name("cpu")
        if path.exists():
            seen.add(path.read_text())
        time.sleep(0.01)
    errors = [b.communicate()[1] for b in builds]
    assert [b.returncode for b in builds] == [0, 0], errors
    assert count.read_text() == "x\n"
    assert (target / library_name("cpu")).read_text() == "whole"
    assert seen <= {"whole"}, "a half-written library was visible"
    assert [p.name for p in target.iterdir()] == [library_name("cpu")]


def test_a_lock_that_is_left_behind_does_not_matter(tmp_path: Path) -> None:
    lock_file(tmp_path).touch()
    started = time.monotonic()
    with module._lock(tmp_path):
        pass
    assert time.monotonic() - started < 1.0


def test_a_build_that_never_ends_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lock_file(tmp_path)
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.3)
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BuildError, match=r"another build has held .* end that process"):
            build(["cpu"], folder=tmp_path)
    assert "waiting for another build" in capsys.readouterr().err


def test_a_waiting_build_goes_on_when_the_other_one_ends(tmp_path: Path) -> None:
    path = lock_file(tmp_path)
    entered = threading.Event()
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)

        def wait() -> None:
            with module._lock(tmp_path):
                entered.set()

        thread = threading.Thread(target=wait)
        thread.start()
        assert not entered.wait(0.3)
    thread.join(10)
    assert entered.is_set()


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu: Library
) -> None:
    file = tmp_path / "file"
    file.touch()
    cache = tmp_path / "cache"
    monkeypatch.setattr(module, "folders", lambda: (file / "lib", cache))
    assert module._writable(None) == cache
    monkeypatch.setattr(module, "folders", lambda: (file / "lib", file / "cache"))
    with pytest.raises(
        BuildError, match=r"no folder for the libraries can be written: .*lib.*cache"
    ):
        build(["cpu"])


def test_the_cpu_library_is_built_where_it_was_asked_for(built: Path, cpu: Library) -> None:
    assert cpu.path == built / library_name("cpu")
    assert find_cxx() is not None


@pytest.mark.parametrize("arch", ["", "sm_90", "90,100"])
def test_a_wrong_arch_is_refused(arch: str) -> None:
    with pytest.raises(BuildError, match=f"arch={arch}: a compute capability"):
        nvcc_command("nvcc", [arch])


def test_archs_become_options() -> None:
    command = nvcc_command("nvcc", ["80", "90a"])
    assert "-gencode=arch=compute_80,code=sm_80" in command
    assert "-gencode=arch=compute_90a,code=compute_90a" in command


@pytest.mark.usefixtures("bare")
def test_the_command_fails_where_nothing_can_be_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--force"]) == 1
    err = capsys.readouterr().err
    assert "cpu not built: no C++ compiler" in err
    assert "cuda not built: no nvcc" in err
