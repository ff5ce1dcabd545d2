"""The loss of a pipelined call: a number whose backward releases the call's gradients.

When a schedule has run, its gradients exist already. Written straight into ``p.grad`` they would
be lost to the next ``zero_grad``, which Lightning calls between forward and backward. The loss
returned to the user therefore carries one autograd node; ``loss.backward()`` reaches it with the
factor that the user's own arithmetic (``/ accumulate``, a sum of two losses) puts on the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

OnBackward = Callable[[Tensor], None]


class GooseRelease(torch.autograd.Function):
    """Identity of a loss; hands the gradient that arrives to a callback, once."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, loss: Tensor, on_backward: OnBackward) -> Tensor:
        """Return the loss; ``_anchor`` makes autograd track it."""
        ctx.on_backward = on_backward
        return loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        """Call back with the factor on the loss.

        Raises:
            RuntimeError: When called a second time.
        """
        on_backward: OnBackward | None = ctx.on_backward
        if on_backward is None:
            raise RuntimeError(
                "backward was called a second time on the loss of one pipelined call; its "
                "gradients were released by the first. Call the model again, or add the losses "
                "up before one backward."
            )
        # Dropped before the call: it owns the gradients, which may be handed over without a copy.
        ctx.on_backward = None
        on_backward(grads[0].detach())
        return None, None, None


def attach_loss(loss: Tensor, on_backward: OnBackward) -> Tensor:
    """Return a loss whose backward calls ``on_backward``.

    Args:
        loss: The value, a scalar.
        on_backward: Called once with the scalar gradient that arrives at the loss. It lives as
            long as the returned loss's graph: what it holds is freed with a loss that is dropped.

    Returns:
        A scalar equal to ``loss`` that requires a gradient.
    """
    release: Callable[..., Tensor] = GooseRelease.apply
    with torch.enable_grad():
        anchor = torch.zeros((), device=loss.device, requires_grad=True)
        return release(anchor, loss, on_backward)


def is_bridge_loss(tensor: Tensor) -> bool:
    """Tell whether a tensor is what :func:`attach_loss` returned."""
    return tensor.grad_fn is not None and _is_release(tensor.grad_fn)


def reaches_bridge(tensor: Tensor) -> bool:
    """Tell whether a backward from ``tensor`` would release the gradients of a pipelined call.

    Args:
        tensor: A loss, as the user hands it to ``backward``.

    Returns:
        Whether it comes from :func:`attach_loss`, directly or through further operations.
    """
    todo: list[Node | None] = [tensor.grad_fn]
    seen: set[Node] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if _is_release(node):
            return True
        seen.add(node)
        todo.extend(following for following, _ in node.next_functions)
    return False


def _is_release(node: Node) -> bool:
    return node.name() == f"{GooseRelease.__name__}Backward"
