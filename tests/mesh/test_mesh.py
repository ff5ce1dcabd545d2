"""ParallelMesh: every group holds the right ranks, is None where it is alone, and can be closed."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from goose_strategy.errors import MeshError
from goose_strategy.mesh.host import PEERS
from goose_strategy.mesh.layout import MeshLayout
from goose_strategy.mesh.mesh import DEVICE_MESH_NAMES, ParallelMesh
from tests.harness.world import run_ranks

CPU = torch.device("cpu")
MINUTE = timedelta(seconds=60)
GROUPS = ("tp", "dp", "pp_forward", "pp_backward", "tie", "model", "model_control")


def _members(ctx, tp, pp, shared_memory):
    layout = MeshLayout.from_world(ctx.world_size, tp=tp, pp=pp)
    before = len(PEERS)
    mesh = ParallelMesh.create(layout, device=CPU, timeout=MINUTE, shared_memory=shared_memory)
    try:
        found = {name: getattr(mesh, name) for name in GROUPS}
        ranks = {
            name: None if group is None else tuple(dist.get_process_group_ranks(group))
            for name, group in found.items()
        }
        everyone = tuple(dist.get_process_group_ranks(mesh.world))
        control = tuple(dist.get_process_group_ranks(mesh.control))
        apart = [group for group in found.values() if group is not None]
        distinct = len(set(apart)) == len(apart)
        connected = len(PEERS) - before
        torch_mesh = mesh.device_mesh()
        here = tuple(torch_mesh.get_coordinate())
        names = torch_mesh.mesh_dim_names
        sizes = [torch_mesh.get_group(name).size() for name in names]
        properties = (
            *(mesh.tp_size, mesh.tp_rank, mesh.pp_size, mesh.pp_rank, mesh.dp_size, mesh.dp_rank),
            *(mesh.is_first_stage, mesh.is_last_stage),
        )
        text = mesh.describe()
    finally:
        mesh.close()
        mesh.close()
    with pytest.raises(MeshError, match="closed"):
        _ = mesh.world
    return {
        "ranks": ranks,
        "world": (everyone, control),
        "distinct": distinct,
        "connected": connected,
        "left": len(PEERS) - before,
        "device_mesh": (here, names, sizes),
        "properties": properties,
        "text": text,
    }


@pytest.mark.parametrize(
    ("world", "tp", "pp"),
    [(1, 1, 1), (2, 2, 1), (2, 1, 2), (2, 1, 1), (4, 2, 2), (4, 1, 4), (4, 2, 1), (4, 1, 2)],
)
def test_every_rank_sees_its_groups(world, tp, pp):
    layout = MeshLayout.from_world(world, tp=tp, pp=pp)
    for rank, got in enumerate(run_ranks(_members, world, tp, pp, True)):
        at = layout.coordinates(rank)

        def mine(groups, rank=rank):
            return next((g for g in groups if rank in g and len(g) > 1), None)

        expected = {
            "tp": mine(layout.axis_groups("tp")),
            "dp": mine(layout.axis_groups("dp")),
            "pp_forward": mine(layout.axis_groups("pp")),
            "pp_backward": mine(layout.axis_groups("pp")),
            "tie": mine(layout.tie_groups()),
            "model": mine(layout.model_groups()),
            "model_control": mine(layout.model_groups()),
        }
        assert got["ranks"] == expected
        assert got["world"] == (tuple(range(world)),) * 2
        assert got["distinct"]
        assert got["device_mesh"] == (
            tuple(at),
            DEVICE_MESH_NAMES,
            [layout.pp, layout.dp, layout.tp],
        )
        assert got["properties"] == (
            *(layout.tp, at.tp, layout.pp, at.pp, layout.dp, at.dp),
            *(at.pp == 0, at.pp == layout.pp - 1),
        )
        assert got["text"] == f"rank {rank} (pp {at.pp}, dp {at.dp}, tp {at.tp})"
        in_groups = sum(ranks is not None for ranks in expected.values())
        assert got["connected"] == (in_groups + 2 if world > 1 else 0)
        assert got["left"] == 0


def test_shared_memory_can_be_declined():
    assert [got["connected"] for got in run_ranks(_members, 2, 2, 1, False)] == [0, 0]


def _refusals(ctx):
    with pytest.raises(MeshError, match=r"has 3 ranks, but the world has 2"):
        ParallelMesh.create(MeshLayout(tp=3, pp=1, dp=1), device=CPU, timeout=MINUTE)


def test_a_layout_of_another_size_is_refused():
    run_ranks(_refusals, 2)


def test_a_world_is_needed():
    with pytest.raises(MeshError, match="there is no default process group"):
        ParallelMesh.create(MeshLayout(tp=1, pp=1, dp=1), device=CPU, timeout=MINUTE)


def _close_after_the_world(ctx):
    dist.init_process_group("gloo")
    layout = MeshLayout.from_world(ctx.world_size, tp=2, pp=1)
    mesh = ParallelMesh.create(layout, device=CPU, timeout=MINUTE)
    dist.destroy_process_group()
    mesh.close()
    return len(PEERS)


def test_closing_after_the_world_is_harmless():
    assert run_ranks(_close_after_the_world, 2, isolated=True) == [0, 0]
