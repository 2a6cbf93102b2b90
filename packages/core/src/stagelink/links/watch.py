"""Failures that no connection brings: the abort key in the store.

Neither the reading thread nor a caller waits for the store, which may have gone without a word.
"""

from __future__ import annotations

import threading
import time

from stagelink.control.framing import encode
from stagelink.control.plane import Plane
from stagelink.control.rendezvous import Rendezvous
from stagelink.deadline import Deadline
from stagelink.errors import StagelinkError

_EVERY_S = 1.0


class AbortWatch:
    """Writes this rank's failure into the store, and finds those of others."""

    def __init__(self, plane: Plane, rendezvous: Rendezvous) -> None:
        self._plane = plane
        self._rendezvous = rendezvous
        self._looking: threading.Event | None = None
        self._telling: threading.Event | None = None
        self._last_look = 0.0
        plane.failure.on_failure(self._on_failure)
        plane.reader.on_long_wait = self.look

    def look(self) -> None:
        """Have the abort key looked at, at most once a second; returns at once."""
        now = time.monotonic()
        if now - self._last_look < _EVERY_S:
            return
        if self._looking is None or self._looking.is_set():
            self._last_look = now
            self._looking = self._rendezvous.find_failure(self._plane.failure.fail_as_told)

    def _on_failure(self, cause: StagelinkError) -> None:
        del cause
        self._rendezvous.cut()
        self._telling = self._rendezvous.tell_failure(encode(self._plane.failure.cause).decode())

    def finish(self, deadline: Deadline) -> None:
        """Wait until a failure of this rank is in the store, or the deadline."""
        if self._telling is not None:
            self._telling.wait(deadline.remaining_s)
