"""The chosen schedule is the fastest that fits, each candidate cut as is best for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from goose_strategy.errors import PlanError
from goose_strategy.pipeline_parallel.auto import Question, choose_schedule, stage_costs
from goose_strategy.pipeline_parallel.balance import Work
from goose_strategy.pipeline_parallel.memory import Memory
from goose_strategy.pipeline_parallel.profile import Cost, Profile
from goose_strategy.pipeline_parallel.tables.catalogue import CATALOGUE
from goose_strategy.pipeline_parallel.tables.choose import format_figures
from goose_strategy.pipeline_parallel.tables.simulate import simulate

MS = 1_000_000


def profile(layers: int = 16, head: int = 3) -> Profile:
    layer = Cost(10 * MS, 12 * MS, 8 * MS, 1000)
    after = Cost(*(head * part * MS for part in (10, 12, 8)), 500)
    return Profile((1, 8), Cost(forward=MS), (layer,) * layers, after, hidden=100, shared=10)


def memory(layers: int = 16, recompute: str = "none") -> Memory:
    return Memory(Work(2000, (100,) * layers, 2000), profile(layers), recompute)


QUESTION = Question(memory(), ranks=4, microbatches=8)


def test_costs_of_stages() -> None:
    costs = stage_costs(memory(4), (0, 3, 4))
    assert costs.forward == (31 * MS, 40 * MS)
    assert costs.backward_input == (36 * MS, 48 * MS)
    assert costs.backward_weight == (24 * MS, 32 * MS)
    assert costs.latency == 20_000 + 12.5
    assert costs.activations == (3010, 1510)
    assert costs.inputs == (0, 100)
    assert costs.resident == (2300, 2100)
    again = stage_costs(memory(4, "layer"), (0, 3, 4))
    # The forwards of its layers, once more.
    assert again.backward_input == ((36 + 30) * MS, (48 + 10) * MS)


def test_every_schedule_with_layers_enough_is_a_candidate() -> None:
    names = [(s.name, s.chunks.per_rank) for s in QUESTION.candidates()]
    assert {name for name, _ in names} == set(CATALOGUE)
    assert [per for name, per in names if name == "Interleaved1F1B"] == [2, 3, 4]
    few = replace(QUESTION, memory=memory(6))
    assert {s.name for s in few.candidates()} == {"GPipe", "1F1B", "ZBH1"}
    two = replace(QUESTION, stages_per_rank=2)
    assert {s.chunks.per_rank for s in two.candidates()} == {2}
    five = replace(QUESTION, memory=memory(20), stages_per_rank=5)
    assert {s.name for s in five.candidates()} == {
        "Interleaved1F1B",
        "LoopedBFS",
        "InterleavedZeroBubble",
    }
    listed = replace(QUESTION, partition=[2] * 8)
    assert {s.chunks.stages for s in listed.candidates()} == {8}
    assert {listed.cut(s) for s in listed.candidates()} == {tuple(range(0, 18, 2))}


def test_each_candidate_has_its_own_cut() -> None:
    by_name = {s.name: s for s in QUESTION.candidates() if s.chunks.per_rank <= 2}
    assert QUESTION.cut(by_name["1F1B"]) == (0, 4, 9, 14, 16)
    uniform = replace(QUESTION, partition="uniform")
    for schedule in by_name.values():
        load = QUESTION.memory.profile.work().load(schedule.chunks.stages)
        busiest = [max(load.by_rank(q.cut(schedule), schedule.chunks)) for q in (QUESTION, uniform)]
        assert busiest[0] < busiest[1], schedule.name


def test_the_fastest_is_chosen() -> None:
    choice = choose_schedule(QUESTION)
    times = {
        (s.name, s.chunks.per_rank): simulate(
            s.table, stage_costs(QUESTION.memory, QUESTION.cut(s)), s.chunks
        ).makespan
        for s in QUESTION.candidates()
    }
    best = choice.best
    assert times[best.name, best.chunks.per_rank] == min(times.values())
    assert times["1F1B", 1] > 1.1 * min(times.values())


def test_a_limit_rules_out_what_holds_more() -> None:
    free = choose_schedule(QUESTION)
    used = max(next(f for f in free.figures if f.schedule is free.best).memory)
    tight = choose_schedule(replace(QUESTION, memory_limit=int(used) - 1))
    assert tight.best.name != free.best.name or tight.best.chunks != free.best.chunks
    chosen = next(f for f in tight.figures if f.schedule is tight.best)
    assert max(chosen.memory) < used
    # Weights are a part of it: a first stage without activations holds 2000 and its layers.
    with pytest.raises(PlanError, match="memory_limit_bytes=2000 is less than every candidate"):
        choose_schedule(replace(QUESTION, memory_limit=2000))


def test_recomputing_is_simulated() -> None:
    names = ("1F1B",)
    once = choose_schedule(replace(QUESTION, names=names)).figures[0]
    again = choose_schedule(replace(QUESTION, names=names, memory=memory(recompute="full")))
    assert again.figures[0].makespan > once.makespan
    assert max(again.figures[0].memory) < max(once.memory)


def test_by_memory() -> None:
    question = replace(QUESTION, partition="memory", names=("1F1B",))
    (schedule,) = question.candidates()
    by_time, by_memory = replace(question, partition="time").cut(schedule), question.cut(schedule)
    load = question.memory.load(schedule)
    assert max(load.by_stage(by_memory)) < max(load.by_stage(by_time))


def test_a_model_with_too_few_layers_is_refused() -> None:
    with pytest.raises(PlanError, match=r"finds no schedule for pp=4.* a model of 3 layers"):
        choose_schedule(replace(QUESTION, memory=memory(3)))
    with pytest.raises(PlanError, match="stages_per_rank=9"):
        choose_schedule(replace(QUESTION, stages_per_rank=9))


def test_figures_for_people() -> None:
    choice = choose_schedule(QUESTION)
    text = format_figures(choice, measured=True).splitlines()
    assert text[0].split() == ["schedule", "time/ms", "bubble", "memory/MiB"]
    (best,) = [line for line in text if line.startswith("*")]
    assert f"{choice.best.name}, 8 microbatches" in best
    figures = next(f for f in choice.figures if f.schedule is choice.best)
    assert f"{figures.makespan / MS:.4g}" in best
