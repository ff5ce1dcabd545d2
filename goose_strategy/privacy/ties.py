"""The message between the two ranks that hold copies of a tied weight.

The gradient of a weight that the embedding and the head share is the sum of both uses', so its norm
has a cross term. With ``R[t]`` the row of the head's gradient that token ``t`` looks up, that term
is the sum over tokens of ``R[t]`` times the gradient of the lookup: one tensor like the hidden
states goes from the last stage to the first, early, when the backward begins there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from goose_strategy.comm.p2p import PendingSend, StageLink
from goose_strategy.errors import PrivacyError
from goose_strategy.privacy.products import tied_rows, wide

if TYPE_CHECKING:
    from goose_strategy.grads.products import ProductOwed
    from goose_strategy.mesh.mesh import ParallelMesh


class TiedLink:
    """Sends rows of the head's gradients, and receives them.

    Args:
        mesh: The mesh; its group ``tie`` holds both ranks.
        peer: Global rank of the other copy.
        start: First id of this tp rank's rows.
        length: Number of them.
    """

    def __init__(self, mesh: ParallelMesh, *, peer: int, start: int, length: int) -> None:
        if mesh.tie is None:
            raise PrivacyError("this rank holds no tied weight.", rank=mesh.rank)
        self._link = StageLink(peer, mesh.tie, device=mesh.device)
        self._start = start
        self._length = length

    def send(self, head: ProductOwed, microbatch: Mapping[str, Any], rows: int) -> PendingSend:
        """Send the rows that a microbatch looks up.

        Returns:
            What to wait for once the microbatch's norms are known: the other rank has taken the
            message before it had its own. Waiting earlier could deadlock.
        """
        local = self._local(microbatch)
        if head.x is None:
            raise PrivacyError("a tied weight is used by a head that kept no input.")
        x = head.x.reshape(rows, -1, head.x.shape[-1])
        found = tied_rows(x, head.grad.reshape(rows, x.shape[1], -1), local)
        return self._link.send([found], key=_key(found))

    def receive(self, like: Tensor, ids: Tensor, microbatch: Mapping[str, Any]) -> Tensor:
        """Return what the other rank sent for the next microbatch.

        Args:
            like: The gradient of the lookup, ``[rows, tokens, width]``.
            ids: What was looked up, ``[rows, tokens]`` or alike, counted from this rank's rows.
            microbatch: As the other rank has it.

        Raises:
            PrivacyError: If the model looks up other ids than those of the batch, for which the
                other rank has sent rows.
        """
        local = self._local(microbatch)
        # Reading this is free on the CPU, and would make the host wait for a device.
        if ids.numel() != local.numel() or (
            ids.device.type == "cpu" and not torch.equal(ids.reshape(-1), local.reshape(-1))
        ):
            raise PrivacyError(
                "the embedding of a tied weight looked up other ids than input_ids (a prompt, a "
                "shift), so the rows that both uses share are not known; set tied='bound'."
            )
        expected = torch.empty_like(like, dtype=wide(like.dtype), device="meta")
        (found,) = self._link.post_receive(
            [expected.shape], [expected.dtype], key=_key(expected)
        ).wait()
        return found

    def _local(self, microbatch: Mapping[str, Any]) -> Tensor:
        """Return the ids of a microbatch, counted from this tp rank's rows."""
        ids: Tensor | None = microbatch.get("input_ids")
        if ids is None:
            raise PrivacyError(
                "a tied weight needs input_ids in every batch, to find the rows that both uses "
                "share; pass input_ids instead of inputs_embeds, or set tied='bound'."
            )
        local = ids - self._start
        elsewhere = (local < 0) | (local >= self._length)
        # What other tp ranks look up gets no gradient here, whatever row is sent for it.
        return local.masked_fill(elsewhere, 0)


def _key(tensor: Tensor) -> tuple[str, tuple[int, ...], str]:
    return "tied", tuple(tensor.shape), str(tensor.dtype)
