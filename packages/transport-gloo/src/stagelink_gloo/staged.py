"""The two ends of a link between GPUs: by way of host memory, on the link's lane.

No GPU has run this module yet; on a double of one it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagelink.transport.contract import FINISHED, Pending, Receiver, Sender
from stagelink.transport.lanes import reach
from stagelink_gloo.link import GlooReceiver, GlooSender

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from stagelink.transport.contract import Announce, Deadline, Message, Port
    from stagelink.transport.header import Header
    from stagelink.transport.lanes import Moment
    from stagelink_gloo.pair import Pair

__all__ = ["StagedReceiver", "StagedSender"]


class StagedSender(Sender):
    """The sending end: the copy to host memory is queued at once, and sent when it is there.

    Args:
        pair: the connection with the receiver's rank.
        port: for the lane and receipts.
    """

    def __init__(self, pair: Pair, port: Port) -> None:
        self._host = GlooSender(pair, port)
        self._port = port
        self._begun = 0
        self._receipts = 0

    def begin(self, message: Message, announce: Announce) -> Pending:
        """Announce it, and queue the copy."""
        announce()
        size = message.header.payload_bytes
        if not size:
            return FINISHED
        lane = self._port.lane
        staging = lane.staging(size)
        lane.copy(staging, message.payload)
        self._begun += 1
        return _Leaving(self, staging, lane.moment(), self._begun)

    def finish(self, leaving: _Leaving, deadline: Deadline) -> None:
        """Send what was copied, and wait for its receipt.

        Raises:
            TimeoutError: the deadline passed.
            ConnectionError: the connection was closed.
        """
        reach(leaving.moment, self._port, deadline)
        sent = self._host.send(leaving.staging)
        if not self._port.wait(lambda: self._receipts >= leaving.number, deadline):
            raise TimeoutError(f"{self._port.link}: no receipt within {deadline.seconds:g} s")
        sent.finish(deadline)

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        """A receipt."""
        del note, fds
        self._receipts += 1

    def abort(self, cause: BaseException) -> None:
        """As `GlooSender.abort`."""
        self._host.abort(cause)


class _Leaving(Pending):
    """A message on its way to host memory, and the how manyth it is."""

    def __init__(
        self, sender: StagedSender, staging: torch.Tensor, moment: Moment | None, number: int
    ) -> None:
        self._sender = sender
        self.staging = staging
        self.moment = moment
        self.number = number

    def finish(self, deadline: Deadline) -> None:
        self._sender.finish(self, deadline)


class StagedReceiver(Receiver):
    """The receiving end.

    Args:
        pair: the connection with the sender's rank.
        port: for the lane and receipts.
    """

    def __init__(self, pair: Pair, port: Port) -> None:
        self._host = GlooReceiver(pair, port)
        self._port = port

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
    ) -> Pending:
        """Receive into host memory; the bytes come in whether anybody waits or not."""
        staging = self._port.lane.staging(header.payload_bytes)
        host = self._host.begin(header, note, fds, lambda: staging)
        buffer = accept()
        return host if host is FINISHED else _Arriving(self._port, host, staging, buffer)

    def abort(self, cause: BaseException) -> None:
        """As `GlooReceiver.abort`."""
        self._host.abort(cause)


class _Arriving(Pending):
    def __init__(
        self, port: Port, host: Pending, staging: torch.Tensor, buffer: torch.Tensor
    ) -> None:
        self._port = port
        self._host = host
        self._staging = staging
        self._buffer = buffer

    def finish(self, deadline: Deadline) -> None:
        self._host.finish(deadline)
        self._port.lane.copy(self._buffer, self._staging)
        # To its end: the host memory goes back to where it came from.
        reach(self._port.lane.moment(), self._port, deadline)
