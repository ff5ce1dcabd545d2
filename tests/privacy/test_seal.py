"""Clipped sums that anybody touched before they had their noise are not stepped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from goose_strategy.errors import PrivacyError
from goose_strategy.privacy.seal import refuse_hooks
from tests.harness.models import batches
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.privacy.oracle import PrivateCase, start

BATCH = batches(1, batch_size=4)[0]
CASE = PrivateCase(tied=True)

Touch = Callable[[list[torch.nn.Parameter]], Any]


def scaled(params: list[torch.nn.Parameter]) -> None:
    for param in params:
        assert param.grad is not None
        param.grad.mul_(100)


def clipped_by_hand(params: list[torch.nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(params, 1e-3)


def replaced(params: list[torch.nn.Parameter]) -> None:
    assert params[3].grad is not None
    params[3].grad = params[3].grad * 2


def zeroed(params: list[torch.nn.Parameter]) -> None:
    torch.optim.SGD(params, lr=0.1).zero_grad(set_to_none=False)


def dropped(params: list[torch.nn.Parameter]) -> None:
    params[3].grad = None


def read(params: list[torch.nn.Parameter]) -> None:
    sum(float(param.grad.norm()) for param in params if param.grad is not None)


TOUCHES: dict[str, tuple[Touch, bool]] = {
    "scaled": (scaled, True),
    "clipped by hand": (clipped_by_hand, True),
    "replaced": (replaced, True),
    "zeroed": (zeroed, True),
    "dropped": (dropped, False),
    "read": (read, False),
}


def touch_and_step(ctx: Context) -> dict[str, str]:
    found = {}
    for name, (touch, _) in TOUCHES.items():
        runtime, handle, optimizer = start(CASE)
        try:
            loss = handle.module(**BATCH).loss
            with runtime.backward(loss):
                loss.backward()
            before = [param.detach().clone() for param in handle.module.parameters()]
            touch([param for param in handle.module.parameters() if param.requires_grad])
            optimizer.step()
            found[name] = "stepped"
        except PrivacyError as error:
            after = handle.module.parameters()
            same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            found[name] = str(error) if same else "stepped half"
        finally:
            runtime.stop()
    return found


def test_gradients_that_were_written_to_are_not_stepped() -> None:
    found = run_ranks(touch_and_step, 1)[0]
    for name, (_, refused) in TOUCHES.items():
        if refused:
            assert "were written to between the backward and" in found[name], name
        else:
            assert found[name] == "stepped", name


def of_the_package() -> Callable[[Tensor], None]:
    from goose_strategy.privacy.noise import fresh_root

    return fresh_root  # type: ignore[return-value]


def test_hooks_of_others_are_refused_by_name() -> None:
    weight = torch.zeros(2, requires_grad=True)
    weight.register_hook(of_the_package())
    refuse_hooks({"weight": weight})
    handle = weight.register_hook(scaled)  # type: ignore[arg-type]
    with pytest.raises(PrivacyError, match=r"weight has a hook \(scaled, by register_hook"):
        refuse_hooks({"weight": weight})
    handle.remove()
    weight.register_post_accumulate_grad_hook(scaled)  # type: ignore[arg-type]
    with pytest.raises(PrivacyError, match="remove the hook"):
        refuse_hooks({"weight": weight})
