"""ZeRO-1 around an optimizer that exists already: each rank steps its slice, inside ``step`` only.

``ZeroRedundancyOptimizer`` wraps the user's class and owns ``param_groups``. Here the user's own
instance keeps the model's parameters in its groups (``zero_grad``, LR schedulers, decay groups and
callbacks see nothing unusual); hooks swap the slices in while torch's step runs:

    step pre-hook     gradients reduced -> slices with their gradients into param_groups
    torch's step      over a few flat tensors; the user's foreach/fused/capturable flags decide how
    step post-hook    model parameters back -> weights gathered over dp

Where the state is kept in fewer bits, the groups are empty while torch's step runs, and `cuda_ops`
steps the slices after it, by the numbers in the groups.

The hooks are registered, not patched in: LR schedulers replace ``optimizer.step`` themselves.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from goose_strategy.errors import ConfigError
from goose_strategy.optim.clip import global_power_sum
from goose_strategy.optim.factors import FactorCheck, check_factors, take_factors
from goose_strategy.optim.local import local_state, named_from, sliced
from goose_strategy.optim.native import NativeShard
from goose_strategy.optim.segments import Piece, Segment, Shard, State
from goose_strategy.optim.state import NamedState, check_ranges, load_named_optimizer_state
from goose_strategy.optim.steps import NativeSteps
from goose_strategy.optim.storage import is_native
from goose_strategy.optim.supported import check_supported, wants_fused

if TYPE_CHECKING:
    from goose_strategy.comm.collectives import Pending
    from goose_strategy.data_parallel.bucket import Bucket
    from goose_strategy.data_parallel.reducer import Reducer

Groups = list[list[nn.Parameter]]


class ZeroShards:
    """The sharded step of one optimizer.

    Attributes:
        reducer: Buckets of the parameters.
        optimizer: The user's optimizer.
        shards: This rank's slice of each bucket the optimizer steps.
        states: Optimizer state by segment weight. ``optimizer.state`` is empty outside of a step.
        native: Steps the shards where they are not torch's to step.
    """

    def __init__(
        self, reducer: Reducer, optimizer: Optimizer, *, native: bool | None = None
    ) -> None:
        """Attach to the optimizer. Collective over dp if parameters have to change buckets.

        Args:
            reducer: Knows the parameters of the module.
            optimizer: An elementwise torch optimizer over some of them; other optimizers may hold
                others. State it has already (after ``load_state_dict``) is sliced.
            native: Whether `cuda_ops` steps it, the same on all ranks; decided by the settings and
                this rank's parameters if ``None``.

        Raises:
            ConfigError: If the optimizer is not elementwise, holds a parameter that is not the
                module's, or cannot have the storage that is asked for.
        """
        check_supported(optimizer)
        if native is None:
            native = is_native(reducer.config, optimizer, dtypes_of(optimizer))
        self.reducer = reducer
        self.optimizer = optimizer
        self.native = NativeSteps(reducer, optimizer) if native else None
        self.shards: list[Shard | NativeShard] = []
        self.states: defaultdict[Tensor, Any] = defaultdict(dict)
        self._by_bucket: dict[int, Shard | NativeShard] = {}
        self._fresh: list[Shard | NativeShard] = []
        # State for whole parameters that have no bucket yet, because they are frozen.
        self._whole: dict[Tensor, State] = {}
        self._known: list[tuple[list[nn.Parameter], int]] = []
        self._hidden: Groups | None = None
        self._fused: list[dict[str, Any]] = []
        self._stepped: list[Shard | NativeShard] = []
        # The norm that a clipping has computed, and what the gradients were then.
        self._norm: tuple[Tensor, object] | None = None
        self._loaded: tuple[NamedState, dict[Tensor, State]] | None = None
        self._gathers: list[Pending] = []
        self._factors = FactorCheck(reducer.mesh)
        self._index = self._find_index()
        self._regroup()
        self._absorb()
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._add_state),
            optimizer.register_load_state_dict_pre_hook(self._keep_state),
            optimizer.register_load_state_dict_post_hook(self._load_state),
        ]

    def close(self) -> None:
        """Remove the hooks; the state of this rank's slices is lost."""
        self._show_params()
        self.flush()
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
                    shard = Shard(bucket) if self.native is None else self.native.make(bucket)
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
        self.flush()
        if self._changed():
            self._regroup()
        self.reducer.finalize()
        if self._changed():
            self._regroup()

    @property
    def must_exchange(self) -> bool:
        """Whether the coming step has to ask all ranks for something, which all know alike."""
        return self.reducer.factors is not None or (self.native is not None and not self._judged)

    @property
    def skips(self) -> bool:
        """Whether a step is skipped whose gradients are not finite."""
        return self.native is not None

    @property
    def _judged(self) -> bool:
        if self._norm is None:
            return False
        # Stages may see other rounds, and must decide alike; their later gradients come by calls.
        return self.reducer.mesh.pp_size > 1 or self._norm[1] == self.reducer.round

    def note_norm(self, total: Tensor) -> None:
        """Note the power sum of the gradients, which a step need not take again."""
        self._norm = (total, self.reducer.round)

    def exchange_factors(self) -> list[float]:
        """Return the factors on the loss that no clipping compared, by rank.

        Collective over the world if `must_exchange`. A native step learns of the norm with them.
        """
        if self.native is None or not self.must_exchange:
            return self._factors.exchange(self.reducer)
        buckets = [shard.bucket for shard in self.shards]
        mine = take_factors([self.reducer])
        total, factors = global_power_sum(buckets, self.reducer.mesh, 2.0, mine)
        self.note_norm(total)
        return self._factors.read(factors)

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
        if self.native is None:
            self._offer_segments(groups)
        elif self._norm is not None:
            native = [shard for shard in self.shards if isinstance(shard, NativeShard)]
            self._stepped = [*self.native.prepare(native, self._norm[0])]
            self._norm = None
        self._hidden = []
        for group, weights in zip(self.optimizer.param_groups, groups, strict=True):
            self._hidden.append(group["params"])
            group["params"] = weights
            if wants_fused(self.optimizer, group, weights):
                group["fused"] = True
                self._fused.append(group)
        self.optimizer.state = self.states

    def _offer_segments(self, groups: Groups) -> None:
        """Put what torch is to step into ``groups``, by parameter group."""
        self._stepped = []
        for shard in self.shards:
            index = shard.bucket.key.group
            if isinstance(shard, NativeShard) or index is None:
                continue
            if any(s.param.grad is not None for s in shard.bucket.slots):
                self._stepped.append(shard)
                for segment in shard.active(self.states):
                    segment.weight.grad = segment.grad
                    groups[index].append(segment.weight)

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
        if self.native is not None:
            self.native.run()
        for shard in self._stepped:
            if isinstance(shard, Shard):
                shard.publish()
            self._gathers.append(shard.bucket.gather_weights())
        if not self.reducer.config.overlap_param_gather:
            self.flush()
        for shard in self._stepped:
            # Autograd notices weights that changed between a forward and its backward.
            increment_version([s.param for s in shard.bucket.slots if s.param.grad is not None])
        self._stepped = []

    def flush(self) -> None:
        """Wait for the weights of the other ranks, if the last step did not."""
        gathers, self._gathers = self._gathers, []
        for work in gathers:
            work.wait()

    # -- main weights and states ---------------------------------------------------------------

    def take_over_weights(self) -> bool:
        """Rebuild fp32 main weights where the weights are no longer their rounded values.

        Returns:
            Whether that was so anywhere in this rank's slices.
        """
        separate = [shard for shard in self.shards if shard.checks_weights]
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
        everything = []
        for shard in shards:
            whole = {s.name: self._whole.pop(s.param, None) for s in shard.bucket.slots}
            found = {}
            for piece in shard.pieces:
                state = whole[piece.slot.name]
                if state:
                    found[piece.slot.name] = sliced(state, piece, shard.bucket)
            everything.append((shard, found))
        self.install(everything, everything=bool(full))

    def _add_state(self, _optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._absorb()
        return {**state_dict, "state": local_state(self)}

    def _keep_state(self, _optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Take the states out of torch's hands, which would cast them to the weights' types."""
        named, whole = named_from(self, state_dict)
        check_ranges(self, named)
        self._loaded = named, whole
        return {**state_dict, "state": {}}

    def _load_state(self, _optimizer: Optimizer) -> None:
        if self._loaded is not None:
            (named, self._whole), self._loaded = self._loaded, None
            load_named_optimizer_state(self, named)
            self._fresh = []

    def install(
        self, found: Sequence[tuple[Shard | NativeShard, Mapping[str, State]]], *, everything: bool
    ) -> None:
        """Replace the states of shards.

        Args:
            found: Each shard with its states by parameter name, cut to this rank's pieces.
            everything: Whether these are all shards.
        """
        native = [(shard, own) for shard, own in found if isinstance(shard, NativeShard)]
        if self.native is not None:
            self.native.install(native, everything=everything)
        for shard, own in found:
            if isinstance(shard, Shard):
                shard.install(own, self.states)

    def states_by_piece(self, shard: Shard | NativeShard) -> Iterable[tuple[Piece, State]]:
        """Yield each piece of a shard that has a state, with flat tensors of its own length."""
        if isinstance(shard, Shard):
            return shard.states_by_piece(self.states)
        return [] if self.native is None else shard.states_by_piece(self.native.clock)

    def segments(self) -> list[Segment]:
        """Return all segments of this rank that torch steps."""
        shards = (shard for shard in self.shards if isinstance(shard, Shard))
        return [segment for shard in shards for segment in shard.segments]


def dtypes_of(optimizer: Optimizer) -> set[torch.dtype]:
    """Return the types of the parameters that an optimizer holds, frozen ones included."""
    return {param.dtype for group in optimizer.param_groups for param in group["params"]}
