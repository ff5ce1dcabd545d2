"""No class of transformers is trained privately with a wrong norm: exact, or refused."""

from __future__ import annotations

import pytest

from tests.harness.world import run_ranks
from tests.privacy.every_class import Outcome, all_classes, examine

# One of each kind: parallel attention, norms without bias or with one more, scaled embeddings,
# fused projections, parameters in activations, positions of their own, other losses.
KINDS = (
    "ApertusForCausalLM",
    "BitNetForCausalLM",
    "CTRLLMHeadModel",
    "ElectraForCausalLM",
    "Gemma3ForCausalLM",
    "GPTBigCodeForCausalLM",
    "MptForCausalLM",
    "Olmo2ForCausalLM",
    "PersimmonForCausalLM",
    "StableLmForCausalLM",
)
CUT = (
    "ApertusForCausalLM",
    "Cohere2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "Olmo2ForCausalLM",
)
REFUSED = {
    "BertLMHeadModel": "cls.predictions.bias",
    "HrmTextForCausalLM": "used more than once",
    "JambaForCausalLM": "no known gradient per sample",
    "OPTForCausalLM": "embed_positions.weight",
    "Qwen3MoeForCausalLM": "experts.gate_up_proj",
    "XLNetLMHeadModel": "exactly one trainable",
}
MESHES = ({}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2})


def outcomes(names: list[str], mesh: dict[str, int], timeout_s: float = 50.0) -> list[Outcome]:
    """Examine classes; what the ranks find is the same, or the worst of it."""
    size = mesh.get("tp", 1) * mesh.get("pp", 1)
    ranks = run_ranks(examine, size, names, mesh, timeout_s=timeout_s)
    order = ("wrong", "failed", "not built", "refused", "exact")
    return [min(found, key=lambda one: order.index(one.verdict)) for found in zip(*ranks)]  # noqa: B905


@pytest.mark.parametrize(
    ("names", "mesh"), [(KINDS, {}), (CUT, {"tp": 2}), (CUT, {"pp": 2})], ids=["one", "tp", "pp"]
)
def test_kinds_of_models_are_exact(names: tuple[str, ...], mesh: dict[str, int]) -> None:
    for found in outcomes(list(names), mesh):
        assert found.verdict == "exact", found


def test_kinds_of_models_are_refused_by_name() -> None:
    for found, text in zip(outcomes(list(REFUSED), {}), REFUSED.values(), strict=True):
        assert found.verdict == "refused", found
        assert text in found.why, found


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_class_is_exact_or_refused(mesh: dict[str, int]) -> None:
    every = outcomes(list(all_classes()), mesh, timeout_s=1400.0)
    wrong = [found for found in every if found.verdict in ("wrong", "failed")]
    assert not wrong, wrong
    exact = [found.name for found in every if found.verdict == "exact"]
    least = 45 if not mesh else 33
    print(len(exact), "exact of", len(every), mesh)
    assert len(exact) >= least, exact
