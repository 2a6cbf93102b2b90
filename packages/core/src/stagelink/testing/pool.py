"""Rank processes that stay warm from one run to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

from stagelink.testing.jobs import Job
from stagelink.testing.ranks import RankProcesses
from stagelink.testing.worker import start_workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from torch.distributed import Store

    from stagelink.testing.worker import Worker

__all__ = ["RankPool"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class RankPool:
    """Warm rank processes, kept from one run to the next. A context manager.

    The processes of a run that failed are replaced; those of one that returned are used again,
    with whatever it left in them.
    """

    def __init__(self) -> None:
        self._idle: list[Worker] = []

    @property
    def pids(self) -> frozenset[int]:
        """Process ids of the idle ranks."""
        return frozenset(worker.pid for worker in self._idle)

    @property
    def descriptors(self) -> frozenset[int]:
        """File descriptors that the idle ranks cost this process."""
        return frozenset().union(*(worker.descriptors for worker in self._idle))

    def run(
        self,
        function: Callable[[int, int, Store, *Ts], T],
        world_size: int,
        *args: *Ts,
        timeout_s: float = 30.0,
    ) -> list[T]:
        """Run ``function(rank, world_size, store, *args)`` on each rank and wait for all.

        Returns:
            What each returned, by rank.

        Raises:
            RankFailedError: some raised, died or had to be killed after ``timeout_s``.
            UsageError: the function cannot be found by its name.
        """
        job = Job.of(function, args)
        limit_s = timeout_s + 60  # past any time at which this process would have ended them
        with RankProcesses[T](job, self._take(world_size), limit_s) as ranks:
            results = ranks.results(timeout_s)
            self._idle = ranks.release() + self._idle
        return results

    def close(self) -> None:
        """End all processes."""
        for worker in self._idle:
            worker.stop()
        self._idle = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _take(self, count: int) -> list[Worker]:
        for worker in [worker for worker in self._idle if not worker.idle]:
            self._idle.remove(worker)
            worker.stop()
        self._idle += start_workers(count - len(self._idle))
        taken, self._idle = self._idle[:count], self._idle[count:]
        return taken
