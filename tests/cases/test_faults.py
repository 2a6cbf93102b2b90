"""Faults: whoever dies, hangs or raises, the others learn who and why, in time, and end."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import pytest
import torch

import stagelink
from stagelink.exchange.incoming import Incoming, Received
from stagelink.schedule import Kind
from stagelink.testing import RankProcesses, report, run_fresh, run_threads
from stagelink.testing.faults import Fail, Point, faulty
from stagelink.transport.loopback import Loopback
from tests.support.pipelines import (
    GLOO,
    INLINE,
    LOOPBACK,
    SHM,
    SYNCHRONOUS,
    TCP,
    End,
    Ranks,
    Wire,
    document,
    joined,
    line,
    start_to_ends,
)

if TYPE_CHECKING:
    from torch.distributed import Store

    from stagelink.testing import RankPool
    from tests.support.pipelines import Document

PATIENT = {"deadline_s": 60.0, "first_deadline_s": 60.0}
HUGE = 64 * 2**20
"""Floats in 256 MiB, which are on their way for a while."""


def _go_round(comm: stagelink.Handler) -> None:
    """Train without an end, and say so after the first round."""
    for round_number in range(1_000_000):
        _one_round(comm)
        if round_number == 0:
            report("going")


def _one_round(comm: stagelink.Handler, fails: int | None = None) -> None:
    last = len(comm.plan.stages) - 1
    with comm.train(4) as session:
        for action in session.actions:
            mb, stage = action.microbatch, comm.stage.index
            if action.kind is Kind.FORWARD:
                if stage:
                    session.recv(f"h{stage - 1}", mb)
                if comm.rank == fails and mb == 2:
                    raise ZeroDivisionError("of the user, number 4711")
                if stage < last:
                    session.send(f"h{stage}", torch.ones(4096, requires_grad=True), mb)
            else:
                if stage < last:
                    assert session.recv_grad(f"h{stage}", mb) is not None
                if stage:
                    session.send_grad(f"h{stage - 1}", torch.ones(4096), mb)


def _survivors(ranks: RankProcesses[End], dead: int, timeout_s: float = 10.0) -> list[End]:
    """How the others ended, all within ``timeout_s`` of now; the dead one was killed."""
    outcomes = ranks.outcomes(timeout_s)
    assert outcomes[dead].signal == signal.SIGKILL
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != dead]
    assert all(outcome.ok for outcome in others), "\n".join(map(str, others))
    return [outcome.value for outcome in others]


@pytest.mark.parametrize("dead", [0, 1, 3])
@pytest.mark.parametrize("wire", [GLOO, SHM, TCP, INLINE[1]], ids=str)
def test_c010_a_rank_of_a_line_is_killed(wire: Wire, dead: int) -> None:
    plan = document(wire, (1,) * 4, line(4), limits=PATIENT)
    with start_to_ends(plan, _go_round) as ranks:
        for rank in range(4):
            ranks.wait_for(rank, "going")
        ranks.kill(dead)
        for end in _survivors(ranks, dead):
            assert f"rank {dead} died" in end.text
            assert end.left == ()


def _one_huge(comm: stagelink.Handler) -> None:
    stage = comm.stage.index
    with comm.evaluate(1) as session:
        if stage:
            session.recv(f"h{stage - 1}", 0)
        if stage == 1:
            handle = session.isend("h1", torch.ones(HUGE), 0, copy=False)
            report("on its way")
            handle.wait()
        elif stage < 3:
            session.send(f"h{stage}", torch.ones(3), 0)
        comm.reduce([0.0])


@pytest.mark.parametrize(("dead", "frozen"), [(1, 2), (2, 1)], ids=["sender", "receiver"])
def test_c010_a_rank_is_killed_in_the_middle_of_a_payload(dead: int, frozen: int) -> None:
    plan = document(GLOO, (1,) * 4, line(4), limits=PATIENT)
    with start_to_ends(plan, _one_huge) as ranks:
        ranks.wait_for(1, "on its way")
        ranks.kill(frozen, signal.SIGSTOP)  # what is in flight stays in flight
        ranks.kill(dead)
        ranks.kill(frozen, signal.SIGCONT)
        for end in _survivors(ranks, dead):
            assert f"rank {dead} died" in end.text
            threads = [item for item in end.left if item.startswith("  thread")]
            assert len(threads) <= 1, end.left


def test_c010_a_rank_is_killed_while_another_closes() -> None:
    limits = {**PATIENT, "close_deadline_s": 30.0}
    with start_to_ends(document(GLOO, (1, 1), line(2), limits=limits), _closing) as ranks:
        for rank in range(2):
            ranks.wait_for(rank, "ready")
        ranks.kill(1, signal.SIGSTOP)
        ranks.kill(0, signal.SIGUSR1)
        ranks.wait_for(0, "closing")
        ranks.kill(1)
        (end,) = _survivors(ranks, 1, timeout_s=5)
    assert "rank 1 died" in end.text


def _closing(comm: stagelink.Handler) -> None:
    """Rank 0 closes with a payload under way to a rank that is frozen."""
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell)  # whichever thread the signal comes to
    signal.signal(signal.SIGUSR1, lambda *_: None)
    session = comm.evaluate(1)
    report("ready")
    os.read(told, 1)
    session.isend("h0", torch.ones(HUGE), 0, copy=False)
    report("closing")
    comm.close()


def _host_or_guest(rank: int, world_size: int, store: Store, plan: Document) -> str:
    """Rank 0 hosts the pipeline's store; it was told its port by the test's own."""
    if rank == 0:
        with closing(socket.create_server(("127.0.0.1", 0))) as probe:
            store.set("port", str(probe.getsockname()[1]))
    where = f"tcp://127.0.0.1:{store.get('port').decode()}"
    try:
        with stagelink.connect(
            stagelink.Plan.from_dict(plan),
            rank=rank,
            world_size=world_size,
            store=where,
            run_id="run",
        ) as comm:
            _go_round(comm)
    except stagelink.StagelinkError as error:
        return str(error)
    return ""


def test_c010_the_host_of_the_store_does_not_wait_for_the_dead() -> None:
    plan = document(GLOO, (1, 1), line(2), limits=PATIENT)
    with run_fresh(_host_or_guest, 2, plan) as ranks:
        for rank in range(2):
            ranks.wait_for(rank, "going")
        ranks.kill(1)
        began = time.monotonic()
        outcome = ranks.outcomes(20)[0]
        assert "rank 1 died" in str(outcome.value)
        assert time.monotonic() - began < 15


@pytest.mark.parametrize("fails", [0, 2])
def test_an_exception_of_the_user_reaches_every_rank(ranks: Ranks, fails: int) -> None:
    plan = ranks.plan((1,) * 4, line(4), limits=PATIENT)
    ends = ranks.run_to_ends(plan, _one_round, fails)
    assert ends[fails].kind == "ZeroDivisionError"
    for rank, end in enumerate(ends):
        assert "of the user, number 4711" in end.text, (rank, end)
        assert end.seconds < 5
        assert end.left == ()


# -- a transport that fails ----------------------------------------------------------------------


def _send_three(comm: stagelink.Handler) -> None:
    with comm.train(3) as session:
        for action in session.actions:
            mb = action.microbatch
            if comm.rank == 0 and action.kind is Kind.FORWARD:
                session.send("h", torch.ones(3, requires_grad=True), mb)
            elif comm.rank == 0:
                session.recv_grad("h", mb)
            elif action.kind is Kind.FORWARD:
                session.recv("h", mb)
            else:
                session.send_grad("h", torch.ones(3), mb)
    comm.wait(Future(), "what never happens")


@pytest.mark.parametrize("at", list(Point), ids=lambda point: point.name)
@pytest.mark.parametrize("wire", [LOOPBACK, SYNCHRONOUS], ids=str)
def test_c012_a_transport_fails(rank_pool: RankPool, wire: Wire, at: Point) -> None:
    error = OSError("the wire is cut, number 4711")
    cls = faulty(Loopback, Fail(message=1, at=at, error=error, link=(0, 1)))
    plan = document(wire, limits=PATIENT)
    plan["links"] = [{"transport": "faulty"}]
    plan["transports"] = {"faulty": wire.options} if wire.options else {}
    ends = Ranks(wire, rank_pool).run_to_ends(plan, _send_three, transports=[cls])
    at_sender = at in {Point.SEND_BEGIN, Point.SEND_FINISH}
    failed, told = ends if at_sender else ends[::-1]
    assert failed.kind == "TransportError"
    assert failed.cause == "OSError"
    assert "0→1" in failed.text
    assert told.kind == "AbortedError"
    for end in ends:
        assert "OSError: the wire is cut, number 4711" in end.text
        assert end.seconds < 2


def _close_hears_it(comm: stagelink.Handler) -> None:
    session = comm.evaluate(2)
    if comm.rank == 0:
        for mb in range(2):
            session.send("h", torch.ones(3), mb)
    else:
        with suppress(stagelink.AbortedError):
            comm.reduce([0.0])


def test_c012_close_raises_what_no_call_has_said(rank_pool: RankPool) -> None:
    cls = faulty(Loopback, Fail(message=1, at=Point.SEND_FINISH, error=OSError("cut")))
    plan = document(LOOPBACK)
    plan["links"] = [{"transport": "faulty"}]
    zero, _ = Ranks(LOOPBACK, rank_pool).run_to_ends(plan, _close_hears_it, transports=[cls])
    assert (zero.kind, zero.cause) == ("TransportError", "OSError")


# -- deadlines -----------------------------------------------------------------------------------


def _nothing_comes(comm: stagelink.Handler) -> None:
    with comm.evaluate(1) as session:
        if comm.rank == 1:
            session.recv("h", 0)
        comm.reduce([0.0], deadline_s=20)


def test_c038_the_peer_never_sends(any_ranks: Ranks) -> None:
    limits = {"deadline_s": 1.0, "first_deadline_s": 1.0}
    _, end = any_ranks.run_to_ends(any_ranks.plan(limits=limits), _nothing_comes)
    assert end.kind == "DeadlineError"
    assert end.text == (
        "rank 1: nothing came from rank 0 on edge 'h' within 1 s; expected microbatch 0 "
        "(forward, session 0), got nothing yet in this session; rank 0 waits for rank 1 "
        "(reduction 0), so the ranks wait for each other in a cycle"
    )
    assert 1 <= end.seconds < 3


def _no_place(comm: stagelink.Handler) -> None:
    with comm.train(4) as session:
        if comm.rank == 0:
            for mb in range(4):
                session.send("h", torch.ones(2), mb)
        comm.reduce([0.0], deadline_s=20)


def test_c038_the_peer_never_takes(any_ranks: Ranks) -> None:
    limits = {"deadline_s": 0.5, "first_deadline_s": 0.5}
    end, _ = any_ranks.run_to_ends(any_ranks.plan(limits=limits), _no_place)
    assert end.kind == "DeadlineError"
    assert end.text.startswith(
        "rank 0: no credit for microbatch 2 (forward, session 0) of edge 'h' to rank 1 within "
        "0.5 s: the window of 2 is full of microbatches [0, 1], which rank 1 has not answered"
    )


def _idle(comm: stagelink.Handler) -> None:
    """The first message comes after the deadline of others, the next after a longer pause."""
    with comm.evaluate(2) as session:
        for mb, pause_s in enumerate((0.4, 0.8)):
            comm.reduce([0.0], deadline_s=20)
            if comm.rank == 0:
                time.sleep(pause_s if mb == 0 else 0)
                session.send("h", torch.ones(2), mb)
            else:
                assert session.recv("h", mb) is not None
            time.sleep(pause_s if mb else 0)
    comm.reduce([0.0], deadline_s=20)


def test_c041_an_idle_link_does_not_time_out(any_ranks: Ranks) -> None:
    limits = {"deadline_s": 0.2, "first_deadline_s": 20.0}
    any_ranks.run(any_ranks.plan(limits=limits), _idle)


# -- signals -------------------------------------------------------------------------------------


def _receive_for_ever(comm: stagelink.Handler) -> float:
    with comm.evaluate(2) as session:
        if comm.rank == 0:
            session.send("h", torch.ones(2), 0)
            report("sent")
            comm.reduce([0.0])
        session.recv("h", 0)
        report("receiving")
        session.recv("h", 1)
    return 0.0


@pytest.mark.parametrize("wire", [GLOO, SHM, TCP, INLINE[1]], ids=str)
def test_c039_ctrl_c_in_a_receive(wire: Wire) -> None:
    with start_to_ends(document(wire, limits=PATIENT), _receive_for_ever) as ranks:
        ranks.wait_for(1, "receiving")
        ranks.kill(1, signal.SIGINT)
        told, interrupted = ranks.outcomes(20)
    assert interrupted.error is not None
    assert interrupted.error.rstrip().endswith("KeyboardInterrupt")
    assert "rank 1" in told.value.text
    assert "KeyboardInterrupt" in told.value.text


def _receive_two(comm: stagelink.Handler) -> None:
    with comm.evaluate(2) as session:
        if comm.rank == 0:
            session.send("h", torch.ones(2), 0)
            comm.reduce([0.0])
            session.send("h", torch.ones(2), 1)
            return
        assert session.recv("h", 0) is not None
        report("receiving")
        busy_s = time.process_time()
        try:
            if comm.plan.limits.deadline_s > 5:
                comm.reduce([0.0])
            session.recv("h", 1)
        finally:
            report("busy", time.process_time() - busy_s)


def test_c080_a_frozen_peer_is_a_deadline_that_names_it() -> None:
    limits = {"deadline_s": 1.5, "first_deadline_s": 1.5}
    with start_to_ends(document(GLOO, limits=limits), _receive_two) as ranks:
        ranks.wait_for(1, "receiving")
        ranks.kill(0, signal.SIGSTOP)
        busy_s = ranks.wait_for(1, "busy", 20)
        ranks.kill(0)
        end = _survivors(ranks, 0)[0]
    assert end.kind == "DeadlineError"
    assert "rank 1: nothing came from rank 0 on edge 'h' within 1.5 s" in end.text
    assert busy_s < 0.4


def test_c080_a_peer_that_was_frozen_goes_on() -> None:
    with start_to_ends(document(GLOO, limits=PATIENT), _receive_two) as ranks:
        ranks.kill(0, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            ranks.wait_for(1, "busy", 1)
        ranks.kill(0, signal.SIGCONT)
        assert [end.kind for end in ranks.results(20)] == ["", ""]


# -- a peer that leaves --------------------------------------------------------------------------


def _leaves_after_two(comm: stagelink.Handler, closes: bool) -> None:
    with comm.evaluate(10) as session:
        for mb in range(10 if comm.rank == 0 else 2):
            if comm.rank == 0:
                session.send("h", torch.ones(2), mb)
            else:
                session.recv("h", mb)
    if not closes:
        comm.reduce([0.0])


@pytest.mark.parametrize("closes", [True, False])
def test_c082_the_receiver_goes_away(any_ranks: Ranks, closes: bool) -> None:
    plan = any_ranks.plan(window=2)
    end = any_ranks.run_to_ends(plan, _leaves_after_two, closes)[0]
    assert end.kind == "PeerClosedError"
    assert "rank 0: peer rank 1 " in end.text
    assert "was not sent, and " in end.text
    assert re.search(
        r"and (1 earlier message of this edge is|\d+ earlier messages of this edge are) still "
        "unacknowledged",
        end.text,
    )
    assert end.seconds < 10


def test_c082_a_receiver_that_is_slow_to_leave_takes_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It answers what it did not read; a sender must not take that for a place in its window."""
    window_is_full, sender_is_through = threading.Event(), threading.Event()
    drop = Incoming.drop

    def slow_drop(self: Incoming, *arrivals: list[Received]) -> None:
        drop(self, *arrivals)
        assert sender_is_through.wait(20)

    monkeypatch.setattr(Incoming, "drop", slow_drop)

    def run(rank: int, world_size: int, store: Store) -> None:
        plan = document(LOOPBACK, (1, 1), line(2), window=2)
        with joined(rank, world_size, store, plan) as comm, comm.evaluate(10) as session:
            if rank == 1:
                session.recv("h0", 0)
                assert window_is_full.wait(20)
                return
            try:
                for mb in range(3):
                    session.send("h0", torch.ones(2), mb)
                window_is_full.set()
                with pytest.raises(stagelink.PeerClosedError, match="left session 0"):
                    [session.send("h0", torch.ones(2), mb) for mb in range(3, 10)]
            finally:
                sender_is_through.set()

    run_threads(run, 2)
