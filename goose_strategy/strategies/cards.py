"""Which card a rank computes on, and whether the backend can connect ranks that share one.

Lightning gives every rank a card of its own: it refuses a list of devices with a card twice, and a
number of devices larger than that of the cards. ``parallel_devices`` of a strategy is taken as it
is, and so are the devices of a process that was started from outside; both are handled here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from goose_strategy.errors import ConfigError
from goose_strategy.strategies import compat


def backend_for(backend: str | None, device: torch.device) -> str:
    """Return the backend that connects tensors of ``device``, e.g. ``"nccl"``.

    Args:
        backend: As ``process_group_backend``: a name, names by device type
            (``"cpu:gloo,cuda:nccl"``), or ``None`` for the device's default.
        device: The device.
    """
    name = backend or compat.default_backend(device)
    if ":" in name:
        named = dict(part.strip().split(":", 1) for part in name.split(","))
        name = named.get(device.type, "")
    return name.lower()


def check_cards(devices: Sequence[torch.device] | None, backend: str | None) -> None:
    """Refuse ranks that share a card where the backend cannot connect them.

    Args:
        devices: The device of each rank on this machine; ``None`` while they are unknown.
        backend: As ``process_group_backend``.

    Raises:
        ConfigError: If they share one and the backend is not gloo; the message says how many and
            what to change.
    """
    cards = [card for card in devices or () if card.type == "cuda"]
    if not cards or backend_for(backend, cards[0]) == "gloo":
        return
    visible = torch.cuda.device_count()
    shared = Counter(_index(card, visible) for card in cards)
    card, ranks = max(shared.items(), key=lambda item: item[1])
    if ranks > 1:
        raise ConfigError(
            f"{ranks} ranks share card {card} ({len(cards)} ranks, {visible} cards visible) with "
            f"process_group_backend={backend_for(backend, cards[0])!r}: NCCL refuses more than one "
            "rank on a card. Use as many ranks as there are cards, or "
            "process_group_backend='gloo', which goes through the host's memory."
        )


def card_of(device: torch.device, backend: str | None) -> torch.device:
    """Return the card that stands for ``device``: itself, or with gloo one that there is.

    Args:
        device: What Lightning counted up to, ``cuda:3`` for the fourth rank even of one card.
        backend: As ``process_group_backend``.
    """
    if device.type != "cuda" or backend_for(backend, device) != "gloo":
        return device
    return torch.device("cuda", _index(device, torch.cuda.device_count()))


def _index(card: torch.device, visible: int) -> int:
    index = 0 if card.index is None else card.index
    return index % visible if visible else index
