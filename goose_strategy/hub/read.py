"""Give the meta tensors of a sharded module memory, and read just this rank's part into them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from goose_strategy.compat.transformers import pretrained_models
from goose_strategy.compat.weights import compute_buffers, meta_model, parts_of
from goose_strategy.errors import CheckpointError, PlanError
from goose_strategy.hub.plan import LoadPlan, carried, detach, listed
from goose_strategy.hub.unread import forget_name, unguarded
from goose_strategy.mesh.shard import Box, ShardSpec

if TYPE_CHECKING:
    from goose_strategy.hub.source import HubReader

_CHUNK = 1 << 22


class _Wanted(NamedTuple):
    """A tensor of this rank and the blocks that it wants of the whole one."""

    name: str
    pieces: list[tuple[Box, Tensor]]
    whole: tuple[int, ...]


Part: TypeAlias = tuple[str, tuple[int, ...], bool]


def is_unread(module: nn.Module) -> bool:
    """Return whether any parameter or buffer of a module is on the meta device."""
    tensors = [*module.parameters(), *module.buffers()]
    return any(tensor.is_meta for tensor in tensors)


def fingerprints(module: nn.Module) -> list[int]:
    """Return what the files of every plan look like; ranks that read other files differ."""
    return [plan.folder.fingerprint for _, _, plan in carried(module)]


def check_readable(module: nn.Module) -> None:
    """Check everything that can be checked before a module is cut.

    Raises:
        PlanError: If a tensor on the meta device is in no plan and could not be loaded later.
        CheckpointError: If a file is gone or truncated, or holds two values for a tied weight.
    """
    known: set[int] = set()
    for _, model, plan in carried(module):
        plan.folder.check()
        _check_twins(plan)
        known |= {id(param) for param in plan.parameters.values()}
        for name, param in model.named_parameters():
            if param.is_meta and id(param) not in known:
                raise PlanError(
                    f"{name} of {type(model).__name__} was made on the meta device after "
                    "from_pretrained, and no file holds its values; make it on the CPU, or change "
                    "a model that was loaded with transformers' own from_pretrained."
                )
    inside = {id(b) for _, lm in pretrained_models(module) for b in lm.buffers()}
    saved = module.state_dict(keep_vars=True)
    for name, buffer in module.named_buffers():
        if buffer.is_meta and name not in saved and id(buffer) not in inside:
            raise PlanError(
                f"{name} is on the meta device and would be in no checkpoint; make it on the CPU."
            )


@contextmanager
def while_cut(module: nn.Module) -> Iterator[None]:
    """Let unread parameters be cut inside the block; guarded again if that is refused."""
    with unguarded(module.parameters()):
        yield


def materialize(
    module: nn.Module, specs: Mapping[str, ShardSpec], device: torch.device
) -> list[str]:
    """Give every tensor that is on the meta device memory, and read what plans say of it.

    Args:
        module: The module, after it was cut; its parameters stay the same objects.
        specs: Which part of the whole each parameter is, by name in ``module``.
        device: Where they shall live.

    Returns:
        Names of what no plan knows, filled with NaN: a checkpoint has to be loaded into them.

    Raises:
        CheckpointError: If a file cannot be read.
        PlanError: If a buffer cannot be computed.
    """
    _compute_buffers(module, device)
    wanted: dict[int, dict[str, _Wanted]] = {}
    unfilled: list[str] = []
    plans = list(carried(module))
    origins = {id(p): (plan, n) for _, _, plan in plans for n, p in plan.parameters.items()}
    # Surgery keeps the objects; where a cut makes a new one in its place, it has the name.
    by_name = {_join(at, n): (plan, n) for at, _, plan in plans for n in plan.parameters}
    for name, param in module.named_parameters():
        if not param.is_meta:
            continue
        spec = specs.get(name) or ShardSpec.replicated(name, param)
        plan, source = origins.get(id(param)) or by_name.get(name) or (None, name)
        _allocate(param, device)
        if plan is None:
            unfilled.append(name)
        else:
            pieces = spec.pieces(param.detach())
            want = _Wanted(source, pieces, spec.global_shape)
            wanted.setdefault(id(plan), {})[source] = want
    for prefix, model, plan in plans:
        more, lost = _persistent_buffers(model, plan, device)
        unfilled += [_join(prefix, name) for name in lost]
        _read(plan, wanted.get(id(plan), {}) | more)
        detach(model)
    unfilled += _other_buffers(module, device)
    return unfilled


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _allocate(param: nn.Parameter, device: torch.device) -> None:
    """Give a parameter memory; it stays the same object, with the attributes it had."""
    real = torch.full(param.shape, math.nan, dtype=param.dtype, device=device)
    new = nn.Parameter(real, requires_grad=param.requires_grad)
    vars(new).update(forget_name(param))
    torch.utils.swap_tensors(param, new)


def _compute_buffers(module: nn.Module, device: torch.device) -> None:
    """Compute what no file holds, while all parameters are still on the meta device."""
    for _, model in pretrained_models(module):
        saved = model.state_dict(keep_vars=True)
        names = [n for n, b in model.named_buffers() if b.is_meta and n not in saved]
        for _, inner, plan in carried(model):
            if inner is model:
                names += [
                    n
                    for n, b in model.named_buffers()
                    if b.is_meta and n in saved and n in plan.shapes and n not in plan.names
                ]
        if names:
            compute_buffers(model, names, device)


def _persistent_buffers(
    model: nn.Module, plan: LoadPlan, device: torch.device
) -> tuple[dict[str, _Wanted], list[str]]:
    """Give a model's persistent buffers memory; a cast has made them other objects."""
    found: dict[str, _Wanted] = {}
    lost: list[str] = []
    for name, buffer in list(model.named_buffers()):
        if not buffer.is_meta:
            continue
        real = _put_buffer(model, name, device)
        if name in plan.names:
            box = Box((0,) * real.dim(), tuple(real.shape))
            found[name] = _Wanted(name, [(box, real)], tuple(real.shape))
        else:
            lost.append(name)
    return found, lost


def _other_buffers(module: nn.Module, device: torch.device) -> list[str]:
    names = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    for name in names:
        _put_buffer(module, name, device)
    return names


def _put_buffer(model: nn.Module, name: str, device: torch.device) -> Tensor:
    prefix, _, attribute = name.rpartition(".")
    owner = model.get_submodule(prefix)
    meta: Tensor = getattr(owner, attribute)
    filler = math.nan if meta.is_floating_point() else 0
    real = torch.full(meta.shape, filler, dtype=meta.dtype, device=device)
    setattr(owner, attribute, real)
    return real


def _read(plan: LoadPlan, wanted: Mapping[str, _Wanted]) -> None:
    for name, want in wanted.items():
        if want.whole != plan.shapes[name]:
            raise PlanError(
                f"{name} has shape={want.whole} here, but shape={plan.shapes[name]} when the model "
                "was made; change its sizes by settings of from_pretrained."
            )
    with plan.folder.opened() as reader:
        for name, want in wanted.items():
            if (key := plan.direct.get(name)) is None:
                continue
            for box, piece in want.pieces:
                reader.fill(key, box, piece, through=plan.dtypes[name])
        _convert(plan, wanted, reader)


def _convert(plan: LoadPlan, wanted: Mapping[str, _Wanted], reader: HubReader) -> None:
    """Make the tensors that need a conversion: by slices if it can be, or each as a whole."""
    shapes = {key: stored.shape for key, stored in plan.folder.tensors.items()}
    todo = []
    for conversion in plan.conversions:
        if not any(name in wanted for name in conversion.makes):
            continue
        parts = parts_of(conversion, shapes)
        if parts is None:
            todo.append(conversion)
        else:
            _read_parts(plan, parts, wanted[next(iter(conversion.makes))], reader)
    if not todo:
        return
    # Conversions look at shapes of the whole model; the sharded one has others.
    whole = meta_model(plan.config, dtype=plan.config.dtype)
    for conversion in todo:
        read = partial(reader.whole, dtype=plan.dtypes.get(conversion.first))
        made = conversion.convert(whole, read)
        for name, tensor in made.items():
            for box, piece in wanted[name].pieces if name in wanted else ():
                blocks = zip(box.offsets, box.lengths, strict=True)
                piece.copy_(tensor[tuple(slice(at, at + n) for at, n in blocks)])


def _read_parts(plan: LoadPlan, parts: Sequence[Part], want: _Wanted, reader: HubReader) -> None:
    """Read slices of sources straight to where they lie in the tensor that is made of them."""
    dtype = plan.dtypes.get(want.name)
    for box, piece in want.pieces:
        filled = 0
        for key, offsets, stacked in parts:
            shape = plan.folder.tensors[key].shape
            held = Box(offsets, (1, *shape) if stacked else shape)
            shared = _overlap(box, held)
            if shared is None:
                continue
            target = piece
            for dim, (at, length) in enumerate(zip(*shared, strict=True)):
                target = target.narrow(dim, at - box.offsets[dim], length)
            inner = Box(
                tuple(a - b for a, b in zip(shared.offsets, offsets, strict=True)), shared.lengths
            )
            if stacked:
                inner, target = Box(inner.offsets[1:], inner.lengths[1:]), target.squeeze(0)
            reader.fill(key, inner, target, through=dtype)
            filled += shared.numel
        if filled != box.numel:
            raise PlanError(
                f"{want.name}: the files hold {filled} of the {box.numel} elements at "
                f"offsets={box.offsets}."
            )


def _overlap(one: Box, other: Box) -> Box | None:
    starts = [max(a, b) for a, b in zip(one.offsets, other.offsets, strict=True)]
    ends = [
        min(a + m, b + n)
        for a, m, b, n in zip(one.offsets, one.lengths, other.offsets, other.lengths, strict=True)
    ]
    lengths = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Box(tuple(starts), lengths) if min(lengths) > 0 else None


def _check_twins(plan: LoadPlan) -> None:
    """Refuse files in which the two names of a tied weight have different values."""
    if not plan.twins:
        return
    with plan.folder.opened() as reader:
        for name, others in plan.twins.items():
            for other in others:
                if not _equal(reader, plan, plan.direct[name], other):
                    raise CheckpointError(
                        f"the config ties {name} to {other}, but '{plan.folder.path}' holds other "
                        "values for it; pass tie_word_embeddings=False to keep both."
                    )


def _equal(reader: HubReader, plan: LoadPlan, one: str, other: str) -> bool:
    shape = plan.folder.tensors[one].shape
    if plan.folder.tensors[other].shape != shape:
        return False
    if not shape:
        return torch.equal(reader.whole(one), reader.whole(other))
    dtype = plan.folder.tensors[one].dtype
    step = max(1, _CHUNK // max(1, math.prod(shape[1:])))
    for at in range(0, shape[0], step):
        rows = (min(step, shape[0] - at), *shape[1:])
        box = Box((at,) + (0,) * (len(shape) - 1), rows)
        first, second = torch.empty(rows, dtype=dtype), torch.empty(rows, dtype=dtype)
        reader.fill(one, box, first)
        reader.fill(other, box, second)
        if not torch.equal(first, second):
            return False
    return True


def check_placed(module: nn.Module) -> None:
    """Refuse tensors that a model keeps as plain attributes, which nothing fills.

    Raises:
        PlanError: If one is left on the meta device.
    """
    held = [
        f"{name}.{attribute}"
        for _, model in pretrained_models(module)
        for name, inner in model.named_modules()
        for attribute, value in vars(inner).items()
        if isinstance(value, Tensor) and value.is_meta
    ]
    if held:
        raise PlanError(
            f"{listed(held)}: the model keeps tensors that are neither parameters nor buffers, and "
            "that no file holds; load it with transformers' own from_pretrained instead."
        )
