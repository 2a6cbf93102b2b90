"""The time limit of a call that waits."""

from __future__ import annotations

import time

_MOST_S = 20 * 86400.0


class Deadline:
    """The moment at which a wait gives up.

    Args:
        seconds: from now; may be infinite.

    Attributes:
        end_s: that moment, by the monotonic clock.
    """

    __slots__ = ("end_s", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.end_s = time.monotonic() + seconds

    @property
    def remaining_s(self) -> float:
        """Seconds left, 0 when it has passed; 20 days at most, which `poll` can still count."""
        return min(max(0.0, self.end_s - time.monotonic()), _MOST_S)

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self.end_s
