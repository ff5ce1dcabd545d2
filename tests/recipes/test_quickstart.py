"""The quickstart's pieces fit together, and a shrunken one trains alike through both doors."""

from __future__ import annotations

import csv
import importlib
import os
import re
import subprocess
import sys
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
VOCAB, SEQUENCE, STEPS = 384, 128, 16


@pytest.fixture
def lm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The recipe's module, reading three small files."""
    monkeypatch.syspath_prepend(RECIPES)
    module = importlib.import_module("lm")
    for index in range(40):
        text = "".join(f"def f{index}_{line}(x):\n    return x + {line}\n" for line in range(80))
        (tmp_path / f"text{index}.py").write_text(text)
    files = sorted(str(path) for path in tmp_path.glob("text*.py"))
    monkeypatch.setattr(module, "source_files", lambda: files)
    return module


def text_of(lm: Any, folder: Path, **changes: Any) -> Any:
    text = lm.StdlibText(str(folder), vocab_size=VOCAB, sequence_length=SEQUENCE, **changes)
    text.prepare_data()
    text.setup("fit")
    return text


def test_rows_are_the_text_again(lm: Any, tmp_path: Path) -> None:
    text = text_of(lm, tmp_path / "data", batch_size=4)
    batch = next(iter(text.train_dataloader()))
    assert batch["input_ids"].shape == (4, SEQUENCE)
    assert batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], batch["labels"])
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "data" / "tokenizer"))
    assert len(tokenizer) <= VOCAB
    written = [path.read_text() + lm.END_OF_TEXT for path in tmp_path.glob("text*.py")]
    for row in text.splits["train"]["input_ids"][:3]:
        pieces = tokenizer.decode(row).split(lm.END_OF_TEXT)
        assert all(any(piece in whole for whole in written) for piece in pieces)


def test_training_and_validation_read_different_documents(lm: Any, tmp_path: Path) -> None:
    text = text_of(lm, tmp_path / "data")
    rows = {split: text.splits[split]["input_ids"][:] for split in ("train", "test")}
    seen = {tuple(row.tolist()) for row in rows["train"]}
    assert not [row for row in rows["test"] if tuple(row.tolist()) in seen]


def test_data_are_prepared_once(lm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(lm, tmp_path / "data")
    monkeypatch.delattr(lm, "train_tokenizer")
    text.prepare_data()


def test_the_real_text_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECIPES)
    files = importlib.import_module("lm").source_files()
    assert len(files) > 100
    assert not [file for file in files if "site-packages" in file]


def test_all_three_files_say_the_same_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECIPES)
    lm = importlib.import_module("lm")
    settings = importlib.import_module("fabric_causal_lm").Settings()
    recipe = yaml.safe_load((RECIPES / "quickstart.yaml").read_text())
    model, data = recipe["model"]["init_args"], recipe["data"]["init_args"]
    trainer = recipe["trainer"]
    strategy = trainer["strategy"]["init_args"]
    assert model["size"] == asdict(lm.LlamaSize())
    assert model["size"]["vocab_size"] == data["vocab_size"]
    defaults = {name: p.default for name, p in signature(lm.StdlibText).parameters.items()}
    assert data == defaults
    assert (settings.data_folder, settings.batch_size) == (data["folder"], data["batch_size"])
    assert (settings.tp, settings.pp, settings.devices, settings.max_steps) == (
        strategy["tp"],
        strategy["pp"],
        trainer["devices"],
        trainer["max_steps"],
    )
    assert settings.num_microbatches == strategy["pipeline"]["num_microbatches"]


def test_a_recipe_is_short() -> None:
    assert len((RECIPES / "lm.py").read_text().splitlines()) <= 150


def test_every_recipe_is_in_the_table() -> None:
    table = (RECIPES / "README.md").read_text()
    files = [path.name for path in RECIPES.iterdir() if path.suffix in (".py", ".yaml")]
    assert [name for name in files if name not in table] == []


def start(*command: str, folder: Path) -> str:
    """Run a command in ``folder`` as a user would, and return what it printed."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(file: Path) -> list[float]:
    with file.open() as rows:
        return [float(row["loss"]) for row in csv.DictReader(rows) if row["loss"]]


@pytest.mark.recipes
@pytest.mark.timeout(300)
def test_the_trainer_and_fabric_train_alike(lm: Any, tmp_path: Path) -> None:
    text_of(lm, tmp_path / "data")
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 2, "hidden_size": 64}
    printed = start(
        "-m",
        "goose_strategy.cli",
        "fit",
        f"--config={RECIPES / 'quickstart.yaml'}",
        *(f"--model.size.{name}={value}" for name, value in sizes.items()),
        "--data.folder=data",
        f"--data.vocab_size={VOCAB}",
        "--data.batch_size=4",
        "--trainer.devices=2",
        "--trainer.strategy.tp=1",
        f"--trainer.max_steps={STEPS}",
        f"--trainer.val_check_interval={STEPS}",
        "--trainer.limit_val_batches=1",
        "--trainer.log_every_n_steps=1",
        folder=tmp_path,
    )
    assert f"{STEPS} steps done" in printed
    assert re.search(r"tokens/s +[\d,]+", printed)
    checkpoint = re.search(r"checkpoint +(\S+)", printed)
    assert checkpoint
    assert (tmp_path / checkpoint[1] / "meta.pt").exists()

    start(
        str(RECIPES / "fabric_causal_lm.py"),
        *(f"--size.{name}={value}" for name, value in sizes.items()),
        "--data_folder=data",
        "--batch_size=4",
        "--devices=2",
        "--tp=1",
        f"--max_steps={STEPS}",
        "--log_every=1",
        folder=tmp_path,
    )
    trainer = losses(tmp_path / "runs" / "quickstart" / "version_0" / "metrics.csv")
    fabric = losses(tmp_path / "runs" / "fabric_causal_lm" / "version_0" / "metrics.csv")
    assert trainer == fabric
    assert len(trainer) == STEPS
    assert trainer[-1] < trainer[0] - 0.5
