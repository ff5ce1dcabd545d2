"""The model's own call, with the whole mesh behind it: signature, outputs, losses, copies."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from goose_strategy.errors import BatchError, ConfigError, PlanError
from tests.harness.compare import named_gradients, token_loss
from tests.harness.models import batches, microbatches_of, rows_of, tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.harness.zoo import zoo_model
from tests.runtime.start import message, started

LAYOUTS = [(2, 1), (1, 2), (1, 1)]
EXACT = 1e-10


def alone(batch: dict[str, Tensor]) -> tuple[float, Tensor]:
    """Return loss and logits of one process."""
    model = tiny_model("llama")
    with torch.no_grad():
        logits = model(batch["input_ids"], batch["attention_mask"]).logits
    return token_loss(logits, batch["labels"]).item(), logits


def plain(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


def _calls(ctx: Context, tp: int, pp: int) -> dict[str, Any]:
    whole = batches(1)[0]
    with started(tp, pp) as runtime:
        model = tiny_model("llama")
        runtime.shard_module(model)
        place = runtime.mesh.dp_rank, runtime.mesh.dp_size
        mine = rows_of(whole, *place)
        output = model(**mine)
        positional = model(mine["input_ids"], mine["attention_mask"], labels=mine["labels"])
        as_tuple = model(**mine, return_dict=False)
        listed = model([rows_of(mine, i, 2) for i in range(2)])
        with torch.no_grad():
            quiet = model(**mine).loss
            logits = model(**plain(mine)).logits
            listed_logits = model([plain(rows_of(mine, i, 2)) for i in range(2)]).logits
            pair = model(**plain(mine), return_dict=False)
        own_count = model(**mine, num_items_in_batch=torch.tensor(7)).loss
        return {
            "type": type(output).__name__,
            "signature": inspect.signature(model.forward),
            "losses": [
                loss.item()
                for loss in (output.loss, positional.loss, as_tuple[0], listed.loss, quiet)
            ],
            "graph": [output.loss.requires_grad, quiet.requires_grad],
            "logits": logits,
            "listed logits": listed_logits,
            "pair": torch.equal(pair[0], logits),
            "own count": own_count.item(),
            "place": place,
        }


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_a_call_is_that_of_one_process(tp: int, pp: int) -> None:
    whole = batches(1)[0]
    loss, logits = alone(whole)
    tokens = (whole["labels"][:, 1:] != -100).sum().item()
    for rank in run_ranks(_calls, 2, tp, pp):
        assert rank["type"] == "CausalLMOutputWithPast"
        assert rank["signature"] == inspect.signature(tiny_model("llama").forward)
        assert rank["losses"] == pytest.approx([loss] * 5, rel=EXACT)
        assert rank["graph"] == [True, False]
        mine = rows_of({"logits": logits}, *rank["place"])["logits"]
        torch.testing.assert_close(rank["logits"], mine, rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(rank["listed logits"], mine, rtol=EXACT, atol=EXACT)
        assert rank["pair"]
        assert rank["own count"] == pytest.approx(loss * tokens / 7, rel=EXACT)


def _refused(ctx: Context, tp: int, pp: int) -> list[str]:
    with started(tp, pp) as runtime:
        model = tiny_model("llama")
        runtime.shard_module(model)
        batch = batches(1)[0]
        ids = batch["input_ids"]
        return [
            message(lambda: model([]), BatchError),
            message(lambda: model(ids[:0]), BatchError),
            message(lambda: model.forward(ids, input_ids=ids), TypeError),
        ]


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_what_is_no_batch_is_refused(tp: int, pp: int) -> None:
    for nothing, empty, twice in run_ranks(_refused, 2, tp, pp):
        assert "list of microbatches is empty" in nothing
        assert "the batch is empty" in empty
        assert "multiple values for argument 'input_ids'" in twice


# -- evaluation between steps -------------------------------------------------------------------


def _evaluated_in_between(ctx: Context, tp: int, pp: int) -> list[float]:
    """Inference mode leaves tensors behind that autograd may not touch; none may be kept."""
    losses = []
    with started(tp, pp) as runtime:
        model = tiny_model("llama")
        optimizer = SGD(model.parameters(), lr=0.1)
        runtime.shard_module(model, optimizers=[optimizer])
        for batch in batches(3):
            mine = rows_of(batch, runtime.mesh.dp_rank, runtime.mesh.dp_size)
            model.eval()
            with torch.inference_mode():
                losses.append(model(**mine).loss.item())
                model(**plain(mine))
            model.train()
            loss = model(**mine).loss
            with runtime.backward(loss):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_inference_mode_between_steps_does_no_harm(tp: int, pp: int) -> None:
    model = tiny_model("llama")
    expected = []
    for batch in batches(3):
        loss = token_loss(model(**plain(batch)).logits, batch["labels"])
        loss.backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
                param.grad = None
        expected += [loss.item()] * 2
    for losses in run_ranks(_evaluated_in_between, 2, tp, pp):
        assert losses == pytest.approx(expected, rel=EXACT)


def _generated(ctx: Context, tp: int) -> Tensor:
    with started(tp) as runtime:
        model = tiny_model("llama")
        runtime.shard_module(model)
        batch = batches(1)[0]
        tokens: Tensor = model.generate(
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=4,
            use_cache=True,
        )
        return tokens


@pytest.mark.parametrize("tp", [1, 2])
def test_generation_on_tensor_parallel_ranks_is_that_of_one_process(tp: int) -> None:
    batch = batches(1)[0]
    expected = tiny_model("llama").generate(
        batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=4
    )
    for tokens in run_ranks(_generated, 2, tp):
        assert torch.equal(tokens, expected)


# -- copies -------------------------------------------------------------------------------------


def _copied(ctx: Context, tp: int, pp: int) -> Any:
    with started(tp, pp) as runtime:
        model = torch.nn.ModuleDict({"lm": tiny_model("llama")})
        optimizer = SGD(model.parameters(), lr=0.1)
        runtime.shard_module(model, optimizers=[optimizer])
        if tp * pp > 1:
            return message(lambda: copy.deepcopy(model), ConfigError)
        twin = copy.deepcopy(model)
        batch = batches(1)[0]
        mine = rows_of(batch, ctx.rank, 2)
        loss = model.lm(**mine).loss
        with runtime.backward(loss):
            loss.backward()
        optimizer.step()
        # Only one rank calls the copy: nothing in it waits for others.
        alone = twin["lm"](**batch).loss.item() if ctx.rank == 0 else None
        return {
            "loss": alone,
            "plain": "goose" not in type(twin["lm"].forward).__module__,
            "gradients": [p.grad is None for p in twin.parameters()],
            "apart": not torch.equal(twin["lm"].lm_head.weight, model["lm"].lm_head.weight),
        }


def test_a_copy_of_a_whole_model_is_a_model_of_its_own() -> None:
    expected, _ = alone(batches(1)[0])
    first, second = run_ranks(_copied, 2, 1, 1)
    assert first["loss"] == pytest.approx(expected, rel=EXACT)
    for rank in (first, second):
        assert rank["plain"]
        assert all(rank["gradients"])
        assert rank["apart"]


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS[:2])
def test_a_copy_of_a_shard_is_refused(tp: int, pp: int) -> None:
    for text in run_ranks(_copied, 2, tp, pp):
        assert "LlamaForCausalLM is a shard" in text
        assert "cannot be deep-copied" in text


COEFFICIENT = 0.1


def _mixture() -> Any:
    settings = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    return tiny_model("mixtral", **settings)


def _balanced(_ctx: Context, tp: int, listed: bool) -> tuple[float, dict[str, Tensor]]:
    with started(tp, 1) as runtime:
        model = _mixture()
        handle = runtime.shard_module(model)
        batch = rows_of(batches(1)[0], runtime.mesh.dp_rank, runtime.mesh.dp_size)
        parts = list(microbatches_of(batch, 2))
        output = model(parts) if listed else model(**batch)
        with runtime.backward(output.loss):
            output.loss.backward()
        assert handle.reducer is not None
        assert model.router_aux_loss_coef == COEFFICIENT
        gates = handle.reducer.full_gradients()
        return output.loss.item(), {n: g for n, g in gates.items() if "gate.weight" in n}


@pytest.mark.parametrize(("tp", "world", "listed"), [(2, 2, False), (1, 2, False), (1, 2, True)])
def test_the_load_balancing_loss_is_the_mean_of_the_calls(
    tp: int, world: int, listed: bool
) -> None:
    model, batch = _mixture(), batches(1)[0]
    dp = world // tp
    calls = list(microbatches_of(batch, dp * (2 if listed else 1)))
    every = [model(**plain(part)) for part in calls]
    logits = torch.cat([output.logits for output in every])
    loss = token_loss(logits, batch["labels"])
    loss = loss + COEFFICIENT * torch.stack([output.aux_loss for output in every]).mean()
    loss.backward()
    expected = {n: g for n, g in named_gradients(model).items() if "gate.weight" in n}
    for mine, gates in run_ranks(_balanced, world, tp, listed):
        # transformers takes the softmax of the routers' logits in fp32 there.
        assert mine == pytest.approx(loss.item(), rel=1e-7)
        assert gates.keys() == expected.keys()
        for name, gradient in gates.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-9)


def _staged(_ctx: Context) -> dict[str, str]:
    with started(1, 2) as runtime:
        in_config = message(lambda: runtime.shard_module(_mixture()), PlanError)
        model = tiny_model("mixtral")
        runtime.shard_module(model)
        batch = {**batches(1)[0], "output_router_logits": True}
        call = message(lambda: model(**batch), BatchError)
        wanted = {**batches(1)[0], "output_hidden_states": True}
        hidden = message(lambda: model(**wanted), BatchError)
        return {"config": in_config, "call": call, "hidden": hidden}


def test_a_pipeline_refuses_a_loss_over_all_routers() -> None:
    for found in run_ranks(_staged, 2):
        assert "output_router_logits=True adds a loss over the routers of all" in found["config"]
        assert "output_router_logits=True adds a loss over the routers of all" in found["call"]


def test_a_pipeline_refuses_tensors_of_all_layers() -> None:
    for found in run_ranks(_staged, 2):
        assert "output_hidden_states=True asks for tensors of all layers" in found["hidden"]


def _own_loss(ctx: Context, tp: int) -> tuple[float, float, str]:
    """Two replicas of a decoder that computes its loss on the spot: as ``ddp`` has them."""
    model: Any = zoo_model("BartForCausalLM", torch.float64)
    # Its cache would have as many layers as its encoder.
    model.config.use_cache = False
    alone = copy.deepcopy(model)
    (batch,) = batches(1, batch_size=4)
    with started(tp=tp) as runtime:
        handle = runtime.shard_module(model)
        mesh = runtime.mesh
        loss = model(**rows_of(batch, mesh.dp_rank, mesh.dp_size)).loss
        with runtime.backward(loss):
            loss.backward()
        parts = [alone(**rows_of(batch, at, mesh.dp_size)).loss for at in range(mesh.dp_size)]
        torch.stack(parts).mean().backward()
        assert loss.item() == pytest.approx(parts[mesh.dp_rank].item(), rel=1e-12)
        mine = handle.reducer.full_gradients()["model.decoder.layernorm_embedding.weight"]
        theirs = alone.model.decoder.layernorm_embedding.weight.grad
        error = float((mine - theirs).norm() / theirs.norm())
        text = message(lambda: model([dict(batch), dict(batch)]), BatchError)
        with torch.no_grad():
            whole = model(**plain(batch)).logits
            expected = alone(**plain(batch)).logits
        return error, float((whole - expected).norm() / expected.norm()), text


def test_a_model_with_a_loss_of_its_own_keeps_it() -> None:
    for error, logits, text in run_ranks(_own_loss, 4, 2):
        assert error < 1e-10
        assert logits < 1e-12
        assert "a list of 2 microbatches needs a model whose loss is a sum over tokens" in text
