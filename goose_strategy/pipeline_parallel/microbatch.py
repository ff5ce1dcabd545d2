"""Cut a batch into microbatches along its rows.

``torch.distributed.pipelining`` cuts every tensor on dimension 0, refuses one that has no batch
dimension there (``position_ids`` of shape ``[1, seq]``) and batches whose rows do not divide, and
has no place for microbatches of different lengths. The stages here build their masks and positions
themselves from what they are given, so any batch the model takes can be cut.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from goose_strategy.errors import BatchError
from goose_strategy.pipeline_parallel.stage import LABELS

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.config import PipelineConfig

Microbatch: TypeAlias = dict[str, Any]

IGNORE_INDEX = -100

# Tensors that name a batch's rows, in order of preference.
_ROWS_FROM = ("input_ids", "inputs_embeds", "labels")
# One number per column, never per row, even where both happen to be equally many.
_PER_COLUMN = ("cache_position",)


def split_batch(
    batch: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    config: PipelineConfig,
    *,
    stages: int,
) -> list[Microbatch]:
    """Cut a batch into the microbatches of one call.

    Args:
        batch: Keyword arguments of the model: tensors with the batch's rows on dimension 0 are
            cut (into parts that differ by at most one row); scalars, tensors of size 1 on that
            dimension and everything that is no tensor go to every microbatch. Or a list of such
            mappings, each one a microbatch, which may differ in rows and length.
        config: Its ``num_microbatches`` and ``trim_padding``.
        stages: Number of stages.

    Returns:
        One dict per microbatch.

    Raises:
        BatchError: If the batch is empty, or a tensor's first dimension fits neither.
    """
    if isinstance(batch, Mapping):
        microbatches = _split_rows(batch, config, stages)
    else:
        microbatches = [dict(one) for one in batch]
        if not microbatches:
            raise BatchError("The list of microbatches is empty; pass at least one.")
    if config.trim_padding:
        return [trim_right_padding(one) for one in microbatches]
    return microbatches


def count_rows(batch: Mapping[str, Any]) -> int:
    """Return the number of rows of a batch.

    Args:
        batch: Keyword arguments of the model.

    Returns:
        Size of dimension 0 of ``input_ids``, ``inputs_embeds`` or ``labels``; else of the first
        tensor that has one.

    Raises:
        BatchError: If there is no such tensor, or it has no rows.
    """
    named = [batch[name] for name in _ROWS_FROM if name in batch]
    for value in named + list(batch.values()):
        if isinstance(value, Tensor) and value.dim() > 0:
            if value.shape[0] == 0:
                raise BatchError(f"The batch is empty: a tensor has shape {tuple(value.shape)}.")
            return value.shape[0]
    raise BatchError(f"The batch has no tensor with rows; it holds {sorted(batch)}.")


def _split_rows(batch: Mapping[str, Any], config: PipelineConfig, stages: int) -> list[Microbatch]:
    rows = count_rows(batch)
    wanted = config.microbatches(stages)
    number = min(rows, wanted)
    if number < wanted and config.num_microbatches is not None:
        _warn_few_rows(rows, wanted)
    parts: list[Microbatch] = [{} for _ in range(number)]
    for name, value in batch.items():
        if _has_rows(name, value, rows):
            for part, piece in zip(parts, torch.tensor_split(value, number), strict=True):
                part[name] = piece
        else:
            for part in parts:
                part[name] = value
    return parts


def _has_rows(name: str, value: Any, rows: int) -> bool:
    if not isinstance(value, Tensor) or value.dim() == 0 or name in _PER_COLUMN:
        return False
    if value.shape[0] == rows:
        return True
    if value.shape[0] == 1 or value.dim() == 1:
        return False
    raise BatchError(
        f"{name} has shape {tuple(value.shape)}, but the batch has {rows} rows: its first "
        "dimension must be the rows or 1. Pass a list of dicts, one per microbatch, to cut it "
        "yourself."
    )


def trim_right_padding(microbatch: Mapping[str, Any]) -> Microbatch:
    """Drop the columns on the right that hold padding, and no label, in every row.

    Reads values of the batch: on a CUDA device this waits for the device.

    Args:
        microbatch: Keyword arguments of the model. Without a two-dimensional ``attention_mask``
            (``[rows, columns]``, 0 is padding) nothing is known and nothing is dropped.

    Returns:
        The microbatch with every ``[rows, columns, ...]`` or ``[1, columns, ...]`` tensor cut.
    """
    out = dict(microbatch)
    mask = out.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return out
    rows, columns = mask.shape
    used = mask.ne(0).any(dim=0)
    labels = out.get("labels")
    if isinstance(labels, Tensor) and labels.shape == mask.shape:
        used = used | labels.ne(IGNORE_INDEX).any(dim=0)
    places = used.nonzero()
    # One column stays where all is padding: models do not take empty sequences.
    keep = int(places[-1]) + 1 if len(places) else 1
    for name, value in out.items():
        if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == columns:
            if value.shape[0] in (1, rows):
                out[name] = value[:, :keep].contiguous()
        elif name in _PER_COLUMN and isinstance(value, Tensor):
            out[name] = value[:keep]
    return out


@cache
def _warn_few_rows(rows: int, wanted: int) -> None:
    """Warn once per combination: the last batch of every epoch is short in the same way."""
    warnings.warn(
        f"num_microbatches={wanted} but the batch has only {rows} rows: it is cut into {rows} "
        "microbatches, and the stages idle more. Use larger batches or fewer microbatches.",
        UserWarning,
        stacklevel=4,
    )


def signature_of(microbatch: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return what fixes the shapes of the messages of a microbatch, equal on all stages.

    Args:
        microbatch: Keyword arguments of the model.

    Returns:
        Name and shape of every tensor but the labels, in the order of the names.
    """
    return tuple(
        (name, tuple(value.shape))
        for name, value in sorted(microbatch.items())
        if isinstance(value, Tensor) and name not in LABELS
    )


def precision_of(microbatches: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the type of the device, and the type to which autocast casts on it.

    Args:
        microbatches: Keyword arguments of the model.

    Returns:
        Such as ``("cuda", "torch.bfloat16")``; the second is empty where autocast is off.
    """
    tensors = (v for one in microbatches for v in one.values() if isinstance(v, Tensor))
    device_type = next((tensor.device.type for tensor in tensors), "cpu")
    if not torch.is_autocast_enabled(device_type):
        return device_type, ""
    return device_type, str(torch.get_autocast_dtype(device_type))
