"""The waits of the staged transport, each taken away: what a test must notice."""

from contextlib import nullcontext
from unittest.mock import patch

from goose_strategy.comm.crossing import Crossing
from goose_strategy.mesh.lane import PinnedPool


def _no_wait(row):
    return patch.object(row, "wait_event", lambda _event: None)


def _without(name):
    return lambda _lane: patch.object(Crossing, name, lambda _self: None)


def _used_at_once(_lane):
    give = PinnedPool.give
    return patch.object(PinnedPool, "give", lambda pool, buffer, _event: give(pool, buffer, None))


PLANTS = {
    "nothing": lambda _lane: nullcontext(),
    "the copy down does not wait for the computation": lambda lane: _no_wait(lane.down),
    "the host does not wait for the copy down": _without("arrive"),
    "the copy up does not wait for the computation": lambda lane: _no_wait(lane.up),
    "the computation does not wait for the copy up": _without("join"),
    "memory is used again at once": _used_at_once,
}
