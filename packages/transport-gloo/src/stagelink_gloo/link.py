"""The two ends of a link: a payload, one byte behind it as a trailer, one that comes back.

Gloo tells an operation of its peer's death unless bytes of it are on their way. So nobody waits
for a payload: the receiver waits for the trailer, which cannot be on its way before the payload is
through, and the sender for the receipt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stagelink.transport.contract import FINISHED, Pending, Receiver, Sender

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stagelink.transport.contract import Announce, Deadline, Link, Message
    from stagelink.transport.header import Header
    from stagelink_gloo.pair import Operation, Pair

__all__ = ["GlooReceiver", "GlooSender"]

_PAYLOAD_TAG = 0
_TRAILER_TAG = 1
_RECEIPT_TAG = 2


class GlooSender(Sender):
    """The sending end.

    Args:
        pair: the connection with the receiver's rank.
        link: for errors.
    """

    def __init__(self, pair: Pair, link: Link) -> None:
        self._pair = pair
        self._doing = f"{link}: sending"
        self._trailer = torch.zeros(1, dtype=torch.uint8)
        self._receipt = torch.zeros(1, dtype=torch.uint8)

    def begin(self, message: Message, announce: Announce) -> Pending:
        """Hand the payload to gloo, which reads it when the receiver is ready.

        Raises:
            RuntimeError: the connection is closed.
        """
        if not message.header.payload_bytes:
            announce()
            return FINISHED
        payload = self._pair.send(message.payload, _PAYLOAD_TAG, self._doing)
        trailer = self._pair.send(self._trailer, _TRAILER_TAG, self._doing)
        receipt = self._pair.receive(self._receipt, _RECEIPT_TAG, f"{self._doing}: receipt of")
        announce()
        return _Sent(receipt, payload, trailer)

    def abort(self, cause: BaseException) -> None:
        """Close the connection, so that the peer is woken as well."""
        del cause
        self._pair.break_off()


class _Sent(Pending):
    def __init__(self, *operations: Operation) -> None:
        self._operations = operations

    def finish(self, deadline: Deadline) -> None:
        for operation in self._operations:
            operation.wait(deadline)


class GlooReceiver(Receiver):
    """The receiving end.

    Args:
        pair: the connection with the sender's rank.
        link: for errors.
    """

    def __init__(self, pair: Pair, link: Link) -> None:
        self._pair = pair
        self._doing = f"{link}: receiving"
        self._trailer = torch.zeros(1, dtype=torch.uint8)
        self._receipt = torch.zeros(1, dtype=torch.uint8)
        self._confirmed: Operation | None = None

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
    ) -> Pending:
        """Receive into the accepted buffer; the bytes come in whether anybody waits or not.

        Raises:
            RuntimeError: the connection is closed.
        """
        del note, fds
        buffer = accept()
        if not header.payload_bytes:
            return FINISHED
        payload = self._pair.receive(buffer, _PAYLOAD_TAG, self._doing)
        trailer = self._pair.receive(self._trailer, _TRAILER_TAG, self._doing)
        return _Received(self, trailer, payload)

    def confirm(self, deadline: Deadline) -> None:
        """Send a receipt, without waiting for more than the one before it."""
        if self._confirmed is not None:
            self._confirmed.wait(deadline)
        self._confirmed = self._pair.send(self._receipt, _RECEIPT_TAG, self._doing)

    def abort(self, cause: BaseException) -> None:
        """As `GlooSender.abort`."""
        del cause
        self._pair.break_off()


class _Received(Pending):
    def __init__(self, receiver: GlooReceiver, *operations: Operation) -> None:
        self._receiver = receiver
        self._operations = operations

    def finish(self, deadline: Deadline) -> None:
        for operation in self._operations:
            operation.wait(deadline)
        self._receiver.confirm(deadline)
