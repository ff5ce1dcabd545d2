"""What a rank needs while it loads: its part of the model and one more tensor, not the model."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto import AutoModelForCausalLM

from goose_strategy.hub.pretrained import from_pretrained
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.hub.checkpoints import CONFIGS
from tests.runtime.start import started

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


def _peak(ctx: Context, folder: str, ours: bool, tp: int, pp: int) -> dict[str, int]:
    """Load on this rank; return the growth of its resident memory at its largest."""
    torch.distributed.init_process_group("gloo")
    load = from_pretrained if ours else AutoModelForCausalLM.from_pretrained
    # Everything is imported and has been used once.
    with started(tp, pp) as runtime:
        runtime.shard_module(load(f"{folder}/small"))
    with started(tp, pp) as runtime:
        gc.collect()
        _RESET.write_text("5")
        before = _status("VmRSS")
        model = load(f"{folder}/large")
        largest = max(p.nbytes for p in model.parameters())
        runtime.shard_module(model)
        grown = _status("VmHWM") - before
        shard = sum(p.nbytes for p in model.parameters())
    torch.distributed.destroy_process_group()
    return {"peak": grown, "shard": shard, "largest": largest}


@pytest.mark.skipif(not _RESET.exists(), reason="reads the kernel's peak of resident memory")
@pytest.mark.timeout(180)
def test_a_rank_needs_its_part_and_one_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, layers in (("small", {"vocab_size": 97}), ("large", {})):
        model = AutoModelForCausalLM.from_config(CONFIGS["llama"](**{**_SIZES, **layers}))
        model.save_pretrained(tmp_path / name, max_shard_size="50MB")
    whole = sum(p.nbytes for p in model.parameters())
    assert whole > 200_000_000
    del model
    found = {}
    for ours in (True, False):
        found[ours] = run_ranks(_peak, 4, str(tmp_path), ours, 2, 2, isolated=True, timeout_s=80.0)
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
