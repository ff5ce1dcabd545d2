"""In what the state of a bucket is kept, and whether that needs our own step.

torch's optimizers want weights, gradients and moments of one type. Where a setting asks for less
than fp32, the step is `cuda_ops`'; where all is fp32, torch's own kernels run as they always did.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from cuda_ops.layout import Main, Moment
from goose_strategy.data_parallel.config import PRESETS
from goose_strategy.errors import ConfigError
from goose_strategy.optim.rules import NATIVE, obstacle

if TYPE_CHECKING:
    from goose_strategy.data_parallel.config import ZeroConfig

_MOMENTS = {"fp32": Moment.FP32, "bf16": Moment.BF16, "8bit": Moment.BLOCK8}


@dataclass(frozen=True)
class Storage:
    """What the state of one bucket is kept in."""

    main: Main
    exp_avg: Moment
    exp_avg_sq: Moment

    @property
    def wide(self) -> bool:
        """Whether everything is fp32."""
        return (self.main, self.exp_avg, self.exp_avg_sq) == (Main.FP32, Moment.FP32, Moment.FP32)


def storage_of(config: ZeroConfig, dtype: torch.dtype) -> Storage:
    """Return what the state of weights of type ``dtype`` is kept in."""
    narrow = dtype == torch.bfloat16
    automatic = "default" if narrow else "fp32"
    main, first, second = PRESETS[automatic if config.preset == "auto" else config.preset]
    return Storage(
        # Weights of other types are their own main weights, or have an fp32 copy.
        main=Main(config.main or main) if narrow else Main.FP32,
        exp_avg=_MOMENTS[config.exp_avg or first],
        exp_avg_sq=_MOMENTS[config.exp_avg_sq or second],
    )


def check_storage(config: ZeroConfig, precision: str) -> None:
    """Refuse what a precision cannot have, before any parameter is there.

    Args:
        config: The settings.
        precision: Lightning's name of it.

    Raises:
        ConfigError: Naming the setting and the precision.
    """
    if precision == "bf16-true":
        return
    named = ", ".join(f"{name}={value!r}" for name, value in config.named.items())
    if precision == "64-true":
        wide = storage_of(config, torch.float64).wide and _main(config) == "fp32"
        if not wide or config.grads == "bf16" or config.skip_nonfinite:
            asked = named or ("grads='bf16'" if config.grads == "bf16" else "skip_nonfinite=True")
            raise ConfigError(
                f"{asked} cannot be had with precision='64-true', whose states are fp64; use "
                "ZeroConfig(preset='fp32') or another precision."
            )
        return
    if _main(config) != "fp32":
        raise ConfigError(
            f"{named} keeps main={_main(config)!r} beside bf16 weights, but precision="
            f"{precision!r} trains fp32 parameters; choose main='fp32', with any moments, or "
            "precision='bf16-true'."
        )
    if config.grads == "bf16":
        raise ConfigError(
            f"grads='bf16' accumulates in the type of bf16 parameters, but precision={precision!r} "
            "trains fp32 ones; choose grads='fp32' or precision='bf16-true'."
        )


def _main(config: ZeroConfig) -> str:
    """Return the main weights that were asked for by name."""
    return config.main or PRESETS.get(config.preset, ("fp32",))[0]


def is_native(config: ZeroConfig, optimizer: Optimizer, dtypes: Collection[torch.dtype]) -> bool:
    """Decide whether an optimizer is stepped by `cuda_ops`.

    Args:
        config: The settings.
        optimizer: The optimizer.
        dtypes: Types of its parameters, on any rank: all ranks must decide alike.

    Raises:
        ConfigError: If the settings ask for what the optimizer or its parameters cannot have.
    """
    asked = dict(config.named)
    if config.grads == "bf16":
        asked["grads"] = "bf16"
    if config.skip_nonfinite:
        asked["skip_nonfinite"] = "True"
    wanted = any(not storage_of(config, dtype).wide for dtype in dtypes)
    if not wanted and _main(config) == "fp32" and not asked.keys() & {"grads", "skip_nonfinite"}:
        return False
    named = ", ".join(f"{name}={value!r}" for name, value in asked.items())
    unfit = sorted(str(dtype) for dtype in set(dtypes) - {torch.float32, torch.bfloat16})
    reason = obstacle(optimizer)
    if not asked:
        # Nobody asked for fewer bits, so what cannot have them stays as it is.
        return not unfit and reason is None
    if unfit:
        raise ConfigError(
            f"{named} needs parameters of bf16 or fp32, but some have dtype={unfit[0]}; leave "
            "ZeroConfig's preset at 'auto' or 'fp32'."
        )
    if reason is not None:
        raise ConfigError(
            f"{named} cannot be had with {reason}; it needs one of {NATIVE}, without amsgrad and "
            "differentiable. Use ZeroConfig(preset='fp32') or another optimizer."
        )
    if config.grads == "bf16" and dtypes and torch.bfloat16 not in dtypes:
        raise ConfigError(
            "grads='bf16' accumulates gradients in the type of bf16 parameters, but these are fp32 "
            "(precision 32-true or mixed); choose grads='fp32' or precision='bf16-true'."
        )
    main = _main(config)
    if main != "fp32" and dtypes and torch.bfloat16 not in dtypes:
        raise ConfigError(
            f"{named} keeps main={main!r} beside bf16 weights, but the parameters are fp32 "
            "(precision 32-true or mixed); choose main='fp32', with any moments, or "
            "precision='bf16-true'."
        )
    return wanted or config.grads == "bf16" or config.skip_nonfinite
