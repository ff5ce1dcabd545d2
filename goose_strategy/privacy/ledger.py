"""What a private run has promised and spent: the noise, the sampling rate, the steps.

One object per run, reached as ``strategy.privacy``. It knows in which order things must happen
(one call with one backward, then one noisy step) and refuses any other: a sum that is released
twice, or scaled, or stepped without noise is what the noise was not chosen for.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from goose_strategy.comm.collectives import all_gather_objects, broadcast_object
from goose_strategy.errors import ConfigError, PrivacyError
from goose_strategy.privacy.accounting import (
    Accountant,
    compare_settings,
    excess_of,
    noise_for,
)
from goose_strategy.privacy.clipping import MASK, ClippingStats
from goose_strategy.privacy.noise import Noise, fresh_root, root_from
from goose_strategy.privacy.sampler import Draw

if TYPE_CHECKING:
    from goose_strategy.privacy.config import PrivacyConfig

_T = TypeVar("_T")


class Ledger:
    """The privacy of one run.

    Args:
        config: The settings.
        control: All ranks, over gloo; ``None`` for this one alone.

    Attributes:
        config: The settings.
        steps: Noisy steps so far, those before a resume included.
        rate: Probability with which a sample is drawn; ``None`` until the data is known.
        sigma: The noise multiplier; ``None`` until it is known.
        drawn: Number of the noise that was drawn last, in this process. It never goes back: noise
            that is used twice shows the difference of what it was added to.
        counts: Samples of the draws that this replica's loaders made, until they are used.
        stats: What clipping did in the last call. Computed from the data, so it is not private.
    """

    def __init__(self, config: PrivacyConfig, control: ProcessGroup | None) -> None:
        self.config = config
        self.steps = 0
        self.rate: float | None = None
        self.sigma: float | None = config.noise_multiplier
        self.drawn = 0
        self.counts: dict[int, int] = {}
        self.stats = ClippingStats()
        self._control = control
        # Never written to a checkpoint: a run that is resumed draws other noise.
        self._root, self._run = self._by_first(
            lambda: (
                fresh_root() if config.noise_seed is None else root_from(config.noise_seed),
                secrets.token_hex(8),
            )
        )
        self.noise = Noise(self._root, secure=config.secure)
        self._size: int | None = None
        self._accountant: Accountant | None = None
        self._last_draw = 0
        self._loaders = 0
        self._released = 0
        self._owes_step = False
        self._resumed: dict[str, Any] | None = None
        # Steps before a resume may have been no private ones, of which nothing can be claimed.
        self._claims = config.is_private

    def _by_first(self, make: Callable[[], _T]) -> _T:
        """Return what the first rank made."""
        first = self._control is None or self._control.rank() == 0
        mine: Any = make() if first else None
        made: _T = broadcast_object(mine, source=0, group=self._control)
        return made

    # -- the data ------------------------------------------------------------------------------

    def know_data(self, size: int) -> float:
        """Note the number of samples, from which the sampling rate and the noise follow.

        Collective over the world.

        Args:
            size: Samples in the training data. The number counts as public.

        Returns:
            The sampling rate.

        Raises:
            ConfigError: If it is smaller than a logical batch, or another one than before, or than
                on another rank.
            CheckpointError: If a checkpoint was loaded that had other settings.
        """
        config = self.config
        sizes = set(all_gather_objects(size, self._control))
        if len(sizes) > 1:
            raise ConfigError(
                f"the data has {sorted(sizes)} samples on different ranks, so that they would draw "
                "different ones; give all ranks the whole data, in one order."
            )
        if size < config.logical_batch_size:
            raise ConfigError(
                f"logical_batch_size={config.logical_batch_size} is more than the {size} samples "
                "of the data; choose less."
            )
        if self._size not in (None, size):
            raise ConfigError(
                f"a second data set of {size} samples was set up for private training, after one "
                f"of {self._size}; epsilon is known for one. Loaders without shuffle=True are left "
                "alone."
            )
        rate = config.logical_batch_size / size
        if self.rate is None:
            excess = excess_of(size, rate, config.max_batch_size)
            self.sigma = self._by_first(lambda: noise_for(config, rate, excess=excess))
            self._account().excess = excess
        self._size, self.rate = size, rate
        if self._resumed is not None and not config.allow_privacy_change:
            compare_settings(self.settings, self._resumed)
        return rate

    def _account(self) -> Accountant:
        if self._accountant is None:
            self._accountant = Accountant(self.config.accountant, run=self._run)
        return self._accountant

    def first_draw(self) -> int:
        """Return how many draws a new loader leaves to those before it, which may be in use yet."""
        self._loaders += 1
        return (self._loaders - 1) << 40

    def draw(self, *, replicas: int, replica: int, multiple: int) -> Draw:
        """Return how batches are drawn; see `Draw`."""
        if self.rate is None or self._size is None:
            raise ConfigError("the size of the training data is not known yet.")
        return Draw(
            size=self._size,
            rate=self.rate,
            most=self.config.max_batch_size,
            root=self._root,
            replicas=replicas,
            replica=replica,
            multiple=multiple,
        )

    # -- the order of a step -------------------------------------------------------------------

    def begin_call(self, mark: Tensor | None) -> None:
        """Check a batch's marks before a call with gradients.

        Args:
            mark: Under the name `MASK` in the batch: for each row the number of its draw, or 0.

        Raises:
            PrivacyError: If the batch was not drawn by Poisson sampling, or was used before; if
                the planned steps are used up, or a step was left out.
        """
        config = self.config
        if config.steps is not None and self.steps >= config.steps:
            target = config.target_epsilon
            why = "." if target is None else f"; one more would exceed target_epsilon={target}."
            raise PrivacyError(f"all steps={config.steps} are taken that were planned{why}")
        if self._released:
            raise PrivacyError(
                "the model was called with gradients while those of an earlier call wait for their "
                "step; private training takes one call per step, with "
                f"logical_batch_size={config.logical_batch_size} samples in it. Call "
                "optimizer.step() first."
            )
        if config.sampling == "none":
            return
        if self._owes_step:
            raise PrivacyError(
                "the model was called with gradients and no step followed. Whether a step is left "
                "out may depend on the data, which no noise covers: call fabric.backward(loss) and "
                "optimizer.step() after every such call, whatever its loss is, and evaluate under "
                "torch.no_grad(). After an interruption go on from a checkpoint in a new process."
            )
        if mark is None:
            raise PrivacyError(
                f"the batch carries no {MASK}, which says which of its rows were drawn. Set the "
                f"training loader up with shuffle=True (sampling={config.sampling!r} replaces its "
                f"sampler), and hand {MASK} to the model with the rest of the batch; or set "
                "sampling='none'."
            )
        if self.rate is None:
            raise PrivacyError(
                "the training loader was not set up by the strategy (fabric.setup_dataloaders, or "
                "the Trainer), so the sampling rate is not known and no step could be counted."
            )
        self._take_draw(mark)

    def _take_draw(self, mark: Tensor) -> None:
        """Check that a call's rows are one draw, whole and new."""
        real = mark[mark > 0]
        number = int(real.max()) if real.numel() else 0
        if number and number <= self._last_draw:
            raise PrivacyError(
                f"a batch of draw {number} was used after that of draw {self._last_draw}; every "
                "draw may be used once, and those of a loader that was set up earlier no more."
            )
        if number and int(real.min()) != number:
            raise PrivacyError(
                f"one call has rows of the draws {sorted(set(real.tolist()))[:4]}, in which a "
                "sample may occur more than once; pass the batch of one draw, and set "
                "logical_batch_size to as many samples as a step shall have."
            )
        drawn = self.counts.pop(number, None)
        if drawn is not None and drawn != real.numel():
            raise PrivacyError(
                f"draw {number} has {drawn} samples on this replica, but the call has "
                f"{real.numel()} rows of it: some were repeated or left out, which no noise was "
                "chosen for. Hand over all rows as the loader made them."
            )
        self._last_draw = max(number, self._last_draw)

    def end_call(self, stats: ClippingStats) -> None:
        """Note that a call has computed clipped sums, which a step must follow."""
        self.stats = stats
        self._owes_step = True

    def check_factor(self, factor: Tensor | float) -> None:
        """Check that the loss was not scaled, which would scale the clipped sum but not the noise.

        Raises:
            PrivacyError: If it was.
        """
        if float(factor) != 1.0:
            raise PrivacyError(
                f"the loss was multiplied by {float(factor):g} before its backward, so that a "
                "sample's part would no longer be what the noise covers; call backward on the loss "
                "as the model returned it (no accumulate_grad_batches, no loss scaling)."
            )

    def note_released(self) -> None:
        """Note that a clipped sum was released into the gradients."""
        self._released += 1

    def check_step(self) -> None:
        """Check that exactly one sum waits for its noise.

        Raises:
            PrivacyError: If there is none; nothing is stepped then.
        """
        if self._released != 1:
            raise PrivacyError(
                f"optimizer.step() came after {self._released} calls with a backward; private "
                "training takes exactly one, also where the draw was empty."
            )
        if self.sigma is None:
            raise PrivacyError(
                "the noise is not known: target_epsilon needs the training loader to be set up."
            )

    def begin_step(self) -> float:
        """Check that exactly one sum waits for its noise, and count the step.

        Returns:
            The standard deviation of the noise on the sum.

        Raises:
            PrivacyError: See `check_step`.
        """
        self.check_step()
        sigma = self.sigma or 0.0
        self._released = 0
        self._owes_step = False
        self.steps += 1
        self.drawn += 1
        if self._accountant is not None and self.rate is not None:
            self._accountant.step(noise_multiplier=sigma, sample_rate=self.rate)
        # Nothing is clipped at an infinite norm, which is allowed without noise only.
        return sigma * self.config.max_grad_norm if sigma else 0.0

    # -- what it costs -------------------------------------------------------------------------

    def epsilon(self, delta: float | None = None) -> float | None:
        """Return the epsilon of the steps so far, for adding or removing one row of the data.

        Args:
            delta: At which ``delta``; ``target_delta`` if ``None``.

        Returns:
            The epsilon; ``None`` where no claim is possible: without Poisson sampling, or with
            noise that a seed reveals, in this run or in one that it goes on from.

        Raises:
            ConfigError: If no delta is known.
        """
        delta = self.config.target_delta if delta is None else delta
        if delta is None or not 0 < delta < 1:
            raise ConfigError(f"delta={delta!r} must lie between 0 and 1.")
        if not self._claims:
            return None
        return 0.0 if self._accountant is None else self._accountant.epsilon(delta)

    @property
    def clipped(self) -> Tensor | None:
        """Share of the last call's samples on this replica that were clipped. Not private."""
        if not self.stats.norms:
            return None
        norms, masks = torch.cat(self.stats.norms), torch.cat(self.stats.masks)
        over = (norms > self.config.max_grad_norm).to(masks.dtype) * masks
        return over.sum() / masks.sum().clamp(min=1)

    # -- checkpoints ---------------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        """What a resumed run must share with its checkpoint."""
        config = asdict(self.config)
        names = ("max_grad_norm", "logical_batch_size", "clipping", "sampling", "accountant")
        return {
            **{name: config[name] for name in names},
            "max_batch_size": self.config.max_batch_size,
            "noise_multiplier": self.sigma,
            "sample_rate": self.rate,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds: steps, settings and history, but never the root."""
        history = [] if self._accountant is None else self._accountant.state_dict()
        return {
            "steps": self.steps,
            "neighbours": "add or remove one row",
            "settings": self.settings,
            "history": history,
            "epsilon_known": self._claims,
        }

    def check_resume(self, state: Mapping[str, Any] | None) -> None:
        """Check that a checkpoint may be resumed; to be called before anything is changed.

        Args:
            state: What `state_dict` returned, or ``None`` if the checkpoint holds none.

        Raises:
            CheckpointError: If its settings are others, or it was not trained privately, unless
                ``allow_privacy_change`` is set.
        """
        if self.config.allow_privacy_change:
            return
        if state is None:
            compare_settings({"privacy": True}, {"privacy": False})
            return
        theirs = dict(state["settings"])
        mine = self.settings
        if self.rate is None:
            # The data may come after the checkpoint: `know_data` is compared then.
            for name in ("sample_rate", "noise_multiplier"):
                if mine[name] is None:
                    mine.pop(name)
        compare_settings(
            {**mine, "epsilon_known": self._claims},
            {
                **theirs,
                "epsilon_known": state["epsilon_known"],
            },
        )

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on where a checkpoint stopped, with fresh noise."""
        if state is None:
            return
        self._resumed = dict(state["settings"])
        self._claims = self._claims and bool(state["epsilon_known"])
        # Never fewer than before: a run that goes back to its own checkpoint has made its steps.
        self.steps = max(self.steps, int(state["steps"]))
        if state["history"]:
            self._account().merge(state["history"])
            self.steps = self._account().total
