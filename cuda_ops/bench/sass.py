"""What the compiler made of the kernels: ``python -m cuda_ops.bench.sass [--arch sm_90]``.

A kernel at the memory's speed needs wide loads and stores, no spilled registers, and few enough
instructions per byte. All of that can be read from the machine code on a machine without a GPU,
with ``pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cuda_ops.build import find_nvcc
from cuda_ops.sources import find_library

_FUNCTION = re.compile(r"Function : (\S+)|Function (\S+?):$")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_ARCH = re.compile(r"arch = (sm_\d+\w*)")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")
_CALL = re.compile(r"CALL\.REL\.NOINC\s+(?:`\(.*?\)|0x([0-9a-f]+))")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
_TEMPLATE = re.compile(r"goose1?\d?(\w+?_kernel)(?:I((?:L[ib]\d+E)+)E)?v?")
_ALGORITHMS = ("adam", "lion", "sgd")
_MAINS = ("fp32", "bf16+16", "bf16+8", "bf16")
_MOMENTS = ("none", "fp32", "bf16", "8-bit")


@dataclass(frozen=True)
class Kernel:
    """One kernel for one architecture.

    Attributes:
        name: Which kernel and storage, in words.
        arch: Such as ``sm_90``.
        registers: Per thread.
        local: Bytes of stack and local memory per thread.
        spills: Loads and stores of local memory.
        loads16: 16-byte loads of global memory, with those of either type of gradient.
        stores16: 16-byte stores.
        instructions: On the main path: without the subroutines for denormal roots and divisions.
    """

    name: str
    arch: str
    registers: int
    local: int
    spills: int
    loads16: int
    stores16: int
    instructions: int


def find_tool(name: str) -> str | None:
    """Return ``cuobjdump`` or ``nvdisasm``: on the path, beside nvcc, or from a wheel."""
    nvcc = find_nvcc()
    folders = [Path(nvcc).resolve().parent] if nvcc else []
    folders += sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/bin"))
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(map(str, folders)))


def read(library: Path, arch: str) -> list[Kernel]:
    """Return all kernels of a library for one architecture, sorted by name.

    Raises:
        FileNotFoundError: If the tools are missing.
    """
    usage = _usage(_dump(library, "-res-usage"), arch)
    code = _code(_dump(library, "-sass", "-arch", arch))
    return sorted((_kernel(s, arch, usage[s], code[s]) for s in code), key=lambda k: k.name)


def name_of(symbol: str) -> str:
    """Return a kernel's name in words: ``step adam bf16+16 bf16 bf16``."""
    found = _TEMPLATE.search(symbol)
    if found is None:
        return symbol
    kernel, values = found[1].removesuffix("_kernel"), re.findall(r"L[ib](\d+)E", found[2] or "")
    numbers = [int(value) for value in values]
    if kernel == "step":
        algorithm, main, first, second = numbers
        words = [_ALGORITHMS[algorithm], _MAINS[main], _MOMENTS[first], _MOMENTS[second]]
    elif kernel == "main":
        words = [_MAINS[numbers[0]], ("read", "write")[numbers[1]]]
    elif kernel == "moment":
        words = [
            _MOMENTS[numbers[0]],
            ("first", "second")[numbers[1]],
            ("read", "write")[numbers[2]],
        ]
    else:
        words = []
    return " ".join([kernel, *words])


def table(kernels: Sequence[Kernel]) -> list[str]:
    """Return a Markdown table."""
    lines = [
        "| kernel | registers | spills | 16-byte loads | 16-byte stores | instructions |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{k.name}` | {k.registers} | {k.spills} | {k.loads16} | {k.stores16} "
        f"| {k.instructions} |"
        for k in kernels
    ]
    return lines


def _dump(library: Path, *options: str) -> str:
    tools = [find_tool("cuobjdump"), find_tool("nvdisasm")]
    dump, disassemble = tools
    if dump is None or disassemble is None:
        raise FileNotFoundError("pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    path = os.pathsep.join([str(Path(disassemble).parent), os.environ.get("PATH", "")])
    return subprocess.run(
        [dump, *options, str(library)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": path},
    ).stdout


def _usage(text: str, wanted: str) -> dict[str, tuple[int, int]]:
    arch = symbol = ""
    found = {}
    for line in text.splitlines():
        if match := _ARCH.search(line):
            arch = match[1]
        elif match := _FUNCTION.search(line):
            symbol = match[1] or match[2]
        elif (match := _USAGE.search(line)) and arch == wanted:
            registers, stack, _, local = (int(value) for value in match.groups())
            found[symbol] = (registers, stack + local)
    return found


def _code(text: str) -> dict[str, list[tuple[int, str]]]:
    symbol = ""
    found: dict[str, list[tuple[int, str]]] = {}
    for line in text.splitlines():
        if match := _FUNCTION.search(line):
            symbol = match[1] or match[2]
            found[symbol] = []
        elif symbol and (match := _INSTRUCTION.search(line)):
            found[symbol].append((int(match[1], 16), match[2].strip()))
    return found


def _kernel(symbol: str, arch: str, usage: tuple[int, int], code: list[tuple[int, str]]) -> Kernel:
    targets = [int(found[1], 16) for _, text in code if (found := _CALL.search(text)) and found[1]]
    end = min(targets, default=sys.maxsize)
    main = [_PREDICATE.sub("", text).split()[0] for at, text in code if at < end]
    whole = Counter(_PREDICATE.sub("", text).split()[0] for _, text in code)
    count = Counter(main)

    def of(counter: Counter[str], prefix: str, suffix: str = "") -> int:
        return sum(n for op, n in counter.items() if op.startswith(prefix) and op.endswith(suffix))

    return Kernel(
        name=name_of(symbol),
        arch=arch,
        registers=usage[0],
        local=usage[1],
        spills=of(whole, "LDL") + of(whole, "STL"),
        loads16=of(count, "LDG", ".EF.128"),
        stores16=of(count, "STG", ".EF.128"),
        instructions=sum(count.values()) - count["NOP"],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of the built CUDA library; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cuda_ops.bench.sass", description=__doc__)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--match", default="", help="a regular expression on the kernels' names")
    options = parser.parse_args(arguments)
    library = find_library("cuda")
    if library is None:
        sys.stderr.write("no CUDA library: python -m cuda_ops.build --only cuda\n")
        return 1
    kernels = [k for k in read(library, options.arch) if re.search(options.match, k.name)]
    sys.stdout.write("\n".join(table(kernels)) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
