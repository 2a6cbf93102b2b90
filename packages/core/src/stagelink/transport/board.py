"""Exchange by a store: polling for what another has still to write there."""

from __future__ import annotations

import time
from collections.abc import Callable

from stagelink.deadline import Deadline
from stagelink.transport.contract import Port

_PAUSE_S = (0.002, 0.05)
_LINK_PAUSE_S = 0.005


def look_until(
    found: Callable[[], bool],
    deadline: Deadline,
    *,
    sleep: Callable[[float], object] = time.sleep,
    most_s: float = _PAUSE_S[1],
) -> bool:
    """Poll until something is found, in pauses that are shorter at first; a signal interrupts it.

    Args:
        found: looks; what it raises ends it.
        deadline: for it; there is a last look when it has passed.
        sleep: pauses for so many seconds.
        most_s: the longest pause.

    Returns:
        Whether it was found; False when time ran out.
    """
    pause_s = _PAUSE_S[0]
    while not found():
        if deadline.passed:
            return False
        sleep(min(pause_s, deadline.remaining_s))
        pause_s = min(2 * pause_s, most_s)
    return True


class Board:
    """Exchange between the two ends of a link, in the store of their pair.

    Args:
        port: of this end.
        deadline: for all that is waited for.
        prefix: of every key; the store is the pair's, and so of links in both directions.

    Attributes:
        store: the store.
    """

    def __init__(self, port: Port, deadline: Deadline, prefix: str = "") -> None:
        self.store = port.store()
        self._port = port
        self._deadline = deadline
        self._prefix = prefix

    def put(self, key: str, value: str) -> None:
        """Give a key its value."""
        self.store.set(self._prefix + key, value)

    def take(self, key: str, missing: str) -> str:
        """The value of a key, which it waits for; a failure of the pipeline ends the wait.

        Raises:
            TimeoutError: it did not come by the deadline; the text says what is ``missing``.
        """
        self.look_until(lambda: self.store.check([self._prefix + key]), missing)
        return self.store.get(self._prefix + key).decode()

    def look_until(self, found: Callable[[], bool], missing: str) -> None:
        """Poll until something is found, as `take` does; ``found`` must not block.

        Raises:
            TimeoutError: it was not, by the deadline.
        """
        if not look_until(
            found,
            self._deadline,
            sleep=lambda seconds: self._port.wait(lambda: False, Deadline(seconds)),
            most_s=_LINK_PAUSE_S,
        ):
            raise TimeoutError(
                f"rank {self._port.rank}: {missing} within {self._deadline.seconds:g} s"
            )
