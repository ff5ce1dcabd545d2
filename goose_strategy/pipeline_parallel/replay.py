"""Run a forward a second time as if it were the first: random numbers and buffers.

``torch.utils.checkpoint`` gives back random numbers, but what a forward does to its module's
buffers (running statistics, a rotary table that grows with the sequence) it does twice; and it runs
only inside of a backward, which in a pipeline waits for its gradient first. Neither gives back what
a module without buffers keeps in its attributes, nor the numbers of ``random`` and numpy.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from goose_strategy.compat.torch import version_of
from goose_strategy.errors import ScheduleError
from goose_strategy.mesh.generators import Generators, State

_MISSING = object()


@dataclass(frozen=True)
class Changes:
    """What a forward changed, as it was before.

    Attributes:
        buffers: Values by the number of their place.
        attributes: Values by number of the module and name.
    """

    buffers: dict[int, Tensor] = field(default_factory=dict)
    attributes: dict[tuple[int, str], Any] = field(default_factory=dict)


class Buffers:
    """The buffers of a module, seen by two runs of one forward.

    Which of them a forward changes is found out by comparing all of them after the first one;
    from then on only those are copied. On a CUDA device that one comparison waits for the device.
    Plain attributes of modules with buffers belong to them: a rotary embedding keeps there how long
    its table is.

    Args:
        module: Its submodules' buffers count, too.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places = [
            (owner, name)
            for owner in module.modules()
            for name, _ in owner.named_buffers(recurse=False)
        ]
        self._owners = list(dict.fromkeys(owner for owner, _ in self._places))
        # By mode: batch norm writes in training only.
        self._changing: dict[bool, set[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    @contextmanager
    def first(self) -> Generator[Changes]:
        """Surround the first run.

        Yields:
            What the second run needs, complete after the block.

        Raises:
            ScheduleError: If the run writes into a buffer that none before it wrote into.
        """
        mode = self._module.training
        before = self._values()
        versions = [version_of(tensor) for tensor in before]
        attributes = [dict(vars(owner)) for owner in self._owners]
        # A buffer may be held by several modules: its copies must be one, too.
        copies: dict[int, Tensor] = {}
        for place in self._changing.get(mode, range(len(before))):
            copies.setdefault(id(before[place]), before[place].detach().clone())
        changes = Changes()
        yield changes
        for place, (old, new) in enumerate(zip(before, self._values(), strict=True)):
            copy = copies.get(id(old))
            written = version_of(old) != versions[place]
            if copy is None:
                if written:
                    raise self._surprise(place)
                if new is not old:
                    # Another tensor took its place, so that it still has its values.
                    changes.buffers[place] = old
            elif mode in self._changing or new is not old or not _same(copy, old):
                # Values, not versions: torch's batch norm writes without a trace in them.
                changes.buffers[place] = copy
        self._changing.setdefault(mode, set(changes.buffers))
        for number, (owner, old_attributes) in enumerate(
            zip(self._owners, attributes, strict=True)
        ):
            changes.attributes.update(_changed(number, old_attributes, vars(owner)))

    @contextmanager
    def again(self, changes: Changes) -> Generator[None]:
        """Surround the second run: it finds what the first one found, and changes nothing.

        Args:
            changes: What :meth:`first` gave for the first run; it may be used several times.
        """
        copies = {id(tensor): tensor.detach().clone() for tensor in changes.buffers.values()}
        buffers = {place: self._get(place) for place in changes.buffers}
        attributes = {
            (number, name): vars(self._owners[number]).get(name, _MISSING)
            for number, name in changes.attributes
        }
        found = {place: copies[id(tensor)] for place, tensor in changes.buffers.items()}
        self._put(Changes(found, changes.attributes))
        try:
            yield
        finally:
            self._put(Changes(buffers, attributes))

    def _put(self, values: Changes) -> None:
        for place, tensor in values.buffers.items():
            owner, name = self._places[place]
            setattr(owner, name, tensor)
        for (number, name), value in values.attributes.items():
            own = vars(self._owners[number])
            if value is _MISSING:
                own.pop(name, None)
            else:
                own[name] = value

    def _values(self) -> list[Tensor]:
        return [self._get(place) for place in range(len(self._places))]

    def _get(self, place: int) -> Tensor:
        owner, name = self._places[place]
        tensor: Tensor = getattr(owner, name)
        return tensor

    def _surprise(self, place: int) -> ScheduleError:
        owner, name = self._places[place]
        return ScheduleError(
            f"the buffer {name} of a {type(owner).__name__} was written to by this forward but not "
            "by the first one, and its former values are lost to the recompute; use "
            "recompute='none'."
        )


@dataclass(frozen=True)
class Seen:
    """What a forward found when it ran first.

    Attributes:
        random: State of the generators.
        changes: What it changed of its module's buffers.
        inputs: Its tensors, with the number of writes into each so far.
    """

    random: State
    changes: Changes
    inputs: list[tuple[Tensor, int]]


class Replay:
    """Runs the forward of one module a second time as if it were the first.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        tensors = (*module.parameters(), *module.buffers())
        device = next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))
        self._generators = Generators(device)
        self._buffers = Buffers(module)

    @contextmanager
    def first(self, inputs: Sequence[Any]) -> Generator[Seen]:
        """Surround the first run.

        Args:
            inputs: What it is given; what is no tensor does not count.

        Yields:
            What the second run needs, complete after the block.
        """
        random = self._generators.capture()
        given = [(tensor, version_of(tensor)) for tensor in inputs if isinstance(tensor, Tensor)]
        with self._buffers.first() as changes:
            yield Seen(random, changes, given)

    @contextmanager
    def again(self, seen: Seen) -> Generator[None]:
        """Surround the second run, after which generators and buffers are as they were before it.

        Args:
            seen: What :meth:`first` gave for the first run.

        Raises:
            ScheduleError: If the inputs were written to since then.
        """
        if any(version_of(tensor) != version for tensor, version in seen.inputs):
            raise ScheduleError(
                "the inputs of this forward were written to in place after it began, so that it "
                "cannot be computed again; write to a copy, or use recompute='layer'."
            )
        now = self._generators.capture()
        self._generators.restore(seen.random)
        try:
            with self._buffers.again(seen.changes):
                yield
        finally:
            self._generators.restore(now)


def _same(mine: Tensor, theirs: Tensor) -> bool:
    # Bits, so that a NaN is equal to itself.
    first, second = (t.contiguous().reshape(-1).view(torch.uint8) for t in (mine, theirs))
    return torch.equal(first, second)


def _changed(
    number: int, before: dict[str, Any], after: dict[str, Any]
) -> dict[tuple[int, str], Any]:
    """Return the attributes that were set anew or removed, as they were before."""
    names = [*before, *(name for name in after if name not in before)]
    return {
        (number, name): before.get(name, _MISSING)
        for name in names
        if before.get(name, _MISSING) is not after.get(name, _MISSING)
    }
