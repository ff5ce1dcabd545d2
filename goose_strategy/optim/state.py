"""Optimizer state by parameter name, for checkpoints that any layout can load.

torch keys states by position in ``param_groups``, and a ZeRO-1 rank holds flat ranges across
parameters. Here each rank names the range of each parameter that it holds; together with the
parameter's `ShardSpec` that is a set of boxes of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from goose_strategy.errors import CheckpointError
from goose_strategy.optim.native import CLOCK
from goose_strategy.optim.segments import SCALARS, is_rounded

if TYPE_CHECKING:
    from goose_strategy.optim.native import NativeShard
    from goose_strategy.optim.segments import Shard, State
    from goose_strategy.optim.zero import ZeroShards

MAIN = "main"
"""Key of the fp32 main weight of a parameter of lower precision."""


class Range(NamedTuple):
    """A flat range of a (tp-local) parameter and its values.

    Attributes:
        values: ``[stop - start]``; shares storage with the optimizer's state.
        start: First element, row-major.
        stop: One past the last element.
    """

    values: Tensor
    start: int
    stop: int


FlatRange = tuple[Tensor, int, int]
Entry = FlatRange | Tensor | float | int | bool
NamedState = dict[str, dict[str, Entry]]


def owned_ranges(zero: ZeroShards) -> dict[str, tuple[int, int]]:
    """Return the range of each parameter that this rank steps.

    Args:
        zero: The sharded optimizer.

    Returns:
        ``(start, stop)`` in the flattened tp-local parameter, by name; parameters of which this
        rank steps nothing are missing.
    """
    return {
        piece.slot.name: piece.within_param(shard.bucket)
        for shard in zero.shards
        for piece in shard.pieces
    }


def named_optimizer_state(zero: ZeroShards) -> NamedState:
    """Return this rank's part of the optimizer's state.

    Args:
        zero: The sharded optimizer.

    Returns:
        By parameter name and the optimizer's own key: a `Range` for what torch keeps per element,
        the value itself for what it keeps per parameter (``step``). Parameters of lower precision
        have their fp32 main weight under `MAIN`. Tensors share storage with the state where that is
        fp32; what is kept in fewer bits is decoded, and comes back to the same bits when it is
        loaded into the same preset.
    """
    named: NamedState = {}
    for shard in zero.shards:
        if shard.separate:
            values = shard.main_values()
            for piece in shard.pieces:
                main = values[piece.start : piece.stop]
                named[piece.slot.name] = {MAIN: Range(main, *piece.within_param(shard.bucket))}
        for piece, state in zero.states_by_piece(shard):
            start, stop = piece.within_param(shard.bucket)
            entries = named.setdefault(piece.slot.name, {})
            for key, value in state.items():
                flat = isinstance(value, Tensor) and value.dim() > 0
                if value is not None:
                    entries[key] = Range(value, start, stop) if flat else value
    return named


def load_named_optimizer_state(zero: ZeroShards, state: Mapping[str, Mapping[str, Entry]]) -> None:
    """Replace this rank's part of the optimizer's state.

    Args:
        zero: The sharded optimizer.
        state: As `named_optimizer_state` returns it, with exactly the ranges of `owned_ranges`;
            a parameter that is missing gets a fresh state. Values are copied. Where `MAIN` is
            missing, the main weight is taken from the weight.

    Raises:
        CheckpointError: If a range is not the one this rank steps; nothing is changed then.
    """
    check_ranges(zero, state)
    everything = []
    for shard in zero.shards:
        found: dict[str, State] = {}
        for piece in shard.pieces:
            entries = state.get(piece.slot.name, {})
            kept = {key: value for key, value in entries.items() if key not in (MAIN, CLOCK)}
            if kept:
                found[piece.slot.name] = {
                    key: _loaded(zero, shard, key, value) for key, value in kept.items()
                }
                if zero.native is not None and CLOCK in entries:
                    found[piece.slot.name][CLOCK] = entries[CLOCK]
        if shard.separate:
            _load_main(shard, state)
        everything.append((shard, found))
    zero.install(everything, everything=True)


def settle_loaded(zero: ZeroShards) -> None:
    """Let all ranks hold the weights and the count of steps that were loaded. Collective."""
    if zero.native is not None:
        zero.native.agree()
    for shard in zero.shards:
        if shard.separate:
            # Presets round ties to different sides, and every rank has to have this one's.
            shard.publish()
            shard.bucket.gather_weights().wait()


def _load_main(shard: Shard | NativeShard, state: Mapping[str, Mapping[str, Entry]]) -> None:
    """Set the main weights of a slice; they are the weights where those were written since."""
    own = shard.bucket.own_weights
    main = own.to(shard.bucket.key.main_dtype)
    for piece in shard.pieces:
        given = state.get(piece.slot.name, {}).get(MAIN)
        if isinstance(given, tuple):
            place = slice(piece.start, piece.stop)
            values = given[0].to(main.device, main.dtype)
            main[place] = torch.where(is_rounded(own[place], values), values, main[place])
    shard.set_main(main)


def check_ranges(zero: ZeroShards, state: Mapping[str, Mapping[str, Entry]]) -> None:
    """Check that states cover exactly what this rank steps.

    Raises:
        CheckpointError: If one does not.
    """
    ranges = owned_ranges(zero)
    for name, entries in state.items():
        _check_ranges(name, entries, ranges)


def _check_ranges(
    name: str, entries: Mapping[str, Entry], ranges: Mapping[str, tuple[int, int]]
) -> None:
    mine = ranges.get(name)
    if mine is None:
        raise CheckpointError(f"optimizer state of {name!r}: this rank steps no part of it.")
    for key, value in entries.items():
        if not isinstance(value, tuple):
            continue
        values, start, stop = value
        if (start, stop) != mine or values.numel() != stop - start:
            raise CheckpointError(
                f"optimizer state {key!r} of {name!r} covers elements [{start}, {stop}) with "
                f"{values.numel()} values, but this rank steps [{mine[0]}, {mine[1]})."
            )


def _loaded(zero: ZeroShards, shard: Shard | NativeShard, key: str, value: Entry) -> object:
    if isinstance(value, tuple):
        return value[0].to(shard.bucket.own_weights.device, shard.bucket.key.main_dtype)
    if isinstance(value, Tensor) and key in SCALARS:
        group = zero.optimizer.param_groups[shard.bucket.key.group or 0]
        # torch wants the step where its kernel reads it, and on the host otherwise.
        on_device = bool(group.get("capturable")) or bool(group.get("fused"))
        return value.to(shard.bucket.own_weights.device if on_device else torch.device("cpu"))
    return value
