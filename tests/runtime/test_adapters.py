"""Adapters leave a mesh as peft reads them, and merge into the weights without communication."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from transformers.models.auto import AutoModelForCausalLM

from goose_strategy.checkpoint.save import Contents, save_checkpoint
from goose_strategy.errors import CheckpointError, ConfigError
from goose_strategy.hub.config import ExportConfig
from goose_strategy.hub.pretrained import from_pretrained
from goose_strategy.mesh.shard import ShardSpec
from goose_strategy.runtime.adapters import PlainView, merged_tensors, plain_name
from goose_strategy.runtime.core import ParallelRuntime
from goose_strategy.runtime.export import export_checkpoint
from goose_strategy.runtime.state import model_tensors, origins_of
from tests.harness.models import batches, rows_of, tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.hub.checkpoints import save
from tests.parity.grid import Case, assemble
from tests.parity.lora import LAYERS, LoraCase, with_adapters
from tests.runtime.start import message, started

Pieces = dict[str, tuple[ShardSpec, Tensor]]
BIASED = (("attention_bias", True), ("mlp_bias", True))
CASES = {
    "linear layers": LoraCase(settings=BIASED, lora=(("lora_bias", True),)),
    "embedding and saved head": LoraCase(
        targets=("embed_tokens", "q_proj"), lora=(("modules_to_save", ("lm_head", "norm")),)
    ),
    "transposed and fused": LoraCase(family="gpt2", targets=("c_attn", "c_proj", "wte")),
    "tied embedding": LoraCase(targets=("embed_tokens", *LAYERS), tied=True),
    "one key head": LoraCase(settings=(("num_key_value_heads", 1),)),
    "two adapters": LoraCase(adapters=("first", "second")),
}
MESHES = {(2, 1): 2, (1, 2): 2, (2, 2): 8}


def train(runtime: ParallelRuntime, model: nn.Module) -> Any:
    """Shard, and take two steps."""
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    handle = runtime.shard_module(model, optimizers=[optimizer])
    mesh = runtime.mesh
    for batch in batches(2, batch_size=8):
        loss = model(**rows_of(batch, mesh.dp_rank, mesh.dp_size)).loss
        with runtime.backward(loss):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return handle


def pieces(handle: Any) -> Pieces:
    specs = handle.surgery.specs
    return {n: (specs[n], p.detach().clone()) for n, p in handle.module.named_parameters()}


def _export(_ctx: Context, case: LoraCase, sizes: tuple[int, int], path: Path) -> dict[str, Any]:
    with started(*sizes) as runtime:
        model = case.model()
        handle = train(runtime, model)
        before = pieces(handle)
        for _ in range(2):  # over an earlier export, too
            runtime.export_adapter(model, path, adapter=case.adapters[-1])
        model.eval()
        if not case.tied:
            runtime.export(model, path.parent / "plain")
        if case.tied:
            act = runtime.merged_adapters(model).__enter__
            return {"trained": before, "refused": message(act, ConfigError)}
        with runtime.merged_adapters(model):
            inside = pieces(handle)
            layers = [m for m in model.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
            flags = {layer.merged for layer in layers if any(True for _ in layer.parameters())}
        alone = {
            f"{name}.base_layer.{key}": value
            for name, layer in model.named_modules()
            if isinstance(layer, peft.tuners.lora.LoraLayer)
            and any(True for _ in layer.parameters())
            for key, value in merged_tensors(layer).items()
        }
        after = pieces(handle)
    return {
        "trained": before,
        "merged": {
            plain: (spec, value)
            for name, (spec, value) in inside.items()
            if (plain := plain_name(name, case.adapters[-1])) is not None
        },
        "alone": all(torch.equal(inside[name][1], value) for name, value in alone.items()),
        "flags": flags,
        "restored": all(torch.equal(before[n][1], after[n][1]) for n in before),
        "changed": any(not torch.equal(before[n][1], inside[n][1]) for n in before),
    }


def plain_model(case: LoraCase) -> nn.Module:
    """Return the base model before training."""
    return Case.model(case)


def test_a_plain_view_merges_what_is_active() -> None:
    model: Any = LoraCase(adapters=("first", "second"), targets=("q_proj",)).model()
    lm = model.base_model.model
    view = PlainView(lm)
    plain = "model.layers.0.self_attn.q_proj.weight"
    assert view.name("model.layers.0.self_attn.q_proj.base_layer.weight") == plain
    assert view.name("model.layers.0.self_attn.q_proj.lora_A.first.weight") is None
    assert view.merged("model.norm.weight") is None
    merged = view.merged(plain)
    model.merge_adapter()
    assert merged is not None
    assert torch.equal(merged, lm.model.layers[0].self_attn.q_proj.base_layer.weight)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    (batch,) = batches(1)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    found: Tensor = model.eval()(**inputs).logits
    return found


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_an_adapter_of_a_mesh_is_one_of_peft(
    case: LoraCase, sizes: tuple[int, int], tmp_path: Path
) -> None:
    ranks = run_ranks(_export, MESHES[sizes], case, sizes, tmp_path / "adapter")
    expected: Any = case.model()
    start = {name: p.detach().clone() for name, p in expected.named_parameters()}
    whole = assemble([rank["trained"] for rank in ranks], "parameters")
    expected.load_state_dict(whole, strict=False)
    # In mcore-bridge's issue 173 the exported lora_B was zero: it had never been trained.
    moved = {n for n, p in expected.named_parameters() if not torch.equal(p, start[n])}
    assert moved == {n for n, p in expected.named_parameters() if p.requires_grad}
    loaded: Any = peft.PeftModel.from_pretrained(plain_model(case), str(tmp_path / "adapter"))
    assert loaded.peft_config["default"].r == 4
    assert torch.equal(logits(loaded), logits(expected))

    if case.tied:
        assert all("embed_tokens cannot be merged" in rank["refused"] for rank in ranks)
        return
    plain = plain_model(case)
    merged = assemble([rank["merged"] for rank in ranks], "merged weights")
    plain.load_state_dict(merged)
    torch.testing.assert_close(logits(plain), logits(expected), rtol=1e-10, atol=1e-10)
    exported = type(plain).from_pretrained(tmp_path / "plain", dtype=case.dtype)
    for name, param in exported.named_parameters():
        assert torch.equal(param, merged[name]), name
    for rank in ranks:
        assert rank["alone"] and rank["restored"] and rank["changed"]
        assert rank["flags"] == {True}


def adapted(base: nn.Module) -> nn.Module:
    """Return fp32 base weights with adapters that are equal everywhere."""
    case = LoraCase(targets=("q_proj", "down_proj"), dtype=torch.float32)
    return with_adapters(base, case)


def _unread(_ctx: Context, folder: Path) -> None:
    with started(2, 2) as runtime:
        model = adapted(from_pretrained(folder / "base"))
        train(runtime, model)
        runtime.export_adapter(model, folder / "adapter")


def test_adapters_on_weights_that_are_read_at_the_set_up(tmp_path: Path) -> None:
    """From a folder of the hub to an adapter of it, without the whole model on any rank."""
    save(tmp_path / "base", "llama")
    run_ranks(_unread, 4, tmp_path)
    config = peft.PeftConfig.from_pretrained(str(tmp_path / "adapter"))
    assert config.base_model_name_or_path == str(tmp_path / "base")
    start: Any = adapted(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    optimizer = AdamW([p for p in start.parameters() if p.requires_grad], lr=1e-2)
    for batch in batches(2, batch_size=8):
        start(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    trained = {name: p for name, p in start.named_parameters() if p.requires_grad}
    for name, param in loaded.named_parameters():
        if name in trained:
            # AdamW's first steps turn rounding of the smallest gradients into signs.
            torch.testing.assert_close(param, trained[name], rtol=0, atol=2e-3)
    torch.testing.assert_close(logits(loaded), logits(start), rtol=1e-3, atol=1e-3)


def _refused(_ctx: Context, path: Path) -> dict[str, str]:
    path.write_text("a file in the way")
    found: dict[str, str] = {}
    with started(1, 2) as runtime:
        model = CASES["two adapters"].model()
        found["stranger"] = message(lambda: runtime.export_adapter(model, path), ConfigError)
        runtime.shard_module(model)
        found["unknown"] = message(
            lambda: runtime.export_adapter(model, path, adapter="third"), ConfigError
        )
        found["failed"] = message(
            lambda: runtime.export_adapter(model, path, adapter="first"), CheckpointError
        )
    with started(1, 2) as runtime:
        plain = tiny_model("llama")
        runtime.shard_module(plain)
        found["plain"] = message(lambda: runtime.export_adapter(plain, path), ConfigError)
    return found


def test_all_ranks_refuse_what_cannot_be_exported(tmp_path: Path) -> None:
    for found in run_ranks(_refused, 2, tmp_path / "file"):
        assert "not sharded by this runtime" in found["stranger"]
        assert found["unknown"] == "adapter='third' is not one of the model's: first, second."
        assert "exporting adapter='first'" in found["failed"]
        assert "holds 0 PeftModels" in found["plain"]


def _saved_copy_of_a_tie(_ctx: Context, path: Path) -> list[str]:
    saved = (("modules_to_save", ("embed_tokens",)),)
    with started(1, 2) as runtime, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = LoraCase(targets=("q_proj",), tied=True, lora=saved).model()
        runtime.shard_module(model)
        return [message(lambda: runtime.export(model, path), ConfigError)]


def test_a_copy_of_a_tied_weight_is_not_exported_as_if_both_were_it(tmp_path: Path) -> None:
    for (found,) in run_ranks(_saved_copy_of_a_tie, 2, tmp_path / "plain"):
        assert "embed_tokens cannot be merged: its weight is tied" in found
    assert not (tmp_path / "plain").exists()


def _with_adapters(_ctx: Context, path: Path) -> str:
    with started(1, 1) as runtime:
        model = LoraCase(targets=("q_proj",)).model()
        handle = runtime.shard_module(model)
        contents = Contents(
            tensors=model_tensors("model", handle), models={"model": origins_of(handle)}
        )
        save_checkpoint(path, contents, mesh=runtime.mesh)
    return message(
        lambda: export_checkpoint(path, path.parent / "plain", ExportConfig()), ConfigError
    )


def test_a_checkpoint_with_adapters_is_not_exported_offline(tmp_path: Path) -> None:
    (found,) = run_ranks(_with_adapters, 1, tmp_path / "ckpt")
    assert "holds adapters, which need their layers to be merged" in found


def test_plain_names_are_those_without_adapters() -> None:
    case = CASES["embedding and saved head"]
    names = {plain_name(name) for name, _ in case.model().named_parameters()} - {None}
    assert names == {name for name, _ in plain_model(case).named_parameters()}
    assert plain_name("base_model.model.lm_head.modules_to_save.other.weight") is None
    assert plain_name("base_model.model.lm_head.modules_to_save.other.weight", "other") == (
        "lm_head.weight"
    )


def _unmergeable(ctx: Context, settings: dict[str, Any], folder: str) -> list[str]:
    """What an export of adapters says that cannot be written into the weights below them."""
    base = tiny_model("llama", dtype=torch.float32)
    with warnings.catch_warnings():
        # peft warns that its own merge would fail.
        warnings.simplefilter("ignore", UserWarning)
        config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", **settings)
        model = peft.get_peft_model(base, config)
    with started(1, 2) as runtime:
        runtime.shard_module(model)
        return [
            message(lambda: runtime.export(model, f"{folder}/out"), ConfigError),
            message(lambda: runtime.merged_adapters(model).__enter__(), ConfigError),
        ]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"target_modules": ["q_proj"], "use_dora": True}, "not plain LoRA"),
        ({"target_modules": ["q_proj"], "lora_bias": True}, r"adds a bias \(lora_bias=True\)"),
    ],
)
def test_what_cannot_be_merged_is_refused(
    settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """DoRA scales the sum of both: merging the factors alone would be silently wrong."""
    for found in run_ranks(_unmergeable, 2, settings, str(tmp_path)):
        for said in found:
            assert re.search(f"cannot be merged: adapter 'default' .*{reason}", said), said
            assert "export_adapter" in said
    assert not (tmp_path / "out").exists()
