"""What goose-strategy uses of transformers' private loading code: keys, conversions, buffers.

The names in a file of the hub are not always those of the model: prefixes come and go, and since
transformers 5 some families hold fused weights that their files hold in parts. transformers knows
how to go back and forth, in functions that are not documented; here is the one place that calls
them. Nothing is imported before it is needed, so that modules which are no transformers models cost
nothing.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from goose_strategy.errors import PlanError

Read = Callable[[str], Tensor]


@dataclass
class Conversion:
    """One of transformers' conversions, applied to one layer: these keys make these tensors.

    Attributes:
        first: Name under which transformers files it: the first tensor that it makes.
        sources: Keys in the files, each with the pattern that it matched, in the order in which
            they are put together.
        makes: Name and shape of every tensor that it makes.
    """

    first: str
    sources: list[tuple[str, str]] = field(default_factory=list)
    makes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    converter: Any = None

    def convert(self, model: nn.Module, read: Read) -> dict[str, Tensor]:
        """Make the tensors.

        Args:
            model: A whole model of the same config; may be on the meta device.
            read: Returns a whole tensor by its key.

        Returns:
            Tensors by name in the model.

        Raises:
            PlanError: If transformers cannot convert what the files hold.
        """
        converter = copy.deepcopy(self.converter)
        for key, pattern in self.sources:
            converter.add_tensor(self.first, key, pattern, lambda key=key: read(key))
        try:
            made = converter.convert(self.first, model=model, config=getattr(model, "config", None))
        except Exception as err:
            raise PlanError(
                f"{self.first} is made of {len(self.sources)} tensors (first: "
                f"{self.sources[0][0]}), and transformers' conversion {self.converter!r} fails: "
                f"{type(err).__name__}: {err}"
            ) from err
        return {n: t[0] if isinstance(t, (list, tuple)) else t for n, t in made.items()}


def parts_of(
    conversion: Conversion, shapes: Mapping[str, tuple[int, ...]]
) -> list[tuple[str, tuple[int, ...], bool]] | None:
    """Say where each source lies in the tensor that a conversion makes, if it is left as it is.

    That is so for experts, which the files hold one by one: stacked, and of several matrices each,
    one behind the other. Slices of them can be read without making the whole.

    Args:
        conversion: The conversion.
        shapes: Shape of every source, by key.

    Returns:
        Key, where its first element lies in what is made, and whether it is stacked (has one
        dimension less); ``None`` if the conversion does anything else.
    """
    operations = conversion.converter.operations
    kinds = [type(operation).__name__ for operation in operations]
    stacked = kinds[:1] == ["MergeModulelist"] and operations[0].dim == 0
    joins = kinds[1:] if stacked else kinds
    by_pattern: dict[str, list[str]] = {}
    for key, pattern in conversion.sources:
        by_pattern.setdefault(pattern, []).append(key)
    patterns = [p for p in conversion.converter.source_patterns if p in by_pattern]
    plain_join = joins == ["Concatenate"] and operations[-1].num_shards_attribute is None
    alone = joins == [] and stacked and len(patterns) == 1
    if len(conversion.makes) != 1 or not (plain_join or alone):
        return None
    dim = operations[-1].dim if plain_join else 0
    found: list[tuple[str, tuple[int, ...], bool]] = []
    begin = 0
    for pattern in patterns:
        keys = by_pattern[pattern]
        if (not stacked and len(keys) != 1) or dim < stacked * plain_join:
            return None
        for index, key in enumerate(keys):
            offsets = [index] * stacked + [0] * len(shapes[key])
            if plain_join:
                offsets[dim] = begin
            found.append((key, tuple(offsets), stacked))
        begin += shapes[keys[0]][dim - stacked] if plain_join else 0
    return found


@dataclass
class KeyMap:
    """Which keys of a checkpoint make which tensors of a model.

    Attributes:
        direct: Name in the model -> key of the same tensor.
        conversions: What is made of several keys, or is changed.
        unexpected: Keys that belong to nothing.
        used: transformers' transforms that matched a key.
    """

    direct: dict[str, str] = field(default_factory=dict)
    conversions: list[Conversion] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    used: list[Any] = field(default_factory=list)


def meta_model(config: Any, **settings: Any) -> nn.Module:
    """Build the causal LM of a config without memory, on the meta device.

    Args:
        config: A transformers config; its ``dtype`` is set.
        **settings: Of ``AutoModelForCausalLM.from_config``: ``dtype``, ``attn_implementation``...
    """
    from transformers import AutoModelForCausalLM, initialization

    with ExitStack() as stack:
        # Models that compute drop rates while they are built need values on the host.
        safe = getattr(initialization, "meta_device_safe_creation_ops", None)
        stack.enter_context(torch.device("meta"))
        if safe is not None:
            stack.enter_context(safe())
        model: nn.Module = AutoModelForCausalLM.from_config(config, **settings)
    return model


def kept_in_fp32(model: nn.Module, dtype: torch.dtype) -> list[str]:
    """Return the parameters that transformers keeps in fp32 when a model is loaded as ``dtype``."""
    plan: Mapping[str, torch.dtype] = model._get_dtype_plan(dtype)  # type: ignore[operator]
    patterns = [re.compile(pattern.replace("*", ".*")) for pattern in plan]
    return [n for n, _ in model.named_parameters() if any(p.search(n) for p in patterns)]


def map_keys(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> KeyMap:
    """Find out which keys of a checkpoint make which tensors of a model, as transformers does.

    Args:
        model: The whole model, on any device.
        shapes: Shape of every tensor in the files, by key.

    Returns:
        The map; names of the model that are in no part of it are missing from the files.

    Raises:
        PlanError: If two keys are the same tensor, or a conversion cannot be applied.
    """
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    transforms = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    wanted: dict[str, Any] = model.state_dict()
    prefix = str(model.base_model_prefix)
    found, made = KeyMap(), dict[str, Conversion]()
    for key in sorted(shapes, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(key, renamings, converters, prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = loading.rename_source_key(key, [], [], prefix, wanted)
        if name not in wanted:
            found.unexpected.append(key)
        elif pattern is not None:
            conversion = made.setdefault(name, Conversion(name, converter=by_pattern[pattern]))
            conversion.sources.append((key, pattern))
        elif found.direct.setdefault(name, key) != key:
            raise PlanError(f"{name} is in the files twice, as {found.direct[name]} and as {key}.")
    found.conversions = list(made.values())
    found.used = [t for t in transforms if t.was_used()]
    for conversion in found.conversions:
        fake = conversion.convert(model, lambda key: torch.empty(shapes[key], device="meta"))
        conversion.makes = {name: tuple(tensor.shape) for name, tensor in fake.items()}
    return found


def without_ignored(
    model: nn.Module, missing: Iterable[str], unexpected: Iterable[str]
) -> tuple[list[str], list[str]]:
    """Leave out what transformers does not mention either: old buffers that are computed now."""
    info = SimpleNamespace(missing_keys={*missing}, unexpected_keys={*unexpected})
    model._adjust_missing_and_unexpected_keys(info)  # type: ignore[operator]
    return sorted(info.missing_keys), sorted(info.unexpected_keys)


def remember_transforms(model: nn.Module, used: Sequence[Any]) -> None:
    """Note on a model how its keys were changed, so that it is saved under the same names."""
    vars(model)["_weight_conversions"] = list(used)


def transform_names(model: nn.Module) -> list[str] | None:
    """Return the noted transforms as text; ``None`` if the model came from no checkpoint."""
    noted = vars(model).get("_weight_conversions")
    return None if noted is None else [_describe(transform) for transform in noted]


def recall_transforms(model: nn.Module, names: Collection[str] | None) -> None:
    """Note on a model what `transform_names` returned for another one of its config.

    Raises:
        PlanError: If this version of transformers does not know one of them.
    """
    if names is None:
        return
    from transformers.conversion_mapping import get_model_conversion_mapping

    known = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    chosen = [transform for transform in known if _describe(transform) in names]
    if lost := {*names} - {_describe(transform) for transform in chosen}:
        raise PlanError(
            f"this version of transformers does not know the conversion {sorted(lost)[0]} that the "
            "model was loaded with; export it with the version that saved it."
        )
    remember_transforms(model, chosen)


def never_saved(model: nn.Module) -> set[str]:
    """Return names that transformers leaves out of files, because they are computed."""
    return {*(getattr(model, "_keys_to_ignore_on_save", None) or ())}


def revert_names(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a model under the names, and in the form, of the hub's files.

    Args:
        model: A whole model of the config, on any device.
        tensors: Some of its tensors by name; all that one conversion takes must be among them.
    """
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, Tensor] = revert_weight_conversion(
        model,  # type: ignore[arg-type]
        dict(tensors),
    )
    return reverted


def compute_buffers(model: nn.Module, names: Collection[str], device: torch.device) -> None:
    """Put buffers of a model that no file holds on a device, computed from its config.

    Call it while all parameters are on the meta device: what initialises a buffer may initialise
    its module's parameters too, which has no effect there.

    Args:
        model: A transformers model.
        names: The buffers, by name in ``model``.
        device: Where they shall be.

    Raises:
        PlanError: If the model does not compute one of them.
    """
    owners: dict[str, list[str]] = {}
    for name in names:
        prefix, _, attribute = name.rpartition(".")
        owners.setdefault(prefix, []).append(attribute)
    for prefix, attributes in owners.items():
        module = model.get_submodule(prefix)
        initialiser: Any = _innermost_pretrained(model, prefix)
        # Begun with ones and with zeros: what differs afterwards was not computed.
        computed = []
        for start in (1, 0):
            for attribute in attributes:
                _replace_buffer(module, attribute, start, device)
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                initialiser._init_weights(module)
            computed.append([getattr(module, attribute) for attribute in attributes])
        for attribute, one, other in zip(attributes, *computed, strict=True):
            if not torch.equal(one, other):
                raise PlanError(
                    f"{prefix}.{attribute} is in no file, and {type(initialiser).__name__} does "
                    "not compute it from its config; load the model with transformers' own "
                    "from_pretrained instead."
                )


def _replace_buffer(module: nn.Module, attribute: str, value: int, device: torch.device) -> None:
    """Put a constant in the place of a buffer, also where a plain attribute is the same tensor."""
    old: Tensor = getattr(module, attribute)
    new = torch.full_like(old, value, device=device)
    module._buffers[attribute] = new
    for name in [name for name, held in vars(module).items() if held is old]:
        vars(module)[name] = new


def _innermost_pretrained(model: nn.Module, prefix: str) -> nn.Module:
    """Return the innermost transformers model around (or at) the module ``prefix``."""
    path, found = model, model
    for part in filter(None, prefix.split(".")):
        path = getattr(path, part)
        if hasattr(path, "_init_weights") and hasattr(path, "config"):
            found = path
    return found


def _describe(transform: Any) -> str:
    sources = ", ".join(transform._original_source_patterns)
    targets = ", ".join(transform._original_target_patterns)
    scope = f" in {transform.scope_prefix}" if transform.scope_prefix is not None else ""
    return f"{type(transform).__name__}({sources} -> {targets}){scope}"
