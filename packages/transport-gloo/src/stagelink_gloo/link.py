"""The two ends of a link: a payload, a trailer of one byte behind it, a receipt that comes back.

Gloo tells an operation of its peer's death unless bytes of it are on their way. So nobody waits
for a payload: the receiver waits for the trailer, which cannot be on its way before the payload is
through; the sender for the receiver's receipt, a note on core's connection, which core watches.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch

from stagelink.transport.blocking import Finisher
from stagelink.transport.contract import Receiver, Sender

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stagelink.transport.contract import Announce, Deadline, Done, Message, Port
    from stagelink.transport.header import Header
    from stagelink_gloo.pair import Operation, Pair

__all__ = ["GlooReceiver", "GlooSender"]

_PAYLOAD_TAG = 0
_TRAILER_TAG = 1
_RECEIPT = b"received"


class _Sent(NamedTuple):
    """What gloo is to send of one message."""

    payload: Operation
    trailer: Operation
    done: Done


class GlooSender(Sender):
    """The sending end.

    Args:
        pair: the connection with the receiver's rank.
        port: for the link's name.
    """

    def __init__(self, pair: Pair, port: Port) -> None:
        self._pair = pair
        self._doing = f"{port.link}: sending"
        self._trailer = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._lock = threading.Lock()
        self._sent: deque[_Sent] = deque()

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        """Hand the payload to gloo, which reads it when the receiver is ready.

        Raises:
            RuntimeError: the connection is closed.
        """
        # First, so that the receiver gets ready meanwhile: gloo's own thread may hold us up.
        announce()
        if message.header.payload_bytes:
            self.send(message.payload, done)
        else:
            done()
        return True

    def send(self, buffer: torch.Tensor, done: Done) -> None:
        """Hand a message's bytes to gloo; it is done when the receipt is in.

        Raises:
            RuntimeError: the connection is closed.
        """
        with self._lock:  # the receipt may be here before this returns
            payload = self._pair.send(buffer, _PAYLOAD_TAG, self._doing)
            trailer = self._pair.send(self._trailer, _TRAILER_TAG, self._doing)
            self._sent.append(_Sent(payload, trailer, done))

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        """A receipt: the oldest message is through."""
        del note, fds
        with self._lock:
            sent = self._sent.popleft()
        # The receiver has it all: only gloo's own thread may not have noticed yet.
        try:
            sent.payload.wait()
            sent.trailer.wait()
        except OSError as error:
            sent.done.failed(error)
        else:
            sent.done()

    def abort(self, cause: BaseException) -> None:
        """Close the connection, so that the peer is woken as well."""
        del cause
        self._pair.break_off()

    def close(self, deadline: Deadline) -> None:
        """Let go of what is not through; gloo's own are the pair's to give back."""
        del deadline
        self._sent.clear()


class GlooReceiver(Receiver):
    """The receiving end.

    Args:
        pair: the connection with the sender's rank.
        port: for the link's name and receipts.
    """

    def __init__(self, pair: Pair, port: Port) -> None:
        self._pair = pair
        self._port = port
        self._finisher = Finisher(port)
        self._doing = f"{port.link}: receiving"
        self._trailer = torch.zeros(1, dtype=torch.uint8, device="cpu")

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        """Receive into the accepted buffer; the bytes come in whether anybody waits or not.

        Raises:
            RuntimeError: the connection is closed.
        """
        del note, fds
        buffer = accept()
        if not header.payload_bytes:
            done()
            return
        self._finisher.submit(self.receive(buffer), done)

    def receive(self, buffer: torch.Tensor) -> Callable[[], None]:
        """Have gloo receive into a buffer; returns what waits for it, and sends the receipt.

        Raises:
            RuntimeError: the connection is closed.
        """
        payload = self._pair.receive(buffer, _PAYLOAD_TAG, self._doing)
        trailer = self._pair.receive(self._trailer, _TRAILER_TAG, self._doing)

        def wait() -> None:
            trailer.wait()
            payload.wait()
            self._port.note(_RECEIPT)

        return wait

    def abort(self, cause: BaseException) -> None:
        """Close the connection, so that the peer is woken as well."""
        del cause
        self._pair.break_off()

    def close(self, deadline: Deadline) -> None:
        """End the thread that waits."""
        self._finisher.close(deadline)
