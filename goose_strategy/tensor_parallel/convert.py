"""Turning a module into its tensor-parallel class and back, in place.

A new module in the old one's place would lose the hooks and the references that others hold. As
FSDP2's ``fully_shard`` does, the class of the module is swapped; the parameters stay the same
objects, with less data.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import nn

from goose_strategy.compat.transformers import is_linear_twin
from goose_strategy.errors import PlanError

if TYPE_CHECKING:
    from goose_strategy.grads.store import WeightGradStore


class Converted:
    """Base of the classes that a plain module is turned into.

    Attributes:
        plain: The class that may be converted.
        former: The class that `restore` gives the module back: ``plain``, or one that computes
            the same (Falcon's).
        defers: Whether its weight's gradient can be computed later.
        weight_gradients: Where it is left then; see `goose_strategy.tensor_parallel.defer`.
    """

    plain: ClassVar[type[nn.Module]]
    defers: ClassVar[bool] = False
    former: type[nn.Module] | None = None
    weight_gradients: WeightGradStore | None = None

    @classmethod
    def check(cls, name: str, module: nn.Module) -> None:
        """Check that ``module`` computes what this class knows how to cut.

        Raises:
            PlanError: If it is another class (quantised, wrapped), or its forward was replaced.
        """
        if type(module) is not cls.plain and not is_linear_twin(type(module)):
            raise PlanError(
                f"{name}={type(module).__name__} cannot be cut: tensor parallelism needs a plain "
                f"torch.nn.{cls.plain.__name__} there. Set the model up before it is quantised or "
                f"wrapped, or use tp=1.",
                axis="tp",
            )
        if "forward" in vars(module):
            raise PlanError(
                f"{name}.forward was replaced on the instance, so cutting the layer would have no "
                f"effect; remove the patch (accelerate's hooks, for one) before the set-up.",
                axis="tp",
            )

    @classmethod
    def adopt(cls, module: nn.Module, **attributes: object) -> Self:
        """Give ``module`` this class and these attributes."""
        converted: Any = module
        former = type(module)
        converted.__class__ = cls
        converted.former = former
        for name, value in attributes.items():
            setattr(converted, name, value)
        result: Self = converted
        return result

    def restore(self) -> None:
        """Give the module its plain class back; its parameters are left as they are."""
        module: Any = self
        former = self.former or self.plain
        for name in cls_attributes(type(self)):
            vars(module).pop(name, None)
        module.__class__ = former


def cls_attributes(cls: type) -> list[str]:
    """Return the names of the attributes that ``cls`` adds to an instance."""
    own = [base for base in cls.__mro__ if issubclass(base, Converted)]
    names = {name for base in own for name in inspect.get_annotations(base)}
    return sorted(names - {"plain", "defers", "weight", "bias"})
