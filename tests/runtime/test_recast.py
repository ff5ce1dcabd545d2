"""A change of precision between saving and loading costs no bit of the main weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from goose_strategy.optim.segments import is_rounded
from tests.harness.models import tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.runtime.start import started
from tests.runtime.test_layouts import Sizes, held, load, put_together, ranks_of, save, shard, step

TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def _chain(
    _ctx: Context, sizes: list[Sizes], path: Path, types: list[str], settings: dict[str, Any]
) -> list[Any]:
    """Train in the first precision, then load into each further one what the last has saved."""
    found = []
    for number, (size, name) in enumerate(zip(sizes, types, strict=True)):
        with started(*size[:2]) as runtime:
            handle, optimizer = shard(
                runtime, family="llama", dtype=TYPES[name], seed=number, **settings
            )
            if number == 0:
                for batch in range(3):
                    step(runtime, handle, batch)
            else:
                load(runtime, path / str(number - 1), handle, optimizer)
            save(runtime, path / str(number), handle, optimizer)
            found.append(held(handle, optimizer))
    return found


def chain(path: Path, types: list[str], **settings: Any) -> list[dict[str, Tensor]]:
    sizes: list[Sizes] = [(2, 2, 1), (1, 2, 2), (2, 1, 2)][: len(types)]
    ranks = run_ranks(_chain, ranks_of(sizes[0]), sizes, path, types, settings)
    return [put_together([rank[index] for rank in ranks]) for index in range(len(types))]


def names(tied: bool) -> list[str]:
    return [name for name, _ in tiny_model("llama", tied=tied).named_parameters()]


def main(name: str) -> str:
    return f"optimizer.state.{name}.main"


@pytest.mark.parametrize("tied", [False, True])
def test_weights_in_fp32_are_the_main_weights_of_bf16_and_back(tied: bool, tmp_path: Path) -> None:
    first, wide, last = chain(tmp_path, ["bf16", "fp32", "bf16"], tied=tied)
    rounded = []
    for name in names(tied):
        weight, exact = first[f"model.{name}"], first[main(name)]
        assert torch.equal(wide[f"model.{name}"], exact)
        assert main(name) not in wide
        assert torch.equal(last[main(name)], exact)
        assert torch.equal(last[f"model.{name}"], weight)
        rounded.append(torch.equal(weight.float(), exact))
    assert not any(rounded), "nothing was rounded, so nothing is shown"
    for key, value in first.items():
        if key.startswith("optimizer") and not key.endswith("main"):
            assert torch.equal(value, last[key])


def test_main_weights_in_bf16_are_the_weights_of_fp32(tmp_path: Path) -> None:
    first, narrow, last = chain(tmp_path, ["fp32", "bf16", "fp64"])
    for name in names(tied=False):
        exact = first[f"model.{name}"]
        assert torch.equal(narrow[main(name)], exact)
        weight = narrow[f"model.{name}"]
        # A weight with a remainder rounds ties away from zero.
        ties = (exact.view(torch.int32) & 0xFFFF) == 0x8000
        assert torch.equal(weight[~ties], exact.bfloat16()[~ties])
        assert is_rounded(weight, exact).all()
        assert torch.equal(last[f"model.{name}"], exact.double())
