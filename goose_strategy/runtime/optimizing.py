"""What the runtime does with optimizers beyond attaching them: clipping, states, weights.

The verbs of `ParallelRuntime` that begin with an optimizer, on a page of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from goose_strategy.errors import BatchError, ConfigError
from goose_strategy.optim.clip import clip_grad_norm, clip_grad_value
from goose_strategy.optim.scaler import LossScaler, unscale

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from goose_strategy.mesh.mesh import ParallelMesh
    from goose_strategy.runtime.model import ShardedModel


class OptimizerVerbs:
    """Verbs of a runtime that concern optimizers.

    Attributes:
        models: The sharded models.
        scaler: Scales the losses of models that are sharded from now on.
    """

    models: list[ShardedModel]
    scaler: LossScaler | None = None

    @property
    def mesh(self) -> ParallelMesh:
        """The mesh."""
        raise NotImplementedError

    def watch(self, what: str) -> AbstractContextManager[None]:
        """Guard a block by the watchdog's deadline."""
        raise NotImplementedError

    def clip_grad_norm(
        self,
        optimizer: Optimizer,
        max_norm: float,
        *,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clip the gradients of an optimizer's parameters by their global norm. Collective.

        Args:
            optimizer: The optimizer whose parameters are clipped.
            max_norm: Largest norm after clipping.
            norm_type: 2.0 or any p-norm, or ``inf``.
            error_if_nonfinite: Raise, before anything is changed, if the norm is not finite.

        Returns:
            The norm before clipping, a scalar equal on all ranks.
        """
        model = self._owner(optimizer)
        refusal: Exception | None = None
        with self.watch("gradient clipping"):
            try:
                return clip_grad_norm(
                    model.shards_of(optimizer),
                    self.mesh,
                    max_norm,
                    norm_type=norm_type,
                    error_if_nonfinite=error_if_nonfinite,
                )
            except (BatchError, ConfigError) as error:
                refusal = error
            except RuntimeError as error:
                if "error_if_nonfinite" not in str(error):
                    raise
                refusal = error
        # All ranks refuse alike, from the same numbers: no failure that would have to end them.
        raise refusal

    def clip_grad_value(self, optimizer: Optimizer, clip_value: float) -> None:
        """Clip the reduced gradients of an optimizer's parameters element by element."""
        shards = self._owner(optimizer).shards_of(optimizer)
        with self.watch("gradient clipping"):
            clip_grad_value(shards, clip_value)

    def owner_of(self, optimizer: Optimizer) -> ShardedModel | None:
        """Return the sharded module that an optimizer is attached to, if any."""
        for model in self.models:
            if any(optimizer is known for known in model.optimizers):
                return model
        return None

    def _owner(self, optimizer: Optimizer) -> ShardedModel:
        model = self.owner_of(optimizer)
        if model is None:
            raise ConfigError(
                f"{type(optimizer).__name__} is not attached; set it up with its module first."
            )
        return model

    def unscale(self, optimizer: Optimizer, inverse: Tensor) -> Tensor | None:
        """Divide an optimizer's gradients by the scale of the loss. Collective over the world.

        Args:
            optimizer: An optimizer; nothing is done if it is not attached.
            inverse: One over the scale, an fp32 scalar.

        Returns:
            1.0 where any gradient of the whole model is NaN or infinite, else 0.0: an fp32 scalar,
            the same on all ranks; ``None`` if the optimizer is not attached.
        """
        model = self.owner_of(optimizer)
        if model is None:
            return None
        with self.watch("unscaling of gradients"):
            return unscale(model.shards_of(optimizer), self.mesh, inverse)

    def synchronize_parameters(self) -> None:
        """Wait for the weights of other ranks that the last steps did not wait for.

        To be called on all ranks. Nothing is left to wait for without ``overlap_param_gather``.
        """
        with self.watch("gathering of the weights"):
            for model in self.models:
                model.synchronize()

    def skipped_steps(self, optimizer: Optimizer) -> int:
        """Return how many steps of an optimizer were skipped because of NaN or infinity.

        Always 0 where torch steps the slices. On a device the host waits for the answer.
        """
        native = (zero.native for zero in self._owner(optimizer).shards_of(optimizer))
        return sum(steps.skipped for steps in native if steps is not None)

    def full_optimizer_state(
        self, optimizer: Optimizer, *, rank0_only: bool = True
    ) -> dict[str, Any]:
        """Return the state dict that one process would have. Collective over the world.

        Args:
            optimizer: An attached optimizer.
            rank0_only: Put it together on global rank 0 alone; the others get an empty dict.

        Returns:
            ``state`` by position and ``param_groups``, whole tensors on the host, fp32 whatever
            the state is kept in. bf16 parameters have their main weights under ``main``.
        """
        # torch's checkpoint package costs half a second; most starts need none.
        from goose_strategy.runtime.whole import full_optimizer_state

        model = self._owner(optimizer)
        return full_optimizer_state(model, optimizer, rank0_only=rank0_only)
