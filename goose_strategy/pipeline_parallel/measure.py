"""Time and memory of a model's parts, measured on one layer of each kind.

DeepSpeed's ``partition_method="profile"`` was never written, and torchgpipe timed every layer of a
model that had to fit on one device. Layers of a transformer are of few kinds, so one of each is
copied to the device, run forward and backward on what the model itself would hand to it, and
dropped. Neither the model nor its gradients nor the caller's random numbers are touched, and no
hook of the user's runs.
"""

from __future__ import annotations

import copy
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from goose_strategy.errors import PlanError
from goose_strategy.pipeline_parallel.ghost import HOOKS
from goose_strategy.pipeline_parallel.nested import replace_tensors, tensors_in, tensors_of
from goose_strategy.pipeline_parallel.probe import call_settings, default_example
from goose_strategy.pipeline_parallel.profile import Cost, Profile, layer_kinds
from goose_strategy.pipeline_parallel.template import fill_template

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.nested import Path
    from goose_strategy.pipeline_parallel.stack import LayerCall, StackInfo

Copy: TypeAlias = Callable[[nn.Module, dict[int, Any]], nn.Module]
"""``(module, memo) -> copy`` with real values; `memo` is that of ``copy.deepcopy``."""

_WARM_UPS, _RUNS = 1, 5
_ENOUGH_S = 2.0
"""After this long, a part is not run again."""


@dataclass(frozen=True)
class Sample:
    """How a model is measured.

    Attributes:
        shape: Rows and columns of a microbatch.
        device: Where training will run.
        timed: Measure times, too; else memory only.
        copied: Copies a module.
    """

    shape: tuple[int, int]
    device: torch.device
    timed: bool = True
    copied: Copy = copy.deepcopy


def measure(model: nn.Module, info: StackInfo, sample: Sample) -> Profile:
    """Measure what one microbatch takes in every part of a model.

    With the process's own number of threads. It needs memory for what is around the layers, and
    for one layer at a time.

    Args:
        model: The whole model, before any surgery.
        info: What the probe found out about it.
        sample: On what, and where.

    Returns:
        The profile. Times are medians of a few runs after a first one.

    Raises:
        PlanError: If a part does not run on the device, with its error as the cause.
    """
    devices = [sample.device] if sample.device.type == "cuda" else []
    kinds = layer_kinds(model, info)
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            shell = _Shell(model, info, sample)
            before, after = shell.measure()
            calls = shell.calls
            del shell
            costs = {
                index: _Layer(model, info.layers[index], calls[index], sample).measure()
                for index in dict.fromkeys(kinds)
            }
    except Exception as error:
        rows, columns = sample.shape
        raise PlanError(
            f"{type(model).__name__} could not be measured on {rows} x {columns} tokens on "
            f"{sample.device}: {type(error).__name__}: {error}. Choose another "
            "PipelineConfig(example_shape=...), or partition='balanced' and a schedule by name.",
            axis="pp",
        ) from error
    layers = tuple(costs[index] for index in kinds)
    hidden, shared = _sizes(info, calls)
    return Profile(sample.shape, before, layers, after, hidden, shared, sample.timed)


def _sizes(info: StackInfo, calls: list[_Call]) -> tuple[int, int]:
    """Return the bytes that go over a cut, and those that every stage computes itself."""
    boundary = min(1, info.num_layers - 1)
    carried = set(info.cut_tokens(boundary)) if boundary else set()
    hidden, shared = {}, {}
    tensors = tensors_of(calls[boundary].args, calls[boundary].kwargs)
    for path, token in info.layers[boundary].inputs.items():
        tensor = tensors[path]
        if token in carried:
            hidden[token] = tensor.numel() * tensor.element_size()
        elif path != info.layers[boundary].hidden:
            shared[_place(tensor)] = tensor.untyped_storage().nbytes()
    return sum(hidden.values()), sum(shared.values())


class _Call(NamedTuple):
    """The arguments of a layer, as the model hands them over."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Bench:
    """Runs a part of a model several times.

    Args:
        sample: How it is measured.
        given: Tensors that exist anyway and cost nothing to keep.
    """

    def __init__(self, sample: Sample, given: Iterable[Tensor]) -> None:
        self._sample = sample
        self._given = {_place(tensor) for tensor in given}
        self._kept: dict[int, Tensor] = {}

    def clock(self) -> int:
        """Return the time in nanoseconds at which the device has done everything so far."""
        if self._sample.device.type != "cpu":
            torch.accelerator.synchronize(self._sample.device)
        return time.perf_counter_ns()

    def saved(self) -> int:
        """Return the bytes that the first run has kept for its backward so far."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())

    def costs(self, run: Callable[[], list[Cost]]) -> list[Cost]:
        """Return the median times of what `run` returns, and what its first run kept."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            first = run()
        self._kept.clear()
        if not self._sample.timed:
            return [replace(Cost(), saved=cost.saved) for cost in first]
        found: list[list[Cost]] = []
        start = time.perf_counter()
        while len(found) < _WARM_UPS + _RUNS:
            found.append(run())
            if len(found) > _WARM_UPS and time.perf_counter() - start > _ENOUGH_S:
                break
        columns = zip(*found[_WARM_UPS:], strict=True)
        return [
            replace(_median(column), saved=cost.saved)
            for cost, column in zip(first, columns, strict=True)
        ]

    def backward(
        self, outputs: list[Tensor], inputs: list[Tensor], weights: list[Tensor]
    ) -> tuple[int, int]:
        """Return the nanoseconds of the gradients of inputs, and what those of weights add."""
        start = self.clock()
        seeds = [torch.ones_like(output) for output in outputs]
        alone = 0
        if inputs:
            torch.autograd.grad(outputs, inputs, seeds, retain_graph=True, allow_unused=True)
            alone = self.clock() - start
        start = self.clock()
        torch.autograd.grad(outputs, [*inputs, *weights], seeds, allow_unused=True)
        return alone, max(self.clock() - start - alone, 0)

    def _pack(self, tensor: Tensor) -> Tensor:
        place = _place(tensor)
        if place not in self._given:
            # Held, so that no other storage comes to lie in its place.
            self._kept[place] = tensor.detach()
        return tensor


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def _median(costs: Iterable[Cost]) -> Cost:
    kept = list(costs)
    return Cost(
        int(median(cost.forward for cost in kept)),
        int(median(cost.backward_input for cost in kept)),
        int(median(cost.backward_weight for cost in kept)),
    )


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _copied(module: nn.Module, sample: Sample, memo: Mapping[int, Any]) -> nn.Module:
    """Copy a module to the device, in training mode, without anybody's hooks."""
    hooks: dict[int, Any] = {
        id(getattr(part, name)): OrderedDict() for part in module.modules() for name in HOOKS
    }
    return sample.copied(module, {**memo, **hooks}).to(sample.device).train()


def _trained(module: nn.Module) -> list[Tensor]:
    return [param for param in module.parameters() if param.requires_grad]


class _Shell:
    """A model on the device without the weights of its layers, which hand on what they are given.

    Attributes:
        calls: The arguments of each layer.
    """

    def __init__(self, model: nn.Module, info: StackInfo, sample: Sample) -> None:
        layers = [model.get_submodule(call.name) for call in info.layers]
        nothing = {
            id(param): nn.Parameter(param.new_empty(0, device="cpu"), requires_grad=False)
            for layer in layers
            for param in layer.parameters()
        }
        self._model = _copied(model, sample, nothing)
        self._sample = sample
        self.calls: list[_Call] = []
        for number, call in enumerate(info.layers):
            stub = _Stub(self, number, call)
            vars(self._model.get_submodule(call.name))["forward"] = stub.forward
        self._last = info.num_layers - 1
        example = default_example(self._model, sample.shape)
        labels = {"labels": example["input_ids"].clone()}
        self._inputs = {**example, **labels, **call_settings(self._model)}
        self._bench = _Bench(sample, [*self._model.parameters(), *self._model.buffers()])
        self._weights = _trained(self._model)
        self._entered: Tensor | None = None
        self._left: Tensor | None = None
        self._marks: list[tuple[int, int]] = []

    def pass_through(self, layer: int, call: _Call, hidden: Tensor) -> Tensor:
        """Take note of the call of a layer, and return what it shall return."""
        if layer == 0:
            self.calls = []
            self._entered = hidden
            self._mark()
        self.calls.append(call)
        if layer < self._last:
            return hidden
        self._left = hidden.detach().requires_grad_()
        self._mark()
        return self._left

    def _mark(self) -> None:
        self._marks.append((self._bench.clock(), self._bench.saved()))

    def measure(self) -> tuple[Cost, Cost]:
        """Return the costs of what is before the layers and of what is after them."""
        before, after = self._bench.costs(self._run)
        return before, after

    def _run(self) -> list[Cost]:
        self._marks = []
        self._mark()
        loss = self._model.forward(**self._inputs).loss
        self._mark()
        entered, left = self._entered, self._left
        if entered is None or left is None or not isinstance(loss, Tensor):
            raise PlanError("it came to no layers, or gave no loss for its labels", axis="pp")
        (start, kept0), (first, kept1), (last, kept2), (end, kept3) = self._marks
        before = Cost(first - start, saved=kept1 - kept0)
        after = Cost(end - last, saved=kept3 - kept2)
        if not self._sample.timed:
            return [before, after]
        inner, weights = self._bench.backward([loss], [left], self._weights)
        after = replace(after, backward_input=inner, backward_weight=weights)
        if entered.requires_grad:
            _, weights = self._bench.backward([entered], [], self._weights)
            before = replace(before, backward_weight=weights)
        return [before, after]


class _Stub:
    """The forward of a layer in the shell."""

    def __init__(self, shell: _Shell, number: int, layer: LayerCall) -> None:
        self._shell = shell
        self._number = number
        self._layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = tensors_of(args, kwargs)[self._layer.hidden]
        hidden = self._shell.pass_through(self._number, _Call(args, kwargs), hidden)
        return fill_template(self._layer.output, hidden)


class _Layer:
    """One layer on the device."""

    def __init__(self, model: nn.Module, layer: LayerCall, call: _Call, sample: Sample) -> None:
        module = _copied(model.get_submodule(layer.name), sample, {})
        self._forward: Callable[..., Any] = module.forward
        given = tensors_of(*call)
        new: dict[Path, Tensor] = {path: tensor.detach() for path, tensor in given.items()}
        leaves = {path for path, t in given.items() if t.requires_grad} | {layer.hidden}
        self._leaves = [new[path].requires_grad_() for path in leaves]
        self._args, self._kwargs = replace_tensors(*call, new)
        self._weights = _trained(module)
        around = [new[path] for path in new if path not in leaves]
        self._bench = _Bench(sample, [*module.parameters(), *module.buffers(), *around])
        self._timed = sample.timed

    def measure(self) -> Cost:
        """Return its cost."""
        (cost,) = self._bench.costs(self._run)
        return cost

    def _run(self) -> list[Cost]:
        start = self._bench.clock()
        returned = self._forward(*self._args, **self._kwargs)
        end = self._bench.clock()
        cost = Cost(end - start, saved=self._bench.saved())
        outputs = [t for t in tensors_in(returned).values() if t.requires_grad]
        if not self._timed:
            return [cost]
        inner, weights = self._bench.backward(outputs, self._leaves, self._weights)
        return [replace(cost, backward_input=inner, backward_weight=weights)]
