"""The model, the optimizer and the batches that every contender of a benchmark trains on.

All contenders see the same global batches: a recipe's ``batch_size`` is per data-parallel replica,
so a global batch is as many of the recipe's batches as the goose3d layout has replicas, and each
contender takes its share of those rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jsonargparse import ArgumentParser
from lightning import LightningDataModule, LightningModule
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import LlamaConfig, LlamaForCausalLM

from goose_strategy.bench.job import Job, read_recipe
from goose_strategy.errors import BatchError, ConfigError

Batch = dict[str, Tensor]

# The built-in work: a step of about a third of a second on one CPU core.
BUILT_IN_ROWS = 8  # per replica
BUILT_IN_SEQUENCE = 128
BUILT_IN_VOCAB = 4096


class BuiltInLlama(LightningModule):
    """A small Llama, for a benchmark without a recipe."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=BUILT_IN_VOCAB,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: Batch) -> Tensor:
        """Return the loss of one batch."""
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> Optimizer:
        """Return AdamW."""
        return AdamW(self.parameters(), lr=1e-3)


@dataclass
class Workload:
    """A module with fresh weights, its optimizer and the global batches of all steps."""

    module: LightningModule
    optimizer: Optimizer
    schedulers: list[LRScheduler]
    batches: list[Batch]


def prepare(job: Job) -> None:
    """Let the recipe download and preprocess, once, before any rank is started."""
    if job.config is not None:
        _instantiate(job.config).data.prepare_data()


def build(job: Job) -> Workload:
    """Build the work; equal in every process, because the seed is set before."""
    count = job.warmup + job.steps
    if job.config is None:
        module: LightningModule = BuiltInLlama()
        shape = (BUILT_IN_ROWS * job.replicas, BUILT_IN_SEQUENCE)
        batches = skewed_batches(count, shape, BUILT_IN_VOCAB, seed=job.seed)
    else:
        recipe = _instantiate(job.config)
        module = recipe.model
        recipe.data.setup("fit")
        batches = global_batches(recipe.data.train_dataloader(), count, job.replicas)
    optimizer, schedulers = single_optimizer(module.configure_optimizers())
    return Workload(module, optimizer, schedulers, batches)


def skewed_batches(count: int, shape: tuple[int, int], vocab: int, *, seed: int) -> list[Batch]:
    """Return ids ``[batch, seq]`` where few tokens are frequent, so that the loss falls at once.

    A falling loss depends on right gradients; on uniform ids every contender would agree.
    """
    drawn = torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed))
    ids = (vocab * drawn.pow(6)).long()
    return [{"input_ids": part, "labels": part} for part in ids]


def global_batches(loader: Iterable[Any], count: int, replicas: int) -> list[Batch]:
    """Return ``count`` global batches, each the rows of ``replicas`` batches of the loader.

    Raises:
        BatchError: If a batch is no dictionary of tensors, shapes differ, or the data end early.
    """
    endless = itertools.chain.from_iterable(itertools.repeat(loader))
    batches = []
    for index in range(count):
        parts = list(itertools.islice(endless, replicas))
        for part in parts:
            if not (isinstance(part, Mapping) and all(_has_rows(x) for x in part.values())):
                raise BatchError(
                    f"batch {index} is a {type(part).__name__}; bench step splits dictionaries of "
                    "tensors with rows along dim 0."
                )
        if len({tuple((k, v.shape[1:]) for k, v in part.items()) for part in parts}) > 1:
            raise BatchError(
                f"batch {index}: the batches of {replicas} replicas have different shapes; "
                "pad them to one length for the benchmark."
            )
        batches.append({key: torch.cat([part[key] for part in parts]) for key in parts[0]})
    return batches


def share(batch: Batch, *, rank: int, replicas: int) -> Batch:
    """Return the rows of replica ``rank``.

    Raises:
        BatchError: If the rows cannot be split evenly.
    """
    rows = next(iter(batch.values())).shape[0]
    if rows % replicas:
        raise BatchError(
            f"a global batch of {rows} rows cannot be split evenly over {replicas} replicas; "
            f"choose a batch_size so that it is a multiple of {replicas}."
        )
    part = rows // replicas
    return {key: value[rank * part : (rank + 1) * part] for key, value in batch.items()}


def single_optimizer(configured: Any) -> tuple[Optimizer, list[LRScheduler]]:
    """Unpack what ``configure_optimizers`` returned.

    Raises:
        ConfigError: If it is not one optimizer, with or without schedulers.
    """
    schedulers: list[Any] = []
    if isinstance(configured, Mapping):
        schedulers, configured = [configured.get("lr_scheduler")], configured["optimizer"]
    elif isinstance(configured, tuple) and len(configured) == 2 and isinstance(configured[0], list):
        configured, schedulers = configured
    if isinstance(configured, list | tuple) and len(configured) == 1:
        configured = configured[0]
    if not isinstance(configured, Optimizer):
        raise ConfigError(
            f"configure_optimizers() returned {type(configured).__name__}; bench step takes "
            "modules with exactly one optimizer."
        )
    plain = [entry["scheduler"] if isinstance(entry, Mapping) else entry for entry in schedulers]
    return configured, [entry for entry in plain if isinstance(entry, LRScheduler)]


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _instantiate(config: str) -> Any:
    """Return the recipe's model and data as attributes; the trainer section is not built."""
    recipe = read_recipe(config)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    parser.add_subclass_arguments(LightningDataModule, "data")
    parsed = parser.parse_object({key: recipe[key] for key in ("model", "data")})
    return parser.instantiate(parsed)
