"""Streams of the double: each a thread that does its operations in order, with random delays."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from tests.cupy.codes import CUDARuntimeError, Status

if TYPE_CHECKING:
    from tests.cupy.machine import Gpu

__all__ = ["Progress", "Stream"]

_POLL_S = 0.0001
_LONGEST_POLL_S = 0.001


class Progress:
    """What all threads of one double wait on.

    Attributes:
        changed: held while something changes, told when it has.
        error: what ended the device's work for good; 0 as long as nothing has.
        closing: the double is being closed.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.error = 0
        self.closing = False

    @property
    def ended(self) -> bool:
        return bool(self.error) or self.closing

    def fail(self, status: int) -> None:
        with self.changed:
            self.error = self.error or status
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closing = True
            self.changed.notify_all()

    def until(self, ready: Callable[[], bool]) -> bool:
        """Block until it is so; False if all work ended before.

        Another process tells nobody: so this looks, ever more seldom.
        """
        poll_s = _POLL_S
        with self.changed:
            while not ready():
                if self.ended:
                    return False
                self.changed.wait(poll_s)
                poll_s = min(2 * poll_s, _LONGEST_POLL_S)
        return True

    def must(self, ready: Callable[[], bool]) -> None:
        """Block until it is so.

        Raises:
            CUDARuntimeError: all work ended before.
        """
        if not self.until(ready) or self.ended:
            raise CUDARuntimeError(self.error or Status.cudaErrorCudartUnloading)


class _Operation(NamedTuple):
    ready: Callable[[], bool]
    act: Callable[[], None]


def _always() -> bool:
    return True


def _nothing() -> None:
    pass


class Stream:
    """A queue of operations and the thread that does them.

    Args:
        progress: of the double.
        gpu: of which it is.
        seed: of its delays.
        delay_s: the longest of them; every other operation has none.
    """

    def __init__(self, progress: Progress, gpu: Gpu, seed: str, delay_s: float) -> None:
        self.gpu = gpu
        self.paused = False
        self._progress = progress
        self._random = random.Random(seed)
        self._delay_s = delay_s
        self._queue: deque[_Operation] = deque()
        self._pushed = self._finished = 0
        self._destroyed = False
        # A daemon, so that a test that fails can end its process.
        self._thread = threading.Thread(target=self._run, name=f"stream {seed}", daemon=True)
        self._thread.start()

    def push(
        self, *, ready: Callable[[], bool] = _always, act: Callable[[], None] = _nothing
    ) -> None:
        """Add an operation, which is done once it is its turn and it is ready."""
        with self._progress.changed:
            self._queue.append(_Operation(ready, act))
            self._pushed += 1
            self._progress.changed.notify_all()

    @property
    def idle(self) -> bool:
        return self._finished == self._pushed

    def until_now(self) -> Callable[[], bool]:
        """Asks whether all is done that has been pushed up to this call."""
        pushed = self._pushed
        return lambda: self._finished >= pushed

    def destroy(self) -> None:
        """Have the thread end once it has nothing to do."""
        with self._progress.changed:
            self._destroyed = True
            self._progress.changed.notify_all()

    def join(self) -> None:
        """Wait for the thread's end: after `destroy`, or after the close of the progress."""
        self._thread.join()
        self._queue.clear()

    def _run(self) -> None:
        while (operation := self._next()) is not None:
            self._delay()
            # What comes after an error is not done, and holds nobody up.
            if self._progress.until(operation.ready) and not self._progress.ended:
                operation.act()
            with self._progress.changed:
                self._finished += 1
                self._progress.changed.notify_all()

    def _next(self) -> _Operation | None:
        changed, progress = self._progress.changed, self._progress
        with changed:
            changed.wait_for(
                lambda: progress.closing or (self._queue and not self.paused) or self._destroyed
            )
            # One that is destroyed does what it has to do first, and cannot be paused any more.
            if progress.closing or not self._queue:
                return None
            return self._queue.popleft()

    def _delay(self) -> None:
        delay_s = self._random.choice((0.0, self._random.uniform(0, self._delay_s)))
        changed, progress = self._progress.changed, self._progress
        if delay_s:
            with changed:
                changed.wait_for(lambda: progress.ended, delay_s)
