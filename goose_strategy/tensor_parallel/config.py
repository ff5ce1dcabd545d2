"""Settings of tensor parallelism: plain values that a command line can show."""

from __future__ import annotations

from dataclasses import dataclass, field

from goose_strategy.errors import ConfigError
from goose_strategy.tensor_parallel.plan import Style
from goose_strategy.validate import flag, one_of


@dataclass(frozen=True, kw_only=True)
class TensorConfig:
    """How models are cut over the tensor-parallel ranks.

    Args:
        gather_logits: Put the logits of the whole vocabulary into the model's output even when
            labels are passed. The loss itself needs this rank's slice of the vocabulary only, so
            by default ``output.logits`` is ``None`` when labels are passed. Without labels the
            logits are always whole.
        allow_replicated_attention: Where tp does not divide a model's heads, keep attention whole
            on every rank (its weights, its work and its memory) and cut the rest of each layer.
            Refused by default, with the sizes that work.
        verify_plan: Try a plan that is not one of the proved families' out before it is used: a
            clone of the model with as few layers as have every kind in them, cut and uncut, must
            agree in every gradient. It takes the memory and time of these layers once.
        deduce_plan: Where neither this package nor transformers has a plan for a model that is
            exact, look for one: linear layers that belong together are found in one forward, and
            what a clone then shows to be exact is cut. Which parts stay whole on every rank is
            logged. Off, such models are refused. Needs ``verify_plan``, and no ``rules``.
        rules: Rules laid over the family's plan: a module or parameter name with ``*`` for layer
            numbers -> ``"column"``, ``"row"``, ``"vocab"``, ``"head"``, ``"experts"``,
            ``"gathered"``, ``"split"``, ``"partial"`` or ``"replicated"`` (see `Style`).

    Raises:
        ConfigError: If a switch is no ``bool``, or a rule names an unknown style.
    """

    gather_logits: bool = False
    allow_replicated_attention: bool = False
    verify_plan: bool = True
    deduce_plan: bool = True
    rules: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the values."""
        flag(
            gather_logits=self.gather_logits,
            allow_replicated_attention=self.allow_replicated_attention,
            verify_plan=self.verify_plan,
        )
        if not isinstance(self.rules, dict):
            raise ConfigError(
                f"rules={self.rules!r} must map names of modules to styles, such as "
                "{'model.layers.*.mlp.up_proj': 'column'}."
            )
        for pattern, style in self.rules.items():
            one_of([known.value for known in Style], **{f"rules[{pattern!r}]": style})
