"""Settings of an export."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from goose_strategy.errors import ConfigError
from goose_strategy.validate import one_of

_SIZES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp64": torch.float64,
    "float64": torch.float64,
}


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """How a model is written for the hub.

    Attributes:
        dtype: Type of the floating-point weights: ``"bf16"``, ``"fp16"``, ``"fp32"``, ``"fp64"``,
            a torch dtype or its name; as they are if ``None``.
        max_shard_size: Largest size of a file, in bytes or as ``"5GB"``; one larger tensor has a
            file of its own.
        overwrite: Replace an earlier export in the same place.
        tokenizer: Folder whose tokenizer files are copied; if ``None``, the folder that the model
            was loaded from, where it has some.

    Raises:
        ConfigError: If a setting is none of these.
    """

    dtype: torch.dtype | str | None = None
    max_shard_size: int | str = "5GB"
    overwrite: bool = False
    tokenizer: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        _ = self.torch_dtype, self.max_bytes
        if self.tokenizer is not None and not Path(self.tokenizer).is_dir():
            raise ConfigError(f"tokenizer={os.fspath(self.tokenizer)!r} is no folder.")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> ExportConfig:
        """Make one of settings by name.

        Raises:
            ConfigError: If a name is unknown.
        """
        known = [field.name for field in fields(cls)]
        for name in settings:
            one_of(known, setting=name)
        return cls(**settings)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The type as torch names it."""
        if isinstance(self.dtype, str):
            name = self.dtype.removeprefix("torch.")
            one_of(_DTYPES, dtype=name)
            return _DTYPES[name]
        if self.dtype is not None:
            one_of([*dict.fromkeys(_DTYPES.values())], dtype=self.dtype)
        return self.dtype

    @property
    def max_bytes(self) -> int:
        """The largest size of a file in bytes."""
        text = str(self.max_shard_size).strip().upper()
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B)?", text)
        size = round(float(match[1]) * _SIZES[match[2] or "B"]) if match else 0
        if size < 1:
            raise ConfigError(
                f"max_shard_size={self.max_shard_size!r} must be a number of bytes or a size such "
                "as '5GB' or '500MB'."
            )
        return size
