"""What the steps taken so far cost: Opacus's accountants, and what a truncated draw adds.

Accounting depends on the sampling rate, the noise and the number of steps only, so Opacus's is
taken as it is. It has none for draws that are cut off at a largest size.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from goose_strategy.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from goose_strategy.privacy.config import PrivacyConfig


class Spent(NamedTuple):
    """Steps that are counted together.

    Attributes:
        noise_multiplier: Of the noise.
        sample_rate: Probability of each sample.
        excess: Probability that a draw was cut off.
        run: Which run made them. A run that goes back to a checkpoint of its own has made the steps
            after it all the same, and the steps before it once.
    """

    noise_multiplier: float
    sample_rate: float
    excess: float
    run: str


class Accountant:
    """Counts steps, and tells their epsilon.

    Args:
        kind: ``"prv"``, ``"rdp"`` or ``"gdp"``.
        excess: Probability that one draw is cut off; 0 without truncation.
        run: Name of the run that makes the steps.
    """

    def __init__(self, kind: str, *, excess: float = 0.0, run: str = "") -> None:
        # Half a second, which only private training pays.
        from opacus.accountants import create_accountant

        self._accountant: Any = create_accountant(kind)
        self._steps: dict[Spent, int] = {}
        self._run = run
        self.kind = kind
        self.excess = excess

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Count one noisy sum."""
        key = Spent(noise_multiplier, sample_rate, self.excess, self._run)
        self._steps[key] = self._steps.get(key, 0) + 1

    @property
    def total(self) -> int:
        """Number of steps."""
        return sum(self._steps.values())

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """Noise multiplier, sampling rate and number of steps, one entry per setting."""
        found: dict[tuple[float, float], int] = {}
        for key, steps in self._steps.items():
            setting = (float(key.noise_multiplier), float(key.sample_rate))
            found[setting] = found.get(setting, 0) + steps
        return [(*setting, steps) for setting, steps in found.items()]

    def state_dict(self) -> list[list[Any]]:
        """Return the steps with their settings and runs, plain values."""
        return [[*key, steps] for key, steps in self._steps.items()]

    def merge(self, state: Sequence[Sequence[Any]]) -> None:
        """Add what a checkpoint counted; steps that both know of count once.

        Args:
            state: What `state_dict` returned.
        """
        for sigma, rate, excess, run, steps in state:
            key = Spent(float(sigma), float(rate), float(excess), str(run))
            self._steps[key] = max(int(steps), self._steps.get(key, 0))

    def epsilon(self, delta: float) -> float:
        """Return the epsilon of all steps at ``delta``; infinite if there was no noise.

        With draws that are cut off, all but a probability ``eta`` of the runs are those of plain
        Poisson sampling, on either of two neighbouring data sets, so that a plain
        ``(epsilon, delta)`` becomes ``(epsilon, delta + (1 + exp(epsilon)) * eta)``.

        Raises:
            ConfigError: If the steps have several settings and the accountant knows one only.
        """
        history = self.history
        if not history:
            return 0.0
        if any(sigma == 0 for sigma, _, _ in history):
            return math.inf
        if self.kind == "gdp" and len(history) > 1:
            # Opacus would count the steps of the last one alone.
            raise ConfigError(
                f"accountant='gdp' knows one setting, but the run has {history} (noise_multiplier, "
                "sampling rate, steps); set accountant='prv' or 'rdp'."
            )
        self._accountant.history = history
        eta = sum(key.excess * steps for key, steps in self._steps.items())
        if eta == 0:
            return self._plain(delta)
        epsilon = self._plain(delta)
        for _ in range(32):
            left = delta - (1 + math.exp(min(epsilon, 700))) * eta
            if left <= 0:
                return math.inf
            found = self._plain(left)
            if found <= epsilon * (1 + 1e-6):
                return max(found, epsilon)
            epsilon = found
        return math.inf

    def _plain(self, delta: float) -> float:
        with _quiet():
            return float(self._accountant.get_epsilon(delta))


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """Leave out the warnings of Opacus about orders of RDP and settings of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def excess_of(size: int, rate: float, most: int | None) -> float:
    """Return the probability that a draw has more samples than ``most``.

    The claim is about two sets of data, of which one has a row more.
    """
    if most is None:
        return 0.0
    from scipy.stats import binom

    return float(binom.sf(most, size + 1, rate))


def noise_for(config: PrivacyConfig, rate: float, *, excess: float = 0.0) -> float:
    """Return the noise multiplier of a config at a sampling rate.

    Args:
        config: The settings.
        rate: Probability of each sample.
        excess: Probability that one draw is cut off.

    Raises:
        ConfigError: If no noise reaches the target.
    """
    if config.noise_multiplier is not None:
        return config.noise_multiplier
    from opacus.accountants.utils import get_noise_multiplier

    delta = _left_for_noise(config, excess)
    try:
        with _quiet():
            return float(
                get_noise_multiplier(
                    target_epsilon=config.target_epsilon,
                    target_delta=delta,
                    sample_rate=rate,
                    steps=config.steps,
                    accountant=config.accountant,
                )
            )
    except ValueError as error:
        raise ConfigError(
            f"target_epsilon={config.target_epsilon} at target_delta={config.target_delta} with "
            f"steps={config.steps} and a sampling rate of {rate:.3g} cannot be reached: {error}"
        ) from error


def _left_for_noise(config: PrivacyConfig, excess: float) -> float:
    """Return what draws that are cut off leave of a target's delta.

    Raises:
        ConfigError: If it is nothing.
    """
    epsilon, delta, steps = config.target_epsilon, config.target_delta, config.steps
    if epsilon is None or delta is None or steps is None:
        raise ConfigError("a noise can only be found for target_epsilon, target_delta and steps.")
    left = delta - (1 + math.exp(min(epsilon, 700))) * steps * excess
    if left <= 0:
        raise ConfigError(
            f"max_batch_size={config.max_batch_size} cuts a draw off with a probability of "
            f"{excess:.2g}, which over steps={steps} is more than target_delta={delta} allows at "
            f"target_epsilon={epsilon}; choose more, six standard deviations above "
            f"logical_batch_size={config.logical_batch_size}, for example."
        )
    return left


def compare_settings(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Check that a resumed run has the settings of its checkpoint.

    Raises:
        CheckpointError: Naming each that differs.
    """
    differing = [
        f"{name}={mine[name]!r} (checkpoint: {theirs.get(name)!r})"
        for name in mine
        if mine[name] != theirs.get(name)
    ]
    if differing:
        raise CheckpointError(
            f"the run would go on with other privacy settings: {', '.join(differing)}. Take those "
            "of the checkpoint, or set allow_privacy_change=True: the steps of both are then "
            "counted with their own."
        )
