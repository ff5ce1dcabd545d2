"""Regions between column and row layers draw from a stream of this rank's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from goose_strategy.mesh.generators import Generators, changed
from goose_strategy.tensor_parallel.dropout import LocalStream, hook_regions, may_draw
from goose_strategy.tensor_parallel.plan import Style
from tests.harness.models import Family, tiny_model

CPU = torch.device("cpu")
SEED = 3


class Block(nn.Module):
    """Two linear layers with dropout between, which is a function, and one after, a module."""

    def __init__(self, between: float = 0.5, after: float = 0.5) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.gate = nn.Linear(4, 4)
        self.down = nn.Linear(4, 4)
        self.last = nn.Dropout(after)
        self.dropout = between
        self.fails = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ones = torch.ones_like(x)
        before = functional.dropout(ones, 0.5, self.training)
        self.up(x), self.gate(x)
        between = functional.dropout(ones, self.dropout, self.training)
        if self.fails:
            raise ArithmeticError
        self.down(x)
        return before, between, self.last(ones)


class Model(nn.Module):
    def __init__(self, **dropouts: float) -> None:
        super().__init__()
        self.block = Block(**dropouts)
        self.plain = nn.Linear(4, 4)


def hooked(tp_rank: int, **dropouts: float) -> Model:
    model = Model(**dropouts)
    styles = {"up": Style.COLUMN, "gate": Style.KEY_VALUE, "down": Style.ROW}
    work = {f"block.{n}": (model.get_submodule(f"block.{n}"), s) for n, s in styles.items()}
    mesh: Any = SimpleNamespace(device=CPU, tp_rank=tp_rank)
    hook_regions(model, work, mesh)
    return model


def masks(model: Model, seed: int = SEED) -> list[Tensor]:
    torch.manual_seed(seed)
    x = torch.ones(64, 4)
    return [*model.block(x), *model.block(x)]


def test_ranks_agree_outside_of_the_region_and_differ_inside() -> None:
    first, second = masks(hooked(0)), masks(hooked(1))
    for index, (mine, theirs) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(mine, theirs) == (index % 3 != 1), index
    assert not torch.equal(first[1], first[4]), "two regions repeat a mask"


class Output(nn.Module):
    """A row layer, and the dropout behind it, in a module of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(4, 4)
        self.last = nn.Dropout(0.5)

    def forward(self, x: Tensor, ones: Tensor) -> Tensor:
        self.down(x)
        after: Tensor = self.last(ones)
        return after


class Nested(nn.Module):
    """A column layer whose row layer lies one module deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.output = Output()
        self.dropout = 0.5

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ones = torch.ones_like(x)
        self.up(x)
        return functional.dropout(ones, self.dropout, self.training), self.output(x, ones)


def test_a_row_layer_in_a_module_of_its_own_ends_the_region() -> None:
    found = []
    for tp_rank in range(2):
        model = nn.ModuleDict({"block": Nested()})
        styles = {"block.up": Style.COLUMN, "block.output.down": Style.ROW}
        work = {name: (model.get_submodule(name), style) for name, style in styles.items()}
        mesh: Any = SimpleNamespace(device=CPU, tp_rank=tp_rank)
        hook_regions(model, work, mesh)
        torch.manual_seed(SEED)
        found.append(model["block"](torch.ones(64, 4)))
    (between, after), (others_between, others_after) = found
    assert not torch.equal(between, others_between)
    assert torch.equal(after, others_after)


def test_a_region_is_the_same_when_it_is_computed_again() -> None:
    model = hooked(1)
    for mine, theirs in zip(masks(model), masks(model), strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(masks(model)[1], masks(model, SEED + 1)[1])


def test_a_region_that_draws_nothing_leaves_the_numbers_of_one_process() -> None:
    alone = masks(Model(between=0.0))
    for mine, theirs in zip(masks(hooked(1, between=0.0)), alone, strict=True):
        assert torch.equal(mine, theirs)


def test_evaluation_draws_and_moves_nothing() -> None:
    model = hooked(0).eval()
    torch.manual_seed(SEED)
    before = Generators(CPU).capture()
    model.block(torch.ones(2, 4))
    assert not changed(before, Generators(CPU).capture())


def test_an_error_inside_gives_the_shared_stream_back() -> None:
    states = []
    for tp_rank in range(2):
        model = hooked(tp_rank)
        torch.manual_seed(SEED)
        model.block.fails = True
        with pytest.raises(ArithmeticError):
            model.block(torch.ones(2, 4))
        states.append(Generators(CPU).capture())
        model.block.fails = False
        mine = masks(model)[1]
        assert torch.equal(mine, masks(hooked(tp_rank))[1])
    assert not changed(*states)


def test_models_without_dropout_get_no_hooks() -> None:
    model = hooked(0, between=0.0, after=0.0)
    assert not any(module._forward_hooks for module in model.modules())
    assert hooked(0).block.up._forward_hooks


def test_leaving_twice_and_entering_twice_change_nothing() -> None:
    generators = Generators(CPU)
    start = generators.seed(SEED)
    stream = LocalStream(generators, 1)
    stream.leave()
    assert not changed(start, generators.capture())
    stream.enter()
    inside = generators.capture()
    stream.enter()
    assert not changed(inside, generators.capture())
    assert changed(start, inside)
    stream.leave()
    stream.leave()
    assert not changed(start, generators.capture())


@pytest.mark.parametrize(
    ("family", "settings", "expected"),
    [
        ("llama", {}, False),
        ("llama", {"attention_dropout": 0.1}, True),
        ("gpt2", {}, False),
        ("gpt2", {"attn_pdrop": 0.1}, True),
        ("opt", {"dropout": 0.1}, True),
        ("phi3", {"resid_pdrop": 0.1}, True),
        ("mixtral", {"router_jitter_noise": 0.1}, True),
        ("falcon", {"attention_dropout": 0.1}, True),
    ],
)
def test_what_may_draw_is_found_by_name(
    family: Family, settings: dict[str, float], expected: bool
) -> None:
    assert may_draw(tiny_model(family, **settings)) is expected
