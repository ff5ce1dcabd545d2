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
    drop_compiled,
    embedding_backward,
    fresh_view,
    has_forward_hooks,
    hooks_of,
    inside_backward,
    is_compiled,
    is_compiled_wrapper,
    plain_functions,
    put_children,
    quiet_hooks,
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


def test_a_stage_runs_with_stand_ins_in_the_stack():
    stack = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Identity()])
    former, other = stack[0], torch.nn.Identity()
    put_children(stack, {"0": other})
    assert list(stack) == [other, stack[1]]
    assert [name for name, _ in stack.named_parameters()] == []
    put_children(stack, {"0": former})
    assert stack[0] is former


def test_compiled_modules_are_seen_and_can_be_let_go():
    module = torch.nn.Linear(1, 1)
    assert not is_compiled(module)
    module.compile(backend="eager")
    assert is_compiled(module)
    assert not is_compiled_wrapper(module)
    drop_compiled(module)
    assert not is_compiled(module)
    wrapper = torch.compile(module, backend="eager")
    assert is_compiled(wrapper)
    assert is_compiled_wrapper(wrapper)


def test_a_fresh_view_may_be_written_to_behind_a_function_of_ours():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return fresh_view(x * 2, [2, 3])

        @staticmethod
        def backward(_ctx, grad):
            return grad.reshape(6) * 2

    x = torch.ones(6, requires_grad=True)
    Doubled.apply(x).mul_(3).sum().backward()
    assert x.grad.tolist() == [6.0] * 6


@pytest.mark.parametrize("padding", [-1, 2])
def test_a_lookups_gradient_sums_its_rows(padding):
    ids = torch.tensor([[0, 2], [0, 3]])
    grad = torch.arange(8.0).reshape(2, 2, 2)
    found = embedding_backward(grad, ids, rows=5, padding=padding)
    rows = [[4.0, 6.0], [0.0, 0.0], [2.0, 3.0], [6.0, 7.0], [0.0, 0.0]]
    if padding == 2:
        rows[2] = [0.0, 0.0]
    assert found.tolist() == rows


class _Nothing(torch.autograd.Function):
    """Has a leaf in its graph and no gradient for it."""

    @staticmethod
    def forward(_ctx, x, leaf):
        return x + leaf

    @staticmethod
    def backward(_ctx, grad):
        return grad, None


def test_hooks_on_a_leaf_are_called_where_it_gets_nothing_unless_they_are_told():
    leaf, x = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen = []
    leaf.register_hook(lambda gradient: seen.append(gradient))
    leaf.register_post_accumulate_grad_hook(lambda _: seen.append("after"))
    _Nothing.apply(x, leaf).sum().backward()
    assert seen == [None, "after"], "torch calls them; if not, quiet_hooks is not needed any more"
    seen.clear()
    for _ in range(2):
        quiet_hooks(leaf)
        _Nothing.apply(x, leaf).sum().backward()
        assert seen == []
    (leaf * 3).sum().backward()
    assert [value if value == "after" else value.tolist() for value in seen] == [
        [3.0, 3.0],
        "after",
    ]


def test_hooks_are_seen_also_quiet_ones():
    leaf = torch.ones(1, requires_grad=True)
    assert hooks_of(leaf) == []
    before, after = (lambda gradient: None), (lambda _: None)
    leaf.register_hook(before)
    leaf.register_post_accumulate_grad_hook(after)
    assert hooks_of(leaf) == [before, after]
    quiet_hooks(leaf)
    assert hooks_of(leaf) == [before, after]


def test_quiet_hooks_still_change_gradients_and_can_be_removed():
    leaf = torch.ones(1, requires_grad=True)
    first = leaf.register_hook(lambda gradient: gradient * 10)
    after = leaf.register_post_accumulate_grad_hook(lambda _: seen.append(1))
    seen = []
    quiet_hooks(leaf)
    second = leaf.register_hook(lambda gradient: gradient + 1)
    quiet_hooks(leaf)
    (leaf * 2).backward()
    assert (leaf.grad.item(), seen) == (21.0, [1])
    for handle in (first, second, after):
        handle.remove()
    leaf.grad = None
    (leaf * 2).backward()
    assert (leaf.grad.item(), seen) == (2.0, [1])


def test_a_leaf_without_hooks_stays_without():
    leaf = torch.ones(1, requires_grad=True)
    quiet_hooks(leaf)
    assert not leaf._backward_hooks
