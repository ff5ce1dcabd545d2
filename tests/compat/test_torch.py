"""What breaks when torch moves its private APIs: each test names the user of one."""

from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from goose_strategy.compat.torch import (
    ShardedGradScaler,
    clone_store,
    default_store,
    has_forward_hooks,
    inside_backward,
    plain_functions,
    version_of,
)
from tests.harness.world import run_ranks


def _stores(ctx):
    store = default_store()
    clone = clone_store(store)
    if ctx.rank == 0:
        clone.set("goose/test", "here")
    dist.barrier()
    return store is clone, store.get("goose/test"), clone.check(["goose/absent"])


def test_the_watchdog_finds_the_ranks_store_and_opens_a_second_connection():
    assert run_ranks(_stores, 2) == [(False, b"here", False)] * 2


def test_without_a_world_there_is_no_store():
    with pytest.raises(RuntimeError, match="there is no default process group"):
        default_store()


class _Counted(torch.Tensor):
    calls: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(func.__name__)
        with plain_functions():
            return func(*args, **(kwargs or {}))


def test_a_guarded_parameter_calls_torch_without_coming_back_to_itself():
    tensor = torch.ones(2).as_subclass(_Counted)
    assert type(torch.add(tensor, 1)) is torch.Tensor
    assert _Counted.calls.count("add") == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_dropout_stream_knows_a_call_that_computes_again(reentrant):
    seen = []

    def compute(x):
        seen.append(inside_backward())
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    checkpoint(compute, x, use_reentrant=reentrant).sum().backward()
    assert seen == [False, True]
    assert not inside_backward()


def test_every_write_in_place_is_counted_through_any_view():
    whole = torch.zeros(4)
    part, copied = whole[:2], whole.clone()
    before = [version_of(tensor) for tensor in (whole, part, copied)]
    part.add_(1)
    after = [version_of(tensor) for tensor in (whole, part, copied)]
    assert [later > first for first, later in zip(before, after, strict=True)] == [
        True,
        True,
        False,
    ]
    with torch.inference_mode():
        assert version_of(torch.zeros(1)) == 0


def test_hooks_behind_a_forward_are_seen():
    module = torch.nn.Linear(1, 1)
    module.register_forward_pre_hook(lambda *_: None)
    assert not has_forward_hooks(module)
    handle = module.register_forward_hook(lambda *_: None, always_call=True)
    assert has_forward_hooks(module)
    handle.remove()
    assert not has_forward_hooks(module)


def test_a_scaler_hands_out_the_search_for_infinities():
    """`GradScaler._unscale_grads_`, its lazy `_scale`, and what fused optimizers are offered."""
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([param], lr=0.1, fused=True)
    asked = []

    def unscale(which, inverse):
        asked.append((which, inverse.item()))
        param.grad.mul_(inverse)
        return (~param.grad.isfinite().all()).float()

    user = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1, growth_factor=2.0)
    scaler = ShardedGradScaler.over(user, unscale)
    assert scaler.current(torch.device("cpu")) == 4.0
    kept = scaler.current(torch.device("cpu"))
    for factor, moves, scale in ((1.0, True, 8.0), (torch.inf, False, 4.0)):
        before = param.detach().clone()
        scaler.scale(param.sum() * factor).backward()
        assert scaler.step(optimizer) is None
        assert torch.equal(param, before) != moves
        scaler.update()
        assert scaler.get_scale() == scale
        optimizer.zero_grad()
    assert kept == 4.0, "an update leaves the number of an earlier call alone"
    assert asked == [(optimizer, 0.25), (optimizer, 0.125)]
    assert optimizer._step_supports_amp_scaling
    assert not hasattr(optimizer, "grad_scale")


def test_a_scaler_leaves_optimizers_to_torch_that_nobody_knows():
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([param], lr=1.0)
    user = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler = ShardedGradScaler.over(user, lambda which, inverse: None)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    assert param.tolist() == [0.0] * 4
    disabled = ShardedGradScaler.over(torch.amp.GradScaler("cpu", enabled=False), lambda *_: None)
    assert disabled.current(torch.device("cpu")) is None
