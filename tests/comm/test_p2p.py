"""Stage links over both transports: order, headers, early receives, odd tensors."""

import time
from datetime import timedelta

import pytest
import torch

from goose_strategy.comm.mailbox import Mailbox
from goose_strategy.comm.p2p import StageLink, metas_of
from goose_strategy.comm.wire import Wire
from goose_strategy.errors import PeerError, ScheduleError
from goose_strategy.mesh.layout import MeshLayout
from goose_strategy.mesh.mesh import ParallelMesh
from tests.harness.world import run_ranks

TRANSPORTS = [pytest.param(True, id="memory"), pytest.param(False, id="gloo")]
ODD = [
    torch.arange(6.0).view(2, 3).t(),
    torch.zeros(0, 4),
    torch.ones(3, dtype=torch.bool),
    torch.tensor(7, dtype=torch.int64),
    torch.arange(5, dtype=torch.bfloat16).requires_grad_(),
]


def _mesh(ctx, shared_memory, timeout_s=30.0):
    return ParallelMesh.create(
        MeshLayout.from_world(ctx.world_size, tp=1, pp=ctx.world_size),
        device=torch.device("cpu"),
        timeout=timedelta(seconds=timeout_s),
        shared_memory=shared_memory,
    )


def _odd_tensors(ctx, shared_memory):
    mesh = _mesh(ctx, shared_memory)
    try:
        link = StageLink(1 - ctx.rank, mesh.pp_forward)
        kind = type(link._wire)
        if ctx.rank == 0:
            for _ in range(3):
                link.send(ODD, key="odd")
            link.send([], key="nothing").wait()
            link.flush()
            link.flush()
            return kind
        for _ in range(3):
            got = link.receive(key="odd").wait()
            assert metas_of(got) == metas_of(ODD)
            for found, wanted in zip(got, ODD, strict=True):
                assert torch.equal(found, wanted)
                assert found.is_contiguous()
                assert not found.requires_grad
        assert link.receive(key="nothing", expected=()).wait() == ()
        return kind
    finally:
        mesh.close()


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
def test_odd_tensors_arrive(shared_memory):
    kind = Mailbox if shared_memory else Wire
    assert run_ranks(_odd_tensors, 2, shared_memory) == [kind, kind]


def _early(ctx, shared_memory):
    """All receives are posted before anything is sent, with new keys between known ones."""
    mesh = _mesh(ctx, shared_memory)
    try:
        link = StageLink(1 - ctx.rank, mesh.pp_forward)
        keys = [("h", size) for size in (4, 4, 6, 4, 8, 6)]
        if ctx.rank == 1:
            pending = [link.receive(key=key) for key in keys]
            back = StageLink(0, mesh.pp_backward)
            back.send([torch.zeros(1)])
            values = [pending[index].wait()[0] for index in (3, 0, 1, 5, 2, 4)]
            again = pending[3].wait()[0] is values[0]
            back.flush()
            return [(int(v[0]), v.numel()) for v in values], again
        StageLink(1, mesh.pp_backward).post_receive([(1,)], [torch.float32]).wait()
        for index, key in enumerate(keys):
            link.send([torch.full((key[1],), float(index))], key=key)
        link.flush()
        return None
    finally:
        mesh.close()


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
def test_receives_can_be_posted_early_and_waited_for_in_any_order(shared_memory):
    _, (values, again) = run_ranks(_early, 2, shared_memory)
    assert values == [(3, 4), (0, 4), (1, 4), (5, 6), (2, 6), (4, 8)]
    assert again


def _both_send_first(ctx, shared_memory):
    """Sends do not wait for their receivers, however much is under way."""
    mesh = _mesh(ctx, shared_memory)
    try:
        link = StageLink(1 - ctx.rank, mesh.pp_forward)
        sent = [link.send([torch.full((200_000,), float(i))], key="big") for i in range(8)]
        total = sum(float(link.receive(key="big").wait()[0][-1]) for _ in range(8))
        for pending in sent:
            pending.wait()
        return total
    finally:
        mesh.close()


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
def test_sends_do_not_wait(shared_memory):
    assert run_ranks(_both_send_first, 2, shared_memory) == [28.0, 28.0]


def _caught(action, kind):
    try:
        action()
    except kind as err:
        return str(err)
    return "no error"


def _disagree(ctx, shared_memory, key):
    mesh = _mesh(ctx, shared_memory)
    try:
        link = StageLink(1 - ctx.rank, mesh.pp_forward)
        if ctx.rank == 0:
            pending = link.send([torch.ones(7)], key="x")
            back = StageLink(1, mesh.pp_backward).receive(key="done").wait()
            del pending, back
            return None
        receive = link.post_receive([(8,)], [torch.float32], key=key)
        text = _caught(receive.wait, ScheduleError)
        StageLink(0, mesh.pp_backward).send([torch.ones(1)], key="done").wait()
        return text
    finally:
        mesh.close()


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
def test_other_shapes_are_an_error_that_names_both_sides(shared_memory):
    _, text = run_ranks(_disagree, 2, shared_memory, "x")
    assert text.startswith(
        "the message 'x' is [(7,) float32] on rank 0, which sends it, but [(8,) float32] on rank "
        "1, which receives it"
    )


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
def test_another_key_is_an_error(shared_memory):
    _, text = run_ranks(_disagree, 2, shared_memory, "y")
    assert "'y'" in text
    assert "(7,) float32" in text


def _one_key_two_shapes(ctx):
    mesh = _mesh(ctx, shared_memory=True)
    try:
        link = StageLink(1 - ctx.rank, mesh.pp_forward)
        link.send([torch.ones(2)], key="k")
        sending = _caught(lambda: link.send([torch.ones(3)], key="k"), ScheduleError)
        link.post_receive([(2,)], [torch.float32], key="k").wait()
        receiving = _caught(
            lambda: link.post_receive([(3,)], [torch.float32], key="k"), ScheduleError
        )
        return sending, receiving
    finally:
        mesh.close()


def test_a_key_fixes_the_shapes():
    for sending, receiving in run_ranks(_one_key_two_shapes, 2):
        assert "key='k' was [(2,) float32] when it was first sent" in sending
        assert "and is [(3,) float32] now" in sending
        assert "the message 'k' is [(2,) float32]" in receiving


def _silence(ctx, shared_memory):
    mesh = _mesh(ctx, shared_memory)
    try:
        if ctx.rank == 0:
            time.sleep(2.0)
            return None
        link = StageLink(0, mesh.pp_forward, deadline=timedelta(seconds=1))
        return _caught(lambda: link.receive(key="late").wait(), PeerError)
    finally:
        mesh.close()


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
def test_a_wait_ends_at_the_deadline_and_says_who_waited_for_whom(shared_memory):
    _, text = run_ranks(_silence, 2, shared_memory, isolated=False)
    assert text.startswith("rank 1 waited for rank 0 for")
    assert "'late' on pp_forward, which is silent for 1 s" in text or "imed out" in text


def test_two_links_share_one_mailbox():
    run_ranks(_two_links, 2)


def _two_links(ctx):
    mesh = _mesh(ctx, shared_memory=True)
    try:
        one = StageLink(1 - ctx.rank, mesh.pp_forward)
        two = StageLink(1 - ctx.rank, mesh.pp_forward)
        one.send([torch.ones(1)], key="a")
        two.send([torch.ones(2)], key="b")
        assert two.receive(key="a").wait()[0].numel() == 1
        assert one.receive(key="b").wait()[0].numel() == 2
    finally:
        mesh.close()
