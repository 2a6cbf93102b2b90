"""Failures that no connection brings: the abort key in the store.

The reading thread never touches the store, whose client locks for seconds behind another thread's
call. Both directions are therefore short-lived threads with a client of their own.
"""

from __future__ import annotations

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
        self._starting = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._last_look = 0.0
        plane.on_failure(self._on_failure)
        plane.turns.on_long_wait = self.look

    def look(self) -> None:
        """Have the abort key looked at, at most once a second; returns at once."""
        now = time.monotonic()
        if now - self._last_look >= _EVERY_S and not self._threads:
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
        def run() -> None:
            try:
                with self._lock:
                    work()
            except RuntimeError as error:  # the store is gone, as it may be at the end of a job
                logger.debug("rank %d: the store does not answer: %s", self._plane.rank, error)
            finally:
                self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="stagelink-abort-key", daemon=True)
        with self._starting:  # one that has not started cannot be waited for
            self._threads.add(thread)
            thread.start()

    def finish(self, seconds: float) -> None:
        """Give what is under way a moment."""
        with self._starting:
            threads = tuple(self._threads)
        for thread in threads:
            thread.join(seconds)
