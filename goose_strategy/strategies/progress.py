"""Progress bars that show the loss, tokens per second and, where it is defined, the MFU.

Lightning's ``ThroughputMonitor`` counts per process, which multiplies every token by tp x pp, wants
a FLOP count from the user, and takes its peaks from a table that holds figures with sparsity for
some cards and misses the names that the driver gives others. Here a token counts once, however many
ranks work on it, and the peaks are the vendors' dense ones.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from transformers import PreTrainedModel
from typing_extensions import override

from goose_strategy import validate

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.utilities.types import STEP_OUTPUT

# Dense bf16 and fp16 peaks in FLOP/s from the vendors' data sheets; the first name found wins.
_DENSE_PEAKS = (
    ("B200", 2.25e15),
    ("GH200", 989.4e12),
    ("H200 NVL", 835e12),
    ("H200", 989.4e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989.4e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10G", 70e12),
)
_HALF_PRECISIONS = ("bf16-mixed", "bf16-true", "16-mixed", "16-true")


class TokenMeter:
    """Tokens per second over the last steps, with pauses (validation) left out.

    Args:
        window: Steps that the rate is taken over.
    """

    def __init__(self, window: int = 50) -> None:
        validate.at_least(1, window=window)
        self.tokens = 0
        self._steps: deque[tuple[int, float]] = deque(maxlen=window)
        self._mark: float | None = None

    def resume(self, now: float) -> None:
        """Start the clock, unless it runs already (``now`` in seconds)."""
        self._mark = now if self._mark is None else self._mark

    def pause(self) -> None:
        """Stop the clock: what happens until the next ``resume`` is no training."""
        self._mark = None

    def add(self, tokens: int, now: float) -> None:
        """Count one finished step; the first one is left out of the rate, it sets things up."""
        if self._mark is not None and self.tokens > 0:
            self._steps.append((tokens, now - self._mark))
        self.tokens += tokens
        self._mark = now

    @property
    def tokens_per_second(self) -> float | None:
        """The rate over the window, or None before two steps are done."""
        seconds = sum(duration for _, duration in self._steps)
        return sum(tokens for tokens, _ in self._steps) / seconds if seconds > 0 else None


def count_tokens(batch: Any) -> int | None:
    """Return the number of token positions of a batch (a mapping, or a list of mappings).

    Padding counts: the model computes it, and telling it apart would make the host wait for the
    device at every step. Returns None where the batch has no ``input_ids``.
    """
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        return ids.numel() if isinstance(ids, torch.Tensor) else None
    if isinstance(batch, Sequence) and batch and all(isinstance(part, Mapping) for part in batch):
        counts = [count_tokens(part) for part in batch]
        return None if None in counts else sum(count for count in counts if count is not None)
    return None


def flops_per_token(model: PreTrainedModel, sequence_length: int) -> float:
    """Return the model FLOPs of training on one token: forward and backward, no recompute.

    ``6 N + 12 L h d T`` with N the weights that multiply (an untied input embedding only looks up),
    L layers, h heads of d, full (not causal) attention over T positions. The sizes are taken from a
    copy on the meta device, because a model that has been split holds only its own part.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        whole = type(model)(copy.deepcopy(model.config))
    config = model.config.get_text_config()
    weights = sum(param.numel() for param in whole.parameters())
    if not config.tie_word_embeddings:
        weights -= sum(param.numel() for param in whole.get_input_embeddings().parameters())
    head_size = getattr(config, "head_dim", None)
    width = config.num_attention_heads * head_size if head_size else config.hidden_size
    return float(6 * weights + 12 * config.num_hidden_layers * width * sequence_length)


def dense_peak(device_name: str) -> float | None:
    """Return the dense bf16 peak in FLOP/s of a device by the name its driver gives, if known."""
    # "L4" must not be found in "L40" and the like, so whole words are compared.
    words = f" {device_name.upper().replace('-', ' ')} "
    return next((peak for name, peak in _DENSE_PEAKS if f" {name.upper()} " in words), None)


class ThroughputBar(ProgressBar):
    """What both bars add: count in ``on_train_batch_end``, show in ``get_metrics``."""

    meter: TokenMeter
    _loss: torch.Tensor | None = None
    _replicas = 1
    _flops_per_token: float | None = None
    _peak: float | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.meter = TokenMeter()
        self._loss = self._flops_per_token = self._peak = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        # The sampler's own count of replicas: dp under goose3d, all processes under ddp.
        sampler = trainer.distributed_sampler_kwargs or {}
        self._replicas = int(sampler.get("num_replicas", 1))
        self._peak = _total_peak(trainer)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self.meter.resume(time.perf_counter())

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        tokens = count_tokens(batch)
        if tokens is not None:
            # Replicas get batches of one shape from the sampler, so this rank's count is enough.
            self.meter.add(tokens * self._replicas, time.perf_counter())
        if self._peak is not None and self._flops_per_token is None:
            self._flops_per_token = _model_flops(pl_module, batch)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.meter.pause()
        super().on_validation_start(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.meter.pause()
        super().on_train_epoch_end(trainer, pl_module)

    @override
    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        shown = super().get_metrics(trainer, pl_module)
        if self._loss is not None and not any("loss" in name for name in shown):
            shown["loss"] = float(self._loss)
        rate = self.meter.tokens_per_second
        if rate is not None:
            shown["tok/s"] = f"{rate:,.0f}"
            if self._flops_per_token is not None and self._peak is not None:
                shown["MFU"] = f"{rate * self._flops_per_token / self._peak:.1%}"
        return shown


def _total_peak(trainer: pl.Trainer) -> float | None:
    """Return the dense peak of all devices together, where it is known and applies."""
    device = trainer.strategy.root_device
    if device.type != "cuda" or trainer.precision not in _HALF_PRECISIONS:
        return None
    peak = dense_peak(torch.cuda.get_device_name(device))
    return None if peak is None else peak * trainer.world_size


def _model_flops(pl_module: pl.LightningModule, batch: Any) -> float | None:
    """Return the FLOPs of one token of the module's only and wholly trained language model."""
    models = [module for module in pl_module.modules() if isinstance(module, PreTrainedModel)]
    nested = {id(inner) for outer in models for inner in outer.modules() if inner is not outer}
    outermost = [model for model in models if id(model) not in nested]
    if len(outermost) != 1 or not isinstance(batch, Mapping):
        return None
    if not all(param.requires_grad for param in pl_module.parameters()):
        return None  # frozen weights need a third less; a figure made with 6 N would flatter
    return flops_per_token(outermost[0], batch["input_ids"].shape[-1])


class Goose3DProgressBar(ThroughputBar, TQDMProgressBar):
    """Lightning's bar with the loss, ``tok/s`` and, on cards whose peak is known, ``MFU``.

    ``tok/s`` counts each token once over the data-parallel replicas, never once per tensor- or
    pipeline-parallel rank, over the last 50 steps without validation. ``MFU`` divides by the dense
    bf16 peak of all devices; see ``flops_per_token`` for what is counted. Arguments are those of
    ``TQDMProgressBar``.
    """


class Goose3DRichProgressBar(ThroughputBar, RichProgressBar):
    """The same figures in Lightning's rich bar (needs ``rich``)."""
