"""Settings of private training, checked before any process group exists.

Opacus takes the same numbers in ``PrivacyEngine.make_private``, which wraps the model, the
optimizer and the loader; here they belong to the strategy, and nothing of the user's is wrapped.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from typing import Literal

from goose_strategy.errors import ConfigError
from goose_strategy.validate import at_least, flag, is_number, one_of, whole

Clipping = Literal["flat", "per_stage", "automatic"]
Sampling = Literal["poisson", "truncated_poisson", "none"]

FLOOR = 1e-6
"""Added to every norm before it divides, as Opacus does."""
AUTOMATIC_FLOOR = 0.01
"""The same for ``clipping="automatic"`` (Bu et al. 2022, arXiv:2206.07136)."""


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """How training is made differentially private. The unit of privacy is one row of a batch.

    Attributes:
        max_grad_norm: The norm to which each sample's gradient, over the whole model, is clipped:
            the sensitivity ``C``.
        noise_multiplier: Standard deviation of the noise on the sum of clipped gradients, in units
            of ``max_grad_norm``; or leave it to ``target_epsilon``.
        target_epsilon: Choose the noise so that ``steps`` steps cost this much at ``target_delta``.
        target_delta: The ``delta`` of ``target_epsilon`` and of what is reported.
        steps: Number of steps planned, those before a resume included; needed with
            ``target_epsilon``. None comes after them.
        logical_batch_size: Expected number of samples in a step, ``L``, by which the noisy sum is
            divided. It is public; the actual number is not.
        clipping: ``"flat"`` clips the gradient of the whole model; ``"automatic"`` scales every
            gradient to nearly that norm; ``"per_stage"`` clips the part of every pipeline rank to
            ``max_grad_norm / sqrt(pp)``, which waits for no other rank and is another mechanism of
            the same epsilon.
        norm: How the norms of large layers are computed: ``"mixed"`` takes the cheaper way for each
            layer, ``"ghost"`` products of tokens, ``"instantiate"`` the gradients themselves.
        tied: For a weight that the embedding and the head share: its ``"exact"`` norm, or a
            ``"bound"`` that is never smaller and needs no message between the stages.
        sampling: ``"poisson"``; ``"truncated_poisson"``, which never draws more than
            ``max_batch_size`` samples; ``"none"`` takes the batches as they come, and then no
            epsilon is known.
        max_batch_size: Most samples of a step with ``sampling="truncated_poisson"``.
        accountant: ``"prv"``, ``"rdp"`` or ``"gdp"``, all of Opacus.
        secure: Draw the noise from a cryptographic generator, every number as a sum of four, so
            that its last bits tell less. Needs the package ``cryptography``.
        extra_inflight: Microbatches that a pipeline rank may hold in addition, which hides the sum
            of the norms.
        noise_seed: For tests only: seeds noise and sampling, so that they are known to whoever
            knows the seed. Nothing is private then.
        allow_privacy_change: Let a resumed run have other settings than its checkpoint. The steps
            of both count with their own; after steps of which no epsilon is known, none is claimed.
    """

    max_grad_norm: float = 1.0
    logical_batch_size: int = 1024
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    target_delta: float | None = None
    steps: int | None = None
    clipping: Clipping = "flat"
    norm: Literal["mixed", "ghost", "instantiate"] = "mixed"
    tied: Literal["exact", "bound"] = "exact"
    sampling: Sampling = "poisson"
    max_batch_size: int | None = None
    accountant: Literal["prv", "rdp", "gdp"] = "prv"
    secure: bool = False
    extra_inflight: int = 1
    noise_seed: int | None = None
    allow_privacy_change: bool = False

    def __post_init__(self) -> None:
        """Check every setting that needs no model.

        Raises:
            ConfigError: Naming the setting, its value and what is allowed.
        """
        # ``not x > 0`` also refuses NaN.
        if not is_number(self.max_grad_norm) or not self.max_grad_norm > 0:
            raise ConfigError(
                f"max_grad_norm={self.max_grad_norm!r} must be greater than 0; choose about the "
                "norm of one sample's gradient, for example 1.0."
            )
        whole(logical_batch_size=self.logical_batch_size, extra_inflight=self.extra_inflight)
        at_least(1, logical_batch_size=self.logical_batch_size)
        at_least(0, extra_inflight=self.extra_inflight)
        one_of(("flat", "per_stage", "automatic"), clipping=self.clipping)
        one_of(("mixed", "ghost", "instantiate"), norm=self.norm)
        one_of(("exact", "bound"), tied=self.tied)
        one_of(("poisson", "truncated_poisson", "none"), sampling=self.sampling)
        one_of(("prv", "rdp", "gdp"), accountant=self.accountant)
        flag(secure=self.secure, allow_privacy_change=self.allow_privacy_change)
        if self.noise_seed is not None:
            whole(noise_seed=self.noise_seed)
        self._check_noise()
        self._check_sampling()
        for package, wanted in (
            ("opacus", self.sampling != "none"),
            ("cryptography", self.secure),
        ):
            if wanted and importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"privacy=... needs the package {package}: pip install "
                    "'goose-strategy[privacy]'."
                )
        if self.secure and self.noise_seed is not None:
            raise ConfigError(
                f"noise_seed={self.noise_seed} makes the noise known, secure=True shall keep it "
                "secret; leave one of them out."
            )

    @property
    def is_private(self) -> bool:
        """Whether an epsilon can be claimed."""
        return self.sampling != "none" and self.noise_seed is None

    @property
    def floor(self) -> float:
        """What is added to a norm before it divides."""
        return AUTOMATIC_FLOOR if self.clipping == "automatic" else FLOOR

    def _check_noise(self) -> None:
        sigma, epsilon = self.noise_multiplier, self.target_epsilon
        if (sigma is None) == (epsilon is None):
            raise ConfigError(
                f"noise_multiplier={sigma!r}, target_epsilon={epsilon!r}: give exactly one of them."
            )
        if sigma is not None and not (is_number(sigma) and sigma >= 0 and math.isfinite(sigma)):
            raise ConfigError(f"noise_multiplier={sigma!r} must be a number of at least 0.")
        if math.isinf(self.max_grad_norm) and sigma != 0:
            raise ConfigError(
                "max_grad_norm=inf clips nothing, so no noise is enough; choose a finite norm, or "
                "noise_multiplier=0 for training without privacy."
            )
        delta = self.target_delta
        if delta is not None and not (is_number(delta) and 0 < delta < 1):
            raise ConfigError(
                f"target_delta={delta!r} must lie between 0 and 1; choose less than one over the "
                "number of samples, for example 1e-6."
            )
        if self.steps is not None:
            whole(steps=self.steps)
            at_least(1, steps=self.steps)
        if epsilon is None:
            return
        if not is_number(epsilon) or not epsilon > 0 or delta is None or self.steps is None:
            raise ConfigError(
                f"target_epsilon={epsilon!r} needs to be greater than 0, and target_delta and "
                f"steps beside it; target_delta={delta!r}, steps={self.steps!r}."
            )
        if self.sampling == "none":
            raise ConfigError(
                f"target_epsilon={epsilon!r} cannot be met with sampling='none', for which no "
                "epsilon is known; choose sampling='poisson', or give a noise_multiplier."
            )

    def _check_sampling(self) -> None:
        most = self.max_batch_size
        if (most is not None) != (self.sampling == "truncated_poisson"):
            raise ConfigError(
                f"max_batch_size={most!r} with sampling={self.sampling!r}: "
                "sampling='truncated_poisson' needs a max_batch_size, other sampling takes none."
            )
        if most is not None:
            whole(max_batch_size=most)
            at_least(self.logical_batch_size, max_batch_size=most)
