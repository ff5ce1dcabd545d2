"""What one forward of a model shows when its layers are watched.

Used by :mod:`~goose_strategy.pipeline_parallel.probe`, which says what it is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from goose_strategy.errors import PlanError
from goose_strategy.pipeline_parallel.nested import Path, has_place, tensors_in, tensors_of
from goose_strategy.pipeline_parallel.stack import LayerCall, Reach, StackInfo, TensorFact
from goose_strategy.pipeline_parallel.template import fill_template, make_template


class Record:
    """Everything the first forward showed.

    Tensors are told apart by identity, so all of them are kept until the probe is over.
    """

    def __init__(self, stack: str) -> None:
        self.stack = stack
        self.names: list[str] = []
        self.inputs: list[dict[Path, Tensor]] = []
        self.returned: list[Any] = []
        self.result: Any = None
        self.segments: dict[str, set[int]] = {}
        self.tokens: dict[int, int] = {}
        self.tensors: list[Tensor] = []
        self.known_at: list[int] = []
        self.made_by: dict[int, int] = {}
        self.carried: set[int] = set()
        self.filled: dict[int, set[Path]] = {}
        self.reach: dict[int, Reach] = {}
        self.result_reach = Reach()

    def token(self, tensor: Tensor, known_at: int) -> int:
        """Return the number of a tensor, a new one if it was not seen before."""
        token = self.tokens.setdefault(id(tensor), len(self.tensors))
        if token == len(self.tensors):
            self.tensors.append(tensor)
            self.known_at.append(known_at)
            if tensor.requires_grad:
                self.carried.add(token)
        return token

    def number(self) -> None:
        """Number all tensors, in the order in which the layers saw them."""
        for layer, (inputs, returned) in enumerate(zip(self.inputs, self.returned, strict=True)):
            for tensor in inputs.values():
                self.token(tensor, layer)
            for tensor in tensors_in(returned).values():
                token = self.token(tensor, layer + 1)
                self.made_by.setdefault(token, layer)
                # Other kinds of results than gradients (indices, masks) come from layers, too.
                self.carried.add(token)

    def hidden(self, layer: int) -> Path:
        """Return where a layer takes what the layer before it returned."""
        for nearby in (layer, layer + 1):
            if 0 < nearby < len(self.inputs):
                before = {id(tensor) for tensor in tensors_in(self.returned[nearby - 1]).values()}
                for path, tensor in self.inputs[nearby].items():
                    if id(tensor) in before and tensor.is_floating_point():
                        return path
        for path, tensor in self.inputs[layer].items():
            if tensor.requires_grad:
                return path
        raise PlanError(f"{self.names[layer]} takes no differentiable tensor; use pp=1.", axis="pp")

    def template(self, layer: int) -> Any:
        """Return what a layer returns with only the place of the hidden states left."""
        following = self.inputs[layer + 1].values() if layer + 1 < len(self.inputs) else ()
        taken = {id(tensor) for tensor in following}
        leaves = {p: t for p, t in tensors_in(self.returned[layer]).items() if t.requires_grad}
        wanted = [path for path, tensor in leaves.items() if id(tensor) in taken]
        places = wanted or list(leaves)
        if not places:
            raise PlanError(f"{self.names[layer]} returns no differentiable tensor.", axis="pp")
        return make_template(self.returned[layer], places[0], self.names[layer])

    def info(self) -> StackInfo:
        """Return what was found, without any tensor."""
        calls = [
            LayerCall(
                name=name,
                inputs={path: self.tokens[id(tensor)] for path, tensor in inputs.items()},
                hidden=self.hidden(layer),
                filled=frozenset(self.filled.get(layer, ())),
                output=self.template(layer),
            )
            for layer, (name, inputs) in enumerate(zip(self.names, self.inputs, strict=True))
        ]
        facts = [
            TensorFact(
                dtype=tensor.dtype,
                shape=tuple(tensor.shape),
                differentiable=tensor.requires_grad,
                carried=token in self.carried,
                known_at=self.known_at[token],
                made_by=self.made_by.get(token),
                reach=self.reach.get(token, Reach()),
            )
            for token, tensor in enumerate(self.tensors)
        ]
        return StackInfo(
            stack=self.stack,
            layers=tuple(calls),
            tensors=tuple(facts),
            outputs=self.result_reach,
            segments={name: frozenset(calls) for name, calls in self.segments.items()},
        )


def record_forward(model: nn.Module, stack: str, inputs: Mapping[str, Any]) -> Record:
    """Run a model and record the calls of its layers.

    Args:
        model: The whole model, in evaluation mode, with gradients enabled.
        stack: Name of its stack of layers.
        inputs: Keyword arguments of its forward.

    Returns:
        The record, with all tensors numbered.

    Raises:
        PlanError: If the model does not run, or does not call each layer once and in order.
    """
    record = Record(stack)
    order: list[int] = []

    def before(index: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            order.append(index)
            record.inputs.append(tensors_of(args, kwargs))

        return hook

    def after(_module: nn.Module, _args: Any, returned: Any) -> None:
        record.returned.append(returned)

    def count(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any) -> None:
            record.segments.setdefault(name, set()).add(len(order))

        return hook

    layers = stack_layers(model, stack)
    record.names = list(layers)
    with ExitStack() as hooks:
        for index, layer in enumerate(layers.values()):
            hooks.callback(layer.register_forward_pre_hook(before(index), with_kwargs=True).remove)
            hooks.callback(layer.register_forward_hook(after).remove)
        for name, module in outside_stack(model, stack).items():
            hooks.callback(module.register_forward_pre_hook(count(name)).remove)
        record.result = _run(model, inputs)
    _check_order(order, record.names)
    record.number()
    return record


def stack_layers(model: nn.Module, stack: str) -> dict[str, nn.Module]:
    """Return the layers of a stack by their names in the model, in order."""
    children = model.get_submodule(stack).named_children()
    return {f"{stack}.{name}": layer for name, layer in children}


def outside_stack(model: nn.Module, stack: str) -> dict[str, nn.Module]:
    """Return the modules with parameters of their own that are not in the stack nor around it.

    Args:
        model: The model.
        stack: Name of its stack of layers.

    Returns:
        Embeddings, norms, heads and the like, by name.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
        and not f"{name}.".startswith(f"{stack}.")
        and not f"{stack}.".startswith(f"{name}.")
        and name
    }


def _run(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    try:
        # The instance's forward, not a call: the user's own hooks are none of the probe's business.
        # What is compiled in the model is not compiled for two short rows and the hooks here.
        with torch.compiler.set_stance("force_eager"):
            return model.forward(**inputs)
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(
            f"{type(model).__name__} does not run on the probe's inputs {sorted(inputs)}: "
            f"{type(error).__name__}: {error}. A pipeline needs a model that computes from "
            "input_ids alone; use pp=1.",
            axis="pp",
        ) from error


def _check_order(order: list[int], names: list[str]) -> None:
    if order == list(range(len(names))):
        return
    repeated = sorted({names[index] for index in order if order.count(index) > 1})
    if repeated:
        raise PlanError(
            f"The layers {repeated} run more than once in a forward; such a model cannot be cut, "
            "use pp=1.",
            axis="pp",
        )
    raise PlanError(
        f"The layers run in the order {order}, not each once from 0 to {len(names) - 1}; such a "
        "model cannot be cut, use pp=1.",
        axis="pp",
    )


def trace_origins(model: nn.Module, record: Record) -> None:
    """Find out, from the autograd graph, what every recorded tensor was computed from.

    Args:
        model: The model, with gradients required for all parameters.
        record: A record of its forward; ``reach`` is filled.

    Raises:
        PlanError: If the model returns nothing that can be followed.
    """
    # Edges are kept for as long as they are compared: a node is told apart by its identity.
    edges = {
        token: get_gradient_edge(tensor)
        for token, tensor in enumerate(record.tensors)
        if tensor.requires_grad
    }
    known = {(edge.node, edge.output_nr): token for token, edge in edges.items()}
    leaves = {
        get_gradient_edge(param).node: name
        for name, param in model.named_parameters()
        if param.requires_grad
    }
    for token, edge in edges.items():
        if edge.node in leaves:
            record.reach[token] = Reach(parameters=frozenset([leaves[edge.node]]))
        else:
            record.reach[token] = _reach(list(edge.node.next_functions), known, leaves)
    results = [t for t in _tensors_of_output(record.result) if t.requires_grad]
    if not results:
        raise PlanError(
            f"{type(model).__name__} returns no differentiable tensor in its "
            f"{type(record.result).__name__}, so what its head uses cannot be followed; return "
            "logits in a tuple, a dict or an object.",
            axis="pp",
        )
    ends = map(get_gradient_edge, results)
    record.result_reach = _reach([(end.node, end.output_nr) for end in ends], known, leaves)


def _tensors_of_output(output: Any) -> list[Tensor]:
    """Return the tensors in a model's output, which may be any object with attributes."""
    plain = isinstance(output, (Tensor, Mapping, tuple, list))
    return list(tensors_in(output if plain else getattr(output, "__dict__", {})).values())


def _reach(
    edges: list[tuple[Node | None, int]],
    known: Mapping[tuple[Node, int], int],
    leaves: Mapping[Node, str],
) -> Reach:
    """Walk the graph back from some edges up to known tensors and parameters."""
    tensors: set[int] = set()
    names: set[str] = set()
    seen: set[Node] = set()
    while edges:
        node, number = edges.pop()
        if node is None:
            continue
        if (node, number) in known:
            tensors.add(known[node, number])
        elif node in leaves:
            names.add(leaves[node])
        elif node not in seen:
            seen.add(node)
            edges.extend(node.next_functions)
    return Reach(frozenset(tensors), frozenset(names))


def check_replay(model: nn.Module, record: Record, inputs: Mapping[str, Any]) -> None:
    """Run a model as a later stage does, and mark as carried what comes out different.

    All layers hand their hidden states through and what the modules outside the stack compute is
    zero, as it is where their parameters are missing.

    Args:
        model: The model, as it was recorded.
        record: Its record; ``carried`` and ``filled`` grow. On the meta device there are no values
            to compare.
        inputs: The same keyword arguments.

    Raises:
        PlanError: If the model does not run without its layers.
    """
    seen: list[dict[Path, Tensor]] = []

    def skip(index: int) -> Callable[..., Any]:
        hidden, template = record.hidden(index), record.template(index)

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = tensors_of(args, kwargs)
            seen.append(given)
            lost = [p for p in record.inputs[index] if not has_place(args, kwargs, p)]
            record.filled.setdefault(index, set()).update(lost)
            return fill_template(template, given[hidden])

        return forward

    def zero(_module: nn.Module, _args: Any, returned: Any) -> Any:
        return torch.zeros_like(returned) if isinstance(returned, Tensor) else returned

    with ExitStack() as undo:
        for index, layer in enumerate(stack_layers(model, record.stack).values()):
            undo.enter_context(_instance_forward(layer, skip(index)))
        for module in outside_stack(model, record.stack).values():
            undo.callback(module.register_forward_hook(zero).remove)
        with torch.no_grad():
            _run(model, inputs)
    for expected, given in zip(record.inputs, seen, strict=True):
        for path, tensor in expected.items():
            if path not in given or not _same(tensor, given[path]):
                record.carried.add(record.tokens[id(tensor)])


@contextmanager
def _instance_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module run another forward inside the block."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


def _same(expected: Tensor, given: Tensor) -> bool:
    if expected.shape != given.shape or expected.dtype != given.dtype:
        return False
    return expected.is_meta or torch.equal(expected, given)
