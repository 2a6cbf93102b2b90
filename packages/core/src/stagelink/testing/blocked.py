"""Calls of a transport that do not return: told while they block, with the line at which they do.

A call that never returns could tell nothing afterwards, and nor could its rank, which may hang for
good. So a thread looks on, and reports it: the other rank ends with that report as the cause.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import CodeType, FrameType, TracebackType
from typing import Self

from stagelink.control.reader import Reader
from stagelink.transport.contract import Port

_READING = Reader._turn.__code__
_MOST_LOOKS = 10
"""Looks in the time that a call has."""

_MOST_PLACES = 3
_STOP_S = 2.0


class Call:
    """One call with a time limit: a context manager around it, in the frame that makes it.

    It has ``limit_s``, beside the patience. While it blocks the ``port``, if there is one, fails
    the handler. Of a ``silent`` one, what it raises is noted and goes no further.
    """

    def __init__(
        self, calls: Calls, name: str, limit_s: float, port: Port | None, *, silent: bool = False
    ) -> None:
        self.name = name
        self.port = port
        self.thread = threading.current_thread()
        self.limit_s = limit_s
        self.frame: FrameType | None = None
        self.where = ""  # it is, once it has taken for long
        self.told = False  # that it blocks
        self.leads_on = False  # to another call of the transport, in which it blocks
        self._calls = calls
        self._silent = silent

    def __enter__(self) -> Self:
        self.frame = sys._getframe(1)
        self._began_s = time.monotonic()
        self._calls.begin(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self._calls.end(self)
        self.frame = None
        if self.late and not self.leads_on:
            where = "" if self.told else self.where
            took = f"{self.name} took {self.age_s:.1f} s, it had {self.limit_s:g} s{where}"
            self._calls.broke(took)
        if not self._silent or not isinstance(error, Exception):
            return False
        self._calls.broke(f"{self.name} raised {type(error).__name__}: {error}")
        return True

    @property
    def age_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began_s

    @property
    def late(self) -> bool:
        """Whether it has taken longer than its limit and the patience."""
        return self.age_s > self.limit_s + self._calls.patience_s

    @property
    def slow(self) -> bool:
        """Whether it has taken half of that."""
        return self.age_s > self.limit_s + self._calls.patience_s / 2


class Calls:
    """Calls in progress on one rank, and the thread that looks at them.

    Args:
        patience_s: seconds beyond its limit after which a call counts as blocked.
        broke: notes a text; gives the error for it.
        leads: names of the calls to core out of which it may begin a message, by their code.
    """

    def __init__(
        self,
        patience_s: float,
        broke: Callable[[str], AssertionError],
        leads: Mapping[CodeType, str],
    ) -> None:
        self.patience_s = patience_s
        self.broke = broke
        self._leads = leads
        self._running: dict[Call, None] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="contract check", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End it, if it was started."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_S)

    def begin(self, call: Call) -> None:
        """Look at a call until its `end`."""
        self._running[call] = None

    def end(self, call: Call) -> None:
        """Look at it no more: it has returned."""
        self._running.pop(call, None)

    def _look(self) -> None:
        while not self._stopped.wait(self.patience_s / _MOST_LOOKS):
            innermost = {call.thread: call for call in tuple(self._running)}
            for call in tuple(self._running):
                frame, inner = call.frame, innermost.get(call.thread, call)
                if frame is None or not call.slow or call.told:
                    continue
                if inner is not call:
                    call.leads_on = inner.slow
                    continue
                call.where = self._where(call, frame)
                if call.late:
                    call.told = True
                    error = self.broke(
                        f"{call.name} has blocked for {call.age_s:.1f} s{call.where}"
                    )
                    sys.stderr.write(f"against the contract: {error}\n")  # if all ranks hang
                    if call.port is not None:
                        with suppress(Exception):  # it has failed, or is closed
                            call.port.fail(error)

    def _where(self, call: Call, frame: FrameType) -> str:
        inner = sys._current_frames().get(call.thread.ident or 0)
        within: list[str] = []
        while inner is not None and inner is not frame:
            if not inner.f_globals.get("__name__", "").startswith("stagelink."):
                within.insert(0, _place(inner))
            inner = inner.f_back
        outer = _outside(frame)
        reads = any(one.f_code is _READING for one in outer)
        on = f"thread {call.thread.name!r}" + (", which reads for everybody," if reads else "")
        where = f" on {on} in {' → '.join(within[-_MOST_PLACES:])}"
        lead = next((one for one in outer if one.f_code in self._leads), None)
        if lead is None or lead.f_back is None:
            return where
        return (
            f"{where}; core called it in the {self._leads[lead.f_code]} of {_place(lead.f_back)}, "
            "where no lock may be held that it takes"
        )


def _outside(frame: FrameType) -> list[FrameType]:
    return [one for one, _ in traceback.walk_stack(frame)][1:]


def _place(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})"
