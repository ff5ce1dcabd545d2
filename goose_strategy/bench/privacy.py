"""``goose3d bench privacy``: what private training costs over ordinary training, on one CPU thread.

Contenders are this package's own ordinary and private calls, plain torch, and Opacus's ghost
clipping over it, all on one small Llama and one batch in the same microbatches. The CPU time of the
thread counts, so that a busy machine disturbs less; contenders alternate, and the fastest of all
rounds counts. The optimizer's step and its noise are left out: they come once per logical batch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from typing_extensions import override

from goose_strategy import validate
from goose_strategy.bench.worker import PeakMemory
from goose_strategy.errors import ConfigError
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.privacy.config import PrivacyConfig
from goose_strategy.runtime.core import ParallelRuntime
from goose_strategy.runtime.settings import RuntimeConfig

CONTENDERS = ("ordinary", "private", "torch", "opacus")
SHORT = 128
_VOCAB = 512


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every contender computes.

    Attributes:
        width: Hidden channels.
        layers: Layers.
        tokens: Length of a row.
        rows: Rows of a batch.
        microbatches: Into how many parts it is cut.
        rounds: Timed rounds.
    """

    width: int = 1024
    layers: int = 2
    tokens: int = SHORT
    rows: int = 4
    microbatches: int = 2
    rounds: int = 3

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: Naming the first that is wrong.
        """
        for name in ("width", "layers", "tokens", "rows", "microbatches", "rounds"):
            validate.at_least(1, **{name: getattr(self, name)})
        if self.width % 64:
            raise ConfigError(f"width={self.width} must be a multiple of 64.")

    def model(self) -> Any:
        """Build the model, the same every time."""
        from transformers import LlamaConfig, LlamaForCausalLM

        settings: dict[str, Any] = {"use_cache": False, "attn_implementation": "sdpa"}
        config = LlamaConfig(
            vocab_size=_VOCAB,
            hidden_size=self.width,
            intermediate_size=self.width * 8 // 3 // 64 * 64,
            num_hidden_layers=self.layers,
            num_attention_heads=self.width // 64,
            num_key_value_heads=self.width // 64,
            max_position_embeddings=self.tokens,
            **settings,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return LlamaForCausalLM(config).train()

    def ids(self) -> Tensor:
        """Return the batch, ``[rows, tokens]``."""
        generator = torch.Generator().manual_seed(1)
        return torch.randint(_VOCAB, (self.rows, self.tokens), generator=generator)


Step = Callable[[], Tensor | None]


def per_sample_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Return each row's mean cross entropy, ``[rows]``."""
    flat = logits[:, :-1].reshape(-1, logits.shape[-1])
    losses = cross_entropy(flat, ids[:, 1:].reshape(-1), reduction="none")
    return losses.view(ids.shape[0], -1).mean(1)


def _own(work: Work, *, private: bool) -> Step:
    """Return a step of ours: a call and its backward."""
    privacy = PrivacyConfig(
        noise_multiplier=0.0, logical_batch_size=1, sampling="none", max_grad_norm=1.0
    )
    pipeline = PipelineConfig(num_microbatches=work.microbatches)
    runtime = ParallelRuntime(
        RuntimeConfig(pipeline=pipeline, privacy=privacy if private else None)
    )
    runtime.start(torch.device("cpu"))
    model, ids = work.model(), work.ids()
    runtime.shard_module(model)
    parts = [{"input_ids": part, "labels": part} for part in ids.chunk(work.microbatches)]

    def step() -> Tensor | None:
        loss = model(parts).loss
        with runtime.backward(loss):
            loss.backward()
        model.zero_grad()
        ledger = runtime.ledger
        if ledger is None:
            return None
        # No step follows here, and the next call would ask for one.
        ledger.begin_step()
        return torch.cat(ledger.stats.norms)

    return step


def _torch(work: Work) -> Step:
    model, ids = work.model(), work.ids()

    def step() -> Tensor | None:
        for part in ids.chunk(work.microbatches):
            per_sample_losses(model(input_ids=part).logits, part).sum().backward()
        model.zero_grad()
        return None

    return step


def _opacus(work: Work) -> Step:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    ids = work.ids()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = GradSampleModuleFastGradientClipping(
            work.model(), loss_reduction="sum", max_grad_norm=1.0, use_ghost_clipping=True
        )

    def step() -> Tensor | None:
        norms = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for part in ids.chunk(work.microbatches):
                losses = per_sample_losses(model(input_ids=part).logits, part)
                losses.sum().backward(retain_graph=True)
                norms.append(model.get_norm_sample().detach())
                model.zero_grad()
                factors = model.get_clipping_coef()
                model.disable_hooks()
                (losses * factors).sum().backward()
                model.enable_hooks()
        model.zero_grad()
        return torch.cat(norms)

    return step


def make(contender: str, work: Work) -> Step:
    """Return a contender's step; it returns the samples' norms where it has them.

    Raises:
        ConfigError: If it is not known.
    """
    validate.one_of(CONTENDERS, contender=contender)
    if contender in ("ordinary", "private"):
        return _own(work, private=contender == "private")
    return _torch(work) if contender == "torch" else _opacus(work)


def time_all(work: Work) -> dict[str, float]:
    """Time all contenders in turn.

    Returns:
        Seconds of CPU time by contender, the fastest round.
    """
    steps = {name: make(name, work) for name in CONTENDERS}
    for step in steps.values():
        step()
    best = dict.fromkeys(CONTENDERS, float("inf"))
    for _ in range(work.rounds):
        for name, step in steps.items():
            begin = time.process_time()
            step()
            best[name] = min(best[name], time.process_time() - begin)
    return best


def vanilla_error(work: Work) -> float:
    """Return how far the norms of a private call are from those of Opacus's full gradients."""
    from opacus.grad_sample import GradSampleModule

    model, ids = work.model(), work.ids()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped: Any = GradSampleModule(model, loss_reduction="sum")
        per_sample_losses(wrapped(input_ids=ids).logits, ids).sum().backward()
    squares = [torch.flatten(p.grad_sample, 1).square().sum(1) for p in model.parameters()]
    theirs = torch.stack(squares).sum(0).sqrt()
    mine = make("private", work)()
    if mine is None:
        raise ConfigError("the private call gave no norms.")
    return float(((mine - theirs).abs() / theirs).max())


def measure_memory(contender: str, work: Work, results: Any) -> None:
    """Put the peak memory of a process that runs a contender's steps into a queue, in MiB."""
    _prepare()
    try:
        step = make(contender, work)
        memory = PeakMemory(torch.device("cpu"))
        for _ in range(2):
            step()
        results.put(memory.peak_mib())
    finally:
        dist.destroy_process_group()  # noqa: TID251


def memory_ratio(work: Work) -> float:
    """Return the private call's peak memory over the ordinary one's, each in a fresh process."""
    context = multiprocessing.get_context("spawn")
    peaks = []
    for contender in ("ordinary", "private"):
        results = context.Queue()
        process = context.Process(target=measure_memory, args=(contender, work, results))
        process.start()
        peaks.append(float(results.get(timeout=600)))
        process.join()
    ordinary, private = peaks
    return private / ordinary


def _prepare() -> None:
    torch.set_num_threads(1)
    dist.init_process_group(  # noqa: TID251  a world of one, as a launcher would start it
        "gloo", store=dist.HashStore(), rank=0, world_size=1
    )


class _Parser(argparse.ArgumentParser):
    @override
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see goose3d bench privacy --help.")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    options = _Parser(
        prog="goose3d bench privacy",
        description="CPU time of a private call over an ordinary one, beside Opacus's ghost "
        "clipping over plain torch.",
        epilog="The last line is JSON: parity, cost_short, cost_any, opacus_ghost_cost, memory.",
    )
    add = options.add_argument
    add("--width", type=int, default=1024, help="hidden channels d (default: %(default)s)")
    add("--layers", type=int, default=2, help="layers (default: %(default)s)")
    add("--rounds", type=int, default=3, help="of which the fastest counts (default: %(default)s)")
    add("--json", action="store_true", help="print the JSON line only, not the table")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    asked = parser().parse_args(argv)
    _prepare()
    try:
        line = report(
            Work(width=asked.width, layers=asked.layers, rounds=asked.rounds), quiet=asked.json
        )
    finally:
        dist.destroy_process_group()  # noqa: TID251
    sys.stdout.write(json.dumps(line) + "\n")
    return 0


def report(base: Work, *, quiet: bool) -> dict[str, float]:
    """Measure rows of 128 tokens, of half as many as channels, and as many; return the JSON."""
    from dataclasses import replace

    costs: dict[int, float] = {}
    ghosts: dict[int, float] = {}
    lengths = sorted({min(SHORT, base.width), base.width // 2, base.width})
    if not quiet:
        print(f"d={base.width}, {base.layers} layers; CPU seconds of one call")
        print("tokens  " + "  ".join(f"{name:>9}" for name in CONTENDERS) + "  private  opacus")
    for tokens in lengths:
        seconds = time_all(replace(base, tokens=tokens))
        costs[tokens] = seconds["private"] / seconds["ordinary"]
        ghosts[tokens] = seconds["opacus"] / seconds["torch"]
        if not quiet:
            shown = "  ".join(f"{seconds[name]:>9.3f}" for name in CONTENDERS)
            print(f"{tokens:>6}  {shown}  {costs[tokens]:>7.3f}  {ghosts[tokens]:>6.3f}")
    return {
        "parity": vanilla_error(replace(base, width=min(base.width, 256), tokens=32)),
        "cost_short": round(costs[lengths[0]], 4),
        "cost_any": round(max(costs.values()), 4),
        "opacus_ghost_cost": round(max(ghosts.values()), 4),
        "memory": round(memory_ratio(base), 4),
    }


if __name__ == "__main__":
    sys.exit(main())
