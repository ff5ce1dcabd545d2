"""What a call's batch must be, and the proof that all ranks of one replica hold the same one.

Every stage and every tensor parallel rank of a model replica computes on the same ids. A loader
that shards by the global rank (``split_dataset_by_node``, a hand-written ``IterableDataset``), or
a collate function that draws random numbers, silently feeds each of them another batch, and
training goes on with a loss that falls. Lightning cannot see this, because in its own strategies
every rank is its own replica.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from goose_strategy.comm.collectives import all_gather_objects, all_reduce, broadcast_object
from goose_strategy.errors import BatchError

if TYPE_CHECKING:
    from goose_strategy.mesh.mesh import ParallelMesh

Batch: TypeAlias = dict[str, Any]
Watch: TypeAlias = Callable[[str], AbstractContextManager[None]]

_FIRST_CALLS = 8
_EVERY = 50


def _unwatched(_what: str) -> AbstractContextManager[None]:
    return nullcontext()


class BatchGuard:
    """Compare a batch over the ranks of one model replica, or send it to them.

    Args:
        mesh: The mesh.
        watch: Guards the exchange by a deadline.

    Attributes:
        mode: ``"check"`` (default) raises where the ranks hold different batches;
            ``"broadcast"`` sends the batch of the replica's first rank to the others. It is set
            to ``"broadcast"`` for loaders whose order no sampler controls.
    """

    def __init__(self, mesh: ParallelMesh, watch: Watch = _unwatched) -> None:
        self._mesh = mesh
        self._watch = watch
        self._calls = 0
        self.mode: Literal["check", "broadcast"] = "check"

    def __call__(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return ``batches`` after they were compared or replaced by the first rank's.

        Collective over the model replica (``tp x pp``) when it has more than one rank.

        Raises:
            BatchError: If this rank's tensors differ from another rank's.
        """
        if self._mesh.model_control is None:
            return list(batches)
        if self.mode == "broadcast":
            return self._broadcast(batches)
        self._calls += 1
        on_cpu = self._mesh.device.type == "cpu"
        if on_cpu or self._calls <= _FIRST_CALLS or self._calls % _EVERY == 0:
            self._check(batches)
        return list(batches)

    def _broadcast(self, batches: Sequence[Batch]) -> list[Batch]:
        groups = self._mesh.layout.model_groups()
        source = next(ranks[0] for ranks in groups if self._mesh.rank in ranks)
        sent = [_move(batch, torch.device("cpu")) for batch in batches]
        with self._watch("broadcast of the batch"):
            received = broadcast_object(sent, source=source, group=self._mesh.model_control)
        return [_move(batch, self._mesh.device) for batch in received]

    def _check(self, batches: Sequence[Batch]) -> None:
        value = torch.stack([_fingerprint(batch) for batch in batches]).sum(0)
        value = torch.cat([value, torch.tensor([len(batches)])])
        both = torch.cat([value, -value])
        # The exchange is watched, the refusal is not: all ranks of the replica refuse alike.
        with self._watch("comparison of the batches"):
            all_reduce(both, self._mesh.model_control, op="max")
        half = both.numel() // 2
        if torch.equal(both[:half], -both[half:]):
            return
        mine = [{k: tuple(v.shape) for k, v in b.items() if isinstance(v, Tensor)} for b in batches]
        with self._watch("comparison of the batches"):
            every = all_gather_objects((self._mesh.rank, mine), self._mesh.model_control)
        listed = "; ".join(f"rank {rank}: {shapes}" for rank, shapes in every)
        raise BatchError(
            "The ranks of one model replica were given different batches "
            f"({listed}); shard the data by the data parallel coordinate "
            "(strategy.distributed_sampler_kwargs), not by the global rank.",
            rank=self._mesh.rank,
        )


class Binder:
    """Names the positional arguments of a model's ``forward``.

    Args:
        forward: The model's own bound forward.

    Attributes:
        signature: Its signature, for those who ask what the model takes.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.signature = inspect.signature(forward)
        self._names = list(self.signature.parameters)

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
        """Return a call's arguments by name, without those that are ``None``.

        Raises:
            TypeError: If an argument is given twice, as Python itself would say.
        """
        named = dict(zip(self._names, args, strict=False))
        if len(args) > len(self._names):
            raise TypeError(f"forward() takes {len(self._names)} arguments, not {len(args)}")
        for name in kwargs:
            if name in named:
                raise TypeError(f"forward() got multiple values for argument {name!r}")
        return {k: v for k, v in {**named, **kwargs}.items() if v is not None}


def check_not_empty(batch: Mapping[str, Any]) -> None:
    """Check that no tensor of the batch has a batch dimension of size 0.

    Raises:
        BatchError: If one has.
    """
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.dim() > 0 and value.numel() == 0:
            raise BatchError(
                f"{name} has shape {tuple(value.shape)}: the batch is empty; "
                "drop empty batches, for example with DataLoader(drop_last=True)."
            )


def refuse_cache(batch: Mapping[str, Any], pp: int) -> None:
    """Refuse a cache of keys and values: each microbatch would write into all of its rows.

    Raises:
        NotImplementedError: If there is one, as ``generate()`` passes it.
    """
    for name, value in batch.items():
        if name == "past_key_values" or hasattr(value, "get_seq_length"):
            raise NotImplementedError(
                f"pp={pp}: the stages of a pipeline keep no cache of keys and values, but {name} "
                "was passed. Call generate(..., use_cache=False), or save the model and load it "
                "with transformers to generate."
            )


def refuse_router_loss(batch: Mapping[str, Any], pp: int) -> None:
    """Refuse a loss over the routers of all layers: a stage has those of its own only.

    Raises:
        BatchError: If it was asked for.
    """
    if batch.get("output_router_logits"):
        raise BatchError(
            f"output_router_logits=True adds a loss over the routers of all layers, but pp={pp} "
            "leaves each stage those of its own; leave it out, or use pp=1."
        )


def refuse_intermediates(batch: Mapping[str, Any], pp: int) -> None:
    """Refuse hidden states and attentions of all layers: they are on the stages that made them.

    Raises:
        BatchError: If they were asked for.
    """
    for name in ("output_hidden_states", "output_attentions"):
        if batch.get(name):
            raise BatchError(
                f"{name}=True asks for tensors of all layers, but pp={pp} leaves each stage those "
                "of its own; leave it out, use hooks on the layers, or pp=1."
            )


def join_logits(logits: list[Tensor]) -> Any:
    """Return microbatches' logits in one tensor, or as they are where their lengths differ."""
    if len({tensor.shape[1:] for tensor in logits}) == 1:
        return torch.cat(logits)
    return tuple(logits)


def _move(batch: Batch, device: torch.device) -> Batch:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}


def _fingerprint(batch: Batch) -> Tensor:
    """Return an int64 vector of two numbers that depends on names, shapes and values."""
    total = torch.zeros(2, dtype=torch.int64)
    for name in sorted(batch):
        value = batch[name]
        if not isinstance(value, Tensor):
            continue
        label = sum((i + 1) * byte for i, byte in enumerate(name.encode()))
        shape = sum((i + 1) * size for i, size in enumerate(value.shape))
        bits = value.detach().flatten()
        if bits.is_floating_point():
            bits = bits.to(torch.float64).view(torch.int64)
        bits = bits.to(torch.int64)
        places = torch.arange(1, bits.numel() + 1, dtype=torch.int64, device=bits.device)
        mixed = ((bits + 1) * (2 * places + label * 2 + 1)).sum()
        total += torch.stack([(mixed >> 2).cpu(), torch.tensor(label * 1_000_003 + shape)])
    return total
