"""The machine code: nothing spilled, wide accesses, a bounded number of instructions."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from cuda_ops.bench.sass import Kernel, find_tool, name_of, read
from cuda_ops.build import build, find_nvcc
from cuda_ops.sources import DEFAULT_ARCHS

pytestmark = pytest.mark.compile

read_once = cache(read)

STEP_KERNELS = 4 * (9 + 3 + 4)
OTHERS = 2 * 4 + 2 * 2 * 3 + 5  # main, moment; sum, unpack, reduce, prepare, probe

# 16-byte loads (weight, rest, both moments; three more for gradients of either type), stores, and
# instructions per eight elements on sm_90. A budget is 10 % above what nvcc 13.0 needs.
BUDGETS = {
    "step adam fp32 fp32 fp32": (9, 7, 582),
    "step adam bf16+16 fp32 fp32": (9, 6, 611),
    "step adam bf16+16 bf16 bf16": (7, 4, 854),
    "step adam bf16+8 8-bit 8-bit": (4, 1, 1279),
    "sum": (3, 0, 154),
    "unpack": (6, 3, 493),
}


@pytest.fixture(scope="module")
def library(built: Path) -> Path:
    if find_nvcc() is None:
        pytest.skip("no nvcc: put a CUDA toolkit's bin folder on the path, or set CUDA_HOME")
    if find_tool("cuobjdump") is None or find_tool("nvdisasm") is None:
        pytest.skip("pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    return build(["cuda"], folder=built)["cuda"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("arch", [f"sm_{arch}" for arch in DEFAULT_ARCHS])
def test_no_kernel_spills(arch: str, library: Path) -> None:
    kernels = read_once(library, arch)
    assert len([k for k in kernels if k.name.startswith("step ")]) == STEP_KERNELS
    assert len(kernels) == STEP_KERNELS + OTHERS
    bad = [k for k in kernels if k.spills or k.local or k.registers > 80]
    assert bad == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BUDGETS)
def test_accesses_and_instructions(name: str, library: Path) -> None:
    kernels: dict[str, Kernel] = {k.name: k for k in read_once(library, "sm_90")}
    kernel = kernels[name]
    loads, stores, budget = BUDGETS[name]
    assert (kernel.loads16, kernel.stores16) == (loads, stores)
    assert kernel.instructions <= budget


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        (
            "_ZN5goose11step_kernelILi0ELi1ELi2ELi2EEEv15goose_step_args",
            "step adam bf16+16 bf16 bf16",
        ),
        (
            "_ZN5goose13moment_kernelILi3ELb1ELb0EEEv18goose_convert_args",
            "moment 8-bit second read",
        ),
        ("_ZN5goose11main_kernelILi3ELb1EEEv18goose_convert_args", "main bf16 write"),
        ("_ZN5goose10sum_kernelE15goose_norm_args", "sum"),
        ("something_else", "something_else"),
    ],
)
def test_names(symbol: str, name: str) -> None:
    assert name_of(symbol) == name
