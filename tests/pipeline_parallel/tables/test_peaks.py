"""What a table holds, counted by hand."""

from __future__ import annotations

from goose_strategy.pipeline_parallel.schedule import gpipe, one_f_one_b
from goose_strategy.pipeline_parallel.tables.insert import add_recompute
from goose_strategy.pipeline_parallel.tables.interleaved import zb_h1
from goose_strategy.pipeline_parallel.tables.peaks import (
    peak_activations,
    peak_by_stage,
    peak_memory,
)
from tests.pipeline_parallel.tables.torch_tables import rows_of


def test_a_backward_frees_what_its_forward_saved() -> None:
    assert peak_activations(rows_of("0F0 0F1 0B0 0F2 0B1 0B2")) == (2,)


def test_an_input_gradient_frees_nothing_until_its_weight_gradient() -> None:
    assert peak_activations(rows_of("0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0W2")) == (2,)
    assert peak_activations(rows_of("0F0 0I0 0W0 0F1 0I1 0W1")) == (1,)


def test_a_recompute_holds_from_then_on() -> None:
    assert peak_activations(rows_of("0F0 0F1 0F2 0R0 0B0 0R1 0B1 0R2 0B2")) == (1,)
    # The weight gradient comes later, so the second R finds the first one's activations.
    assert peak_activations(rows_of("0F0 0F1 0R0 0I0 0R1 0I1 0W0 0W1")) == (2,)
    assert peak_activations(add_recompute(one_f_one_b(4, 8))) == (1, 1, 1, 1)
    assert peak_activations(add_recompute(zb_h1(4, 8))) == (1, 2, 3, 4)


def test_the_inputs_of_what_is_recomputed_are_kept_until_then() -> None:
    row = rows_of("0F0 0F1 0F2 0R0 0B0 0R1 0B1 0F3 0R2 0B2 0B3")
    assert peak_memory(row, (10.0,), (1.0,)) == (10 + 10.0,)
    assert peak_memory(rows_of("0F0 0F1 0F2 0R0 0B0 0R1 0B1 0R2 0B2"), (10.0,), (1.0,)) == (12.0,)
    gpipe_row = add_recompute(gpipe(2, 8))
    assert peak_memory(gpipe_row, (10.0, 20.0), (0.0, 1.0)) == (10.0, 27.0)


def test_chunks_weigh_what_they_weigh() -> None:
    table = rows_of("0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert peak_memory(table, (10.0, 1.0, 4.0)) == (24.0, 1.0)
    assert peak_by_stage(table) == {0: 2, 1: 1, 2: 1}
    assert peak_activations(table) == (3, 1)


def test_messages_hold_nothing() -> None:
    assert peak_activations(rows_of("0F0 0SEND_F0 0RECV_B0 0B0")) == (1,)
