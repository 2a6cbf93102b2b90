"""The two ends of a link: from the memory of a tensor to the buffer that it is received in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagelink.transport.contract import Receiver, Sender
from stagelink_tcp.parts import Whole, split

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from stagelink.transport.contract import Announce, Deadline, Done, Message
    from stagelink.transport.header import Header
    from stagelink_tcp.flow import Flow

__all__ = ["TcpReceiver", "TcpSender"]

_AT_ONCE_BYTES = 256 * 1024
"""A payload of up to this size goes before its header, which then finds all of it there."""

_AHEAD_BYTES = 64 * 1024
"""Of a larger one so much does: while the rest goes, its receiver is already at it."""


class TcpSender(Sender):
    """The sending end. A message is done when the system has taken the last of it.

    Args:
        flows: the streams, in their order.
    """

    def __init__(self, flows: Sequence[Flow]) -> None:
        self._flows = flows

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        """Send what goes at once, and announce the message behind the first of it.

        Raises:
            OSError: the connection is broken.
        """
        data = message.payload.numpy().data
        parts = split(len(data), len(self._flows))
        if len(parts) > 1:
            announce()
            _start(self._flows, data, parts, done)
            return True
        first = data if len(data) <= _AT_ONCE_BYTES else data[:_AHEAD_BYTES]
        gone = len(first) - len(self._flows[0].put(first))
        announce()
        if gone < len(data):
            self._flows[0].start(data[gone:], done)
        else:
            done()
        return True

    def close(self, deadline: Deadline) -> None:
        """Close the streams; what the system has taken still goes."""
        del deadline
        for flow in self._flows:
            flow.close()


class TcpReceiver(Receiver):
    """The receiving end.

    Args:
        flows: the streams, in their order.
    """

    def __init__(self, flows: Sequence[Flow]) -> None:
        self._flows = flows

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        """Receive into the accepted buffer what is there, and the rest when it comes."""
        del note, fds
        parts = split(header.payload_bytes, len(self._flows))
        _start(self._flows, accept().numpy().data, parts, done)

    def close(self, deadline: Deadline) -> None:
        """Close the streams."""
        del deadline
        for flow in self._flows:
            flow.close()


def _start(
    flows: Sequence[Flow], data: memoryview, parts: list[tuple[int, int]], done: Done
) -> None:
    if len(parts) == 1:
        flows[0].start(data, done)
        return
    whole = Whole(done, len(parts))
    for flow, (begin, end) in zip(flows, parts, strict=False):
        flow.start(data[begin:end], whole)
