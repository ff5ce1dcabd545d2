"""One bucket: the flat storage of its parameters, its accumulator, and its sum over dp.

FSDP pads and shards each parameter by itself. Here parameters stay whole and are views of one flat
tensor, of which this rank steps one slice; the all-gather after the step writes into the weights
that the next forward reads, without a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from goose_strategy.comm.collectives import (
    Pending,
    all_gather_flat,
    all_reduce,
    reduce_scatter_flat,
)
from goose_strategy.data_parallel.wire import NarrowSum
from goose_strategy.errors import ConfigError
from goose_strategy.grads.buffer import GradBuffer, GradSlot

if TYPE_CHECKING:
    from goose_strategy.data_parallel.plan import BucketKey, BucketLayout
    from goose_strategy.mesh.mesh import ParallelMesh


class Bucket:
    """Parameters that are reduced together.

    Attributes:
        index: Position among the reducer's buckets: the order in which they are launched.
        key: What the parameters have in common.
        weights: ``[dp * n]`` in the parameters' dtype; every parameter is a view of it.
        own_weights: This rank's slice ``[n]`` of it.
        grads: The accumulator and its state.
    """

    def __init__(
        self,
        layout: BucketLayout,
        params: dict[str, nn.Parameter],
        mesh: ParallelMesh,
        *,
        average: bool,
        narrow_wire: bool = False,
    ) -> None:
        """Move the parameters into one flat storage; their values stay.

        Args:
            layout: Names and places.
            params: Parameters by name; at least those of the layout.
            mesh: Groups of the sums.
            average: Divide the sum over dp by dp.
            narrow_wire: Let gradients travel in bf16.
        """
        self.index = -1
        self.key: BucketKey = layout.key
        self._mesh = mesh
        # fp64 is asked for by whoever checks the last digits.
        self._narrow_wire = layout.key.narrow or (narrow_wire and layout.key.dtype != torch.float64)
        first = params[layout.entries[0].name]
        self.weights = torch.zeros(layout.size, dtype=layout.key.dtype, device=first.device)
        accumulator = torch.zeros(
            layout.size, dtype=layout.key.accumulator_dtype, device=first.device
        )
        slots = []
        for entry, start in zip(layout.entries, layout.starts, strict=True):
            param = params[entry.name]
            slots.append(GradSlot(entry.name, param, flat=accumulator, start=start))
            self._move_in(param, start)
        share = layout.size // mesh.dp_size
        begin = mesh.dp_rank * share
        self.own_weights = self.weights[begin : begin + share]
        self.grads = GradBuffer(
            accumulator,
            slots,
            start=begin,
            stop=begin + share,
            replicas=mesh.dp_size if average else 1,
            primary=(not self.key.tp_partial or mesh.tp_rank == 0) and self.key.tie_owner,
        )

    def _move_in(self, param: nn.Parameter, start: int) -> None:
        grad, param.grad = param.grad, None
        place = self.weights[start : start + param.numel()].view(param.shape)
        place.copy_(param.detach())
        param.data = place
        if param.dtype != self.key.accumulator_dtype:
            param.grad_dtype = self.key.accumulator_dtype
            grad = None if grad is None else grad.to(self.key.accumulator_dtype)
        param.grad = grad

    @property
    def slots(self) -> list[GradSlot]:
        """The parameters, in the order of their elements."""
        return self.grads.slots

    def take_back(self) -> None:
        """Move parameters back in that were given another memory, with the values they have there.

        ``p.data = tensor`` does that, and with it ``vector_to_parameters`` and ``module.to``: a
        step would go on with the weights here, which no forward reads any more.

        Raises:
            ConfigError: If one has another dtype, shape or device now.
        """
        address, size = self.weights.data_ptr(), self.weights.element_size()
        for slot in self.slots:
            param = slot.param
            if param.data_ptr() == address + slot.start * size:
                continue
            place = self.weights[slot.start : slot.stop].view(slot.view.shape)
            for what in ("dtype", "shape", "device"):
                now, then = getattr(param, what), getattr(place, what)
                if now != then:
                    raise ConfigError(
                        f"parameter {slot.name} has {what}={now} since it was set up with {then}; "
                        "change the module before the set-up, and its dtype by precision=..."
                    )
            place.copy_(param.detach())
            param.data = place

    def idle(self) -> bool:
        """Whether none of the parameters is trained at present (all were frozen later)."""
        return not any(slot.param.requires_grad for slot in self.slots)

    def reduce(self) -> None:
        """Launch the sum of this rank's gradients over dp."""
        grads = self.grads
        grads.prepare()
        if self.key.tp_partial:
            all_reduce(grads.flat, self._mesh.tp).wait()
        if self.key.tie is not None:
            all_reduce(grads.flat, self._mesh.tie).wait()
        pending: Pending
        if self._narrow_wire and self._mesh.dp is not None:
            pending = NarrowSum(grads.flat, self._mesh.dp)
        else:
            pending = reduce_scatter_flat(grads.flat, self._mesh.dp, async_op=True)
        grads.start_reduce(pending)

    def gather_weights(self) -> Pending:
        """Launch the gathering of all ranks' slices of the weights."""
        return all_gather_flat(self.weights, self.own_weights, self._mesh.dp, async_op=True)

    def gather_gradients(self) -> Tensor:
        """Return the whole reduced gradient ``[dp * n]``. Collective over dp."""
        whole = torch.empty_like(self.grads.flat)
        all_gather_flat(whole, self.grads.own, self._mesh.dp).wait()
        return whole

    def release(self) -> None:
        """Give every parameter a storage of its own again; gradients are dropped."""
        self.grads.alive = False
        for slot in self.slots:
            param = slot.param
            param.grad = None
            if param.dtype != self.key.accumulator_dtype:
                param.grad_dtype = param.dtype
            param.data = param.detach().clone()
