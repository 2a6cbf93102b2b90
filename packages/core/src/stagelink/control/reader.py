"""The reader of a rank, by leader/followers: one thread at a time reads, and it reads for all.

A caller that waits for something takes the role, so what it waits for reaches it without a change
of threads; the others sleep until something has changed. While no caller waits, a standby thread
watches, without the role, and takes a turn when something has come; it watches only when nobody
has called for a moment, so callers that wait often are not disturbed by it.

A signal handler may raise between any two steps of the main thread's, after a call has returned
as well as within it. So nothing here is let go by hand and taken again, no `threading.Condition`
is used, whose ``wait`` does just that, and what must be undone is undone by single assignments and
single calls into C, between which no handler runs.
"""

from __future__ import annotations

import enum
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from stagelink.control.watches import Action, Bell, Waker, Watch, Watches, event_mask
from stagelink.deadline import Deadline
from stagelink.transport.modes import outside_modes

_GRACE_S = 0.001
"""Time from the last call until the standby comes in."""

_UNREAD_S = 0.002
"""Time from the last turn until it comes in where calls keep coming and none of them reads."""

_LOOK_S = 1.0
"""How often those who sleep look by themselves, should a signal have swallowed a wake-up."""

_LONG_S = 2.0
_WAKE_AGAIN_S = 0.1
_MOST_TURNS_OF_CALLS = 16
"""So many turns of nothing but calls, and the last of them looks at descriptors as well."""

_SHORT_WAITS = 3
"""So many waits in a row that were shorter than a spin, and the next one spins."""


class _Phase(enum.Enum):
    """What a thread does that reads, or watches."""

    AWAY = enum.auto()
    BLOCKED = enum.auto()
    DISPATCHING = enum.auto()
    PARKED = enum.auto()


_AWAY, _BLOCKED, _DISPATCHING, _PARKED = _Phase  # an enum's attribute is slow


def _ring(bells: set[Bell], reader: Bell | None) -> None:
    """Wake everybody but the one who reads."""
    for bell in tuple(bells):
        if bell is not reader:
            bell.ring()


class Reader:
    """Reads what comes for one rank, on whichever thread waits, and wakes the others.

    On Linux's epoll itself: a layer above it costs as much again for every message.
    """

    def __init__(self, name: str) -> None:
        self.lock = threading.RLock()  # guards everything that a ``ready`` looks at
        # called about once a second in long waits, without the lock, by each
        self.on_long_wait: Callable[[], None] | None = None
        # called on the reading thread with what went wrong in a turn; may raise it
        self.on_error: Callable[[BaseException], None] | None = None
        self.spin_s = 0.0  # seconds that a turn may poll before it blocks
        self.ending = False  # a failure or a close; only then is a wait's ``check`` called
        self._reader: Bell | None = None
        self._phase = _AWAY
        self._waiting: set[Bell] = set()
        self._bells: list[Bell] = []  # to be used again: to make one costs as much as a look
        # Monotonic moment at which a caller was last active, which callers that do not wait set
        # too: the standby stays away for a moment.
        self.last_call_s = self._last_turn = 0.0
        self._short_waits = self._turns_of_calls = 0
        self._alarms: dict[Callable[[], None], float] = {}
        self._alarm_s = math.inf
        self._ready: dict[int, Callable[[int], None]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._epoll = select.epoll()
        self._watches = Watches(self._epoll, self._ready)
        self._watcher = select.poll()
        self._watcher.register(self._epoll.fileno(), select.POLLIN)
        self._waker = Waker()
        self.add(self._waker.sock, self._waker.hear)
        self._standby = threading.Thread(target=self._stand_by, name=name, daemon=True)
        self._standby_phase = _AWAY
        self._idle = Bell()
        self._stopped = False

    # -- what is read

    def add(self, sock: socket.socket, ready: Callable[[int], None]) -> None:
        """Call ``ready(mask)`` whenever the socket can be read, or written if that is watched."""
        self._ready[sock.fileno()] = ready
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def watch_writes(self, sock: socket.socket, *, wanted: bool) -> None:
        """Set whether to call also when the socket can be written; in force at once."""
        if sock.fileno() >= 0:
            self._epoll.modify(sock.fileno(), event_mask(writes=wanted))

    def remove(self, sock: socket.socket) -> None:
        """Forget a socket; silent when that was done already, or it is closed."""
        if sock.fileno() >= 0 and self._ready.pop(sock.fileno(), None) is not None:
            self._epoll.unregister(sock.fileno())

    def watch(
        self,
        fd: int,
        action: Action,
        on_error: Callable[[BaseException], None],
        *,
        writable: bool = False,
    ) -> Watch:
        """Have somebody else's descriptor watched, until `unwatch`; from any thread.

        The action is called in the next turn, and whenever the descriptor is ready; once, however
        many watch with the same action, for a descriptor may be watched more than once. It returns
        whether it is to be called in the next turn too. What it raises is given to ``on_error``,
        and ends the watch. `OSError` where it is no descriptor that can be watched.
        """
        watch = Watch(fd, action, on_error, writable)
        self._watches.begin(watch)
        self._wake_blocked()
        return watch

    def unwatch(self, watch: Watch) -> None:
        """End a watch, once or more often. From any thread, without a lock its action takes.

        When it returns no call of the action for this watch runs on another thread, or begins.
        """
        self._watches.end(watch)

    def call(self, action: Callable[[], None]) -> None:
        """Call ``action()`` in the next turn; from any thread, a finalizer too: takes no lock."""
        self._calls.append(action)
        self._wake_blocked()

    def call_at(self, moment_s: float, action: Callable[[], None]) -> None:
        """Call ``action()`` once, in the turn after that moment of the monotonic clock.

        And at no moment that was given for it before; from any thread.
        """
        with self.lock:
            self._alarms[action] = moment_s
            sooner = moment_s < self._alarm_s
            self._alarm_s = min(self._alarms.values())
        if sooner:
            self._wake_blocked()

    @property
    def blocked(self) -> bool:
        """Whether a thread would have to be woken to be told of a moment."""
        return self._phase is _BLOCKED or self._standby_phase is _BLOCKED

    # -- who reads

    def start(self) -> None:
        """Start the standby thread."""
        self._standby.start()

    def stop(self, deadline: Deadline) -> None:
        """End the standby thread and wait for it; callers that still wait go on by themselves."""
        self._stopped = True
        self._idle.ring()
        if threading.current_thread() is self._standby:
            return
        # Again and again: a caller that still reads may swallow a wake-up.
        while self._standby.is_alive() and not deadline.passed:
            self._waker.woken = False
            self._waker.wake()
            self._standby.join(min(_WAKE_AGAIN_S, deadline.remaining_s))

    def changed(self) -> None:
        """Have every waiting caller look again; from any thread, returns at once."""
        with self.lock:
            if not self._waiting:
                return
            reader = self._reader
            if len(self._waiting) > 1 or reader not in self._waiting:
                _ring(self._waiting, reader)
            # Who is dispatching looks again by itself. The same thread in a signal handler, which
            # interrupted its wait, goes on waiting.
            if reader in self._waiting and not (
                self._phase is _DISPATCHING and reader.thread == threading.get_ident()
            ):
                self._waker.wake()

    def wait(  # noqa: C901 - no frame more for each message
        self,
        ready: Callable[[], bool],
        deadline: Deadline,
        check: Callable[[], None] = lambda: None,
    ) -> bool:
        """Block until ``ready()``, asked with the lock held, is true; False when time ran out.

        Signals interrupt it. An exception out of reading, ``ready`` or ``check`` ends it; the
        latter is called before each ``ready`` once there is something in it, see `ending`.
        """
        me: Bell | None = None
        try:
            with self.lock:
                self.last_call_s = began = time.monotonic()
                if self.ending:
                    check()
                if ready():
                    return True
                me = self._bells.pop() if self._bells else Bell()
                me.thread = threading.get_ident()
                # From now on a change rings: none is missed between two looks.
                self._waiting.add(me)
            long_from = began + _LONG_S
            while (left_s := deadline.end_s - time.monotonic()) > 0:
                if self._reader is None:
                    self._turn(me, min(left_s, _LOOK_S))
                else:
                    me.sleep(min(left_s, _LOOK_S))
                with self.lock:
                    if self.ending:
                        check()
                    if ready():
                        return True
                if self.on_long_wait is not None and time.monotonic() > long_from:
                    self.on_long_wait()
            return False
        finally:
            if me is not None:
                self._waiting.discard(me)
                self._bells.append(me)
                if self._standby_phase is _PARKED and not self._waiting:
                    self._idle.ring()

    @property
    def reads_here(self) -> bool:
        """Whether this thread has the role, and is dispatching what it read."""
        reader = self._reader
        return reader is not None and reader.thread == threading.get_ident()

    def _turn(self, me: Bell, timeout_s: float) -> None:
        """Take the role if it is free and nothing has changed meanwhile; read once; wake all."""
        try:
            with self.lock:
                if self._reader is None and not me.heard():
                    self._reader = me
            if self._reader is me:
                self._dispatch(self._poll(timeout_s))
        except BaseException as error:
            if self.on_error is None:
                raise
            self.on_error(error)
        finally:
            if self._reader is me:
                self._phase = _AWAY
                self._reader = None
                self._last_turn = time.monotonic()
                if len(self._waiting) > (me in self._waiting):
                    with self.lock:  # who has seen the role taken sleeps by now, or will hear it
                        _ring(self._waiting, me)

    def _stand_by(self) -> None:
        me = Bell(threading.get_ident())
        while not self._stopped:
            until = min(self.last_call_s + _GRACE_S, self._last_turn + _UNREAD_S)
            nap = until - time.monotonic()
            if nap > 0:
                self._idle.sleep(nap)
            elif self._waiting:
                # Through a long wait: to be woken costs the caller as much as a message.
                self._standby_phase = _PARKED
                if self._waiting:
                    self._idle.sleep(_LOOK_S)
                self._standby_phase = _AWAY
            else:
                self._wait_for_input()
                if not (self._waiting or self._stopped):
                    self._turn(me, 0.0)

    # -- one turn

    def _poll(self, timeout_s: float) -> list[tuple[int, int]]:
        """Wait for descriptors; spin first where the last waits were shorter than a spin.

        To be woken costs more than a small message. But where waits are long, a spin only takes
        the core from those who are waited for.
        """
        if self._calls:
            # To ask for descriptors too costs as much again; but calls that lead to others each
            # time must not hold them up.
            self._turns_of_calls = (self._turns_of_calls + 1) % _MOST_TURNS_OF_CALLS
            return [] if self._turns_of_calls else self._epoll.poll(0)
        began = time.monotonic()
        due, alarm_s = self._watches.due, self._alarm_s
        if due or alarm_s - began < timeout_s:
            timeout_s = 0.0 if due else max(0.0, alarm_s - began)
        spin_s = min(self.spin_s, timeout_s)
        if self._short_waits >= _SHORT_WAITS:
            while time.monotonic() - began < spin_s:
                events = self._epoll.poll(0)
                if events or self._calls or due or self._alarm_s < alarm_s:
                    return events
                os.sched_yield()
            timeout_s -= spin_s
        self._phase = _BLOCKED  # what is to be called from now on wakes us
        events = self._epoll.poll(
            0 if self._calls or due or self._alarm_s < alarm_s else timeout_s
        )
        self._phase = _AWAY
        if spin_s:
            short = time.monotonic() - began < spin_s
            self._short_waits = self._short_waits + 1 if short else 0
        return events

    def _dispatch(self, events: list[tuple[int, int]]) -> None:
        """Call what is ready and what is due; what that leads to waits for the next turn."""
        self._phase = _DISPATCHING
        for fd, mask in events:
            ready = self._ready.get(fd)
            if ready is not None:  # else what came before it in this turn has removed it
                ready(mask)
        if self._calls:
            with outside_modes():
                for _ in range(len(self._calls)):
                    self._calls.popleft()()
        if self._watches.due:
            self._watches.act()
        if self._alarm_s < math.inf and self._alarm_s <= time.monotonic():
            self._call_due(time.monotonic())

    def _call_due(self, now_s: float) -> None:
        with self.lock:
            due = [action for action, moment_s in self._alarms.items() if moment_s <= now_s]
            for action in due:
                del self._alarms[action]
            self._alarm_s = min(self._alarms.values(), default=math.inf)
        for action in due:
            action()

    def _wait_for_input(self) -> None:
        """Block until a turn would not, and read nothing."""
        self._standby_phase = _BLOCKED
        if not (self._calls or self._watches.due):
            left_s = max(0.0, self._alarm_s - time.monotonic())
            self._watcher.poll(None if left_s == math.inf else math.ceil(left_s * 1000))
        self._standby_phase = _AWAY

    # -- being woken

    def _wake_blocked(self) -> None:
        if self._phase is _BLOCKED or self._standby_phase is _BLOCKED:
            self._waker.wake()

    def close(self) -> None:
        """Give the descriptors back; what was added and watched is others' to close."""
        self._waker.close()
        self._epoll.close()

    def forget(self) -> None:
        """Give up, in a forked child, what it inherited, the lock included."""
        self.lock = threading.RLock()
        self._watches = Watches(self._epoll, {})
        self.close()
