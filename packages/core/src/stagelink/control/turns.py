"""Reading is a role: at any moment at most one thread reads, and it reads for everybody.

A caller that waits for something takes the role, so what it waits for reaches it without a change
of threads. While no caller waits, a stand-by thread watches, without the role, and takes a turn
when something has come; it watches only when nobody has called for a moment, so callers that wait
often are not disturbed by it.

A signal handler may raise between any two steps of the main thread's, after a call has returned
as well as within it. So nothing here is let go by hand and taken again, no `threading.Condition`
is used, whose ``wait`` does just that, and what must be undone is undone by single assignments and
single calls into C, between which no handler runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from stagelink.transport.interrupts import stops_caller

if TYPE_CHECKING:
    from stagelink.deadline import Deadline

__all__ = ["Turns"]

_GRACE_S = 0.001
"""How long after the last call the stand-by comes in."""

_UNREAD_S = 0.002
"""How long after the last turn it comes in where calls keep coming and none of them reads."""

_LOOK_S = 1.0
"""How often those who sleep look by themselves, should a signal have swallowed a wake-up."""

_LONG_S = 2.0
_POKE_AGAIN_S = 0.1


def _nothing() -> None:
    pass


class _Bell:
    """One thread's wake-up call, which is kept for it while it is not asleep.

    Attributes:
        thread: whose it is.
    """

    __slots__ = ("_rung", "thread")

    def __init__(self, thread: int = 0) -> None:
        self.thread = thread
        self._rung = threading.Lock()
        self._rung.acquire(blocking=False)

    def ring(self) -> None:
        """Wake its thread, or have its next `sleep` return at once; from any thread."""
        try:
            self._rung.release()
        except RuntimeError as error:  # it has been rung, and not heard yet
            if stops_caller(error):
                raise

    def sleep(self, timeout_s: float) -> bool:
        """Block until it is rung; False when time ran out. Signals interrupt it."""
        return self._rung.acquire(timeout=timeout_s)

    def heard(self) -> bool:
        """Whether it was rung since this, or `sleep`, was last called; never blocks."""
        return self._rung.acquire(blocking=False)


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
        on_long_wait: called about once a second, without the lock, in a wait that has taken
            long; from several threads, if several wait.
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
        self._waiting: set[_Bell] = set()
        self._reader: _Bell | None = None
        self._parked = False
        self._stopped = False
        self._last_call = 0.0
        self._last_turn = 0.0
        self.on_long_wait: Callable[[], None] | None = None
        self._standby = threading.Thread(target=self._stand_by, name=name, daemon=True)
        self._idle = _Bell()

    def start(self) -> None:
        """Start the stand-by thread."""
        self._standby.start()

    def stop(self, deadline: Deadline) -> None:
        """End the stand-by thread and wait for it; callers that still wait go on by themselves."""
        self._stopped = True
        self._idle.ring()
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
            reader = self._reader
            self._wake(reader)
            # Who is dispatching looks again by itself. The same thread in a signal handler, which
            # interrupted its wait, goes on waiting.
            if reader in self._waiting and not (self.reads_here and self._dispatching()):
                self._poke()

    def _wake(self, reader: _Bell | None) -> None:
        if self._waiting:
            for bell in tuple(self._waiting):
                if bell is not reader:
                    bell.ring()

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
        me: _Bell | None = None
        try:
            with self.lock:
                self._last_call = began = time.monotonic()
                check()
                if ready():
                    return True
                me = _Bell(threading.get_ident())
                # From now on a change rings: none is missed between two looks.
                self._waiting.add(me)
            long_from = began + _LONG_S
            while (left_s := deadline.remaining_s) > 0:
                self._read_or_sleep(me, min(left_s, _LOOK_S))
                with self.lock:
                    check()
                    if ready():
                        return True
                if self.on_long_wait is not None and time.monotonic() > long_from:
                    self.on_long_wait()
            return False
        finally:
            if me is not None:
                self._waiting.discard(me)
                if self._parked and not self._waiting:
                    self._idle.ring()

    def _read_or_sleep(self, me: _Bell, step_s: float) -> None:
        if self._reader is not None:
            me.sleep(step_s)
        else:
            self._turn(me, step_s)

    @property
    def reads_here(self) -> bool:
        """Whether this thread has the role, and is dispatching what it read."""
        reader = self._reader
        return reader is not None and reader.thread == threading.get_ident()

    def _turn(self, me: _Bell, step_s: float) -> None:
        """Take the role if it is free and nothing has changed meanwhile; read once; wake all."""
        try:
            with self.lock:
                if self._reader is None and not me.heard():
                    self._reader = me
            if self._reader is me:
                self._read(step_s)
        finally:
            if self._reader is me:
                self._reader = None
                self._last_turn = time.monotonic()
                if len(self._waiting) > (me in self._waiting):
                    with self.lock:  # who has seen the role taken sleeps by now, or will hear it
                        self._wake(me)

    def _stand_by(self) -> None:
        me = _Bell(threading.get_ident())
        while not self._stopped:
            until = min(self._last_call + _GRACE_S, self._last_turn + _UNREAD_S)
            nap = until - time.monotonic()
            if nap > 0:
                self._idle.sleep(nap)
            elif self._waiting:
                self._park()
            else:
                self._watch()
                if not (self._waiting or self._stopped):
                    self._turn(me, 0.0)

    def _park(self) -> None:
        """Sleep through a long wait: to be woken costs the caller as much as a message."""
        self._parked = True
        if self._waiting:
            self._idle.sleep(_LOOK_S)
        self._parked = False
