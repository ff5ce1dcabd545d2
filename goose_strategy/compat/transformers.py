"""Everything that goose-strategy knows about the inside of transformers.

transformers is never imported here: where it was not imported, no module is one of its models, and
``import goose_strategy`` stays cheap. Names that transformers moves from one minor release to the
next (it supports 5.17 up to 5.24 at the time of writing) are read tolerantly; each function has a
test that says what breaks when its name moves.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from goose_strategy.errors import PlanError

LossFunction = Callable[..., Any]

_LINEAR_TWINS = {("transformers.models.falcon.modeling_falcon", "FalconLinear")}


def is_linear_twin(cls: type[nn.Module]) -> bool:
    """Return whether a class is one of transformers' that computes what ``nn.Linear`` does."""
    return issubclass(cls, nn.Linear) and (cls.__module__, cls.__name__) in _LINEAR_TWINS


def is_scaled_embedding(cls: type[nn.Module]) -> bool:
    """Return whether a class is one of transformers' embeddings that scale what they look up."""
    ours = cls.__module__.startswith("transformers.models.")
    return ours and issubclass(cls, nn.Embedding) and cls.__name__.endswith("ScaledWordEmbedding")


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is GPT-2's linear layer with a transposed weight, and plain."""
    utils = sys.modules.get("transformers.pytorch_utils")
    return utils is not None and type(module) is utils.Conv1D


def _pretrained_class() -> type[nn.Module] | None:
    """Return ``PreTrainedModel`` if the program has imported it."""
    module = sys.modules.get("transformers.modeling_utils")
    return getattr(module, "PreTrainedModel", None)


def is_pretrained(module: nn.Module) -> bool:
    """Return whether ``module`` is a transformers model."""
    base = _pretrained_class()
    return base is not None and isinstance(module, base)


def pretrained_models(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Find the outermost transformers models in a module tree.

    Args:
        module: Any module; may be a transformers model itself.

    Returns:
        Pairs of qualified name (``""`` for ``module`` itself) and model, in registration order; a
        model inside a model is not listed.
    """
    return list(_outermost(module, ""))


def _outermost(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    if is_pretrained(module):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _outermost(child, f"{name}.{child_name}" if name else child_name)


def is_causal_lm(model: nn.Module) -> bool:
    """Return whether ``model`` computes ``ForCausalLMLoss`` through its ``loss_function``.

    Decoders that compute their loss on the spot (Bart's, for one) ignore ``loss_function``; they
    count as any other module, whose own loss is averaged.
    """
    if not is_pretrained(model) or not _calls_loss_function(_forward_of(model)):
        return False
    losses = sys.modules.get("transformers.loss.loss_utils")
    wanted = getattr(losses, "ForCausalLMLoss", None)
    return wanted is not None and getattr(model, "loss_function", None) is wanted


@functools.cache
def _calls_loss_function(forward: Callable[..., Any]) -> bool:
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and "loss_function" in code.co_names


def computes_own_loss(model: nn.Module) -> bool:
    """Return whether ``model`` has a head over a vocabulary and computes its loss on the spot.

    Such are Bart's decoder, for one, and models for masked tokens: no loss function can be put in
    the place of theirs.
    """
    if not is_pretrained(model) or output_embedding(model) is None:
        return False
    forward = _forward_of(model)
    return "labels" in _forward_parameters(forward) and not _calls_loss_function(forward)


def install_loss(model: nn.Module, loss: LossFunction) -> Callable[[], None]:
    """Make ``model(labels=...)`` compute its loss with ``loss``.

    Args:
        model: A model of which `is_causal_lm` is true.
        loss: Called as ``loss(logits=, labels=, vocab_size=, **kwargs of the forward)``.

    Returns:
        A function that puts the former loss back.
    """
    former: Any = vars(model).get("_loss_function")

    def restore() -> None:
        if former is None:
            vars(model).pop("_loss_function", None)
        else:
            vars(model)["_loss_function"] = former

    model.loss_function = loss  # type: ignore[assignment]
    if loss_function_of(model) is not loss:
        raise PlanError(
            f"model={type(model).__name__}: this version of transformers does not take a "
            f"loss_function; install one of the versions that goose-strategy names."
        )
    return restore


def loss_function_of(model: nn.Module) -> LossFunction | None:
    """Return the function with which ``model`` computes its loss, if it has one."""
    loss: LossFunction | None = getattr(model, "loss_function", None)
    return loss


def _forward_of(model: nn.Module) -> Callable[..., Any]:
    """Return the forward of the model's class, which a patched instance still has."""
    return type(model).forward


@functools.cache
def _forward_parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(forward).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in positional)[1:]


def bind_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name the arguments of one call of ``model``.

    Args:
        model: The model; the signature is that of its class, not of a patched instance.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        All arguments by name, without defaults.

    Raises:
        TypeError: If there are too many positional arguments or one is given twice, as in a call.
    """
    names = _forward_parameters(_forward_of(model))
    if len(args) > len(names):
        raise TypeError(
            f"{type(model).__name__}.forward takes {len(names)} positional arguments "
            f"({', '.join(names)}) but {len(args)} were given"
        )
    bound = dict(zip(names, args, strict=False))
    twice = bound.keys() & kwargs.keys()
    if twice:
        raise TypeError(f"{type(model).__name__}.forward got {sorted(twice)} twice")
    return {**bound, **kwargs}


def returns_output(model: nn.Module, bound: Mapping[str, Any]) -> bool:
    """Return whether a call with these arguments gives a ``ModelOutput`` and not a tuple."""
    asked = bound.get("return_dict")
    default = getattr(getattr(model, "config", None), "return_dict", True)
    return bool(default if asked is None else asked)


def replace_logits(output: Any, change: Callable[[Tensor], Tensor | None]) -> Any:
    """Return a model's output with other logits, or without any.

    Args:
        output: What a model returned; anything without ``logits`` is returned as it is.
        change: Maps the logits to what takes their place; ``None`` leaves them out.

    Returns:
        The same object if ``change`` returned the same logits, else a new one of its class.
    """
    logits = output.get("logits") if isinstance(output, Mapping) else None
    if not isinstance(logits, Tensor):
        return output
    changed = change(logits)
    if changed is logits:
        return output
    # A ModelOutput keeps an attribute that was set to None among its items; so it is built anew.
    items: dict[str, Any] = {name: value for name, value in output.items() if name != "logits"}
    if changed is not None:
        items["logits"] = changed
    return type(output)(**items)


def model_type(model: nn.Module) -> str:
    """Return the family's name as its config has it, e.g. ``"llama"``; the class's without one."""
    name: str = getattr(getattr(model, "config", None), "model_type", "") or type(model).__name__
    return name


def config_size(model: nn.Module, name: str) -> int | None:
    """Return a whole number of the model's config, by its standard name; ``None`` without it."""
    size = getattr(getattr(model, "config", None), name, None)
    return size if isinstance(size, int) and not isinstance(size, bool) else None


def tensor_plan(model: nn.Module) -> dict[str, str]:
    """Return transformers' plan: module or parameter name with ``*`` for layer numbers -> style."""
    plan: Mapping[str, str | None] | None = getattr(model, "tp_plan", None)
    return {pattern: style for pattern, style in (plan or {}).items() if style}


def base_prefix(model: nn.Module) -> str:
    """Return the name of the model without its head, ending in a dot; ``""`` for itself."""
    base = getattr(model, "base_model", model)
    for name, module in model.named_modules():
        if module is base:
            return f"{name}." if name else ""
    return ""


def input_embedding(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return name and module of the token embedding, if the model has one."""
    return _accessed(model, "get_input_embeddings")


def output_embedding(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return name and module of the language-model head, if the model has one."""
    return _accessed(model, "get_output_embeddings")


def head_bias_holders(model: nn.Module) -> list[str]:
    """Return further names of the bias of the head, which models for masked tokens hold twice."""
    head = output_embedding(model)
    bias: Any = None if head is None else getattr(head[1], "bias", None)
    if head is None or not isinstance(bias, nn.Parameter):
        return []
    named = model.named_parameters(remove_duplicate=False)
    return [name for name, param in named if param is bias and name != f"{head[0]}.bias"]


def _accessed(model: nn.Module, accessor: str) -> tuple[str, nn.Module] | None:
    get = getattr(model, accessor, None)
    if get is None:
        return None
    try:
        wanted = get()
    except (AttributeError, NotImplementedError):
        # Models without tokens (and stages without the module) have no answer.
        return None
    for name, module in model.named_modules():
        if module is wanted:
            return name, module
    return None


def tied_parameters(model: nn.Module) -> dict[str, str]:
    """Return parameters that are another one under a second name.

    Returns:
        Second name -> name under which ``named_parameters`` lists the tensor. Ties are found by
        identity, so that a model whose config promises a tie that was never made is seen as it is.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    return {
        name: names[id(param)]
        for name, param in model.named_parameters(remove_duplicate=False)
        if names[id(param)] != name
    }


def promised_ties(model: nn.Module) -> dict[str, str]:
    """Return transformers' own record of tied weights, second name -> name of the source."""
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    return dict(ties) if isinstance(ties, Mapping) else {}


def auxiliary_loss(model: nn.Module) -> str | None:
    """Return the model's attribute that weighs its routers' load-balancing loss, if it has one.

    A mixture of experts adds that loss to the one that ``loss_function`` computes where
    ``output_router_logits`` is set, in the config or in the call.
    """
    names = ("router_aux_loss_coef", "aux_loss_coef")
    return next((n for n in names if isinstance(getattr(model, n, None), (int, float))), None)


def text_size(model: nn.Module, name: str) -> int | None:
    """Return a whole number of the part of the config that describes the decoder of text.

    Models of several kinds of input keep that part inside their config; for others it is all of it.
    """
    size = getattr(_text_config(getattr(model, "config", None)), name, None)
    return size if isinstance(size, int) and not isinstance(size, bool) else None


def _text_config(config: Any) -> Any:
    get = getattr(config, "get_text_config", None)
    return config if get is None else get(decoder=True)


def small_clone(model: nn.Module, layers: int, *, device: str = "cpu") -> nn.Module | None:
    """Build a new model of the same class and widths with fewer layers, in fp32.

    Args:
        model: A transformers model; its config is copied.
        layers: Number of layers.
        device: Where; on ``"meta"`` it costs nothing.

    Returns:
        A model with its own random parameters; ``None`` if it would leave out a kind of layer that
        the config lists (a window, a kind of attention, a mixture), or if the config or the class
        does not take that number.
    """
    config: Any = copy.deepcopy(model.config)
    text = _text_config(config)
    former = getattr(text, "num_hidden_layers", None)
    if isinstance(former, int) and former != layers and not _shorten(text, former, layers):
        return None
    try:
        with torch.device(device):
            return type(model)(config).float()
    except _refusals(IndexError, KeyError, AttributeError):
        # Its class wants another number of layers than its config would give it.
        return None


def _refusals(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Return what configs raise whose numbers do not go together, and ``others``."""
    errors = sys.modules.get("huggingface_hub.errors")
    strict: type[Exception] | None = getattr(errors, "StrictDataclassError", None)
    return (ValueError, TypeError, *others, *(() if strict is None else (strict,)))


def _shorten(config: Any, former: int, layers: int) -> bool:
    """Leave ``layers`` of the layers that a config lists; tell whether all kinds are left."""
    try:
        config.num_hidden_layers = layers
    except _refusals(NotImplementedError):
        # Some have several stacks, or check their numbers against each other whenever one is set.
        return False
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == former:
            kinds = [str(kind) for kind in value]
            if set(kinds[:layers]) != set(kinds):
                return False
            setattr(config, name, value[:layers])
    return True


def non_persistent_float_buffers(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return the float buffers that no checkpoint holds, such as rotary ``inv_freq``.

    They are computed from the config in fp32. A cast of the model to bf16 would round them for
    good, so whoever casts leaves them out.

    Returns:
        Triples of the module that owns the buffer, the buffer's name in it, and the buffer.
    """
    saved = module.state_dict().keys()
    return [
        (owner, name, buffer)
        for prefix, owner in module.named_modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if buffer.is_floating_point() and f"{prefix}.{name}".lstrip(".") not in saved
    ]
