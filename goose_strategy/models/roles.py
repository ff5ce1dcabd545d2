"""Which linear layers of a model come in pairs, found out from one forward.

transformers names pairs of column and row layers for about half of its causal language models. For
the others the graph of one backward says it: inside a layer of the stack a *row* layer writes into
the stream of hidden states and reads nothing of it directly; the linear layers whose outputs it was
computed from, with no other one in between, are its *columns*. So queries, keys and values find
their output layer, and gates their way down, whatever their names are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from goose_strategy.compat.transformers import is_conv1d
from goose_strategy.tensor_parallel.plan import generic_name, parent_name


@dataclass(frozen=True)
class Block:
    """Linear layers that belong together; names have ``*`` for layer numbers.

    Attributes:
        rows: Layers that write into the stream -> their input features.
        columns: Layers that the rows' inputs were computed from -> their output features.
        shared: Those of the columns that another layer reads, too: they cannot be cut by halves.
        between: Parameters used between columns and rows -> their shapes.
    """

    rows: Mapping[str, int]
    columns: Mapping[str, int]
    shared: frozenset[str] = frozenset()
    between: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the module that holds all of its layers."""
        names = [*self.rows, *self.columns]
        parent = parent_name(names[0])
        while parent and not all(name.startswith(f"{parent}.") for name in names):
            parent = parent_name(parent)
        return parent

    @property
    def layers(self) -> frozenset[str]:
        """All of its linear layers."""
        return frozenset({*self.rows, *self.columns})


@dataclass(frozen=True)
class Reach:
    """What a tensor was computed from, with no linear layer in between."""

    linears: frozenset[str]
    parameters: frozenset[str]
    stream: bool


@dataclass
class _Seen:
    """What one call of a linear layer showed."""

    name: str
    source: Node | None


def is_linear(module: nn.Module) -> bool:
    """Return whether a module multiplies by one matrix."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def features(module: nn.Module) -> tuple[int, int]:
    """Return the input and output features of a linear layer."""
    rows, columns = module.get_parameter("weight").shape
    return (rows, columns) if is_conv1d(module) else (columns, rows)


def find_blocks(model: nn.Module, run: Callable[[], Tensor]) -> list[Block]:
    """Find the pairs of linear layers within the layers of a model.

    Args:
        model: A model whose parameters all require gradients, with real values.
        run: Calls it and returns its logits.

    Returns:
        The blocks, in the order in which the model runs them.
    """
    watcher = _Watcher(model)
    with watcher.watching():
        run()
    return watcher.blocks()


class _Watcher:
    """Marks what goes into and comes out of linear layers and layers of the stack."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.calls: list[_Seen] = []
        self.ends: list[Node] = []
        # Nodes are compared by identity, so that all of them are kept.
        self.outputs: dict[Node, str] = {}
        self.stream: set[Node] = set()
        self.names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hook the model inside the block."""
        with ExitStack() as stack:
            for cell in _cells(self.model):
                begin = cell.register_forward_pre_hook(self._begin, with_kwargs=True)
                stack.callback(begin.remove)
                stack.callback(cell.register_forward_hook(self._end).remove)
            for name, module in self.model.named_modules():
                if is_linear(module):
                    before = self._before(generic_name(name))
                    after = self._after(generic_name(name))
                    stack.callback(module.register_forward_pre_hook(before).remove)
                    stack.callback(module.register_forward_hook(after).remove)
            yield

    def _begin(self, _cell: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return (
            tuple(self._marked(value) for value in args),
            {key: self._marked(value) for key, value in kwargs.items()},
        )

    def _marked(self, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.grad_fn is not None):
            return value
        copy = value.clone()
        self.stream.add(_node(copy))
        return copy

    def _end(self, _cell: nn.Module, _args: Any, output: Any) -> Any:
        values = [output] if isinstance(output, Tensor) else output
        if isinstance(values, Mapping):
            values = list(values.values())
        if isinstance(values, (tuple, list)):
            tensors = [v for v in values if isinstance(v, Tensor) and v.grad_fn is not None]
            self.ends += [_node(tensor) for tensor in tensors]

    def _before(self, name: str) -> Callable[[nn.Module, Any], Any]:
        def before(_module: nn.Module, args: Any) -> Any:
            if not args or not isinstance(args[0], Tensor):
                return None
            self.calls.append(_Seen(name, args[0].grad_fn))
            return None

        return before

    def _after(self, name: str) -> Callable[[nn.Module, Any, Any], Any]:
        def after(_module: nn.Module, _args: Any, output: Any) -> Any:
            if not isinstance(output, Tensor) or output.grad_fn is None:
                return None
            # A copy, because what follows may work in place.
            copy = output.clone()
            self.outputs[_node(copy)] = name
            return copy

        return after

    def reach(self, starts: Iterable[Node]) -> Reach:
        """Walk back from nodes to the nearest linear layers and to the stream."""
        todo, seen = list(starts), set[Node]()
        linears, parameters, stream = set[str](), set[str](), False
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self.outputs:
                linears.add(self.outputs[node])
                continue
            if node in self.stream:
                stream = True
                continue
            variable = getattr(node, "variable", None)
            if isinstance(variable, Tensor) and variable in self.names:
                parameters.add(self.names[variable])
            todo += [other for other, _ in node.next_functions if other is not None]
        return Reach(frozenset(linears), frozenset(parameters), stream)

    def blocks(self) -> list[Block]:
        """Put the rows and their columns together."""
        outer = self.reach(self.ends).linears
        reads: dict[str, list[Reach]] = {}
        for call in self.calls:
            nothing = Reach(frozenset(), frozenset(), stream=True)
            seen = nothing if call.source is None else self.reach([call.source])
            reads.setdefault(call.name, []).append(seen)
        rows = {
            name: frozenset().union(*(reach.linears for reach in found))
            for name, found in reads.items()
            if name in outer and not any(reach.stream for reach in found)
        }
        readers: dict[str, set[str]] = {}
        for name, found in reads.items():
            for source in frozenset().union(*(reach.linears for reach in found)):
                readers.setdefault(source, set()).add(name)
        groups = _together({name: columns for name, columns in rows.items() if columns})
        return [self._block(group, rows, readers, reads) for group in groups]

    def _block(
        self,
        group: list[str],
        rows: Mapping[str, frozenset[str]],
        readers: Mapping[str, set[str]],
        reads: Mapping[str, list[Reach]],
    ) -> Block:
        sizes = {
            generic_name(name): features(module)
            for name, module in self.model.named_modules()
            if is_linear(module)
        }
        shapes = {name: tuple(param.shape) for name, param in self.model.named_parameters()}
        columns = sorted(frozenset().union(*(rows[name] for name in group)))
        used = {n for row in group for reach in reads[row] for n in reach.parameters}
        return Block(
            rows={name: sizes[name][0] for name in group},
            columns={name: sizes[name][1] for name in columns},
            shared=frozenset(name for name in columns if readers[name] - set(group)),
            between={generic_name(name): shapes[name] for name in sorted(used)},
        )


def _cells(model: nn.Module) -> list[nn.Module]:
    """Return the layers of all stacks: the elements of lists that lie in no other list."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and module not in inside:
            inside.update(module.modules())
            # Lists of plain layers (heads of other tasks, codebooks) are no stacks.
            found += [cell for cell in module if any(True for _ in cell.children())]
    return found


def _together(rows: Mapping[str, frozenset[str]]) -> list[list[str]]:
    """Group rows that share columns, in order."""
    groups: list[tuple[list[str], set[str]]] = []
    for name, columns in rows.items():
        mine = [group for group in groups if group[1] & columns]
        names = [n for group in mine for n in group[0]]
        merged = ([*names, name], set(columns).union(*(group[1] for group in mine)))
        groups = [group for group in groups if group not in mine] + [merged]
    return [names for names, _ in groups]


def _node(tensor: Tensor) -> Node:
    node = tensor.grad_fn
    if node is None:
        raise TypeError("the tensor has no gradient to follow.")
    return node
