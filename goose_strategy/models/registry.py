"""From a model to its tensor-parallel plan.

transformers' ``tp_plan`` says which layers are cut; it says neither which parameters between them
have partial gradients (its own Apertus trains wrongly for that) nor which sizes tp has to divide.
Families that were proved exact add this as data; a plan that is derived for another family is
accepted only if it leaves nothing to guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from goose_strategy.compat.peft import layers_under
from goose_strategy.compat.transformers import (
    base_prefix,
    config_size,
    head_bias_holders,
    input_embedding,
    model_type,
    output_embedding,
    tensor_plan,
)
from goose_strategy.errors import PlanError
from goose_strategy.models.bloom import BLOOM
from goose_strategy.models.falcon import FALCON
from goose_strategy.models.family import HEADS_AND_MLP, Family
from goose_strategy.models.gemma import GEMMA
from goose_strategy.models.gpt2 import GPT2
from goose_strategy.models.gpt_neox import GPT_NEOX
from goose_strategy.models.llama import LLAMA
from goose_strategy.models.mistral import MISTRAL
from goose_strategy.models.mixtral import MIXTRAL
from goose_strategy.models.opt import OPT
from goose_strategy.models.phi3 import PHI3
from goose_strategy.models.qwen2 import QWEN2
from goose_strategy.models.qwen3 import QWEN3
from goose_strategy.tensor_parallel.config import TensorConfig
from goose_strategy.tensor_parallel.parallelize import modules_to_cut
from goose_strategy.tensor_parallel.plan import (
    Attention,
    Style,
    TensorPlan,
    generic_name,
    parent_name,
)

_ALL = (
    BLOOM,
    FALCON,
    GEMMA,
    GPT2,
    GPT_NEOX,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    OPT,
    PHI3,
    QWEN2,
    QWEN3,
)
FAMILIES: Mapping[str, Family] = {family.name: family for family in _ALL}

_STYLES: Mapping[str, Style] = {
    "colwise": Style.COLUMN,
    "rowwise": Style.ROW,
    "colwise_gather_output": Style.GATHERED,
    "colwise_rep": Style.GATHERED,
    "rowwise_split_input": Style.SPLIT,
    "rowwise_rep": Style.SPLIT,
    "embedding_rowwise": Style.VOCAB,
    "vocab_rowwise": Style.VOCAB,
    "replicated_with_grad_allreduce": Style.PARTIAL,
    "moe_tp_experts": Style.EXPERTS,
    "replicate": Style.REPLICATED,
    "replicated": Style.REPLICATED,
}


_LAYERS = (Style.COLUMN, Style.ROW, Style.GATHERED, Style.SPLIT)


def supported_families() -> tuple[str, ...]:
    """Return the families whose plan was proved against one process."""
    return tuple(sorted(FAMILIES))


def plan_for(model: nn.Module, config: TensorConfig | None = None) -> TensorPlan:
    """Make the plan of a whole model, before a pipeline or anything else takes modules from it.

    Args:
        model: A transformers model, or any module with ``config.rules`` for it.
        config: The user's settings.

    Returns:
        The plan; names are relative to ``model``.

    Raises:
        PlanError: If the family has no plan, a style is not supported, or it cannot be known
            whether a parameter's gradient is partial (`verify_plan` finds out).
    """
    config = config or TensorConfig()
    name = model_type(model)
    family = FAMILIES.get(name)
    _check_settings(model, family)
    prefix = base_prefix(model)
    rules = {} if family and family.own_plan else _derived_rules(model, name)
    if family is not None:
        rules |= {prefix + pattern: style for pattern, style in family.rules.items()}
    rules |= {pattern: Style(style) for pattern, style in config.rules.items()}
    islands = (
        {prefix + parent: argument for parent, argument in family.islands.items()} if family else {}
    )
    if not any(style in _LAYERS for style in rules.values()):
        raise PlanError(
            f"there is no tensor-parallel plan for the family {name!r}. {_advice()}", axis="tp"
        )
    rules = _with_embeddings(model, rules)
    _check_pairs(name, rules)
    guessed: frozenset[str] = frozenset()
    if family is None:
        guessed = _unnamed(model, name, rules, guess=config.verify_plan)
    rules |= dict.fromkeys(guessed, Style.PARTIAL)
    if Style.HEAD in rules.values():
        rules |= dict.fromkeys(head_bias_holders(model), Style.COLUMN)
    sizes = {
        size: config_size(model, size) for size in (family.divisible if family else HEADS_AND_MLP)
    }
    plan = TensorPlan(
        family=name,
        rules=rules,
        islands=islands,
        divisible={size: value for size, value in sizes.items() if value is not None},
        packed=_packed(model, family, prefix),
        attention=_placed(family, prefix),
        whole_attention=config.allow_replicated_attention,
        guessed=guessed,
        proved=family is not None and not config.rules,
        gather_logits=config.gather_logits,
    )
    plan = _checked_attention(model, family, plan)
    modules_to_cut(model, plan)
    return plan


def _check_settings(model: nn.Module, family: Family | None) -> None:
    config = getattr(model, "config", None)
    for name, value in ({} if family is None else family.refused).items():
        if family is not None and getattr(config, name, None) == value:
            raise PlanError(
                f"{name}={value!r} in the config of this {family.name} model goes around its own "
                f"layers, which tp cuts; change it, or use tp=1.",
                axis="tp",
            )


def _placed(family: Family | None, prefix: str) -> Attention | None:
    if family is None:
        return None
    return replace(family.attention, module=prefix + family.attention.module)


def _packed(model: nn.Module, family: Family | None, prefix: str) -> dict[str, tuple[int, ...]]:
    packed = {} if family is None else family.packed
    return {
        prefix + pattern: tuple(config_size(model, size) or 1 for size in sizes)
        for pattern, sizes in packed.items()
    }


def _checked_attention(model: nn.Module, family: Family | None, plan: TensorPlan) -> TensorPlan:
    """Leave attention whole where the family's layout of it cannot be cut.

    Raises:
        PlanError: If that was not allowed.
    """
    cases = () if family is None else family.attention_if
    config = getattr(model, "config", None)
    if not cases or any(
        all(getattr(config, name, None) == value for name, value in case.items()) for case in cases
    ):
        return plan
    if not plan.whole_attention:
        needed = " or ".join(
            " and ".join(f"{name}={value}" for name, value in case.items()) for case in cases
        )
        raise PlanError(
            f"attention of this {plan.family} model cannot be cut by heads (that needs {needed}); "
            "keep it whole with TensorConfig(allow_replicated_attention=True), or use tp=1.",
            axis="tp",
        )
    names = {plan.attention.heads, plan.attention.kv_heads} if plan.attention else set()
    sizes = {name: size for name, size in plan.divisible.items() if name not in names}
    return replace(plan.without_attention(), divisible=sizes)


def _advice() -> str:
    return (
        f"Proved families: {', '.join(supported_families())}; use one of them, give rules in "
        f"TensorConfig(rules={{...}}), or use tp=1."
    )


def _derived_rules(model: nn.Module, family: str) -> dict[str, Style]:
    """Translate transformers' plan."""
    head = output_embedding(model)
    rules: dict[str, Style] = {}
    plan = tensor_plan(model)
    experts = {pattern for pattern, theirs in plan.items() if theirs == "moe_tp_experts"}
    for pattern, theirs in plan.items():
        # How the stacked matrices of experts are cut follows from their shapes.
        if parent_name(pattern) in experts:
            continue
        # What its owner's own numbers are follows from the rules for them.
        if theirs == "local_params":
            continue
        style = _STYLES.get(theirs)
        if head is not None and pattern == head[0]:
            style = Style.HEAD if style in (Style.COLUMN, Style.GATHERED) else None
        if style is None:
            raise PlanError(
                f"{pattern}={theirs!r}: this style of the family {family!r} is not supported. "
                f"{_advice()}",
                axis="tp",
            )
        rules[pattern] = style
    return rules


def _with_embeddings(model: nn.Module, rules: Mapping[str, Style]) -> dict[str, Style]:
    """Cut the vocabulary of embedding and head, whatever transformers' version says of them."""
    found = {Style.VOCAB: input_embedding(model), Style.HEAD: output_embedding(model)}
    classes = {Style.VOCAB: nn.Embedding, Style.HEAD: nn.Linear}
    extra = {
        generic_name(place[0]): style
        for style, place in found.items()
        if place is not None
        and all(isinstance(layer, classes[style]) for layer in layers_under(place[1]).values())
    }
    return {**extra, **rules}


def _check_pairs(family: str, rules: Mapping[str, Style]) -> None:
    """Check that what column layers cut, a row layer of the same parent sums.

    Gathered and split layers are whole outwards and need no partner.
    """
    parents: dict[str, set[Style]] = {}
    for pattern, style in rules.items():
        if style in (Style.COLUMN, Style.ROW):
            parents.setdefault(parent_name(pattern), set()).add(style)
    for parent, styles in parents.items():
        if len(styles) == 1:
            raise PlanError(
                f"{parent} of the family {family!r} has {styles.pop().value} layers only; column "
                f"and row layers must come in pairs within one module. {_advice()}",
                axis="tp",
            )


def _unnamed(
    model: nn.Module, family: str, rules: Mapping[str, Style], *, guess: bool
) -> frozenset[str]:
    """Return the parameters beside column and row layers that no rule names.

    Raises:
        PlanError: If there is one and nothing would find out how its gradient arises.
    """
    found = set()
    parents = {parent_name(name) for name, style in rules.items() if style is Style.COLUMN}
    for name, _ in model.named_parameters():
        pattern = generic_name(name)
        names = [pattern]
        while names[-1]:
            names.append(parent_name(names[-1]))
        inside = any(name in parents for name in names)
        if not inside or any(name in rules for name in names):
            continue
        if not guess:
            raise PlanError(
                f"{pattern} lies beside the column and row layers of {family!r}, and no rule says "
                f"whether its gradient is partial there. Add it to TensorConfig(rules=...) as "
                f"'partial' (between a column and a row layer) or 'replicated', let "
                f"TensorConfig(verify_plan=True) find out, or use tp=1.",
                axis="tp",
            )
        found.add(pattern)
    return frozenset(found)
