"""Every causal LM of transformers, tiny and random, trained privately or refused.

The reference knows nothing of layers: each row alone through the plain model, by autograd.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from goose_strategy.errors import GooseError
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.privacy.config import FLOOR, PrivacyConfig
from goose_strategy.runtime.core import ParallelRuntime
from goose_strategy.runtime.settings import RuntimeConfig
from tests.harness.models import IGNORED, Batch
from tests.harness.worker import Context
from tests.parity.grid import DEADLINE

LARGEST = 5 * 10**6
"""Parameters of a model that is built: some configs name their sizes in ways of their own."""

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "dim_model"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "v_head_dim", "head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Outcome:
    """What became of one class.

    Attributes:
        name: Of the class.
        verdict: ``"exact"``, ``"refused"``, ``"wrong"``, ``"failed"`` or ``"not built"``.
        why: More of it.
    """

    name: str
    verdict: str
    why: str


def all_classes() -> Iterator[str]:
    """Yield the names of all classes, each once."""
    seen: set[str] = set()
    for value in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        names = value if isinstance(value, (tuple, list)) else (value,)
        for name in names:
            if name not in seen:
                seen.add(name)
                yield name


def _build(name: str, dtype: torch.dtype) -> nn.Module:
    cls: Any = getattr(transformers, name)
    known = inspect.signature(cls.config_class.__init__).parameters
    config = cls.config_class(**{k: v for k, v in _SIZES.items() if k in known})
    for key, value in vars(config).items():
        if ("dropout" in key or "pdrop" in key) and isinstance(value, float):
            setattr(config, key, 0.0)
    with torch.device("meta"):
        size = sum(param.numel() for param in cls(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    model: nn.Module = cls(config).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.add_((torch.randn(param.shape, generator=generator) * 0.05).to(param.dtype))
    return model.train()


def _batch() -> Batch:
    # As many rows as tokens: who mistakes one for the other must be seen.
    ids = torch.randint(5, 100, (8, 8), generator=torch.Generator().manual_seed(3))
    ids[1, 4:] = ids[1, :4]
    labels = ids.clone()
    for row in range(8):
        labels[row, 3 + row % 5 :] = IGNORED
    return {"input_ids": ids, "labels": labels}


def _by_rows(model: nn.Module, batch: Batch) -> list[dict[str, Tensor]]:
    """Return every row's gradients by name, each of a call with that row alone."""
    model = copy.deepcopy(model)
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    found = []
    for row in range(batch["input_ids"].shape[0]):
        alone = {key: value[row : row + 1] for key, value in batch.items()}
        loss = model(**alone, use_cache=False).loss
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        found.append(
            {
                name: torch.zeros_like(param) if part is None else part.double()
                for (name, param), part in zip(named.items(), gradients, strict=True)
            }
        )
    return found


def _train(runtime: ParallelRuntime, model: nn.Module, batch: Batch) -> Any:
    handle = runtime.shard_module(model)
    loss = model(**batch, use_cache=False).loss
    with runtime.backward(loss):
        loss.backward()
    assert runtime.ledger is not None
    assert handle.reducer is not None
    norms = torch.cat(runtime.ledger.stats.norms).double()
    return norms, handle.reducer.full_gradients(), handle.surgery.specs


def _errors(found: Any, rows: list[dict[str, Tensor]], limit: float) -> tuple[float, float, str]:
    """Return how far norms, and the worst clipped sum, are off."""
    norms, sums, specs = found
    squares = [sum(float(part.square().sum()) for part in row.values()) for row in rows]
    expected = torch.tensor(squares, dtype=torch.float64).sqrt()
    # A row that a model knows by heart has a gradient of rounding errors.
    of_norms = float(((norms - expected).abs() / expected.clamp(min=1e-3 * limit)).max())
    factors = (limit / (expected + FLOOR)).clamp(max=1)
    whole = {
        name: torch.stack([f * row[name] for f, row in zip(factors, rows, strict=True)]).sum(0)
        for name in rows[0]
    }
    size = sum(float(value.square().sum()) for value in whole.values()) ** 0.5
    worst, where = 0.0, ""
    for name, mine in sums.items():
        square = 0.0
        # A copy of a tied weight on the last stage has another name in one process.
        own = whole[specs[name].tie or name]
        for box, piece in specs[name].pieces(mine):
            theirs = own
            for dim, (start, stop) in enumerate(zip(*box, strict=True)):
                theirs = theirs.narrow(dim, start, stop)
            square += float((theirs - piece.double()).square().sum())
        error = square**0.5 / max(float(own.norm()), 1e-4 * size)
        if error > worst:
            worst, where = error, name
    return of_norms, worst, where


def examine(ctx: Context, names: list[str], mesh: dict[str, int]) -> list[Outcome]:
    """Train classes privately for one call each; inside a world."""
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [_examine(name, mesh) for name in names]


def _examine(name: str, mesh: dict[str, int]) -> Outcome:
    batch = _batch()
    for dtype in (torch.float64, torch.float32):
        # Whatever the model raises by itself says nothing of private training.
        try:
            model = _build(name, dtype)
            rows = _by_rows(model, batch)
            break
        except Exception as error:  # noqa: BLE001
            why = f"{type(error).__name__}: {error}"
    else:
        return Outcome(name, "not built", why)
    squares = [sum(float(part.square().sum()) for part in row.values()) for row in rows]
    limit = sorted(square**0.5 for square in squares)[4]
    privacy = PrivacyConfig(
        max_grad_norm=limit, noise_multiplier=0.0, sampling="none", logical_batch_size=1
    )
    runtime = ParallelRuntime(
        RuntimeConfig(pipeline=PipelineConfig(num_microbatches=2), privacy=privacy, **mesh)
    )
    try:
        runtime.start(torch.device("cpu"), timeout=DEADLINE)
        found = _train(runtime, model, batch)
        of_norms, of_sums, where = _errors(found, rows, limit)
        verdict = "exact" if of_norms < 1e-5 and of_sums < 1e-4 else "wrong"
        return Outcome(name, verdict, f"norms {of_norms:.1e}, {where} {of_sums:.1e} off")
    except GooseError as error:
        return Outcome(name, "refused", f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001
        return Outcome(name, "failed", f"{type(error).__name__}: {error}")
    finally:
        runtime.stop()
