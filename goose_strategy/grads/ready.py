"""Which buckets are complete in this backward, and in which order they may start.

``DistributedDataParallel`` keeps the same count inside C++ and refuses a parameter that becomes
ready twice. Here marking is separate from launching, buckets start in index order only, so that
every rank launches the same collectives in the same order, and what is not ready is flushed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class ReadyCounter:
    """Counts the parameters of each bucket and starts complete buckets in index order.

    Attributes:
        counting: Whether marks count now; in a backward that is not the last one they do not.
        stage: The only stage whose marks count now; ``None`` for all.
        round: Number of the current round; a parameter counts once per round.
        dirty: Whether a gradient was accumulated since the last round ended.
    """

    __slots__ = (
        "_idle",
        "_launch",
        "_missing",
        "_next",
        "_sizes",
        "counting",
        "dirty",
        "round",
        "stage",
    )

    def __init__(
        self,
        sizes: Sequence[int | None],
        *,
        launch: Callable[[int], None],
        idle: Callable[[int], bool],
    ) -> None:
        """Start the first round.

        Args:
            sizes: Parameters per bucket; ``None`` for a bucket that only `flush` may start.
            launch: Starts the bucket of this index.
            idle: Whether no parameter of the bucket takes part in training at present.
        """
        self._sizes = sizes
        self._launch = launch
        self._idle = idle
        self.counting = False
        self.stage: int | None = None
        self.dirty = False
        self.round = 0
        self.begin_round()

    def begin_round(self) -> None:
        """Forget what was marked."""
        self.round += 1
        self.dirty = False
        self._next = 0
        self._missing = [-1 if size is None else size for size in self._sizes]

    def mark(self, bucket: int) -> None:
        """Count one parameter of ``bucket``; start the buckets whose turn has come."""
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            self._advance()

    def flush(self) -> None:
        """Start every bucket that has not been started in this round."""
        while self._next < len(self._sizes):
            self._start_next()

    def _advance(self) -> None:
        while self._next < len(self._sizes):
            missing = self._missing[self._next]
            untouched = missing == self._sizes[self._next]
            if missing != 0 and not (untouched and self._idle(self._next)):
                return
            self._start_next()

    def _start_next(self) -> None:
        index = self._next
        # Counted first: what the launch raises must not make the bucket start twice.
        self._next += 1
        if not self._idle(index):
            self._launch(index)
