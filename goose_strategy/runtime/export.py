"""Write a model for the hub: from the ranks that train it, or from a checkpoint, alone.

transformers' ``save_pretrained`` gathers the whole model in one process. Here the largest thing in
memory is a layer: each is gathered over tp on the stage that holds it, put back into the hub's
names and parts, and written where it belongs in the files; replicas take turns.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from goose_strategy.checkpoint import folder
from goose_strategy.checkpoint.agree import collect
from goose_strategy.checkpoint.load import open_alone
from goose_strategy.checkpoint.manifest import LocalTensor
from goose_strategy.comm.collectives import all_gather_objects, all_gather_uneven
from goose_strategy.compat.transformers import promised_ties
from goose_strategy.compat.weights import revert_names
from goose_strategy.errors import CheckpointError, ConfigError
from goose_strategy.hub.outline import Shape, Unit, make_outline
from goose_strategy.hub.plan import listed
from goose_strategy.hub.write import FileLayout, HubWriter, copy_tokenizer
from goose_strategy.runtime.adapters import PlainView, check_mergeable
from goose_strategy.runtime.origin import Origin

if TYPE_CHECKING:
    from goose_strategy.hub.config import ExportConfig
    from goose_strategy.mesh.shard import ShardSpec
    from goose_strategy.runtime.model import ShardedModel

_CONFIG_FILE = "config.json"


def export_model(model: ShardedModel, path: Any, settings: ExportConfig) -> None:
    """Write a sharded causal LM as a Hugging Face checkpoint. Collective over the world.

    Active low-rank adapters are merged into the weights that are written; the model stays as it is.

    Args:
        model: The sharded module; the causal LM inside it is written.
        path: The folder that will appear, on a file system that all ranks share; rank 0's counts.
        settings: Type, sizes, tokenizer.

    Raises:
        ConfigError: If the module holds no causal LM, or several.
        PlanError: If its config does not describe it.
        CheckpointError: On all ranks, if something is in the way at ``path``, or writing failed.
    """
    mesh = model.mesh
    model.check_filled()
    check_mergeable(model)
    doing = f"exporting to path={os.fspath(path)!r}"
    prefix, lm = _only(model.surgery.models)
    target = collect(mesh, doing, lambda: folder.local_path(path))[0]
    online = _Online(model, prefix)
    origin = Origin.of(prefix, lm)
    draft = _Draft(target, origin, settings, online.tensors)
    first = mesh.rank == 0
    collect(mesh, doing, lambda: draft.open() if first else None)
    try:
        failure: list[Exception] = []
        with HubWriter(draft.staging, draft.layout) as writer:
            for number, unit in enumerate(draft.units):
                if number % mesh.dp_size == mesh.dp_rank:
                    online.write(unit, draft, writer, failure)
        written = collect(mesh, doing, lambda: _keys_of(writer, failure))
        every = [key for keys in written for key in keys]
        collect(mesh, doing, lambda: draft.publish(every) if first else None)
    finally:
        if first:
            folder.remove(draft.staging)


def export_checkpoint(
    path: Any, out: Any, settings: ExportConfig, *, entry: str | None = None
) -> None:
    """Write the causal LM of a sharded checkpoint as a Hugging Face checkpoint, in one process.

    Args:
        path: The folder that ``fabric.save`` or the Trainer wrote.
        out: The folder that will appear.
        settings: Type, sizes, tokenizer.
        entry: The user's name for the model in the checkpoint, or that name and the model's name
            in the module (``"model.student"``), where there are several.

    Raises:
        ConfigError: If there is no such model.
        PlanError: If its config does not describe it.
        CheckpointError: If the checkpoint is damaged, or something is in the way at ``out``.
    """
    checkpoint = open_alone(path)
    name, plain = _chosen(checkpoint.record.models, entry, str(path))
    if any(key.startswith(f"{name}.") and ".lora_" in key for key in checkpoint.tensors):
        raise ConfigError(
            f"path={os.fspath(path)!r} holds adapters, which need their layers to be merged; load "
            "it into the PeftModel and call strategy.export(model, path), or export_adapter."
        )
    origin = Origin(**plain)
    start = (name, origin.prefix) if origin.prefix else (name,)
    begin = ".".join(start) + "."
    aliases = {
        alias.removeprefix(begin): key.removeprefix(begin)
        for alias, key in checkpoint.aliases.items()
        if alias.startswith(begin)
    }
    tensors = {
        key.removeprefix(begin): Shape(stored.dtype, stored.shape)
        for key, stored in checkpoint.tensors.items()
        if key.startswith(begin) and stored.path[0] == name
    }
    sources = _written(tensors, aliases, origin)
    draft = _Draft(folder.local_path(out), origin, settings, {n: tensors[n] for n in sources})
    draft.open()
    try:
        with HubWriter(draft.staging, draft.layout) as writer:
            for unit in draft.units:
                found = {
                    n: torch.empty(tensors[n].shape, dtype=tensors[n].dtype) for n in unit.names
                }
                checkpoint.read(
                    [
                        LocalTensor.whole(checkpoint.tensors[begin + sources[n]].path, tensor)
                        for n, tensor in found.items()
                    ]
                )
                draft.write(found, writer)
        draft.publish(writer.written)
    finally:
        folder.remove(draft.staging)


class _Draft:
    """The folder under construction, and the plan of what goes into it."""

    def __init__(
        self, target: Path, origin: Origin, settings: ExportConfig, tensors: Mapping[str, Shape]
    ) -> None:
        self.target = target
        self.staging = folder.staging_of(target)
        self._origin = origin
        self._settings = settings
        self.blank = origin.blank()
        order = {name: at for at, name in enumerate(self.blank.state_dict())}
        ordered = sorted(tensors, key=lambda name: order.get(name, len(order)))
        self.units = make_outline(
            self.blank, {name: tensors[name] for name in ordered}, settings.torch_dtype
        )
        keys = {key: kind for unit in self.units for key, kind in unit.keys.items()}
        self.layout = FileLayout(keys, settings.max_bytes)

    def open(self) -> None:
        """Check what is in the way, and make the files."""
        _check_target(self.target, overwrite=self._settings.overwrite)
        folder.remove(self.staging)
        self.staging.mkdir(parents=True)
        self.layout.create(self.staging)

    def write(self, tensors: Mapping[str, Tensor], writer: HubWriter) -> None:
        """Write one unit, given its whole tensors by name."""
        dtype = self._settings.torch_dtype
        cast = {
            name: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
        for key, tensor in revert_names(self.blank, cast).items():
            writer.write(key, tensor)

    def publish(self, written: Iterable[str]) -> None:
        """Check that all is there, add the small files, and put the folder in place.

        Args:
            written: Keys of what all ranks have written.
        """
        self.layout.check_written(written)
        config = copy.deepcopy(self.blank.config)
        kinds = [kind for unit in self.units for kind in unit.keys.values()]
        floats = [kind.dtype for kind in kinds if kind.dtype.is_floating_point]
        if floats:
            config.dtype = str(max({*floats}, key=floats.count)).removeprefix("torch.")
        config.architectures = [self._origin.kind]
        config.save_pretrained(self.staging)
        if self._origin.generation is not None:
            from transformers import GenerationConfig

            generation = GenerationConfig.from_dict(json.loads(self._origin.generation))
            generation.save_pretrained(self.staging)
        self._copy_tokenizer()
        folder.publish(self.staging, self.target)

    def _copy_tokenizer(self) -> None:
        asked = self._settings.tokenizer
        source = asked if asked is not None else self._origin.tokenizer
        if source is None or not os.path.isdir(source):
            return
        if not copy_tokenizer(Path(source), self.staging) and asked is not None:
            raise ConfigError(f"tokenizer={os.fspath(asked)!r} holds no tokenizer files.")


class _Online:
    """The tensors of a model that is spread over ranks.

    Attributes:
        tensors: Type and shape of every tensor that is written, by its name in the causal LM.
    """

    def __init__(self, model: ShardedModel, prefix: str) -> None:
        self._mesh = model.mesh
        begin = f"{prefix}." if prefix else ""
        (_, lm) = _only(model.surgery.models)
        self._view = PlainView(lm)
        saved = model.module.state_dict(keep_vars=True)
        specs = model.surgery.specs
        here: dict[str, Tensor] = dict(model.module.named_parameters())
        here |= {name: b for name, b in model.module.named_buffers() if name in saved}
        self._local = {
            plain: (tensor.detach(), specs.get(name))
            for name, tensor in here.items()
            if name.startswith(begin) and (name not in specs or specs[name].tie_owner)
            if (plain := self._view.name(name.removeprefix(begin))) is not None
        }
        kinds = {
            name: Shape(tensor.dtype, spec.global_shape if spec else tuple(tensor.shape))
            for name, (tensor, spec) in self._local.items()
        }
        cut = {name: spec for name, (_, spec) in self._local.items() if spec and spec.is_sharded}
        ranks = all_gather_objects((self._mesh.coordinates.pp, kinds), self._mesh.control)
        peers = all_gather_objects(cut, self._mesh.tp)
        self._peers: list[dict[str, ShardSpec]] = peers
        self._owner: dict[str, int] = {}
        known: dict[str, Shape] = {}
        for stage, theirs in sorted(ranks, key=lambda rank: rank[0]):
            for name, kind in theirs.items():
                known.setdefault(name, kind)
                self._owner.setdefault(name, stage)
        aliases = {
            plain: canonical
            for first, seconds in model.surgery.aliases.items()
            for second in seconds
            if (plain := self._view.name(second.removeprefix(begin))) is not None
            if (canonical := self._view.name(first.removeprefix(begin))) is not None
        }
        for second, first in aliases.items():
            if first in known:
                known[second], self._owner[second] = known[first], self._owner[first]
        self._sources = _written(known, aliases, Origin.of(prefix, lm))
        self.tensors = {name: known[name] for name in self._sources}

    def write(self, unit: Unit, draft: _Draft, writer: HubWriter, failure: list[Exception]) -> None:
        """Gather a unit over tp, on the stage that holds it, and write it.

        An error is kept for later: the tp ranks have to go on gathering together.
        """
        names = [name for name in unit.names if self._owner[name] == self._mesh.coordinates.pp]
        if not names:
            return
        whole: dict[str, Tensor] = {}
        for name in names:
            tensor = self._gather(self._sources[name])
            if self._mesh.tp_rank == 0:
                whole[name] = tensor.cpu()
        if self._mesh.tp_rank != 0 or failure:
            return
        try:
            draft.write(whole, writer)
        except Exception as error:  # noqa: BLE001  # raised on all ranks at the end
            failure.append(error)

    def _gather(self, name: str) -> Tensor:
        """Return a whole tensor on every tp rank."""
        local, spec = self._local[name]
        merged = self._view.merged(name)
        local = local if merged is None else merged
        if spec is None or not spec.is_sharded or self._mesh.tp is None:
            return local
        specs = [theirs[name] for theirs in self._peers]
        sizes = [other.numel for other in specs]
        flat = local.contiguous().view(-1)
        every = all_gather_uneven(flat, self._mesh.tp, dim=0, sizes=sizes)
        whole = local.new_empty(spec.global_shape)
        for other, part in zip(specs, every.split(sizes), strict=True):
            for box, piece in other.pieces(part.view(other.local_shape)):
                blocks = zip(box.offsets, box.lengths, strict=True)
                whole[tuple(slice(at, at + length) for at, length in blocks)] = piece
        return whole


def _written(tensors: Iterable[str], aliases: Mapping[str, str], origin: Origin) -> dict[str, str]:
    """Return what is written -> the tensor that it is; a tie that the config makes is left out."""
    promised = promised_ties(origin.blank())
    made = {second for second, first in promised.items() if aliases.get(second) == first}
    return {name: aliases.get(name, name) for name in tensors if name not in made}


def _only(models: Sequence[tuple[str, nn.Module]]) -> tuple[str, nn.Module]:
    if len(models) != 1:
        names = listed(name or type(lm).__name__ for name, lm in models) or "none"
        raise ConfigError(
            f"an export writes one causal language model, but the module holds {len(models)} "
            f"({names}); export the one that is meant."
        )
    return models[0]


def _chosen(
    models: Mapping[str, Sequence[Mapping[str, Any]]], entry: str | None, path: str
) -> tuple[str, dict[str, Any]]:
    """Return entry and description of the model that is meant."""
    every = {
        ".".join(filter(None, (name, plain["prefix"]))): (name, dict(plain))
        for name, found in models.items()
        for plain in found
    }
    wanted = [key for key in every if entry is None or key == entry or every[key][0] == entry]
    if len(wanted) != 1:
        raise ConfigError(
            f"model={entry!r}: path={path!r} holds {listed(every) or 'no transformers causal LM'}; "
            "name one of them."
        )
    return every[wanted[0]]


def _check_target(target: Path, *, overwrite: bool) -> None:
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise CheckpointError(
            f"path='{target}' exists already; choose another, or pass overwrite=True to replace an "
            "earlier export."
        )
    is_export = target.is_dir() and (target / _CONFIG_FILE).is_file()
    if not is_export and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(
            f"path='{target}' is no earlier export (no {_CONFIG_FILE}), so overwrite=True does not "
            "replace it."
        )


def _keys_of(writer: HubWriter, failure: Sequence[Exception]) -> list[str]:
    """Return what this rank has written.

    Raises:
        Exception: What kept it from writing.
    """
    if failure:
        raise failure[0]
    return writer.written
