"""Each rank reads its own part, and holds what transformers' own loader would have given it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import AdamW
from transformers.models.auto import AutoModelForCausalLM

from goose_strategy.errors import CheckpointError, ConfigError, PlanError
from goose_strategy.hub import source
from goose_strategy.hub.pretrained import from_pretrained
from goose_strategy.hub.read import is_unread, materialize, while_cut
from goose_strategy.hub.source import SINGLE_FILE, HubReader
from goose_strategy.mesh.shard import Box
from goose_strategy.runtime.core import ParallelRuntime
from tests.harness.models import batches, rows_of
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.hub.checkpoints import box_of, parameters_of, save, truncate
from tests.runtime.start import message, started

STEPS = 3


def differences(runtime: ParallelRuntime, model: Any, reference: nn.Module) -> list[str]:
    """Return every tensor of this rank that is not bit for bit the box of the reference's."""
    handle = runtime.model_of(model)
    assert handle is not None
    found = []
    whole = parameters_of(reference)
    for name, param in model.named_parameters():
        assert type(param) is nn.Parameter
        for box, piece in handle.surgery.specs[name].pieces(param.detach()):
            expected = box_of(whole[name].detach(), *box)
            if piece.dtype != expected.dtype or not torch.equal(piece, expected):
                found.append(name)
    buffers = dict(reference.named_buffers())
    for name, buffer in model.named_buffers():
        if buffer.dtype != buffers[name].dtype or not torch.equal(buffer, buffers[name]):
            found.append(name)
    return found


def train(runtime: ParallelRuntime, model: Any, optimizer: Any) -> list[float]:
    losses = []
    mesh = runtime.mesh
    for batch in batches(STEPS, batch_size=8):
        loss = model(**rows_of(batch, mesh.dp_rank, mesh.dp_size)).loss
        with runtime.backward(loss):
            loss.backward()
        runtime.clip_grad_norm(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _loaded(ctx: Context, folder: str, tp: int, pp: int, dtype: torch.dtype | None) -> Any:
    """Load both ways, compare bit by bit, train both, compare again."""
    results = []
    for load in (from_pretrained, AutoModelForCausalLM.from_pretrained):
        model = load(folder, dtype=dtype).train()
        model.get_output_embeddings().weight.mark = "kept"
        optimizer = AdamW(model.parameters(), lr=1e-2)
        first = next(model.parameters())
        with started(tp, pp) as runtime:
            runtime.shard_module(model, optimizers=[optimizer])
            assert not is_unread(model)
            if runtime.mesh.is_first_stage:
                assert next(model.parameters()) is first
            reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            wrong = differences(runtime, model, reference)
            losses = train(runtime, model, optimizer)
            values = {name: param.detach().clone() for name, param in model.named_parameters()}
            marks = [name for name, param in model.named_parameters() if hasattr(param, "mark")]
        results.append((wrong, losses, values, marks))
    ours, theirs = results
    assert ours[1] == theirs[1]
    assert ours[2].keys() == theirs[2].keys()
    assert all(torch.equal(ours[2][name], theirs[2][name]) for name in ours[2])
    assert ours[3] == theirs[3]
    return ours[0], theirs[0], ours[1]


def single(folder: Path, dtype: torch.dtype | None) -> list[float]:
    """Train in one process, without any of this."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches(STEPS, batch_size=8):
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# family, settings, dtype asked for, ranks, tp, pp
CASES: list[tuple[str, dict[str, Any], torch.dtype | None, int, int, int]] = [
    ("llama", {}, None, 8, 2, 2),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True}, None, 4, 2, 2),
    ("qwen3", {"tie_word_embeddings": True}, torch.float64, 2, 2, 1),
    # Queries, keys and values side by side: a rank's part of one tensor is several boxes.
    ("gpt2", {}, None, 4, 2, 2),
    ("gpt2", {"tie_word_embeddings": False}, None, 4, 1, 4),
    ("phi3", {}, None, 4, 2, 2),
    ("bloom", {}, None, 4, 2, 2),
    ("opt", {}, None, 2, 1, 2),
    # Experts that the files hold one by one.
    ("mixtral", {}, None, 4, 2, 2),
    ("mixtral", {"tie_word_embeddings": True}, torch.bfloat16, 4, 1, 2),
]


@pytest.mark.parametrize(("family", "settings", "dtype", "ranks", "tp", "pp"), CASES)
def test_it_trains_as_if_transformers_had_loaded_it(
    tmp_path: Path,
    family: str,
    settings: dict[str, Any],
    dtype: torch.dtype | None,
    ranks: int,
    tp: int,
    pp: int,
) -> None:
    save(tmp_path, family, shard="30KB", **settings)
    alone = single(tmp_path, dtype)
    for wrong, wrong_theirs, losses in run_ranks(_loaded, ranks, str(tmp_path), tp, pp, dtype):
        assert wrong == wrong_theirs == []
        assert losses == pytest.approx(alone, rel=1e-5 if dtype is not torch.bfloat16 else 2e-2)


def _cast(ctx: Context, folder: str) -> Any:
    """Files in bf16, a model asked for in bf16 and cast to fp64 before the set-up."""
    model = from_pretrained(folder).to(torch.float64)
    with started(2, 1) as runtime:
        runtime.shard_module(model)
        return differences(
            runtime, model, AutoModelForCausalLM.from_pretrained(folder).to(torch.float64)
        )


def test_a_cast_before_the_set_up_is_made_while_reading(tmp_path: Path) -> None:
    save(tmp_path, "llama", dtype=torch.bfloat16)
    assert run_ranks(_cast, 2, str(tmp_path)) == [[], []]


def _planted(ctx: Context, folder: str, shift: int) -> Any:
    """Read every box one row too far, as a wrong offset would."""
    fill = HubReader.fill

    def shifted(self: HubReader, key: str, box: Box, out: Any, **more: Any) -> None:
        rows = self._tensors[key].shape[0]
        start = min(box.offsets[0] + shift, rows - box.lengths[0])
        fill(self, key, Box((start, *box.offsets[1:]), box.lengths), out, **more)

    model = from_pretrained(folder)
    with started(2, 2) as runtime:
        source.HubReader.fill = shifted  # type: ignore[method-assign]
        try:
            runtime.shard_module(model)
        finally:
            source.HubReader.fill = fill  # type: ignore[method-assign]
        return differences(runtime, model, AutoModelForCausalLM.from_pretrained(folder))


def test_a_planted_error_shows(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    found = run_ranks(_planted, 4, str(tmp_path), 1)
    assert any(found), "a wrong offset went unnoticed"
    assert run_ranks(_planted, 4, str(tmp_path), 0) == [[]] * 4


# -- around the model ---------------------------------------------------------------------------


class Adapted(nn.Module):
    """A linear layer with a low-rank addition, as adapters wrap one: the weight has a new name."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base_layer.out_features, bias=False)
        # As PEFT does; on the meta device they would lose what they were initialised with.
        self.lora_A.to(base_layer.weight.device)
        self.lora_B.to(base_layer.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def _adapted(ctx: Context, folder: str) -> Any:
    found = []
    for load in (from_pretrained, AutoModelForCausalLM.from_pretrained):
        model = load(folder).train().requires_grad_(False)
        torch.manual_seed(3)
        for layer in model.model.layers:
            layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        with started(1, 2) as runtime:
            runtime.shard_module(model, optimizers=[optimizer])
            losses = train(runtime, model, optimizer)
            found.append((losses, {n: p.detach().clone() for n, p in model.named_parameters()}))
    ours, theirs = found
    return ours[0] == theirs[0] and all(torch.equal(ours[1][n], theirs[1][n]) for n in theirs[1])


def test_a_frozen_model_with_adapters_is_read_under_its_new_names(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    assert run_ranks(_adapted, 2, str(tmp_path)) == [True, True]


def _pair(ctx: Context, folder: str) -> Any:
    """A student that is cut, and a frozen teacher that stays whole on every rank."""
    student = from_pretrained(folder)
    teacher = copy.deepcopy(student).requires_grad_(False)
    both = nn.ModuleDict({"student": student, "teacher": teacher})
    with started(2, 1) as runtime:
        runtime.shard_module(both)
        whole = parameters_of(AutoModelForCausalLM.from_pretrained(folder))
        kept = all(torch.equal(p, whole[n]) for n, p in teacher.named_parameters())
        return kept, student.lm_head.weight.shape[0]


def test_a_model_beside_the_one_that_is_cut_is_read_whole(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    assert run_ranks(_pair, 2, str(tmp_path)) == [(True, 49), (True, 48)]


def test_a_parameter_that_a_cut_has_replaced_is_found_by_name(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    model = from_pretrained(tmp_path)
    with while_cut(model):
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach())
    assert materialize(nn.ModuleDict({"lm": model}), {}, torch.device("cpu")) == []
    whole = parameters_of(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert all(torch.equal(param, whole[name]) for name, param in model.named_parameters())


# -- refusals -----------------------------------------------------------------------------------


def _refusals(ctx: Context, folder: str, tied: str) -> dict[str, str]:
    found = {}
    with started(2, 1) as runtime:
        model = from_pretrained(folder)
        model.model.embed_tokens = nn.Embedding(99, 32, device="meta")
        found["made later"] = message(lambda: runtime.shard_module(model), PlanError)
        model = from_pretrained(folder)
        model.register_buffer("extra", torch.empty(2, device="meta"), persistent=False)
        holder = nn.Module()
        holder.lm, holder.mask = model, None
        holder.register_buffer("table", torch.empty(2, device="meta"), persistent=False)
        found["buffer"] = message(lambda: runtime.shard_module(holder), PlanError)
        model = from_pretrained(tied, tie_word_embeddings=True)
        found["tied"] = message(lambda: runtime.shard_module(model), CheckpointError)
        model = from_pretrained(folder)
        file = next(Path(folder).glob("*.safetensors"))
        torch.distributed.barrier()
        if ctx.rank == 0:
            truncate(file)
        torch.distributed.barrier()
        found["truncated"] = message(lambda: runtime.shard_module(model), CheckpointError)
        found["still guarded"] = message(lambda: model.to("cpu"), ConfigError)
    return found


def test_refusals_come_on_all_ranks_before_anything_is_changed(tmp_path: Path) -> None:
    folder = save(tmp_path / "one", "llama")
    untied = save(tmp_path / "two", "llama", tie_word_embeddings=False)
    for found in run_ranks(_refusals, 2, str(folder), str(untied)):
        assert "model.embed_tokens.weight" in found["made later"]
        assert "made on the meta device after" in found["made later"]
        assert found["buffer"].startswith("table is on the meta device")
        assert "holds other values for it" in found["tied"]
        assert "truncated" in found["truncated"]
        assert "has not read" in found["still guarded"]


def _other_files(ctx: Context, folders: list[str]) -> str:
    model = from_pretrained(folders[ctx.rank])
    with started(1, 2) as runtime:
        return message(lambda: runtime.shard_module(model), PlanError)


def test_ranks_that_see_other_files_are_refused(tmp_path: Path) -> None:
    one = save(tmp_path / "one", "llama")
    # The same tensors in another type.
    tensors = load_file(save(tmp_path / "two", "llama") / SINGLE_FILE)
    two = tmp_path / "two"
    wide = {key: tensor.double() for key, tensor in tensors.items()}
    save_file(wide, two / SINGLE_FILE, metadata={"format": "pt"})
    for text in run_ranks(_other_files, 2, [str(one), str(two)]):
        assert "see different things as the checkpoint's files" in text
