"""Failures that no connection brings: the abort key in the store.

The reading thread never touches the store, whose client locks for seconds behind another thread's
call. Both directions are therefore short-lived threads with a client of their own. They are no
`threading.Thread`, whose ``start`` waits for a sign of the new thread: where memory is short, as
it may be when a rank fails, the sign never comes.
"""

from __future__ import annotations

import _thread
import logging
import threading
import time
from typing import TYPE_CHECKING

from stagelink.control.fields import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from stagelink.control.plane import Plane
    from stagelink.control.rendezvous import Rendezvous
    from stagelink.errors import StagelinkError

__all__ = ["AbortWatch"]

logger = logging.getLogger("stagelink")
_EVERY_S = 1.0


class AbortWatch:
    """Writes this rank's failure into the store, and finds those of others.

    Args:
        plane: the control plane to fail.
        rendezvous: the job's store.
    """

    def __init__(self, plane: Plane, rendezvous: Rendezvous) -> None:
        self._plane = plane
        self._client = rendezvous.client()
        self._lock = threading.Lock()
        self._under_way: set[threading.Event] = set()
        self._last_look = 0.0
        plane.on_failure(self._on_failure)
        plane.turns.on_long_wait = self.look

    def look(self) -> None:
        """Have the abort key looked at, at most once a second; returns at once."""
        now = time.monotonic()
        if now - self._last_look >= _EVERY_S and not self._under_way:
            self._last_look = now
            self._start(self._find)

    def _on_failure(self, cause: StagelinkError) -> None:
        del cause
        text = encode(self._plane.cause).decode()
        self._start(lambda: self._client.tell_failure(text))

    def _find(self) -> None:
        text = self._client.failure()
        if text is not None:
            self._plane.fail_as_told(decode(text))

    def _start(self, work: Callable[[], None]) -> None:
        done = threading.Event()

        def run() -> None:
            try:
                with self._lock:
                    work()
            except (RuntimeError, MemoryError) as error:
                # The store is gone, as it may be at the end of a job.
                logger.debug("rank %d: the store does not answer: %s", self._plane.rank, error)
            finally:
                self._under_way.discard(done)
                done.set()

        self._under_way.add(done)
        try:
            _thread.start_new_thread(run, ())
        except (RuntimeError, MemoryError) as error:  # peers hear of a failure all the same
            self._under_way.discard(done)
            logger.warning("rank %d: no thread to reach the store: %s", self._plane.rank, error)

    def finish(self, seconds: float) -> None:
        """Give what is under way a moment."""
        for done in tuple(self._under_way):
            done.wait(seconds)
