"""A family is data; it cannot be changed, and its defaults are those of a plain decoder."""

from __future__ import annotations

import dataclasses

import pytest

from goose_strategy.models.family import HEADS_AND_MLP, Family
from goose_strategy.models.registry import FAMILIES


def test_defaults_are_those_of_a_decoder_with_grouped_queries() -> None:
    family = Family(name="some", islands={"layers.*.mlp": "x"})
    assert family.divisible == HEADS_AND_MLP
    assert not family.rules


def test_a_family_cannot_be_changed_or_given_by_position() -> None:
    family = FAMILIES["llama"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        family.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Family("some", {})  # type: ignore[misc]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_island_names_the_argument_it_copies(name: str) -> None:
    family = FAMILIES[name]
    assert family.name == name
    assert family.islands
    assert all(parent and argument for parent, argument in family.islands.items())
