"""A small Llama and real text, as an ordinary LightningModule and LightningDataModule.

Nothing here knows how the model is split: the same two classes train in one process, under ``ddp``
and in 3D. The text is the standard library of the running interpreter, so nothing is downloaded.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from datasets import disable_progress_bars, load_dataset, load_from_disk
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.optimization import get_inverse_sqrt_schedule

END_OF_TEXT = "<|endoftext|>"
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings"}


@dataclass(frozen=True, kw_only=True)
class LlamaSize:
    """Sizes of the model, under the names that ``LlamaConfig`` gives them."""

    vocab_size: int = 2048
    hidden_size: int = 128
    intermediate_size: int = 344
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2


def build_llama(size: LlamaSize) -> LlamaForCausalLM:
    """Return a Llama with fresh weights."""
    return LlamaForCausalLM(LlamaConfig(**asdict(size), use_cache=False))


def build_optimizer(model: nn.Module, rate: float, warmup: int) -> tuple[AdamW, Any]:
    """Return AdamW and a schedule: up to ``rate`` over the warm-up, then down as 1/sqrt(step)."""
    optimizer = AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    return optimizer, get_inverse_sqrt_schedule(optimizer, num_warmup_steps=warmup)


class CausalLM(L.LightningModule):
    """Next-token prediction with the loss that transformers computes."""

    def __init__(
        self, size: LlamaSize, learning_rate: float = 2e-3, warmup_steps: int = 30
    ) -> None:
        super().__init__()
        self.model = build_llama(size)
        self.learning_rate, self.warmup_steps = learning_rate, warmup_steps

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        self.log("val_loss", self.model(**batch).loss, prog_bar=True, sync_dist=True)

    def test_step(self, batch: dict[str, Tensor]) -> None:
        self.log("test_loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer, schedule = build_optimizer(self.model, self.learning_rate, self.warmup_steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class StdlibText(L.LightningDataModule):
    """The standard library's source, tokenized and packed into rows of ``sequence_length``.

    ``folder`` keeps tokenizer and rows; ``batch_size`` is rows per data-parallel replica and step.
    """

    def __init__(
        self,
        folder: str = "runs/quickstart/data",
        vocab_size: int = 2048,
        sequence_length: int = 128,
        batch_size: int = 8,
    ) -> None:
        super().__init__()
        self.folder, self.vocab_size = Path(folder), vocab_size
        self.sequence_length, self.batch_size = sequence_length, batch_size
        self.rows = self.folder / f"rows-v{vocab_size}-s{sequence_length}"

    def prepare_data(self) -> None:
        """Tokenize and pack, once; Lightning calls this on one process per machine."""
        if self.rows.exists():
            return
        disable_progress_bars()
        texts = load_dataset(
            "text",
            data_files=source_files(),
            sample_by="document",
            encoding_errors="replace",
            cache_dir=str(self.folder / "cache"),
            split="train",
        )
        tokenizer = train_tokenizer(texts["text"], self.vocab_size)
        tokenizer.save_pretrained(str(self.folder / "tokenizer"))

        length = self.sequence_length  # a closure over self could not be hashed for the cache

        def pack(documents: dict[str, list[str]]) -> dict[str, np.ndarray]:
            ids = tokenizer([text + END_OF_TEXT for text in documents["text"]])["input_ids"]
            stream = np.concatenate([np.asarray(row) for row in ids])
            rows = stream[: len(stream) // length * length].reshape(-1, length)
            return {"input_ids": rows, "labels": rows}

        splits = texts.train_test_split(test_size=0.05, seed=0)
        unfinished = self.rows.with_suffix(".unfinished")
        splits.map(pack, batched=True, remove_columns=["text"]).save_to_disk(str(unfinished))
        unfinished.rename(self.rows)

    def setup(self, stage: str) -> None:  # noqa: ARG002
        """Open the packed rows; every process maps the same files into memory."""
        self.splits = load_from_disk(str(self.rows)).with_format("torch")

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.splits["train"], self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.splits["test"], self.batch_size, drop_last=True)

    test_dataloader = val_dataloader


def source_files() -> list[str]:
    """Return the standard library's Python files in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(root.rglob("*.py"))
    return [str(f) for f in files if not SKIPPED_FOLDERS & set(f.relative_to(root).parts)]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE; any text can be encoded, so there is no unknown token."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size, special_tokens=[END_OF_TEXT], show_progress=False)
    tokenizer = Tokenizer.from_str(bpe.to_str())
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)
