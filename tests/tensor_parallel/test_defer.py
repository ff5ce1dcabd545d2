"""Whole models whose weight gradients come in an action of their own, against one backward."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.pytorch_utils import Conv1D

from goose_strategy.grads.store import WeightGradStore, WeightGradWork
from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.pipeline_parallel.recompute import choose_modules, recompute_modules
from goose_strategy.pipeline_parallel.replay import Replay
from goose_strategy.tensor_parallel.convert import Converted
from goose_strategy.tensor_parallel.defer import DeferredLinear, defer_weight_gradients
from goose_strategy.tensor_parallel.parallelize import undo
from tests.harness.models import FAMILIES, Batch, batches, tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.parity.lora import LAYERS, LoraCase
from tests.tensor_parallel.helpers import cut, with_mesh

Forward = Callable[[Batch], Tensor]


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _whole(model: nn.Module, parts: list[Batch], *, autocast: bool = False) -> dict[str, Tensor]:
    """Gradients of ordinary backwards."""
    model.zero_grad()
    for batch in parts:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        loss.backward()
    return _gradients(model)


def _deferred_names(model: nn.Module) -> set[str]:
    """Parameters of the modules that push, row layers' bias excepted."""
    names = set()
    for prefix, module in model.named_modules():
        if getattr(module, "weight_gradients", None) is None:
            continue
        added_later = "Row" in type(module).__name__ or "Falcon" in type(module).__name__
        for name, param in module.named_parameters(recurse=False):
            if param.requires_grad and not (added_later and name == "bias"):
                names.add(f"{prefix}.{name}")
    return names


def _split(
    model: nn.Module, store: WeightGradStore, parts: list[Batch], *, autocast: bool = False
) -> dict[str, Tensor]:
    """Gradients of as many I, then as many W, checked on the way."""
    model.zero_grad()
    counts: dict[str, int] = {}
    handles = []
    for name, param in model.named_parameters():
        if param.requires_grad:

            def count(_: Tensor, name: str = name) -> None:
                counts[name] = counts.get(name, 0) + 1

            handles.append(param.register_post_accumulate_grad_hook(count))
    put_off: list[WeightGradWork] = []
    for batch in parts:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        with store.collecting():
            loss.backward()
        put_off.append(store.take())
    # A tied weight has one name among the parameters.
    known = {name for name, _ in model.named_parameters()}
    deferred = _deferred_names(model) & known
    params = dict(model.named_parameters())
    assert deferred
    for name in deferred:
        assert params[name].grad is None, f"{name} was accumulated with the input gradients"
    assert all(len(work) and work.nbytes for work in put_off)
    for work in put_off:
        work.run()
    for handle in handles:
        handle.remove()
    assert set(counts.values()) == {len(parts)}, "a parameter was accumulated more than once"
    assert deferred <= counts.keys()
    return _gradients(model)


def _assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys(), mine.keys() ^ theirs.keys()
    different = [name for name in mine if not torch.equal(mine[name], theirs[name])]
    assert different == []
    assert any(gradient.abs().max() > 0 for gradient in mine.values())


def _compare(model: Any, *, plain: Any = None, autocast: bool = False, seq_len: int = 12) -> None:
    parts = batches(2, batch_size=2, seq_len=seq_len)
    expected = _whole(plain if plain is not None else model, parts, autocast=autocast)
    store = WeightGradStore()
    restore = defer_weight_gradients(model, store)
    _assert_equal(_whole(model, parts, autocast=autocast), expected)
    assert len(store.take()) == 0
    _assert_equal(_split(model, store, parts, autocast=autocast), expected)
    restore()
    _assert_equal(_whole(model, parts, autocast=autocast), expected)


# -- families and precisions -----------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_has_the_same_gradients_to_the_last_bit(family: Any, tied: bool) -> None:
    _compare(tiny_model(family, dtype=torch.float32, layers=2, tied=tied))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_precision_has_the_same_gradients(family: Any, dtype: torch.dtype) -> None:
    _compare(tiny_model(family, dtype=dtype, layers=2, tied=True))


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_autocast_has_the_same_gradients(family: Any) -> None:
    _compare(tiny_model(family, dtype=torch.float32, layers=2, tied=True), autocast=True)


def test_low_precision_weights_are_summed_in_fp32() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16, layers=1, tied=True)
    for param in model.parameters():
        param.grad_dtype = torch.float32
    _compare(model)
    assert {param.grad.dtype for param in model.parameters()} == {torch.float32}


# -- recompute -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_transformers_own_checkpointing(family: Any) -> None:
    plain = tiny_model(family, dtype=torch.float32, layers=2, tied=True)
    model = copy.deepcopy(plain)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _compare(model, plain=plain)


@pytest.mark.parametrize("autocast", [False, True])
def test_layers_that_are_computed_again(autocast: bool) -> None:
    plain = tiny_model("llama", dtype=torch.float32, layers=2, attention_dropout=0.0)
    model = copy.deepcopy(plain)
    store = WeightGradStore()
    defer_weight_gradients(model, store)
    recompute_modules(model, choose_modules(model, "layer"))
    parts = batches(2, batch_size=2)
    expected = _whole(plain, parts, autocast=autocast)
    _assert_equal(_split(model, store, parts, autocast=autocast), expected)
    _assert_equal(_whole(model, parts, autocast=autocast), expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_stage_that_is_computed_again(autocast: bool) -> None:
    dropout = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
    plain = tiny_model("gpt2", dtype=torch.float32, layers=2, tied=True, **dropout)
    model, store = copy.deepcopy(plain), WeightGradStore()
    parts = batches(2, batch_size=2)
    torch.manual_seed(5)
    expected = _whole(plain, parts, autocast=autocast)
    defer_weight_gradients(model, store)
    replay = Replay(model)
    torch.manual_seed(5)
    work, losses = [], []
    for batch in parts:
        inputs = list(batch.values())
        cast = torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False)
        with cast, torch.no_grad(), replay.first(inputs) as seen:
            model(**batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), replay.again(seen):
            losses.append(model(**batch).loss)
    for loss in losses:
        with store.collecting():
            loss.backward()
        work.append(store.take())
    for one in work:
        one.run()
    _assert_equal(_gradients(model), expected)


# -- tensor parallelism and adapters ---------------------------------------------------------------


@with_mesh
def _tp(_ctx: Context, mesh: ParallelMesh, family: Any, settings: dict[str, Any]) -> None:
    model = tiny_model(family, dtype=torch.float32, layers=2, **settings)
    classes = {name: type(module) for name, module in model.named_modules()}
    cut(model, mesh)
    # The gradients of tensors that every rank has are sums over tp, which are equal as well.
    _compare(model)
    assert any(isinstance(m, Converted) and m.defers for m in model.modules())
    undo(model)
    assert {name: type(module) for name, module in model.named_modules()} == classes


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"tied": True}),
        ("llama", {"kv_heads": 1}),
        ("gpt2", {"tied": True}),
        ("opt", {}),
        ("falcon", {}),
        ("gemma", {"tied": True}),
        ("mixtral", {}),
    ],
)
def test_cut_layers_have_the_same_gradients(family: str, settings: dict[str, Any]) -> None:
    run_ranks(_tp, 2, family, settings)


@pytest.mark.parametrize("targets", [LAYERS, (*LAYERS, "embed_tokens", "lm_head")])
def test_adapters_push_and_what_is_frozen_does_not(targets: tuple[str, ...]) -> None:
    model: Any = LoraCase(targets=targets).model().float()
    _compare(model)
    store = WeightGradStore()
    defer_weight_gradients(model, store)
    with store.collecting():
        model(**batches(1)[0]).loss.backward()
    pushed = [param for owed in store.take()._owed or () for param in owed.parameters]
    assert pushed
    assert all(param.requires_grad for param in pushed)


@with_mesh
def _cut_adapters(_ctx: Context, mesh: ParallelMesh) -> None:
    lm = LoraCase(targets=LAYERS).model().float().base_model.model
    cut(lm, mesh)
    _compare(lm)


def test_cut_adapters_have_the_same_gradients() -> None:
    run_ranks(_cut_adapters, 2)


# -- the module tree -------------------------------------------------------------------------------


def test_modules_stay_what_they_are() -> None:
    model = tiny_model("gpt2", dtype=torch.float32, layers=1, tied=True)
    seen: list[str] = []
    model.lm_head.register_forward_hook(lambda *_: seen.append("forward"))
    model.lm_head.register_full_backward_hook(lambda *_: seen.append("backward"))
    model.transformer.h[0].mlp.c_fc.weight.register_hook(lambda grad: seen.append("weight"))
    names = [name for name, _ in model.named_modules()]
    keys = list(model.state_dict())
    params = list(model.parameters())
    classes = [type(module) for module in model.modules()]
    store = WeightGradStore()
    restore = defer_weight_gradients(model, store)
    assert [name for name, _ in model.named_modules()] == names
    assert list(model.state_dict()) == keys
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), params, strict=True))
    assert isinstance(model.lm_head, nn.Linear)
    assert isinstance(model.transformer.wte, nn.Embedding)
    assert isinstance(model.transformer.h[0].mlp.c_fc, Conv1D)
    with store.collecting():
        model(**batches(1)[0]).loss.backward()
    assert seen == ["forward", "backward"]
    store.take().run()
    assert seen == ["forward", "backward", "weight"]
    restore()
    assert [type(module) for module in model.modules()] == classes
    assert all("weight_gradients" not in vars(module) for module in model.modules())


def test_a_copy_of_the_model_has_its_own_weights() -> None:
    model, store = nn.Sequential(nn.Linear(3, 3)), WeightGradStore()
    defer_weight_gradients(model, store)
    twin = copy.deepcopy(model)
    with store.collecting():
        twin(torch.ones(2, 3)).sum().backward()
    assert len(store.take()) == 0
    assert twin[0].weight.grad is not None
    assert model[0].weight.grad is None


class _OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class _Inherited(nn.Linear):
    pass


class _Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def _patched() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: x @ layer.weight
    return layer


def _parametrised() -> nn.Module:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", _Doubled())
    return layer


@pytest.mark.parametrize(
    ("make", "deferred"),
    [
        (lambda: nn.Linear(4, 4), True),
        (lambda: _Inherited(4, 4), True),
        (lambda: _OwnForward(4, 4), False),
        (_patched, False),
        (_parametrised, False),
        (lambda: nn.Bilinear(4, 4, 4), False),
        (lambda: nn.LayerNorm(4), False),
    ],
)
def test_only_layers_that_compute_what_is_known_are_told(
    make: Callable[[], nn.Module], deferred: bool
) -> None:
    layer = make()
    before = type(layer)
    defer_weight_gradients(layer, WeightGradStore())
    assert (type(layer) is not before) == deferred
    assert isinstance(layer, before)


@pytest.mark.parametrize("option", [{}, {"padding_idx": 2}, {"max_norm": 1.0}, {"sparse": True}])
def test_embeddings_with_a_gradient_of_their_own_kind_are_left_alone(option: dict) -> None:
    layer, store = nn.Embedding(5, 4, **option), WeightGradStore()
    defer_weight_gradients(layer, store)
    with store.collecting():
        layer(torch.tensor([1, 2])).sum().backward()
    assert len(store.take()) == (0 if option.keys() & {"max_norm", "sparse"} else 1)


def test_a_scaled_embedding_pushes_what_it_looked_up() -> None:
    layer = Gemma3TextScaledWordEmbedding(7, 4, 0, embed_scale=3.0)
    ids = torch.tensor([[1, 0, 1], [6, 5, 2]])
    seed = torch.randn(2, 3, 4)
    layer(ids).backward(seed)
    expected, layer.weight.grad = layer.weight.grad, None
    store = WeightGradStore()
    defer_weight_gradients(layer, store)
    with store.collecting():
        layer(ids).backward(seed)
    assert layer.weight.grad is None
    store.take().run()
    assert torch.equal(layer.weight.grad, expected)


def test_what_is_told_twice_is_told_once() -> None:
    layer = nn.Linear(4, 4)
    first, second = WeightGradStore(), WeightGradStore()
    defer_weight_gradients(layer, first)
    restore = defer_weight_gradients(layer, second)
    assert isinstance(layer, DeferredLinear)
    assert layer.weight_gradients is first
    restore()
    assert layer.weight_gradients is first


def test_dropped_work_frees_activations() -> None:
    model = tiny_model("llama", dtype=torch.float32, layers=1)
    store = WeightGradStore()
    defer_weight_gradients(model, store)
    with store.collecting():
        model(**batches(1)[0]).loss.backward()
    work = store.take()
    assert work.nbytes > 0
    held = [tensor for owed in work._owed or () for tensor in owed.held]
    del work
    gc.collect()
    assert all(not [r for r in gc.get_referrers(t) if r is not held] for t in held)
