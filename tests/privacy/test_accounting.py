"""Epsilon is Opacus's; draws that are cut off cost what they add."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest

from goose_strategy.errors import CheckpointError, ConfigError
from goose_strategy.privacy.accounting import (
    Accountant,
    compare_settings,
    excess_of,
    noise_for,
)
from goose_strategy.privacy.config import PrivacyConfig

DELTA = 1e-5


def opacus(kind: str, settings: list[tuple[float, float, int]]) -> float:
    from opacus.accountants import create_accountant

    accountant: Any = create_accountant(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sigma, rate, steps in settings:
            for _ in range(steps):
                accountant.step(noise_multiplier=sigma, sample_rate=rate)
        return float(accountant.get_epsilon(DELTA))


def spent(accountant: Accountant, settings: list[tuple[float, float, int]]) -> Accountant:
    for sigma, rate, steps in settings:
        for _ in range(steps):
            accountant.step(noise_multiplier=sigma, sample_rate=rate)
    return accountant


@pytest.mark.parametrize("kind", ["prv", "rdp"])
def test_epsilon_is_opacus_s(kind: str) -> None:
    settings = [(1.0, 0.01, 50)]
    assert spent(Accountant(kind), settings).epsilon(DELTA) == opacus(kind, settings)


def test_the_accountant_that_may_underestimate_says_so() -> None:
    settings = [(1.0, 0.01, 50)]
    with pytest.warns(UserWarning, match="can underestimate"):
        accountant = Accountant("gdp")
    with pytest.warns(UserWarning, match="can underestimate"):
        expected = opacus("gdp", settings)
    assert spent(accountant, settings).epsilon(DELTA) == expected


def test_a_history_goes_on() -> None:
    first, second = [(1.0, 0.01, 30)], [(1.3, 0.02, 20)]
    one = spent(Accountant("rdp", run="one"), first)
    two = Accountant("rdp", run="two")
    two.merge(one.state_dict())
    assert spent(two, second).epsilon(DELTA) == opacus("rdp", first + second)
    assert two.history == [(1.0, 0.01, 30), (1.3, 0.02, 20)]
    assert two.total == 50


def test_steps_count_once_each_also_of_a_run_that_goes_back() -> None:
    run = spent(Accountant("rdp", run="one"), [(1.0, 0.01, 30)])
    early = run.state_dict()
    spent(run, [(1.0, 0.01, 10)])
    run.merge(early)
    assert run.history == [(1.0, 0.01, 40)], "what was rolled back was seen all the same"
    other = spent(Accountant("rdp", run="two"), [(1.0, 0.01, 5)])
    other.merge(early)
    assert other.history == [(1.0, 0.01, 35)]


def test_steps_of_draws_that_were_cut_off_stay_so() -> None:
    cut = spent(Accountant("rdp", excess=1e-9, run="one"), [(1.0, 0.01, 50)])
    plain = Accountant("rdp", run="two")
    plain.merge(cut.state_dict())
    assert plain.epsilon(DELTA) == cut.epsilon(DELTA)
    assert plain.epsilon(DELTA) > spent(Accountant("rdp"), [(1.0, 0.01, 50)]).epsilon(DELTA)


@pytest.mark.filterwarnings("ignore:.*can underestimate")
def test_an_accountant_of_one_setting_counts_no_other() -> None:
    """Opacus's would tell of the last setting's steps alone."""
    accountant = spent(Accountant("gdp"), [(1.0, 0.01, 50)])
    accountant.epsilon(DELTA)
    spent(accountant, [(2.0, 0.01, 1)])
    with pytest.raises(ConfigError, match="accountant='gdp' knows one setting"):
        accountant.epsilon(DELTA)


def test_nothing_is_spent_before_the_first_step_and_everything_without_noise() -> None:
    assert Accountant("rdp").epsilon(DELTA) == 0
    assert spent(Accountant("prv"), [(0.0, 0.01, 1)]).epsilon(DELTA) == math.inf


def test_a_draw_that_is_cut_off_costs_more() -> None:
    settings = [(1.0, 0.01, 50)]
    plain = spent(Accountant("rdp"), settings).epsilon(DELTA)
    cut = spent(Accountant("rdp", excess=1e-9), settings).epsilon(DELTA)
    assert plain < cut < plain * 1.01
    # The claim holds at the epsilon that is returned.
    eta = 50 * 1e-9
    left = DELTA - (1 + math.exp(cut)) * eta
    assert left > 0
    assert spent(Accountant("rdp"), settings).epsilon(left) <= cut * (1 + 1e-6)
    often = spent(Accountant("rdp", excess=1e-3), settings).epsilon(DELTA)
    assert often == math.inf


def test_how_often_a_draw_is_cut_off() -> None:
    assert excess_of(1000, 0.1, None) == 0
    # 100 expected, standard deviation 9.5.
    assert excess_of(1000, 0.1, 100) == pytest.approx(0.475, abs=0.02)
    assert excess_of(1000, 0.1, 200) < 1e-20
    # Of ten samples and of the eleventh that a neighbouring set has.
    assert excess_of(10, 0.5, 9) == pytest.approx(12 * 2.0**-11)


def test_noise_for_a_target() -> None:
    config = PrivacyConfig(target_epsilon=2.0, target_delta=DELTA, steps=40, accountant="rdp")
    sigma = noise_for(config, 0.02)
    reached = opacus("rdp", [(sigma, 0.02, 40)])
    assert 1.9 < reached <= 2.0
    assert noise_for(PrivacyConfig(noise_multiplier=0.7), 0.02) == 0.7


def test_noise_for_a_target_leaves_room_for_draws_that_are_cut_off() -> None:
    config = PrivacyConfig(
        target_epsilon=2.0,
        target_delta=DELTA,
        steps=40,
        accountant="rdp",
        sampling="truncated_poisson",
        logical_batch_size=20,
        max_batch_size=48,
    )
    excess = excess_of(1000, 0.02, 48)
    assert 1e-10 < excess < 1e-7
    sigma = noise_for(config, 0.02, excess=excess)
    found = spent(Accountant("rdp", excess=excess), [(sigma, 0.02, 40)]).epsilon(DELTA)
    assert 1.9 < found <= 2.0
    assert sigma > noise_for(config, 0.02)
    with pytest.raises(ConfigError, match="max_batch_size=48 cuts a draw off"):
        noise_for(config, 0.02, excess=1e-4)


def test_a_target_that_cannot_be_reached_is_named() -> None:
    config = PrivacyConfig(target_epsilon=1e-12, target_delta=1e-12, steps=10**6, accountant="rdp")
    with pytest.raises(ConfigError, match="cannot be reached"):
        noise_for(config, 1.0)


def test_settings_that_differ_are_named() -> None:
    compare_settings({"a": 1}, {"a": 1, "b": 2})
    with pytest.raises(CheckpointError, match=r"a=1 \(checkpoint: 2\)"):
        compare_settings({"a": 1}, {"a": 2})
