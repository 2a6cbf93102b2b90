"""A transport that can only block, with a fault, once for each; for `test_planted_faults`."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from stagelink.testing.wrapping import WrappedDone
from tests.conformance.blocking_tcp import TOKEN_BYTES, BlockingTcp, Receiver, Sender

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stagelink.deadline import Deadline
    from stagelink.transport.contract import Announce, Done, Link, Message, Port
    from stagelink.transport.header import Header

MOST = 65_536


class Counting(Sender):
    """Knows the number of each message."""

    def __init__(self, port: Port) -> None:
        super().__init__(port)
        self.number = -1

    def send(self, payload: torch.Tensor) -> None:
        self.number += 1
        self.send_numbered(payload)

    def send_numbered(self, payload: torch.Tensor) -> None:
        super().send(payload)


class DroppingSender(Counting):
    def send_numbered(self, payload: torch.Tensor) -> None:
        if self.number != 3:
            super().send_numbered(payload)


class DropsOne(BlockingTcp):
    name = "drops-one"
    sender = DroppingSender


class SwappingSender(Counting):
    def send_numbered(self, payload: torch.Tensor) -> None:
        if self.number == 3:
            self.kept = payload.clone()
            return
        super().send_numbered(payload)
        if self.number == 4:
            super().send_numbered(self.kept)


class SwapsTwo(BlockingTcp):
    name = "swaps-two"
    sender = SwappingSender


class Changed(WrappedDone):
    """A receive's `Done` that is told of another payload."""

    def __init__(self, done: Done, change: Callable[[], torch.Tensor]) -> None:
        super().__init__(done)
        self.change = change

    def __call__(self, payload: torch.Tensor | None = None) -> None:
        self.done(self.change())


class ReusingReceiver(Receiver):
    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        if not hasattr(self, "own"):
            self.own = torch.empty(32 * 1024 * 1024, dtype=torch.uint8)
        mine = self.own[: header.payload_bytes]
        super().begin(header, note, fds, lambda: mine, Changed(done, lambda: mine))


class ReusesABuffer(BlockingTcp):
    name = "reuses-a-buffer"
    receiver = ReusingReceiver


class ForgivingReceiver(Receiver):
    def receive(self, view: memoryview) -> None:
        with suppress(ConnectionError):
            super().receive(view)


class SwallowsADeath(BlockingTcp):
    name = "swallows-a-death"
    receiver = ForgivingReceiver


class WideningReceiver(Receiver):
    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        buffer = accept()
        changed = Changed(done, lambda: buffer.to(torch.float32))
        super().begin(header, note, fds, lambda: buffer, changed)


class ChangesTheDtype(BlockingTcp):
    name = "changes-the-dtype"
    receiver = WideningReceiver


class LosingSender(Counting):
    def __init__(self, port: Port) -> None:
        super().__init__(port)
        self.aborted = threading.Event()

    def send_numbered(self, payload: torch.Tensor) -> None:
        super().send_numbered(payload)
        if self.number == 5:
            self.aborted.wait()

    def abort(self, cause: BaseException) -> None:
        super().abort(cause)
        self.aborted.set()


class LosesAHandle(BlockingTcp):
    name = "loses-a-handle"
    sender = LosingSender


class StayingSender(Sender):
    def close(self, deadline: Deadline) -> None:
        super().close(deadline)
        threading.Event().wait()


class BlocksInClose(BlockingTcp):
    name = "blocks-in-close"
    sender = StayingSender


class ThreadedSender(Sender):
    def __init__(self, port: Port) -> None:
        super().__init__(port)
        threading.Thread(target=threading.Event().wait, name="leaked", daemon=True).start()


class LeaksAThread(BlockingTcp):
    name = "leaks-a-thread"
    sender = ThreadedSender


class ShortSender(Sender):
    def send(self, payload: torch.Tensor) -> None:
        super().send(payload[:MOST])


class ShortReceiver(Receiver):
    def receive(self, view: memoryview) -> None:
        super().receive(view[:MOST])


class Truncates(BlockingTcp):
    name = "truncates"
    sender = ShortSender
    receiver = ShortReceiver


class SilentSender(Sender):
    def abort(self, cause: BaseException) -> None:
        pass


class DeathIsAnEnd(BlockingTcp):
    name = "death-is-an-end"
    sender = SilentSender
    receiver = ForgivingReceiver


class LitteringSender(Sender):
    def __init__(self, port: Port) -> None:
        super().__init__(port)
        descriptor, _ = tempfile.mkstemp(prefix="litter")
        os.close(descriptor)


class LeavesAFile(BlockingTcp):
    name = "leaves-a-file"
    sender = LitteringSender


class DeafReceiver(Receiver):
    def abort(self, cause: BaseException) -> None:
        pass


class IgnoresAbort(BlockingTcp):
    name = "ignores-abort"
    receiver = DeafReceiver


class OneThreadSender(Sender):
    def __init__(self, port: Port) -> None:
        super().__init__(port)
        self.thread: int | None = None

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        self.thread = self.thread or threading.get_ident()
        if self.thread != threading.get_ident():
            raise RuntimeError("another thread")
        return super().begin(message, announce, done)


class BeginsOnOneThread(BlockingTcp):
    name = "begins-on-one-thread"
    sender = OneThreadSender


class StallingSender(Counting):
    def __init__(self, port: Port) -> None:
        super().__init__(port)
        self.aborted = threading.Event()

    def send_numbered(self, payload: torch.Tensor) -> None:
        if self.number == 5:
            self.aborted.wait()
        super().send_numbered(payload)

    def abort(self, cause: BaseException) -> None:
        super().abort(cause)
        self.aborted.set()


class StallsAtTheSixth(BlockingTcp):
    name = "stalls-at-the-sixth"
    sender = StallingSender


class HalfDuplex(BlockingTcp):
    """Receives nothing while it has something to send."""

    name = "half-duplex"

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.sending = 0

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
        return HalfDuplexSender(self, port)

    def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> Receiver:
        return HalfDuplexReceiver(self, port)


class HalfDuplexSender(Sender):
    def __init__(self, transport: HalfDuplex, port: Port) -> None:
        super().__init__(port)
        self.transport = transport
        self.port = port
        self.receipts = 0
        self.sent = 0

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        def announce_to_send(note: bytes = b"", fds: Sequence[int] = ()) -> None:
            self.transport.sending += 1
            announce(note, fds)

        return super().begin(message, announce_to_send, done)

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        if note:
            super().on_note(note, fds)
        else:
            self.receipts += 1
            self.port.wake()

    def send(self, payload: torch.Tensor) -> None:
        super().send(payload)
        self.sent += 1
        self.port.wait(lambda: self.receipts >= self.sent)
        self.transport.sending -= 1
        self.port.wake()


class HalfDuplexReceiver(Receiver):
    def __init__(self, transport: HalfDuplex, port: Port) -> None:
        super().__init__(port)
        self.transport = transport
        self.port = port

    def receive(self, view: memoryview) -> None:
        self.port.wait(lambda: not self.transport.sending)
        super().receive(view)
        self.port.note(b"")


class HastyReceiver(Receiver):
    def receive(self, view: memoryview) -> None:
        self._socket.settimeout(0.001)
        super().receive(view)


class WaitsForNobody(BlockingTcp):
    name = "waits-for-nobody"
    receiver = HastyReceiver


class ReadingReceiver(Receiver):
    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        self.receive(accept().numpy().data)
        done()


class WaitsInBegin(BlockingTcp):
    name = "waits-in-begin"
    receiver = ReadingReceiver


class Unsaid(WrappedDone):
    def __call__(self, payload: torch.Tensor | None = None) -> None:
        pass


class EagerReceiver(Receiver):
    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        view = accept().fill_(7).numpy().data
        self._finisher.submit(partial(self.receive, view), Unsaid(done))
        done()

    def receive(self, view: memoryview) -> None:
        time.sleep(0.2)
        super().receive(view)


class DoneTooSoon(BlockingTcp):
    name = "done-too-soon"
    receiver = EagerReceiver


class Twice(WrappedDone):
    def __call__(self, payload: torch.Tensor | None = None) -> None:
        self.done(payload)
        self.done(payload)


class RepeatingSender(Sender):
    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        return super().begin(message, announce, Twice(done))


class DoneTwice(BlockingTcp):
    name = "done-twice"
    sender = RepeatingSender


class OvertakingSender(Sender):
    def __init__(self, port: Port) -> None:
        super().__init__(port)
        self.waiting: list[Done] = []

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        return super().begin(message, announce, Overtaking(done, self.waiting))


class Overtaking(WrappedDone):
    """Two messages at a time, the later one first."""

    def __init__(self, done: Done, waiting: list[Done]) -> None:
        super().__init__(done)
        self.waiting = waiting

    def __call__(self, payload: torch.Tensor | None = None) -> None:
        self.waiting.append(self.done)
        while len(self.waiting) == 2:
            self.waiting.pop()()
            self.waiting.pop()()


class Overtakes(BlockingTcp):
    name = "overtakes"
    capabilities = replace(BlockingTcp.capabilities, in_flight=4)
    sender = OvertakingSender


class Unannounced(WrappedDone):
    """Announces when it is done."""

    def __init__(self, done: Done, announce: Announce) -> None:
        super().__init__(done)
        self.announce = announce

    def __call__(self, payload: torch.Tensor | None = None) -> None:
        self.done(payload)
        self.announce()


class TardySender(Sender):
    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        return super().begin(message, lambda note=b"", fds=(): None, Unannounced(done, announce))


class DoneUnannounced(BlockingTcp):
    name = "done-unannounced"
    sender = TardySender


class ForgetfulSender(Sender):
    asked = False

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        if not self.asked:
            self.asked = True
            return False
        return super().begin(message, announce, done)

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        self._token, self._peer = note[:TOKEN_BYTES], int(note[TOKEN_BYTES:])


class NeverHasRoom(BlockingTcp):
    name = "never-has-room"
    sender = ForgetfulSender
