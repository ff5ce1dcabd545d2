"""The runtime's verbs for optimizers."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn, optim

from goose_strategy.errors import BatchError, ConfigError
from goose_strategy.optim.config import ZeroConfig
from goose_strategy.runtime.core import ParallelRuntime
from goose_strategy.runtime.settings import RuntimeConfig
from tests.harness.models import batches, rows_of, tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.runtime.start import CPU, message


def runtime_of(pp: int = 1, **settings: Any) -> ParallelRuntime:
    runtime = ParallelRuntime(RuntimeConfig(pp=pp, zero=ZeroConfig(bucket_numel=4096, **settings)))
    runtime.start(CPU)
    return runtime


def _late(ctx: Context) -> dict[str, Any]:
    """What other ranks stepped is missing until somebody waits for it."""
    found: dict[str, Any] = {}
    for wait in ("nothing", "verb", "state_dict", "child's state_dict", "forward", "clip", "stop"):
        runtime = runtime_of(overlap_param_gather=True)
        model = tiny_model("llama")
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        runtime.shard_module(model, optimizers=[optimizer])
        batch = rows_of(batches(1)[0], ctx.rank, ctx.world_size)
        loss = model(**batch).loss
        with runtime.backward(loss):
            loss.backward()
        optimizer.step()
        params = list(model.parameters())
        if wait == "verb":
            runtime.synchronize_parameters()
        elif wait == "state_dict":
            model.state_dict()
        elif wait == "child's state_dict":
            model.model.layers[0].state_dict()
        elif wait == "forward":
            with torch.no_grad():
                model(**batch)
        elif wait == "clip":
            runtime.clip_grad_norm(optimizer, 1.0)
        elif wait == "stop":
            runtime.stop()
        found[wait] = torch.cat([p.detach().flatten() for p in params]).clone()
        runtime.stop()
    return found


def test_weights_of_other_ranks_are_waited_for_where_they_are_needed() -> None:
    first, second = run_ranks(_late, 2)
    assert not torch.equal(first["nothing"], second["nothing"]), "nothing has arrived yet"
    for wait in first.keys() - {"nothing"}:
        assert torch.equal(first[wait], second[wait]), wait
        assert torch.equal(first[wait], first["verb"]), wait


def _skips(ctx: Context) -> tuple[list[int], list[str], str]:
    runtime = runtime_of(preset="default")
    model = tiny_model("llama", dtype=torch.bfloat16)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    runtime.shard_module(model, optimizers=[optimizer])
    counts, said = [runtime.skipped_steps(optimizer)], []
    for spoilt in (False, True, True, False):
        loss = model(**rows_of(batches(1)[0], ctx.rank, ctx.world_size)).loss
        loss = loss * (math.inf if spoilt and ctx.rank == 1 else 1.0)
        with runtime.backward(loss):
            loss.backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        said += [str(w.message) for w in caught]
        optimizer.zero_grad()
        counts.append(runtime.skipped_steps(optimizer))
    unknown = message(
        lambda: runtime.skipped_steps(optim.SGD([nn.Parameter(torch.ones(1))])), ConfigError
    )
    runtime.stop()
    return counts, said, unknown


def test_skipped_steps_are_counted() -> None:
    (counts, said, unknown), (others, silent, _) = run_ranks(_skips, 2)
    assert counts == others == [0, 0, 1, 2, 2]
    assert len(said) == 2
    assert silent == []
    assert "SGD is not attached" in unknown


def _refused(ctx: Context, settings: dict[str, Any], dtype: torch.dtype, kind: str) -> str:
    runtime = runtime_of(pp=2, **settings)
    model = tiny_model("llama", dtype=dtype)
    made = {
        "AdamW": lambda p: optim.AdamW(p),
        "amsgrad": lambda p: optim.AdamW(p, amsgrad=True),
        "RMSprop": lambda p: optim.RMSprop(p),
    }[kind](model.parameters())
    before = [p.detach().clone() for p in model.parameters()]

    def shard() -> None:
        runtime.shard_module(model, optimizers=[made])

    said = message(shard, ConfigError)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    runtime.stop()
    return said


BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("settings", "dtype", "kind", "wanted"),
    [
        ({"preset": "compact"}, BF16, "RMSprop", "preset='compact' .*optimizer=RMSprop"),
        ({"preset": "default"}, BF16, "amsgrad", "preset='default' .*amsgrad=True"),
        ({"exp_avg": "8bit"}, FP32, "amsgrad", "exp_avg='8bit' .*amsgrad=True"),
        ({"skip_nonfinite": True}, FP32, "RMSprop", "skip_nonfinite='True' .*optimizer=RMSprop"),
        ({"preset": "default"}, FP32, "AdamW", "main='bf16[+]16' .*fp32.*main='fp32'"),
        ({"main": "bf16"}, FP32, "AdamW", "main='bf16' .*fp32.*precision='bf16-true'"),
        ({"grads": "bf16"}, FP32, "AdamW", "grads='bf16' .*precision='bf16-true'"),
        ({"preset": "compact", "main": "fp32"}, FP64, "AdamW", "dtype=torch.float64"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    settings: dict[str, Any], dtype: torch.dtype, kind: str, wanted: str
) -> None:
    for said in run_ranks(_refused, 2, settings, dtype, kind):
        assert re.search(wanted, said), said


def _automatic(ctx: Context) -> list[bool]:
    native = []
    for dtype, kind in (
        (BF16, optim.AdamW),
        (FP32, optim.AdamW),
        (FP64, optim.AdamW),
        (BF16, optim.RMSprop),
        (BF16, optim.SGD),
    ):
        runtime = runtime_of()
        model = tiny_model("llama", dtype=dtype)
        handle = runtime.shard_module(model, optimizers=[kind(model.parameters(), lr=0.1)])
        native.append(handle.shards[0].native is not None)
        runtime.stop()
    return native


def test_what_nobody_asked_for_is_chosen_by_the_weights() -> None:
    assert run_ranks(_automatic, 1) == [[True, False, False, False, True]]


def _not_clipped(ctx: Context) -> str:
    runtime = runtime_of()
    model = tiny_model("llama")
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    said = message(lambda: runtime.clip_grad_norm(optimizer, 1.0), ConfigError)
    runtime.shard_module(model, optimizers=[optimizer])
    said += message(lambda: runtime.clip_grad_norm(optimizer, 1.0, norm_type=0.0), ConfigError)
    runtime.stop()
    return said


def test_clipping_is_refused_before_anything_is_sent() -> None:
    for said in run_ranks(_not_clipped, 2):
        assert "SGD is not attached" in said
        assert "norm_type=0.0" in said


def test_a_run_that_only_skips_is_ended_on_all_ranks() -> None:
    for said in run_ranks(_ended, 2):
        assert "max_skipped=1" in said


def _ended(ctx: Context) -> str:
    runtime = runtime_of(preset="default", max_skipped=1)
    model = tiny_model("llama", dtype=BF16)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    runtime.shard_module(model, optimizers=[optimizer])
    said = ""
    for _ in range(3):
        loss = model(**rows_of(batches(1)[0], ctx.rank, ctx.world_size)).loss * math.nan
        with runtime.backward(loss):
            loss.backward()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
        except BatchError as error:
            said = str(error)
            break
    runtime.stop()
    return said
