from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from goose_strategy.comm.recorder import Recorder, recording
from goose_strategy.compat.transformers import install_loss
from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.tensor_parallel.config import TensorConfig
from goose_strategy.tensor_parallel.head import causal_lm_loss
from goose_strategy.tensor_parallel.parallelize import head_switch
from tests.harness.compare import relative_error, token_loss
from tests.harness.models import tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.tensor_parallel.helpers import awkward_batch, cut, with_mesh

VOCAB = 97


def _model(mesh: ParallelMesh, **config: Any) -> Any:
    model: Any = tiny_model("llama", layers=1)
    cut(model, mesh, TensorConfig(**config))
    return model


def _logits() -> Tensor:
    model = tiny_model("llama", layers=1)
    inputs = {name: x for name, x in awkward_batch().items() if name != "labels"}
    logits: Tensor = model(**inputs).logits.detach()
    return logits


@with_mesh
def _calls(ctx: Context, mesh: ParallelMesh) -> dict[str, Any]:
    model, batch = _model(mesh), awkward_batch()
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    labels = batch["labels"]
    seen: dict[str, Any] = {}
    recorder = Recorder()
    with recording(recorder):
        seen["labels"] = model(**batch)
    assert not [one for one in recorder.launches if "gather" in one.op]
    seen["no labels"] = model(**inputs).logits.detach()
    seen["tuple"] = model(**batch, return_dict=False)
    seen["past the hooks"] = type(model).forward(model, **batch)
    switch = head_switch(model)
    assert switch is not None
    with switch.local():
        output = type(model).forward(model, **batch)
        seen["local width"] = output.logits.shape[-1]
        seen["local"] = switch.finish(output)
    assert model.lm_head.gathers_output
    # Another loss than ours gets what it expects.
    install_loss(model, lambda logits, labels, **_: logits.sum() * 0 + logits.shape[-1])
    seen["own loss"] = model(**inputs, labels=labels).loss.item()
    return {name: _plain(value) for name, value in seen.items()}


def _plain(value: Any) -> Any:
    if hasattr(value, "keys"):
        return {name: item.detach() for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(item.detach() for item in value)
    return value


def test_each_kind_of_call_gets_the_logits_it_needs() -> None:
    logits = _logits()
    loss = token_loss(logits, awkward_batch()["labels"]).item()
    for rank, seen in enumerate(run_ranks(_calls, 2)):
        assert seen["labels"].keys() == {"loss"}
        assert seen["local"].keys() == {"loss"}
        assert seen["local width"] == (49, 48)[rank]
        for name in ("labels", "local", "past the hooks"):
            assert seen[name]["loss"].item() == pytest.approx(loss, rel=1e-12)
        assert seen["tuple"][0].item() == pytest.approx(loss, rel=1e-12)
        for whole in (seen["no labels"], seen["tuple"][1], seen["past the hooks"]["logits"]):
            assert relative_error(whole, logits) <= 1e-12
        assert seen["own loss"] == VOCAB


@with_mesh
def _with_gathered_logits(ctx: Context, mesh: ParallelMesh) -> tuple[Tensor, Tensor]:
    model, batch = _model(mesh, gather_logits=True), awkward_batch()
    output = model(**batch)
    # A user's second loss on the logits, beside the model's own.
    (output.loss + output.logits.square().mean()).backward()
    return output.logits.detach(), model.model.norm.weight.grad


def test_gathered_logits_are_whole_and_differentiable() -> None:
    model: Any = tiny_model("llama", layers=1)
    batch = awkward_batch()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    (token_loss(logits, batch["labels"]) + logits.square().mean()).backward()
    for whole, grad in run_ranks(_with_gathered_logits, 2):
        assert relative_error(whole, logits.detach()) <= 1e-12
        assert relative_error(grad, model.model.norm.weight.grad) <= 1e-10


@with_mesh
def _after_an_error(ctx: Context, mesh: ParallelMesh) -> bool:
    model, batch = _model(mesh), awkward_batch()

    def fails() -> Tensor:
        raise RuntimeError("planted")

    model.loss_function = replace(model.loss_function, count=fails)
    with pytest.raises(RuntimeError, match="planted"):
        model(**batch)
    return bool(model.lm_head.gathers_output)


def test_an_error_in_the_loss_leaves_whole_logits_for_the_next_call() -> None:
    assert run_ranks(_after_an_error, 2) == [True, True]


def test_a_plain_or_missing_head_has_a_loss_for_whole_logits() -> None:
    logits, labels = torch.randn(1, 4, 6), torch.tensor([[1, 2, 3, 4]])
    expected = F.cross_entropy(logits[0, :-1], labels[0, 1:])
    for head in (torch.nn.Linear(2, 6), None):
        assert torch.isclose(causal_lm_loss(head)(logits, labels), expected)


@with_mesh
def _generate(ctx: Context, mesh: ParallelMesh) -> Tensor:
    model = _model(mesh).eval()
    tokens: Tensor = model.generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, use_cache=True,
        attention_mask=torch.ones(1, 3),
    )  # fmt: skip
    return tokens


def test_generation_works_on_the_cut_model() -> None:
    model: Any = tiny_model("llama", layers=1).eval()
    expected = model.generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, use_cache=True,
        attention_mask=torch.ones(1, 3),
    )  # fmt: skip
    assert all(torch.equal(tokens, expected) for tokens in run_ranks(_generate, 2))
