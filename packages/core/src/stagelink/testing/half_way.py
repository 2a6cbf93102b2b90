"""A message between two ranks that stops half way, for a check to interrupt it there.

A small message is through, and then a large one begins. One rank stops half way: a sender in its
announcement, a receiver before its ``begin``. Core never hears that the large message is done, so
what a check sees is what the transport does by itself.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
from torch.distributed import PrefixStore, Store

from stagelink.deadline import Deadline
from stagelink.errors import StagelinkError
from stagelink.exchange.handles import SendHandle
from stagelink.exchange.session import Session
from stagelink.ranks.threads import RankThread
from stagelink.testing.leaks import LeakCheck
from stagelink.testing.samples import difference, tensors_of_sizes
from stagelink.testing.subject import Subject
from stagelink.testing.wrapping import (
    Accept,
    E,
    WrappedEnd,
    WrappedReceiver,
    WrappedSender,
    wrapped,
)
from stagelink.transport.contract import Announce, Done, Message, Port, Receiver, Sender, Transport
from stagelink.transport.header import Header
from stagelink.transport.payload import payload_problem

NOTHING_TO_WAIT_FOR = "the whole message is through before anybody waits for it"

WORD_S = 20.0
"""Seconds for the other rank to do its part."""

DEADLINE_S = 0.2
"""Of calls that are to keep it, and for what happens at once."""

_SIZE_BYTES = 32 * 1024 * 1024
"""More than any socket's buffers hold."""


@contextmanager
def half_way(
    rank: int, world_size: int, store: Store, subject: Subject, *, stops: int | None
) -> Iterator[Side]:
    """A pair of ranks that a small message has passed; at its end the handler is aborted.

    The large message, from rank 0 to 1, goes no further at rank ``stops``; None: there is none.
    """
    side = Side(
        PrefixStore("interruption", store), subject, stops=stops == rank, closes=stops is None
    )
    stopped = subject.wrapped(side.wrap)
    plan = stopped.plan(close_deadline_s=2 * subject.patience_s)
    try:
        with stopped.connect(plan, rank, world_size, store) as comm, comm.evaluate(2) as session:
            if rank == 0:
                session.send("e0", side.payload[:1000], 0)
            else:
                session.recv("e0", 0)
            comm.reduce([0.0])
            side.session = session
            # The receiver's own thread reads no more: another does when the large message comes.
            side.wait("there") if rank == 0 else side.tell("there")
            yield side
            if stops is not None:
                comm.abort(InterruptedError("the check is over"))
    except StagelinkError:
        if not hasattr(side, "session"):
            raise


class Side:
    """One rank's side of the link, and what has become of its large message there."""

    session: Session
    end: Sender | Receiver
    go_on: Callable[[], None]  # has a receiver that stopped begin

    def __init__(self, store: Store, subject: Subject, *, stops: bool, closes: bool) -> None:
        self.began = threading.Event()  # the message has been announced, or the receiver has it
        self.begun = threading.Event()  # the receiver's ``begin`` has returned
        self.aborted = threading.Event()  # by core
        self.holds_abort = False  # whether core's abort is kept from the end
        self.payload = subject.on_device(next(tensors_of_sizes((_SIZE_BYTES,))))
        self._store = store
        self._patience_s = subject.patience_s
        self.stops = stops  # the message goes no further here
        self._closes = closes
        self.done = _Done()  # what the transport is given for core's
        self.lent: torch.Tensor | None = None
        self._closing: dict[str, float | BaseException] = {}
        # Ranks that are threads of one process would count each other's.
        alone = threading.current_thread() is threading.main_thread()
        self._threads = LeakCheck("threads") if alone else None

    # -- for the checks

    def tell(self, word: str) -> None:
        """Tell the other rank."""
        self._store.set(word, "1")

    def wait(self, word: str) -> None:
        """Wait until the other rank has told."""
        self._store.wait([word], timedelta(seconds=WORD_S))

    def send(self) -> SendHandle:
        """Send the large message; returns when it has begun, or waits for room."""
        return self.session.isend("e0", self.payload, 1, copy=False)

    def begin(self) -> None:
        """Have a receiver that stopped begin."""
        try:
            self.go_on()
        except Exception as error:  # as good as any other failure
            self.done.failed(error)

    def let_go(self) -> None:
        """Hold the end's abort no longer."""
        self.holds_abort = False
        self.end.abort(ConnectionAbortedError("the other end has gone"))

    def wait_begun(self) -> str:
        """Wait until the receiver's ``begin`` has returned."""
        self.began.wait(WORD_S)
        if self.begun.wait(self._patience_s):
            return ""
        return f"Receiver.begin still blocks {self._patience_s:g} s after: it waits for the sender"

    def call(self, which: str, call: Callable[[], object]) -> str:
        """Make a call that is to raise TimeoutError, on a thread that may hang."""
        thread = RankThread(0, lambda _: call())
        thread.join(DEADLINE_S + self._patience_s)
        if thread.is_alive():
            late = f"it still blocks {self._patience_s:g} s after"
            return f"a {which} ignores its deadline: {late}"
        if thread.error is not None and not isinstance(thread.error, TimeoutError):
            return f"a {which} raises {thread.error!r} at its deadline, where TimeoutError is due"
        return ""

    def arrival(self, gone: str, timeout_s: float = 0.0) -> str:
        """Wait for a moment for the message to be done; only a whole one may be.

        ``gone`` says what the other end has done, of a receive.
        """
        try:
            told = self.done.told.get(timeout=timeout_s)
        except queue.Empty:
            return ""
        if isinstance(told, BaseException):
            return ""
        problem = None
        if isinstance(self.end, Receiver):
            device = self.payload.device.type
            problem = payload_problem(told, _SIZE_BYTES, self.lent, device)
            whole = self.lent if told is None else told
            if problem is None and whole is not None:
                problem = difference(whole.cpu(), self.payload.cpu())
        if problem:
            how = f"although the other end {gone}: {problem}"
            return f"a receive is done as if the message had arrived, {how}"
        return NOTHING_TO_WAIT_FOR

    def abort_problem(self, which: str, close: str) -> str:
        """Look whether anything of the transport's waited on after its abort."""
        took = self._closing.get(close, math.inf)
        if isinstance(took, BaseException):
            return f"{close} raises {took!r} after its abort"
        late = f"a {which} still waits {self._patience_s:g} s after its abort"
        if took > self._patience_s:
            return late
        try:
            if self._threads is not None:
                self._threads.verify(self._patience_s)
        except AssertionError as error:
            return f"{late}: {error}"
        return ""

    def close_problem(self) -> str:
        """Look at how closing went."""
        for what, took in self._closing.items():
            if isinstance(took, BaseException):
                return f"{what} raises {took!r}"
            if took > DEADLINE_S + self._patience_s:
                return f"{what} still blocks {self._patience_s:g} s after its deadline"
        return ""

    # -- for the transport

    def wrap(self, transport: type[Transport]) -> type[Transport]:
        """Make a transport whose large message stops as this side has it."""

        def close(inner: Transport, deadline: Deadline) -> None:
            self.close("Transport.close", partial(transport.close, inner), deadline)

        return wrapped(
            transport,
            f"stopped-{transport.name}",
            sender=partial(_Sender, self),
            receiver=partial(_Receiver, self),
            close=close,
        )

    def close(self, what: str, close: Callable[[Deadline], None], deadline: Deadline) -> None:
        """Close something, and note how long it takes."""
        began = time.monotonic()
        self._closing[what] = math.inf
        try:
            close(Deadline(DEADLINE_S) if self._closes else deadline)
        except BaseException as error:
            self._closing[what] = error
            raise
        self._closing[what] = time.monotonic() - began


class _Done:
    """Takes the place of core's `Done`, which thus never hears of the large message."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[torch.Tensor | BaseException | None] = queue.SimpleQueue()

    def __call__(self, payload: torch.Tensor | None = None) -> None:
        self.told.put(payload)

    def failed(self, error: BaseException) -> None:
        self.told.put(error)


class _End(WrappedEnd[E]):
    name = ""

    def __init__(self, side: Side, inner: E, port: Port) -> None:
        super().__init__(inner, port)
        self._side = side

    def abort(self, cause: BaseException) -> None:
        self._side.aborted.set()
        if not self._side.holds_abort:
            super().abort(cause)

    def close(self, deadline: Deadline) -> None:
        self._side.close(f"{self.name}.close", super().close, deadline)


class _Sender(_End[Sender], WrappedSender):
    name = "Sender"

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        side = self._side
        if message.header.payload_bytes != _SIZE_BYTES:
            return super().begin(message, announce, done)
        side.end = self.inner

        def announce_and_stop(note: bytes = b"", fds: Sequence[int] = ()) -> None:
            announce(note, fds)
            side.began.set()
            if side.stops:
                side.wait("seen")

        return super().begin(message, announce_and_stop, side.done)


class _Receiver(_End[Receiver], WrappedReceiver):
    name = "Receiver"

    def begin(
        self, header: Header, note: bytes, fds: Sequence[int], accept: Accept, done: Done
    ) -> None:
        side = self._side
        if header.payload_bytes != _SIZE_BYTES:
            super().begin(header, note, fds, accept, done)
            return
        side.end = self.inner

        def lend() -> torch.Tensor:
            side.lent = accept().zero_()
            return side.lent

        def begin() -> None:
            with self.port.stream.entered():
                self.inner.begin(header, note, fds, lend, side.done)
            side.begun.set()

        side.go_on = begin
        side.began.set()
        if not side.stops:
            begin()
