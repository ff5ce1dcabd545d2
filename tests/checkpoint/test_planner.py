"""Save and load plans of several ranks, put together in one process; no file is written."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType

from goose_strategy.checkpoint.manifest import EntryPath, LocalTensor
from goose_strategy.checkpoint.planner import BoxLoadPlanner, BoxSavePlanner, stored_boxes
from goose_strategy.errors import CheckpointError
from goose_strategy.mesh.shard import Box

PATH: EntryPath = ("model", "w")
KEY = "model.w"
WHOLE = torch.arange(24.0).view(4, 6)
LEFT, RIGHT = Box((0, 0), (4, 3)), Box((0, 3), (4, 3))
# Elements 2 to 16 of the flattened tensor, as a ZeRO-1 rank holds them.
FLAT = [Box((0, 2), (1, 4)), Box((1, 0), (1, 6)), Box((2, 0), (1, 4))]
REST = [Box((0, 0), (1, 2)), Box((2, 4), (1, 2)), Box((3, 0), (1, 6))]


def block(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.lengths, strict=True))]


def part(*boxes: Box, tensor: Tensor = WHOLE, **given: Any) -> LocalTensor:
    pieces = tuple((box, block(tensor, box)) for box in boxes)
    path = given.pop("path", PATH)
    return LocalTensor(path, tuple(tensor.shape), tensor.dtype, pieces, **given)


class Saved:
    """The plans of all ranks, and what each rank would hand to the writer."""

    def __init__(
        self,
        ranks: Sequence[Sequence[LocalTensor]],
        objects: Sequence[Mapping[EntryPath, Any]] = (),
    ) -> None:
        given = [*objects, *({} for _ in range(len(ranks) - len(objects)))]
        planners = [BoxSavePlanner(*both) for both in zip(ranks, given, strict=True)]
        plans, self.metadata = planners[0].create_global_plan(
            [planner.create_local_plan() for planner in planners]
        )
        self.aliases = planners[0].aliases
        self.written = [
            {item.index: planner.resolve_data(item) for item in planner.finish_plan(plan).items}
            for planner, plan in zip(planners, plans, strict=True)
        ]

    @property
    def data(self) -> dict[MetadataIndex, Any]:
        return {index: value for rank in self.written for index, value in rank.items()}

    def boxes(self, key: str = KEY) -> list[Box]:
        return sorted(stored_boxes(self.metadata.state_dict_metadata[key]))

    def load(self, *destinations: LocalTensor) -> None:
        """Copy as DCP's reader does: narrow the stored box, resolve, copy."""
        planner = BoxLoadPlanner(self.metadata, destinations)
        for item in planner.finish_plan(planner.create_local_plan()).items:
            stored = self.data[item.storage_index]
            for dim, (at, n) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                stored = stored.narrow(dim, at, n)
            view = planner.resolve_tensor(item)
            assert view.shape == stored.shape
            planner.commit_tensor(item, view.copy_(stored))


def wanted(*boxes: Box, dtype: torch.dtype = torch.float32) -> LocalTensor:
    pieces = tuple((box, torch.full(box.lengths, -1, dtype=dtype)) for box in boxes)
    return LocalTensor(PATH, tuple(WHOLE.shape), dtype, pieces)


def test_a_rank_writes_its_boxes_and_no_others() -> None:
    saved = Saved([[part(LEFT)], [part(*REST, writer=False)], [part(RIGHT)]])
    assert saved.boxes() == [LEFT, RIGHT]
    assert [len(rank) for rank in saved.written] == [1, 0, 1]
    assert torch.equal(saved.data[MetadataIndex(KEY, (0, 3))], WHOLE[:, 3:])
    assert saved.metadata.planner_data == {KEY: PATH}
    assert saved.metadata.state_dict_metadata[KEY].size == WHOLE.shape


def test_what_is_written_shares_memory_and_needs_no_gradient() -> None:
    weight = WHOLE.clone().requires_grad_()
    saved = Saved([[LocalTensor.whole(PATH, weight)]])
    (written,) = saved.data.values()
    assert written.data_ptr() == weight.data_ptr()
    assert not written.requires_grad


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([[LEFT], []], r"model\.w: the ranks hold 12 of the 24 elements"),
        ([FLAT, REST[:-1]], r"model\.w: the ranks hold 18 of the 24 elements"),
        ([[LEFT], [Box((0, 2), (4, 4))]], "two ranks hold the same elements, once at offsets=.0, "),
        ([[LEFT, RIGHT], [Box((3, 5), (1, 1))]], "exactly one of them may be a writer"),
    ],
)
def test_a_gap_or_an_overlap_is_refused(ranks: list[list[Box]], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        Saved([[part(*boxes)] for boxes in ranks])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (part(RIGHT, tensor=WHOLE.double()), "two ranks disagree: .*float32.*float64"),
        (part(Box((4, 0), (1, 6)), tensor=torch.ones(5, 6)), r"two ranks disagree: .*4, 6.*5, 6"),
        (part(RIGHT, path=("model.w",)), "two values have this key"),
    ],
)
def test_two_opinions_on_a_tensor_are_refused(other: LocalTensor, said: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^model\.w: {said}"):
        Saved([[part(LEFT)], [other]])


def test_of_a_shared_tensor_the_lowest_ranks_boxes_are_written() -> None:
    copies = [[], [part(LEFT, RIGHT, shared=True)], [part(LEFT, RIGHT, shared=True)]]
    saved = Saved(copies)
    assert [len(rank) for rank in saved.written] == [0, 2, 0]
    assert saved.boxes() == [LEFT, RIGHT]


def test_scalars_and_empty_tensors_are_saved_but_no_empty_box() -> None:
    scalar = LocalTensor.whole(("model", "step"), torch.tensor(3.0))
    empty = LocalTensor.whole(("model", "none"), torch.zeros(0, 3))
    saved = Saved([[part(LEFT, RIGHT, Box((2, 2), (0, 4))), scalar, empty]])
    assert saved.boxes() == [LEFT, RIGHT]
    assert saved.boxes("model.step") == [Box((), ())]
    assert saved.metadata.state_dict_metadata["model.none"].size == (0, 3)
    filled = LocalTensor.whole(("model", "step"), torch.tensor(0.0))
    saved.load(filled, LocalTensor.whole(("model", "none"), torch.zeros(0, 3)))
    assert filled.pieces[0][1] == 3.0


def test_an_alias_names_the_same_boxes() -> None:
    head: EntryPath = ("model", "head")
    saved = Saved([[part(LEFT, aliases=(head,))], [part(RIGHT, aliases=(head,))]])
    assert saved.aliases == {KEY: ("model.head",)}
    assert saved.boxes("model.head") == [LEFT, RIGHT]
    assert saved.metadata.planner_data == {KEY: PATH, "model.head": head}
    assert {index.fqn for index in saved.data} == {KEY}


def test_an_alias_may_not_be_a_tensor_too() -> None:
    head: EntryPath = ("model", "head")
    other = LocalTensor.whole(head, torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"^model\.head: saved as a tensor and as another n"):
        Saved([[part(LEFT, RIGHT, aliases=(head,))], [other]])


def test_an_object_has_one_writer() -> None:
    rate: EntryPath = ("optimizer", "param_groups", 0, "lr")
    whole = [part(LEFT, RIGHT)]
    saved = Saved([whole, []], [{rate: 0.5}])
    stream = saved.data[MetadataIndex("optimizer.param_groups.0.lr")]
    stream.seek(0)
    assert torch.load(stream, weights_only=True) == 0.5
    assert saved.metadata.planner_data["optimizer.param_groups.0.lr"] == rate
    with pytest.raises(CheckpointError, match=r"param_groups\.0\.lr: two ranks write this object"):
        Saved([whole, []], [{rate: 0.5}, {rate: 0.5}])
    with pytest.raises(CheckpointError, match=r"model\.w: two"):
        Saved([whole, []], [{}, {PATH: 0.5}])


BOXES = {
    "whole": [Box((0, 0), (4, 6))],
    "columns": [LEFT, RIGHT],
    "rows": [Box((0, 0), (1, 6)), Box((1, 0), (3, 6))],
    "flat": FLAT,
    "inner": [Box((1, 2), (2, 3))],
    "none": [Box((2, 1), (0, 3))],
}


@pytest.mark.parametrize("ranks", [[[LEFT], [RIGHT]], [FLAT, REST], [BOXES["rows"], []]])
@pytest.mark.parametrize("into", BOXES)
def test_any_boxes_are_read_into_any_others(ranks: list[list[Box]], into: str) -> None:
    saved = Saved([[part(*boxes)] for boxes in ranks])
    destination = wanted(*BOXES[into])
    saved.load(destination)
    for box, piece in destination.pieces:
        assert torch.equal(piece, block(WHOLE, box))


def test_two_places_may_want_the_same_tensor() -> None:
    first, second = wanted(Box((0, 0), (4, 6))), wanted(Box((1, 2), (2, 3)))
    Saved([[part(LEFT)], [part(RIGHT)]]).load(first, second)
    for box, piece in (*first.pieces, *second.pieces):
        assert torch.equal(piece, block(WHOLE, box))


def test_each_element_is_read_once_and_only_what_overlaps() -> None:
    saved = Saved([[part(*FLAT)], [part(*REST)]])
    planner = BoxLoadPlanner(saved.metadata, [wanted(Box((0, 0), (2, 3)))])
    items = planner.create_local_plan().items
    assert sorted((tuple(i.storage_index.offset), tuple(i.lengths)) for i in items) == [
        ((0, 0), (1, 2)),
        ((0, 2), (1, 1)),
        ((1, 0), (1, 3)),
    ]


def test_another_float_dtype_is_cast_while_it_is_copied() -> None:
    precise = WHOLE.double() / 3
    saved = Saved([[part(LEFT, tensor=precise)], [part(RIGHT, tensor=precise)]])
    assert saved.metadata.state_dict_metadata[KEY].properties.dtype == torch.float64
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        destination = wanted(Box((0, 0), (4, 6)), dtype=dtype)
        saved.load(destination)
        piece = destination.pieces[0][1]
        assert piece.dtype == dtype
        assert torch.equal(piece, precise.to(dtype))


def without(metadata: Metadata, box: Box) -> Metadata:
    chunks = metadata.state_dict_metadata[KEY].chunks
    chunks[:] = [chunk for chunk in chunks if tuple(chunk.offsets) != box.offsets]
    return metadata


def test_a_box_that_the_checkpoint_lacks_is_named() -> None:
    metadata = without(Saved([[part(LEFT)], [part(RIGHT)]]).metadata, RIGHT)
    BoxLoadPlanner(metadata, [wanted(Box((1, 0), (2, 3)))]).create_local_plan()
    said = r"model\.w: the checkpoint holds 4 of the 6 elements at offsets=\(1, 1\) with lengths=\("
    with pytest.raises(CheckpointError, match=said):
        BoxLoadPlanner(metadata, [wanted(Box((1, 1), (2, 3)))]).create_local_plan()


def test_an_object_is_read_by_the_restricted_unpickler() -> None:
    planner = BoxLoadPlanner(Metadata({}), object_keys=["a.safe", "a.unsafe"])
    safe, unsafe = planner.create_local_plan().items
    planner.load_bytes(safe, saved_bytes({"betas": (0.9, None)}))
    with pytest.raises(pickle.UnpicklingError, match="PosixPath"):
        planner.load_bytes(unsafe, saved_bytes(Path("/home")))
    assert planner.objects == {"a.safe": {"betas": (0.9, None)}}
    assert safe.type == LoadItemType.BYTE_IO


def saved_bytes(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream
