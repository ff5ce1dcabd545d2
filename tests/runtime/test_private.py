"""Private calls of a sharded module: what they refuse, and losses of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from goose_strategy.errors import ConfigError, PlanError
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.privacy.config import PrivacyConfig
from goose_strategy.privacy.losses import PerSampleLoss
from goose_strategy.runtime.private import check_tie, private_pipeline
from tests.harness.compare import assert_close_named
from tests.harness.models import IGNORED, batches, tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.privacy.oracle import (
    PrivateCase,
    ledger_of,
    per_sample_losses,
    reference_call,
    run_call,
    start,
)

LLAMA = PrivateCase(tied=True, schedule="ZBH1")
BATCH = batches(1, batch_size=6)[0]


# -- what is refused ------------------------------------------------------------------------------

Act = Callable[[Any, Any, Any], Any]


def _call(handle: Any, **more: Any) -> Tensor:
    loss: Tensor = handle.module(**BATCH, **more).loss
    return loss


def _backward(runtime: Any, loss: Tensor) -> None:
    with runtime.backward(loss):
        loss.backward()


def scaled(runtime: Any, handle: Any, optimizer: Any) -> None:
    _backward(runtime, 2 * _call(handle))


def two_calls(runtime: Any, handle: Any, optimizer: Any) -> None:
    for _ in range(2):
        _backward(runtime, _call(handle))


def step_without_a_call(runtime: Any, handle: Any, optimizer: Any) -> None:
    _backward(runtime, _call(handle))
    optimizer.step()
    optimizer.step()


def two_losses(runtime: Any, handle: Any, optimizer: Any) -> None:
    loss = _call(handle) + _call(handle)
    _backward(runtime, loss)
    optimizer.step()


def accumulated(runtime: Any, handle: Any, optimizer: Any) -> None:
    with runtime.no_sync(handle.module):
        _backward(runtime, _call(handle))


def clipped_again(runtime: Any, handle: Any, optimizer: Any) -> None:
    _backward(runtime, _call(handle))
    runtime.clip_grad_norm(optimizer, 1.0)


def clipped_by_value(runtime: Any, handle: Any, optimizer: Any) -> None:
    _backward(runtime, _call(handle))
    runtime.clip_grad_value(optimizer, 1.0)


def past_the_call(runtime: Any, handle: Any, optimizer: Any) -> None:
    logits = handle.module(**{k: v for k, v in BATCH.items() if k != "labels"}).logits
    logits.sum().backward()


def own_divisor(runtime: Any, handle: Any, optimizer: Any) -> None:
    _call(handle, num_items_in_batch=7)


def without_a_mark(runtime: Any, handle: Any, optimizer: Any) -> None:
    ledger = ledger_of(runtime)
    ledger.config = replace(ledger.config, sampling="poisson")
    _call(handle)


def one_draw_twice(runtime: Any, handle: Any, optimizer: Any) -> None:
    ledger = ledger_of(runtime)
    ledger.config = replace(ledger.config, sampling="poisson")
    ledger.know_data(20)
    mark = torch.full((6,), 3)
    for _ in range(2):
        _backward(runtime, _call(handle, sample_mask=mark))
        optimizer.step()


def a_mark_of_other_rows(runtime: Any, handle: Any, optimizer: Any) -> None:
    _call(handle, sample_mask=torch.ones(3, dtype=torch.long))


def a_weight_used_twice(runtime: Any, handle: Any, optimizer: Any) -> None:
    first, second = handle.module.model.layers[0].mlp, handle.module.model.layers[1]
    second.mlp.gate_proj, second.mlp.up_proj = first.gate_proj, first.up_proj
    _call(handle)


def a_kernel_past_the_layers(runtime: Any, handle: Any, optimizer: Any) -> None:
    mlp = handle.module.model.layers[0].mlp

    def fused(x: Tensor) -> Tensor:
        return mlp.down_proj(torch.nn.functional.linear(x, mlp.gate_proj.weight))

    mlp.forward = fused
    _call(handle)


def flattened(runtime: Any, handle: Any, optimizer: Any) -> None:
    mlp = handle.module.model.layers[0].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(x.reshape(-1, x.shape[-1])).view(x.shape)
    _call(handle)


def a_second_optimizer(runtime: Any, handle: Any, optimizer: Any) -> None:
    other = torch.optim.SGD([next(handle.module.parameters())], lr=0.1)
    runtime.attach_optimizers(handle.module, [optimizer, other])


def an_optimizer_that_leaves_one_out(runtime: Any, handle: Any, optimizer: Any) -> None:
    params = list(handle.module.parameters())
    runtime.attach_optimizers(handle.module, [torch.optim.SGD(params[1:], lr=0.1)])


def a_hook_of_ones_own(runtime: Any, handle: Any, optimizer: Any) -> None:
    handle.module.model.norm.weight.register_hook(lambda gradient: gradient * 100)
    _call(handle)


def a_norm_that_was_thawed(runtime: Any, handle: Any, optimizer: Any) -> None:
    # It was frozen at the set-up, so its gradient would reach it by itself, unclipped.
    handle.module.model.norm.weight.requires_grad_()
    _call(handle)


def a_second_module(runtime: Any, handle: Any, optimizer: Any) -> None:
    runtime.shard_module(tiny_model("llama"))


REFUSED: dict[Act, tuple[str, str]] = {
    scaled: ("PrivacyError", "multiplied by 2"),
    two_calls: ("PrivacyError", "one call per step"),
    step_without_a_call: ("PrivacyError", "after 0 calls"),
    two_losses: ("PrivacyError", "after 2 calls"),
    accumulated: ("PrivacyError", "cannot be accumulated"),
    clipped_again: ("ConfigError", "gradient_clip_val"),
    clipped_by_value: ("ConfigError", "gradient_clip_val"),
    past_the_call: ("PrivacyError", "backward outside of model"),
    own_divisor: ("ScheduleError", "num_items_in_batch"),
    without_a_mark: ("PrivacyError", "carries no sample_mask"),
    one_draw_twice: ("PrivacyError", "draw 3 was used after"),
    a_mark_of_other_rows: ("PrivacyError", r"shape \(3,\)"),
    a_weight_used_twice: ("ScheduleError", "used more than once"),
    a_kernel_past_the_layers: ("ScheduleError", "gate_proj.weight got a gradient"),
    flattened: ("ScheduleError", "before it is flattened"),
    a_second_optimizer: ("ConfigError", "2 optimizers"),
    an_optimizer_that_leaves_one_out: ("ConfigError", "1 trainable .* in no group"),
    a_hook_of_ones_own: ("PrivacyError", "model.norm.weight has a hook"),
    a_norm_that_was_thawed: ("PrivacyError", "model.norm.weight was frozen"),
    a_second_module: ("ConfigError", "covers one module"),
}


@dataclass
class Outcome:
    """What an act raised, and whether the weights had changed by then."""

    kind: str
    message: str
    untouched: bool


def play(ctx: Context, acts: list[Act]) -> list[Outcome]:
    """Run acts one after another, each on a model of its own."""
    return [_played(act) for act in acts]


def _played(act: Act) -> Outcome:
    runtime = None
    try:
        case = replace(LLAMA, frozen=("model.norm",)) if act is a_norm_that_was_thawed else LLAMA
        runtime, handle, optimizer = start(case)
        before = {n: p.detach().clone() for n, p in handle.module.named_parameters()}
        try:
            act(runtime, handle, optimizer)
        except Exception as error:  # noqa: BLE001
            cause = f"{error} {error.__cause__}"
            now = dict(handle.module.named_parameters())
            same = all(torch.equal(param, before[name]) for name, param in now.items())
            return Outcome(type(error).__name__, cause, same)
        return Outcome("nothing", "", True)
    finally:
        if runtime is not None:
            runtime.stop()


def test_what_would_break_the_promise_is_refused() -> None:
    outcomes = run_ranks(play, 1, list(REFUSED))[0]
    stepped = {step_without_a_call, one_draw_twice}
    import re

    for (act, (kind, text)), outcome in zip(REFUSED.items(), outcomes, strict=True):
        name = act.__name__
        assert outcome.kind == kind, f"{name}: {outcome.kind}: {outcome.message}"
        assert re.search(text, outcome.message), f"{name}: {outcome.message}"
        assert outcome.untouched or act in stepped, f"{name} changed weights"


# -- a loss of the user's own ---------------------------------------------------------------------


def own_loss(outputs: Any, microbatch: dict[str, Any]) -> tuple[Tensor, int]:
    """Every row's mean over its own tokens."""
    losses = per_sample_losses(outputs["logits"], microbatch["labels"])
    return losses, 1


def coupled_loss(outputs: Any, microbatch: dict[str, Any]) -> tuple[Tensor, int]:
    """Rows divided by the tokens of all of them."""
    labels = microbatch["labels"]
    losses = per_sample_losses(outputs["logits"], labels)
    return losses * 10 / (labels != IGNORED).sum(), 1


def scalar_loss(outputs: Any, microbatch: dict[str, Any]) -> tuple[Tensor, int]:
    """One number for all rows."""
    return own_loss(outputs, microbatch)[0].mean(), 1


@pytest.mark.parametrize("mesh", [{}, {"pp": 2, "tp": 2}], ids=["alone", "pp2-tp2"])
def test_a_loss_function_per_sample(mesh: dict[str, int]) -> None:
    pipeline = (("loss_fn", own_loss),)
    case = PrivateCase(tied=True, pipeline=pipeline, **mesh).clipped_at(6.0)  # type: ignore[arg-type]
    mine = run_call(case, BATCH)
    theirs = reference_call(LLAMA.clipped_at(6.0), BATCH)
    assert torch.allclose(mine.norms, theirs.norms, rtol=1e-9)
    assert_close_named(mine.sums, theirs.sums, 1e-9)
    assert mine.loss == pytest.approx(theirs.loss, rel=1e-9)


@pytest.mark.parametrize(
    ("loss", "match"), [(coupled_loss, "depend on one another"), (scalar_loss, "one loss per")]
)
def test_a_loss_function_that_couples_samples_is_refused(loss: Any, match: str) -> None:
    from tests.harness.world import RankFailure

    case = PrivateCase(tied=True, pipeline=(("loss_fn", loss),), microbatches=2)
    with pytest.raises(RankFailure, match=match):
        run_call(case, BATCH)


def test_the_settings_of_the_pipeline_check_a_loss_function_once() -> None:
    plain = PipelineConfig()
    assert private_pipeline(plain) is plain
    checked = private_pipeline(PipelineConfig(loss_fn=own_loss))
    assert isinstance(checked.loss_fn, PerSampleLoss)
    assert private_pipeline(checked) is checked


# -- models that cannot be trained privately ------------------------------------------------------


def setup_error(ctx: Context, case: PrivateCase, change: Callable[[Any], None]) -> str:
    """Return what the set-up of a changed model raises."""

    class Changed(type(case)):  # type: ignore[misc]
        def model(self) -> nn.Module:
            model = super().model()
            change(model)
            return model  # type: ignore[no-any-return]

    runtime = None
    changed = Changed(**{f: getattr(case, f) for f in case.__dataclass_fields__})
    try:
        runtime, _, _ = start(changed)
    except (ConfigError, PlanError) as error:
        return str(error)
    finally:
        if runtime is not None:
            runtime.stop()
    return "nothing"


def nothing(_model: Any) -> None:
    """Change nothing."""


def with_batch_norm(model: Any) -> None:
    model.model.norm = nn.BatchNorm1d(32, dtype=torch.float64).requires_grad_(False)


def with_a_scale(model: Any) -> None:
    model.model.layers[1].scale = nn.Parameter(torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("case", "change", "match"),
    [
        (PrivateCase(), with_batch_norm, r"model.norm \(BatchNorm1d\): a batch norm"),
        (PrivateCase(), with_a_scale, r"model.layers.1.scale \(LlamaDecoderLayer\)"),
        (PrivateCase(family="mixtral"), nothing, r"experts.gate_up_proj"),
        (PrivateCase(family="opt"), nothing, r"embed_positions.weight"),
    ],
    ids=["batch norm", "a scale", "experts", "other embeddings"],
)
def test_a_parameter_without_a_rule_is_refused_by_name(
    case: PrivateCase, change: Callable[[Any], None], match: str
) -> None:
    import re

    message = run_ranks(setup_error, 1, case, change)[0]
    assert re.search(match, message), message


def test_clipping_by_stage_refuses_a_weight_on_two_stages() -> None:
    case = replace(LLAMA, pp=2).clipped_at(1.0, clipping="per_stage")
    for message in run_ranks(setup_error, 2, case, nothing):
        assert "clipping='per_stage' cannot bound" in message


def test_ties_of_another_kind_are_refused() -> None:
    check_tie("w", [nn.Embedding(2, 2), nn.Linear(2, 2)], here=True, apart=False)
    check_tie("w", [nn.Embedding(2, 2)], here=False, apart=True)
    for users, here in (
        ([nn.Linear(2, 2), nn.Linear(2, 2)], True),
        ([nn.Embedding(2, 2)] * 2, True),
        ([nn.Embedding(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)], True),
    ):
        with pytest.raises(PlanError, match="w is shared by"):
            check_tie("w", users, here=here, apart=False)
    with pytest.raises(PlanError):
        check_tie("w", [nn.Embedding(2, 2), nn.Linear(2, 2)], here=True, apart=True)


def test_the_default_settings_are_private() -> None:
    config = PrivacyConfig(noise_multiplier=1.0)
    assert config.is_private
    assert config.clipping == "flat"
