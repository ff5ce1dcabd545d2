"""A token counts once, pauses do not count as time, and the MFU has its stated terms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import BatchEncoding, LlamaConfig, LlamaForCausalLM

from goose_strategy.errors import ConfigError
from goose_strategy.strategies import progress
from goose_strategy.strategies.progress import (
    Goose3DProgressBar,
    Goose3DRichProgressBar,
    ThroughputBar,
    TokenMeter,
)

BATCH, SEQUENCE, STEPS = 4, 16, 3


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes)))


def test_the_rate_is_tokens_over_seconds_without_the_first_step() -> None:
    meter = TokenMeter()
    meter.resume(10.0)
    meter.add(100, 15.0)  # sets things up: five seconds that say nothing
    assert meter.tokens_per_second is None
    meter.add(100, 16.0)
    meter.add(300, 17.0)
    assert meter.tokens_per_second == pytest.approx(200)
    assert meter.tokens == 500


def test_a_pause_is_no_training_time() -> None:
    meter = TokenMeter()
    meter.resume(0.0)
    meter.add(100, 1.0)
    meter.add(100, 2.0)
    meter.pause()
    meter.resume(60.0)
    meter.resume(60.5)  # the clock runs already
    meter.add(100, 61.0)
    assert meter.tokens_per_second == pytest.approx(100)


def test_the_window_forgets_old_steps() -> None:
    meter = TokenMeter(window=2)
    meter.resume(0.0)
    for now in (1.0, 101.0, 102.0, 103.0):
        meter.add(50, now)
    assert meter.tokens_per_second == pytest.approx(50)


def test_a_window_needs_a_step() -> None:
    with pytest.raises(ConfigError, match="window=0"):
        TokenMeter(window=0)


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"input_ids": torch.zeros(4, 16), "labels": torch.zeros(4, 16)}, 64),
        (BatchEncoding({"input_ids": torch.zeros(2, 8)}), 16),
        ([{"input_ids": torch.zeros(2, 8)}, {"input_ids": torch.zeros(2, 4)}], 24),
        ([{"input_ids": torch.zeros(2, 8)}, {"pixels": torch.zeros(2)}], None),
        ({"pixels": torch.zeros(2)}, None),
        ((torch.zeros(4, 16), torch.zeros(4)), None),
        ([], None),
    ],
)
def test_token_positions_are_counted(batch: Any, tokens: int | None) -> None:
    assert progress.count_tokens(batch) == tokens


@pytest.mark.parametrize("tied", [True, False])
def test_flops_are_six_per_multiplying_weight_plus_attention(tied: bool) -> None:
    model = tiny_llama(tie_word_embeddings=tied)
    weights = sum(
        param.numel() for name, param in model.named_parameters() if tied or "embed" not in name
    )
    expected = 6 * weights + 12 * 2 * 16 * SEQUENCE
    assert progress.flops_per_token(model, SEQUENCE) == expected


def test_flops_are_of_the_whole_model_however_little_of_it_is_here() -> None:
    model = tiny_llama()
    whole = progress.flops_per_token(model, SEQUENCE)
    before = torch.get_rng_state()
    del model.model.layers[1:]
    model.lm_head = torch.nn.Identity()
    assert progress.flops_per_token(model, SEQUENCE) == whole
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", None),
        ("Some Other Card", None),
    ],
)
def test_peaks_are_dense_and_found_by_whole_words(name: str, peak: float | None) -> None:
    assert progress.dense_peak(name) == peak


class Language(LightningModule):
    """Logs nothing, as many users' modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_llama()

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        ids = torch.arange(BATCH * STEPS * SEQUENCE).remainder(64).view(-1, SEQUENCE)
        rows = [{"input_ids": row, "labels": row} for row in ids]
        return DataLoader(rows, batch_size=BATCH)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(bar: ThroughputBar, folder: Path) -> tuple[Trainer, Language]:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[bar],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    module = Language()
    trainer.fit(module)
    return trainer, module


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
class TestBar:
    @pytest.mark.parametrize("kind", [Goose3DProgressBar, Goose3DRichProgressBar])
    def test_it_shows_the_loss_and_the_rate(
        self, tmp_path: Path, kind: type[ThroughputBar]
    ) -> None:
        if kind is Goose3DRichProgressBar:
            pytest.importorskip("rich")
        bar = kind()
        shown = bar.get_metrics(*fit(bar, tmp_path))
        assert 0 < float(str(shown["loss"])) < 10
        assert float(str(shown["tok/s"]).replace(",", "")) > 0
        assert "MFU" not in shown  # no peak is known for a CPU
        assert bar.meter.tokens == BATCH * STEPS * SEQUENCE

    def test_mfu_is_the_rate_over_the_peak(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bar = Goose3DProgressBar()
        monkeypatch.setattr(progress, "_total_peak", lambda trainer: 1e12)
        trainer, module = fit(bar, tmp_path)
        monkeypatch.setattr(TokenMeter, "tokens_per_second", 1000.0)
        flops = progress.flops_per_token(module.model, SEQUENCE)
        assert bar.get_metrics(trainer, module)["MFU"] == f"{1000 * flops / 1e12:.1%}"

    def test_partly_frozen_models_have_no_mfu(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(progress, "_total_peak", lambda trainer: 1e12)
        monkeypatch.setattr(
            Language, "on_fit_start", lambda self: self.model.lm_head.requires_grad_(False)
        )
        bar = Goose3DProgressBar()
        assert "MFU" not in bar.get_metrics(*fit(bar, tmp_path))

    def test_a_token_counts_once_over_replicas_and_never_per_model_rank(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Eight processes at tp2 x pp2: the sampler knows of two replicas.
        monkeypatch.setattr(Trainer, "distributed_sampler_kwargs", {"num_replicas": 2, "rank": 0})
        monkeypatch.setattr(Trainer, "world_size", 8)
        bar = Goose3DProgressBar()
        fit(bar, tmp_path)
        assert bar.meter.tokens == BATCH * STEPS * SEQUENCE * 2

    def test_the_users_own_loss_is_not_shown_twice(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step = Language.training_step

        def logging_step(self: Language, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = step(self, batch)
            self.log("train_loss", loss, prog_bar=True)
            return loss

        monkeypatch.setattr(Language, "training_step", logging_step)
        bar = Goose3DProgressBar()
        shown = bar.get_metrics(*fit(bar, tmp_path))
        assert "train_loss" in shown
        assert "loss" not in shown
