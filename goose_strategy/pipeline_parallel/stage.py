"""Turn a whole model into the stages of one rank, in place.

The model stays what it is: its class, config, module tree and names. Every stage gets the real
``input_ids`` and masks and *replays* what the model does before its layers, so positions, masks and
rotary angles are its own and only hidden states travel. Layers of earlier stages hand their input
through; the stage's first layer takes what was received instead; the first layer of the next stage
ends the forward. What is not there costs no memory
(:mod:`~goose_strategy.pipeline_parallel.ghost`).

A rank with several stages has one model for all of them. While one of its stages runs, stand-ins
take the place of the layers of the others in the stack.

``torch.distributed.pipelining`` needs a module that takes and returns just hidden states, written
per model class or traced with fixed shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from goose_strategy.compat.torch import drop_compiled, put_children
from goose_strategy.errors import ScheduleError
from goose_strategy.pipeline_parallel.ghost import drop_hooks, make_ghosts
from goose_strategy.pipeline_parallel.nested import Path, replace_tensors, tensors_of
from goose_strategy.pipeline_parallel.placement import Placement
from goose_strategy.pipeline_parallel.probe import call_settings
from goose_strategy.pipeline_parallel.template import fill_template

if TYPE_CHECKING:
    from goose_strategy.grads.store import WeightGradStore
    from goose_strategy.pipeline_parallel.stack import CutTensor, LayerCall, StackInfo
    from goose_strategy.pipeline_parallel.tables.chunks import Chunks

LABELS = frozenset({"labels", "shift_labels", "num_items_in_batch"})
"""Arguments that only the last stage's forward is given."""


class StageExit(BaseException):
    """Ends a stage's forward where the next stage begins.

    No ``Exception``, so that no handler inside a model takes it for an error.

    Attributes:
        tensors: What the next stage receives.
    """

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        super().__init__("end of the stage")
        self.tensors = tensors


class PipelineStage:
    """One stage of a model; made by :func:`cut_model`.

    Attributes:
        module: The model, which all stages of the rank share.
        index: Number of the stage.
        num_stages: Number of stages.
        layers: Numbers of the stage's layers.
        cut_in: What it receives from the stage before, in this order.
        cut_out: What it sends to the stage after.
        loss_scale: What gradients are multiplied by from the loss on; set for each call.
    """

    def __init__(
        self, module: nn.Module, *, index: int, num_stages: int, layers: range, info: StackInfo
    ) -> None:
        self.module = module
        self.index = index
        self.num_stages = num_stages
        self.layers = layers
        self.cut_in: tuple[CutTensor, ...] = () if self.is_first else info.cut(layers.start)
        self.cut_out: tuple[CutTensor, ...] = () if self.is_last else info.cut(layers.stop)
        self.inbox: tuple[Tensor, ...] = ()
        self.loss_scale: Tensor | None = None
        self._settings = call_settings(module)
        # Kept from now, because the runtime puts its own forward in the place of the model's.
        self._forward = module.forward
        self._stack = module.get_submodule(info.stack)
        self._own: dict[str, nn.Module] = {}
        self._stand_ins: dict[str, nn.Module] = {}
        self._running = Running()

    def __repr__(self) -> str:
        shown = f"layers {self.layers.start} to {self.layers.stop - 1}"
        return f"PipelineStage({self.index} of {self.num_stages}, {shown})"

    @property
    def is_first(self) -> bool:
        """Whether no stage comes before."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether no stage comes after."""
        return self.index == self.num_stages - 1

    def share(self, running: Running, others: Mapping[str, nn.Module]) -> None:
        """Let the stage share its model with the rank's other stages.

        Args:
            running: Where the stages of the rank note which of them runs.
            others: What stands for the others' layers, by their names in the stack.
        """
        self._running = running
        self._stand_ins = dict(others)
        self._own = {name: self._stack.get_submodule(name) for name in others}

    def forward(self, microbatch: Mapping[str, Any], received: Sequence[Tensor] = ()) -> Any:
        """Run the stage on one microbatch.

        Args:
            microbatch: Keyword arguments of the model; labels are used on the last stage only.
            received: What the stage before has sent, as `cut_in` describes it.

        Returns:
            What the next stage receives, a tuple as `cut_out` describes it; on the last stage the
            model's own output.

        Raises:
            ScheduleError: If another number of tensors was received, or the model never came to
                the end of this stage.
        """
        if len(received) != len(self.cut_in):
            raise ScheduleError(
                f"received {len(received)} tensors, the stage takes {len(self.cut_in)}.",
                stage=self.index,
            )
        call = {name: value for name, value in microbatch.items() if name != "return_dict"}
        if not self.is_last:
            call = {name: value for name, value in call.items() if name not in LABELS}
        self.inbox = tuple(received)
        self._running.stage = self.index
        if self._stand_ins:
            put_children(self._stack, self._stand_ins)
        try:
            output = self._forward(**call | self._settings)
        except StageExit as end:
            return end.tensors
        finally:
            self.inbox = ()
            if self._stand_ins:
                put_children(self._stack, self._own)
        if not self.is_last:
            raise ScheduleError(
                f"the model returned before layer {self.layers.stop}, where the stage ends.",
                stage=self.index,
            )
        return output


@dataclass(frozen=True)
class ModelPart:
    """What one rank holds of a model.

    Attributes:
        module: The model. ``named_parameters()`` are the rank's own, under their names in the
            whole model.
        chunks: Which rank holds which stages.
        rank: The rank's number in the pipeline.
        stages: Its stages, in increasing order.
        absent: Names of the layers that other ranks hold.
        tied: Parameters that the first and the last rank both hold: local name to the name of
            the first rank's, which owns it.
        stage_of: The stage of each of its parameters; without those that several of its stages
            use.
        store: Keeps weight gradients between ``I`` and ``W``; needed by schedules that have these.
    """

    module: nn.Module
    chunks: Chunks
    rank: int
    stages: tuple[PipelineStage, ...]
    absent: list[str]
    tied: dict[str, str]
    stage_of: dict[str, int]
    store: WeightGradStore | None = None

    @property
    def tied_copies(self) -> dict[str, str]:
        """Local names of copies of the first rank's parameters, with the names they have there."""
        return {} if self.rank == 0 else dict(self.tied)

    @property
    def has_loss(self) -> bool:
        """Whether the rank holds the last stage."""
        return self.stages[-1].is_last


def cut_model(
    model: nn.Module,
    info: StackInfo,
    bounds: Sequence[int],
    rank: int,
    chunks: Chunks | None = None,
) -> ModelPart:
    """Keep one rank's stages of a model, in place. The rest of its weights is freed for good.

    Every rank checks all stages, so that all raise the same error or none does.

    Args:
        model: The whole model, as it was probed.
        info: What :func:`~goose_strategy.pipeline_parallel.probe.probe_model` returned for it.
        bounds: First layer of every stage, and the number of layers
            (:func:`~goose_strategy.pipeline_parallel.partition.partition_layers`).
        rank: Number of the rank in the pipeline.
        chunks: Which rank holds which stages; one stage per rank if ``None``.

    Returns:
        The rank's part.

    Raises:
        PlanError: If the model cannot be cut at these bounds; names the layer that needs what the
            cut would hide.
    """
    placement = Placement(model, info, bounds, chunks)
    chunks = placement.chunks
    shared = placement.shared()
    stages = tuple(
        PipelineStage(
            model,
            index=stage,
            num_stages=chunks.stages,
            layers=range(bounds[stage], bounds[stage + 1]),
            info=info,
        )
        for stage in chunks.stages_of(rank)
    )
    part = ModelPart(
        module=model,
        chunks=chunks,
        rank=rank,
        stages=stages,
        absent=[
            call.name
            for number, call in enumerate(info.layers)
            if all(number not in stage.layers for stage in stages)
        ],
        tied={
            placement.local_name(name, rank): placement.local_name(name, ranks[0])
            for name, ranks in shared.items()
            if rank in ranks
        },
        stage_of=placement.stage_of(rank),
    )
    modules = dict(model.named_modules())
    for name, attributes in placement.missing(rank).items():
        make_ghosts(modules[name], attributes)
    _replace_layers(part, info, modules)
    return part


def _replace_layers(part: ModelPart, info: StackInfo, modules: Mapping[str, nn.Module]) -> None:
    """Let every layer do what each of the rank's stages needs of it."""
    running = Running()
    stand_ins: dict[int, dict[str, nn.Module]] = {stage.index: {} for stage in part.stages}
    for number, call in enumerate(info.layers):
        layer = modules[call.name]
        acts = {
            stage.index: _instead(stage, info, number)
            for stage in part.stages
            if number not in stage.layers
        }
        if len(acts) == len(part.stages):
            _empty(layer)
            layer.__dict__["forward"] = _Absent(running, acts).forward
            continue
        for stage in part.stages:
            if stage.index in acts:
                name = call.name.rpartition(".")[2]
                stand_ins[stage.index][name] = _StandIn(layer, acts[stage.index])
            elif places := _places(stage, info, number):
                # Before the user's own hooks, which see what the layer will see.
                hook = _Inlet(stage, places).replace
                layer.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    for stage in part.stages:
        stage.share(running, stand_ins[stage.index])


def _places(stage: PipelineStage, info: StackInfo, number: int) -> Mapping[Path, int]:
    """Return where what a stage received belongs in the call of a layer."""
    first = stage.layers.start
    return info.injections(first, number) if first > 0 else {}


def _instead(stage: PipelineStage, info: StackInfo, number: int) -> Callable[..., Any]:
    """Return what a layer that is none of a stage's does while that stage runs."""
    call = info.layers[number]
    if number < stage.layers.start:
        return _Skip(call).forward
    if number == stage.layers.stop:
        return _Outlet(_Inlet(stage, _places(stage, info, number)), stage.cut_out).forward
    return _Beyond(stage, call).forward


def _empty(layer: nn.Module) -> None:
    """Free what is left of a layer that is not on this rank."""
    for module in layer.modules():
        make_ghosts(module, [name for name, _ in module.named_buffers(recurse=False)])
        drop_hooks(module)
        # What stands for the layer ends forwards by an exception, which is no graph.
        drop_compiled(module)


class Running:
    """Which stage of a rank runs.

    Attributes:
        stage: Its number.
    """

    stage: int = 0


class _Absent:
    """Stands for a layer of another rank: does what the running stage needs."""

    def __init__(self, running: Running, acts: Mapping[int, Callable[..., Any]]) -> None:
        self._running = running
        self._acts = acts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._acts[self._running.stage](*args, **kwargs)


class _StandIn(nn.Module):
    """Stands for a layer of another stage of the same rank, whose hooks must not run.

    It is in the model only while a stage runs. What a model reads of its layers besides calling
    them is the layer's own.
    """

    def __init__(self, layer: nn.Module, act: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["forward"] = act
        self.__dict__["_layer"] = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)


class _Skip:
    """Stands for a layer of an earlier stage: returns its hidden states as they are."""

    def __init__(self, call: LayerCall) -> None:
        self._call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = tensors_of(args, kwargs)[self._call.hidden]
        return fill_template(self._call.output, hidden)


class _Beyond:
    """Stands for a layer behind the end of a stage, which is never called."""

    def __init__(self, stage: PipelineStage, call: LayerCall) -> None:
        self._stage = stage
        self._call = call

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        raise ScheduleError(
            f"{self._call.name} was called behind layer {self._stage.layers.stop}, where the stage "
            "ends; something in the model caught the end of the stage.",
            stage=self._stage.index,
        )


class _Inlet:
    """Puts received tensors into the call of a layer."""

    def __init__(self, stage: PipelineStage, places: Mapping[Path, int]) -> None:
        self._stage = stage
        self._places = places

    def replace(
        self, _layer: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        received = self._stage.inbox
        return replace_tensors(
            args, kwargs, {path: received[at] for path, at in self._places.items()}
        )


class _Outlet:
    """Stands for the first layer of the next stage: ends the forward with what that one takes."""

    def __init__(self, inlet: _Inlet, cut: Sequence[CutTensor]) -> None:
        self._inlet = inlet
        self._paths = [tensor.path for tensor in cut]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = tensors_of(*self._inlet.replace(None, args, kwargs))
        raise StageExit(tuple(given[path] for path in self._paths))
