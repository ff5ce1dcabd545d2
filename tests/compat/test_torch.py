"""What breaks when torch moves its private APIs: each test names the user of one."""

from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from goose_strategy.compat.torch import (
    clone_store,
    default_store,
    drop_compiled,
    has_forward_hooks,
    inside_backward,
    is_compiled,
    is_compiled_wrapper,
    plain_functions,
    put_children,
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
