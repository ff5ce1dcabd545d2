"""Ranks that share a card: which card each computes on, and who is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer

from goose_strategy import Goose3DFabricStrategy, Goose3DStrategy
from goose_strategy.errors import ConfigError
from goose_strategy.strategies import compat
from goose_strategy.strategies.cards import backend_for, card_of, check_cards
from goose_strategy.strategies.door import Door, build_config

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)


def _cards(*indices: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in indices]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that says how many cards torch sees."""

    def show(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)

    return show


@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [
        (None, CPU, "gloo"),
        (None, CARD, "nccl"),
        ("gloo", CARD, "gloo"),
        ("GLOO", CARD, "gloo"),
        ("cpu:gloo,cuda:nccl", CARD, "nccl"),
        ("cpu:gloo,cuda:nccl", CPU, "gloo"),
        ("cpu:gloo, cuda:gloo", CARD, "gloo"),
        ("cpu:gloo", CARD, ""),
    ],
)
def test_the_backend_of_a_device(backend: str | None, device: torch.device, expected: str) -> None:
    assert backend_for(backend, device) == expected


@pytest.mark.parametrize("backend", [None, "nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_refuses_two_ranks_on_a_card(cards: Any, backend: str | None) -> None:
    cards(2)
    check_cards(None, backend)
    check_cards([CPU] * 4, backend)
    check_cards(_cards(0, 1), backend)
    message = (
        r"3 ranks share card 1 \(4 ranks, 2 cards visible\) with process_group_backend='nccl': .*"
        r"process_group_backend='gloo'"
    )
    with pytest.raises(ConfigError, match=message):
        check_cards(_cards(0, 1, 1, 1), backend)
    # torchrun with one process for each of four cards, on a machine that has two.
    with pytest.raises(ConfigError, match="2 ranks share card 0"):
        check_cards(_cards(0, 1, 2, 3), backend)


def test_gloo_lets_ranks_share_a_card(cards: Any) -> None:
    cards(2)
    check_cards(_cards(0, 0, 0, 3), "gloo")
    assert [card_of(card, "gloo").index for card in _cards(0, 1, 2, 3)] == [0, 1, 0, 1]
    assert card_of(torch.device("cuda"), "gloo") == CARD
    assert card_of(CPU, "gloo") == CPU
    assert card_of(torch.device("cuda", 3), "nccl") == torch.device("cuda", 3)


@pytest.mark.parametrize("door", ["fabric", "trainer"])
def test_four_ranks_on_the_one_card_of_a_machine(cards: Any, door: str) -> None:
    cards(1)
    settings: dict[str, Any] = {"tp": 2, "pp": 2, "parallel_devices": [CARD] * 4}

    def made(**more: Any) -> Any:
        if door == "fabric":
            return Fabric(
                accelerator="cuda", strategy=Goose3DFabricStrategy(**settings, **more)
            ).strategy
        strategy = Goose3DStrategy(**settings, **more)
        return Trainer(accelerator="cuda", strategy=strategy, logger=False).strategy

    strategy = made(process_group_backend="gloo")
    assert (strategy.num_processes, strategy.root_device) == (4, CARD)
    with pytest.raises(ConfigError, match=r"4 ranks share card 0 .*'nccl'"):
        made()


def test_a_rank_that_was_started_from_outside_takes_a_card_that_there_is(
    cards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards(1)
    for name, value in {"RANK": 2, "LOCAL_RANK": 2, "WORLD_SIZE": 4, "GROUP_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    strategy = Goose3DFabricStrategy(tp=2, pp=2, process_group_backend="gloo")
    fabric = Fabric(accelerator="cuda", devices=4, strategy=strategy)
    assert fabric.strategy.root_device == CARD
    with pytest.raises(ConfigError, match=r"4 ranks share card 0 \(4 ranks, 1 cards visible\)"):
        Fabric(accelerator="cuda", devices=4, strategy=Goose3DFabricStrategy(tp=2, pp=2))


@pytest.mark.parametrize(("backend", "bound"), [("gloo", False), ("nccl", True), (None, True)])
def test_only_a_backend_of_the_card_is_bound_to_it(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, bound: bool
) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(compat, "_init_dist_connection", lambda *_a, **kw: seen.update(kw))
    door = Door(build_config(1, 1), backend=backend)
    monkeypatch.setattr(door.runtime, "start", lambda *_args, **_kw: None)
    door.start(None, CARD, 1)
    assert seen["device_id"] == (CARD if bound else None)
