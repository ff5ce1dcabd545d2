"""Which part of every trainable parameter's gradient this rank has, and how its samples are told.

Opacus asks of a module only whether it knows its class; under tensor parallelism the same class
counts once, on every rank, or after a sum. Here every trainable parameter gets one of three kinds
at the set-up, and a rule, or the set-up is refused, naming it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from goose_strategy.errors import PlanError
from goose_strategy.grads.samples import SampleOwed, per_sample
from goose_strategy.grads.store import WeightGradStore
from goose_strategy.privacy.rules import has_rule
from goose_strategy.tensor_parallel.convert import Converted
from goose_strategy.tensor_parallel.defer import takes_part

if TYPE_CHECKING:
    from goose_strategy.mesh.shard import ShardSpec

ShareKind = Literal["shard", "replicated", "partial"]


@dataclass(frozen=True)
class Share:
    """What a rank has of one parameter's gradient.

    Attributes:
        name: Name of the parameter.
        kind: ``shard``: elements that no other tp rank has. ``replicated``: all of the gradient,
            as the other tp ranks; it counts once. ``partial``: a summand of all of it, to be summed
            over tp before it is squared.
        tied: Whether an embedding and the head share the parameter.
        tied_here: Whether both are on this rank.
        narrow: Whether its gradient is rounded to 16 bits before it is accumulated.
    """

    name: str
    kind: ShareKind
    tied: bool = False
    tied_here: bool = False
    narrow: bool = False


def share_of(spec: ShardSpec | None, name: str, param: Tensor, *, tp: int) -> Share:
    """Return the share of a parameter from its layout."""
    kind: ShareKind = "shard"
    if tp > 1 and (spec is None or not spec.is_sharded):
        kind = "partial" if spec is not None and spec.tp_partial else "replicated"
    return Share(name, kind, narrow=param.dtype in (torch.bfloat16, torch.float16))


def check_samples(model: nn.Module) -> None:
    """Check, before anything is changed, that every trainable parameter has a rule.

    Args:
        model: The whole model, not cut; with or without values.

    Raises:
        PlanError: If one has none; names the first of them and how many there are. If there is a
            batch norm.
    """
    _refuse_batch_norm(model)
    checked: dict[object, str | None] = {}
    found: dict[str, str] = {}
    for name, module, own in _owners(model):
        if takes_part(module):
            reason = None if own.keys() <= {"weight", "bias"} else _MORE
        else:
            reason = _reason(module, own, checked)
        found |= _listed(name, module, own, reason)
    _refuse(found)


def _refuse_batch_norm(model: nn.Module) -> None:
    """Refuse batch norms, also frozen ones: in training they divide by what other samples hold."""
    for name, module in model.named_modules():
        if isinstance(module, _Obstacles.batch_norm):
            raise PlanError(
                f"{name} ({type(module).__name__}): a batch norm lets samples depend on one "
                "another, also if it is frozen; use a layer norm."
            )


_MORE = "its module has more parameters than a weight and a bias"


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, nn.Parameter]]]:
    """Yield modules that have trainable parameters of their own, with these."""
    for name, module in model.named_modules():
        own = {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}
        if own:
            yield name, module, own


def _reason(
    module: nn.Module, own: Mapping[str, nn.Parameter], checked: dict[object, str | None]
) -> str | None:
    if has_rule(module):
        return None
    key = (type(module), tuple((name, tuple(p.shape)) for name, p in own.items()))
    if key not in checked:
        checked[key] = reason_against(module)
    return checked[key]


def _listed(
    name: str, module: nn.Module, own: Mapping[str, nn.Parameter], reason: str | None
) -> dict[str, str]:
    if reason is None:
        return {}
    return {f"{name}.{one} ({type(module).__name__})": reason for one in own}


def _refuse(found: Mapping[str, str]) -> None:
    if not found:
        return
    listed = "; ".join(f"{name}: {reason}" for name, reason in list(found.items())[:6])
    raise PlanError(
        f"{len(found)} trainable parameters have no known gradient per sample: {listed}. "
        "Freeze them (requires_grad=False), register a rule "
        "(goose_strategy.privacy.rules.register_rule), or train without privacy=...."
    )


def tell_samples_apart(model: nn.Module, store: WeightGradStore) -> Callable[[], None]:
    """Make every trainable parameter's module push gradients that tell samples apart.

    To be called behind `defer_weight_gradients`, which has told linear layers and embeddings.

    Args:
        model: The model of this rank, with values.
        store: Where gradients are left.

    Returns:
        What undoes it.

    Raises:
        PlanError: If a trainable parameter belongs to a module that nothing is known of; names all.
    """
    swapped: list[Converted] = []
    checked: dict[object, str | None] = {}
    found: dict[str, str] = {}
    for name, module, own in _owners(model):
        if isinstance(module, Converted) and module.weight_gradients is store:
            reason = None if own.keys() <= {"weight", "bias"} else _MORE
        else:
            reason = _reason(module, own, checked)
            if reason is None and has_rule(module):
                vars(module)["weight_gradients"] = store
            elif reason is None:
                plain: Any = type(module)
                cls = _class_for(plain)
                swapped.append(cls.adopt(module, weight_gradients=store))
        found |= _listed(name, module, own, reason)

    def restore() -> None:
        for module in swapped:
            module.restore()

    if found:
        restore()
    _refuse(found)
    return restore


class _Spreading(Converted):
    """A module whose parameters are used along the last dimensions of its one input: a norm."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        store = self.weight_gradients
        if store is None or not torch.is_grad_enabled():
            result: Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
            return result
        module: Any = self
        parameters = dict(module.named_parameters(recurse=False))
        spread = {name: per_sample(param, x, store) for name, param in parameters.items()}
        if isinstance(self, nn.LayerNorm):
            normed = functional.layer_norm(x, self.normalized_shape, None, None, self.eps)
            return _affine(normed, spread)
        if isinstance(self, nn.RMSNorm):
            return _affine(functional.rms_norm(x, self.normalized_shape, None, self.eps), spread)
        with _in_place_of(module, spread):
            spread_out: Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        return spread_out


def _affine(normed: Tensor, spread: Mapping[str, Tensor]) -> Tensor:
    weight, bias = spread.get("weight"), spread.get("bias")
    out = normed if weight is None else normed * weight
    out = out if bias is None else out + bias
    return out.to(normed.dtype)


@contextmanager
def _in_place_of(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Let a module's own code find other tensors under the names of its parameters."""
    # What stands in the instance's dict is found before ``nn.Module`` looks for a parameter.
    vars(module).update(values)
    try:
        yield
    finally:
        for name in values:
            vars(module).pop(name, None)


@functools.cache
def _class_for(plain: Any) -> type[_Spreading]:
    """Return a class above ``plain`` whose parameters have a gradient per sample."""
    members: dict[str, Any] = {"plain": plain, "__doc__": _Spreading.__doc__}
    made: type[_Spreading] = type(f"PerSample{plain.__name__}", (_Spreading, plain), members)
    return made


class _Obstacles:
    """Modules that are known not to be possible, with the reason."""

    batch_norm: ClassVar[tuple[type[nn.Module], ...]] = (
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.BatchNorm3d,
        nn.SyncBatchNorm,
    )


def reason_against(module: nn.Module) -> str | None:
    """Try a module: are its parameters' gradients per sample those of its own forward, row by row?

    Args:
        module: With trainable parameters of its own.

    Returns:
        Why not; ``None`` if they are.
    """
    if any(True for _ in module.children()):
        return "parameters beside submodules have no rule"
    own = dict(module.named_parameters(recurse=False))
    if any(param.dim() != 1 for param in own.values()):
        return "only linear layers, embeddings and norms have a rule"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    sizes = {param.numel() for param in own.values()}
    if len(sizes) != 1:
        return "its parameters are of different sizes"
    try:
        agrees = all(_agrees(module, dims, sizes.copy().pop()) for dims in (3, 4))
    # Whatever a foreign module raises: it cannot be used in this way.
    except Exception as error:  # noqa: BLE001
        return f"it cannot be tried on one input ({type(error).__name__}: {error})"
    return None if agrees else "its gradients per sample are not those of its rows"


def _agrees(module: nn.Module, dims: int, width: int) -> bool:
    """Compare a copy's gradients per sample with those of its plain forward on single rows."""
    plain = copy.deepcopy(module)
    if any(param.is_meta for param in plain.parameters()):
        plain = plain.to_empty(device="cpu")
    plain = plain.to("cpu", torch.float64)
    shape = (3, 2, width) if dims == 3 else (3, 2, 2, width)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for param in plain.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=param.dtype))
    x, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    x.requires_grad_()
    params = [p for p in plain.parameters() if p.requires_grad]
    with torch.enable_grad():
        rows = [plain(x[i : i + 1]) for i in range(3)]
        expected = [
            torch.autograd.grad(row, [x, *params], grad[i : i + 1]) for i, row in enumerate(rows)
        ]
    store = WeightGradStore(per_sample=True)
    cls: Any = type(module)
    _class_for(cls).adopt(plain, weight_gradients=store)
    with torch.enable_grad():
        output = plain(x)
    if not torch.allclose(output, torch.cat(rows), rtol=1e-6, atol=1e-7):
        return False
    with store.collecting():
        # Not ``grad``, which leaves out nodes that no wanted input lies behind.
        torch.autograd.backward(output, grad)
    found = {id(one.param): one.grad for one in store.take().owed if isinstance(one, SampleOwed)}
    pairs = [(x.grad, torch.stack([row[0] for row in expected]).sum(0))]
    for number, param in enumerate(params, start=1):
        if id(param) not in found:
            return False
        pairs.append((found[id(param)], torch.stack([row[number] for row in expected])))
    return all(a is not None and torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)
