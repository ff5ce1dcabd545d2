"""What both strategies offer a user beyond Lightning's own methods, word for word the same.

The two bases of Lightning's share no class, so these stand beside them; each method hands on to the
runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from goose_strategy.errors import ConfigError
from goose_strategy.strategies.compat import unwrap_module, unwrap_optimizer

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from goose_strategy.pipeline_parallel.hooks import PipelineCallback
    from goose_strategy.pipeline_parallel.report import PartitionReport
    from goose_strategy.runtime.core import ParallelRuntime
    from goose_strategy.strategies.door import Door


class StrategyVerbs:
    """Methods of both doors; the strategy holds the `Door`."""

    _door: Door

    @property
    def runtime(self) -> ParallelRuntime:
        """The runtime behind this strategy: mesh, sharded models, gradients."""
        return self._door.runtime

    @property
    def data_parallel_rank(self) -> int:
        """Which shard of the data this process should read."""
        return self.runtime.mesh.dp_rank

    @property
    def data_parallel_size(self) -> int:
        """Into how many shards the data is split."""
        return self.runtime.mesh.dp_size

    def partition_report(self, module: nn.Module | None = None) -> PartitionReport:
        """Return which stages a model was cut into, on any rank.

        Args:
            module: What was set up, or the model in it; the one that is cut in depth if ``None``.

        Returns:
            The figures of every stage and how even they are; ``str()`` of it is a table.

        Raises:
            ConfigError: If no such module is cut in depth.
        """
        wanted = None if module is None else unwrap_module(module)
        for model in self.runtime.models:
            known = wanted is None or any(wanted is part for part in model.module.modules())
            if not model.closed and model.surgery.plan is not None and known:
                return model.surgery.plan.report
        raise ConfigError(
            f"no module of this strategy is cut in depth (pp={self.runtime.config.pp}); set the "
            "module up first, with pp > 1."
        )

    def add_pipeline_callback(self, callback: PipelineCallback) -> None:
        """Call an object before and after every action of a pipeline, after those added before.

        Call it on all ranks; it counts from the next call of a model on.

        Args:
            callback: The object. One that is registered already stays where it is.

        Raises:
            ConfigError: If it is no `PipelineCallback`, or overrides none of its methods.
        """
        self.runtime.hooks.add(callback)

    def remove_pipeline_callback(self, callback: PipelineCallback) -> None:
        """Call an object no longer.

        Raises:
            ConfigError: If it is not registered.
        """
        self.runtime.hooks.remove(callback)

    def synchronize_parameters(self) -> None:
        """Wait for weights that the last step did not wait for (``overlap_param_gather``).

        Call it on all ranks before parameters are read, or written, past the module's ``forward``
        and ``state_dict``.
        """
        self.runtime.synchronize_parameters()

    def skipped_steps(self, optimizer: Optimizer) -> int:
        """Return how many steps of an optimizer were skipped because of NaN or infinity.

        Args:
            optimizer: An optimizer that was set up, wrapped by Lightning or not.
        """
        return self.runtime.skipped_steps(unwrap_optimizer(optimizer))

    def full_optimizer_state(
        self, optimizer: Optimizer, *, rank0_only: bool = True
    ) -> dict[str, Any]:
        """Return the state dict that the optimizer would have in one process. Collective.

        Args:
            optimizer: An optimizer that was set up, wrapped by Lightning or not.
            rank0_only: Put it together on global rank 0 alone; the others get an empty dict.

        Returns:
            Whole fp32 tensors on the host, as ``optimizer.state_dict()`` has them without a
            strategy; bf16 parameters have their main weights under ``main``.
        """
        return self.runtime.full_optimizer_state(unwrap_optimizer(optimizer), rank0_only=rank0_only)
