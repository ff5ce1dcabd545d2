"""The input embedding whose vocabulary is cut over the tensor-parallel ranks.

Each rank looks up the ids of its own rows, writes zeros for the others, and the sum over the ranks
is the embedding (Shoeybi et al. 2019, arXiv:1909.08053, section 3). Rows are cut without padding,
so that a vocabulary that tp does not divide has no rows that exist nowhere else.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from goose_strategy.compat.transformers import is_scaled_embedding
from goose_strategy.errors import PlanError
from goose_strategy.grads.products import embedding
from goose_strategy.tensor_parallel.convert import Converted
from goose_strategy.tensor_parallel.regions import leave_island

if TYPE_CHECKING:
    from goose_strategy.grads.store import WeightGradStore
    from goose_strategy.tensor_parallel.slicing import Cut, Slicer


class VocabParallelEmbedding(Converted, nn.Embedding):
    """Rows ``[vocab / tp, hidden]`` of the embedding ``[vocab, hidden]``.

    ``num_embeddings`` and ``padding_idx`` stay those of the whole embedding. Made by `convert`;
    built directly it is a plain `torch.nn.Embedding`.

    Attributes:
        group: Ranks that hold the other rows.
        cut: Which rows this rank holds.
    """

    plain: ClassVar[type[nn.Module]] = nn.Embedding
    defers: ClassVar[bool] = True
    group: ProcessGroup | None = None
    cut: Cut | None = None

    @classmethod
    def check(cls, name: str, module: nn.Module) -> None:
        """Check that ``module`` computes what this class knows how to cut.

        Raises:
            PlanError: If it is another class, or renormalises, counts or sparsifies its rows.
        """
        if not is_scaled_embedding(type(module)):
            super().check(name, module)
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                raise PlanError(
                    f"{name}.{option}={getattr(module, option)} is not supported by tensor "
                    f"parallelism; build the embedding without it, or use tp=1.",
                    axis="tp",
                )

    @classmethod
    def convert(
        cls, embedding: nn.Embedding, slicer: Slicer, group: ProcessGroup | None
    ) -> VocabParallelEmbedding:
        """Cut ``embedding`` in place.

        Args:
            embedding: A plain embedding, equal on all ranks.
            slicer: Cuts the weight; a tied head finds it cut.
            group: The tensor-parallel group.

        Returns:
            The same object.
        """
        plain: Any = type(embedding)
        own = cls if plain is nn.Embedding else _above(plain)
        return own.adopt(embedding, group=group, cut=slicer.cut(embedding.weight, 0))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Look up the whole embedding.

        Args:
            input: Ids ``[...]``, int64 or int32, equal on all ranks.

        Returns:
            ``[..., hidden]``, equal on all ranks.
        """
        cut = self.cut
        if cut is None:
            return super().forward(input)
        store = self.weight_gradients
        return look_up(input, self.weight, cut, self.group, padding=self.padding_idx, store=store)

    def extra_repr(self) -> str:
        """Add this rank's rows to the embedding's description."""
        cut = self.cut
        rows = f"rows of this rank={cut.start}:{cut.stop}" if cut else "not cut"
        return f"{super().extra_repr()}, {rows}"


def look_up(
    ids: Tensor,
    table: Tensor,
    cut: Cut,
    group: ProcessGroup | None,
    *,
    padding: int | None,
    store: WeightGradStore | None = None,
) -> Tensor:
    """Look ids up in a table of which each rank holds some rows.

    Args:
        ids: ``[...]``, int64 or int32, equal on all ranks.
        table: This rank's rows, ``[vocab / tp, width]``.
        cut: Which rows these are.
        group: Ranks that hold the others.
        padding: The id whose row gets no gradient, if there is one.
        store: Where the table's gradient may be left.

    Returns:
        ``[..., width]``, equal on all ranks.
    """
    local = ids - cut.start
    elsewhere = (local < 0) | (local >= cut.length)
    is_here = padding is not None and cut.start <= padding < cut.stop
    own_padding = padding - cut.start if padding is not None and is_here else None
    found = embedding(local.masked_fill_(elsewhere, 0), table, own_padding, store=store)
    # The lookup is fresh and nothing in its backward needs its values.
    found.masked_fill_(elsewhere.unsqueeze(-1), 0.0)
    return leave_island(found, group)


@functools.cache
def _above(plain: Any) -> type[VocabParallelEmbedding]:
    """Return a class whose forward is that of ``plain`` around a lookup in cut rows.

    Such classes look up by ``super().forward`` and scale the result, so that here the cut lookup
    takes the place of ``nn.Embedding``'s.
    """
    return type(f"VocabParallel{plain.__name__}", (plain, VocabParallelEmbedding), {})
