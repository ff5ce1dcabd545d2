"""What a model that was not read yet carries: where each of its tensors lies in the files.

The plan is made and checked while the model is whole. It knows parameters by identity, so that
wrappers which rename modules (PEFT's adapters do) and copies of the model do not lose it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from goose_strategy.compat.transformers import promised_ties, tied_parameters
from goose_strategy.compat.weights import Conversion, KeyMap, map_keys, without_ignored
from goose_strategy.errors import CheckpointError

if TYPE_CHECKING:
    from goose_strategy.hub.source import HubFolder

_PLAN = "_goose_load_plan"
_LISTED = 8


@dataclass
class LoadPlan:
    """Where the tensors of one model lie.

    Attributes:
        folder: The files.
        config: The model's config; conversions are made with it.
        direct: Name in the model -> key of the same tensor in the files.
        conversions: What is made of several keys, or is changed.
        dtypes: Type of every tensor as the model was asked for, by name.
        shapes: Shape of every tensor of the whole model, by name.
        parameters: The parameters, by name; they stay the same objects.
        twins: Name -> further keys of the files that should hold the same values (tied weights).
        unexpected: Keys in the files that belong to nothing.
    """

    folder: HubFolder
    config: Any
    direct: dict[str, str]
    conversions: list[Conversion]
    dtypes: dict[str, torch.dtype]
    shapes: dict[str, tuple[int, ...]]
    parameters: dict[str, nn.Parameter]
    twins: dict[str, list[str]] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """The tensors that the files hold."""
        made = {name for conversion in self.conversions for name in conversion.makes}
        return {*self.direct} | made


def make_plan(model: nn.Module, folder: HubFolder) -> tuple[LoadPlan, KeyMap]:
    """Find every parameter and persistent buffer of a model in a checkpoint.

    Args:
        model: The whole model, on the meta device.
        folder: The checkpoint.

    Returns:
        The plan, and the map of keys that it was made from.

    Raises:
        CheckpointError: If one is missing or has another shape; transformers would initialise it
            at random and go on.
    """
    keys = map_keys(model, {key: stored.shape for key, stored in folder.tensors.items()})
    ties = tied_parameters(model)
    twins = _take_tied_names(keys, ties)
    tensors = _saved_tensors(model, ties)
    plan = LoadPlan(
        folder=folder,
        config=getattr(model, "config", None),
        direct=keys.direct,
        conversions=keys.conversions,
        dtypes={name: tensor.dtype for name, tensor in tensors.items()},
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        parameters=dict(model.named_parameters()),
        twins=twins,
    )
    missing = [name for name in tensors if name not in plan.names]
    lost, plan.unexpected = without_ignored(model, missing, keys.unexpected)
    # What transformers does not miss is computed; of a parameter it would be drawn at random.
    _check_missing(model, plan, [n for n in missing if n in plan.parameters or n in lost])
    _check_shapes(plan)
    return plan, keys


def attach(model: nn.Module, plan: LoadPlan) -> None:
    """Let a model carry its plan."""
    vars(model)[_PLAN] = plan


def detach(model: nn.Module) -> None:
    """Let a model forget its plan, once it has been read."""
    vars(model).pop(_PLAN, None)


def carried(module: nn.Module) -> Iterator[tuple[str, nn.Module, LoadPlan]]:
    """Yield name, model and plan of every model inside ``module`` that carries one."""
    for name, inner in module.named_modules():
        plan = vars(inner).get(_PLAN)
        if isinstance(plan, LoadPlan):
            yield name, inner, plan


def _take_tied_names(keys: KeyMap, ties: Mapping[str, str]) -> dict[str, list[str]]:
    """File a tied weight under the name that the model lists, whichever name the files have."""
    twins: dict[str, list[str]] = {}
    for second, first in ties.items():
        key = keys.direct.pop(second, None)
        if key is not None and keys.direct.setdefault(first, key) != key:
            twins.setdefault(first, []).append(key)
    return twins


def _saved_tensors(model: nn.Module, ties: Mapping[str, str]) -> dict[str, Tensor]:
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    return {
        name: tensor
        for name, tensor in state.items()
        if name not in ties and isinstance(tensor, Tensor)
    }


def _check_missing(model: nn.Module, plan: LoadPlan, missing: list[str]) -> None:
    if not missing:
        return
    head = sorted({*missing} & {*promised_ties(model)}) or [n for n in missing if "head" in n]
    hint = ""
    if head and getattr(plan.config, "tie_word_embeddings", None) is False:
        hint = f" If {head[0]} shares the embedding's weight, pass tie_word_embeddings=True."
    raise CheckpointError(
        f"'{plan.folder.path}' does not hold {len(missing)} of the {len(plan.shapes)} tensors of "
        f"{type(model).__name__}: {listed(missing)}. They would have random values; is it a "
        f"checkpoint of this class and config?{hint}"
    )


def _check_shapes(plan: LoadPlan) -> None:
    stored = {name: plan.folder.tensors[key].shape for name, key in plan.direct.items()}
    for conversion in plan.conversions:
        stored |= conversion.makes
    wrong = [
        f"{name} has shape={shape} in the files, shape={plan.shapes[name]} in the model"
        for name, shape in stored.items()
        if name in plan.shapes and shape != plan.shapes[name]
    ]
    if wrong:
        raise CheckpointError(
            f"'{plan.folder.path}' is a checkpoint of another config: {listed(wrong)}."
        )


def listed(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - _LISTED} more" if len(every) > _LISTED else ""
    return ", ".join(every[:_LISTED]) + more
