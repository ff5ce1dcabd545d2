"""A whole model as the only stage of a pipeline.

What a schedule does to a backward (splitting it, clipping between the halves) is wanted without
stages, too. Nothing is cut here, and nothing has to be found out about the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from goose_strategy.pipeline_parallel.probe import call_settings
from goose_strategy.pipeline_parallel.stage import ModelPart, PipelineStage
from goose_strategy.pipeline_parallel.tables.chunks import Chunks


class WholeStage(PipelineStage):
    """A model that is one stage: it receives nothing and sends nothing.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.index = 0
        self.num_stages = 1
        self.layers = range(0)
        self.cut_in = self.cut_out = ()
        self.loss_scale = None
        # Kept from now, because the runtime puts its own forward in the place of the model's.
        self._forward = module.forward
        self._settings = call_settings(module)

    def __repr__(self) -> str:
        return "WholeStage()"

    def forward(
        self,
        microbatch: Mapping[str, Any],
        received: Sequence[Tensor] = (),  # noqa: ARG002
    ) -> Any:
        """Run the model on one microbatch; return its own output."""
        call = {name: value for name, value in microbatch.items() if name != "return_dict"}
        return self._forward(**{**call, "return_dict": True, **self._settings})


def whole_part(model: nn.Module) -> ModelPart:
    """Return a model as the part of the one rank of a pipeline.

    Args:
        model: Any model, cut over tp or not; it is left as it is.
    """
    return ModelPart(
        module=model,
        chunks=Chunks(1),
        rank=0,
        stages=(WholeStage(model),),
        absent=[],
        tied={},
        stage_of={},
    )
