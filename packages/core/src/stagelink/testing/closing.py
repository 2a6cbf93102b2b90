"""Programs that ranks run in conformance tests of closing; as `stagelink.testing.drivers`."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import cast

import torch
from torch.distributed import PrefixStore, Store

from stagelink.deadline import Deadline
from stagelink.errors import PeerClosedError, StagelinkError
from stagelink.exchange.handler import Handler
from stagelink.testing.contract_check import UnfinishedError
from stagelink.testing.drivers import some, use_once
from stagelink.testing.leaks import LeakCheck
from stagelink.testing.subject import Subject
from stagelink.testing.wrapping import WrappedDone, WrappedPort, WrappedSender, wrapped
from stagelink.transport.blocking import Finisher
from stagelink.transport.contract import Announce, Done, Message, Port, Sender, Transport

_EXPLAINED_S = 0.6
"""By then a transport's failure is the handler's: a peer's death would have explained it."""


def closes_without_trace(rank: int, world_size: int, store: Store, subject: Subject) -> None:
    """Ten times opened, used and closed: nothing is there that was not before."""
    # Ranks that are threads of one process would count each other's.
    alone = threading.current_thread() is threading.main_thread()
    use_once(rank, world_size, store, subject)
    check = LeakCheck("threads", "descriptors", "shared mappings")
    with ExitStack() as own:
        files = own.enter_context(_empty_folder()) if alone else None
        for _ in range(9):
            use_once(rank, world_size, store, subject)
        left = files and files()
    if alone:
        check.verify()
        assert not left, f"left behind in the folder for temporary files: {left}"


@contextmanager
def _empty_folder() -> Iterator[Callable[[], list[str]]]:
    """A folder of this process's own for temporary files; what is in it."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        try:
            yield lambda: sorted(os.listdir(folder))
        finally:
            tempfile.tempdir = before


def unread_at_close(rank: int, world_size: int, store: Store, subject: Subject) -> None:
    """A session left with messages unread harms neither the next session nor the close."""
    with subject.join(rank, world_size, store, partial(Subject.plan, window=4)) as comm:
        for _ in range(3):
            with comm.evaluate(4) as session:
                if rank == 0:
                    for microbatch in range(4):
                        session.send("e0", subject.on_device(torch.ones(50_000)), microbatch)
                else:
                    session.recv("e0", 0)
                comm.reduce([0.0])  # nobody leaves before everything is sent


def closes_with_a_queue(
    rank: int, world_size: int, store: Store, subject: Subject, how: Sequence[str]
) -> None:
    """Both ranks close with more messages queued than a link has in flight; nobody receives them.

    ``how`` may have the words ``"both"``, messages go both ways, and ``"late"``: no send is
    through before the other rank has said goodbye or, if messages go both ways, begun to close.
    """
    closing, queued, parted = PrefixStore("closing", store), threading.Event(), threading.Event()

    def wait() -> None:
        if queued.is_set() and "both" in how:
            closing.wait([str(1 - rank)], timedelta(seconds=subject.patience_s))
        elif queued.is_set():
            parted.wait(subject.patience_s)

    if "late" in how:
        subject = subject.wrapped(lambda transport: _late(transport, wait))
    count = 2 * subject.capabilities.in_flight + 4
    plan_of = partial(Subject.plan, window=2 * count, deadline_s=subject.patience_s)
    try:
        with subject.join(rank, world_size, store, plan_of) as comm:
            _queue(comm, subject, count, queued, both="both" in how)
            if "late" in how:  # who has given up meanwhile is known for it half a second later
                parted.wait(_EXPLAINED_S)
            closing.set(str(rank), "1")
            if rank == 0 and how == ("late",):
                with suppress(PeerClosedError):
                    comm.reduce([0.0])  # which rank 1 does not take part in: it has said goodbye
                parted.set()
    except (StagelinkError, UnfinishedError) as error:
        raise AssertionError(
            f"closing with {count} messages queued: {type(error).__name__}: {error}"
        ) from error


def _queue(
    comm: Handler, subject: Subject, count: int, queued: threading.Event, *, both: bool
) -> None:
    """Send messages that nobody receives; ``both``: gradients the other way as well."""
    first = count if both else 0
    tensor = subject.on_device(torch.ones(50_000)).requires_grad_()
    with comm.train(first + count) as session:
        taken = []
        for microbatch in range(first):
            if comm.rank == 0:
                session.send("e0", tensor, microbatch)
            else:
                taken.append(some(session.recv("e0", microbatch)))
        comm.reduce([0.0])
        queued.set()
        for microbatch, got in enumerate(taken):
            session.send_grad("e0", torch.ones_like(got), microbatch)
        for microbatch in range(first, first + count):
            if comm.rank == 0:
                session.send("e0", tensor, microbatch)
        comm.reduce([0.0])  # nobody leaves before everything is sent


def leaves_with_sends_waiting(
    rank: int, world_size: int, store: Store, subject: Subject, size_bytes: int
) -> None:
    """Sends that wait for credit are delivered although their session, and the handler, ended."""
    count = 6
    plan_of = partial(Subject.plan, deadline_s=subject.patience_s)
    with (
        subject.join(rank, world_size, store, plan_of) as comm,
        comm.evaluate(count) as session,  # its window has less credit
    ):
        for microbatch in range(count):
            if rank == 0:
                tensor = torch.full((size_bytes,), microbatch, dtype=torch.uint8)
                session.isend("e0", subject.on_device(tensor), microbatch)
            else:
                try:
                    got = some(session.recv("e0", microbatch))
                except StagelinkError as error:
                    raise AssertionError(
                        f"message {microbatch} was sent, and lost as its session was left: {error}"
                    ) from error
                assert bool((got == microbatch).all()), f"message {microbatch} arrived changed"


def _late(transport: type[Transport], wait: Callable[[], None]) -> type[Transport]:
    """Make a transport whose senders announce a message, and then wait with all else."""
    return wrapped(
        transport,
        f"late-{transport.name}",
        sender=partial(_Sender, wait),
        port=_Port,
        capabilities=replace(transport.capabilities, copies_on_begin=False),
    )


class _Port(WrappedPort):
    def __init__(self, port: Port) -> None:
        super().__init__(port)
        self.has_room = threading.Event()

    def room(self) -> None:
        self.has_room.set()


class _Sender(WrappedSender):
    """Takes every message, and has the sender inside begin it on a thread of its own."""

    def __init__(self, wait: Callable[[], None], inner: Sender, port: Port) -> None:
        super().__init__(inner, port)
        self._wait = wait
        self._finisher = Finisher(port)
        self._has_room = cast("_Port", port).has_room
        self._aborted = False

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        def announce_and_wait(note: bytes = b"", fds: Sequence[int] = ()) -> None:
            announce(note, fds)
            self._wait()

        begin = partial(self._begin, message, announce_and_wait, done)
        # When that returns it has begun: the sender inside says when it is done.
        self._finisher.submit(begin, WrappedDone(done, lambda _: None))
        return True

    def _begin(self, message: Message, announce: Announce, done: Done) -> None:
        while not self._aborted and not self.inner.begin(message, announce, done):
            self._has_room.wait()
            self._has_room.clear()

    def abort(self, cause: BaseException) -> None:
        self._aborted = True
        self._has_room.set()
        super().abort(cause)

    def close(self, deadline: Deadline) -> None:
        self._finisher.close(deadline)
        super().close(deadline)
