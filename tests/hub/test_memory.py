"""What a process needs while it loads or exports: a part and one layer, not the model."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto import AutoModelForCausalLM

from goose_strategy.hub.config import ExportConfig
from goose_strategy.hub.pretrained import from_pretrained
from goose_strategy.runtime.export import export_checkpoint
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.hub.checkpoints import CONFIGS
from tests.runtime.start import started
from tests.runtime.test_export import save_ours

MIB = 1 << 20
_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_SIZES: dict[str, Any] = {
    "vocab_size": 24000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "head_dim": 128,
}


def _status(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _begin() -> int:
    """Give freed memory back, forget the former peak, return what is resident."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    _RESET.write_text("5")
    return _status("VmRSS")


def _peak(ctx: Context, folder: str, ours: bool, tp: int, pp: int) -> dict[str, int]:
    """Load on this rank; return the growth of its resident memory at its largest."""
    torch.distributed.init_process_group("gloo")
    load = from_pretrained if ours else AutoModelForCausalLM.from_pretrained
    # Everything is imported and has been used once.
    with started(tp, pp) as runtime:
        runtime.shard_module(load(f"{folder}/small"))
    with started(tp, pp) as runtime:
        before = _begin()
        model = load(f"{folder}/large")
        largest = max(p.nbytes for p in model.parameters())
        runtime.shard_module(model)
        grown = _status("VmHWM") - before
        shard = sum(p.nbytes for p in model.parameters())
    torch.distributed.destroy_process_group()
    return {"peak": grown, "shard": shard, "largest": largest}


def _peaks_of_export(ctx: Context, folder: str) -> dict[str, int]:
    """Export on this rank, then on rank 0 alone from a checkpoint; return the peaks."""
    torch.distributed.init_process_group("gloo")
    for name in ("small", "large"):
        with started(2, 2) as runtime:
            model = from_pretrained(f"{folder}/{name}")
            runtime.shard_module(model)
            before = _begin()
            runtime.export(model, f"{folder}/{name}-online")
            found = {"online": _status("VmHWM") - before}
            save_ours(runtime, model, Path(folder) / f"{name}.ckpt")
        del model
        if ctx.rank == 0:
            before = _begin()
            export_checkpoint(f"{folder}/{name}.ckpt", f"{folder}/{name}-offline", ExportConfig())
            found["offline"] = _status("VmHWM") - before
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Write a small and a large model; return the folder and the size of the large one."""
    folder = tmp_path_factory.mktemp("models")
    for name, more in (("small", {"vocab_size": 97}), ("large", {})):
        model = AutoModelForCausalLM.from_config(CONFIGS["llama"](**{**_SIZES, **more}))
        model.save_pretrained(folder / name, max_shard_size="50MB")
    whole = sum(p.nbytes for p in model.parameters())
    assert whole > 200_000_000
    return folder, whole


@pytest.mark.skipif(not _RESET.exists(), reason="reads the kernel's peak of resident memory")
@pytest.mark.timeout(180)
def test_a_rank_needs_its_part_and_one_tensor(
    models: tuple[Path, int], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, whole = models
    found = {}
    for ours in (True, False):
        found[ours] = run_ranks(_peak, 4, str(folder), ours, 2, 2, isolated=True, timeout_s=80.0)
    with capsys.disabled():
        print(f"\nmodel {whole / MIB:.0f} MiB, tp2 pp2; peak growth per rank, MiB:")
        for ours, ranks in found.items():
            who = "goose_strategy.from_pretrained" if ours else "transformers' from_pretrained "
            peaks = ", ".join(
                f"{r['peak'] / MIB:.0f} (its part {r['shard'] / MIB:.0f})" for r in ranks
            )
            print(f"  {who}  {peaks}")
    for rank in found[True]:
        # Allocators round up, and blocks of the files are held for a moment.
        assert rank["peak"] <= rank["shard"] + rank["largest"] + 48 * MIB, rank
    assert all(rank["peak"] > whole for rank in found[False]), "the measurement does not measure"


@pytest.mark.skipif(not _RESET.exists(), reason="reads the kernel's peak of resident memory")
@pytest.mark.timeout(180)
def test_an_export_needs_one_layer(
    models: tuple[Path, int], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, whole = models
    found = run_ranks(_peaks_of_export, 4, str(folder), isolated=True, timeout_s=80.0)
    online = [rank["online"] for rank in found]
    offline = found[0]["offline"]
    with capsys.disabled():
        shown = ", ".join(f"{peak / MIB:.0f}" for peak in online)
        print(f"\nmodel {whole / MIB:.0f} MiB; peak growth of an export, MiB:")
        print(f"  by the ranks, tp2 pp2  {shown}\n  from a checkpoint      {offline / MIB:.0f}")
    # The embedding, 47 MiB, is the largest unit: gathered, put together, and cast or copied once.
    assert all(peak <= 3 * 47 * MIB + 32 * MIB for peak in online)
    assert offline <= 2 * 47 * MIB + 64 * MIB < whole
