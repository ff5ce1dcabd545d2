"""Settings of an export are checked before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from goose_strategy.errors import ConfigError
from goose_strategy.hub.config import ExportConfig


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (None, None),
        ("bf16", torch.bfloat16),
        ("torch.float16", torch.float16),
        (torch.float64, torch.float64),
    ],
)
def test_types_have_several_names(given: Any, dtype: torch.dtype | None) -> None:
    assert ExportConfig(dtype=given).torch_dtype == dtype


@pytest.mark.parametrize(
    ("given", "size"),
    [(1000, 1000), ("1000", 1000), ("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("10KB", 10_000)],
)
def test_sizes_are_those_of_the_hub(given: int | str, size: int) -> None:
    assert ExportConfig(max_shard_size=given).max_bytes == size


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int8"}, "dtype='int8' is not known"),
        ({"dtype": torch.int64}, "dtype=torch.int64 is not known"),
        ({"max_shard_size": 0}, "max_shard_size=0"),
        ({"max_shard_size": "much"}, "max_shard_size='much'"),
        ({"max_shard_size": "-5GB"}, "max_shard_size='-5GB'"),
        ({"tokenizer": "absent/folder"}, "tokenizer='absent/folder' is no folder"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExportConfig(**settings)


def test_a_tokenizer_is_a_folder(tmp_path: Path) -> None:
    assert ExportConfig(tokenizer=tmp_path).tokenizer == tmp_path


def test_settings_by_name_are_known_or_refused() -> None:
    assert ExportConfig.of({"dtype": "bf16"}) == ExportConfig(dtype="bf16")
    with pytest.raises(ConfigError, match=r"setting='dtyp' is not known; choose one of 'dtype'"):
        ExportConfig.of({"dtyp": "bf16"})
