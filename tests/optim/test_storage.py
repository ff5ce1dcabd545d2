"""Which storage the settings mean, and whose step it needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from cuda_ops.layout import Main, Moment
from goose_strategy.data_parallel.config import ZeroConfig
from goose_strategy.errors import ConfigError
from goose_strategy.optim.storage import Storage, check_storage, is_native, storage_of

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
MIXED = Storage(Main.FP32, Moment.BLOCK8, Moment.FP32)
WIDE = Storage(Main.FP32, Moment.FP32, Moment.FP32)
ADAMW = optim.AdamW([nn.Parameter(torch.zeros(1))])
AMSGRAD = optim.AdamW([nn.Parameter(torch.zeros(1))], amsgrad=True)


@pytest.mark.parametrize(
    ("settings", "dtype", "wanted"),
    [
        ({}, BF16, Storage(Main.SPLIT16, Moment.BF16, Moment.BF16)),
        ({}, FP32, WIDE),
        ({"preset": "fp32"}, BF16, WIDE),
        ({"preset": "compact"}, BF16, Storage(Main.SPLIT8, Moment.BLOCK8, Moment.BLOCK8)),
        ({"preset": "compact"}, FP32, Storage(Main.FP32, Moment.BLOCK8, Moment.BLOCK8)),
        ({"main": "bf16"}, BF16, Storage(Main.BF16, Moment.BF16, Moment.BF16)),
        (
            {"preset": "fp32", "exp_avg": "8bit"},
            BF16,
            Storage(Main.FP32, Moment.BLOCK8, Moment.FP32),
        ),
        ({"exp_avg_sq": "bf16"}, FP32, Storage(Main.FP32, Moment.FP32, Moment.BF16)),
    ],
)
def test_settings_name_a_storage(settings: Any, dtype: torch.dtype, wanted: Storage) -> None:
    assert storage_of(ZeroConfig(**settings), dtype) == wanted
    assert wanted.wide == (wanted == WIDE)


@pytest.mark.parametrize(
    ("settings", "optimizer", "dtypes", "native"),
    [
        ({}, ADAMW, {BF16}, True),
        ({}, ADAMW, {FP32}, False),
        ({}, ADAMW, {FP32, BF16}, True),
        ({}, ADAMW, {FP64}, False),
        ({}, ADAMW, {FP16}, False),
        ({}, ADAMW, {FP16, BF16}, False),
        ({}, AMSGRAD, {BF16}, False),
        ({}, ADAMW, set(), False),
        ({"preset": "fp32"}, AMSGRAD, {BF16}, False),
        ({"main": "fp32"}, AMSGRAD, {FP64}, False),
        ({"main": "fp32", "exp_avg": "fp32", "exp_avg_sq": "fp32"}, ADAMW, {BF16}, False),
        ({"skip_nonfinite": True}, ADAMW, {FP32}, True),
        ({"grads": "bf16", "preset": "fp32"}, ADAMW, {BF16}, True),
        ({"preset": "compact"}, ADAMW, {BF16, FP32}, True),
        ({"preset": "compact", "main": "fp32"}, ADAMW, {FP32}, True),
    ],
)
def test_our_step_is_taken_where_torchs_cannot(
    settings: Any, optimizer: optim.Optimizer, dtypes: set[torch.dtype], native: bool
) -> None:
    assert is_native(ZeroConfig(**settings), optimizer, dtypes) is native


@pytest.mark.parametrize(
    ("settings", "optimizer", "dtypes", "wanted"),
    [
        (
            {"preset": "default"},
            AMSGRAD,
            {BF16},
            "preset='default' cannot be had with amsgrad=True",
        ),
        ({"skip_nonfinite": True}, AMSGRAD, {FP32}, "skip_nonfinite='True'.*amsgrad"),
        ({"preset": "compact"}, ADAMW, {FP32}, "main='bf16[+]8' beside bf16 weights"),
        ({"main": "bf16+16"}, ADAMW, {FP32}, "main='bf16[+]16' beside bf16 weights"),
        ({"grads": "bf16"}, ADAMW, {FP32}, "grads='bf16' accumulates"),
        ({"exp_avg": "8bit"}, ADAMW, {FP64}, "dtype=torch.float64"),
        ({"preset": "default"}, ADAMW, {BF16, FP16}, "dtype=torch.float16"),
    ],
)
def test_what_was_asked_for_is_never_ignored(
    settings: Any, optimizer: optim.Optimizer, dtypes: set[torch.dtype], wanted: str
) -> None:
    with pytest.raises(ConfigError, match=wanted):
        is_native(ZeroConfig(**settings), optimizer, dtypes)


def test_a_precision_is_checked_before_any_parameter_is_there() -> None:
    check_storage(ZeroConfig(preset="compact", grads="bf16"), "bf16-true")
    check_storage(ZeroConfig(preset="compact", main="fp32"), "16-mixed")
    with pytest.raises(ConfigError, match=r"preset='compact'.*precision='bf16-mixed'"):
        check_storage(ZeroConfig(preset="compact"), "bf16-mixed")
    with pytest.raises(ConfigError, match=r"main='bf16' cannot be had with precision='64-true'"):
        check_storage(ZeroConfig(main="bf16"), "64-true")
