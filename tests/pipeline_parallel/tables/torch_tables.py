"""torch's own tables, taken from its schedule classes without a process group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.pipelining import schedules

from goose_strategy.pipeline_parallel.schedule import Action, Table

V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def torch_runner(name: str, ranks: int, per_rank: int, microbatches: int) -> Any:
    """Return torch's schedule object.

    Raises:
        ValueError: If torch refuses the numbers.
    """
    stages = ranks * per_rank
    held = [0, stages - 1] if name in V_SHAPED else [k * ranks for k in range(per_rank)]
    fakes = [
        SimpleNamespace(
            num_stages=stages,
            group_size=ranks,
            group_rank=0,
            stage_index=stage,
            submod=nn.Module(),
            is_first=stage == 0,
            is_last=stage == stages - 1,
        )
        for stage in held
    ]
    kind = getattr(schedules, name)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    return kind(fakes[0] if single else fakes, n_microbatches=microbatches)


def torch_table(name: str, ranks: int, per_rank: int, microbatches: int) -> Table:
    """Return torch's table in our notation, overlapped pairs one after the other."""
    order = torch_runner(name, ranks, per_rank, microbatches).pipeline_order
    rows = []
    for rank in sorted(order):
        actions = [action for action in order[rank] if action is not None]
        flat = [part for action in actions for part in (action.sub_actions or (action,))]
        texts = [str(part) for part in flat if "REDUCE_GRAD" not in str(part)]
        rows.append(tuple(Action.parse(text) for text in texts))
    return tuple(rows)


def rows_of(*texts: str) -> Table:
    """Return a table written as one text per rank."""
    return tuple(tuple(Action.parse(part) for part in text.split()) for text in texts)
