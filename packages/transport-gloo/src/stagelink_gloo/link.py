"""The two ends of a link: a payload, a trailer of one byte behind it, a receipt that comes back.

Gloo tells an operation of its peer's death unless bytes of it are on their way. So nobody waits
for a payload: the receiver waits for the trailer, which cannot be on its way before the payload is
through; the sender for the receiver's receipt, a note on core's connection, which core watches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stagelink.transport.contract import FINISHED, Pending, Receiver, Sender

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stagelink.transport.contract import Announce, Deadline, Message, Port
    from stagelink.transport.header import Header
    from stagelink_gloo.pair import Operation, Pair

__all__ = ["GlooReceiver", "GlooSender"]

_PAYLOAD_TAG = 0
_TRAILER_TAG = 1
_RECEIPT = b"received"


class GlooSender(Sender):
    """The sending end.

    Args:
        pair: the connection with the receiver's rank.
        port: for the link's name and receipts.
    """

    tells_sent = True

    def __init__(self, pair: Pair, port: Port) -> None:
        self._pair = pair
        self._port = port
        self._doing = f"{port.link}: sending"
        self._trailer = torch.zeros(1, dtype=torch.uint8, device="cpu")

    def begin(self, message: Message, announce: Announce) -> Pending:
        """Hand the payload to gloo, which reads it when the receiver is ready.

        Raises:
            RuntimeError: the connection is closed.
        """
        # First, so that the receiver gets ready meanwhile: gloo's own thread may hold us up.
        announce()
        return self.send(message.payload) if message.header.payload_bytes else FINISHED

    def send(self, buffer: torch.Tensor) -> Pending:
        """Hand a message's bytes to gloo; the pending can be finished when the receipt is in.

        Raises:
            RuntimeError: the connection is closed.
        """
        payload = self._pair.send(buffer, _PAYLOAD_TAG, self._doing)
        trailer = self._pair.send(self._trailer, _TRAILER_TAG, self._doing)
        return _Sent(payload, trailer)

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        """A receipt: one more message is through."""
        del note, fds
        self._port.sent()

    def abort(self, cause: BaseException) -> None:
        """Close the connection, so that the peer is woken as well."""
        del cause
        self._pair.break_off()


class _Sent(Pending):
    def __init__(self, payload: Operation, trailer: Operation) -> None:
        self._payload = payload
        self._trailer = trailer

    def finish(self, deadline: Deadline) -> None:
        # The receiver has it all: only gloo's own thread may not have noticed yet.
        self._payload.wait(deadline)
        self._trailer.wait(deadline)


class GlooReceiver(Receiver):
    """The receiving end.

    Args:
        pair: the connection with the sender's rank.
        port: for the link's name and receipts.
    """

    def __init__(self, pair: Pair, port: Port) -> None:
        self._pair = pair
        self._port = port
        self._doing = f"{port.link}: receiving"
        self._trailer = torch.zeros(1, dtype=torch.uint8, device="cpu")

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
        return _Received(self._port, payload, trailer)

    def abort(self, cause: BaseException) -> None:
        """As `GlooSender.abort`."""
        del cause
        self._pair.break_off()


class _Received(Pending):
    def __init__(self, port: Port, payload: Operation, trailer: Operation) -> None:
        self._port = port
        self._payload = payload
        self._trailer = trailer

    def finish(self, deadline: Deadline) -> None:
        self._trailer.wait(deadline)
        self._payload.wait(deadline)
        self._port.note(_RECEIPT)
