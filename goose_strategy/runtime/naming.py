"""Parameters by name: what an optimizer holds before surgery, and what is left of it after.

A user builds the optimizer over the whole model. Surgery replaces parameters (a column layer has a
new, smaller weight) and removes others (another stage's layers). Lightning's own model-parallel
strategy leaves the old ones in the optimizer: the step succeeds and the weights never change. Here
groups are remembered by parameter name before surgery and filled again after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.optim import Adagrad, Optimizer

from goose_strategy.comm.collectives import all_gather_objects
from goose_strategy.errors import ConfigError

if TYPE_CHECKING:
    from goose_strategy.mesh.mesh import ParallelMesh
    from goose_strategy.mesh.shard import ShardSpec

GroupNames: TypeAlias = list[list[str]]


def record_groups(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[GroupNames]:
    """Return, per optimizer and group, the names of its parameters.

    Raises:
        ConfigError: If an optimizer holds a parameter that is not the module's, or has stepped
            already.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    recorded = []
    for optimizer in optimizers:
        foreign = [
            tuple(p.shape)
            for group in optimizer.param_groups
            for p in group["params"]
            if id(p) not in names
        ]
        if foreign:
            raise ConfigError(
                f"{type(optimizer).__name__} holds {len(foreign)} parameters that do not belong "
                f"to the module it is set up with (first shape: {foreign[0]}); build it from "
                "model.parameters() of exactly this module, before fabric.setup(model, optimizer)."
            )
        if optimizer.state and not _just_made(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} has state already; set it up first and then load its "
                "state with fabric.load(...) so that each rank reads its own shard."
            )
        recorded.append([[names[id(p)] for p in g["params"]] for g in optimizer.param_groups])
    return recorded


def _just_made(optimizer: Optimizer) -> bool:
    """Whether the optimizer's state is that of its constructor, which only Adagrad's makes."""
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    return isinstance(optimizer, Adagrad) and all(step.is_meta or not step for step in steps)


def _remake_state(optimizer: Optimizer) -> None:
    """Make the state that Adagrad's constructor makes, for the parameters there are now."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for param in group["params"]:
            device = param.device if group["fused"] else "cpu"
            optimizer.state[param] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "sum": torch.full_like(param, group["initial_accumulator_value"]).detach(),
            }


def check_storages(module: nn.Module) -> None:
    """Check that no two parameters are views of the same elements.

    Each parameter moves into a bucket of its own kind, which would silently end the sharing: peft's
    ``ensure_weight_tying`` gives the adapters of a tied head and embedding one storage this way.
    One parameter under two names is no such case.

    Raises:
        ConfigError: If two do, and one of them is trained.
    """
    seen: dict[int, tuple[str, nn.Parameter]] = {}
    for name, param in module.named_parameters():
        # Tensors without values, and those of other packages, may have no address.
        address = 0 if param.is_meta or not param.numel() else param.data_ptr()
        if not address:
            continue
        other, former = seen.setdefault(address, (name, param))
        if former is not param and (param.requires_grad or former.requires_grad):
            raise ConfigError(
                f"parameters {other} and {name} are two tensors over the same memory, which would "
                "become independent; use one parameter in both places, or (peft) set "
                "ensure_weight_tying=False."
            )


def orders_of(
    module: nn.Module, optimizers: Sequence[Optimizer], recorded: Sequence[GroupNames]
) -> dict[Optimizer | None, dict[str, int]]:
    """Return the place of each parameter, before anything is cut.

    Args:
        module: The whole module.
        optimizers: The optimizers of :func:`record_groups`.
        recorded: Its result.

    Returns:
        Place by name, in each optimizer; under ``None`` in the module.
    """
    orders: dict[Optimizer | None, dict[str, int]] = {
        None: {name: at for at, (name, _) in enumerate(module.named_parameters())}
    }
    for optimizer, groups in zip(optimizers, recorded, strict=True):
        names = (name for group in groups for name in group)
        orders[optimizer] = {name: at for at, name in enumerate(names)}
    return orders


def refill_groups(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    recorded: Sequence[GroupNames],
    tied: Mapping[str, str],
) -> None:
    """Put the parameters that this rank kept back into the groups that named them.

    Args:
        module: The module after surgery.
        optimizers: The optimizers of :func:`record_groups`.
        recorded: Its result.
        tied: Local name of a tied copy -> name of the weight it copies; the copy takes the
            weight's place in the groups.
    """
    now = dict(module.named_parameters())
    copies = {canonical: now[local] for local, canonical in tied.items() if local in now}
    for optimizer, groups in zip(optimizers, recorded, strict=True):
        for group, names in zip(optimizer.param_groups, groups, strict=True):
            kept = [now.get(name, copies.get(name)) for name in names]
            group["params"] = [p for p in kept if p is not None]
        if optimizer.state:
            _remake_state(optimizer)


def strip_placeholders(optimizers: Sequence[Optimizer]) -> None:
    """Remove 0-element placeholders that an optimizer was built with after surgery."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p.numel()]


def owners(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, tuple[int, int]]:
    """Return name -> (index of the optimizer, index of its group) for every held parameter.

    Raises:
        ConfigError: If two optimizers hold the same parameter, or one holds a foreign one.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    owned: dict[str, tuple[int, int]] = {}
    for index, optimizer in enumerate(optimizers):
        for group_index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                name = names.get(id(param))
                if name is None:
                    raise ConfigError(
                        f"{type(optimizer).__name__} holds a parameter of shape "
                        f"{tuple(param.shape)} that does not belong to the module; build it from "
                        "model.parameters() after the module was set up."
                    )
                if name in owned:
                    raise ConfigError(
                        f"parameter {name} is held twice by the optimizers; each parameter may "
                        "be in one group of one optimizer."
                    )
                owned[name] = (index, group_index)
    return owned


def check_ties(
    specs: Mapping[str, ShardSpec],
    owned: Mapping[str, tuple[int, int]],
    optimizers: Sequence[Optimizer],
    mesh: ParallelMesh,
) -> None:
    """Check that both copies of a tied weight are stepped alike. Collective over the world.

    Args:
        specs: Layouts by name.
        owned: Result of :func:`owners`.
        optimizers: The optimizers.
        mesh: The ranks.

    Raises:
        ConfigError: If their groups have different options: the copies would drift apart.
    """
    if mesh.pp_size == 1:
        return
    mine: dict[str, dict[str, str] | None] = {}
    for name, spec in specs.items():
        if spec.tie is not None:
            mine[spec.tie] = _options(name, owned, optimizers)
    known: dict[str, dict[str, str] | None] = {}
    for theirs in all_gather_objects(mine, mesh.control):
        for name, options in theirs.items():
            if known.setdefault(name, options) != options:
                raise ConfigError(
                    f"The copies of the tied weight {name} on the first and the last stage are in "
                    f"groups with different options ({known[name]} and {options}); put the "
                    "embedding and the output head into one group of one optimizer."
                )


def _options(
    name: str, owned: Mapping[str, tuple[int, int]], optimizers: Sequence[Optimizer]
) -> dict[str, str] | None:
    """Return the options with which a parameter is stepped; ``None`` if it is not."""
    if name not in owned:
        return None
    index, group = owned[name]
    options = optimizers[index].param_groups[group]
    plain = {k: str(v) for k, v in sorted(options.items()) if k not in ("params", "name")}
    return {"optimizer": str(index), **plain}


def refuse_copy(name: str, _memo: dict[int, Any]) -> Any:
    """Refuse to copy a part of a model: the ``__deepcopy__`` of one that is cut.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(
        f"{name} is a shard of a model (tp or pp > 1) and cannot be deep-copied: the copy would "
        "share its process groups. Copy the module before it is set up, or copy its "
        "state_dict()."
    )
