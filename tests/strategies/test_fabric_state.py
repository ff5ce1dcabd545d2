"""``fabric.save`` and ``fabric.load``: an interrupted run goes on as if nothing had happened."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.consolidate_checkpoint import _process_cli_args
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from goose_strategy.strategies import fabric_state
from tests.harness.models import batches, rows_of, tiny_model
from tests.harness.worker import Context
from tests.parity.grid import assemble
from tests.strategies.ranks import (
    Raised,
    attempt,
    good,
    make_fabric,
    pieces,
    same_error,
    unwrapped,
    world,
)

BREAK, STEPS = 3, 6


class Run:
    """A training run that can be interrupted; with dropout, so that random states matter."""

    def __init__(self, fabric: Fabric, *, seed: int = 0, tied: bool = True) -> None:
        self.fabric = fabric
        model = tiny_model(
            "llama", dtype=torch.float32, tied=tied, seed=seed, attention_dropout=0.2
        )
        optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        self.scheduler = StepLR(optimizer, 2, 0.5)
        self.model, self.optimizer = fabric.setup(model, optimizer)
        self.place = fabric.strategy.distributed_sampler_kwargs

    def train(self, start: int, stop: int) -> list[float]:
        losses = []
        for batch in batches(STEPS, batch_size=8)[start:stop]:
            loss = self.model(**rows_of(batch, self.place["rank"], self.place["num_replicas"])).loss
            self.optimizer.zero_grad()
            self.fabric.backward(loss)
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def state(self, **more: Any) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            **more,
        }

    def parameters(self) -> Any:
        runtime = self.fabric.strategy.runtime  # type: ignore[attr-defined]
        return pieces(runtime.model_of(unwrapped(self.model)))


def _interrupted(ctx: Context, precision: str) -> dict[str, Any]:
    """Train without a break; then the same with one, in a process that has drawn other numbers."""
    path = ctx.tmp_path / f"{precision}.ckpt"
    unbroken = Run(make_fabric(ctx, 2, 2, precision=precision))
    losses = unbroken.train(0, BREAK)
    unbroken.fabric.save(path, unbroken.state(step=BREAK))
    at_the_break = unbroken.parameters()
    losses += unbroken.train(BREAK, STEPS)

    torch.manual_seed(ctx.rank)
    resumed = Run(make_fabric(ctx, 2, 2, precision=precision), seed=1)
    state = resumed.state(step=0)
    left = resumed.fabric.load(path, state)
    torch.rand(5)  # as a DataLoader does that is made after the load: no number of the model's
    restored = resumed.parameters()
    more = resumed.train(state["step"], STEPS)
    return {
        "losses": (losses[BREAK:], more),
        "break": (at_the_break, restored),
        "end": (unbroken.parameters(), resumed.parameters()),
        "left": left,
        "step": state["step"],
        "rates": (unbroken.scheduler.get_last_lr(), resumed.scheduler.get_last_lr()),
        "files": sorted(file.name for file in path.iterdir()),
    }


def _interrupted_in_fp32(ctx: Context) -> dict[str, Any]:
    return _interrupted(ctx, "32-true")


def _interrupted_in_bf16(ctx: Context) -> dict[str, Any]:
    return _interrupted(ctx, "bf16-true")


def _consolidated(ctx: Context) -> dict[str, Any]:
    """``fabric consolidate`` on rank 0; the single file also goes back into the mesh."""
    run = Run(make_fabric(ctx, 2, 2, precision="32-true"))
    run.train(0, 1)
    path = ctx.tmp_path / "folder.ckpt"
    run.fabric.save(path, run.state(step=7))
    single = Path(f"{path}.consolidated")
    if ctx.rank == 0:
        config = _process_cli_args(Namespace(checkpoint_folder=str(path), output_file=None))
        torch.save(_load_distributed_checkpoint(config.checkpoint_folder), config.output_file)
    run.fabric.barrier()
    whole = torch.load(single, weights_only=True)
    raw = torch.load(single, weights_only=True)["model"]
    plain = tiny_model("llama", dtype=torch.float32, tied=True, seed=3).eval()
    plain.load_state_dict(whole["model"])
    torch.save(raw, ctx.tmp_path / f"raw{ctx.rank}.pt")
    back = Run(make_fabric(ctx, 2, 2, precision="32-true"), seed=4)
    back.fabric.load_raw(ctx.tmp_path / f"raw{ctx.rank}.pt", back.model)
    run.model.eval()
    back.model.eval()
    batch = {k: v for k, v in batches(1)[0].items() if k != "labels"}
    with torch.no_grad():
        logits = [model(**batch).logits for model in (plain, run.model, back.model)]
    return {
        "logits": logits,
        "names": sorted(whole["model"]),
        "step": whole["step"],
        "state": {k: sorted(v) for k, v in whole["optimizer"]["state"].items()},
    }


def _another_layout(ctx: Context) -> dict[str, Any]:
    """From tp2 pp2 dp2 to tp1 pp4 dp2 and to tp2 pp1 dp4."""
    path = ctx.tmp_path / "moving.ckpt"
    first = Run(make_fabric(ctx, 2, 2, precision="32-true"))
    first.train(0, BREAK)
    first.fabric.save(path, first.state())
    results = {"first": first.parameters(), "losses": [], "params": []}
    first.model.eval()  # without dropout, whose random numbers follow the layout
    runs = [first]
    for tp, pp in ((1, 4), (2, 1)):
        run = Run(make_fabric(ctx, tp, pp, precision="32-true"), seed=5)
        run.fabric.load(path, run.state())
        results["params"].append(run.parameters())
        run.model.eval()
        runs.append(run)
    results["losses"] = [run.train(BREAK, STEPS) for run in runs]
    return results


SCENARIOS = (_interrupted_in_fp32, _interrupted_in_bf16, _consolidated, _another_layout)


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Any]]:
    return world(8, *SCENARIOS)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(
    runs: dict[str, list[Any]], precision: str
) -> None:
    for rank in good(runs[f"interrupted_in_{precision}"]):
        unbroken, resumed = rank["losses"]
        assert resumed == unbroken
        assert len(resumed) == STEPS - BREAK
        for mine, theirs in (rank["break"], rank["end"]):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name][1], theirs[name][1]) for name in mine)
        assert rank["step"] == BREAK
        assert rank["left"] == {}
        assert rank["rates"][0] == rank["rates"][1]
        assert "meta.pt" in rank["files"]


def test_a_consolidated_file_is_a_plain_models(runs: dict[str, list[Any]]) -> None:
    plain = tiny_model("llama", dtype=torch.float32, tied=True)
    for rank in good(runs["consolidated"]):
        assert rank["names"] == sorted(plain.state_dict())
        assert rank["step"] == 7
        # One state per parameter and name, as one process keeps it; the tied weight once.
        assert rank["state"].keys() == dict(plain.named_parameters()).keys()
        assert all(keys == ["exp_avg", "exp_avg_sq", "step"] for keys in rank["state"].values())
        alone, mesh, back = rank["logits"]
        torch.testing.assert_close(mesh, alone, rtol=1e-5, atol=1e-5)
        assert torch.equal(mesh, back)


def test_any_layout_goes_on_from_any_other(runs: dict[str, list[Any]]) -> None:
    ranks = good(runs["another_layout"])
    first = assemble([rank["first"] for rank in ranks], "first")
    for index in range(2):
        moved = assemble([rank["params"][index] for rank in ranks], "moved")
        assert moved.keys() == first.keys()
        assert all(torch.equal(moved[name], first[name]) for name in first)
    for rank in ranks:
        stayed, *others = rank["losses"]
        for losses in others:
            # The optimizer's moments came along: without them Adam's first step is ten times off.
            assert losses == pytest.approx(stayed, rel=1e-5)


# -- parts, and what is refused -----------------------------------------------------------------


def small(ctx: Context, *, seed: int = 0, family: Any = "llama", **settings: Any) -> Any:
    fabric = make_fabric(ctx, 2, 2, precision="32-true")
    model = tiny_model(family, dtype=torch.float32, seed=seed, **settings)
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    fabric.backward(model(**batches(1)[0]).loss)
    optimizer.step()
    optimizer.zero_grad()
    return fabric, model, optimizer


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in unwrapped(model).state_dict().items()}


def _parts(ctx: Context) -> dict[str, Any]:
    fabric, model, _ = small(ctx)
    counts, only = {"seen": 3}, ctx.tmp_path / "only.ckpt"
    fabric.save(only, {"counts": counts})
    state: dict[str, Any] = {"counts": None}
    left = fabric.load(only, state)
    filtered = ctx.tmp_path / "filtered.ckpt"
    fabric.save(
        filtered,
        {"model": model, "counts": {"a": 1, "b": 2}},
        filter={"model": lambda name, _: "norm" in name, "counts": lambda name, _: name == "a"},
    )
    before = values(model)
    for param in model.parameters():
        param.data.zero_()
    strict = attempt(partial(fabric.load, filtered, {"model": model}))
    rest = fabric.load(filtered, {"model": model}, strict=False)
    after = values(model)
    missing = attempt(partial(fabric.load, only, {"counts": 0, "more": 0}))
    return {
        "counts": state["counts"],
        "left": left,
        "strict": strict,
        "rest": rest,
        "norms": all(torch.equal(after[n], before[n]) for n in after if "norm" in n),
        "others": all(not after[n].any() for n in after if "norm" not in n),
        "missing": missing,
    }


def _refusals(ctx: Context) -> dict[str, Any]:
    fabric, model, optimizer = small(ctx)
    good_path = ctx.tmp_path / "good.ckpt"
    state = {"model": model, "optimizer": optimizer}
    fabric.save(good_path, state)
    others = {
        "class": small(ctx, family="mistral"),
        "size": small(ctx, layers=6),
        "vocabulary": small(ctx, vocab=101),
    }
    found: dict[str, Any] = {}
    for name, (other, its_model, its_optimizer) in others.items():
        before = values(its_model)
        wanted = {"model": its_model, "optimizer": its_optimizer}
        found[name] = attempt(partial(other.load, good_path, wanted))
        after = values(its_model)
        assert all(torch.equal(before[key], after[key]) for key in before)
    found["nothing there"] = attempt(partial(fabric.load, ctx.tmp_path / "no.ckpt", state))
    found["nothing asked"] = attempt(partial(fabric.load, good_path))
    raw = partial(fabric.load_raw, ctx.tmp_path / "no.pt", model)
    found["no file"] = attempt(raw)
    found["not set up"] = attempt(partial(fabric.load_raw, good_path, nn.Linear(1, 1)))
    found["storage"] = attempt(
        partial(fabric.strategy.save_checkpoint, good_path, {}, storage_options=1)
    )
    fabric.barrier()
    shards = sorted(good_path.glob("*.distcp"))
    for name, damage in (
        ("truncated", lambda f: f.write_bytes(f.read_bytes()[:-9])),
        ("lost", Path.unlink),
    ):
        if ctx.rank == 0:
            damage(shards[1])
        fabric.barrier()
        before = values(model)
        found[name] = attempt(partial(fabric.load, good_path, state))
        after = values(model)
        assert all(torch.equal(before[key], after[key]) for key in before)
    return found


@pytest.fixture(scope="module")
def parts() -> dict[str, list[Any]]:
    return world(4, _parts, _refusals)


def test_parts_are_saved_and_loaded(parts: dict[str, list[Any]]) -> None:
    ranks = good(parts["parts"])
    for rank in ranks:
        assert rank["counts"] == {"seen": 3}
        assert rank["left"] == {}
        assert rank["rest"] == {"counts": {"a": 1}}
        assert rank["norms"]
        assert rank["others"]
    same_error([rank["strict"] for rank in ranks], "CheckpointError", "not in the checkpoint")
    same_error([rank["missing"] for rank in ranks], "KeyError", "more")


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("class", "CheckpointError", "another model.*class='MistralForCausalLM' here.*Llama"),
        ("size", "CheckpointError", r"another model.*layers\.4.*not in the checkpoint"),
        ("vocabulary", "CheckpointError", r"shape=\(101, 32\) here, shape=\(97, 32\)"),
        ("nothing there", "CheckpointError", r"no\.ckpt"),
        ("nothing asked", "CheckpointError", "needs the objects to fill.*fabric consolidate"),
        ("no file", "CheckpointError", r"path=.*no\.pt' does not exist"),
        ("not set up", "CheckpointError", "Linear is not set up yet"),
        ("storage", "TypeError", "storage_options are not supported"),
        ("truncated", "CheckpointError", "distcp"),
        ("lost", "CheckpointError", "distcp"),
    ],
)
def test_what_cannot_be_loaded_is_refused_and_nothing_changed(
    parts: dict[str, list[Any]], case: str, kind: str, message: str
) -> None:
    results = [rank[case] for rank in good(parts["refusals"])]
    assert all(isinstance(result, Raised) for result in results)
    same_error(results, kind, message)


def test_one_entry_of_a_dict_is_kept_by_a_filter() -> None:
    assert fabric_state._plain({"a": 1, "b": 2}, lambda name, _: name == "a") == {"a": 1}
    assert fabric_state._plain(3, None) == 3
