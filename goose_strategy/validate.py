"""Checks whose messages are made of the argument's own name: ``positive(tp=tp)``.

One file, so that every wrong setting is refused in the same words: what was given, what is
allowed, what to change.
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real

from goose_strategy.errors import ConfigError


def is_number(value: object) -> bool:
    """Tell whether a value is a real number; a ``bool`` is none here."""
    return isinstance(value, Real) and not isinstance(value, bool)


def positive(**named: int | float) -> None:
    """Check that every named number is greater than zero.

    Raises:
        ConfigError: If one is not.
    """
    for name, value in named.items():
        if not is_number(value) or not value > 0:
            raise ConfigError(f"{name}={value!r} must be greater than 0; choose {name} >= 1.")


def at_least(minimum: float, **named: int | float) -> None:
    """Check that every named number is at least ``minimum``.

    Raises:
        ConfigError: If one is smaller.
    """
    for name, value in named.items():
        if not is_number(value) or not value >= minimum:
            raise ConfigError(f"{name}={value!r} must be at least {minimum}.")


def whole(**named: object) -> None:
    """Check that every named value is an ``int`` (and no ``bool``).

    Raises:
        ConfigError: If one is not.
    """
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(
                f"{name}={value!r} must be a whole number, not {type(value).__name__}."
            )


def flag(**named: object) -> None:
    """Check that every named value is a ``bool``: ``"no"`` would count as true.

    Raises:
        ConfigError: If one is not.
    """
    for name, value in named.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r} must be true or false.")


def one_of(allowed: Iterable[object], **named: object) -> None:
    """Check that every named value is one of ``allowed``.

    Raises:
        ConfigError: If one is not; the message lists what is allowed.
    """
    choices = tuple(allowed)
    for name, value in named.items():
        if value not in choices:
            listed = ", ".join(repr(choice) for choice in choices)
            raise ConfigError(f"{name}={value!r} is not known; choose one of {listed}.")


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of ``number`` in increasing order."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)
