"""More transports with a fault, by which somebody waits for ever; for `test_planted_faults`.

Of the example, whose sockets core watches, some have one in what core calls for them.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from examples.third_party_transport.src.stagelink_socketpair import PairSender, SocketPair

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


class LockingSender(PairSender):
    def __init__(self, port: Port) -> None:
        super().__init__(port)
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


class IsDoneWithALock(SocketPair):
    name = "is-done-with-a-lock"

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> PairSender:
        return LockingSender(port)


class RoomySender(LockingSender):
    """Has no room before an event, and says with a lock held that it has."""

    def __init__(self, port: Port) -> None:
        super().__init__(port)
        self.port = port
        self.has_room = False
        self.event = os.eventfd(1, os.EFD_NONBLOCK)

    def make_room(self) -> bool:
        os.eventfd_read(self.event)
        self.has_room = True
        with suppress(RuntimeError), self.lock:
            self.port.room()
        return False

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        self.lock.acquire()
        with suppress(RuntimeError):
            self.lock.release()
        if not self.has_room:
            self.port.watch(self.event, self.make_room)
            return False
        return PairSender.begin(self, message, announce, done)

    def close(self, deadline: Deadline) -> None:
        super().close(deadline)
        os.close(self.event)


class HasRoomWithALock(SocketPair):
    name = "has-room-with-a-lock"

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> PairSender:
        return RoomySender(port)


class Busy(SocketPair):
    """Has core call an action of its own, on a descriptor that says nothing."""

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> PairSender:
        return BusySender(port, self.keep_busy)

    @staticmethod
    def keep_busy(port: Port, event: int) -> None:
        raise NotImplementedError


class BusySender(PairSender):
    def __init__(self, port: Port, keep_busy: Callable[[Port, int], None]) -> None:
        super().__init__(port)
        self.event = os.eventfd(0, os.EFD_NONBLOCK)
        keep_busy(port, self.event)

    def close(self, deadline: Deadline) -> None:
        super().close(deadline)
        os.close(self.event)


class BlocksReading(Busy):
    name = "blocks-reading"

    @staticmethod
    def keep_busy(port: Port, event: int) -> None:
        def sleep() -> bool:
            os.eventfd_read(event)
            time.sleep(2)
            return False

        os.eventfd_write(event, 1)
        port.watch(event, sleep)


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
