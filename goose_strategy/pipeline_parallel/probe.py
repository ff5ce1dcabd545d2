"""Find a model's stack of layers, and what flows between them, from two small forwards.

Tracing (``torch.distributed.pipelining.pipeline``) bakes shapes and modes into a graph and loses
the model's class; plans by module name exist for half of the model families. A probe runs the model
as it is and looks at the arguments of its layers:

1. One forward in evaluation mode records every tensor that goes into or comes out of a layer, and
   the autograd graph tells which parameters stand behind each.
2. A second forward skips all layers and zeroes what stands before them, just as a later stage will.
   A tensor that comes out the same is computed by every stage itself (masks, positions, rotary
   angles, alibi); one that does not must be sent.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from goose_strategy.errors import PlanError
from goose_strategy.pipeline_parallel.record import check_replay, record_forward, trace_origins

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.stack import StackInfo

Example = Mapping[str, Any]

_ROWS, _COLUMNS = 2, 8


def probe_model(model: nn.Module, example: Example | None = None) -> StackInfo:
    """Find out how a model can be cut.

    Runs the whole model twice on a batch of two short rows, on the device of its parameters. Mode,
    ``requires_grad``, random state and hooks are afterwards as they were.

    Args:
        model: The whole model, before any surgery. Hugging Face causal language models need no
            example.
        example: Keyword arguments of its ``forward``, without labels; else random ``input_ids``.

    Returns:
        What :func:`~goose_strategy.pipeline_parallel.stage.cut_model` needs; the same on every
        rank that asks.

    Raises:
        PlanError: If there is no stack of layers, the model does not run on the example, a layer
            runs more than once or out of order, or the model cannot run without its layers.
    """
    stack = find_stack(model)
    inputs = dict(example) if example is not None else default_example(model)
    inputs |= call_settings(model)
    with _as_probed(model):
        record = record_forward(model, stack, inputs)
        trace_origins(model, record)
        check_replay(model, record, inputs)
    return record.info()


def find_stack(model: nn.Module) -> str:
    """Return the name of the outermost ``nn.ModuleList`` with the most parameters.

    Raises:
        PlanError: If the model has none.
    """
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in sizes)
        if isinstance(module, nn.ModuleList) and len(module) > 0 and not inside:
            sizes[name] = sum(p.numel() for p in module.parameters())
    if not sizes:
        raise PlanError(
            f"{type(model).__name__} has no stack of layers to cut: no nn.ModuleList was found. "
            "Use pp=1, or put its layers into one.",
            axis="pp",
        )
    return max(sizes, key=lambda name: sizes[name])


def call_settings(model: nn.Module) -> dict[str, Any]:
    """Return the keyword arguments that every call of a cut model is given.

    A cache of keys and values cannot be filled across stages, so none is kept.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    has_setting = hasattr(getattr(model, "config", None), "use_cache")
    named = any(p.name == "use_cache" for p in parameters)
    return {"use_cache": False} if named or (open_ended and has_setting) else {}


def default_example(
    model: nn.Module, shape: tuple[int, int] = (_ROWS, _COLUMNS)
) -> dict[str, Tensor]:
    """Return ids that any causal language model takes, on the device of its parameters.

    Args:
        model: The model.
        shape: Rows and columns of the ids.

    Raises:
        PlanError: If it does not say how large its vocabulary is.
    """
    config = getattr(model, "config", None)
    vocab = getattr(config, "vocab_size", None)
    if not isinstance(vocab, int):
        raise PlanError(
            f"{type(model).__name__} has no config.vocab_size to make input_ids from, with which "
            "its layers could be watched; use pp=1.",
            axis="pp",
        )
    device = next(model.parameters()).device
    # The lowest ids are padding and other special tokens where the vocabulary is large enough.
    low = 4 if vocab > 8 else 0
    rows, columns = shape
    ids = torch.arange(rows * columns, device=device).reshape(rows, columns)
    example = {"input_ids": low + ids % (vocab - low)}
    if device.type == "meta":
        # Given a finished mask, transformers does not look at values, which do not exist there.
        dtype = next(model.parameters()).dtype
        mask = torch.zeros((rows, 1, columns, columns), dtype=dtype, device=device)
        example["attention_mask"] = mask
    return example


@contextmanager
def _as_probed(model: nn.Module) -> Generator[None, None, None]:
    """Evaluation mode (no dropout, no checkpointing), gradients for all parameters."""
    modes = [(module, module.training) for module in model.modules()]
    wanted = [(param, param.requires_grad) for param in model.parameters()]
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        try:
            model.eval()
            for param, _ in wanted:
                param.requires_grad_(param.is_floating_point() or param.is_complex())
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for param, flag in wanted:
                param.requires_grad_(flag)
