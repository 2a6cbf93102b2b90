"""The two ends of a link: a payload, a trailer of one byte behind it, a receipt that comes back.

Gloo tells an operation of its peer's death unless bytes of it are on their way. So nobody waits
for a payload: the receiver waits for the trailer, which cannot be on its way before the payload is
through; the sender for the receiver's receipt, a note on core's connection, which core watches.

A message that meets a receive posted ahead (see `ahead`) goes before its header, and has often
come when that is in: then it is complete at once, and nobody is woken to wait for it.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from stagelink.transport.blocking import Finisher
from stagelink.transport.contract import Receiver, Sender
from stagelink.transport.interrupts import stops_caller
from stagelink_gloo.ahead import Ask, Choice, Places, Posted, parse, tag

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stagelink.transport.contract import Announce, Deadline, Done, Message, Port
    from stagelink.transport.header import Header
    from stagelink_gloo.pair import Operation, Pair

__all__ = ["IN_FLIGHT", "GlooReceiver", "GlooSender"]

IN_FLIGHT = 4
"""Messages of a link that are on their way at once; and so many receives are posted ahead."""

_PAYLOAD_TAG = 0
_TRAILER_TAG = 1
_RECEIPT = b"received"
_NOTHING = Choice(Ask.NOTHING, 0, 0)


class _Sent(NamedTuple):
    """What gloo is to send of one message, and of what that releases."""

    operations: Sequence[Operation]
    choice: Choice
    done: Done


class GlooSender(Sender):
    """The sending end.

    Args:
        pair: the connection with the receiver's rank.
        port: for the link's name and window.
    """

    def __init__(self, pair: Pair, port: Port) -> None:
        self._pair = pair
        self._doing = f"{port.link}: sending"
        self._trailer = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._places = Places(lambda: min(IN_FLIGHT, port.window))
        self._lock = threading.Lock()
        self._sent: deque[_Sent] = deque()

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        """Hand the payload to gloo, which reads it when the receiver is ready.

        Raises:
            RuntimeError: the connection is closed.
        """
        size_bytes = message.header.payload_bytes
        choice = self._places.choose(message.payload) if size_bytes else _NOTHING
        if choice.ask is Ask.TAKE:
            self.send(message.payload, done, choice)
            announce(choice.note)
            return True
        # First, so that the receiver gets ready meanwhile: gloo's own thread may hold us up.
        announce(choice.note)
        if size_bytes:
            self.send(message.payload, done, choice)
        else:
            done()
        return True

    def send(self, buffer: torch.Tensor, done: Done, choice: Choice = _NOTHING) -> None:
        """Hand a message's bytes to gloo; it is done when the receipt is in.

        Raises:
            RuntimeError: the connection is closed.
        """
        with self._lock:  # the receipt may be here before this returns
            operations: list[Operation] = []
            if choice.ask is Ask.MOVE:
                operations.append(self._pair.send(self._nothing, tag(choice.number), self._doing))
            if choice.ask is Ask.TAKE:
                operations.append(self._pair.send(buffer, tag(choice.number), self._doing))
            else:
                operations.append(self._pair.send(buffer, _PAYLOAD_TAG, self._doing))
                operations.append(self._pair.send(self._trailer, _TRAILER_TAG, self._doing))
            self._sent.append(_Sent(operations, choice, done))

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        """A receipt: the oldest message is through."""
        del note, fds
        with self._lock:
            sent = self._sent.popleft()
        # The receiver has it all: only gloo's own thread may not have noticed yet.
        try:
            for operation in sent.operations:
                operation.wait()
        except OSError as error:
            if stops_caller(error):
                raise
            sent.done.failed(error)
        else:
            self._places.through(sent.choice)
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
        port: for the link's name and receipts, and for buffers.
    """

    def __init__(self, pair: Pair, port: Port) -> None:
        self._pair = pair
        self._port = port
        self._finisher = Finisher(port)
        self._doing = f"{port.link}: receiving"
        self._trailer = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._posted: dict[int, Posted] = {}
        # Counted on the thread that begins, and on the one that waits.
        self._submitted = self._finished = 0

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        """Receive, unless it is here; the bytes come in whether anybody waits or not.

        Raises:
            RuntimeError: the connection is closed.
        """
        del fds
        size_bytes = header.payload_bytes
        if not size_bytes:
            accept()
            done()
            return
        ask, number = parse(note)
        if ask is Ask.TAKE:
            posted = self._posted[number]
            wait: Callable[[], torch.Tensor | None] = partial(self._take, posted, size_bytes)
            if self._submitted == self._finished and posted.comes_at_once:
                done(wait())
                return
        else:
            started = self._start(accept())
            wait = partial(self._receive_and_post, started, ask, number, size_bytes)
        self._submitted += 1
        self._finisher.submit(partial(self._counted, wait), done)

    def _counted(self, wait: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        payload = wait()
        self._finished += 1
        return payload

    def _take(self, posted: Posted, size_bytes: int) -> torch.Tensor:
        payload = posted.wait()
        self._post(posted, size_bytes)
        self._port.note(_RECEIPT)
        return payload

    def _receive_and_post(
        self, wait: Callable[[], None], ask: Ask, number: int, size_bytes: int
    ) -> None:
        wait()
        if ask is not Ask.NOTHING:
            if ask is Ask.MOVE:
                self._posted[number].release()
            else:
                self._posted[number] = Posted(self._pair, self._port, number, self._doing)
            self._post(self._posted[number], size_bytes)
        self._port.note(_RECEIPT)

    def _post(self, posted: Posted, size_bytes: int) -> None:
        try:
            posted.post(size_bytes)
        except RuntimeError as error:  # the connection is closed: who goes on to use it is told
            if stops_caller(error):
                raise

    def receive(self, buffer: torch.Tensor) -> Callable[[], None]:
        """Have gloo receive into a buffer; returns what waits for it, and sends the receipt.

        Raises:
            RuntimeError: the connection is closed.
        """
        return partial(self._receive_and_post, self._start(buffer), Ask.NOTHING, 0, buffer.numel())

    def _start(self, buffer: torch.Tensor) -> Callable[[], None]:
        payload = self._pair.receive(buffer, _PAYLOAD_TAG, self._doing)
        trailer = self._pair.receive(self._trailer, _TRAILER_TAG, self._doing)

        def wait() -> None:
            trailer.wait()
            payload.wait()

        return wait

    def abort(self, cause: BaseException) -> None:
        """Close the connection, so that the peer is woken as well."""
        del cause
        self._pair.break_off()

    def close(self, deadline: Deadline) -> None:
        """End the thread that waits."""
        self._finisher.close(deadline)
        self._posted.clear()
