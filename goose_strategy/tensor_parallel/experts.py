"""A mixture's experts with each expert's width cut over tp.

transformers keeps all experts of a layer in two stacked parameters and chooses at run time how to
multiply them (a loop, grouped or batched matrix products). Here the module and that choice stay:
the parameters are cut, and hooks copy what goes in and sum what comes out. The router stays whole;
the weights it gives to the experts meet this rank's share of each expert only, so their gradients
are summed on the way back, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from goose_strategy.errors import PlanError
from goose_strategy.tensor_parallel.regions import enter_island, leave_island

if TYPE_CHECKING:
    from goose_strategy.tensor_parallel.slicing import Slicer

GATE_UP, DOWN = "gate_up_proj", "down_proj"
_STACKED = 3


def expert_dims(module: nn.Module) -> dict[str, int]:
    """Return the dimension along which each stacked matrix of a module of experts is cut.

    Most models multiply by the transposed matrices as ``nn.Linear`` does, some (Llama 4, Aria) by
    the matrices as they are.

    Returns:
        Name of the parameter -> dimension; empty if the module does not hold such matrices.
    """
    shapes = {key: tuple(param.shape) for key, param in module.named_parameters()}
    gate_up, down = shapes.get(GATE_UP, ()), shapes.get(DOWN, ())
    if not (len(gate_up) == len(down) == _STACKED and shapes.keys() == {GATE_UP, DOWN}):
        return {}
    experts, first, second = down
    if gate_up == (experts, 2 * second, first):
        return {GATE_UP: 1, DOWN: 2}
    if gate_up == (experts, second, 2 * first):
        return {GATE_UP: 2, DOWN: 1}
    return {}


def check_experts(name: str, module: nn.Module, tp: int = 1) -> None:
    """Check that a module holds experts as they are cut here.

    Args:
        name: Name of the module, for messages.
        module: Holds ``gate_up_proj [experts, 2 * width, hidden]`` and
            ``down_proj [experts, hidden, width]``, or both with the last two dimensions swapped.
        tp: Has to divide the width.

    Raises:
        PlanError: If it holds something else, or tp does not divide the width.
    """
    dims = expert_dims(module)
    if not dims:
        shapes = {key: tuple(param.shape) for key, param in module.named_parameters()}
        raise PlanError(
            f"{name}={type(module).__name__} holds {shapes}; experts can be cut that hold "
            f"{GATE_UP} [experts, 2 * width, hidden] and {DOWN} [experts, hidden, width] only, or "
            "both transposed. Give it the style 'replicated' in TensorConfig(rules=...), or use "
            "tp=1.",
            axis="tp",
        )
    width = module.get_parameter(DOWN).shape[dims[DOWN]]
    if width % tp:
        raise PlanError(
            f"tp={tp} does not divide the width of {name}, {width}; choose a divisor of it.",
            axis="tp",
        )


def cut_experts(module: nn.Module, slicer: Slicer, group: ProcessGroup) -> list[RemovableHandle]:
    """Cut the stacked parameters in place and hook the module.

    Args:
        module: What `check_experts` accepts.
        slicer: Cuts the parameters.
        group: The tensor-parallel group.

    Returns:
        Handles of the hooks.
    """
    dims = expert_dims(module)
    slicer.cut(module.get_parameter(GATE_UP), dims[GATE_UP], packed=(1, 1))
    slicer.cut(module.get_parameter(DOWN), dims[DOWN])

    def enter(_module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return (
            tuple(_entered(value, group) for value in args),
            {key: _entered(value, group) for key, value in kwargs.items()},
        )

    def leave(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        # Summed in place, which a view of something else would not allow.
        return leave_island(output.clone() if output._is_view() else output, group)  # noqa: SLF001

    return [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave),
    ]


def _entered(value: Any, group: ProcessGroup) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return enter_island(value, group) if is_float else value
