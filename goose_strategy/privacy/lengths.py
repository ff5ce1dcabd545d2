"""Models in which a row depends on how long the longest row of its batch is.

Padding counts as nothing in most models. Where rotary frequencies follow the longest row, or tokens
behind padding get positions that count it, a row's gradient is another one when a longer row is
there: leaving that one row out would move all others. With one length for all batches, nothing
moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from goose_strategy.errors import PrivacyError

_BY_LENGTH = ("dynamic", "longrope")


class OneLength:
    """Checks that all microbatches of a run have one length, where rows depend on it.

    Args:
        model: The causal LM.
        positions: Whether it looks positions up in a table.
    """

    def __init__(self, model: nn.Module, *, positions: bool) -> None:
        self._rope = rope_by_length(getattr(model, "config", None))
        self._positions = positions
        self._length: int | None = None

    def check(
        self, batches: Sequence[Mapping[str, Any]], microbatches: Sequence[Mapping[str, Any]]
    ) -> None:
        """Compare the lengths of a call with that of the first one.

        Args:
            batches: As the user passed them, ``input_ids`` or ``inputs_embeds`` ``[rows, length]``.
            microbatches: As the model gets them: they may have lost padding.

        Raises:
            PrivacyError: If rows depend on the length, and it is another one.
        """
        if self._rope is not None:
            why = f"rope_type={self._rope!r} follows the longest row of a batch"
            self._compare(microbatches, why)
        if self._positions and any(_counts_padding(batch) for batch in batches):
            self._compare(
                batches,
                "positions count the padding on the left (pass position_ids, or pad on the right)",
            )

    def _compare(self, batches: Sequence[Mapping[str, Any]], why: str) -> None:
        for batch in batches:
            ids = batch.get("input_ids", batch.get("inputs_embeds"))
            length = 0 if ids is None else int(ids.shape[1])
            self._length = self._length or length
            if length != self._length:
                raise PrivacyError(
                    f"{why}: without its longest row, all others of a batch would have other "
                    f"gradients. This one has length {length}, one before had {self._length}; pad "
                    "all rows to one length (padding='max_length'), and leave trim_padding off."
                )


def _counts_padding(batch: Mapping[str, Any]) -> bool:
    """Tell whether there is padding on the left, and nobody says where the tokens behind it are."""
    mask = batch.get("attention_mask")
    if mask is None or mask.dim() != 2 or batch.get("position_ids") is not None:
        return False
    return bool((mask[:, 0] == 0).any())


def rope_by_length(config: Any) -> str | None:
    """Return the kind of rotary embedding of a config that follows the longest row, if it has one.

    Args:
        config: Of a transformers model; its ``rope_parameters`` may be one set or one per kind of
            layer.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]
    kinds = [one.get("rope_type", one.get("type")) for one in sets]
    return next((kind for kind in kinds if kind in _BY_LENGTH), None)
