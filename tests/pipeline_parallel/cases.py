"""Models, batches and the single process that the tests of the pipeline compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
)

from tests.harness.models import FAMILIES, IGNORED, VOCAB, batches, randomise, tiny_model

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def summed_loss(
    logits: Tensor, labels: Tensor, *_: Any, num_items_in_batch: Any, **__: Any
) -> Tensor:
    """Sum over valid tokens / valid tokens of the whole batch, in the logits' precision."""
    flat = logits[:, :-1].reshape(-1, logits.shape[-1])
    targets = labels[:, 1:].reshape(-1)
    total = cross_entropy(flat, targets, ignore_index=IGNORED, reduction="sum")
    return total / num_items_in_batch


def _gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=4,
            n_head=4,
            n_positions=64,
            resid_pdrop=0.0,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            **SPECIAL,
        )
    )


def _bloom() -> nn.Module:
    return BloomForCausalLM(
        BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=4, n_head=4, **SPECIAL)
    )


def _opt() -> nn.Module:
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            word_embed_proj_dim=16,
            num_hidden_layers=4,
            ffn_dim=64,
            num_attention_heads=4,
            max_position_embeddings=64,
            dropout=0.0,
            **SPECIAL,
        )
    )


OTHERS: dict[str, Callable[[], nn.Module]] = {"gpt2": _gpt2, "bloom": _bloom, "opt": _opt}


def model_of(family: str, *, tied: bool = False, **settings: Any) -> Any:
    """Return a tiny fp64 model in training mode that divides its loss by ``num_items_in_batch``."""
    if family in FAMILIES:
        model: Any = tiny_model(family, tied=tied, **settings)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = OTHERS[family]().double().train()
        randomise(model)
    model.loss_function = summed_loss
    return model


def batch_of(rows: int, *, seq_len: int = 12, seed: int = 0, **options: Any) -> dict[str, Any]:
    """Return one batch with labels and their number."""
    return counted([batches(1, batch_size=rows, seq_len=seq_len, seed=seed, **options)[0]])[0]


def counted(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add the number of valid labels of all parts to each of them."""
    count = sum((part["labels"][:, 1:] != IGNORED).sum() for part in parts)
    return [{**part, "num_items_in_batch": count} for part in parts]


def reference(
    model: nn.Module, microbatches: Sequence[Mapping[str, Any]]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what one process computes: the summed loss and the accumulated gradients."""
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for microbatch in microbatches:
        loss = model(**microbatch, use_cache=False).loss
        loss.backward()
        total = total + loss.detach()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return total, gradients


class Toy(nn.Module):
    """Layers in a list, and the bad habits of real models, one at a time.

    Args:
        habit: ``"first_skip"`` adds the embeddings to the last hidden states; ``"middle_skip"``
            adds layer 0's output there; ``"looped"`` runs layer 1 twice; ``"reversed"`` runs the
            layers from the back; ``"pair"`` passes a mask that layer 0 made and the embeddings to
            every layer; ``"filled"`` passes a dict to every layer, which layer 0 fills;
            ``"pair_skip"`` passes the embeddings to every layer and adds them at the end, too;
            ``"running_sum"`` passes the sum of all hidden states so far.
    """

    def __init__(self, habit: str = "", *, layers: int = 4) -> None:
        super().__init__()
        self.habit = habit
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([ToyLayer() for _ in range(layers)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 20)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        first = hidden = self.embed(input_ids)
        kept = mask = total = None
        layers, shared = list(self.layers), {}
        for index, layer in enumerate(layers[::-1] if self.habit == "reversed" else layers):
            if self.habit == "pair":
                hidden, made = layer(hidden, extra=(first, mask), make_mask=mask is None)
                mask = made if made is not None else mask
            elif self.habit == "filled":
                hidden = layer(hidden, shared=shared)
            elif self.habit == "pair_skip":
                hidden, _ = layer(hidden, extra=(first, 1))
            elif self.habit == "running_sum":
                total = hidden if index == 0 else total + hidden
                hidden, _ = layer(hidden, extra=(total, 1))
            else:
                hidden = layer(hidden)
            if self.habit == "looped" and index == 1:
                hidden = layer(hidden)
            kept = hidden if index == 0 else kept
        if self.habit in ("first_skip", "pair_skip"):
            hidden = hidden + first
        if self.habit == "middle_skip":
            hidden = hidden + kept
        logits = self.head(self.norm(hidden))
        loss = None
        if labels is not None:
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return SimpleNamespace(loss=loss, logits=logits)


class ToyLayer(nn.Module):
    """A residual layer; with ``extra`` it takes the embeddings and a mask, and returns the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(
        self,
        hidden: Tensor,
        extra: tuple[Tensor, Any] | None = None,
        make_mask: bool = False,
        shared: dict[str, Tensor] | None = None,
    ) -> Any:
        out = hidden + torch.tanh(self.linear(hidden))
        if shared is not None:
            return out + shared.setdefault("first", out)
        if extra is None:
            return out
        first, mask = extra
        made = (out.detach().sum(-1, keepdim=True) > 0).long() if make_mask else None
        chosen = mask if mask is not None else made
        return out + 0.5 * first * chosen, made


def toy_batch(rows: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 20, (rows, 6), generator=generator)
    return {"input_ids": ids, "labels": ids.flip(0)}


def toy(habit: str = "", **options: Any) -> Toy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Toy(habit, **options).double()


def toy_reference(model: nn.Module, microbatches: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the gradients of one process."""
    model.zero_grad()
    for microbatch in microbatches:
        model(**microbatch).loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients
