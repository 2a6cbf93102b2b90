"""Parts of a payload, of which each goes over a stream of its own."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from stagelink.transport.contract import Done

__all__ = ["LEAST_PART_BYTES", "Told", "Whole", "split"]

LEAST_PART_BYTES = 512 * 1024
"""A smaller part costs more on a stream of its own than it saves."""


class Told(Protocol):
    """Listener for the end of a part, or of a message: it is through, or has failed."""

    def __call__(self) -> None:
        """Take note that it is through."""

    def failed(self, error: BaseException) -> None:
        """Take note that it never will be."""


def split(payload_bytes: int, streams: int) -> list[tuple[int, int]]:
    """Split a payload over streams: begin and end of each part, in the order of the streams.

    The same on both ends. One part at least, also of nothing; of several each has
    `LEAST_PART_BYTES` at least.
    """
    count = max(1, min(streams, payload_bytes // LEAST_PART_BYTES))
    ends = [payload_bytes * number // count for number in range(count + 1)]
    return list(itertools.pairwise(ends))


class Whole:
    """Tells of a message when each of its parts is through, or of the first that failed.

    Args:
        done: the message's.
        parts: how many.
    """

    def __init__(self, done: Done, parts: int) -> None:
        self._done = done
        self._left = parts
        self._lock = threading.Lock()

    def __call__(self) -> None:
        """Count a part that is through."""
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._done()

    def failed(self, error: BaseException) -> None:
        """Fail the message, as a part never will be through."""
        with self._lock:
            first, self._left = self._left > 0, -1
        if first:
            self._done.failed(error)
