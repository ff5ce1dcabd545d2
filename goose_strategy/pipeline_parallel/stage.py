"""Turn a whole model into one stage of a pipeline, in place.

The model stays what it is: its class, config, module tree and names. Every stage gets the real
``input_ids`` and masks and *replays* what the model does before its layers, so positions, masks and
rotary angles are its own and only hidden states travel. Layers of earlier stages hand their input
through; the stage's first layer takes what was received instead; the first layer of the next stage
ends the forward. What is not there costs no memory
(:mod:`~goose_strategy.pipeline_parallel.ghost`).

``torch.distributed.pipelining`` needs a module that takes and returns just hidden states, written
per model class or traced with fixed shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from goose_strategy.errors import ScheduleError
from goose_strategy.pipeline_parallel.ghost import drop_hooks, make_ghosts
from goose_strategy.pipeline_parallel.nested import Path, replace_tensors, tensors_of
from goose_strategy.pipeline_parallel.placement import Placement
from goose_strategy.pipeline_parallel.probe import call_settings
from goose_strategy.pipeline_parallel.template import fill_template

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.stack import CutTensor, LayerCall, StackInfo

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
        module: The model. ``named_parameters()`` are the stage's own, under their names in the
            whole model.
        index: Number of the stage.
        num_stages: Number of stages.
        layers: Numbers of the stage's layers.
        cut_in: What it receives from the stage before, in this order.
        cut_out: What it sends to the stage after.
        absent: Names of the layers that other stages hold.
        tied: Parameters that the first and the last stage both hold: local name to the name of
            the first stage's, which owns it.
        loss_scale: What gradients are multiplied by from the loss on; set for each call.
        tied_copies: Those of ``tied`` that are copies here; empty on the first stage.
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
        self.absent = [call.name for n, call in enumerate(info.layers) if n not in layers]
        self.tied: dict[str, str] = {}
        self.inbox: tuple[Tensor, ...] = ()
        self.loss_scale: Tensor | None = None
        self._settings = call_settings(module)
        # Kept from now, because the runtime puts its own forward in the place of the model's.
        self._forward = module.forward

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

    @property
    def tied_copies(self) -> dict[str, str]:
        """Local names of copies of the first stage's parameters, with the names they have there."""
        return {} if self.is_first else dict(self.tied)

    def seed(self, loss: Tensor) -> Tensor:
        """Return the gradient that a backward begins with."""
        if self.loss_scale is None:
            return torch.ones_like(loss)
        return self.loss_scale.to(loss).expand_as(loss)

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
        try:
            output = self._forward(**call | self._settings)
        except StageExit as end:
            return end.tensors
        finally:
            self.inbox = ()
        if not self.is_last:
            raise ScheduleError(
                f"the model returned before layer {self.layers.stop}, where the stage ends.",
                stage=self.index,
            )
        return output


def cut_model(
    model: nn.Module, info: StackInfo, bounds: Sequence[int], stage: int
) -> PipelineStage:
    """Keep one stage of a model, in place. The rest of its weights is freed for good.

    Every rank checks all stages, so that all raise the same error or none does.

    Args:
        model: The whole model, as it was probed.
        info: What :func:`~goose_strategy.pipeline_parallel.probe.probe_model` returned for it.
        bounds: First layer of every stage, and the number of layers
            (:func:`~goose_strategy.pipeline_parallel.partition.partition_layers`).
        stage: Number of the stage to keep.

    Returns:
        The stage.

    Raises:
        PlanError: If the model cannot be cut at these bounds; names the layer that needs what the
            cut would hide.
    """
    placement = Placement(model, info, bounds)
    shared = placement.shared()
    layers = range(bounds[stage], bounds[stage + 1])
    made = PipelineStage(
        model, index=stage, num_stages=placement.num_stages, layers=layers, info=info
    )
    made.tied = {
        placement.local_name(name, stage): placement.local_name(name, stages[0])
        for name, stages in shared.items()
        if stage in stages
    }
    modules = dict(model.named_modules())
    for name, attributes in placement.missing(stage).items():
        make_ghosts(modules[name], attributes)
    for number, call in enumerate(info.layers):
        layer = modules[call.name]
        if number in layers:
            places = info.injections(layers.start, number) if layers.start > 0 else {}
            if places:
                # Before the user's own hooks, which see what the layer will see.
                hook = _Inlet(made, places).replace
                layer.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        else:
            _empty(layer)
            if number < layers.start:
                layer.__dict__["forward"] = _Skip(call).forward
            elif number == layers.stop:
                places = info.injections(layers.start, number) if layers.start > 0 else {}
                layer.__dict__["forward"] = _Outlet(_Inlet(made, places), made.cut_out).forward
    return made


def _empty(layer: nn.Module) -> None:
    """Free what is left of a layer that is not on this stage."""
    for module in layer.modules():
        make_ghosts(module, [name for name, _ in module.named_buffers(recurse=False)])
        drop_hooks(module)


class _Skip:
    """Stands for a layer of an earlier stage: returns its hidden states as they are."""

    def __init__(self, call: LayerCall) -> None:
        self._call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = tensors_of(args, kwargs)[self._call.hidden]
        return fill_template(self._call.output, hidden)


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
