"""Builds the libraries: ``python -m cuda_ops.build [--arch 80,90,100] [--only cpu|cuda]``.

torch's ``CUDAExtension`` ties a library to one version of torch and cannot build beside a torch
without CUDA. These libraries have a C interface and know neither torch nor Python, so one of them
serves every version, and the build needs only a C++ compiler, and nvcc for the kernels.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cuda_ops.sources import (
    CSRC,
    CXX_FLAGS,
    DEFAULT_ARCHS,
    INSTRUCTION_SETS,
    KINDS,
    NVCC_FLAGS,
    folders,
    library_name,
    mode,
)

LOCK_SECONDS = 300.0
"""How long a build waits for another one of the same folder."""

_COMPILE_SECONDS = 900.0


class BuildError(RuntimeError):
    """A library could not be built; the message says why and what to do."""


def build(
    kinds: Sequence[str],
    *,
    archs: Sequence[str] = DEFAULT_ARCHS,
    folder: Path | None = None,
    force: bool = False,
) -> dict[str, Path]:
    """Build libraries, one process at a time, each put in place by an atomic rename.

    Args:
        kinds: ``"cpu"``, ``"cuda"`` or both.
        archs: Compute capabilities of the kernels, ascending; the last one is kept as PTX, too.
        folder: Where to put them. By default beside the package, or in the user's cache where that
            cannot be written.
        force: Build even if a fitting library is there.

    Returns:
        The path of each library.

    Raises:
        BuildError: If a compiler is missing or fails, or another build does not end.
    """
    target = _writable(folder)
    paths = {}
    with _lock(target):
        for kind in kinds:
            path = target / library_name(kind)
            if force or not path.is_file():
                with tempfile.TemporaryDirectory(dir=target, prefix=".build-") as work:
                    made = Path(work) / path.name
                    _compile_cpu(made) if kind == "cpu" else _compile_cuda(made, archs)
                    os.replace(made, path)
            paths[kind] = path
    return paths


def build_what_is_possible(folder: Path | None = None) -> dict[str, str]:
    """Build what ``CUDA_OPS`` asks for and the compilers allow.

    ``auto`` builds what it can, ``cpu`` needs a C++ compiler, ``cuda`` needs nvcc too, ``off``
    builds nothing.

    Returns:
        What became of each kind, in words.

    Raises:
        BuildError: If something was asked for by name and cannot be built.
    """
    wanted = mode()
    outcome = {}
    for kind in KINDS:
        if wanted == "off" or (wanted == "cpu" and kind == "cuda"):
            outcome[kind] = f"not built: CUDA_OPS={wanted}"
            continue
        try:
            outcome[kind] = f"built: {build([kind], folder=folder)[kind]}"
        except BuildError as error:
            if wanted != "auto":
                raise
            outcome[kind] = f"not built: {error}"
    return outcome


def find_cxx() -> str | None:
    """Return the C++ compiler: ``CXX``, or the first of g++, c++ and clang++ on the path."""
    named = os.environ.get("CXX")
    names = [named] if named else ["g++", "c++", "clang++"]
    return next((found for name in names if (found := shutil.which(name))), None)


def find_nvcc() -> str | None:
    """Return nvcc: below ``CUDA_HOME`` or ``CUDA_PATH``, or on the path."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        path = os.path.join(os.environ.get(variable, ""), "bin", "nvcc")
        if os.environ.get(variable) and os.access(path, os.X_OK):
            return path
    return shutil.which("nvcc")


def lock_file(folder: Path) -> Path:
    """Return the lock of a folder. It lies elsewhere: what is in the folder goes into wheels."""
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"goose3d-build-{os.getuid()}-{name}.lock"


def _compile_cpu(out: Path) -> None:
    cxx = find_cxx()
    if cxx is None:
        raise BuildError(
            "no C++ compiler was found: install g++, or name one in CXX; without it pure torch runs"
        )
    flags = [*CXX_FLAGS, f"-I{CSRC}"]
    x86 = platform.machine() in ("x86_64", "AMD64")
    sets = INSTRUCTION_SETS if x86 else {"table_baseline": ()}
    objects = []
    for table, extra in sets.items():
        objects.append(str(out.parent / f"{table}.o"))
        loops = str(CSRC / "cpu_loops.cpp")
        _run([cxx, *flags, *extra, f"-DGOOSE_TABLE={table}", "-c", loops, "-o", objects[-1]])
    _run([cxx, *flags, "-pthread", "-shared", str(CSRC / "cpu.cpp"), *objects, "-o", str(out)])


def _compile_cuda(out: Path, archs: Sequence[str]) -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError(
            "no nvcc was found: put a CUDA toolkit's bin folder on the path, or set CUDA_HOME"
        )
    _run([*nvcc_command(nvcc, archs), "-Xcompiler", "-fPIC", "-shared", "-o", str(out)])


def nvcc_command(nvcc: str, archs: Sequence[str]) -> list[str]:
    """Return the command that compiles the kernels, without its output.

    Args:
        nvcc: The compiler.
        archs: Compute capabilities, ascending.
    """
    for arch in archs:
        if not arch.rstrip("af").isdigit():
            raise BuildError(f"arch={arch}: a compute capability such as 90 is needed")
    generate = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
    generate.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    words = " ".join(f"sm_{a}" for a in archs)
    built_for = f'-DGOOSE_BUILT_FOR="{words}, PTX {archs[-1]}"'
    threads = str(min(len(archs), os.cpu_count() or 1))
    source = str(CSRC / "cuda.cu")
    command = [nvcc, *NVCC_FLAGS, "-cudart", "static", "--threads", threads, *generate, built_for]
    return [*command, f"-I{CSRC}", source]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise BuildError(f"{command[0]} failed ({done.returncode}):\n" + "\n".join(lines[-20:]))


def _writable(folder: Path | None) -> Path:
    candidates = folders() if folder is None else (folder,)
    reasons = []
    for candidate in candidates:
        try:
            candidate.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=candidate):
                return candidate
        except OSError as error:
            reasons.append(f"{candidate}: {error.strerror}")
    raise BuildError("no folder for the libraries can be written: " + "; ".join(reasons))


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. The kernel drops it with its process, so it cannot go stale."""
    path = lock_file(folder)
    deadline = time.monotonic() + LOCK_SECONDS
    told = False
    with path.open("a+", encoding="utf-8") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError(
                        f"another build has held {path} for {LOCK_SECONDS:.0f} s; end that process "
                        "(the lock goes with it) and build again"
                    ) from None
                if not told:
                    sys.stderr.write(f"cuda_ops: waiting for another build ({path})\n")
                    told = True
                time.sleep(0.1)
            except OSError:
                # A file system without locks. Two builds then do the same work; each library is
                # still put in place whole, by a rename.
                break
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Build from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cuda_ops.build", description=__doc__)
    parser.add_argument("--arch", default=",".join(DEFAULT_ARCHS), help="such as 80,90,100")
    parser.add_argument("--only", choices=KINDS, help="build this library, or fail")
    parser.add_argument("--force", action="store_true", help="build even if nothing changed")
    options = parser.parse_args(arguments)
    archs = [arch.strip() for arch in options.arch.split(",") if arch.strip()]
    failed = False
    for kind in [options.only] if options.only else list(KINDS):
        started = time.monotonic()
        try:
            path = build([kind], archs=archs, force=options.force)[kind]
        except BuildError as error:
            sys.stderr.write(f"cuda_ops: {kind} not built: {error}\n")
            # Without nvcc the CPU library is all there is to build.
            failed |= kind == "cpu" or options.only is not None or find_nvcc() is not None
            continue
        sys.stdout.write(f"cuda_ops: {kind}: {path} ({time.monotonic() - started:.1f} s)\n")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
