from __future__ import annotations

import pytest
import torch
from torch import nn

from goose_strategy.errors import PlanError
from goose_strategy.tensor_parallel.embedding import VocabParallelEmbedding
from goose_strategy.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from goose_strategy.tensor_parallel.slicing import Slicer


class _Quantised(nn.Linear):
    pass


def test_another_class_is_refused_by_name() -> None:
    with pytest.raises(
        PlanError, match=r"mlp\.up=_Quantised cannot be cut.*plain torch\.nn\.Linear"
    ):
        ColumnParallelLinear.check("mlp.up", _Quantised(2, 2))
    with pytest.raises(PlanError, match=r"embed=Linear cannot be cut.*torch\.nn\.Embedding"):
        VocabParallelEmbedding.check("embed", nn.Linear(2, 2))


def test_a_patched_forward_is_refused() -> None:
    linear = nn.Linear(2, 2)
    linear.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(PlanError, match=r"mlp\.up\.forward was replaced"):
        RowParallelLinear.check("mlp.up", linear)


@pytest.mark.parametrize(
    "options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}]
)
def test_embeddings_with_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(PlanError, match=f"embed.{next(iter(options))}="):
        VocabParallelEmbedding.check("embed", nn.Embedding(4, 2, **options))  # type: ignore[arg-type]


def test_the_module_stays_the_same_object_with_its_hooks_and_back() -> None:
    linear = nn.Linear(4, 4)
    seen: list[torch.Size] = []
    linear.register_forward_hook(lambda _module, _args, output: seen.append(output.shape))
    before = dict(vars(linear))
    converted = ColumnParallelLinear.convert(linear, Slicer(parts=2, index=0), None)
    assert converted is linear
    assert isinstance(linear, nn.Linear)
    linear(torch.randn(3, 4))
    assert seen == [(3, 2)]
    converted.restore()
    assert type(linear) is nn.Linear
    assert vars(linear).keys() == before.keys()


def test_built_directly_the_classes_are_the_plain_ones() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4)
    for cls in (ColumnParallelLinear, RowParallelLinear):
        layer = cls(4, 3)
        assert torch.allclose(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
        assert "not cut" in repr(layer)
    embedding = VocabParallelEmbedding(5, 3, padding_idx=1)
    assert torch.equal(embedding(torch.arange(5)), embedding.weight)
    assert "not cut" in repr(embedding)
