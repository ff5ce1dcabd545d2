"""Run one case on a mesh of ranks and in one process, and compare every number.

Every rank returns its gradients and parameters with the box of the whole tensor that each fills;
the parent puts them together, checks that copies of the same box are bitwise equal, that all ranks
returned the same losses and norms and made the same launches, and compares with one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from goose_strategy.comm.recorder import Recorder, mismatches, recording
from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.optim.config import ZeroConfig
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.runtime.core import ParallelRuntime
from goose_strategy.runtime.settings import RuntimeConfig
from goose_strategy.tensor_parallel.config import TensorConfig
from tests.harness.compare import assert_close_named, assert_close_numbers, relative_error
from tests.harness.models import Batch, Family, batches, tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.parity.session import INF, MeshSession, OneProcess, Pieces, Record, Session

DEADLINE = timedelta(seconds=40)

# What is frozen: some of a stage, the whole first of two stages, and holes in the middle.
EARLY = ("model.embed_tokens", "model.layers.0.")
FIRST_HALF = ("model.embed_tokens", "model.layers.0.", "model.layers.1.")
HOLES = ("model.layers.1.mlp", "model.layers.2.self_attn.q_proj", "model.norm")

Scenario: TypeAlias = Callable[[Session, "Case"], None]
Plant: TypeAlias = Callable[[ParallelMesh], AbstractContextManager[object]]


@dataclass(frozen=True)
class Case:
    """One cell of the grid.

    Attributes:
        family: Model family.
        tp: Tensor parallel size.
        pp: Stages.
        dp: Replicas.
        schedule: Pipeline schedule.
        microbatches: Per call.
        tied: Whether the head shares the embedding.
        accumulate: Calls per step.
        max_norm: Clip to this.
        frozen: Prefixes of frozen parameters.
        optimizer: A key of ``session.OPTIMIZERS``.
        steps: Optimizer steps.
        rows: Of every global batch.
        dtype: Of the weights.
        autocast: Type of mixed precision, or ``None``.
        settings: Further arguments of the model's config.
        pipeline: Further arguments of the pipeline's config.
        tensor: Arguments of the tensor parallel config.
        zero: Arguments of the optimizer's config.
    """

    family: Family = "llama"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    schedule: str = "1F1B"
    microbatches: int | None = 3
    tied: bool = False
    accumulate: int = 1
    max_norm: float = INF
    frozen: tuple[str, ...] = ()
    optimizer: str = "adamw"
    steps: int = 5
    rows: int = 8
    dtype: torch.dtype = torch.float64
    autocast: torch.dtype | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    pipeline: tuple[tuple[str, Any], ...] = ()
    tensor: tuple[tuple[str, Any], ...] = ()
    zero: tuple[tuple[str, Any], ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    @property
    def alone(self) -> Case:
        """The same in one process."""
        # A mesh of four tp ranks needs four kv heads; one process takes the same model.
        tp = 4 if self.tp == 4 else 1
        mesh = {"schedule": "1F1B", "microbatches": 1, "pipeline": (), "tensor": (), "zero": ()}
        return replace(self, tp=tp, pp=1, dp=1, **mesh)

    @property
    def mesh_name(self) -> str:
        """Sizes and schedule, such as ``"tp2-pp2-GPipe"``."""
        sizes = [(n, getattr(self, n)) for n in ("tp", "pp", "dp") if getattr(self, n) > 1]
        name = "-".join(f"{name}{size}" for name, size in sizes) or "alone"
        return f"{name}-{self.schedule}" if self.pp > 1 else name

    def __str__(self) -> str:
        words = [self.family, self.mesh_name]
        words += ["tied"] if self.tied else []
        words += ["clip"] if self.max_norm < INF else []
        words += [f"accumulate{self.accumulate}"] if self.accumulate > 1 else []
        words += ["frozen"] if self.frozen else []
        return "-".join(words)

    def model(self) -> nn.Module:
        """Build the model, with what is frozen."""
        model = tiny_model(
            self.family,
            tied=self.tied,
            dtype=self.dtype,
            kv_heads=4 if self.tp == 4 else 2,
            **dict(self.settings),
        )
        for name, param in model.named_parameters():
            param.requires_grad_(not (self.frozen and name.startswith(self.frozen)))
        return model

    def batches(self) -> list[Batch]:
        """Return the global batches of all calls."""
        return batches(self.steps * self.accumulate, batch_size=self.rows)

    def config(self) -> RuntimeConfig:
        """Return the settings of the mesh; buckets are small, so that there are several."""
        pipeline, tensor = dict(self.pipeline), dict(self.tensor)
        return RuntimeConfig(
            tp=self.tp,
            pp=self.pp,
            pipeline=PipelineConfig(
                schedule=self.schedule,  # type: ignore[arg-type]
                num_microbatches=self.microbatches,
                **pipeline,
            ),
            tensor=TensorConfig(**tensor),
            zero=ZeroConfig(**{"bucket_numel": 4096, **dict(self.zero)}),
        )


def train(session: Session, case: Case) -> None:
    """Train for the case's steps: the scenario of the grid."""
    for index, batch in enumerate(case.batches(), start=1):
        last = index % case.accumulate == 0
        with session.accumulating(not last):
            loss = session.loss(batch)
            session.backward(loss / case.accumulate)
        if last:
            session.step(case.max_norm)


@dataclass
class Run:
    """What a mesh of ranks computed, put together.

    Attributes:
        losses: Per call, the same on all ranks.
        norms: Per step, the same on all ranks.
        gradients: Per step, whole tensors by name.
        parameters: After the last step, whole tensors by name.
        logits: Per replica, what the scenario kept.
        recorders: The launches of every rank.
    """

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]
    logits: list[list[Tensor]] = field(default_factory=list)
    recorders: list[Recorder] = field(default_factory=list)


def mesh_rank(
    ctx: Context, case: Case, scenario: Scenario, plant: Plant | None
) -> tuple[Record, Recorder]:
    """Run a scenario on one rank of the case's mesh; runs inside a world."""
    runtime = ParallelRuntime(case.config())
    runtime.start(torch.device("cpu"), timeout=DEADLINE)
    try:
        planted = nullcontext() if plant is None else plant(runtime.mesh)
        with recording(Recorder()) as recorder, planted:
            session = MeshSession(
                runtime, case.model(), optimizer=case.optimizer, autocast=case.autocast
            )
            scenario(session, case)
            record = session.finish()
    finally:
        runtime.stop()
    return record, recorder


def run_case(case: Case, scenario: Scenario = train, plant: Plant | None = None) -> Run:
    """Run a scenario on the case's mesh.

    Args:
        case: The case.
        scenario: A top-level function.
        plant: A top-level function of the mesh; returns a context in which an error is planted.
    """
    ranks = run_ranks(mesh_rank, case.world_size, case, scenario, plant)
    records: list[Record] = [record for record, _ in ranks]
    first = records[0]
    for rank, record in enumerate(records):
        for kind in ("losses", "norms"):
            mine, theirs = getattr(record, kind), getattr(first, kind)
            assert mine == theirs, f"{kind} of rank {rank} and of rank 0 differ: {mine}, {theirs}"
    stages = case.tp * case.dp
    return Run(
        losses=first.losses,
        norms=first.norms,
        gradients=[
            assemble([record.gradients[step] for record in records], f"gradients of step {step}")
            for step in range(len(first.gradients))
        ],
        parameters=assemble([record.parameters for record in records], "parameters"),
        logits=[record.logits for record in records[: stages : case.tp]],
        recorders=[recorder for _, recorder in ranks],
    )


def assemble(ranks: Sequence[Pieces], what: str) -> dict[str, Tensor]:
    """Put the ranks' pieces together; copies of one box must be bitwise equal."""
    whole: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for pieces in ranks:
        for name, (spec, tensor) in pieces.items():
            target = spec.tie if spec.tie is not None else name
            if target not in whole:
                whole[target] = torch.zeros(spec.global_shape, dtype=tensor.dtype)
                filled[target] = torch.zeros(spec.global_shape, dtype=torch.bool)
            for box, piece in spec.pieces(tensor):
                place = tuple(slice(at, at + n) for at, n in zip(*box, strict=True))
                if filled[target][place].any():
                    equal = torch.equal(whole[target][place], piece)
                    assert equal, f"{what}: two ranks hold different values of {name}"
                whole[target][place] = piece
                filled[target][place] = True
    for name, mask in filled.items():
        assert mask.all(), f"{what}: {name} was not covered by the ranks"
    return whole


def reference_of(case: Case, scenario: Scenario = train) -> Record:
    """Run a scenario in this process in fp64, from the case's own (perhaps rounded) weights."""
    return _reference(case.alone, scenario)


@cache
def _reference(case: Case, scenario: Scenario) -> Record:
    session = OneProcess(case.model().double(), optimizer=case.optimizer, main=torch.float64)
    scenario(session, case)
    return session.finish()


@dataclass(frozen=True)
class Bounds:
    """Largest relative differences that a case may have."""

    loss: float = 1e-10
    gradient: float = 1e-10
    parameter: float = 1e-9


FP64 = Bounds()


def assert_parity(
    case: Case,
    bounds: Bounds = FP64,
    *,
    scenario: Scenario = train,
    plant: Plant | None = None,
) -> Run:
    """Run a scenario on the case's mesh and in one process, and compare everything.

    Args:
        case: The case.
        bounds: How far both may be apart.
        scenario: What is run.
        plant: An error to plant; see :func:`run_case`.

    Returns:
        What the mesh computed.

    Raises:
        AssertionError: Saying what differs first: losses, norms, gradients, parameters, logits,
            or launches.
    """
    reference = reference_of(case, scenario)
    run = run_case(case, scenario, plant)
    with about("losses"):
        assert_close_numbers(run.losses, reference.losses, bounds.loss)
    for step, (mine, theirs) in enumerate(zip(run.gradients, reference.gradients, strict=True)):
        with about(f"gradients of step {step}"):
            mine, theirs = without_nothing(mine, theirs)
            assert_close_named(mine, theirs, bounds.gradient)
    with about("norms"):
        assert_close_numbers(run.norms, reference.norms, bounds.loss)
    with about("parameters"):
        assert_close_named(run.parameters, reference.parameters, bounds.parameter)
    with about("logits"):
        assert_close_logits(run.logits, reference.logits, bounds.loss)
    differing = mismatches(dict(enumerate(run.recorders)))
    assert not differing, f"launches: {differing[0]}"
    return run


def without_nothing(
    mine: dict[str, Tensor], theirs: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Leave out gradients that are zero but for rounding, and check that they are so in both.

    The bias of a key projection moves all scores of a query alike, which the softmax undoes.
    """
    largest = max(float(grad.norm()) for grad in theirs.values())
    nothing = {
        name
        for name, grad in theirs.items()
        if name.endswith("k_proj.bias") and float(grad.norm()) < 1e-13 * largest
    }
    for name in nothing:
        assert float(mine[name].norm()) < 1e-13 * largest, f"{name} has a gradient"
    return (
        {name: grad for name, grad in mine.items() if name not in nothing},
        {name: grad for name, grad in theirs.items() if name not in nothing},
    )


def assert_close_logits(replicas: list[list[Tensor]], reference: list[Tensor], rel: float) -> None:
    """Compare the logits of every replica's rows with those rows of one process."""
    for dp_rank, replica in enumerate(replicas):
        assert len(replica) == len(reference), (len(replica), len(reference))
        for mine, whole in zip(replica, reference, strict=True):
            error = relative_error(mine, whole.chunk(len(replicas))[dp_rank])
            assert error <= rel, f"replica {dp_rank} is {error:.3e} off, rel={rel:g}"


@contextmanager
def about(what: str) -> Iterator[None]:
    """Say what an assertion was about."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error
