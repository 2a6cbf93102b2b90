"""The order of closing: nothing of one end is given back while the other may have it open.

To close it waits for the whole device, in CuPy with the interpreter's lock. After a failure
anything may be stuck on the device, so then nothing is closed or given back: it goes with its
process.
"""

from __future__ import annotations

import logging
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from stagelink.errors import StagelinkError
from stagelink.transport.contract import Deadline

if TYPE_CHECKING:
    from stagelink.transport.contract import Port
    from stagelink_cupy.region import Region

__all__ = ["Holding"]

logger = logging.getLogger("stagelink")
_CLOSED = b"c"
_LONGEST_LOOK_S = 0.002
_LONGEST_WAIT_S = 86400.0


class Holding:
    """Device memory and events of one end of a link, until nobody uses them any more.

    The ends tell each other that they have closed by a socket of their own: notes no longer arrive
    then, and this one also says when the other has died.

    Args:
        port: of the link.
        region: what is held.

    Attributes:
        region: as given.
    """

    def __init__(self, port: Port, region: Region) -> None:
        self.region = region
        self._port = port
        self._line: socket.socket | None = None

    def call_twin(self) -> None:
        """Send the twin its end of the socket, in a note for `answer`."""
        self._line, theirs = socket.socketpair()
        with theirs:
            self._port.note(b"", (theirs.fileno(),))

    def answer(self, descriptor: int) -> None:
        """The twin's note has come."""
        self._line = socket.socket(fileno=descriptor)

    def close(self, deadline: Deadline) -> None:
        """Close what was opened of the twin's, and tell it; nothing is in flight any more."""
        if self._failed() or self._line is None:
            return
        if not self._at_rest(deadline):
            logger.warning("%s: the device is at work still, nothing was closed", self._port.link)
            return
        with self._port.stream.entered():
            self.region.use()
            self.region.close()
        with suppress(OSError):  # it has died
            self._line.send(_CLOSED)

    def give_back(self, deadline: Deadline) -> None:
        """Give back what this end made, if the twin says by the deadline that it has closed it."""
        try:
            if self.region.owned:
                self._give_back(deadline)
        finally:
            if self._line is not None:
                self._line.close()

    def _give_back(self, deadline: Deadline) -> None:
        port = self._port
        if self._twin_has_closed(deadline) and self._at_rest(deadline):
            with port.stream.entered():
                self.region.use()
                self.region.free()
            return
        logger.warning(
            "%s: rank %d leaves its device memory to the end of its process, since rank %d may "
            "have it open",
            port.link,
            port.rank,
            port.peer,
        )

    def _failed(self) -> bool:
        try:
            self._port.wait(lambda: True, Deadline(0.0))
        except StagelinkError:
            return True
        return False

    def _twin_has_closed(self, deadline: Deadline) -> bool:
        if not self.region.exported:
            return True
        if self._failed() or self._line is None:
            return False
        self._line.settimeout(min(deadline.remaining_s, _LONGEST_WAIT_S))
        with suppress(OSError):  # time ran out
            return self._line.recv(1) == _CLOSED  # nothing comes of one that has died
        return False

    def _at_rest(self, deadline: Deadline) -> bool:
        """Whether the link and the caller have nothing on the device, or have not by then."""
        look_s = _LONGEST_LOOK_S / 100
        for moment in (self._port.stream.record(), self._port.stream.record_caller()):
            while moment is not None and not moment.reached:
                if deadline.passed:
                    return False
                time.sleep(look_s)
                look_s = min(2 * look_s, _LONGEST_LOOK_S)
        return True
