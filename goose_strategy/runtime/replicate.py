"""Make every rank start from the same numbers.

A user who does not seed builds a different model on every rank. ``ddp`` hides this by
broadcasting rank 0's whole model; with tensor and pipeline parallelism each rank keeps another
slice, so a difference would survive as a model that never existed anywhere. All ranks therefore
compare a checksum of every parameter and buffer before surgery, and only where one differs are
rank 0's values sent.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from goose_strategy.comm.collectives import all_gather_objects, all_reduce, broadcast
from goose_strategy.errors import PlanError
from goose_strategy.mesh.axis import MeshAxis

if TYPE_CHECKING:
    from goose_strategy.mesh.mesh import ParallelMesh


# The checksum widens to int64; in chunks, so that it never needs eight times a large embedding.
_CHUNK_NUMEL = 1 << 22


def equalize(module: nn.Module, mesh: ParallelMesh) -> int:
    """Compare all parameters and buffers over the world; send rank 0's where one differs.

    Collective over the world.

    Args:
        module: The whole module, before any surgery, with the same names on every rank.
        mesh: The mesh.

    Returns:
        Number of tensors that differed.

    Raises:
        PlanError: If the ranks built modules of different structure.
    """
    if mesh.layout.world_size == 1:
        return 0
    named = _tensors(module)
    _same_structure(named, mesh)
    if not named:
        return 0
    sums = torch.stack([_checksum(tensor) for _, tensor in named])
    both = torch.cat([sums, -sums])
    all_reduce(both, mesh.control, op="max")
    largest, smallest = both[: len(named)], -both[len(named) :]
    different = (largest != smallest).nonzero().flatten().tolist()
    for index in different:
        _send_from_rank_zero(named[index][1], mesh)
    if different and mesh.rank == 0:
        first = named[different[0]][0]
        warnings.warn(
            f"{len(different)} of {len(named)} parameters and buffers differed between ranks "
            f"(first: {first}); rank 0's values are used everywhere. Seed every rank alike, for "
            "example with seed_everything(), to make this explicit.",
            UserWarning,
            stacklevel=2,
        )
    return len(different)


def share_random_state(mesh: ParallelMesh) -> None:
    """Give all tp ranks of a stage the random state of their first one, where they differ.

    Dropout outside of the cut layers must drop the same elements on every tp rank; without a seed
    every process starts from another state. Collective over the model replica.
    """
    if mesh.tp is None:
        return
    states = dict(all_gather_objects((mesh.rank, torch.get_rng_state()), mesh.model_control))
    torch.set_rng_state(states[mesh.layout.axis_ranks(mesh.rank, MeshAxis.TP)[0]])
    if mesh.device.type == "cuda":
        here = (mesh.rank, torch.cuda.get_rng_state(mesh.device))
        states = dict(all_gather_objects(here, mesh.model_control))
        first = mesh.layout.axis_ranks(mesh.rank, MeshAxis.TP)[0]
        torch.cuda.set_rng_state(states[first], mesh.device)


def broadcast_buffers(places: Sequence[tuple[nn.Module, str]], mesh: ParallelMesh) -> None:
    """Send the buffers of data parallel rank 0 to its replicas, as ``ddp`` does.

    Collective over the ``dp`` axis.

    Args:
        places: What `buffer_places` returned.
        mesh: The mesh.
    """
    if mesh.dp is None:
        return
    source = mesh.layout.axis_ranks(mesh.rank, MeshAxis.DP)[0]
    for owner, name in places:
        buffer = getattr(owner, name)
        if buffer is not None:
            broadcast(buffer, source=source, group=mesh.dp)


def buffer_places(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return where the buffers that a state dict would hold are, in module order.

    Places, because a module may put another tensor there. Buffers that are not persistent are
    derived constants and stay.
    """
    saved = module.state_dict(keep_vars=True).keys()
    return [
        (owner, name)
        for prefix, owner in module.named_modules()
        for name, _ in owner.named_buffers(recurse=False)
        if f"{prefix}.{name}".lstrip(".") in saved
    ]


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    named = [(name, param.detach()) for name, param in module.named_parameters()]
    return named + list(module.named_buffers())


def _same_structure(named: list[tuple[str, torch.Tensor]], mesh: ParallelMesh) -> None:
    text = ";".join(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}" for name, tensor in named)
    value = torch.tensor([_text_hash(text), len(named)], dtype=torch.int64)
    both = torch.cat([value, -value])
    all_reduce(both, mesh.control, op="max")
    if not torch.equal(both[:2], -both[2:]):
        raise PlanError(
            f"The ranks built different modules: this rank has {len(named)} parameters and "
            "buffers, and names, shapes or dtypes differ from another rank's; build the same "
            "model on every rank.",
            rank=mesh.rank,
        )


def _text_hash(text: str) -> int:
    # Python's own hash() is salted per process, so it cannot be compared between ranks.
    value = 1469598103934665603
    for byte in text.encode():
        value = ((value ^ byte) * 1099511628211) % (1 << 62)
    return value


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return an int64 scalar that depends on every bit of ``tensor`` and on their places."""
    if tensor.numel() == 0 or tensor.is_meta:
        return torch.zeros((), dtype=torch.int64)
    raw = tensor.detach().contiguous().flatten()
    if raw.is_complex():
        raw = torch.view_as_real(raw).flatten()
    if raw.dtype == torch.bool:
        raw = raw.to(torch.int8)
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[raw.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for start in range(0, raw.numel(), _CHUNK_NUMEL):
        bits = raw[start : start + _CHUNK_NUMEL].view(width).to(torch.int64)
        places = torch.arange(start + 1, start + 1 + bits.numel(), device=raw.device)
        # Odd multipliers keep every bit; the sum wraps around modulo 2**64 on purpose.
        total += ((bits ^ (places * 0x9E3779B1)) * (2 * places + 1)).sum()
    return (total >> 2).cpu()


def _send_from_rank_zero(tensor: torch.Tensor, mesh: ParallelMesh) -> None:
    if tensor.is_meta:
        return
    with torch.no_grad():
        staged = tensor.detach().cpu().contiguous()
        flat = staged.view(torch.uint8) if staged.dim() else staged.reshape(1).view(torch.uint8)
        broadcast(flat, source=0, group=mesh.control)
        tensor.copy_(staged)
