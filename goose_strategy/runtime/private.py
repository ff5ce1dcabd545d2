"""Private training of one sharded module: what its calls, its gradients and its steps need.

With ``privacy`` set every call with labels and gradients runs through a schedule, also at
``pp=1``: clipping happens between the halves of a backward, which only a schedule has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from goose_strategy.compat.torch import is_compiled
from goose_strategy.compat.transformers import tied_parameters
from goose_strategy.errors import ConfigError, PlanError, PrivacyError
from goose_strategy.pipeline_parallel.microbatch import count_rows, split_batch
from goose_strategy.privacy.classes import Share, check_samples, share_of
from goose_strategy.privacy.clipping import MASK, SampleClipping
from goose_strategy.privacy.lengths import OneLength
from goose_strategy.privacy.losses import PerSampleLoss
from goose_strategy.privacy.release import Release, privatize
from goose_strategy.privacy.seal import Seal, refuse_hooks
from goose_strategy.privacy.ties import TiedLink
from goose_strategy.tensor_parallel.loss import IGNORED

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from goose_strategy.data_parallel.bucket import Bucket
    from goose_strategy.pipeline_parallel.config import PipelineConfig
    from goose_strategy.pipeline_parallel.stage import ModelPart
    from goose_strategy.privacy.ledger import Ledger
    from goose_strategy.runtime.batch import Batch
    from goose_strategy.runtime.handle import Handle
    from goose_strategy.runtime.model import ShardedModel
    from goose_strategy.runtime.settings import RuntimeConfig


class PrivateTraining:
    """The privacy of one module.

    Args:
        model: The sharded module, after its surgery.
        part: Its stages on this rank.
        ledger: The privacy of the run.

    Attributes:
        ledger: The privacy of the run.
        clipping: What happens between the halves of every backward.
    """

    def __init__(self, model: Handle, part: ModelPart, ledger: Ledger) -> None:
        self.ledger = ledger
        self._model = model
        self._mesh = model.mesh
        self._positions = model.surgery.positions
        self._undo = ExitStack()
        named = {n: p for n, p in model.module.named_parameters() if p.requires_grad}
        self.clipping = SampleClipping(
            ledger.config,
            model.mesh,
            stages=[stage.index for stage in part.stages],
            shares=self._shares(named, part.module),
            link=self._link(named),
            dtype=model.surgery.loss_dtype,
        )
        self._known = {id(param) for param in named.values()}
        self._seal = Seal()
        self._lengths = OneLength(part.module, positions=self._positions)
        for name, param in named.items():
            handle = param.register_hook(partial(self._check_gradient, name))
            self._undo.callback(handle.remove)

    def close(self) -> None:
        """Remove the hooks."""
        self._undo.close()

    # -- set-up --------------------------------------------------------------------------------

    def _shares(self, named: dict[str, nn.Parameter], lm: nn.Module) -> dict[int, Share]:
        surgery, tp = self._model.surgery, self._mesh.tp_size
        uses: dict[int, list[nn.Module]] = {}
        for module in lm.modules():
            for param in module.parameters(recurse=False):
                uses.setdefault(id(param), []).append(module)
        shares = {}
        for name, param in named.items():
            share = share_of(surgery.specs.get(name), name, param, tp=tp)
            here = len(uses.get(id(param), ())) > 1
            apart = name in surgery.tied
            if here or apart:
                check_tie(name, uses[id(param)], here=here, apart=apart)
                share = replace(share, tied=True, tied_here=here)
            shares[id(param)] = share
        return shares

    def _link(self, named: dict[str, nn.Parameter]) -> TiedLink | None:
        surgery, mesh = self._model.surgery, self._mesh
        names = [name for name in named if name in surgery.tied]
        if not names or self.ledger.config.tied == "bound":
            return None
        if len(names) > 1:
            raise PlanError(f"{names} are tied across stages; private training knows one such.")
        spec = surgery.specs[names[0]]
        other = mesh.pp_size - 1 if mesh.is_first_stage else 0
        return TiedLink(
            mesh,
            peer=mesh.layout.stage_rank(mesh.rank, other),
            start=spec.offsets[0],
            length=spec.local_shape[0],
        )

    def _check_gradient(self, name: str, gradient: Tensor | None) -> None:
        """Refuse a gradient that did not go through the clipping."""
        if gradient is not None and not self.clipping.accumulating:
            raise PrivacyError(
                f"{name} got a gradient that was not clipped: something computes it past the "
                "layers that private training knows (a fused kernel, a loss of other outputs, a "
                "backward outside of model(**batch)). Nothing was released; remove it, or freeze "
                f"{name}."
            )

    def check_single(self, optimizers: Sequence[Optimizer]) -> None:
        """Check that there is one optimizer at the most.

        Raises:
            ConfigError: If there are more.
        """
        if len(optimizers) > 1:
            raise ConfigError(
                f"{len(optimizers)} optimizers cannot share one private step: the noise is "
                "counted once. Use parameter groups of one optimizer."
            )

    def check_stepped(self, owned: Mapping[str, object]) -> None:
        """Check that an optimizer steps every trainable parameter.

        Args:
            owned: Those that one steps, by name.

        Raises:
            ConfigError: If not: the gradients of one that is left out would add up over all calls,
                and get the noise of one.
        """
        named = self._model.module.named_parameters()
        left = [n for n, p in named if p.requires_grad and p.numel() and n not in owned]
        if left:
            raise ConfigError(
                f"privacy=...: {len(left)} trainable parameters (first: {left[0]}) are in no group "
                "of the optimizer, so that their gradients would add up without noise; freeze them "
                "(requires_grad=False) before the set-up, or give them to the optimizer."
            )

    # -- calls ---------------------------------------------------------------------------------

    def prepare(
        self, batches: Sequence[Batch], config: PipelineConfig, *, listed: bool
    ) -> list[Batch]:
        """Check a call's batches and cut them; tell the clipping which rows are samples.

        Args:
            batches: One batch to be split, or microbatches.
            config: How it is split.
            listed: Whether they are microbatches already.

        Returns:
            Microbatches, without `MASK`, in which rows that only fill up have no labels.

        Raises:
            PrivacyError: If the call breaks an order that the noise relies on.
        """
        if not self._model.sync:
            raise PrivacyError(
                "private training takes one call per step, so gradients cannot be accumulated "
                "(no_backward_sync, accumulate_grad_batches); a logical batch may be as large as "
                "wanted, num_microbatches bounds the memory."
            )
        self._check_parameters()
        marks = [batch.get(MASK) for batch in batches]
        known = [mark for mark in marks if mark is not None]
        whole = torch.cat(known) if len(known) == len(marks) else None
        self.ledger.begin_call(whole)
        filled = [self._filled(batch) for batch in batches]
        microbatches = split_batch(
            filled if listed else filled[0], config, stages=self._mesh.pp_size
        )
        self._lengths.check(batches, microbatches)
        masks = []
        for microbatch in microbatches:
            mask = microbatch.pop(MASK)
            masks.append(mask)
            for name in ("labels", "shift_labels"):
                labels = microbatch.get(name)
                if labels is not None:
                    gone = (mask == 0).view(-1, *[1] * (labels.dim() - 1)).to(labels.device)
                    microbatch[name] = labels.masked_fill(gone, IGNORED)
        self.clipping.masks = masks
        return microbatches

    def _check_parameters(self) -> None:
        """Refuse parameters that were frozen at the set-up, and hooks of others.

        Raises:
            PrivacyError: If there is one; names it.
        """
        named = {n: p for n, p in self._model.module.named_parameters() if p.requires_grad}
        for name, param in named.items():
            if id(param) not in self._known:
                raise PrivacyError(
                    f"{name} was frozen when the module was set up, so its gradient would not be "
                    "clipped; set the module up again after thawing it."
                )
        refuse_hooks(named)

    def _filled(self, batch: Batch) -> Batch:
        """Return a batch with a mark for every row, and positions for every row where needed."""
        rows = count_rows(batch)
        out = dict(batch)
        mask = out.get(MASK)
        if mask is None:
            out[MASK] = torch.ones(rows, dtype=torch.long)
        elif tuple(mask.shape) != (rows,):
            raise PrivacyError(
                f"{MASK} has shape {tuple(mask.shape)}, but the batch has {rows} rows."
            )
        ids, positions = out.get("input_ids"), out.get("position_ids")
        if self._positions and positions is None and ids is not None:
            positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        if positions is not None and positions.shape[0] == 1:
            out["position_ids"] = positions.expand(rows, -1)
        return out

    def samples(self) -> float:
        """Return the number of samples of this replica's call."""
        return float(sum(int((mask > 0).sum()) for mask in self.clipping.masks))

    def end_call(self) -> None:
        """Keep what clipping did, for whoever watches."""
        self.ledger.end_call(self.clipping.stats)

    # -- steps ---------------------------------------------------------------------------------

    def released(self, buckets: Sequence[Bucket]) -> None:
        """Note that a clipped sum lies in the gradients, which nobody may touch now."""
        self.ledger.note_released()
        self._seal.close(buckets)

    def privatize(self, buckets: Sequence[Bucket]) -> None:
        """Add the noise to the reduced gradients and divide them by the logical batch.

        Raises:
            PrivacyError: If not exactly one call waits for its step, or its gradients were changed.
        """
        self.ledger.check_step()
        self._seal.check(buckets)
        scale = self.ledger.begin_step()
        release = Release(
            noise=self.ledger.noise,
            scale=scale,
            step=self.ledger.drawn,
            divisor=float(self.ledger.config.logical_batch_size),
        )
        privatize(buckets, release, self._model.surgery.specs, self._mesh)


def check_tie(name: str, users: Sequence[nn.Module], *, here: bool, apart: bool) -> None:
    """Check that a shared weight is one of an embedding and a head.

    Raises:
        PlanError: If it is shared otherwise.
    """
    kinds = sorted("table" if isinstance(m, nn.Embedding) else "head" for m in users)
    if kinds in (["head", "table"], ["head"], ["table"]) and not (here and apart):
        return
    listed = [type(module).__name__ for module in users]
    raise PlanError(
        f"{name} is shared by {listed}; private training knows a weight that one embedding and one "
        "head share. Untie it, freeze it, or train without privacy=...."
    )


def check_private(
    module: nn.Module, models: Sequence[tuple[str, nn.Module]], config: RuntimeConfig
) -> None:
    """Check before anything is changed that a module can be trained privately.

    Args:
        module: The user's.
        models: Its causal LMs, by name.
        config: With ``privacy``.

    Raises:
        PlanError: If there is not exactly one, something trains outside of it, or a trainable
            parameter has no known gradient per sample.
        ConfigError: If the settings do not fit the model.
    """
    if len(models) != 1:
        raise PlanError(
            f"privacy=... needs exactly one trainable transformers causal LM inside "
            f"{type(module).__name__}, which has {len(models)}."
        )
    lm = models[0][1]
    inside = {id(param) for param in lm.parameters()}
    outside = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in inside]
    if outside:
        raise PlanError(
            f"privacy=...: {len(outside)} trainable parameters (first: {outside[0]}) lie outside "
            f"of {type(lm).__name__}, whose calls alone are clipped; freeze them."
        )
    if getattr(getattr(lm, "config", None), "output_router_logits", False):
        raise PlanError(
            "output_router_logits=True adds a loss over the tokens of all samples, which makes "
            "them depend on one another; set it to False in the model's config."
        )
    compiled = [name for name, part in lm.named_modules() if name and is_compiled(part)]
    if compiled or config.pipeline.compile_layers:
        raise ConfigError(
            f"{compiled[0] if compiled else 'compile_layers'} is compiled, but private training "
            "needs to see what goes into every layer, which a graph hides; leave the layers "
            "uncompiled."
        )
    check_samples(lm)
    if config.pp == 1 or config.privacy is None or config.privacy.clipping != "per_stage":
        return
    trains = {name for name, param in lm.named_parameters() if param.requires_grad}
    if trains & set(tied_parameters(lm).values()):
        raise ConfigError(
            "clipping='per_stage' cannot bound a weight whose copies lie on two ranks: both parts "
            "add up. Untie the head, freeze it, or use clipping='flat'."
        )


def ledger_for(
    ledger: Ledger | None, models: Sequence[ShardedModel], module: nn.Module
) -> Ledger | None:
    """Return the privacy of a module that is set up; only one is trained under it.

    Raises:
        ConfigError: If another one is there already.
    """
    alive = [model for model in models if not model.closed]
    if ledger is not None and alive:
        raise ConfigError(
            f"privacy=... covers one module, and {type(alive[0].module).__name__} is set up "
            f"already; set {type(module).__name__} up with a strategy of its own."
        )
    return ledger


def refuse_clipping(ledger: Ledger | None) -> None:
    """Refuse to clip what is private, or shall be.

    Raises:
        ConfigError: If there is a ledger.
    """
    if ledger is not None:
        raise ConfigError(
            "gradient_clip_val (clip_gradients) cannot be used with privacy=...: every sample is "
            "clipped to max_grad_norm, and the sum must not be read before it has its noise; "
            "leave it out."
        )


def private_pipeline(config: PipelineConfig) -> PipelineConfig:
    """Return the pipeline's settings with a ``loss_fn`` that is checked."""
    if config.loss_fn is None or isinstance(config.loss_fn, PerSampleLoss):
        return config
    return replace(config, loss_fn=PerSampleLoss(config.loss_fn))
