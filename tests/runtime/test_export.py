"""A model goes from its ranks, or from its checkpoint, into files that transformers loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationConfig
from transformers.models.auto import AutoModelForCausalLM

from goose_strategy.checkpoint.save import Contents, save_checkpoint
from goose_strategy.errors import CheckpointError, ConfigError, PlanError
from goose_strategy.hub.config import ExportConfig
from goose_strategy.hub.pretrained import from_pretrained
from goose_strategy.hub.write import HubWriter
from goose_strategy.runtime.core import ParallelRuntime
from goose_strategy.runtime.export import export_checkpoint
from goose_strategy.runtime.state import identity_of, model_tensors, origins_of
from tests.harness.models import batches
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.hub.checkpoints import hub_model, keys_of, parameters_of, refused, save
from tests.parity.lora import LoraCase, with_adapters
from tests.runtime.start import message, started

IDS = torch.arange(3, 40).reshape(1, -1)


class Holder(nn.Module):
    """As a LightningModule holds a model: under a name, beside other things."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm
        self.register_buffer("seen", torch.zeros(3))


def save_ours(runtime: ParallelRuntime, module: nn.Module, path: Path) -> None:
    model = runtime.model_of(module)
    assert model is not None
    contents = Contents(
        tensors=model_tensors("model", model),
        identity=identity_of(model),
        models={"model": origins_of(model)},
    )
    save_checkpoint(path, contents, mesh=runtime.mesh)


def _export(ctx: Context, folder: str, tp: int, pp: int, settings: dict[str, Any]) -> None:
    """Train a step, then write the model both ways, and what it is to one file per tensor."""
    base = Path(folder)
    held = Holder(from_pretrained(base / "in").train())
    optimizer = torch.optim.SGD(held.parameters(), lr=0.5)
    with started(tp, pp) as runtime:
        runtime.shard_module(held, optimizers=[optimizer])
        loss = held.lm(**batches(1, batch_size=8)[0]).loss
        with runtime.backward(loss):
            loss.backward()
        optimizer.step()
        runtime.export(held, base / "online", **settings)
        save_ours(runtime, held, base / "ckpt")


def reference(folder: Path) -> Any:
    """Do the same step in one process."""
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(**batches(1, batch_size=8)[0]).loss.backward()
    optimizer.step()
    return model.eval()


def reloaded(folder: Path) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


CASES: list[tuple[str, dict[str, Any], torch.dtype, int, int, int]] = [
    ("llama", {}, torch.float32, 8, 2, 2),
    ("llama", {"tie_word_embeddings": True}, torch.float32, 8, 2, 2),
    ("llama", {}, torch.bfloat16, 4, 2, 2),
    ("qwen3", {"tie_word_embeddings": True}, torch.bfloat16, 2, 2, 1),
    ("gpt2", {}, torch.float32, 4, 2, 2),
    ("phi3", {}, torch.bfloat16, 2, 2, 1),
    ("mixtral", {}, torch.float32, 8, 2, 2),
]


@pytest.mark.parametrize(("family", "settings", "dtype", "ranks", "tp", "pp"), CASES)
def test_transformers_loads_the_export_with_equal_logits(
    tmp_path: Path,
    family: str,
    settings: dict[str, Any],
    dtype: torch.dtype,
    ranks: int,
    tp: int,
    pp: int,
) -> None:
    save(tmp_path / "in", family, dtype=dtype, **settings)
    GenerationConfig(temperature=0.25, do_sample=True).save_pretrained(tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    run_ranks(_export, ranks, str(tmp_path), tp, pp, {"max_shard_size": "30KB"})
    export_checkpoint(tmp_path / "ckpt", tmp_path / "offline", ExportConfig())
    online, offline = reloaded(tmp_path / "online"), reloaded(tmp_path / "offline")
    for name, param in parameters_of(online).items():
        assert param.dtype == dtype
        assert torch.equal(param, parameters_of(offline)[name]), name
    with torch.no_grad():
        assert torch.equal(online(IDS).logits, offline(IDS).logits)
    # The step itself is as exact as a step over ranks is; what it changed is larger by far.
    expected, start = reference(tmp_path / "in"), hub_model(family, dtype=dtype, **settings)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for name, param in parameters_of(online).items():
        torch.testing.assert_close(param, parameters_of(expected)[name], rtol=0, atol=tolerance)
    assert not torch.equal(
        online.get_input_embeddings().weight, start.get_input_embeddings().weight
    )
    for folder in (tmp_path / "online", tmp_path / "offline"):
        assert keys_of(folder) == keys_of(tmp_path / "in")
        assert reloaded(folder).generation_config.temperature == 0.25
        assert (folder / "tokenizer.json").read_text() == "{}"
        theirs = json.loads((tmp_path / "in" / "config.json").read_text())
        assert json.loads((folder / "config.json").read_text()) == theirs
    assert not list(tmp_path.glob("*.incomplete"))
    assert len(list((tmp_path / "online").glob("model-*.safetensors"))) > 1
    assert (tmp_path / "offline" / "model.safetensors").is_file()


def test_a_tied_head_is_in_the_files_once_and_none_is_empty(tmp_path: Path) -> None:
    # pytorch/torchtitan#3764: a tied head became a safetensors file of zero bytes.
    save(tmp_path / "in", "llama", tie_word_embeddings=True)
    run_ranks(_export, 4, str(tmp_path), 2, 2, {"max_shard_size": 1})
    files = list((tmp_path / "online").glob("*.safetensors"))
    assert len(files) == len(keys_of(tmp_path / "in"))
    assert all(file.stat().st_size > 64 for file in files)
    assert "lm_head.weight" not in keys_of(tmp_path / "online")
    model = reloaded(tmp_path / "online")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def _as_loaded(ctx: Context, folder: str, settings: dict[str, Any]) -> None:
    model = from_pretrained(f"{folder}/in")
    with started(2, 2) as runtime:
        runtime.shard_module(model)
        runtime.export(model, f"{folder}/out", **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_untouched_model_is_exported_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    save(tmp_path / "in", "llama")
    run_ranks(_as_loaded, 4, str(tmp_path), {"dtype": dtype})
    exported, source = reloaded(tmp_path / "out"), reloaded(tmp_path / "in")
    assert exported.config.dtype == dtype
    for name, param in parameters_of(source).items():
        assert torch.equal(parameters_of(exported)[name], param.to(dtype))
    if dtype == torch.float32:
        with torch.no_grad():
            assert torch.equal(exported(IDS).logits, source(IDS).logits)


def _tied_by_hand(ctx: Context, folder: str) -> None:
    """A tie that the config does not know of: files must have both names."""
    model = from_pretrained(f"{folder}/in")
    model.lm_head.weight = model.model.embed_tokens.weight
    with started(2, 2) as runtime:
        runtime.shard_module(model)
        runtime.export(model, f"{folder}/online")
        save_ours(runtime, model, Path(folder) / "ckpt")


def test_a_tie_that_the_config_does_not_make_is_written_twice(tmp_path: Path) -> None:
    save(tmp_path / "in", "llama", tie_word_embeddings=False)
    run_ranks(_tied_by_hand, 4, str(tmp_path))
    export_checkpoint(tmp_path / "ckpt", tmp_path / "offline", ExportConfig())
    for name in ("online", "offline"):
        model = reloaded(tmp_path / name)
        assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
        assert keys_of(tmp_path / name) == keys_of(tmp_path / "in")


def _adapted(ctx: Context, folder: str, tp: int, pp: int) -> bool:
    """Train adapters, export twice; inside a block that has merged them already, too."""
    case = LoraCase(family="llama", dtype=torch.float32)
    model = with_adapters(from_pretrained(f"{folder}/in"), case)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    with started(tp, pp) as runtime:
        runtime.shard_module(model, optimizers=[optimizer])
        loss = model(**batches(1, batch_size=8)[0]).loss
        with runtime.backward(loss):
            loss.backward()
        optimizer.step()
        before = [param.detach().clone() for param in model.parameters()]
        runtime.export(model, f"{folder}/online")
        with runtime.merged_adapters(model):
            runtime.export(model, f"{folder}/inside")
        return all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_adapters_are_merged_into_an_export(tmp_path: Path) -> None:
    save(tmp_path / "in", "llama")
    assert run_ranks(_adapted, 4, str(tmp_path), 2, 2) == [True] * 4
    online, inside = reloaded(tmp_path / "online"), reloaded(tmp_path / "inside")
    case = LoraCase(family="llama", dtype=torch.float32)
    alone = with_adapters(reloaded(tmp_path / "in"), case)
    optimizer = torch.optim.SGD([p for p in alone.parameters() if p.requires_grad], lr=0.5)
    alone(**batches(1, batch_size=8)[0]).loss.backward()
    optimizer.step()
    merged = parameters_of(alone.merge_and_unload())
    source = parameters_of(reloaded(tmp_path / "in"))
    for name, param in parameters_of(online).items():
        torch.testing.assert_close(param, merged[name], rtol=0, atol=2e-5)
        assert torch.equal(param, parameters_of(inside)[name])
        assert torch.equal(param, source[name]) == ("_proj" not in name)


# -- refusals and failures ----------------------------------------------------------------------


def _refusals(ctx: Context, folder: str) -> dict[str, str]:
    found: dict[str, str] = {}
    base = Path(folder)
    with started(2, 2) as runtime:
        model = from_pretrained(base / "in")
        outside = nn.Linear(2, 2)
        found["foreign"] = message(lambda: runtime.export(outside, base / "x"), ConfigError)
        runtime.shard_module(model)
        found["exists"] = message(lambda: runtime.export(model, base / "in"), CheckpointError)
        found["other"] = message(
            lambda: runtime.export(model, base / "full", overwrite=True), CheckpointError
        )
        found["dtype"] = message(
            lambda: runtime.export(model, base / "x", dtype="int8"), ConfigError
        )
        runtime.export(model, base / "again")
        runtime.export(model, base / "again", overwrite=True, dtype="bf16")
        found["tokenizer"] = message(
            lambda: runtime.export(model, base / "x", tokenizer=base / "full"), CheckpointError
        )
        write = HubWriter.write

        def broken(self: HubWriter, key: str, tensor: torch.Tensor) -> None:
            if key == "model.layers.1.mlp.up_proj.weight":
                raise OSError("no space left on device")
            write(self, key, tensor)

        HubWriter.write = broken  # type: ignore[method-assign]
        found["full"] = message(lambda: runtime.export(model, base / "x"), CheckpointError)

        def forgetful(self: HubWriter, key: str, tensor: torch.Tensor) -> None:
            if key != "model.layers.3.input_layernorm.weight":
                write(self, key, tensor)

        HubWriter.write = forgetful  # type: ignore[method-assign]
        found["forgotten"] = message(lambda: runtime.export(model, base / "x"), CheckpointError)
        HubWriter.write = write  # type: ignore[method-assign]
    return found


def test_refusals_and_failures_come_on_all_ranks_and_leave_nothing(tmp_path: Path) -> None:
    save(tmp_path / "in", "llama")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    for found in run_ranks(_refusals, 4, str(tmp_path)):
        assert "not sharded by this runtime" in found["foreign"]
        assert "exists already" in found["exists"]
        assert "is no earlier export" in found["other"]
        assert "dtype='int8'" in found["dtype"]
        assert "holds no tokenizer files" in found["tokenizer"]
        assert "no space left on device" in found["full"]
        assert "model.layers.3.input_layernorm.weight" in found["forgotten"]
    assert (tmp_path / "full" / "thesis.txt").is_file()
    assert reloaded(tmp_path / "again").dtype == torch.bfloat16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "full", "in"]


def _two(ctx: Context, folder: str) -> str:
    both = nn.ModuleDict(
        {"one": from_pretrained(f"{folder}/in"), "two": from_pretrained(f"{folder}/in")}
    )
    with started(2, 1) as runtime:
        runtime.shard_module(both)
        save_ours(runtime, both, Path(folder) / "ckpt")
        return message(lambda: runtime.export(both, f"{folder}/out"), ConfigError)


def test_one_of_several_models_has_to_be_named(tmp_path: Path) -> None:
    save(tmp_path / "in", "llama")
    for text in run_ranks(_two, 2, str(tmp_path)):
        assert "holds 2 (one, two)" in text
    with refused(ConfigError, "model=None", "model.one, model.two"):
        export_checkpoint(tmp_path / "ckpt", tmp_path / "out", ExportConfig())
    export_checkpoint(tmp_path / "ckpt", tmp_path / "out", ExportConfig(), entry="model.two")
    source = parameters_of(reloaded(tmp_path / "in"))
    for name, param in parameters_of(reloaded(tmp_path / "out")).items():
        assert torch.equal(param, source[name])


def _parts(ctx: Context, folder: str) -> None:
    model = from_pretrained(f"{folder}/in")
    with started(1, 2) as runtime:
        runtime.shard_module(model)
        handle = runtime.model_of(model)
        assert handle is not None
        contents = Contents(
            tensors=model_tensors("model", handle, lambda name, _: "norm" not in name),
            models={"model": origins_of(handle)},
        )
        save_checkpoint(f"{folder}/ckpt", contents, mesh=runtime.mesh)
        save_checkpoint(f"{folder}/bare", Contents(tensors=[]), mesh=runtime.mesh)


def test_an_incomplete_or_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "in", "llama")
    run_ranks(_parts, 2, str(tmp_path))
    with refused(PlanError, "are not there", "input_layernorm"):
        export_checkpoint(tmp_path / "ckpt", tmp_path / "out", ExportConfig())
    with refused(ConfigError, "no transformers causal LM"):
        export_checkpoint(tmp_path / "bare", tmp_path / "out", ExportConfig())
    with refused(CheckpointError, "does not exist"):
        export_checkpoint(tmp_path / "absent", tmp_path / "out", ExportConfig())
    data = max((tmp_path / "ckpt").glob("*.distcp"), key=lambda file: file.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    with refused(CheckpointError, "crc32"):
        export_checkpoint(tmp_path / "ckpt", tmp_path / "out", ExportConfig())
    assert not (tmp_path / "out").exists()
    shutil.rmtree(tmp_path / "ckpt")
