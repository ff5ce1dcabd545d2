"""Storage of a bucket: one flat for weights, one for gradients, and the way back."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from goose_strategy.data_parallel.bucket import Bucket
from goose_strategy.data_parallel.plan import BucketKey, Entry, plan_buckets
from goose_strategy.errors import ConfigError
from goose_strategy.mesh.layout import MeshLayout
from goose_strategy.mesh.mesh import ParallelMesh
from tests.data_parallel import toy
from tests.data_parallel.toy import Sharded, adamw, batch
from tests.harness.worker import Context
from tests.harness.world import run_ranks


def _storages() -> dict[int, int]:
    """Address and size of every fp32 storage that Python can see."""
    gc.collect()
    found = [t for t in gc.get_objects() if isinstance(t, Tensor) and t.dtype == torch.float32]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}


def _train(mesh: ParallelMesh) -> Sharded:
    driver = Sharded(toy.toy(torch.float32, branches=1), adamw, mesh)
    for _ in range(2):
        driver.backward(driver.forward(driver.rows(batch(0, torch.float32))).square().mean())
        driver.optimizer.step()
        driver.optimizer.zero_grad()
    return driver


def _bytes(ctx: Context) -> tuple[int, int, list[int]]:
    mesh = toy.make_mesh(ctx.world_size)
    _train(mesh).reducer.close()  # what communication allocates once does not count
    before = _storages()
    driver = _train(mesh)
    model = driver.model
    driver.backward(driver.forward(driver.rows(batch(0, torch.float32))).square().mean())
    now = {place: size for place, size in _storages().items() if place not in before}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    used = [p.grad for p in model.parameters() if p.grad is not None]
    grads = {grad.untyped_storage().data_ptr() for grad in used}
    flat = sum(bucket.weights.numel() * 4 for bucket in driver.reducer.buckets)
    assert sum(now[place] for place in weights) == flat
    assert sum(now[place] for place in grads) == flat
    states = [value for zero in driver.zeros for s in zero.states.values() for value in s.values()]
    moments = {value.untyped_storage().data_ptr() for value in states if value.dim()}
    rest = [size for place, size in now.items() if place not in weights | grads | moments]
    held = sum(now[place] for place in moments)
    driver.finish()
    return flat, held, [size for size in rest if size > 1024]


def test_nothing_is_held_twice() -> None:
    results = run_ranks(_bytes, 4)
    for flat, moments, rest in results:
        # Weights and gradients exist once, in the flats; moments of a quarter of the elements,
        # and none where a rank's slice is all padding.
        assert flat > 4 * 10_000
        assert moments <= 2 * flat / 4
        assert rest == []
    assert results[0][1] == 2 * results[0][0] / 4


def _bucket(ctx: Context, dtype: torch.dtype) -> None:
    params = {
        "a": nn.Parameter(torch.randn(5, 7).to(dtype)),
        "b": nn.Parameter(torch.ones(3, dtype=dtype)),
    }
    kept = {name: p.detach().clone() for name, p in params.items()}
    params["a"].grad = torch.full_like(params["a"], 2.0)
    entries = [Entry(name, p.numel(), BucketKey(dtype=dtype)) for name, p in params.items()]
    (layout,) = plan_buckets(entries, dp_size=ctx.world_size, bucket_numel=100)
    mesh = toy.make_mesh(ctx.world_size)
    bucket = Bucket(layout, params, mesh, average=True)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for name, p in params.items():
        assert torch.equal(p, kept[name])
        assert p.untyped_storage().data_ptr() == bucket.weights.untyped_storage().data_ptr()
    assert bucket.grads.flat.dtype == wide
    assert bucket.weights.numel() == 2048 * ctx.world_size
    assert bucket.own_weights.data_ptr() == bucket.weights[2048 * ctx.rank :].data_ptr()
    assert params["a"].grad.dtype == wide
    assert len(bucket.grads.attached()) == 1
    assert bucket.grads.flat.sum() == 70, "a gradient that was there is kept"
    params["b"].sum().backward()
    assert params["b"].grad.dtype == wide
    bucket.release()
    for name, p in params.items():
        assert torch.equal(p, kept[name])
        assert p.grad is None
        assert p.untyped_storage().nbytes() == p.numel() * p.element_size()
        p.sum().backward()
        assert p.grad.dtype == dtype
    mesh.close()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_parameters_move_in_and_out(dtype: torch.dtype) -> None:
    run_ranks(_bucket, 2, dtype)


def test_a_strided_parameter_becomes_row_major() -> None:
    param = nn.Parameter(torch.randn(4, 6).t())
    kept = param.detach().clone()
    mesh = ParallelMesh(MeshLayout(tp=1, pp=1, dp=1), rank=0, device=toy.CPU)
    entry = Entry("p", 24, BucketKey(dtype=torch.float32))
    (layout,) = plan_buckets([entry], dp_size=1, bucket_numel=1)
    bucket = Bucket(layout, {"p": param}, mesh, average=False)
    assert torch.equal(param, kept)
    assert torch.equal(bucket.weights[:24].view(6, 4), kept)


def test_what_is_summed_on_other_communicators_waits() -> None:
    key = BucketKey(dtype=torch.float32)
    assert not key.late
    assert replace(key, tp_partial=True).late
    assert replace(key, tie="embed").late


def _replaced(ctx: Context) -> None:
    driver = Sharded(toy.toy(torch.float32, branches=1), adamw, toy.make_mesh(ctx.world_size))
    gain = driver.model.gain
    owner = next(b for b in driver.reducer.buckets if any(s.param is gain for s in b.slots))
    gain.data = torch.tensor(7.0)
    owner.take_back()
    begin = owner.weights.untyped_storage().data_ptr()
    assert gain.untyped_storage().data_ptr() == begin
    assert gain.item() == 7.0
    for wrong, why in ((gain.double(), "dtype=torch.float64"), (torch.ones(1), "shape=")):
        gain.data = wrong.detach()
        with pytest.raises(ConfigError, match=f"parameter gain has {why}"):
            owner.take_back()


def test_a_parameter_that_was_moved_out_is_moved_back_or_refused() -> None:
    run_ranks(_replaced, 1)
