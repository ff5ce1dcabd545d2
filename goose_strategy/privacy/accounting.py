"""What the steps taken so far cost: Opacus's accountants, and what a truncated draw adds.

Accounting depends on the sampling rate, the noise and the number of steps only, so Opacus's is
taken as it is. It has none for draws that are cut off at a largest size.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from goose_strategy.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from goose_strategy.privacy.config import PrivacyConfig


class Accountant:
    """Counts steps, and tells their epsilon.

    Args:
        kind: ``"prv"``, ``"rdp"`` or ``"gdp"``.
        excess: Probability that one draw is cut off; 0 without truncation.
    """

    def __init__(self, kind: str, *, excess: float = 0.0) -> None:
        # Half a second, which only private training pays.
        from opacus.accountants import create_accountant

        self._accountant: Any = create_accountant(kind)
        self.kind = kind
        self.excess = excess

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Count one noisy sum."""
        self._accountant.step(noise_multiplier=noise_multiplier, sample_rate=sample_rate)

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """Noise multiplier, sampling rate and number of steps, one entry per setting."""
        return [(float(a), float(b), int(n)) for a, b, n in self._accountant.history]

    @history.setter
    def history(self, history: list[tuple[float, float, int]]) -> None:
        self._accountant.history = [tuple(entry) for entry in history]

    def epsilon(self, delta: float) -> float:
        """Return the epsilon of all steps at ``delta``; infinite if there was no noise.

        With draws that are cut off, all but a probability ``eta`` of the runs are those of plain
        Poisson sampling, on either of two neighbouring data sets, so that a plain
        ``(epsilon, delta)`` becomes ``(epsilon, delta + (1 + exp(epsilon)) * eta)``.
        """
        history = self.history
        if not history:
            return 0.0
        if any(sigma == 0 for sigma, _, _ in history):
            return math.inf
        eta = self.excess * sum(steps for _, _, steps in history)
        if eta == 0:
            return self._plain(delta)
        epsilon = self._plain(delta)
        for _ in range(32):
            left = delta - (1 + math.exp(epsilon)) * eta
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
    """Return the probability that a draw has more samples than ``most``."""
    if most is None:
        return 0.0
    from scipy.stats import binom

    return float(binom.sf(most, size, rate))


def noise_for(config: PrivacyConfig, rate: float) -> float:
    """Return the noise multiplier of a config at a sampling rate.

    Raises:
        ConfigError: If no noise reaches the target.
    """
    if config.noise_multiplier is not None:
        return config.noise_multiplier
    from opacus.accountants.utils import get_noise_multiplier

    try:
        with _quiet():
            return float(
                get_noise_multiplier(
                    target_epsilon=config.target_epsilon,
                    target_delta=config.target_delta,
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
