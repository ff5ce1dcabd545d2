"""The reference under the names of a compiled library, so that either can be called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from cuda_ops.reference import norm, storage, unpack
from cuda_ops.reference.prepare import prepare
from cuda_ops.reference.step import step

if TYPE_CHECKING:
    from cuda_ops.layout import Segments, Shard
    from cuda_ops.state import StepState


class Reference:
    """Pure torch on any device. Arguments are checked by ``cuda_ops.ops``."""

    def sum_of_squares(self, grad: Tensor, segments: Segments, out: Tensor) -> None:
        """See ``ops.sum_of_squares``."""
        norm.sum_of_squares(grad, segments, out)

    def reduce_partials(self, partials: Tensor, out: Tensor) -> None:
        """See ``ops.reduce_partials``."""
        norm.reduce_partials(partials, out)

    def prepare(
        self, state: StepState, norm2: Tensor, max_norm: float, scale: Tensor | None
    ) -> None:
        """See ``ops.prepare``."""
        prepare(state, norm2, max_norm, scale)

    def step(self, shard: Shard, grad: Tensor, segments: Segments, state: StepState) -> None:
        """See ``ops.step``."""
        step(shard, grad, segments, state)

    def unpack(
        self,
        received: Tensor,
        out: Tensor,
        scale: Tensor | None,
        segments: Segments,
        partials: Tensor,
    ) -> None:
        """See ``ops.unpack``."""
        unpack.unpack(received, out, scale, segments, partials)

    def split_main(self, shard: Shard, values: Tensor) -> None:
        """See ``ops.split_main``."""
        storage.split_main(shard, values)

    def join_main(self, shard: Shard, out: Tensor) -> None:
        """See ``ops.join_main``."""
        storage.join_main(shard, out)

    def write_moment(self, x: Tensor, values: Tensor, scales: Tensor | None) -> None:
        """See ``ops.write_moment``."""
        storage.write_moment(x, values, scales)

    def read_moment(self, values: Tensor, scales: Tensor | None, out: Tensor) -> None:
        """See ``ops.read_moment``."""
        out.copy_(storage.read_moment(values, scales))
