"""Tensors are found and replaced in arguments, without touching the caller's containers."""

from __future__ import annotations

import torch

from goose_strategy.pipeline_parallel.nested import (
    has_place,
    replace_tensors,
    show,
    tensors_in,
    tensors_of,
)

A, B, C, D = (torch.tensor(number) for number in range(4))


def test_paths_of_a_call() -> None:
    found = tensors_of((A, None, [B, 3]), {"pair": (C, None), "masks": {"full": D}, "flag": True})
    assert found == {(0,): A, (2, 0): B, ("pair", 0): C, ("masks", "full"): D}


def test_a_bare_tensor_has_the_empty_path() -> None:
    assert tensors_in(A) == {(): A}
    assert tensors_in((None, A)) == {(1,): A}


def test_replacing_makes_new_containers() -> None:
    args, kwargs = (A, [B, 3]), {"pair": (C, None), "masks": {"full": D}}
    new = {(0,): D, (1, 0): C, ("pair", 0): A, ("masks", "full"): B}
    out_args, out_kwargs = replace_tensors(args, kwargs, new)
    assert out_args == (D, [C, 3])
    assert out_kwargs == {"pair": (A, None), "masks": {"full": B}}
    assert args == (A, [B, 3])
    assert kwargs == {"pair": (C, None), "masks": {"full": D}}


def test_anything_can_be_replaced() -> None:
    assert replace_tensors((None,), {"bias": None}, {("bias",): A}) == ((None,), {"bias": A})


def test_places() -> None:
    args, kwargs = (A, [B, None]), {"masks": {"full": D}, "bias": None}
    for path in ((0,), (1, 1), ("masks", "full"), ("bias",)):
        assert has_place(args, kwargs, path)
    for path in ((2,), (1, 2), ("masks", "sliding"), ("other",), ("bias", 0), ("masks", "full", 0)):
        assert not has_place(args, kwargs, path)


def test_paths_are_shown_as_code() -> None:
    assert show(("position_embeddings", 0)) == "position_embeddings[0]"
    assert show((2,)) == "argument 2"
