"""Each style has a class for each plain layer, and the dimensions that it cuts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from goose_strategy.errors import PlanError
from goose_strategy.tensor_parallel.embedding import VocabParallelEmbedding
from goose_strategy.tensor_parallel.layers import (
    CUT,
    HowCut,
    check_layer,
    convert_layer,
    cut_dims,
)
from goose_strategy.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from goose_strategy.tensor_parallel.plan import Style
from goose_strategy.tensor_parallel.slicing import Slicer

LAYERS = [
    (Style.COLUMN, nn.Linear(4, 8), (4, 4), ColumnParallelLinear),
    (Style.HEAD, nn.Linear(4, 9), (4, 4), ColumnParallelLinear),
    (Style.ROW, nn.Linear(8, 4), (4, 4), RowParallelLinear),
    (Style.VOCAB, nn.Embedding(9, 4), (4, 4), VocabParallelEmbedding),
    (Style.COLUMN, Conv1D(8, 4), (4, 4), Conv1D),
    (Style.ROW, Conv1D(4, 8), (4, 4), Conv1D),
]


@pytest.mark.parametrize(("style", "layer", "shape", "kind"), LAYERS)
def test_a_layer_is_cut_along_the_dimension_of_its_style(style, layer, shape, kind) -> None:
    check_layer("layer", layer, style)
    dims = cut_dims(layer, style)
    size = layer.weight.shape[dims["weight"]]
    slicer = Slicer(parts=2, index=1)
    converted = convert_layer(layer, HowCut(style), slicer, None)
    assert isinstance(converted, kind)
    assert converted is layer
    assert tuple(layer.weight.shape) == shape
    assert slicer.get(layer.weight).total == size
    if style is Style.HEAD:
        assert layer.gathers_output


@pytest.mark.parametrize("style", [Style.COLUMN, Style.ROW, Style.VOCAB])
def test_another_class_is_refused(style) -> None:
    with pytest.raises(PlanError, match=r"layer=Bilinear cannot be cut"):
        check_layer("layer", nn.Bilinear(1, 1, 1), style)


def test_styles_that_keep_a_module_whole_change_nothing() -> None:
    assert CUT.isdisjoint({Style.PARTIAL, Style.REPLICATED})
    assert cut_dims(nn.Linear(2, 2), Style.REPLICATED) == {}


def test_packed_matrices_are_cut_apart() -> None:
    layer = nn.Linear(1, 4, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(4.0)[:, None])
    how = HowCut(Style.COLUMN, packed=(1, 1))
    convert_layer(layer, how, Slicer(parts=2, index=1), None)
    assert layer.weight.flatten().tolist() == [1.0, 3.0]
