"""Every check names the argument, its value, and what is allowed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from goose_strategy.errors import ConfigError
from goose_strategy.validate import at_least, divisors, flag, is_number, one_of, positive, whole


def test_right_values_pass() -> None:
    positive(a=1, b=0.5)
    at_least(2, a=2, b=3.5)
    whole(a=0, b=-3)
    one_of(["x", 1], a="x", b=1)
    flag(a=True, b=False)


@pytest.mark.parametrize("value", [0, -1, -0.5, float("nan"), True, "4", None])
def test_positive_refuses(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"size=.* must be greater than 0; choose size >= 1\."):
        positive(size=value)


@pytest.mark.parametrize("value", [1, 1.9, float("nan"), True, "4", None])
def test_at_least_refuses(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"size=.* must be at least 2\."):
        at_least(2, size=value)


@pytest.mark.parametrize(("value", "kind"), [(1.0, "float"), ("1", "str"), (None, "NoneType")])
def test_whole_refuses(value: Any, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"size=.* must be a whole number, not {kind}"):
        whole(size=value)
    with pytest.raises(ConfigError, match="not bool"):
        whole(size=True)


@pytest.mark.parametrize("value", [1, "no", None])
def test_flag_refuses(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"on=.* must be true or false\."):
        flag(on=value)


def test_numbers_of_any_library_count() -> None:
    assert all(is_number(value) for value in (1, 0.5, np.float32(2), np.int64(3)))
    assert not any(is_number(value) for value in (True, "1", None, 1j))


def test_one_of_lists_what_is_known() -> None:
    with pytest.raises(ConfigError, match="way='up' is not known; choose one of 'left', 2"):
        one_of(iter(["left", 2]), way="up")


def test_the_first_wrong_name_is_told() -> None:
    with pytest.raises(ConfigError, match="second=0"):
        positive(first=1, second=0, third=-1)


def test_divisors_are_in_order() -> None:
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    assert divisors(7) == (1, 7)
