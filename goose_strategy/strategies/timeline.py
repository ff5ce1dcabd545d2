"""`TimelineRecorder`: the recorder of pipeline steps as a callback of Fabric and the Trainer.

Lightning's own profilers time hooks, and all microbatches of a step lie within one of them.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from goose_strategy.pipeline_parallel.timeline import StepRecorder
from goose_strategy.strategies.verbs import StrategyVerbs


class TimelineRecorder(StepRecorder, Callback):
    """Records when every action of some steps began and ended; ``goose3d timeline DIR`` draws it.

    For ``Trainer(callbacks=[...])``, a YAML file, ``Fabric(callbacks=[...])`` or
    ``strategy.add_pipeline_callback``. It costs a few microseconds per action in the recorded
    steps; the files are written when they are over. Needs ``pp > 1``.

    Args:
        dir: Folder of the files, one per rank; those of an earlier recording are replaced.
        steps: How many training calls are recorded.
        skip: How many are let pass before.

    Raises:
        ConfigError: If a number is wrong, or the folder cannot be one of recordings.
    """

    def __init__(self, dir: str, steps: int = 2, skip: int = 1) -> None:  # noqa: A002  a user's word
        super().__init__(dir, steps, skip)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._warn_without_pipeline(trainer.strategy)

    @override
    def on_after_setup(self, fabric: Any, module: Any) -> None:
        self._warn_without_pipeline(fabric.strategy)
        super().on_after_setup(fabric, module)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.close()

    def _warn_without_pipeline(self, strategy: object) -> None:
        if isinstance(strategy, StrategyVerbs) and strategy.runtime.config.pp > 1:
            return
        rank_zero_warn(
            "TimelineRecorder records nothing here: the model is not cut into stages. Set pp > 1 "
            "in goose3d's strategy, or leave the callback out."
        )
