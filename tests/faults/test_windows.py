"""A producer that is faster than its consumer waits at the window, and memory stays bounded."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stagelink.errors import ClosedError, DeadlineError, PeerClosedError, StagelinkError
from stagelink.testing import report
from tests.support.pipelines import GLOO, document, start_fresh

if TYPE_CHECKING:
    import stagelink

MIB = 1024 * 1024
WINDOW = 4


def resident_bytes() -> int:
    """Memory of this process that is in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def send_until_blocked(session: stagelink.Session, count: int) -> str:
    """Send from the second message on until the window is full; the text of the error."""
    for microbatch in range(1, count):
        value = torch.full((MIB,), microbatch % 251, dtype=torch.uint8)
        try:
            session.send("h", value, microbatch, deadline_s=1.0)
        except DeadlineError as error:
            return str(error)
    return "never blocked"


def flood(comm: stagelink.Handler, count: int) -> tuple[float, int]:
    """Rank 0 sends as fast as it can, rank 1 sleeps until a signal wakes it.

    Returns:
        Growth of memory in MiB after the first message, and on rank 0 how often it had to wait.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    with comm.evaluate(count) as session:
        if comm.rank == 0:
            session.send("h", torch.zeros(MIB, dtype=torch.uint8), 0)
            before = resident_bytes()
            text = send_until_blocked(session, count)
            report("blocked", text)
            first = int(text.split("microbatch ")[1].split()[0])
            for again in range(first, count):
                value = torch.full((MIB,), again % 251, dtype=torch.uint8)
                session.send("h", value, again)
            return (resident_bytes() - before) / MIB, first
        report("asleep")
        signal.sigwait({signal.SIGUSR1})
        got = session.recv("h", 0)
        before = resident_bytes()
        for microbatch in range(1, count):
            got = session.recv("h", microbatch)
            assert got is not None
            assert bool((got == microbatch % 251).all())
        return (resident_bytes() - before) / MIB, 0


def test_c048_the_producer_waits_at_the_window_and_memory_is_bounded() -> None:
    plan = document(GLOO, window=WINDOW)
    with start_fresh(plan, flood, 500) as ranks:
        ranks.wait_for(1, "asleep")
        text = ranks.wait_for(0, "blocked")
        assert "the window of 4 is taken" in text
        assert "to rank 1" in text
        ranks.kill(1, signal.SIGUSR1)
        (sender_mib, admitted), (receiver_mib, _) = ranks.results(50.0)
    assert admitted == WINDOW
    assert sender_mib < WINDOW + 16
    assert receiver_mib < WINDOW + 16


def close_while_blocked(comm: stagelink.Handler) -> str:
    """Rank 0 closes in one thread while another waits at the window."""
    if comm.rank == 1:
        with comm.evaluate(20) as session:
            report("ready")
            try:
                session.recv("h", 19)
            except PeerClosedError as error:
                return str(error)
    session = comm.evaluate(20)
    told: list[str] = []
    full = threading.Event()

    def send() -> None:
        try:
            for microbatch in range(20):
                if microbatch == WINDOW:
                    full.set()
                session.send("h", torch.ones(10), microbatch)
        except StagelinkError as error:
            told.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=send)
    thread.start()
    assert full.wait(10.0)
    comm.close(5.0)
    thread.join(5.0)
    assert not thread.is_alive()
    return told[0]


def test_c048_closing_while_blocked_works() -> None:
    with start_fresh(document(GLOO, window=WINDOW), close_while_blocked) as ranks:
        sender, receiver = ranks.results(20.0)
    assert sender.startswith(ClosedError.__name__)
    assert "peer rank 0 closed" in receiver
