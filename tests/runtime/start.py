"""A runtime inside a rank of a persistent world, closed again when the test is through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from goose_strategy.mesh.layout import MeshLayout
from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.runtime.core import ParallelRuntime
from goose_strategy.runtime.settings import RuntimeConfig

CPU = torch.device("cpu")
DEADLINE = timedelta(seconds=30)


@contextmanager
def started(tp: int = 1, pp: int = 1, **pipeline: Any) -> Iterator[ParallelRuntime]:
    """Start a runtime; two microbatches unless told otherwise."""
    config = PipelineConfig(**{"num_microbatches": 2, **pipeline})
    runtime = ParallelRuntime(RuntimeConfig(tp=tp, pp=pp, pipeline=config))
    runtime.start(CPU, timeout=DEADLINE)
    try:
        yield runtime
    finally:
        runtime.stop()


@contextmanager
def mesh_of(tp: int = 1, pp: int = 1, dp: int = 1) -> Iterator[ParallelMesh]:
    """Make a mesh alone."""
    layout = MeshLayout(tp=tp, pp=pp, dp=dp)
    mesh = ParallelMesh.create(layout, device=CPU, timeout=DEADLINE)
    try:
        yield mesh
    finally:
        mesh.close()


def message(act: Callable[[], Any], kind: type[Exception]) -> str:
    """Return the message of the exception that ``act`` must raise."""
    try:
        act()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")
