"""Adapters on cut layers: what is cut, what is summed, what is refused, and the way back."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from goose_strategy.errors import PlanError
from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.models.registry import plan_for
from goose_strategy.tensor_parallel.layers import HowCut
from goose_strategy.tensor_parallel.lora import check_adapters, cut_adapters, head_layers
from goose_strategy.tensor_parallel.parallelize import modules_to_cut, parallelize, undo
from goose_strategy.tensor_parallel.plan import Style
from goose_strategy.tensor_parallel.slicing import Slicer
from tests.harness.models import tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.parity.lora import LAYERS, LoraCase, lora_config
from tests.tensor_parallel.helpers import awkward_batch, with_mesh

ENDS = LoraCase(targets=(*LAYERS, "embed_tokens", "lm_head"), lora=(("lora_dropout", 0.5),))
LAYER = "model.layers.0"
# Of every factor: the dimension that is cut, or whether its gradient is a share.
EXPECTED = {
    f"{LAYER}.self_attn.q_proj.lora_A.default.weight": (None, True),
    f"{LAYER}.self_attn.q_proj.lora_B.default.weight": (0, False),
    f"{LAYER}.self_attn.o_proj.lora_A.default.weight": (1, False),
    f"{LAYER}.self_attn.o_proj.lora_B.default.weight": (None, False),
    f"{LAYER}.mlp.up_proj.lora_A.default.weight": (None, True),
    f"{LAYER}.mlp.down_proj.lora_B.default.weight": (None, False),
    "model.embed_tokens.lora_embedding_A.default": (1, False),
    "model.embed_tokens.lora_embedding_B.default": (None, False),
    "lm_head.lora_A.default.weight": (None, True),
    "lm_head.lora_B.default.weight": (0, False),
}


def causal_lm(case: LoraCase = ENDS) -> Any:
    return case.model().base_model.model


@with_mesh
def _cut(_ctx: Context, mesh: ParallelMesh) -> dict[str, Any]:
    lm = causal_lm().eval()
    batch = awkward_batch()
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    before = {name: p.detach().clone() for name, p in lm.named_parameters()}
    trained = {name for name, p in lm.named_parameters() if p.requires_grad}
    classes = {name: type(module) for name, module in lm.named_modules()}
    logits = lm(**inputs).logits.detach()
    specs = parallelize(lm, plan_for(lm), mesh)
    cut_logits = lm(**inputs).logits.detach()
    # torch's own tensor parallelism made frozen parameters trainable (pytorch's issue 171709).
    still = {name for name, p in lm.named_parameters() if p.requires_grad}
    head = [layer.gathers_output for layer in head_layers(lm.lm_head)]
    undo(lm)
    after = dict(lm.named_parameters())
    return {
        "places": {name: (specs[name].tp_dim, specs[name].tp_partial) for name in EXPECTED},
        "logits": torch.allclose(logits, cut_logits, rtol=1e-12, atol=1e-12),
        "trained": still == trained,
        "head": head,
        "same": all(torch.equal(before[name], after[name]) for name in before),
        "classes": {name: type(module) for name, module in lm.named_modules()} == classes,
    }


def test_every_factor_is_cut_as_its_layer_asks_and_put_together_again() -> None:
    for found in run_ranks(_cut, 2):
        assert found["places"] == EXPECTED
        assert found["head"] == [True, True]
        assert found["logits"] and found["trained"] and found["same"] and found["classes"]


@pytest.mark.parametrize(
    ("target", "variant"), [("q_proj", "DoraLinearVariant"), ("embed_tokens", "DoraEmbedding")]
)
def test_variants_are_refused_by_name(target: str, variant: str) -> None:
    lm = causal_lm(LoraCase(targets=(target,), lora=(("use_dora", True),)))
    with pytest.raises(PlanError, match=rf"{target}: adapter 'default' is a {variant}"):
        plan_for(lm)


def test_merged_adapters_are_refused() -> None:
    model: Any = ENDS.model()
    model.merge_adapter()
    with pytest.raises(PlanError, match=r"are merged; call unmerge_adapter\(\) first"):
        plan_for(model.base_model.model)


@pytest.mark.parametrize(
    "config",
    [
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        peft.VeraConfig(target_modules=["q_proj"], r=2),
        peft.LoHaConfig(target_modules=["q_proj"], r=2),
        peft.LoraConfig(target_parameters=["q_proj.weight"], target_modules=[], r=2),
        peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM"),
        peft.LNTuningConfig(target_modules=["norm"]),
        peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[5], r=2),
    ],
    ids=lambda config: type(config).__name__,
)
@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
def test_other_adapters_are_refused_by_name(config: Any) -> None:
    model: Any = peft.get_peft_model(tiny_model("llama", layers=1, dtype=torch.float32), config)
    lm = getattr(model.base_model, "model", model.base_model)
    lm = lm if hasattr(lm, "lm_head") else model.base_model
    with pytest.raises(PlanError, match=r"=\w+ \(peft\) cannot be trained with tp > 1"):
        plan_for(lm)


def test_a_saved_module_with_others_inside_is_refused() -> None:
    lm = causal_lm(LoraCase(targets=("q_proj",), lora=(("modules_to_save", ("mlp",)),)))
    with pytest.raises(PlanError, match=r"mlp is in modules_to_save and holds other modules"):
        plan_for(lm)


def test_a_patched_forward_is_refused() -> None:
    lm = causal_lm()
    lm.lm_head.forward = lm.lm_head.forward
    with pytest.raises(PlanError, match=r"lm_head\.forward was replaced"):
        plan_for(lm)
    check_adapters("lm_head", lm.lm_head, is_cut=False)


def test_a_quantised_base_layer_is_refused() -> None:
    lm = causal_lm()
    base = lm.model.layers[0].self_attn.q_proj.base_layer
    base.__class__ = type("Linear4bit", (nn.Linear,), {})
    with pytest.raises(PlanError, match=r"q_proj\.base_layer=Linear4bit cannot be cut"):
        plan_for(lm)


def test_modules_are_listed_under_the_name_of_the_plan() -> None:
    lm = causal_lm()
    found = modules_to_cut(lm, plan_for(lm))
    assert found[f"{LAYER}.self_attn.q_proj"][1] is Style.COLUMN
    assert not any("base_layer" in name or "lora_" in name for name in found)


def test_dropout_of_a_slice_is_the_slice_of_the_whole_mask() -> None:
    def dropped(layer: Any, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        out: Tensor = layer.lora_dropout["default"](x)
        return out

    base = nn.ModuleDict({"down_proj": nn.Linear(8, 4)})
    case = LoraCase(targets=("down_proj",), lora=(("lora_dropout", 0.5),))
    layer: Any = peft.inject_adapter_in_model(lora_config(case), base).get_submodule("down_proj")
    x = torch.rand(3, 8) + 1
    expected = dropped(layer, x)
    assert (expected == 0).any()
    done = cut_adapters(layer, HowCut(Style.ROW), Slicer(parts=2, index=1), None)
    assert torch.equal(dropped(layer, x[:, 4:]), expected[:, 4:])
    layer.eval()
    assert torch.equal(dropped(layer, x[:, 4:]), x[:, 4:])
    for module in done.converted:
        module.restore()
    assert type(layer.lora_dropout["default"]) is nn.Dropout
