"""More transports with a fault, by which somebody waits for ever; for `test_planted_faults`."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from examples.third_party_transport.src.stagelink_plaintcp import PlainTcp, TcpSender

from stagelink.testing.wrapping import WrappedDone
from tests.conformance.blocking_tcp import TOKEN_BYTES, BlockingTcp, Receiver, Sender

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from stagelink.deadline import Deadline
    from stagelink.transport.contract import Announce, Done, Link, Message, Port
    from stagelink.transport.header import Header


class DeafSender(Sender):
    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        self._token, self._peer = note[:TOKEN_BYTES], int(note[TOKEN_BYTES:])


class HasRoomAndSaysNothing(BlockingTcp):
    """Is connected before anybody sends, as a rule."""

    name = "has-room-and-says-nothing"
    sender = DeafSender


class WaitingSender(Sender):
    def __init__(self, port: Port) -> None:
        super().__init__(port)
        self.told = threading.Event()

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        taken = super().begin(message, announce, done)
        if taken:
            self.told.wait()
        return taken

    def abort(self, cause: BaseException) -> None:
        super().abort(cause)
        self.told.set()


class WaitsForItsPeer(BlockingTcp):
    name = "waits-for-its-peer"
    sender = WaitingSender


class Locking(WrappedDone):
    """A `Done` that is called with a lock held."""

    def __init__(self, done: Done, lock: threading.Lock) -> None:
        super().__init__(done)
        self.lock = lock

    def __call__(self, payload: torch.Tensor | None = None) -> None:
        with suppress(RuntimeError), self.lock:  # abort has let go of it
            self.done(payload)


class LockingSender(TcpSender):
    def __init__(self, port: Port, host: str) -> None:
        super().__init__(port, host)
        self.lock = threading.Lock()

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        self.lock.acquire()
        with suppress(RuntimeError):
            self.lock.release()
        return super().begin(message, announce, Locking(done, self.lock))

    def abort(self, cause: BaseException) -> None:
        super().abort(cause)
        with suppress(RuntimeError):  # so that the test ends; nobody else is at it
            self.lock.release()


class IsDoneWithALock(PlainTcp):
    name = "is-done-with-a-lock"

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> TcpSender:
        return LockingSender(port, self.options.host)


class RoomySender(LockingSender):
    """Says that it has room with a lock held."""

    def _judge(self, stranger: object, token: bytearray) -> None:
        with suppress(RuntimeError), self.lock:
            super()._judge(stranger, token)  # type: ignore[arg-type]

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        self.lock.acquire()
        with suppress(RuntimeError):
            self.lock.release()
        return TcpSender.begin(self, message, announce, done)


class HasRoomWithALock(PlainTcp):
    name = "has-room-with-a-lock"

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> TcpSender:
        return RoomySender(port, self.options.host)


class Busy(PlainTcp):
    """Has core call an action of its own, on a descriptor that says nothing."""

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> TcpSender:
        return BusySender(port, self.options.host, self.keep_busy)

    @staticmethod
    def keep_busy(port: Port, event: int) -> None:
        raise NotImplementedError


class BusySender(TcpSender):
    def __init__(self, port: Port, host: str, keep_busy: Callable[[Port, int], None]) -> None:
        super().__init__(port, host)
        self.event = os.eventfd(0, os.EFD_NONBLOCK)
        keep_busy(port, self.event)

    def close(self, deadline: Deadline) -> None:
        super().close(deadline)
        os.close(self.event)


class AsksForEver(Busy):
    name = "asks-for-ever"

    @staticmethod
    def keep_busy(port: Port, event: int) -> None:
        port.watch(event, lambda: True)


class LeavesItReady(Busy):
    name = "leaves-it-ready"

    @staticmethod
    def keep_busy(port: Port, event: int) -> None:
        os.eventfd_write(event, 1)
        port.watch(event, lambda: False)


class KicksForEver(Busy):
    name = "kicks-for-ever"

    @staticmethod
    def keep_busy(port: Port, event: int) -> None:
        def kick() -> None:
            port.call(kick)

        kick()


class LazyReceiver(Receiver):
    number = 0

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        self.number += 1
        mine = done if self.number < 3 else WrappedDone(done, lambda payload: None)
        super().begin(header, note, fds, accept, mine)


class IsNeverDone(BlockingTcp):
    name = "is-never-done"
    receiver = LazyReceiver
