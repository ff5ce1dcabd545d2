"""``optimizer.state_dict()`` on one rank: the part of the state that this rank steps.

torch would save flat slices under positions that mean something else elsewhere, and cast what it
loads to the type of the weight, which ruins fp32 moments of bf16 weights. Here each parameter's
entry holds this rank's elements and says which ones they are (``range``); what is loaded is checked
against that before anything is changed. Whole states, of one process, are cut instead. For states
of the whole model there is ``strategy.full_optimizer_state``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from goose_strategy.errors import CheckpointError
from goose_strategy.optim.segments import SCALARS, Piece, State
from goose_strategy.optim.state import NamedState, Range, named_optimizer_state

if TYPE_CHECKING:
    from goose_strategy.data_parallel.bucket import Bucket
    from goose_strategy.optim.zero import ZeroShards

RANGE = "range"
"""Key of the elements of a flattened (tp-local) parameter that an entry holds."""


def local_state(zero: ZeroShards) -> dict[int, dict[str, Any]]:
    """Return this rank's states by the parameter's position in the optimizer's groups.

    Args:
        zero: The sharded optimizer.

    Returns:
        Copies of flat tensors, numbers per parameter, and ``range``: first element and one past the
        last. Parameters of which this rank steps nothing are missing.
    """
    positions = {zero.reducer.name_of(param): index for index, param in enumerate(_params(zero))}
    found: dict[int, dict[str, Any]] = {}
    for name, entries in named_optimizer_state(zero).items():
        state: dict[str, Any] = {}
        for key, value in entries.items():
            if isinstance(value, tuple):
                state[key] = value[0].clone()
                state[RANGE] = [value[1], value[2]]
            else:
                state[key] = value.clone() if isinstance(value, Tensor) else value
        found[positions[name]] = state
    return found


def named_from(
    zero: ZeroShards, state_dict: Mapping[str, Any]
) -> tuple[NamedState, dict[Tensor, State]]:
    """Name the states of a state dict, local or of one process.

    Args:
        zero: The sharded optimizer that they shall be loaded into.
        state_dict: As torch's optimizers make it, with ``range`` where it is local.

    Returns:
        This rank's states by name, and whole states of parameters without a bucket.

    Raises:
        CheckpointError: If a state does not fit.
    """
    ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    params = _params(zero)
    if len(ids) != len(params):
        raise CheckpointError(
            f"the state dict has {len(ids)} parameters, but the optimizer {len(params)} on this "
            "rank; load checkpoints of the whole model through the strategy."
        )
    by_param = dict(zip(ids, params, strict=True))
    pieces = {
        piece.slot.param: (piece, shard.bucket) for shard in zero.shards for piece in shard.pieces
    }
    held = {slot.param for shard in zero.shards for slot in shard.bucket.slots}
    named: NamedState = {}
    whole: dict[Tensor, State] = {}
    for key, state in state_dict["state"].items():
        param = by_param[key]
        if RANGE in state:
            named[_name(zero, param)] = _local_entries(state)
        elif param in pieces:
            named[_name(zero, param)] = _cut_entries(state, *pieces[param])
        elif param not in held:
            whole[param] = dict(state)
    return named, whole


def sliced(state: State, piece: Piece, bucket: Bucket) -> State:
    """Cut the state of a whole parameter down to a piece of it.

    Raises:
        CheckpointError: If a tensor has another shape than the parameter.
    """
    start, stop = piece.within_param(bucket)
    shape = piece.slot.param.shape
    cut: State = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and key not in SCALARS:
            if value.shape != shape:
                raise CheckpointError(
                    f"the optimizer's state {key!r} of {piece.slot.name!r} has shape="
                    f"{tuple(value.shape)}, but the parameter on this rank has {tuple(shape)}; "
                    "load the checkpoint through the strategy."
                )
            cut[key] = value.reshape(-1)[start:stop]
        else:
            cut[key] = value
    return cut


def _params(zero: ZeroShards) -> list[nn.Parameter]:
    return [param for group in zero.optimizer.param_groups for param in group["params"]]


def _name(zero: ZeroShards, param: nn.Parameter) -> str:
    name = zero.reducer.name_of(param)
    if name is None:
        raise CheckpointError("the optimizer holds a parameter that is not the module's.")
    return name


def _local_entries(state: Mapping[str, Any]) -> dict[str, Any]:
    start, stop = state[RANGE]
    return {
        key: Range(value, start, stop) if isinstance(value, Tensor) and value.dim() else value
        for key, value in state.items()
        if key != RANGE
    }


def _cut_entries(state: State, piece: Piece, bucket: Bucket) -> dict[str, Any]:
    start, stop = piece.within_param(bucket)
    return {
        key: Range(value, start, stop) if isinstance(value, Tensor) and value.dim() else value
        for key, value in sliced(state, piece, bucket).items()
        if value is not None
    }
