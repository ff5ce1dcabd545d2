"""The sleeping model sleeps where it should, and is a model with right gradients beside that."""

from __future__ import annotations

import time

import pytest
import torch

from goose_strategy.bench import sleeping


def test_forward_and_backward_sleep() -> None:
    model = sleeping.SleepingModel(3)
    batch = sleeping.make_batch(1, seed=1)
    model.set_sleep(forward_s=0.02, backward_s=0.05)
    start = time.perf_counter()
    loss = model(**batch)["loss"]
    middle = time.perf_counter()
    loss.backward()
    assert middle - start >= 3 * 0.02
    assert time.perf_counter() - middle >= 3 * 0.05


def test_a_new_model_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: float) -> None:
        raise AssertionError

    monkeypatch.setattr(time, "sleep", refuse)
    model = sleeping.SleepingModel(2)
    model(**sleeping.make_batch(2, seed=1))["loss"].backward()
    model.set_sleep(forward_s=0.0, backward_s=0.1)
    loss = model(**sleeping.make_batch(2, seed=1))["loss"]
    with pytest.raises(AssertionError):
        loss.backward()


def test_sleeping_changes_no_number() -> None:
    model = sleeping.SleepingModel(2).double()
    batch = sleeping.make_batch(2, seed=1)

    def plain(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = parameters["embed.weight"][batch["input_ids"]]
        for layer in range(2):
            name = f"layers.{layer}.linear"
            weight, bias = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
            hidden = hidden + hidden @ weight.T + bias
        scores = (hidden @ parameters["head.weight"].T).log_softmax(-1)
        return -scores.gather(-1, batch["labels"].unsqueeze(-1)).sum()

    named = dict(model.named_parameters())
    expected = torch.autograd.grad(plain(named), list(named.values()))
    loss = model(**batch)["loss"]
    torch.testing.assert_close(loss, plain(named), rtol=1e-12, atol=0)
    found = torch.autograd.grad(loss, list(named.values()))
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_microbatches_add_up() -> None:
    model = sleeping.SleepingModel(1).double()
    batch = sleeping.make_batch(4, seed=2)
    rows = [{name: value[row : row + 1] for name, value in batch.items()} for row in range(4)]
    parts = sum(model(**row)["loss"] for row in rows)
    torch.testing.assert_close(model(**batch)["loss"], parts, rtol=1e-12, atol=0)
    assert "loss" not in model(batch["input_ids"])
