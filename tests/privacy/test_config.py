"""Every setting is checked before anything is started."""

from __future__ import annotations

import dataclasses
import math
from typing import Any
from unittest.mock import patch

import pytest

from goose_strategy.errors import ConfigError
from goose_strategy.optim.config import ZeroConfig
from goose_strategy.privacy.config import AUTOMATIC_FLOOR, FLOOR, PrivacyConfig
from goose_strategy.runtime.settings import RuntimeConfig

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_grad_norm": 0.0}, "max_grad_norm=0.0"),
    ({"max_grad_norm": math.nan}, "max_grad_norm=nan"),
    ({"max_grad_norm": math.inf}, "max_grad_norm=inf"),
    ({"noise_multiplier": None}, "exactly one"),
    ({"target_epsilon": 3.0}, "exactly one"),
    ({"noise_multiplier": -1.0}, "noise_multiplier=-1.0"),
    ({"noise_multiplier": math.nan}, "noise_multiplier=nan"),
    ({"logical_batch_size": 0}, "logical_batch_size=0"),
    ({"logical_batch_size": 2.5}, "logical_batch_size=2.5"),
    ({"extra_inflight": -1}, "extra_inflight=-1"),
    ({"clipping": "layer"}, "clipping='layer'"),
    ({"norm": "fast"}, "norm='fast'"),
    ({"tied": "no"}, "tied='no'"),
    ({"sampling": "shuffled"}, "sampling='shuffled'"),
    ({"accountant": "moments"}, "accountant='moments'"),
    ({"target_delta": 1.0}, "target_delta=1.0"),
    ({"steps": 0}, "steps=0"),
    ({"max_batch_size": 2000}, "max_batch_size=2000"),
    ({"sampling": "truncated_poisson"}, "max_batch_size=None"),
    ({"sampling": "truncated_poisson", "max_batch_size": 8}, "max_batch_size=8"),
    ({"noise_multiplier": None, "target_epsilon": 3.0}, "target_delta and steps"),
    (
        {
            "noise_multiplier": None,
            "target_epsilon": 3.0,
            "target_delta": 1e-5,
            "steps": 10,
            "sampling": "none",
        },
        "cannot be met",
    ),
    ({"secure": True, "noise_seed": 1}, "noise_seed=1"),
    ({"secure": "no"}, "secure='no' must be true or false"),
    ({"allow_privacy_change": 1}, "allow_privacy_change=1 must be true or false"),
    ({"noise_seed": "a"}, "noise_seed='a' must be a whole number"),
    ({"max_grad_norm": "1"}, "max_grad_norm='1' must be greater than 0"),
    ({"noise_multiplier": "1"}, "noise_multiplier='1' must be a number"),
    ({"noise_multiplier": True}, "noise_multiplier=True must be a number"),
    ({"target_delta": "1e-5"}, "target_delta='1e-5' must lie between"),
]


@pytest.mark.parametrize(("settings", "match"), WRONG, ids=[match for _, match in WRONG])
def test_a_wrong_setting_is_named(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        PrivacyConfig(**{"noise_multiplier": 1.0, **settings})


def test_good_settings() -> None:
    assert PrivacyConfig(noise_multiplier=1.0).is_private
    assert not PrivacyConfig(noise_multiplier=1.0, sampling="none").is_private
    assert not PrivacyConfig(noise_multiplier=1.0, noise_seed=3).is_private
    assert PrivacyConfig(noise_multiplier=1.0).floor == FLOOR
    assert PrivacyConfig(noise_multiplier=1.0, clipping="automatic").floor == AUTOMATIC_FLOOR
    PrivacyConfig(noise_multiplier=0.0, max_grad_norm=math.inf)
    PrivacyConfig(target_epsilon=2.0, target_delta=1e-6, steps=100)
    PrivacyConfig(
        noise_multiplier=1.0,
        logical_batch_size=8,
        sampling="truncated_poisson",
        max_batch_size=16,
    )


@pytest.mark.parametrize(
    ("package", "settings"), [("opacus", {}), ("cryptography", {"secure": True})]
)
def test_a_missing_package_is_named(package: str, settings: dict[str, Any]) -> None:
    with (
        patch("importlib.util.find_spec", lambda name: None if name == package else object()),
        pytest.raises(ConfigError, match=f"needs the package {package}"),
    ):
        PrivacyConfig(noise_multiplier=1.0, **settings)


def test_settings_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PrivacyConfig(noise_multiplier=1.0).max_grad_norm = 2.0  # type: ignore[misc]


@pytest.mark.parametrize("name", ["grads", "wire"])
def test_sums_in_bf16_are_refused(name: str) -> None:
    zero = ZeroConfig(**{name: "bf16"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{name}='bf16'"):
        RuntimeConfig(zero=zero, privacy=PrivacyConfig(noise_multiplier=1.0))
    RuntimeConfig(zero=zero)
