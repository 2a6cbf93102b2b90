"""Functions run as the ranks of a pipeline, each in a thread of this process."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from torch.distributed import HashStore

from stagelink.deadline import Deadline
from stagelink.testing.outcome import Outcome, RankFailedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

__all__ = ["run_threads"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _RankThread(threading.Thread):
    """One rank; ``run`` keeps what the function returned or raised."""

    def __init__(self, rank: int, call: Callable[[int], Any]) -> None:
        # A daemon, so that one which hangs cannot hold up the end of the process.
        super().__init__(name=f"rank {rank}", daemon=True)
        self.rank = rank
        self.value: Any = None
        self.error: BaseException | None = None
        self._call = call

    def run(self) -> None:
        try:
            self.value = self._call(self.rank)
        except BaseException as error:  # handed to the thread that waits
            self.error = error

    def outcome(self, waited_s: float) -> Outcome:
        if self.is_alive():
            return Outcome(self.rank, hung_s=waited_s, stderr=self._stack())
        if self.error is not None:
            return Outcome(self.rank, error="".join(traceback.format_exception(self.error)))
        return Outcome(self.rank, value=self.value)

    def _stack(self) -> str:
        frame = sys._current_frames().get(self.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else ""


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
        _RankThread(rank, lambda rank: function(rank, world_size, store, *args))
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    deadline = Deadline(timeout_s)
    for thread in threads:
        thread.join(deadline.remaining_s)
    outcomes = [thread.outcome(timeout_s) for thread in threads]
    if not all(outcome.ok for outcome in outcomes):
        cause = next((thread.error for thread in threads if thread.error), None)
        raise RankFailedError(function.__qualname__, outcomes) from cause
    return [outcome.value for outcome in outcomes]
