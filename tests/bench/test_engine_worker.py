"""Both runtimes give one process's gradients, step by step, and a wrong one is not timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from goose_strategy.bench import engine_worker, sleeping
from goose_strategy.bench.job import EngineJob
from goose_strategy.pipeline_parallel.program import chunks_of
from tests.harness.worker import Context
from tests.harness.world import RankFailure, run_ranks

SLEEP_S = 0.002


def job_of(stages: int, **settings: Any) -> EngineJob:
    return EngineJob(devices=stages, microbatches=4, steps=1, forward_s=SLEEP_S, **settings)


def measured(ctx: Context, shared_memory: bool) -> dict[str, Any]:
    job = job_of(ctx.world_size, shared_memory=shared_memory)
    mesh = engine_worker.make_mesh(job)
    work = engine_worker.build(mesh, job, engine_worker.CASES["GPipe"])
    assert not any(gradient.count_nonzero() == 0 for gradient in work.expected.values())
    slept: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        sleep = sleeping.time.sleep
        patch.setattr(sleeping, "_sleep", lambda seconds: (slept.append(seconds), sleep(seconds)))
        found = engine_worker.measure(mesh, job)
    mesh.close()
    return found | {"slept": sum(slept)}


@pytest.mark.parametrize(("stages", "shared_memory"), [(2, False), (4, True)])
def test_all_cases_are_timed(stages: int, shared_memory: bool) -> None:
    for rank, found in enumerate(run_ranks(measured, stages, shared_memory)):
        assert found["shared_memory"] == shared_memory
        cases = found["cases"]
        alone = {"VHalf", "VMin", "1F1B recompute"} | ({"DualPipeV"} if stages == 4 else set())
        assert {name for name, case in cases.items() if set(case) == {"ours"}} == alone
        assert {name for name, case in cases.items() if set(case) == {"ours", "torch"}} == (
            set(engine_worker.CASES) - alone
        )
        chunks = 0
        for name, case in cases.items():
            per_rank = chunks_of(engine_worker.CASES[name].schedule, stages).per_rank
            for (step,) in case.values():
                # Four forwards and, twice as long, backwards of each stage, split or not.
                assert step["end"] - step["start"] >= per_rank * 4 * 3 * SLEEP_S
                assert 0 < step["cpu"] < 60
                chunks += per_rank
        # Two steps each, and one case computes the forwards again on all stages but the last.
        again = 4 if rank < stages - 1 else 0
        assert found["slept"] == pytest.approx(2 * (chunks * 4 * 3 + again) * SLEEP_S)


def with_a_wrong_gradient(ctx: Context) -> None:
    job = job_of(ctx.world_size)
    build = engine_worker.build

    def wrong(*args: Any) -> engine_worker.Work:
        work = build(*args)
        if work.part.rank == 0:
            parameter = work.part.module.layers[0].linear.bias  # type: ignore[union-attr, index]
            parameter.register_hook(lambda gradient: gradient * 1.001)
        return work

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_worker, "build", wrong)
        engine_worker.measure(engine_worker.make_mesh(job), job)


def test_a_wrong_step_is_refused() -> None:
    with pytest.raises(
        RankFailure, match=r"GPipe under ours gives layers\.0\.linear\.bias another gradient"
    ):
        run_ranks(with_a_wrong_gradient, 2)


def test_the_runtimes_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def runs(name: str) -> Any:
        return lambda _work, case, _job: lambda: order.append(f"{name} {case.schedule}")

    monkeypatch.setattr(engine_worker, "_ours", runs("ours"))
    monkeypatch.setattr(engine_worker, "_theirs", runs("torch"))
    monkeypatch.setattr(engine_worker, "_check", lambda _work, _what: None)
    monkeypatch.setattr(engine_worker, "barrier", lambda _group: None)
    part: Any = SimpleNamespace(module=torch.nn.Identity())
    mesh: Any = SimpleNamespace(control=None, pp_forward=None)
    work = engine_worker.Work(mesh, part, None, {}, {})  # type: ignore[arg-type]
    monkeypatch.setattr(engine_worker, "build", lambda *_: work)
    job = EngineJob(devices=2, microbatches=2, steps=3, warmup=1)
    found = engine_worker.measure(mesh, job)
    assert order[:8] == [
        *("ours GPipe", "torch GPipe", "torch GPipe", "ours GPipe"),
        *("ours GPipe", "torch GPipe", "torch GPipe", "ours GPipe"),
    ]
    assert order[-4:] == ["ours 1F1B"] * 4  # with recompute
    assert len(found["cases"]["GPipe"]["torch"]) == 3
