"""Every call of the store ends: in time, by a signal, or with its link; and none is made after."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed import FileStore, TCPStore

import stagelink
from stagelink.control import store
from stagelink.control.launch import StoreAddress
from stagelink.control.opening import open_store
from stagelink.control.store import StoreClient
from stagelink.deadline import Deadline
from stagelink.errors import ConnectError
from stagelink.testing import report, run_fresh
from tests.support.interrupts import Interrupted
from tests.support.pipelines import SHM, document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import Store

    from stagelink.testing import RankProcesses


def _serve(rank: int, world_size: int, store: Store) -> None:
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    report("serving", server.port)
    signal.pause()


class Server:
    """A store's host of its own, to be stopped and killed."""

    def __init__(self, process: RankProcesses[None]) -> None:
        self._process = process
        self.port = process.wait_for(0, "serving")

    def stop(self) -> None:
        self._process.kill(0, signal.SIGSTOP)
        (pid,) = self._process.pids
        threads = Path(f"/proc/{pid}/task")
        # A thread of the store's may answer until the signal has reached it.
        while any("State:\tT" not in (task / "status").read_text() for task in threads.iterdir()):
            time.sleep(0.001)

    def go_on(self) -> None:
        self._process.kill(0, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill(0, signal.SIGKILL)

    def client(self) -> StoreClient:
        where = StoreAddress.parse(f"tcp://127.0.0.1:{self.port}")
        return open_store(where, 1, 2, Deadline(20))


@pytest.fixture
def server() -> Iterator[Server]:
    with run_fresh(_serve, 1) as process:
        yield Server(process)


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def _look(store: Store) -> bool:
    return bool(store.check(["key"]))


def test_a_stopped_host_ends_a_call_by_its_deadline_and_no_other_is_made(server: Server) -> None:
    client = server.client()
    assert not client.call(_look, Deadline(20))
    lent = client.lend("prefix", Deadline(20))
    server.stop()
    freed = threading.Event()

    def wait_in_the_lent_store() -> None:
        with pytest.raises(RuntimeError):
            _look(lent)
        freed.set()

    waiting = threading.Thread(target=wait_in_the_lent_store)
    waiting.start()
    where = f"the store at tcp://127.0.0.1:{server.port}"
    with _within(10), pytest.raises(ConnectError, match=f"{where} did not answer within 0.2 s"):
        client.call(_look, Deadline(0.2))
    calls: list[Store] = []
    with _within(10):
        with pytest.raises(ConnectError, match=f"{where} did not answer within 0.2 s"):
            client.call(calls.append, Deadline(20))
        assert client.submit(calls.append) is None
        assert freed.wait(10)
        waiting.join()
        client.close(20)
    assert not calls


def test_a_killed_host_ends_a_call_at_once(server: Server) -> None:
    client = server.client()
    server.stop()
    threading.Timer(0.1, server.kill).start()
    with _within(15), pytest.raises(ConnectError, match="is gone: "):
        client.call(_look, Deadline(60))
    with _within(15), pytest.raises(ConnectError, match="is gone"):
        client.call(_look, Deadline(60))
    client.close(20)


class _StoppedError(Exception):
    pass


def _raise(*_: object) -> None:
    raise _StoppedError


@pytest.mark.parametrize("what", ["call", "open", "clone"])
def test_a_signal_ends_a_call(server: Server, what: str) -> None:
    client = server.client()
    beside = TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
    calls: dict[str, Callable[[], object]] = {
        "call": lambda: client.call(_look, Deadline(60)),
        "open": server.client,
        "clone": lambda: StoreClient.of(beside, Deadline(60)),
    }
    server.stop()
    before = signal.signal(signal.SIGUSR1, _raise)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with _within(10), pytest.raises(_StoppedError):
            calls[what]()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    with _within(10):
        client.close(0.1)
    with _within(20):
        store._cut_all()  # as at the end of the process, where torch's constructor is at work
    assert not [thread for thread in threading.enumerate() if thread.name == "stagelink-store"]


def test_a_stopped_host_ends_the_opening_by_its_deadline(server: Server) -> None:
    server.stop()
    where = StoreAddress.parse(f"tcp://127.0.0.1:{server.port}")
    with _within(10), pytest.raises(ConnectError, match=r"does not answer as a store within 0.2"):
        open_store(where, 1, 2, Deadline(0.2))


# -- a rank that leaves


def _plan(**limits: float) -> stagelink.Plan:
    return stagelink.Plan.from_dict(document(SHM, limits=limits))


def _leaves(rank: int, world_size: int, store: Store, port: int, pid: int, how: str) -> float:
    """Seconds that it took to leave when the store's host had been stopped."""
    hers = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    plan = _plan(close_deadline_s=60.0 if how == "interrupt" else 1.5)
    began = 0.0
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    try:
        with stagelink.connect(plan, rank=rank, world_size=2, store=hers, run_id=how) as comm:
            comm.reduce([0.0])
            if rank == 0:
                os.kill(pid, signal.SIGSTOP)
            began = time.monotonic()
            comm.reduce([0.0])
            if how == "interrupt":
                interrupt.start()
            if how == "fail":
                1 / 0  # noqa: B018 - raises
    except (ZeroDivisionError, KeyboardInterrupt, stagelink.AbortedError):
        pass  # the last: the other has failed first
    seconds = time.monotonic() - began
    with suppress(KeyboardInterrupt):  # the other's may have ended the leaving before this one's
        interrupt.cancel()
        if interrupt.ident is not None:
            interrupt.join()
    store.set(f"{how} {rank}", "")
    store.wait([f"{how} {other}" for other in range(2)])
    if rank == 0:
        os.kill(pid, signal.SIGCONT)
    return seconds


def _leave_in_all_ways(
    rank: int, world_size: int, store: Store, port: int, pid: int
) -> list[float]:
    return [
        _leaves(rank, world_size, store, port, pid, how) for how in ("close", "fail", "interrupt")
    ]


def test_leaving_is_bounded_where_the_store_s_host_is_stopped(server: Server) -> None:
    (pid,) = server._process.pids
    with run_fresh(_leave_in_all_ways, 2, server.port, pid) as ranks:
        for seconds in ranks.results(60):
            assert all(found < 10 for found in seconds)


def test_the_deadline_of_connecting_is_kept_where_the_store_s_host_is_stopped(
    server: Server,
) -> None:
    """It is stopped while rank 0 waits for rank 1."""
    hers: Any = TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
    threading.Timer(0.2, server.stop).start()
    with _within(10), pytest.raises(ConnectError, match=r"the store at tcp://.* did not answer"):
        stagelink.connect(
            _plan(connect_deadline_s=0.8), rank=0, world_size=2, store=hers, run_id="run"
        )


def test_a_client_whose_thread_s_start_a_signal_ends_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To start one is to wait for it, and a busy machine makes that wait long."""
    started: list[threading.Thread] = []

    class Thread(threading.Thread):
        def start(self) -> None:
            super().start()
            started.append(self)
            raise Interrupted

    monkeypatch.setattr(threading, "Thread", Thread)
    with suppress(Interrupted):
        StoreClient("a file", FileStore(str(tmp_path / "store"), 1))
    gc.collect()
    (thread,) = started
    thread.join(20)
    assert not thread.is_alive()
