"""Private training at the doors: what is refused, which loaders are replaced, what is logged."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from goose_strategy.errors import CheckpointError, ConfigError
from goose_strategy.privacy.sampler import check_loader, is_shuffled, poisson_loader
from goose_strategy.strategies import compat
from goose_strategy.strategies.verbs import StrategyVerbs
from goose_strategy.validate import at_least, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goose_strategy.privacy.ledger import Ledger
    from goose_strategy.runtime.core import ParallelRuntime

PRIVACY_KEY = "goose3d_privacy"
"""Entry of a checkpoint that holds steps, settings and history."""


def refuse_precision(plugin: Any) -> None:
    """Refuse a precision whose scaler skips steps: whether one was skipped depends on the data.

    Raises:
        ConfigError: If it is fp16's.
    """
    name = compat.plugin_precision(plugin)
    if name.startswith("16") or getattr(plugin, "scaler", None) is not None:
        raise ConfigError(
            f"precision={name!r} scales the loss and skips steps, which depends on the data; "
            "private training takes '32-true', 'bf16-mixed', 'bf16-true' or '64-true'."
        )


def refuse_trainer(trainer: Trainer) -> None:
    """Refuse what a Trainer would do to clipped gradients.

    Raises:
        ConfigError: Naming the setting and what to do instead.
    """
    if trainer.gradient_clip_val:
        raise ConfigError(
            f"gradient_clip_val={trainer.gradient_clip_val} cannot be used with privacy=...: every "
            "sample is clipped to max_grad_norm already; leave it out."
        )
    schedulers = compat.class_names(getattr(trainer, "callbacks", ())) & {
        "GradientAccumulationScheduler"
    }
    if trainer.accumulate_grad_batches != 1 or schedulers:
        raise ConfigError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} cannot be used with "
            "privacy=...: a step is one logical batch, which gets its noise once. Set "
            "logical_batch_size, and num_microbatches to bound the memory."
        )


def private_loader(runtime: ParallelRuntime, loader: Any) -> Any:
    """Return the loader that draws training data by Poisson sampling; others as they are.

    Collective over the world.

    Args:
        runtime: Started.
        loader: A loader that Lightning has prepared. One that does not shuffle is not for training.

    Raises:
        ConfigError: If its data cannot be drawn.
    """
    ledger = runtime.ledger
    if ledger is None or ledger.config.sampling == "none" or not is_shuffled(loader):
        return loader
    check_loader(loader)
    ledger.know_data(len(loader.dataset))
    mesh = runtime.mesh
    draw = ledger.draw(
        replicas=mesh.dp_size,
        replica=mesh.dp_rank,
        multiple=runtime.config.pipeline.microbatches(mesh.pp_size),
    )
    # Lightning may set the training loader up again, every few epochs or in another fit.
    return poisson_loader(loader, draw, ledger.first_draw(), ledger.counts)


def saved_privacy(runtime: ParallelRuntime) -> dict[str, Any]:
    """Return what a checkpoint says of the run's privacy: nothing without any."""
    return {} if runtime.ledger is None else {PRIVACY_KEY: runtime.ledger.state_dict()}


def check_resume(runtime: ParallelRuntime, meta: Mapping[str, Any], *, resumes: bool) -> None:
    """Check before a load that the run may go on from a checkpoint.

    Args:
        runtime: The runtime.
        meta: Of the checkpoint.
        resumes: Whether optimizers are loaded, too: weights alone are a new start, whose history
            counts where there is one.

    Raises:
        CheckpointError: If the privacy of the one is not that of the other.
    """
    state = meta.get(PRIVACY_KEY)
    ledger: Ledger | None = runtime.ledger
    if ledger is None:
        if resumes and state is not None:
            raise CheckpointError(
                "the checkpoint is of a private run, but this one has privacy=None, so that what "
                "it adds is not covered by any epsilon; set the same privacy=..., or load the "
                "model without its optimizer."
            )
        return
    if resumes or state is not None:
        ledger.check_resume(state)


def load_privacy(runtime: ParallelRuntime, state: Mapping[str, Any] | None) -> None:
    """Go on with the steps and the history of a checkpoint."""
    if runtime.ledger is not None:
        runtime.ledger.load_state_dict(state)


class PrivacyMonitor(Callback):
    """Logs what a private run has spent, and shows it on the progress bar.

    ``privacy/epsilon`` is for adding or removing one row of the data. ``privacy/clipped (not
    private)`` is the share of clipped samples, which is computed from the data without noise: to
    look at, not to publish.

    Args:
        delta: At which ``delta``; ``target_delta`` of the settings if ``None``.
        every_n_steps: How often; accountants take a fraction of a second.
        clipped: Log the share of clipped samples.

    Raises:
        ConfigError: If a number is wrong.
    """

    def __init__(
        self,
        delta: float | None = None,
        every_n_steps: int = 10,
        clipped: bool = False,  # noqa: FBT001, FBT002  from YAML
    ) -> None:
        whole(every_n_steps=every_n_steps)
        at_least(1, every_n_steps=every_n_steps)
        if delta is not None and not 0 < delta < 1:
            raise ConfigError(f"delta={delta!r} must lie between 0 and 1.")
        self.delta = delta
        self.every_n_steps = every_n_steps
        self.clipped = clipped

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ledger = self._ledger(trainer)
        if self.delta is None and ledger.config.target_delta is None:
            raise ConfigError(
                "PrivacyMonitor has no delta: set PrivacyMonitor(delta=...) or target_delta."
            )

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        ledger = self._ledger(trainer)
        if ledger.steps % self.every_n_steps and trainer.global_step != trainer.max_steps:
            return
        epsilon = ledger.epsilon(self.delta)
        value = math.inf if epsilon is None else epsilon
        pl_module.log("privacy/epsilon", value, prog_bar=True, rank_zero_only=False)
        if self.clipped and (share := ledger.clipped) is not None:
            pl_module.log("privacy/clipped (not private)", share, sync_dist=True)

    def _ledger(self, trainer: Trainer) -> Ledger:
        strategy = trainer.strategy
        if not isinstance(strategy, StrategyVerbs):
            raise ConfigError("PrivacyMonitor needs strategy=Goose3DStrategy(privacy=...).")
        return strategy.privacy
