"""A transposed linear layer, cut, computes and differentiates what the whole one does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from goose_strategy.tensor_parallel.conv1d import convert_column, convert_row
from goose_strategy.tensor_parallel.slicing import Slicer
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.tensor_parallel.helpers import with_mesh


def _layer(nf: int, nx: int) -> Any:
    torch.manual_seed(nf)
    layer = Conv1D(nf, nx).double()
    torch.nn.init.normal_(layer.bias)
    return layer


def _run(layers: list[Any], x: Tensor) -> tuple[Tensor, Tensor]:
    up, down = layers
    x = x.clone().requires_grad_()
    y = down(torch.tanh(up(x)))
    (y * torch.arange(y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@with_mesh
def _cut(_ctx: Context, mesh: Any, packed: tuple[int, ...]) -> dict[str, Any]:
    layers = [_layer(12, 6), _layer(6, 12)]
    plain = type(layers[0])
    slicer = Slicer(parts=mesh.tp_size, index=mesh.tp_rank)
    up = convert_column(layers[0], slicer, mesh.tp, copies_input=True, packed=packed)
    down = convert_row(layers[1], slicer, mesh.tp)
    assert isinstance(up, Conv1D)
    assert up is layers[0]
    y, grad = _run(layers, torch.ones(2, 3, 6, dtype=torch.float64))
    specs = {
        name: slicer.get(param).spec(name, param)
        for name, param in (("up", up.weight), ("up_bias", up.bias), ("down", down.weight))
    }
    grads = {"up": up.weight.grad, "up_bias": up.bias.grad, "down": down.weight.grad}
    down_bias = down.bias.grad.clone()
    up.restore()
    assert type(up) is plain
    assert "cut" not in vars(up)
    return {
        "y": y,
        "x": grad,
        "down_bias": down_bias,
        "pieces": {name: specs[name].pieces(grads[name]) for name in specs},
    }


@pytest.mark.parametrize("packed", [(), (1, 1, 1), (4, 1, 1)])
@pytest.mark.parametrize("tp", [1, 2])
def test_cut_layers_equal_the_whole(packed: tuple[int, ...], tp: int) -> None:
    up, down = _layer(12, 6), _layer(6, 12)
    if packed and tp > 1:
        # The parts of the first layer meet other rows of the second: reorder the whole alike.
        widths = [12 // sum(packed) * ratio for ratio in packed]
        order = torch.arange(12).split(widths)
        order = torch.cat([part.chunk(tp)[rank] for rank in range(tp) for part in order])
        with torch.no_grad():
            down.weight.copy_(down.weight[order.argsort()])
    y, grad = _run([up, down], torch.ones(2, 3, 6, dtype=torch.float64))
    for found in run_ranks(_cut, tp, packed):
        torch.testing.assert_close(found["y"], y)
        torch.testing.assert_close(found["x"], grad)
        torch.testing.assert_close(found["down_bias"], down.bias.grad)
        whole = {"up": up.weight.grad, "up_bias": up.bias.grad}
        for name, expected in whole.items():
            for box, piece in found["pieces"][name]:
                place = tuple(slice(at, at + n) for at, n in zip(*box, strict=True))
                torch.testing.assert_close(piece, expected[place])
