"""Functions run as the ranks of a pipeline, each on a thread of this process."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, Generic, TypeVar, TypeVarTuple

from torch.distributed import HashStore, Store

from stagelink.deadline import Deadline
from stagelink.ranks.outcome import Outcome, RankFailedError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class RankThread(threading.Thread, Generic[T]):
    """One rank's function on a thread, named after it, that begins at once and keeps its outcome.

    A daemon, so that one which hangs in the user's code cannot hold up the process's end.
    """

    value: T  # what the function returned, when the thread has ended without an error

    def __init__(self, rank: int, call: Callable[[int], T]) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)
        self.rank = rank
        self.error: BaseException | None = None  # what it raised
        self._call = call
        self.start()

    def run(self) -> None:
        """Call the function."""
        try:
            self.value = self._call(self.rank)
        except BaseException as error:  # handed to the thread that waits
            self.error = error


def run_threads(
    function: Callable[[int, int, Store, *Ts], T],
    world_size: int,
    *args: *Ts,
    timeout_s: float = 30.0,
) -> list[T]:
    """Run ``function(rank, world_size, store, *args)`` on a thread per rank and wait for all.

    The ranks share one store in memory. A thread that hangs cannot be ended: it stays behind.

    Returns:
        What each returned, by rank.

    Raises:
        RankFailedError: some raised (the first one's exception is the cause), or still ran after
            ``timeout_s``; the text has every traceback and the stacks of those that hang.
    """
    store = HashStore()
    threads = [
        RankThread(rank, lambda rank: function(rank, world_size, store, *args))
        for rank in range(world_size)
    ]
    deadline = Deadline(timeout_s)
    for thread in threads:
        thread.join(deadline.remaining_s)
    outcomes = [_outcome(thread, timeout_s) for thread in threads]
    if not all(outcome.ok for outcome in outcomes):
        cause = next((thread.error for thread in threads if thread.error), None)
        raise RankFailedError(function.__qualname__, outcomes) from cause
    return [outcome.value for outcome in outcomes]


def _outcome(thread: RankThread[Any], waited_s: float) -> Outcome:
    if thread.is_alive():
        frame = sys._current_frames().get(thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame else ""
        return Outcome(thread.rank, hung_s=waited_s, stderr=stack)
    if thread.error is not None:
        return Outcome.raised_by(thread.rank, thread.error)
    return Outcome(thread.rank, value=thread.value)
