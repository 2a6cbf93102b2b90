"""The example transport with a fault in it, once for each fault; for `test_planted_faults`."""

from __future__ import annotations

import os
import tempfile
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from examples.third_party_transport.src.stagelink_plaintcp import (
    PlainTcp,
    TcpReceiver,
    TcpSender,
)

from stagelink.deadline import Deadline
from stagelink.transport.contract import Pending

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stagelink.transport.contract import Announce, Link, Message, Port, Receiver, Sender
    from stagelink.transport.header import Header

MOST = 65_536


class Broken(PlainTcp):
    """The example with other ends."""

    sender: type[TcpSender] = TcpSender
    receiver: type[TcpReceiver] = TcpReceiver

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
        return self.sender(port)

    def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> Receiver:
        return self.receiver(port, self.options.host)


class Counting(TcpSender):
    """Knows the number of each message."""

    def __init__(self, port: Port) -> None:
        super().__init__(port)
        self.number = -1

    def send(self, payload: torch.Tensor, deadline: Deadline) -> None:
        self.number += 1
        self.send_numbered(payload, deadline)

    def send_numbered(self, payload: torch.Tensor, deadline: Deadline) -> None:
        super().send(payload, deadline)


class DroppingSender(Counting):
    def send_numbered(self, payload: torch.Tensor, deadline: Deadline) -> None:
        if self.number != 3:
            super().send_numbered(payload, deadline)


class DropsOne(Broken):
    name = "drops-one"
    sender = DroppingSender


class SwappingSender(Counting):
    def send_numbered(self, payload: torch.Tensor, deadline: Deadline) -> None:
        if self.number == 3:
            self.kept = payload.clone()
            return
        super().send_numbered(payload, deadline)
        if self.number == 4:
            super().send_numbered(self.kept, deadline)


class SwapsTwo(Broken):
    name = "swaps-two"
    sender = SwappingSender


class Changed(Pending):
    """A receive whose result goes through another's hands."""

    def __init__(self, inner: Pending, change: Callable[[], torch.Tensor]) -> None:
        self.inner = inner
        self.change = change

    def finish(self, deadline: Deadline) -> torch.Tensor:
        self.inner.finish(deadline)
        return self.change()


class ReusingReceiver(TcpReceiver):
    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
    ) -> Pending:
        if not hasattr(self, "own"):
            self.own = torch.empty(32 * 1024 * 1024, dtype=torch.uint8)
        mine = self.own[: header.payload_bytes]
        return Changed(super().begin(header, note, fds, lambda: mine), lambda: mine)


class ReusesABuffer(Broken):
    name = "reuses-a-buffer"
    receiver = ReusingReceiver


class PatientReceiver(TcpReceiver):
    def receive(self, view: memoryview, deadline: Deadline) -> None:
        super().receive(view, Deadline(float("inf")))


class IgnoresTheDeadline(Broken):
    name = "ignores-the-deadline"
    receiver = PatientReceiver


class ForgivingReceiver(TcpReceiver):
    def receive(self, view: memoryview, deadline: Deadline) -> None:
        with suppress(ConnectionError):
            super().receive(view, deadline)


class SwallowsADeath(Broken):
    name = "swallows-a-death"
    receiver = ForgivingReceiver


class WideningReceiver(TcpReceiver):
    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
    ) -> Pending:
        buffer = accept()
        inner = super().begin(header, note, fds, lambda: buffer)
        return Changed(inner, lambda: buffer.to(torch.float32))


class ChangesTheDtype(Broken):
    name = "changes-the-dtype"
    receiver = WideningReceiver


class LosingSender(Counting):
    def __init__(self, port: Port) -> None:
        super().__init__(port)
        self.aborted = threading.Event()

    def send_numbered(self, payload: torch.Tensor, deadline: Deadline) -> None:
        super().send_numbered(payload, deadline)
        if self.number == 5:
            self.aborted.wait()

    def abort(self, cause: BaseException) -> None:
        super().abort(cause)
        self.aborted.set()


class LosesAHandle(Broken):
    name = "loses-a-handle"
    sender = LosingSender


class StayingSender(TcpSender):
    def close(self, deadline: Deadline) -> None:
        super().close(deadline)
        threading.Event().wait()


class BlocksInClose(Broken):
    name = "blocks-in-close"
    sender = StayingSender


class ThreadedSender(TcpSender):
    def __init__(self, port: Port) -> None:
        super().__init__(port)
        threading.Thread(target=threading.Event().wait, name="leaked", daemon=True).start()


class LeaksAThread(Broken):
    name = "leaks-a-thread"
    sender = ThreadedSender


class ShortSender(TcpSender):
    def send(self, payload: torch.Tensor, deadline: Deadline) -> None:
        super().send(payload[:MOST], deadline)


class ShortReceiver(TcpReceiver):
    def receive(self, view: memoryview, deadline: Deadline) -> None:
        super().receive(view[:MOST], deadline)


class Truncates(Broken):
    name = "truncates"
    sender = ShortSender
    receiver = ShortReceiver


class SilentSender(TcpSender):
    def abort(self, cause: BaseException) -> None:
        pass


class DeathIsAnEnd(Broken):
    name = "death-is-an-end"
    sender = SilentSender
    receiver = ForgivingReceiver


class LitteringSender(TcpSender):
    def __init__(self, port: Port) -> None:
        super().__init__(port)
        descriptor, _ = tempfile.mkstemp(prefix="litter")
        os.close(descriptor)


class LeavesAFile(Broken):
    name = "leaves-a-file"
    sender = LitteringSender


class DeafReceiver(TcpReceiver):
    def abort(self, cause: BaseException) -> None:
        pass


class IgnoresAbort(Broken):
    name = "ignores-abort"
    receiver = DeafReceiver


class OneThreadSender(TcpSender):
    def __init__(self, port: Port) -> None:
        super().__init__(port)
        self.thread: int | None = None

    def begin(self, message: Message, announce: Announce) -> Pending | None:
        self.thread = self.thread or threading.get_ident()
        if self.thread != threading.get_ident():
            raise RuntimeError("another thread")
        return super().begin(message, announce)


class BeginsOnOneThread(Broken):
    name = "begins-on-one-thread"
    sender = OneThreadSender


class StallingSender(Counting):
    def __init__(self, port: Port) -> None:
        super().__init__(port)
        self.aborted = threading.Event()

    def send_numbered(self, payload: torch.Tensor, deadline: Deadline) -> None:
        if self.number == 5:
            self.aborted.wait()
        super().send_numbered(payload, deadline)

    def abort(self, cause: BaseException) -> None:
        super().abort(cause)
        self.aborted.set()


class StallsAtTheSixth(Broken):
    name = "stalls-at-the-sixth"
    sender = StallingSender


class HalfDuplex(Broken):
    """Receives nothing while it has something to send."""

    name = "half-duplex"

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.sending = 0

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
        return HalfDuplexSender(self, port)

    def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> Receiver:
        return HalfDuplexReceiver(self, port)


class HalfDuplexSender(TcpSender):
    def __init__(self, transport: HalfDuplex, port: Port) -> None:
        super().__init__(port)
        self.transport = transport
        self.port = port
        self.receipts = 0
        self.sent = 0

    def begin(self, message: Message, announce: Announce) -> Pending | None:
        pending = super().begin(message, announce)
        self.transport.sending += pending is not None
        return pending

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        if note:
            super().on_note(note, fds)
        else:
            self.receipts += 1
            self.port.wake()

    def send(self, payload: torch.Tensor, deadline: Deadline) -> None:
        super().send(payload, deadline)
        self.sent += 1
        self.port.wait(lambda: self.receipts >= self.sent, deadline)
        self.transport.sending -= 1
        self.port.wake()


class HalfDuplexReceiver(TcpReceiver):
    def __init__(self, transport: HalfDuplex, port: Port) -> None:
        super().__init__(port, transport.options.host)
        self.transport = transport
        self.port = port

    def receive(self, view: memoryview, deadline: Deadline) -> None:
        self.port.wait(lambda: not self.transport.sending, deadline)
        super().receive(view, deadline)
        self.port.note(b"")


class HastyReceiver(TcpReceiver):
    def receive(self, view: memoryview, deadline: Deadline) -> None:
        try:
            super().receive(view, Deadline(0.0))
        except TimeoutError:
            self.close(deadline)
            raise


class WaitsForNobody(Broken):
    name = "waits-for-nobody"
    receiver = HastyReceiver
