"""Reading is a role: at any moment at most one thread reads, and it reads for everybody.

A caller that waits for something takes the role, so what it waits for reaches it without a change
of threads. While no caller waits, a stand-by thread watches, without the role, and takes a turn
when something has come; it watches only when nobody has called for a moment, so callers that wait
often are not disturbed by it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stagelink.transport.contract import Deadline

__all__ = ["Turns"]

_GRACE_S = 0.001
"""How long after the last call the stand-by comes in."""

_UNREAD_S = 0.002
"""How long after the last turn it comes in where calls keep coming and none of them reads."""

_LOOK_S = 1.0
_LONG_S = 2.0
_POKE_AGAIN_S = 0.1


def _nothing() -> None:
    pass


class Turns:
    """Who reads when.

    Args:
        read: reads and dispatches what is there, blocking up to the given seconds for something
            to come. Called by one thread at a time, without the lock.
        watch: blocks until there is something to read, and reads nothing.
        poke: makes a blocked ``read`` or ``watch`` return.
        dispatching: whether ``read`` has done with waiting and is dispatching.
        name: of the stand-by thread.

    Attributes:
        lock: guards everything that a ``ready`` looks at.
        on_long_wait: called about once a second, with the lock held, in a wait that has taken
            long.
    """

    def __init__(
        self,
        read: Callable[[float], None],
        watch: Callable[[], None],
        poke: Callable[[], None],
        dispatching: Callable[[], bool],
        name: str,
    ) -> None:
        self.lock = threading.RLock()
        self._read = read
        self._watch = watch
        self._poke = poke
        self._dispatching = dispatching
        self._changed = threading.Condition(self.lock)
        self._idle = threading.Condition(self.lock)
        self._waiting = 0
        self._turn_taken = False
        self._reader = 0
        self._caller_reads = False
        self._parked = False
        self._stopped = False
        self._last_call = 0.0
        self._last_turn = 0.0
        self.on_long_wait: Callable[[], None] | None = None
        self._standby = threading.Thread(target=self._stand_by, name=name, daemon=True)

    def start(self) -> None:
        """Start the stand-by thread."""
        self._standby.start()

    def stop(self, deadline: Deadline) -> None:
        """End the stand-by thread and wait for it; callers that still wait go on by themselves."""
        with self.lock:
            self._stopped = True
            self._idle.notify()
        if threading.current_thread() is self._standby:
            return
        # Again and again: a caller that still reads may swallow a poke.
        while self._standby.is_alive() and not deadline.passed:
            self._poke()
            self._standby.join(min(_POKE_AGAIN_S, deadline.remaining_s))

    def touch(self) -> None:
        """A caller is at work and will soon wait: the stand-by need not come in."""
        self._last_call = time.monotonic()

    def changed(self) -> None:
        """Have every waiting caller look again; from any thread, returns at once."""
        with self.lock:
            if self._waiting:
                self._changed.notify_all()
            # Who is dispatching looks again by itself. The same thread in a signal handler, which
            # interrupted its wait, goes on waiting.
            if self._caller_reads and not (self.reads_here and self._dispatching()):
                self._poke()

    def wait(
        self,
        ready: Callable[[], bool],
        deadline: Deadline,
        check: Callable[[], None] = _nothing,
    ) -> bool:
        """Block until ``ready()``, asked with the lock held, is true; False when time ran out.

        Signals interrupt it. An exception out of reading, ``ready`` or ``check`` ends it; the
        latter is called before each ``ready``.
        """
        with self.lock:
            self._last_call = time.monotonic()
            check()
            if ready():
                return True
            self._waiting += 1
            try:
                return self._wait(ready, deadline, check)
            finally:
                self._waiting -= 1
                if not self._waiting and self._parked:
                    self._idle.notify()

    def _wait(
        self, ready: Callable[[], bool], deadline: Deadline, check: Callable[[], None]
    ) -> bool:
        long_from = self._last_call + _LONG_S
        while (left_s := deadline.remaining_s) > 0:
            step = min(left_s, _LOOK_S)
            if self._turn_taken:
                self._changed.wait(step)
            else:
                self._caller_reads = True
                self._turn(step)
            check()
            if ready():
                return True
            if self.on_long_wait is not None and time.monotonic() > long_from:
                self.on_long_wait()
        return False

    @property
    def reads_here(self) -> bool:
        """Whether this thread has the role, and is dispatching what it read."""
        return self._turn_taken and self._reader == threading.get_ident()

    def _turn(self, step: float, waiting_here: int = 1) -> None:
        """Take the role, read once, wake the others; `waiting_here` of those that wait are us."""
        self._turn_taken = True
        self._reader = threading.get_ident()
        self.lock.release()
        try:
            self._read(step)
        finally:
            self.lock.acquire()
            self._turn_taken = self._caller_reads = False
            self._last_turn = time.monotonic()
            if self._waiting > waiting_here:
                self._changed.notify_all()

    def _stand_by(self) -> None:
        with self.lock:
            while not self._stopped:
                until = min(self._last_call + _GRACE_S, self._last_turn + _UNREAD_S)
                nap = until - time.monotonic()
                if nap > 0:
                    self._idle.wait(nap)
                elif self._waiting:
                    # Only in a long wait: to be woken costs the caller as much as a message.
                    self._parked = True
                    self._idle.wait()
                    self._parked = False
                else:
                    self._watch_and_read()

    def _watch_and_read(self) -> None:
        self.lock.release()
        try:
            self._watch()
        finally:
            self.lock.acquire()
        if not (self._waiting or self._turn_taken or self._stopped):
            self._turn(0.0, 0)
