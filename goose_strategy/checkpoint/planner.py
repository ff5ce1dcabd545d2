"""What DCP asks while it saves: which boxes this rank writes, and whether they make up all tensors.

DCP's ``DefaultSavePlanner`` asks each object what it holds and drops what several ranks offer,
without a look at the sizes. Here the boxes are given, each has one writer, and a gap, an overlap or
two opinions on a shape are refused before a byte is written. Loading needs no plan of the whole:
each rank knows the boxes it wants and finds in the metadata where they lie.
"""

from __future__ import annotations

import dataclasses
import io
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from typing_extensions import override

from goose_strategy.checkpoint.manifest import (
    EntryPath,
    LocalTensor,
    check_tiling,
    key_of,
    overlap,
)
from goose_strategy.errors import CheckpointError
from goose_strategy.mesh.shard import Box

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class BoxSavePlanner(SavePlanner):
    """Plans the write of the boxes of this rank.

    Args:
        tensors: What this rank holds; only the pieces of writers are written.
        objects: Values that are no tensors, per path; DCP keeps them as bytes. Given on one rank.

    Attributes:
        aliases: Further keys per key; complete on the coordinator once the global plan is made.
    """

    def __init__(self, tensors: Sequence[LocalTensor], objects: Mapping[EntryPath, Any]) -> None:
        self._mine = [tensor for tensor in tensors if tensor.writer]
        self._objects = {key_of(path): value for path, value in objects.items()}
        self._paths = {tensor.key: tensor.path for tensor in self._mine}
        self._paths |= {key_of(path): path for path in objects}
        self._data: dict[MetadataIndex, Tensor] = {}
        self.aliases: dict[str, tuple[str, ...]] = {}

    @override
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Do nothing: all is known already."""

    def create_local_plan(self) -> SavePlan:
        """List the boxes and objects that this rank writes."""
        items: list[WriteItem] = []
        for tensor in self._mine:
            for box, piece in tensor.pieces:
                if box.numel or not all(tensor.global_shape):
                    item = _write_item(tensor, box)
                    items.append(item)
                    self._data[item.index] = piece
        items += [
            WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO) for key in self._objects
        ]
        aliases = {path: tensor.key for tensor in self._mine for path in tensor.aliases}
        shared = {tensor.key for tensor in self._mine if tensor.shared}
        return SavePlan(items, planner_data=(self._paths, aliases, shared))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Put the plans together; runs on rank 0.

        Raises:
            CheckpointError: If two ranks disagree on a key, hold the same elements, or if nobody
                holds some.
        """
        paths: dict[str, EntryPath] = {}
        aliases: dict[EntryPath, str] = {}
        for plan in all_plans:
            plan_paths, plan_aliases, _ = plan.planner_data
            for key, path in plan_paths.items():
                if paths.setdefault(key, path) != path:
                    raise CheckpointError(f"{key}: two values have this key: {paths[key]}, {path}.")
            aliases |= plan_aliases
        _check_agreement(all_plans)
        plans, metadata = create_default_global_save_plan(_without_copies(all_plans))
        for key, value in metadata.state_dict_metadata.items():
            if isinstance(value, TensorStorageMetadata):
                check_tiling(key, tuple(value.size), stored_boxes(value))
        for path, key in aliases.items():
            alias = key_of(path)
            if alias in metadata.state_dict_metadata:
                raise CheckpointError(f"{alias}: saved as a tensor and as another name of {key}.")
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[key]
            paths[alias] = path
            self.aliases[key] = (*self.aliases.get(key, ()), alias)
        return plans, dataclasses.replace(metadata, planner_data=paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Accept the plan as it came back from rank 0."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return the elements of a box, or the bytes of an object."""
        if write_item.type != WriteItemType.BYTE_IO:
            return self._data[write_item.index].detach()
        stream = io.BytesIO()
        torch.save(self._objects[write_item.index.fqn], stream)
        return stream


class BoxLoadPlanner(LoadPlanner):
    """Finds where the wanted boxes lie, and lets DCP copy them into their tensors.

    Args:
        destinations: Tensors to fill; each key must be in ``metadata`` with the same shape.
        metadata: The checkpoint's.
        object_keys: Keys of the objects to read.

    Attributes:
        objects: The objects that were read, per key.
    """

    def __init__(
        self,
        metadata: Metadata,
        destinations: Sequence[LocalTensor] = (),
        object_keys: Sequence[str] = (),
    ) -> None:
        self._metadata = metadata
        self._destinations: dict[str, LocalTensor] = {}
        for tensor in destinations:
            # Two places may want the same tensor, such as a weight and its main weight.
            known = self._destinations.get(tensor.key)
            pieces = tensor.pieces if known is None else (*known.pieces, *tensor.pieces)
            self._destinations[tensor.key] = dataclasses.replace(tensor, pieces=pieces)
        self._object_keys = tuple(object_keys)
        self.objects: dict[str, Any] = {}

    @override
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Do nothing: all is known already."""

    def create_local_plan(self) -> LoadPlan:
        """List the reads that fill this rank's boxes.

        Raises:
            CheckpointError: If the checkpoint does not hold all elements of a box.
        """
        items = [_object_item(key) for key in self._object_keys]
        for key, tensor in self._destinations.items():
            stored = self._metadata.state_dict_metadata[key]
            items += _tensor_items(tensor, stored_boxes(stored))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Leave every rank its own plan."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take one object."""
        self.objects[read_item.dest_index.fqn] = torch.load(
            value, map_location="cpu", weights_only=True
        )

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the view that a read fills."""
        index = read_item.dest_index
        _, view = self._destinations[index.fqn].pieces[index.index or 0]
        for dim, (at, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            view = view.narrow(dim, at, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the view lies in the destination."""


def stored_boxes(stored: Any) -> list[Box]:
    """Return the boxes that the checkpoint holds of one tensor."""
    return [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks]


def _write_item(tensor: LocalTensor, box: Box) -> WriteItem:
    offsets = torch.Size(box.offsets)
    return WriteItem(
        index=MetadataIndex(tensor.key, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(box.lengths)),
            properties=TensorProperties(dtype=tensor.dtype),
            size=torch.Size(tensor.global_shape),
        ),
    )


def _without_copies(plans: list[SavePlan]) -> list[SavePlan]:
    """Leave the boxes of shared tensors to the lowest rank that holds them."""
    taken: set[MetadataIndex] = set()
    kept: list[SavePlan] = []
    for plan in plans:
        _, _, shared = plan.planner_data
        mine = {item.index for item in plan.items if item.index.fqn in shared}
        items = [item for item in plan.items if item.index not in mine or item.index not in taken]
        kept.append(dataclasses.replace(plan, items=items))
        taken |= mine
    return kept


def _check_agreement(plans: list[SavePlan]) -> None:
    """Check that a key has one kind, shape and dtype, and an object one writer."""
    seen: dict[str, tuple[Any, ...]] = {}
    for item in (item for plan in plans for item in plan.items):
        data = item.tensor_data
        mine = ("bytes",) if data is None else (tuple(data.size), data.properties.dtype)
        key = item.index.fqn
        if data is None and key in seen:
            raise CheckpointError(f"{key}: two ranks write this object.")
        if seen.setdefault(key, mine) != mine:
            raise CheckpointError(f"{key}: two ranks disagree: one has {seen[key]}, one {mine}.")


def _object_item(key: str) -> ReadItem:
    index, nothing = MetadataIndex(key), torch.Size([0])
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=index,
        dest_offsets=nothing,
        storage_index=index,
        storage_offsets=nothing,
        lengths=nothing,
    )


def _tensor_items(tensor: LocalTensor, stored: list[Box]) -> list[ReadItem]:
    items: list[ReadItem] = []
    for number, (wanted, _) in enumerate(tensor.pieces):
        found = 0
        for held in stored:
            shared = overlap(wanted, held)
            if shared is None:
                continue
            found += shared.numel
            items.append(
                ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(tensor.key, wanted.offsets, number),
                    dest_offsets=_relative(shared, wanted),
                    storage_index=MetadataIndex(tensor.key, held.offsets),
                    storage_offsets=_relative(shared, held),
                    lengths=torch.Size(shared.lengths),
                )
            )
        if found != wanted.numel:
            raise CheckpointError(
                f"{tensor.key}: the checkpoint holds {found} of the {wanted.numel} elements at "
                f"offsets={wanted.offsets} with lengths={wanted.lengths}."
            )
    return items


def _relative(inner: Box, outer: Box) -> torch.Size:
    return torch.Size([a - b for a, b in zip(inner.offsets, outer.offsets, strict=True)])
