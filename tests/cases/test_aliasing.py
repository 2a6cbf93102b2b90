"""Who owns which memory, and how much of it there is."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import stagelink
from stagelink.schedule import Kind
from tests.support.pipelines import check_same

if TYPE_CHECKING:
    from tests.support.pipelines import Ranks

MIB = 2**20
BLOCK = MIB // 4
"""Floats in a MiB."""


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _overwritten(comm: stagelink.Handler) -> None:
    with comm.evaluate(2) as session:
        if comm.rank == 0:
            for mb, size in enumerate((8 * MIB, 10)):
                x = torch.ones(size)
                session.send("h", x, mb)
                x.fill_(9)
        comm.reduce([0.0])  # only now does the other look
        if comm.rank == 1:
            for mb, size in enumerate((8 * MIB, 10)):
                check_same(session.recv("h", mb), torch.ones(size))


def test_c014_overwritten_after_send(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(), _overwritten)


def _parked(comm: stagelink.Handler) -> None:
    """As `_overwritten`, for a message that finds its window full."""
    with comm.evaluate(5) as session:
        if comm.rank == 0:
            x = torch.zeros(10_000)
            for mb in range(5):
                session.isend("h", x.fill_(mb), mb)
            x.fill_(9)
            comm.reduce([0.0])
            comm.reduce([0.0])
        else:
            comm.reduce([0.0])
            for mb in range(5):
                check_same(session.recv("h", mb), torch.full((10_000,), float(mb)))
            comm.reduce([0.0])


def test_c014_overwritten_while_it_waits_for_its_window(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(window=2), _parked)


def _received_is_the_receivers(comm: stagelink.Handler) -> None:
    kept = []
    for round_number in range(5):
        with comm.evaluate(4) as session:
            for mb in session.mine:
                value = torch.full((50_000,), float(10 * round_number + mb))
                if comm.rank == 0:
                    session.send("h", value, mb)
                else:
                    kept.append((session.recv("h", mb), value))
    for got, wanted in kept:
        check_same(got, wanted)


def test_c014_what_was_received_is_never_written_again(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(), _received_is_the_receivers)


# -- the window bounds memory --------------------------------------------------------------------


class Flood:
    """500 MiB that a thread sends, one by one."""

    def __init__(self, session: stagelink.Session) -> None:
        self.sent = 1
        self.error: BaseException | None = None
        self._session = session
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def wait_blocked(self) -> int:
        """How many were sent when nothing has moved for a moment."""
        with self._changed:
            while self._changed.wait(0.3):
                pass
            return self.sent

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        block = torch.empty(BLOCK)
        try:
            for mb in range(1, 500):
                self._session.send("h", block.fill_(mb), mb)
                with self._changed:
                    self.sent += 1
                    self._changed.notify_all()
        except stagelink.StagelinkError as error:
            self.error = error


def _flooded(comm: stagelink.Handler) -> tuple[int, int, int]:
    """Messages sent when blocked; bytes that this process has grown by then, and at the end."""
    with comm.evaluate(500) as session:
        if comm.rank == 0:
            session.send("h", torch.zeros(BLOCK), 0)
        else:
            session.recv("h", 0)
        comm.reduce([0.0])
        before = _resident_bytes()
        flood = Flood(session)
        if comm.rank == 0:
            flood.start()
        sent = flood.wait_blocked()
        comm.reduce([0.0])  # while the other sleeps, also at the window
        blocked = _resident_bytes() - before
        if comm.rank == 1:
            for mb in range(1, 500):
                got = session.recv("h", mb)
                assert got is not None
                assert got[0] == got[-1] == mb
        else:
            flood.join()
            assert flood.error is None
        comm.reduce([0.0])
        return sent, blocked, _resident_bytes() - before


def test_c048_a_producer_waits_at_the_window(ranks: Ranks) -> None:
    plan = ranks.plan(window=4)
    results = ranks.run(plan, _flooded)
    assert results[0][0] == 1 + 4
    for _, blocked, after in results:
        # Both ends of it are in one process where ranks are threads.
        ends = 1 if ranks.wire.processes else 2
        assert blocked < ends * (4 + 16) * MIB
        assert after < ends * (4 + 16) * MIB


def _closed_while_blocked(comm: stagelink.Handler) -> str:
    session = comm.evaluate(500)
    if comm.rank == 1:
        comm.reduce([0.0])
        with pytest.raises(stagelink.PeerClosedError):
            comm.reduce([0.0])  # sleeps until the other has closed
        with pytest.raises(stagelink.PeerClosedError, match="peer rank 0 closed") as caught:
            [session.recv("h", mb) for mb in range(1, 500)]
        return str(caught.value)
    flood = Flood(session)
    flood.start()
    assert flood.wait_blocked() == 1 + 4
    comm.reduce([0.0])
    began = time.monotonic()
    comm.close()
    flood.join()
    assert time.monotonic() - began < 5
    return str(flood.error)


def test_c048_closing_while_blocked(ranks: Ranks) -> None:
    plan = ranks.plan(window=4, limits={"close_deadline_s": 1.0})
    sender, receiver = ranks.run(plan, _closed_while_blocked)
    assert sender == "rank 0 is closed"
    assert "it finished after microbatch 4; microbatch 5 " in receiver


# -- nothing is kept -----------------------------------------------------------------------------


def _steps(comm: stagelink.Handler, first: int, last: int) -> tuple[int, int]:
    """Bytes and tensors of this process after so many steps of alternating kinds and sizes."""
    for step in range(first, last):
        size = (64, 64 + step % 3)
        train = step % 4 != 3
        with comm.train(1 + step % 2) if train else comm.evaluate(1 + step % 5) as session:
            for action in session.actions:
                _one_action(comm, session, action.kind, action.microbatch, size)
    comm.reduce([0.0])
    gc.collect()
    # Not isinstance, which asks some of torch's own objects for attributes that warn.
    return _resident_bytes(), sum(type(each) is torch.Tensor for each in gc.get_objects())


def _one_action(
    comm: stagelink.Handler,
    session: stagelink.Session,
    kind: Kind,
    mb: int,
    size: tuple[int, int],
) -> None:
    if comm.rank == 0 and kind is Kind.FORWARD:
        session.send("h", torch.ones(size, requires_grad=True), mb)
    elif comm.rank == 0:
        session.recv_grad("h", mb)
    elif kind is Kind.FORWARD:
        session.recv("h", mb)
    else:
        session.send_grad("h", torch.ones(size), mb)


def _for_ever(comm: stagelink.Handler) -> list[int]:
    warm, some = _steps(comm, 0, 200)
    threads = threading.active_count()
    later, as_many = _steps(comm, 200, 1000)
    return [later - warm, as_many - some, threading.active_count() - threads]


def test_c088_no_slow_leak(ranks: Ranks) -> None:
    for grown_bytes, tensors, threads in ranks.run(ranks.plan(), _for_ever):
        # Threads share the memory of this process, to which other tests have added theirs.
        assert grown_bytes < 4 * MIB or not ranks.wire.processes
        assert tensors <= 4  # of a step that a thread is still in, not one for each of 800
        assert threads <= 0


def _wait_dead(storage: weakref.ref[torch.UntypedStorage]) -> None:
    # The worker that finished it may still be about to return.
    until = time.monotonic() + 5
    while storage() is not None:
        assert time.monotonic() < until, "the payload is kept"


def _released(comm: stagelink.Handler) -> None:
    with comm.train(2) as session:
        if comm.rank == 0:
            for mb, copy in enumerate((True, False)):
                x = torch.ones(30_000, requires_grad=True)
                alive = weakref.ref(x)
                handle = session.send("h", x, mb, copy=copy)
                storage = weakref.ref(x.untyped_storage())
                del x
                assert alive() is None
                handle.wait()
                _wait_dead(storage)
            for mb in range(2):
                session.recv_grad("h", mb)
        else:
            for mb in range(2):
                got = session.recv("h", mb)
                assert got is not None
                alive = weakref.ref(got)
                del got
                assert alive() is None
                session.send_grad("h", torch.ones(30_000), mb)
        assert len(session._engine.into.inbox) == 0


def test_c089_delivered_tensors_are_not_kept(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(), _released)
