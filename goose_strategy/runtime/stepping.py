"""Steps under the eyes of the watchdog.

An optimizer's step ends in an exchange of weights; a rank that is stopped there would keep all
others waiting. The step itself runs the user's closure, so it cannot be watched as a whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from typing_extensions import override

from goose_strategy.comm.collectives import all_gather_objects
from goose_strategy.optim.storage import is_native
from goose_strategy.optim.zero import ZeroShards, dtypes_of
from goose_strategy.runtime.verdict import agreed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goose_strategy.data_parallel.reducer import Reducer
    from goose_strategy.mesh.mesh import ParallelMesh
    from goose_strategy.optim.config import ZeroConfig
    from goose_strategy.runtime.batch import Watch


class WatchedShards(ZeroShards):
    """A sharded step whose exchanges are watched.

    Args:
        reducer: Knows the parameters of the module.
        optimizer: The user's optimizer.
        watch: Guards a block by a deadline.
        native: Whether `cuda_ops` steps it; see `ZeroShards`.
    """

    def __init__(
        self, reducer: Reducer, optimizer: Optimizer, watch: Watch, *, native: bool | None = None
    ) -> None:
        self._watch = watch
        super().__init__(reducer, optimizer, native=native)

    @override
    def prepare(self) -> None:
        with self._watch("gradient reduction"):
            self.reducer.finalize()
        super().prepare()

    @override
    def exchange_factors(self) -> list[float]:
        # The comparison itself is not watched: all ranks raise alike, which has to end nobody.
        if not self.must_exchange:
            return []
        with self._watch("comparison of the loss factors"):
            return super().exchange_factors()

    @override
    def _after_step(
        self, _optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]
    ) -> None:
        with self._watch("optimizer step"):
            super()._after_step(_optimizer, _args, _kwargs)


def native_on_any_rank(
    optimizers: Sequence[Optimizer], config: ZeroConfig, mesh: ParallelMesh
) -> list[bool]:
    """Decide for each optimizer whether `cuda_ops` steps it. Collective over the world.

    Args:
        optimizers: Optimizers of one module, the same on all ranks.
        config: The settings.
        mesh: The ranks; their stages may hold parameters of different types.

    Raises:
        ConfigError: If the settings ask for what an optimizer cannot have; alike on all ranks.
    """
    mine = [dtypes_of(optimizer) for optimizer in optimizers]
    everyone = all_gather_objects(mine, mesh.control)

    def decide() -> list[bool]:
        found = []
        for index, optimizer in enumerate(optimizers):
            dtypes = set().union(*(ranks[index] for ranks in everyone))
            found.append(is_native(config, optimizer, dtypes))
        return found

    return agreed(mesh, decide)
