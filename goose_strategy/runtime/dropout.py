"""The random numbers that a sharded model's calls draw: equal over tp, others for each dp and pp.

``seed_everything`` gives every rank the same generators. In ``ddp`` all replicas then drop the same
elements, and stages would drop what other stages drop; nothing fails, the noise is merely
correlated. Megatron-LM seeds the generators of the whole process per rank; the user's own random
numbers (augmentation, samplers) would change with it. Here only the calls of the model draw from
other streams:

* ``dp = pp = 1``: nothing is to be told apart, so a call draws from the caller's own generators,
  as plain transformers would. With ``tp > 1`` it is made sure that they are equal over tp.
* else: the model keeps a stream of its own, made from the generators' state at the set-up, the dp
  rank and the stage. It takes the place of the caller's during a call; the caller's generators
  never see the model draw.

Activation checkpointing inside of the model needs nothing more: torch restores the state with which
a layer began. Between cut layers tp ranks differ (`goose_strategy.tensor_parallel.dropout`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from goose_strategy.comm.collectives import all_reduce
from goose_strategy.compat.torch import inside_backward
from goose_strategy.errors import ConfigError
from goose_strategy.mesh.axis import MeshAxis
from goose_strategy.mesh.generators import Generators, State, changed, fingerprint
from goose_strategy.mesh.rng import axis_seed
from goose_strategy.runtime.replicate import share_random_state

if TYPE_CHECKING:
    from goose_strategy.mesh.mesh import ParallelMesh


class DropoutStream:
    """The stream of one sharded model.

    It is made at the set-up, when the tp ranks' generators are equal.

    Args:
        mesh: The mesh.
        ordinal: Number of the model in its script, so that two models draw different numbers.
        watch: Guards an exchange by a deadline.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        ordinal: int,
        watch: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._mesh = mesh
        self._watch = watch
        self._generators = Generators(mesh.device)
        self._kept: State | None = None
        self._drew = False
        self._compared: set[bool] = set()
        if mesh.dp_size > 1 or mesh.pp_size > 1:
            caller = self._generators.capture()
            base = fingerprint(caller, ordinal)
            seed = axis_seed(base, mesh.coordinates, same_over=(MeshAxis.TP,))
            self._kept = self._generators.seed(seed)
            self._generators.restore(caller)

    def __call__(self, *, training: bool) -> AbstractContextManager[None]:
        """Return the context of one call of the model. Collective over tp where ``dp = pp = 1``.

        Args:
            training: Whether the model is in training mode.
        """
        return self._own(training=training) if self._kept is None else self._swapped()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the kept stream as plain types; empty if it is the caller's own."""
        return dict(self._kept or {})

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from a state that `state_dict` returned; an empty one changes nothing."""
        if self._kept is not None and state:
            self._kept = {**self._kept, **state}

    @contextmanager
    def _swapped(self) -> Generator[None, None, None]:
        if self._drew and inside_backward():
            raise ConfigError(
                f"The model was called inside a backward pass with dp={self._mesh.dp_size}, "
                f"pp={self._mesh.pp_size} and dropout: torch.utils.checkpoint around the whole "
                "model would compute with other masks than its forward. Use "
                "model.gradient_checkpointing_enable(), or set the dropout to 0."
            )
        caller, start = self._generators.capture(), self._kept or {}
        self._generators.restore(start)
        try:
            yield
            end = self._generators.capture()
        finally:
            # A call that failed has drawn nothing: it may have come less far on another tp rank.
            self._generators.restore(caller)
        self._drew = self._drew or bool(changed(start, end))
        self._kept = end

    @contextmanager
    def _own(self, *, training: bool) -> Generator[None, None, None]:
        if self._mesh.tp is None:
            yield
            return
        before = self._generators.capture()
        if self._drew or training not in self._compared:
            self._compared.add(training)
            self._agree(before)
            before = self._generators.capture()
        yield
        self._drew = self._drew or bool(changed(before, self._generators.capture()))

    def _agree(self, state: State) -> None:
        """Make sure that the generators of all tp ranks are in one state."""
        mine = fingerprint(state)
        both = torch.tensor([mine, -mine], dtype=torch.int64)
        with self._watch("comparison of random states"):
            all_reduce(both, self._mesh.model_control, op="max")
            if both[0] == -both[1]:
                return
            share_random_state(self._mesh)
        if self._mesh.rank == 0:
            warnings.warn(
                "The tensor parallel ranks had drawn different random numbers before a call of "
                "the model, whose dropout must drop the same elements on all of them; the first "
                "rank's random state is used. Draw on all ranks alike, or from a torch.Generator "
                "of your own.",
                UserWarning,
                stacklevel=2,
            )
