"""What a run has promised: the order of its steps, its noise, its resume."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from goose_strategy.errors import CheckpointError, ConfigError, PrivacyError
from goose_strategy.privacy.config import PrivacyConfig
from goose_strategy.privacy.ledger import Ledger
from tests.harness.worker import Context
from tests.harness.world import run_ranks

CONFIG = PrivacyConfig(
    noise_multiplier=1.0, logical_batch_size=10, target_delta=1e-5, accountant="rdp"
)


def ledger_of(**settings: Any) -> Ledger:
    return Ledger(replace(CONFIG, **settings), None)


def step(ledger: Ledger, draw: int) -> None:
    ledger.begin_call(torch.tensor([draw, 0]))
    ledger.check_factor(1.0)
    ledger.note_released()
    ledger.begin_step()


def test_a_step_is_one_call_and_one_noise() -> None:
    ledger = ledger_of(max_grad_norm=2.0)
    assert ledger.know_data(100) == 0.1
    for draw in (1, 2, 3):
        step(ledger, draw)
    assert ledger.steps == 3
    assert ledger.epsilon() == ledger.epsilon(1e-5)
    ledger.begin_call(torch.tensor([4]))
    ledger.note_released()
    assert ledger.begin_step() == 2.0


def test_an_empty_draw_is_a_step() -> None:
    ledger = ledger_of()
    ledger.know_data(100)
    step(ledger, 0)
    step(ledger, 0)
    assert ledger.steps == 2


@pytest.mark.parametrize("factor", [0.5, 2.0, torch.tensor(0.999)])
def test_a_scaled_loss_is_refused(factor: Any) -> None:
    with pytest.raises(PrivacyError, match="was multiplied by"):
        ledger_of().check_factor(factor)


def test_no_step_comes_after_the_last() -> None:
    ledger = ledger_of(noise_multiplier=None, target_epsilon=5.0, steps=2)
    ledger.know_data(100)
    assert ledger.sigma is not None
    step(ledger, 1)
    step(ledger, 2)
    assert 0 < (ledger.epsilon() or 0) <= 5.0
    with pytest.raises(PrivacyError, match="all steps=2 are taken"):
        ledger.begin_call(torch.tensor([3]))


def test_no_step_comes_after_the_planned_ones_whatever_the_noise_was_chosen_for() -> None:
    ledger = ledger_of(steps=1)
    ledger.know_data(100)
    step(ledger, 1)
    with pytest.raises(PrivacyError, match="all steps=1 are taken"):
        ledger.begin_call(torch.tensor([2]))


def test_a_step_that_is_left_out_is_refused() -> None:
    """``if not loss.isfinite(): continue`` would tell of the data what no noise covers."""
    ledger = ledger_of()
    ledger.know_data(100)
    step(ledger, 1)
    ledger.begin_call(torch.tensor([2]))
    ledger.end_call(ledger.stats)
    with pytest.raises(PrivacyError, match="no step followed"):
        ledger.begin_call(torch.tensor([3]))
    # A call that failed has shown nothing.
    failed = ledger_of()
    failed.know_data(100)
    failed.begin_call(torch.tensor([1]))
    step(failed, 2)


def test_noise_that_hangs_on_the_data_is_not_known_before_it() -> None:
    ledger = ledger_of(noise_multiplier=None, target_epsilon=5.0, steps=2)
    ledger.note_released()
    with pytest.raises(PrivacyError, match="the noise is not known"):
        ledger.begin_step()
    with pytest.raises(ConfigError, match="not known yet"):
        ledger.draw(replicas=1, replica=0, multiple=1)


def test_a_call_has_the_rows_of_one_draw_each_once() -> None:
    ledger = ledger_of()
    ledger.know_data(100)
    # As model([first, second]) would: a sample may be in both, and count twice.
    with pytest.raises(PrivacyError, match=r"rows of the draws \[1, 2\]"):
        ledger.begin_call(torch.tensor([1, 1, 2, 0]))
    for number, rows in ((3, [3, 3, 3, 3]), (4, [4])):
        ledger.counts[number] = 2
        with pytest.raises(PrivacyError, match=f"draw {number} has 2 samples .* {len(rows)} rows"):
            ledger.begin_call(torch.tensor(rows))
    ledger.counts[5] = 2
    step(ledger, 6)
    ledger.counts[7] = 2
    ledger.begin_call(torch.tensor([7, 7, 0]))
    assert ledger.counts.keys() == {5}


def test_marks_of_ones_own_do_not_stand_for_a_loader() -> None:
    with pytest.raises(PrivacyError, match="the training loader was not set up"):
        ledger_of().begin_call(torch.tensor([1]))
    with pytest.raises(PrivacyError, match="carries no sample_mask"):
        ledger_of().begin_call(None)


def test_data_that_does_not_fit_is_refused() -> None:
    ledger = ledger_of()
    with pytest.raises(ConfigError, match="logical_batch_size=10 is more than the 9"):
        ledger.know_data(9)
    ledger.know_data(100)
    ledger.know_data(100)
    with pytest.raises(ConfigError, match="a second data set"):
        ledger.know_data(101)


def test_no_claim_without_poisson_sampling_or_with_a_known_seed() -> None:
    for settings in ({"sampling": "none"}, {"noise_seed": 3}):
        assert ledger_of(**settings).epsilon() is None
    with pytest.raises(ConfigError, match="delta=None"):
        ledger_of(target_delta=None).epsilon()
    with pytest.raises(ConfigError, match="delta=2"):
        ledger_of().epsilon(2)


def test_no_noise_is_no_privacy() -> None:
    ledger = ledger_of(noise_multiplier=0.0, max_grad_norm=math.inf)
    ledger.know_data(100)
    ledger.begin_call(torch.tensor([1]))
    ledger.note_released()
    assert ledger.begin_step() == 0.0
    assert ledger.epsilon() == math.inf


def test_a_resumed_run_goes_on() -> None:
    first = ledger_of()
    first.know_data(100)
    step(first, 1)
    state = first.state_dict()
    second = ledger_of()
    second.check_resume(state)
    second.load_state_dict(state)
    second.know_data(100)
    step(second, 1)
    step(first, 2)
    assert second.steps == first.steps == 2
    assert second.epsilon() == first.epsilon()


def test_a_run_that_goes_back_to_its_checkpoint_has_spent_what_it_spent() -> None:
    ledger = ledger_of()
    ledger.know_data(100)
    for draw in (1, 2):
        step(ledger, draw)
    state = ledger.state_dict()
    for draw in (3, 4, 5):
        step(ledger, draw)
    spent = ledger.epsilon()
    ledger.check_resume(state)
    ledger.load_state_dict(state)
    assert (ledger.steps, ledger.epsilon()) == (5, spent)
    drawn = ledger.drawn
    step(ledger, 6)
    assert ledger.drawn == drawn + 1 == 6, "noise of an earlier step would be added again"
    assert (ledger.epsilon() or 0) > (spent or 0)


@pytest.mark.parametrize("claimless", [{"sampling": "none"}, {"noise_seed": 3}], ids=str)
def test_nothing_is_claimed_of_a_run_that_goes_on_from_one_without_a_claim(claimless: Any) -> None:
    first = ledger_of(**claimless)
    second = ledger_of(allow_privacy_change=True)
    second.know_data(100)
    assert second.epsilon() == 0
    second.load_state_dict(first.state_dict())
    assert second.epsilon() is None
    third = ledger_of(allow_privacy_change=True)
    third.load_state_dict(second.state_dict())
    assert third.epsilon() is None


def test_loaders_share_no_draw() -> None:
    ledger = ledger_of()
    firsts = [ledger.first_draw() for _ in range(3)]
    assert firsts == sorted(set(firsts))
    assert firsts[0] == 0
    assert min(b - a for a, b in itertools.pairwise(firsts)) > 10**9


def test_the_root_is_in_no_checkpoint_and_fresh_after_a_resume() -> None:
    first = ledger_of()
    first.know_data(100)
    assert first._root.hex() not in repr(first.state_dict())
    assert repr(first._root) not in repr(first.state_dict())
    assert ledger_of()._root != first._root
    assert ledger_of(noise_seed=1)._root == ledger_of(noise_seed=1)._root


@pytest.mark.parametrize(
    "changed",
    [
        {"noise_multiplier": 0.9},
        {"max_grad_norm": 2.0},
        {"logical_batch_size": 5},
        {"clipping": "automatic"},
        {"accountant": "prv"},
        {"sampling": "none"},
    ],
    ids=str,
)
@pytest.mark.parametrize("data_first", [False, True])
def test_a_resume_with_other_settings_is_refused(changed: Any, data_first: bool) -> None:
    first = ledger_of()
    first.know_data(100)
    step(first, 1)
    state = first.state_dict()
    second = ledger_of(**changed)
    if data_first:
        second.know_data(100)
    with pytest.raises(CheckpointError, match=next(iter(changed))):
        second.check_resume(state)
    allowed = ledger_of(**changed, allow_privacy_change=True)
    allowed.check_resume(state)
    allowed.load_state_dict(state)


def test_a_resume_with_other_data_is_refused() -> None:
    first = ledger_of()
    first.know_data(100)
    state = first.state_dict()
    second = ledger_of()
    second.check_resume(state)
    second.load_state_dict(state)
    with pytest.raises(CheckpointError, match="sample_rate"):
        second.know_data(200)


def test_a_checkpoint_that_was_not_private_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"privacy=True \(checkpoint: False\)"):
        ledger_of().check_resume(None)
    ledger_of(allow_privacy_change=True).check_resume(None)


def test_clipped_samples_are_counted() -> None:
    ledger = ledger_of(max_grad_norm=1.0)
    assert ledger.clipped is None
    ledger.stats.norms.append(torch.tensor([0.5, 2.0, 3.0]))
    ledger.stats.masks.append(torch.tensor([1.0, 1.0, 0.0]))
    assert float(ledger.clipped or 0) == 0.5


def shared_root(ctx: Context) -> tuple[bytes, float]:
    import torch.distributed as dist

    ledger = Ledger(CONFIG, dist.group.WORLD)
    ledger.know_data(100)
    return ledger._root, ledger.sigma or 0.0


def test_all_ranks_have_one_root() -> None:
    results = run_ranks(shared_root, 2)
    assert results[0] == results[1]


def data_of_two_sizes(ctx: Context) -> str:
    import torch.distributed as dist

    ledger = Ledger(CONFIG, dist.group.WORLD)
    with pytest.raises(ConfigError) as caught:
        ledger.know_data(100 + ctx.rank)
    return str(caught.value)


def test_data_of_other_sizes_on_other_ranks_is_refused_on_all() -> None:
    first, second = run_ranks(data_of_two_sizes, 2)
    assert first == second
    assert "the data has [100, 101] samples on different ranks" in first
