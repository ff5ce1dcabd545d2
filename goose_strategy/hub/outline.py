"""What an export will hold, before a single value is there: keys, shapes, and who goes together.

transformers turns a whole state dict back into the hub's names and parts, in the memory of one
process. Here it is done layer by layer. Whether that gives the same is found out on the meta
device, where a whole model costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from goose_strategy.compat.transformers import promised_ties
from goose_strategy.compat.weights import never_saved, revert_names
from goose_strategy.errors import PlanError
from goose_strategy.hub.plan import listed

_NUMBERED = re.compile(r"^(.*?\.\d+)\.")


class Shape(NamedTuple):
    """Type and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Unit(NamedTuple):
    """Tensors that are written together: one layer, or one tensor outside of the layers.

    Attributes:
        names: Their names in the model.
        keys: What is written for them, by key in the files.
    """

    names: tuple[str, ...]
    keys: dict[str, Shape]


def make_outline(
    blank: nn.Module, tensors: Mapping[str, Shape], dtype: torch.dtype | None
) -> list[Unit]:
    """Plan the export of a model.

    Args:
        blank: The whole model on the meta device, as its config describes it.
        tensors: Every parameter and persistent buffer of the real model, under one of its names,
            in order; those that the config ties need not be there twice.
        dtype: Type of the floating-point tensors in the files; as they are if ``None``.

    Returns:
        What is written, in order.

    Raises:
        PlanError: If the config does not describe these tensors, or a conversion reaches over
            layers.
    """
    ignored = never_saved(blank)
    saved = {name: shape for name, shape in tensors.items() if name not in ignored}
    _check_described(blank, saved, ignored)
    fakes = {name: _fake(shape, dtype) for name, shape in saved.items()}
    groups: dict[str, dict[str, Tensor]] = {}
    for name, fake in fakes.items():
        match = _NUMBERED.match(name)
        groups.setdefault(match[1] if match else name, {})[name] = fake
    units = [Unit(tuple(group), _shapes(blank, group)) for group in groups.values()]
    apart = {key: shape for unit in units for key, shape in unit.keys.items()}
    together = _shapes(blank, fakes)
    if apart != together:
        odd = sorted(apart.keys() ^ together.keys()) or sorted(apart)
        raise PlanError(
            f"the names of {type(blank).__name__} in hub files cannot be found layer by layer "
            f"(first: {odd[0]}); gather the model and use transformers' save_pretrained."
        )
    return units


def _check_described(blank: nn.Module, given: Mapping[str, Shape], ignored: set[str]) -> None:
    expected = {n: tuple(t.shape) for n, t in blank.state_dict().items() if isinstance(t, Tensor)}
    unknown = [name for name in given if name not in expected]
    if unknown:
        raise PlanError(
            f"the model has {len(unknown)} tensors that the config of {type(blank).__name__} does "
            f"not describe: {listed(unknown)}; merge adapters into the weights before the export."
        )
    wrong = [
        f"{name} has shape={shape.shape}, by the config {expected[name]}"
        for name, shape in given.items()
        if shape.shape != expected[name]
    ]
    if wrong:
        raise PlanError(f"the model is not as its config describes it: {listed(wrong)}.")
    ties = promised_ties(blank)
    missing = [
        name
        for name in expected
        if name not in given and name not in ignored and ties.get(name) not in given
    ]
    if missing:
        raise PlanError(
            f"{len(missing)} tensors of {type(blank).__name__} are not there: {listed(missing)}."
        )


def _fake(shape: Shape, dtype: torch.dtype | None) -> Tensor:
    fake = torch.empty(shape.shape, dtype=shape.dtype, device="meta")
    return fake.to(dtype) if dtype is not None and fake.is_floating_point() else fake


def _shapes(blank: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    reverted = revert_names(blank, tensors)
    return {key: Shape(tensor.dtype, tuple(tensor.shape)) for key, tensor in reverted.items()}
