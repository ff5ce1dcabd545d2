"""A whole model as the only stage of a pipeline."""

from __future__ import annotations

import torch

from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.pipeline_parallel.engine import Engine
from goose_strategy.pipeline_parallel.links import StageLinks
from goose_strategy.pipeline_parallel.whole import WholeStage, whole_part
from tests.harness.models import batches, microbatches_of, tiny_model


def test_its_schedule_is_ordinary_training() -> None:
    model, plain = tiny_model("llama"), tiny_model("llama")
    part = whole_part(model)
    assert part.has_loss
    assert repr(part.stages[0]) == "WholeStage()"
    engine = Engine(part, StageLinks(), PipelineConfig())
    batch = batches(1)[0]
    parts = list(microbatches_of(batch, 2))
    result = engine.run(parts, train=True)
    losses = [plain(**one).loss for one in parts]
    torch.stack(losses).sum().backward()
    assert result.loss is not None
    assert float(result.loss) == float(torch.stack(losses).detach().sum())
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-12), name  # type: ignore[arg-type]


def test_it_keeps_the_forward_that_it_found() -> None:
    model = tiny_model("llama")
    stage = WholeStage(model)
    model.forward = lambda **_: None  # type: ignore[method-assign]
    output = stage.forward({"input_ids": torch.ones(1, 3, dtype=torch.long), "return_dict": False})
    assert output.logits.shape == (1, 3, 97)
    assert output.past_key_values is None
