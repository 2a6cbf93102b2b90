"""Start and end: again and again, twice, in the middle of something, in a fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

import stagelink
from stagelink.testing import LeakCheck
from tests.support.pipelines import (
    GLOO,
    INLINE,
    LOOPBACK,
    SHM,
    Ranks,
    check_same,
    document,
    joined,
)

if TYPE_CHECKING:
    from torch.distributed import Store

    from stagelink.testing import RankPool
    from tests.support.pipelines import Document, Wire


def _one_session(comm: stagelink.Handler) -> None:
    with comm.evaluate(2) as session:
        for mb in range(2):
            if comm.rank == 0:
                session.send("h", torch.full((3000,), float(mb)), mb)
            else:
                check_same(session.recv("h", mb), torch.full((3000,), float(mb)))


def _cycles(rank: int, world_size: int, store: Store, plan: Document, processes: bool) -> int:
    leaks = None
    for cycle in range(20):
        with joined(rank, world_size, store, plan) as comm:
            _one_session(comm)
        if cycle == 0 and processes:
            leaks = LeakCheck("threads", "descriptors", "processes")
    if leaks is not None:
        leaks.verify()
    return threading.active_count()


def test_c042_c085_opened_and_closed_20_times(ranks: Ranks) -> None:
    # Threads share their process: there the check of every test is the one that counts.
    ranks.run_bare(_cycles, 2, ranks.plan(), ranks.wire.processes)


SCRIPT = """
    import threading, torch, stagelink
    from torch.distributed import HashStore

    plan = stagelink.Plan.from_dict({plan!r})
    closes = threading.Event()

    def run(rank, store, close):
        comm = stagelink.connect(plan, rank=rank, world_size=2, store=store, run_id="run")
        with comm.evaluate(1) as session:
            if rank == 0:
                session.send("h", torch.ones(3000), 0)
            else:
                session.recv("h", 0)
        if close:
            comm.close()
        else:
            kept.append(comm)

    kept = []
    for close in (True, False):
        store = HashStore()
        threads = [threading.Thread(target=run, args=(rank, store, close)) for rank in (0, 1)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
    print("done", flush=True)
"""


def test_c042_the_interpreter_ends() -> None:
    code = dedent(SCRIPT).format(plan=document(LOOPBACK))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        assert process.wait(20) == 0


def _beside_the_default_group(rank: int, world_size: int, store: Store, plan: Document) -> None:
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("user", store), rank=rank, world_size=world_size
    )
    try:
        with joined(rank, world_size, store, plan) as comm:
            _one_session(comm)
            _all_reduce(rank)
            _one_session(comm)
        _all_reduce(rank)
    finally:
        dist.destroy_process_group()


def _all_reduce(rank: int) -> None:
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == 3.0


@pytest.mark.parametrize("wire", [GLOO, SHM, INLINE[1]], ids=str)
def test_c045_the_users_default_group(rank_pool: RankPool, wire: Wire) -> None:
    Ranks(wire, rank_pool).run_bare(_beside_the_default_group, 2, document(wire))


def _closed_twice(comm: stagelink.Handler) -> None:
    session = comm.evaluate(1)
    comm.close()
    comm.close()
    for call in (
        lambda: session.send("h", torch.ones(1), 0),
        lambda: session.recv("h", 0),
        lambda: comm.train(1),
        lambda: comm.reduce([0.0]),
    ):
        with suppress(stagelink.UsageError), pytest.raises(stagelink.ClosedError, match="closed"):
            call()


def test_c086_closed_twice_and_used_after(ranks: Ranks) -> None:
    ranks.run(ranks.plan(), _closed_twice)


def _fails(comm: stagelink.Handler) -> None:
    with comm.train(1):
        comm.reduce([0.0])
        if comm.rank == 0:
            raise KeyError("of the user")
        comm.reduce([0.0])


def test_c086_the_users_exception_comes_out(ranks: Ranks) -> None:
    end, told = ranks.run_to_ends(ranks.plan(), _fails)
    assert (end.kind, end.text) == ("KeyError", "'of the user'")
    assert told.text == "rank 0 reports: rank 0 failed: KeyError: 'of the user'"
    assert max(end.seconds, told.seconds) < 5


def _forked(comm: stagelink.Handler) -> list[str]:
    texts: list[str] = []
    with comm.train(2) as session:
        if comm.rank == 0:
            session.isend("h", torch.ones(3000, requires_grad=True), 0)
            texts = _in_a_fork(comm, session)
            session.isend("h", torch.ones(3000, requires_grad=True), 1)
            for mb in range(2):
                check_same(session.recv_grad("h", mb), torch.ones(3000))
        else:
            for mb in range(2):
                check_same(session.recv("h", mb), torch.ones(3000))
                session.send_grad("h", torch.ones(3000), mb)
    return texts


def _in_a_fork(comm: stagelink.Handler, session: stagelink.Session) -> list[str]:
    """What a child gets that sends, receives, leaves and closes as if it were the parent."""
    out, into = os.pipe()
    child = os.fork()
    if child:
        os.close(into)
        os.waitpid(child, 0)
        with open(out, encoding="utf-8") as lines:
            return lines.read().splitlines()
    try:
        with comm, session:
            for call in (
                lambda: session.send("h", torch.ones(1), 1),
                lambda: session.recv_grad("h", 0),
                lambda: comm.reduce([0.0]),
            ):
                began = time.monotonic()
                try:
                    call()
                except stagelink.ForkedError as error:
                    os.write(into, f"{time.monotonic() - began < 10} {error}\n".encode())
        os.write(into, b"left and closed\n")
    except BaseException as error:
        os.write(into, f"{error!r}\n".encode())
    finally:
        os._exit(0)


def test_c087_a_fork(any_ranks: Ranks) -> None:
    texts, _ = any_ranks.run(any_ranks.plan(), _forked)
    assert len(texts) == 4
    for text in texts[:3]:
        assert text.startswith("True rank 0 was opened in process ")
        assert text.endswith("connect again here, or start workers by spawn")
    assert texts[3] == "left and closed"


def _fork_that_fails(comm: stagelink.Handler) -> None:
    """The child's exception leaves all its blocks; the parent's pipeline does not notice."""
    with comm.evaluate(1) as session:
        if comm.rank == 0:
            child = os.fork()
            if not child:
                try:
                    with comm, session:
                        int("no number")
                except ValueError:
                    os._exit(7)
                finally:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            session.send("h", torch.ones(3000), 0)
        else:
            check_same(session.recv("h", 0), torch.ones(3000))


def test_c087_a_fork_that_fails(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(), _fork_that_fails)
