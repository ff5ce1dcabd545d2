"""Reports from users of other packages, re-enacted: none of them can happen here.

Each test names the public issue it follows. Further ones lie beside the code they are about
(``grep -rn "#173" tests``).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from goose_strategy.errors import PlanError
from tests.harness.models import IGNORED, batches, tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.parity.grid import Case, assert_parity, run_case
from tests.parity.session import Session
from tests.runtime.start import started


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"tp": 2, "pp": 2}, {"pp": 2, "dp": 2}])
def test_a_tied_head_stays_tied(mesh: dict[str, int]) -> None:
    """NVIDIA/Megatron-LM #656: the copies drifted apart while the loss went on falling.

    The comparison includes that the copies of both stages are equal to the last bit.
    """
    assert_parity(Case(tied=True, steps=8, max_norm=0.3, **mesh))


def test_a_shared_embedding_has_the_gradient_of_both_uses() -> None:
    """NVIDIA/Megatron-LM #844: wrong with the sharded optimizer at pp >= 2 and dp >= 2."""
    run = assert_parity(Case(tied=True, pp=2, dp=2, steps=2))
    one = run.gradients[0]["model.embed_tokens.weight"]
    untied = run_case(Case(tied=False, pp=2, dp=2, steps=1)).gradients[0]
    assert not torch.equal(one, untied["model.embed_tokens.weight"])


@pytest.mark.parametrize(("layers", "pp"), [(5, 2), (5, 4), (7, 2), (7, 4)])
@pytest.mark.parametrize("partition", ["balanced", "uniform"])
def test_no_layer_is_dropped(layers: int, pp: int, partition: str) -> None:
    """pytorch/torchtitan #963, NVIDIA/Megatron-LM #1304: 30 layers on 4 stages became 28."""
    case = Case(
        pp=pp,
        steps=1,
        settings=(("layers", layers),),
        pipeline=(("partition", partition),),
    )
    run = assert_parity(case)
    assert f"model.layers.{layers - 1}.mlp.down_proj.weight" in run.parameters


@pytest.mark.parametrize(("kv_heads", "tp"), [(1, 2), (1, 4), (2, 4)])
def test_fewer_key_heads_than_ranks(kv_heads: int, tp: int) -> None:
    """huggingface/transformers #48307: crashed, and with gathered keys trained wrongly."""
    assert_parity(Case(tp=tp, steps=2, settings=(("num_key_value_heads", kv_heads),)))


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 2, "pp": 2}, {"tp": 2, "dp": 2}])
def test_the_loss_does_not_grow_with_the_ranks(mesh: dict[str, int]) -> None:
    """huggingface/transformers #39674: each tp rank counted the loss once more."""
    alone = run_case(Case(steps=1)).losses
    assert run_case(Case(steps=1, **mesh)).losses == pytest.approx(alone, rel=1e-4)
    assert_parity(Case(steps=2, accumulate=2, **mesh))


def _stepped(_ctx: Context) -> dict[str, bool]:
    with started(2, 1) as runtime:
        model = tiny_model("llama")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        handle = runtime.shard_module(model, optimizers=[optimizer])
        held = [p for group in optimizer.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in model.parameters()]
        loss = model(**batches(1)[0]).loss
        with runtime.backward(loss):
            loss.backward()
        optimizer.step()
        cut = {name for name, spec in handle.surgery.specs.items() if spec.is_sharded}
        after = dict(model.named_parameters())
        return {
            "the model's": {id(p) for p in held} == {id(p) for p in model.parameters()},
            "moved": all(
                not torch.equal(old, new) for old, new in zip(before, after.values(), strict=True)
            ),
            "cut": bool(cut),
        }


def test_an_optimizer_built_before_steps_the_cut_parameters() -> None:
    """huggingface/accelerate #3835: it went on stepping what the model had been before."""
    for found in run_ranks(_stepped, 2):
        assert all(found.values()), found


def one_labelled(session: Session, _case: Case) -> None:
    """Only one microbatch has labels, each in its turn."""
    whole = batches(1, batch_size=6)[0]
    for kept in range(3):
        labels = whole["labels"].clone()
        rows = torch.arange(6) // 2 != kept
        labels[rows] = IGNORED
        session.backward(session.loss({**whole, "labels": labels}))
        session.step()


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize("pp", [2, 4])
def test_a_microbatch_meets_its_own_labels(pp: int, schedule: str) -> None:
    """microsoft/DeepSpeed #5729: outputs of one batch were compared with labels of another."""
    case = Case(pp=pp, schedule=schedule, microbatches=3)
    run = assert_parity(case, scenario=one_labelled)
    assert len(set(run.losses)) == 3


def test_heads_that_tp_does_not_divide_are_refused_with_what_works() -> None:
    """The same report's other half: a clear answer in the place of an error in a reshape."""
    case = replace(Case(tp=2, steps=1), settings=(("heads", 3), ("num_key_value_heads", 3)))
    with pytest.raises(Exception, match=r"tp sizes that work: 1, 3; or keep attention whole") as e:
        run_case(case)
    assert PlanError.__name__ in str(e.value)
