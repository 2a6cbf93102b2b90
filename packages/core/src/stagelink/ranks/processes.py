"""Functions run as the ranks of a pipeline, each on a process of its own.

`run_fresh` starts new processes, to be reported from, stopped and killed; a `RankPool` keeps its
own for the next run. Processes are forked from a server that has torch loaded, so one more costs
about 0.1 s. A function must stand at a module's top level.

Every rank runs one torch thread, writes its output to a file of its own, and sees the environment
variables of the moment at which the first one was started. It may fork, but not start children
through `multiprocessing`.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, Self, TypeVar, TypeVarTuple

from torch.distributed import Store

from stagelink.deadline import Deadline
from stagelink.ranks.job import Job, Report, Task
from stagelink.ranks.outcome import Outcome, RankFailedError
from stagelink.ranks.worker import Worker, start_workers

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LIMIT_S = 600.0
"""Seconds after which the ranks of `run_fresh` end themselves, should nobody be there to do it."""


class RankProcesses(Generic[T]):
    """One function that runs on one process per rank. A context manager: at its end all are gone.

    A process ends itself after ``limit_s``, should nobody be there to do it.
    """

    def __init__(self, job: Job, workers: Sequence[Worker], limit_s: float = LIMIT_S) -> None:
        self._name = job.function
        self._workers = list(workers)
        self._outcomes: dict[int, Outcome] = {}
        self._reports: dict[int, deque[Report]] = defaultdict(deque)
        self._directory = TemporaryDirectory(prefix="stagelink-store-")
        store = str(Path(self._directory.name, "store"))
        for rank, worker in enumerate(workers):
            worker.begin(Task(job, rank, len(workers), store, limit_s))

    @property
    def pids(self) -> tuple[int, ...]:
        """The process id of each rank."""
        return tuple(worker.pid for worker in self._workers)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank: SIGKILL, SIGSTOP, SIGCONT, SIGINT; returns at once.

        Nothing where it has ended by itself.
        """
        with suppress(ProcessLookupError):
            os.kill(self._workers[rank].pid, number)

    def wait_for(self, rank: int, event: str, timeout_s: float = 30.0) -> Any:
        """Block until the rank has called ``report(event)``; its earlier events are dropped.

        Returns:
            The value that it reported.

        Raises:
            TimeoutError: it has not after ``timeout_s``.
            RankFailedError: it ended without.
        """
        deadline = Deadline(timeout_s)
        reports = self._reports[rank]
        while True:
            while reports:
                if (found := reports.popleft()).name == event:
                    return found.value
            if rank in self._outcomes:
                raise RankFailedError(self._name, [self._outcomes[rank]])
            if not self._pump(deadline):
                raise TimeoutError(f"rank {rank} did not report {event!r} within {timeout_s:g} s")

    def reports(self, rank: int) -> Iterator[Any]:
        """Yield the values that a rank reports, as they come, until all have ended or one failed.

        How they ended, `outcomes` says, whose ``timeout_s`` is then for those that the failure of
        another one ends.
        """
        while self._running() and all(outcome.ok for outcome in self._outcomes.values()):
            self._pump(Deadline(math.inf))
            while self._reports[rank]:
                yield self._reports[rank].popleft().value

    def outcomes(self, timeout_s: float = 30.0) -> list[Outcome]:
        """Block until every rank's function has ended, and say how, by rank.

        A rank that has not ended after ``timeout_s`` is killed; its outcome has its stacks.
        """
        deadline = Deadline(timeout_s)
        while self._running() and self._pump(deadline):
            pass
        for rank in self._running():
            self._workers[rank].dump_and_end()
            self._finish(Outcome(rank, hung_s=timeout_s))
        return [self._outcomes[rank] for rank in range(len(self._workers))]

    def results(self, timeout_s: float = 30.0) -> list[T]:
        """Block until every rank's function has ended.

        Returns:
            What each returned, by rank.

        Raises:
            RankFailedError: some raised, died or had to be killed after ``timeout_s``.
        """
        outcomes = self.outcomes(timeout_s)
        if not all(outcome.ok for outcome in outcomes):
            raise RankFailedError(self._name, outcomes)
        return [outcome.value for outcome in outcomes]

    def release(self) -> list[Worker]:
        """Take the processes, all of them idle, out of this object's hands."""
        released, self._workers = self._workers, []
        return released

    def close(self) -> None:
        """Kill the processes that are still this object's."""
        for worker in self.release():
            worker.stop()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _running(self) -> list[int]:
        return [rank for rank in range(len(self._workers)) if rank not in self._outcomes]

    def _pump(self, deadline: Deadline) -> bool:
        """Take what running ranks have sent; False when nothing came before the deadline."""
        sources: dict[Any, int] = {}
        for rank in self._running():
            worker = self._workers[rank]
            # The sentinel, too: a child that the rank forked may hold its end of the pipe open.
            sources |= {worker.connection: rank, worker.process.sentinel: rank}
        ready = connection.wait(list(sources), deadline.remaining_s)
        for rank in {sources[source] for source in ready}:
            self._take(rank)
        return bool(ready)

    def _take(self, rank: int) -> None:
        worker = self._workers[rank]
        # Asked before the pipe is read, so that the last words of one that has gone are read.
        gone = not worker.process.is_alive()
        try:
            while rank not in self._outcomes and worker.connection.poll():
                message: Report | Outcome = pickle.loads(worker.connection.recv_bytes())
                if isinstance(message, Report):
                    self._reports[rank].append(message)
                else:
                    self._finish(message)
        except (EOFError, ConnectionResetError):
            worker.dump_and_end()  # it closed its pipe: it has gone, or can say no more
            gone = True
        if gone and rank not in self._outcomes:
            self._finish(Outcome(rank, exit_code=worker.process.exitcode))

    def _finish(self, outcome: Outcome) -> None:
        output = self._workers[outcome.rank].output
        self._outcomes[outcome.rank] = replace(
            outcome, stdout=output("stdout"), stderr=output("stderr")
        )


def run_fresh(
    function: Callable[[int, int, Store, *Ts], T],
    world_size: int,
    *args: *Ts,
    limit_s: float = LIMIT_S,
) -> RankProcesses[T]:
    """Start ``function(rank, world_size, store, *args)`` on new processes, and do not wait for it.

    ``limit_s`` is that of `RankProcesses`. For tests that stop or kill ranks::

        with run_fresh(train, 4, plan) as ranks:
            ranks.wait_for(1, "half way")       # train calls report("half way")
            ranks.kill(1)
            outcomes = ranks.outcomes(timeout_s=10)

    Raises:
        UsageError: the function cannot be found by its name.
    """
    return RankProcesses(Job.of(function, args), start_workers(world_size), limit_s)


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
