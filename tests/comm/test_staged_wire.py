"""Messages through the host's memory: what plain ones promise, and every order of copies."""

from datetime import timedelta

import pytest
import torch

from goose_strategy.comm.p2p import StageLink
from goose_strategy.comm.staged_wire import StagedWire
from goose_strategy.mesh.layout import MeshLayout
from goose_strategy.mesh.mesh import ParallelMesh
from tests.comm import test_p2p as plain
from tests.comm.plants import PLANTS
from tests.harness.streams import FakeLane, staged
from tests.harness.world import run_ranks

PACES = ["late", "early"]
TRANSPORTS = [pytest.param(True, id="memory"), pytest.param(False, id="gloo")]


def _through_the_host(ctx, body, pace, *rest):
    with staged(FakeLane(pace)) as lane:
        result = body(ctx, *rest)
    return result, lane.copies


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
@pytest.mark.parametrize("pace", PACES)
def test_odd_tensors_arrive(pace, shared_memory):
    for kind, copies in run_ranks(_through_the_host, 2, plain._odd_tensors, pace, shared_memory):
        assert kind is StagedWire
        assert copies == 3 * len(plain.ODD)


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
@pytest.mark.parametrize("pace", PACES)
def test_receives_can_be_posted_early_and_waited_for_in_any_order(pace, shared_memory):
    found = run_ranks(_through_the_host, 2, plain._early, pace, shared_memory)
    (values, again), copies = found[1]
    assert values == [(3, 4), (0, 4), (1, 4), (5, 6), (2, 6), (4, 8)]
    assert again
    assert copies == len(values) + 1


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
@pytest.mark.parametrize("pace", PACES)
def test_sends_do_not_wait_for_the_receiver(pace, shared_memory):
    found = run_ranks(_through_the_host, 2, plain._both_send_first, pace, shared_memory)
    assert found == [(28.0, 16)] * 2


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
def test_other_shapes_are_an_error_that_names_both_sides(shared_memory):
    body = plain._disagree
    (_, _), (text, _) = run_ranks(_through_the_host, 2, body, "late", shared_memory, "x")
    assert "is [(7,) float32] on rank 0, which sends it, but [(8,) float32] on rank 1" in text


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
def test_a_wait_ends_at_the_deadline(shared_memory):
    _, (text, _) = run_ranks(
        _through_the_host, 2, plain._silence, "late", shared_memory, isolated=False
    )
    assert text.startswith("rank 1 waited for rank 0 for")


def _hazards(ctx, pace, shared_memory, plant):
    """Compute what is sent late, read what is received late; return whether anything was wrong."""
    lane = FakeLane(pace, computing="late")
    with staged(lane):
        mesh = ParallelMesh.create(
            MeshLayout.from_world(2, tp=1, pp=2),
            device=torch.device("cpu"),
            timeout=timedelta(seconds=30),
            shared_memory=shared_memory,
        )
    checks, kept = [], []
    try:
        link = StageLink(1 - ctx.rank, mesh.pp_forward)
        with PLANTS[plant](lane):
            for number in range(6):
                if ctx.rank == 0:
                    sent = torch.full((1024,), -1.0)
                    kept.append(sent)
                    lane.compute(lambda sent=sent, number=number: sent.fill_(number))
                    link.send([sent, sent[:1]], key="x")
                    # The sender may write to its tensor as soon as it computes again.
                    lane.compute(lambda sent=sent: sent.fill_(-3))
                else:
                    got = link.receive(key="x").wait()
                    new = torch.zeros(1024)
                    lane.compute(lambda got=got[0], new=new: new.copy_(got))
                    checks.append((new, torch.full((1024,), float(number)), got))
            link.flush()
            lane.finish()
    finally:
        mesh.close()
    return all(torch.equal(found, expected) for found, expected, _ in checks)


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
@pytest.mark.parametrize("pace", PACES)
def test_no_order_of_copies_spoils_a_message(pace, shared_memory):
    assert run_ranks(_hazards, 2, pace, shared_memory, "nothing") == [True, True]


@pytest.mark.parametrize(
    "plant",
    [
        "the copy down does not wait for the computation",
        "the host does not wait for the copy down",
        "the computation does not wait for the copy up",
        "memory is used again at once",
    ],
)
@pytest.mark.parametrize("shared_memory", TRANSPORTS)
def test_every_wait_is_needed(plant, shared_memory):
    assert run_ranks(_hazards, 2, "late", shared_memory, plant) == [True, False]


def _recycled(ctx, plant):
    """The allocator hands out memory for a received tensor that a computation still reads."""
    lane = FakeLane("early", computing="late")
    with staged(lane):
        mesh = ParallelMesh.create(
            MeshLayout.from_world(2, tp=1, pp=2),
            device=torch.device("cpu"),
            timeout=timedelta(seconds=30),
        )
    try:
        link = StageLink(1 - ctx.rank, mesh.pp_forward)
        if ctx.rank == 0:
            link.send([torch.ones(8)], key="x")
            return None
        with PLANTS[plant](lane):
            pending = link.receive(key="x")
            block, read = torch.full((8,), 5.0), torch.zeros(8)
            lane.compute(lambda: read.copy_(block))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.Tensor, "new_empty", lambda *_args, **_kw: block)
                (got,) = pending.wait()
            assert got is block
            lane.finish()
            return read.tolist(), got.tolist()
    finally:
        mesh.close()


@pytest.mark.parametrize(
    ("plant", "read"), [("nothing", 5.0), ("the copy up does not wait for the computation", 1.0)]
)
def test_received_tensors_wait_for_the_former_user_of_their_memory(plant, read):
    assert run_ranks(_recycled, 2, plant)[1] == ([read] * 8, [1.0] * 8)
