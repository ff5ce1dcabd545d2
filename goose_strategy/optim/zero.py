"""ZeRO-1 around an optimizer that exists already: each rank steps its slice, inside ``step`` only.

``ZeroRedundancyOptimizer`` wraps the user's class and owns ``param_groups``. Here the user's own
instance keeps the model's parameters in its groups (``zero_grad``, LR schedulers, decay groups and
callbacks see nothing unusual); hooks swap the slices in while torch's step runs:

    step pre-hook     gradients reduced -> slices with their gradients into param_groups
    torch's step      over a few flat tensors; the user's foreach/fused/capturable flags decide how
    step post-hook    model parameters back -> weights gathered over dp

The hooks are registered, not patched in: LR schedulers replace ``optimizer.step`` themselves.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from goose_strategy.errors import CheckpointError, ConfigError
from goose_strategy.optim.factors import FactorCheck, check_factors
from goose_strategy.optim.segments import Piece, Segment, Shard, State
from goose_strategy.optim.supported import check_supported, prefers_fused

if TYPE_CHECKING:
    from goose_strategy.data_parallel.bucket import Bucket
    from goose_strategy.data_parallel.reducer import Reducer

Groups = list[list[nn.Parameter]]

SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""Keys under which torch's elementwise optimizers keep one number per tensor."""


class ZeroShards:
    """The sharded step of one optimizer.

    Attributes:
        reducer: Buckets of the parameters.
        optimizer: The user's optimizer.
        shards: This rank's slice of each bucket the optimizer steps.
        states: Optimizer state by segment weight. ``optimizer.state`` is empty outside of a step.
    """

    def __init__(self, reducer: Reducer, optimizer: Optimizer) -> None:
        """Attach to the optimizer. Collective over dp if parameters have to change buckets.

        Args:
            reducer: Knows the parameters of the module.
            optimizer: An elementwise torch optimizer over some of them; other optimizers may hold
                others. State it has already (after ``load_state_dict``) is sliced.

        Raises:
            ConfigError: If the optimizer is not elementwise, or holds a parameter that is not the
                module's.
        """
        check_supported(optimizer)
        self.reducer = reducer
        self.optimizer = optimizer
        self.shards: list[Shard] = []
        self.states: defaultdict[Tensor, Any] = defaultdict(dict)
        self._by_bucket: dict[int, Shard] = {}
        self._fresh: list[Shard] = []
        # State for whole parameters that have no bucket yet, because they are frozen.
        self._whole: dict[Tensor, State] = {}
        self._known: list[tuple[list[nn.Parameter], int]] = []
        self._hidden: Groups | None = None
        self._fused: list[dict[str, Any]] = []
        self._stepped: list[Shard] = []
        self._factors = FactorCheck(reducer.mesh)
        self._index = self._find_index()
        self._regroup()
        self._absorb()
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(_refuse_state_dict),
        ]

    def close(self) -> None:
        """Remove the hooks; the state of this rank's slices is lost."""
        self._show_params()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -- which buckets -------------------------------------------------------------------------

    def _find_index(self) -> int:
        """Return the index under which the reducer knows this optimizer."""
        owners = self.reducer.owners
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                name = self.reducer.name_of(param)
                if name is not None and name in owners:
                    return owners[name][0]
        return max((index for index, _ in owners.values()), default=-1) + 1

    def _regroup(self) -> None:
        """Make sure that every parameter of every group is in a bucket of that group."""
        owner_of = {}
        for index, group in enumerate(self.optimizer.param_groups):
            for param in group["params"]:
                name = self.reducer.name_of(param)
                if name is None:
                    raise ConfigError(
                        f"{type(self.optimizer).__name__} holds a parameter of shape="
                        f"{tuple(param.shape)} in group {index} that is not the module's; build "
                        "the optimizer from the parameters of the module it is set up with."
                    )
                owner_of[name] = (self._index, index)
        self.reducer.regroup(owner_of)
        kept, self._by_bucket = self._by_bucket, {}
        for bucket in self.reducer.buckets:
            if bucket.key.optimizer == self._index:
                shard = kept.get(id(bucket))
                if shard is None:
                    shard = Shard(bucket)
                    self._fresh.append(shard)
                self._by_bucket[id(bucket)] = shard
        self.shards = list(self._by_bucket.values())
        groups = self.optimizer.param_groups
        self._known = [(group["params"], len(group["params"])) for group in groups]
        self._generation = self.reducer.generation

    def _changed(self) -> bool:
        groups = self.optimizer.param_groups
        return (
            self._generation != self.reducer.generation
            or len(groups) != len(self._known)
            or any(
                group["params"] is not params or len(params) != length
                for group, (params, length) in zip(groups, self._known, strict=True)
            )
        )

    def prepare(self) -> None:
        """Take up added parameters and make every gradient reduced. Collective if any was not."""
        if self._changed():
            self._regroup()
        self.reducer.finalize()
        if self._changed():
            self._regroup()

    def exchange_factors(self) -> list[float]:
        """Return the factors on the loss that no clipping compared, by rank. Collective if any."""
        return self._factors.exchange(self.reducer)

    def gradient_buckets(self) -> list[Bucket]:
        """Return this optimizer's buckets with reduced gradients, to be clipped."""
        self.prepare()
        return [shard.bucket for shard in self.shards]

    # -- the step ------------------------------------------------------------------------------

    def _before_step(
        self, _optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # A step that raised has left the slices in the groups.
        self._show_params()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._hide_params()
            return None

        def closure_then_swap() -> Any:
            loss = closure()
            self._hide_params()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure_then_swap}
        return (args[0], closure_then_swap, *args[2:]), kwargs

    def _hide_params(self) -> None:
        """Put the slices and their gradients where torch's step looks for parameters."""
        self.prepare()
        check_factors(self.exchange_factors())
        self._absorb()
        for shard in self.shards:
            shard.bucket.take_back()
        if self.take_over_weights():
            warnings.warn(
                "Weights were written from outside since the last step (load_state_dict, an "
                "average, ...); the fp32 main weights were rebuilt from them where they differ.",
                UserWarning,
                stacklevel=2,
            )
        groups: Groups = [[] for _ in self.optimizer.param_groups]
        self._stepped = []
        for shard in self.shards:
            index = shard.bucket.key.group
            if index is None or not any(s.param.grad is not None for s in shard.bucket.slots):
                continue
            self._stepped.append(shard)
            for segment in shard.active(self.states):
                segment.weight.grad = segment.grad
                groups[index].append(segment.weight)
        self._hidden = []
        for group, weights in zip(self.optimizer.param_groups, groups, strict=True):
            self._hidden.append(group["params"])
            group["params"] = weights
            if self._wants_fused(group, weights):
                group["fused"] = True
                self._fused.append(group)
        self.optimizer.state = self.states

    def _wants_fused(self, group: dict[str, Any], weights: list[nn.Parameter]) -> bool:
        open_choice = group.get("foreach") is None and group.get("fused", False) is None
        plain = not group.get("differentiable") and not group.get("capturable")
        return (
            open_choice
            and plain
            and bool(weights)
            and prefers_fused(self.optimizer, weights[0].device)
        )

    def _show_params(self) -> None:
        """Put the model's parameters back into the groups, if the slices are there."""
        if self._hidden is None:
            return
        for group, params in zip(self.optimizer.param_groups, self._hidden, strict=True):
            for weight in group["params"]:
                weight.grad = None
            group["params"] = params
        for group in self._fused:
            group["fused"] = None
        self._fused.clear()
        self._hidden = None
        self.optimizer.state = defaultdict(dict)

    def _after_step(
        self, _optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]
    ) -> None:
        self._show_params()
        pending = []
        for shard in self._stepped:
            shard.publish()
            pending.append(shard.bucket.gather_weights())
        for work in pending:
            work.wait()
        for shard in self._stepped:
            # Autograd notices weights that changed between a forward and its backward.
            increment_version([s.param for s in shard.bucket.slots if s.param.grad is not None])
        self._stepped = []

    # -- main weights and states ---------------------------------------------------------------

    def take_over_weights(self) -> bool:
        """Rebuild fp32 main weights where the weights are no longer their rounded values.

        Returns:
            Whether that was so anywhere in this rank's slices.
        """
        separate = [shard for shard in self.shards if shard.separate]
        if not separate:
            return False
        # The one value that the host reads in a step on a device.
        written = torch.stack([shard.differs() for shard in separate]).tolist()
        for shard, differs in zip(separate, written, strict=True):
            if differs:
                shard.rebuild_main()
        return any(written)

    def _absorb(self) -> None:
        """Slice a state that was loaded, or made by the constructor, for whole parameters."""
        full, self.optimizer.state = self.optimizer.state, defaultdict(dict)
        shards, self._fresh = self._fresh, []
        if full:
            self._whole, shards = dict(full), self.shards
        if not self._whole:
            return
        for shard in shards:
            whole = {s.name: self._whole.pop(s.param, None) for s in shard.bucket.slots}
            found = {}
            for piece in shard.pieces:
                state = whole[piece.slot.name]
                if state:
                    found[piece.slot.name] = _sliced(state, piece, shard.bucket)
            shard.install(found, self.states)

    def segments(self) -> list[Segment]:
        """Return all segments of this rank."""
        return [segment for shard in self.shards for segment in shard.segments]


def _sliced(state: State, piece: Piece, bucket: Bucket) -> State:
    """Cut the state of a whole parameter down to a piece of it."""
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


def _refuse_state_dict(optimizer: Optimizer) -> None:
    raise CheckpointError(
        f"{type(optimizer).__name__}.state_dict() would hold no state: it lies in slices on the "
        "data-parallel ranks. Save through the strategy (fabric.save, trainer.save_checkpoint)."
    )
