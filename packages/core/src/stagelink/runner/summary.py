"""Summary of an epoch: loss, metrics, and where its time went."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from stagelink.exchange.handler import Handler


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of a stage's time, as fractions of the epoch; the mean over its replicas.

    What is left went into making batches. On a GPU, work counts where the host waits for it.

    Attributes:
        computing: forward, backward and optimizer.
        waiting: for messages, for credit, for the other replicas.
        sending: handing messages to their links.
    """

    computing: float
    waiting: float
    sending: float


@dataclass(frozen=True, slots=True)
class Summary:
    """An epoch of training; the same on every rank.

    Attributes:
        loss: the mean over all items, or over what the loss counted; in all where its reduction is
            ``"sum"``. Nan where nothing was counted.
        items: samples.
        batches: how many.
        seconds: the slowest rank's.
        shares: by name of stage, where its time went.
    """

    loss: float
    items: int
    batches: int
    seconds: float
    shares: Mapping[str, Shares]

    def __str__(self) -> str:
        """A line for the epoch and one for each stage."""
        head = (
            f"loss {self.loss:.4g} over {self.items} items in {self.batches} batches, "
            f"{self.seconds:.1f} s"
        )
        width = max(map(len, self.shares), default=0)
        lines = [
            f"  {name:{width}}  computing {share.computing:4.0%}  waiting {share.waiting:4.0%}  "
            f"sending {share.sending:4.0%}"
            for name, share in self.shares.items()
        ]
        return "\n".join([head, *lines])


class _Stopwatch:
    """Adds up the seconds spent in its ``with`` blocks."""

    __slots__ = ("_since", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._since


class Clock:
    """This rank's time since its construction, by what it went into.

    Args:
        comm: the handler, which counts what sends wait for room.
    """

    def __init__(self, comm: Handler) -> None:
        self._comm = comm
        self._began = time.perf_counter()
        self._waited_before = self._window_wait_s()
        self.computing = _Stopwatch()  # see `Shares`
        self.waiting = _Stopwatch()  # see `Shares`
        # with the waits for room, which `fractions` moves to where they belong
        self.sending = _Stopwatch()

    def _window_wait_s(self) -> float:
        return sum(counters.window_wait_s for counters in self._comm.counters.values())

    @property
    def seconds(self) -> float:
        """Since construction."""
        return time.perf_counter() - self._began

    def fractions(self) -> Shares:
        """This rank's own shares."""
        seconds = self.seconds
        for_room = self._window_wait_s() - self._waited_before
        return Shares(
            self.computing.seconds / seconds,
            (self.waiting.seconds + for_room) / seconds,
            (self.sending.seconds - for_room) / seconds,
        )


def shares_of_all(comm: Handler, own: Shares) -> dict[str, Shares]:
    """Every stage's shares, from every rank's own; blocks until all ranks have called."""
    stages = comm.plan.stages
    sums = [0.0] * (3 * len(stages))
    place = 3 * comm.stage.index
    sums[place : place + 3] = own.computing, own.waiting, own.sending
    found = iter(comm.reduce(sums))
    return {
        stage.name: Shares(*(next(found) / stage.replicas for _ in range(3))) for stage in stages
    }
