"""Which plan a model gets, and that it trains as one process does: every class, by a list."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import transformers

from goose_strategy.errors import PlanError
from goose_strategy.models.choose import choose_plan
from goose_strategy.tensor_parallel.config import TensorConfig
from goose_strategy.tensor_parallel.plan import Style
from tests.harness.models import tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.harness.zoo import Outcome, causal_classes, compare, run_alone, zoo_model
from tests.tensor_parallel.helpers import with_mesh

LIST = Path(__file__).with_name("causal_lms.txt")


def _on_rank(_ctx: Context, name: str, pp: int, wide: bool, steps: int) -> Outcome:
    return compare(name, 2, pp, wide=wide, steps=steps)


# A head whose bias is held twice; a plan of transformers' that is wrong; one key head in a fused
# matrix; a loss of its own; latent attention; a state-space mixer, whose norms compute in fp32.
WIDE = {
    "BertLMHeadModel": 1e-10,
    "DogeForCausalLM": 1e-10,
    "GPTBigCodeForCausalLM": 1e-10,
    "BartForCausalLM": 1e-10,
    "MiniCPM3ForCausalLM": 1e-10,
    "MambaForCausalLM": 1e-6,
}


@pytest.mark.parametrize("name", sorted(WIDE))
def test_models_without_a_plan_train_as_in_one_process(name: str) -> None:
    for outcome in run_ranks(_on_rank, 2, name, 1, True, 3):
        assert not outcome.refused
        assert outcome.error < WIDE[name], outcome
        assert outcome.parameters < WIDE[name], outcome


@pytest.mark.parametrize("name", ["BertLMHeadModel", "MiniCPM3ForCausalLM"])
def test_with_a_pipeline_too(name: str) -> None:
    for outcome in run_ranks(_on_rank, 4, name, 2, True, 1):
        assert not outcome.refused
        assert outcome.error < 1e-10, outcome


@with_mesh
def _chosen(_ctx: Context, mesh: Any, name: str, settings: dict[str, Any]) -> Any:
    if name == "llama":
        return choose_plan(tiny_model("llama", layers=1), mesh, TensorConfig(**settings))
    try:
        return choose_plan(zoo_model(name), mesh, TensorConfig(**settings))
    except PlanError as error:
        return str(error)


def test_proved_plans_come_first() -> None:
    plan = run_ranks(_chosen, 2, "llama", {})[0]
    assert plan.proved
    assert plan.islands


@pytest.mark.parametrize(
    "settings",
    [
        {"deduce_plan": False},
        {"verify_plan": False},
        {"rules": {"bert.encoder.layer.*.output.dense": "split"}},
    ],
    ids=["not wanted", "not verified", "rules of the user's"],
)
def test_a_plan_is_looked_for_only_if_that_is_wanted(settings: dict[str, Any]) -> None:
    found = run_ranks(_chosen, 2, "BertLMHeadModel", settings)
    assert found[0] == found[1]
    if "rules" in settings:
        assert found[0].rules["bert.encoder.layer.*.output.dense"] is Style.SPLIT
        assert Style.COLUMN not in {style for name, style in found[0].rules.items() if "*" in name}
    else:
        assert "no tensor-parallel plan for the family 'bert'" in found[0]


def _listed() -> dict[str, str]:
    """What is known of every class, in the version of transformers that heads the list."""
    lines = [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    return {name: rest.strip() for name, rest in (line.split(maxsplit=1) for line in lines)}


def _same_version() -> bool:
    return LIST.read_text().splitlines()[0].endswith(f" {transformers.__version__}")


def test_the_list_names_every_class() -> None:
    """A new release shows here what it brought; the marker ``full`` shows what that does."""
    if not _same_version():
        pytest.skip(f"the list is of another version than {transformers.__version__}")
    assert list(_listed()) == causal_classes()


def _tried(_ctx: Context, name: str) -> str:
    """Train a class in fp64, or in fp32 if it does not run in fp64 even alone."""
    warnings.simplefilter("ignore")
    cause: Exception | None = None
    for wide in (True, False):
        try:
            run_alone(name, wide=wide)
        except Exception as error:  # noqa: BLE001
            cause = error
            continue
        outcome = compare(name, 2, wide=wide)
        if outcome.refused:
            return f"refused {outcome.refused}"
        # Some give fp32 logits even in fp64 (xLSTM), whose rounding is 6e-6 in its gates' biases
        # in one process, too. A missing share is 1e-1.
        exact = outcome.error < (5e-5 if wide else 2e-3)
        return "exact" if exact else f"wrong {outcome}"
    return f"not-run {type(cause).__name__}: {cause}"


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", causal_classes())
def test_every_class_is_as_listed(name: str) -> None:
    """Whatever runs alone is exact at tp=2, or refused; nothing is wrong."""
    found = run_ranks(_tried, 2, name, timeout_s=590)
    kinds = {verdict.split()[0] for verdict in found}
    assert kinds == {_listed()[name].split()[0]}, found
