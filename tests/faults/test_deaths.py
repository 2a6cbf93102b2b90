"""A rank dies, freezes or fails: all others hear of it, with the cause, and leave nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from stagelink.errors import AbortedError, DeadlineError, PeerLostError, StagelinkError
from stagelink.testing import LeakCheck, report, run_fresh
from stagelink.transport.contract import Deadline
from tests.support.pipelines import GLOO, document, joined, line, start_fresh

if TYPE_CHECKING:
    from torch.distributed import Store

    import stagelink

TOLD_S = 10.0
SMALL, LARGE = 1000, 64 * 1024 * 1024


def stream(comm: stagelink.Handler, size_bytes: int) -> None:
    """Send down the line until somebody fails; reports "going" when the line is full."""
    last = len(comm.plan.stages) - 1
    here = comm.stage.index
    for number in range(1_000_000):
        with comm.evaluate(4) as session:
            for microbatch in session.mine:
                value: torch.Tensor | None = torch.zeros(size_bytes, dtype=torch.uint8)
                if here > 0:
                    value = session.recv(f"h{here - 1}", microbatch)
                if here < last:
                    session.send(f"h{here}", value, microbatch)
        if number == 1:
            report("going")


def stream_and_tell(rank: int, world_size: int, store: Store, size_bytes: int) -> tuple[str, str]:
    """What was raised, and what was left behind afterwards."""
    leaks = LeakCheck("threads", "descriptors", "processes")
    plan = document(GLOO, [1] * world_size, line(world_size))
    told = "nothing was raised"
    try:
        with joined(rank, world_size, store, plan) as comm:
            stream(comm, size_bytes)
    except StagelinkError as error:
        told = f"{type(error).__name__}: {error}"
    left = ""
    try:
        leaks.verify(settle_s=3.0)
    except AssertionError as error:
        left = str(error)
    return told, left


@pytest.mark.parametrize("size_bytes", [SMALL, LARGE], ids=["small", "mid-payload"])
def test_c010_a_killed_rank_is_named_by_all_others(size_bytes: int) -> None:
    with run_fresh(stream_and_tell, 4, size_bytes) as ranks:
        for rank in range(4):
            ranks.wait_for(rank, "going")
        began = time.monotonic()
        ranks.kill(1)
        outcomes = ranks.outcomes(TOLD_S + 10)
        took_s = time.monotonic() - began
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2, 3):
        told, left = outcomes[rank].value
        assert "rank 1 died" in told, f"rank {rank}: {told}"
        kind = AbortedError if rank == 3 else PeerLostError
        assert told.startswith(kind.__name__) or told.startswith(AbortedError.__name__)
        # A gloo operation in mid-payload is not told of the death: one daemon thread keeps it.
        lines = [text for text in left.splitlines()[1:] if "thread" in text]
        assert len(lines) <= (1 if size_bytes == LARGE else 0), f"rank {rank}: {left}"
    assert took_s < TOLD_S + 3.0  # the leak check's patience is not the error's


def raise_in_the_middle(comm: stagelink.Handler) -> None:
    """Rank 1's own code fails after the first microbatches."""
    with comm.evaluate(20) as session:
        for microbatch in session.mine:
            if comm.rank == 1 and microbatch == 5:
                raise ValueError("the data of microbatch 5 is bad")
            here = comm.stage.index
            value = torch.ones(10) if here == 0 else session.recv(f"h{here - 1}", microbatch)
            if here < 3:
                session.send(f"h{here}", value, microbatch)


def test_an_exception_in_user_code_reaches_every_rank() -> None:
    plan = document(GLOO, [1] * 4, line(4))
    with start_fresh(plan, raise_in_the_middle) as ranks:
        outcomes = ranks.outcomes(TOLD_S)
    assert all(outcome.error for outcome in outcomes), outcomes
    for outcome in outcomes:
        assert "the data of microbatch 5 is bad" in (outcome.error or "")
    assert "ValueError" in (outcomes[1].error or "").splitlines()[-1]
    assert "rank 1 failed" in (outcomes[3].error or "")


def wait_for_ever(comm: stagelink.Handler) -> None:
    """Rank 1 waits for a message that rank 0 never sends."""
    with comm.evaluate(1) as session:
        report("waiting")
        if comm.rank == 1:
            session.recv("h", 0)
        else:
            comm.reduce([0.0])


def test_c039_ctrl_c_ends_a_receive_and_tells_the_peer() -> None:
    plan = document(GLOO, limits={"deadline_s": 60.0, "first_deadline_s": 60.0})
    with start_fresh(plan, wait_for_ever) as ranks:
        for rank in (0, 1):
            ranks.wait_for(rank, "waiting")
        began = time.monotonic()
        ranks.kill(1, signal.SIGINT)
        outcomes = ranks.outcomes(TOLD_S)
        assert time.monotonic() - began < 5.0
    assert "KeyboardInterrupt" in (outcomes[1].error or "").splitlines()[-1]
    assert "KeyboardInterrupt" in (outcomes[0].error or "")


def test_c080_a_frozen_peer_is_a_deadline_and_costs_nothing() -> None:
    with start_fresh(document(GLOO), receive_frozen, 3.0) as ranks:
        ranks.wait_for(0, "ready")
        text = ranks.wait_for(1, "told", timeout_s=10.0)
        ranks.kill(0, signal.SIGCONT)
        ranks.outcomes(TOLD_S)
    told, waited_s, busy_s = text
    assert "from rank 0" in told
    assert 3.0 <= waited_s < 5.0
    assert busy_s < 0.5


def receive_frozen(comm: stagelink.Handler, deadline_s: float) -> None:
    """Rank 1 waits for rank 0, which stops itself."""
    with comm.evaluate(1) as session:
        if comm.rank == 0:
            report("ready")
            os.kill(os.getpid(), signal.SIGSTOP)
            session.send("h", torch.arange(3), 0)
            return
        began, busy = time.monotonic(), time.process_time()
        try:
            session.recv("h", 0, deadline_s=deadline_s)
        except DeadlineError as error:
            spent = time.monotonic() - began, time.process_time() - busy
            report("told", (str(error), *spent))


def receive_late(comm: stagelink.Handler) -> list[int]:
    """Rank 0 stops itself before it sends."""
    with comm.evaluate(1) as session:
        if comm.rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
            session.send("h", torch.arange(3), 0)
            return []
        report("ready")
        got = session.recv("h", 0)
    return [] if got is None else got.tolist()


def wait_stopped(pid: int) -> None:
    """Block until a process has been stopped by a signal."""
    deadline = Deadline(TOLD_S)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert not deadline.passed, "rank 0 did not stop"
        time.sleep(0.005)  # a stop of a process that is not our child can only be polled


def test_c080_a_peer_that_goes_on_does_no_damage() -> None:
    with start_fresh(document(GLOO), receive_late) as ranks:
        ranks.wait_for(1, "ready")
        wait_stopped(ranks.pids[0])
        ranks.kill(0, signal.SIGCONT)
        assert ranks.results(TOLD_S)[1] == [0, 1, 2]


def fork_and_send(comm: stagelink.Handler) -> str:
    """Rank 0 forks in the middle: the child's calls fail at once, the parent's go on."""
    told = ""
    with comm.evaluate(2) as session:
        for microbatch in range(2):
            if comm.rank == 1:
                got = session.recv("h", microbatch)
                assert got is not None
                assert got.tolist() == [microbatch] * 3
                continue
            session.send("h", torch.full((3,), microbatch), microbatch)
            if microbatch == 0:
                told = in_child(lambda: session.send("h", torch.ones(3), 1))
    return told


def in_child(call: object) -> str:
    """The text of what a call raises in a forked child, which then ends without a trace."""
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            call()  # type: ignore[operator]
            text = "nothing was raised"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(sink, text.encode())
        os._exit(0)
    os.close(sink)
    with open(source, "rb") as file:
        text = file.read().decode()
    os.waitpid(pid, 0)
    return text


def test_c087_a_forked_child_is_told_at_once() -> None:
    with start_fresh(document(GLOO), fork_and_send) as ranks:
        told = ranks.results(TOLD_S)[0]
    assert told.startswith("ForkedError")
    assert "was opened in process" in told
    assert "spawn" in told
