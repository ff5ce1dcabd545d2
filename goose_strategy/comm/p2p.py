"""Messages between two pipeline stages.

``torch.distributed.isend`` hands shapes of the receiver's choosing to the backend: where sender and
receiver disagree, gloo aborts the process and NCCL hangs or mixes up data. ``StageLink`` names each
message by a ``key`` and checks a header before any payload is touched, so that a disagreement is a
Python error that names both sides. Its sends never block, and its waits say who waited for whom.

Between CPU ranks on one machine messages go through shared memory (``mailbox``), otherwise through
the process group (``wire``); from a card that its backend does not serve, either way, with a copy
at both ends (``staged_wire``). One way between 2 ranks on 2 shared cores, median wall / CPU ms:

========  ===========================  ====================  ===========
payload   shared memory                gloo, idle machine    gloo, busy
========  ===========================  ====================  ===========
64 KiB    0.07 / 0.07                  0.10 / 0.12           1.6 / 1.6
256 KiB   0.08 / 0.09                  0.15 / 0.18           1.6 / 1.6
1 MiB     0.14 / 0.14                  0.5 / 0.6             1.3 / 1.3
4 MiB     0.6 / 0.6                    1.4 / 1.7             1.8 / 1.9
========  ===========================  ====================  ===========
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from goose_strategy.comm.mailbox import Mailbox, mailbox_of
from goose_strategy.comm.message import Metas, TensorMeta, describe, metas_of, mismatch
from goose_strategy.comm.recorder import ACTIVE, Recorder
from goose_strategy.comm.staged_wire import StagedWire
from goose_strategy.comm.wire import Wire
from goose_strategy.errors import ScheduleError
from goose_strategy.mesh.host import PEERS
from goose_strategy.mesh.lane import LANES

__all__ = ["Metas", "PendingReceive", "PendingSend", "StageLink", "TensorMeta", "metas_of"]


class PendingSend(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Wait until the tensors may be written to again; further calls return at once.

        Raises:
            PeerError: If the receiver was lost or the deadline expired.
        """


class PendingReceive(Protocol):
    """A message to come."""

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for the message and return its tensors; further calls return them again.

        Raises:
            PeerError: If the sender was lost or the deadline expired.
            ScheduleError: If the sender's message is another one than this side expects.
        """


class StageLink:
    """The messages of this rank to and from one other rank over one communicator.

    Both sides must send and receive in the same order, and name each message by the same ``key``:
    anything hashable whose ``repr`` is the same on both sides and that fixes the shapes, e.g.
    ``("hidden", batch, sequence)``.

    Args:
        peer_rank: Global rank of the other side.
        group: Communicator that holds both ranks.
        recorder: Records the launches, beside the recorders installed by ``recording``.
        deadline: How long a wait may last; the group's own timeout if ``None``.
        device: Device on which received tensors are made.
    """

    def __init__(
        self,
        peer_rank: int,
        group: ProcessGroup,
        recorder: Recorder | None = None,
        deadline: timedelta | None = None,
        *,
        device: torch.device | None = None,
    ) -> None:
        self.peer_rank = peer_rank
        self._group = group
        self._recorder = recorder
        self._sent: dict[Hashable, Metas] = {}
        self._received: dict[Hashable, Metas] = {}
        self._wire: Wire | Mailbox | StagedWire
        device = torch.device("cpu") if device is None else device
        peers, lane = PEERS.get(group), LANES.get(group)
        peer = dist.get_group_rank(group, peer_rank)
        if peers is not None and peer in peers.mail:
            self._wire = mailbox_of(peer, peers)
            if deadline is not None:
                self._wire.limit_waits(deadline.total_seconds())
        else:
            there = device if lane is None else torch.device("cpu")
            self._wire = Wire(peer_rank, group, deadline=deadline, device=there)
        if lane is not None:
            self._wire = StagedWire(self._wire, lane, device)

    def send(self, tensors: Sequence[Tensor], *, key: Hashable = None) -> PendingSend:
        """Start to send ``tensors``; waits for no other rank.

        Tensors on a card whose group is gloo's are waited for until they are computed.

        Args:
            tensors: Any shapes, zero-size ones too; non-contiguous ones are copied.
            key: Names the message; its shapes and types if ``None``.

        Returns:
            What to wait for before the tensors are written to.

        Raises:
            ScheduleError: If a message of this key had other shapes or types before.
        """
        payload = [tensor.detach().contiguous() for tensor in tensors]
        metas = metas_of(payload)
        key = metas if key is None else key
        known = self._sent.setdefault(key, metas)
        if known != metas:
            raise ScheduleError(
                f"key={key!r} was {describe(known)} when it was first sent to rank "
                f"{self.peer_rank} and is {describe(metas)} now; give each shape its own key.",
                rank=dist.get_rank(),
            )
        return self._wire.send(payload, key, self._note)

    def receive(self, *, key: Hashable, expected: Metas | None = None) -> PendingReceive:
        """Post the receive of the next message as early as its shapes are known.

        Args:
            key: Names the message as the sender does.
            expected: Shapes and types that this side expects; whatever comes if ``None``.

        Returns:
            What to wait for.

        Raises:
            ScheduleError: If a message of this key was expected with other shapes before.
        """
        if expected is not None:
            known = self._received.setdefault(key, expected)
            if known != expected:
                raise mismatch(
                    key, known, expected, sender=self.peer_rank, receiver=dist.get_rank()
                )
        return self._wire.receive(key, expected, self._note)

    def post_receive(
        self,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        *,
        key: Hashable = None,
    ) -> PendingReceive:
        """Post the receive of a message whose shapes and types this side knows.

        Args:
            shapes: Shape of each tensor.
            dtypes: Type of each tensor.
            key: Names the message as the sender does; its shapes and types if ``None``.

        Returns:
            What to wait for.
        """
        pairs = zip(shapes, dtypes, strict=True)
        expected = tuple(TensorMeta(tuple(shape), dtype) for shape, dtype in pairs)
        return self.receive(key=expected if key is None else key, expected=expected)

    def flush(self) -> None:
        """Wait for all sends that were not waited for yet."""
        self._wire.flush()

    def _note(self, op: str, tensor: Tensor) -> None:
        if ACTIVE:
            for recorder in ACTIVE:
                recorder.note(self._group, op, tensor, self.peer_rank)
        if self._recorder is not None:
            self._recorder.note(self._group, op, tensor, self.peer_rank)
