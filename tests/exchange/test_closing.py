"""Closing gives everything back and says goodbye, whatever a transport or an observer raises."""

from __future__ import annotations

import _thread
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch
from torch.distributed import PrefixStore

import stagelink
from stagelink.control import reader
from stagelink.links import node
from stagelink.testing import run_threads
from stagelink.transport.contract import Capabilities
from stagelink.transport.hooks import hookimpl
from stagelink.transport.loopback import Loopback
from tests.support.pipelines import LOOPBACK, document, joined

if TYPE_CHECKING:
    from torch.distributed import Store

    from stagelink.deadline import Deadline
    from stagelink.transport.contract import Link, Port, Receiver, Sender
    from tests.support.pipelines import Document, Ranks


T = TypeVar("T")


class Stuck(Loopback):
    """Each of its parts raises when it is closed."""

    name = "stuck"
    capabilities = Capabilities(
        devices=frozenset({"cpu"}), auto_rank=0, same_process=True, copies_on_begin=True
    )

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
        return _that_raises(super().open_sender(link, port, deadline), "sender")

    def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> Receiver:
        return _that_raises(super().open_receiver(link, port, deadline), "receiver")

    def close(self, deadline: Deadline) -> None:
        _raise("transport")


def _raise(what: str) -> None:
    raise OSError(f"the {what} is stuck")


def _that_raises(end: T, what: str) -> T:
    raising: Any = end
    raising.close = lambda deadline: _raise(what)
    return end


class Observer:
    def __init__(self) -> None:
        self.closed: list[str] = []

    @hookimpl
    def stagelink_link_closed(self, link: Link) -> None:
        self.closed.append(str(link))


def _stuck_plan() -> Document:
    plan = document(LOOPBACK)
    plan["links"] = [{"transport": "stuck"}]
    return plan


def _send_one(comm: stagelink.Handler) -> None:
    with comm.evaluate(1) as session:
        if comm.rank == 0:
            session.send("h", torch.ones(3), 0)
        else:
            session.recv("h", 0)


def test_a_transport_that_cannot_be_closed_harms_nobody_else() -> None:
    observers = [Observer(), Observer()]

    def run(rank: int, world_size: int, store: Store) -> str:
        comm = stagelink.connect(
            stagelink.Plan.from_dict(_stuck_plan()),
            rank=rank,
            world_size=world_size,
            store=store,
            run_id="run",
            transports=[Stuck],
            observers=[observers[rank]],
        )
        _send_one(comm)
        with pytest.raises(stagelink.TransportError, match="is stuck") as caught:
            comm.close()
        assert isinstance(caught.value.__cause__, OSError)
        comm.close()
        return str(caught.value)

    for text in run_threads(run, 2):  # that no thread is left is checked after every test
        assert text.startswith("closing ")
    assert [sorted(observer.closed) for observer in observers] == [
        ["0→1 by stuck", "1→0 by stuck"]
    ] * 2


def test_the_users_exception_comes_out_all_the_same(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "stagelink"):
        end, told = ranks.run_to_ends(_stuck_plan(), _fails, transports=[Stuck])
    assert end.kind == "ZeroDivisionError"
    assert "ZeroDivisionError: of the user" in told.text
    assert "while it closed after a failure: closing" in caplog.text


def _fails(comm: stagelink.Handler) -> None:
    _send_one(comm)
    comm.reduce([0.0])
    if comm.rank == 0:
        raise ZeroDivisionError("of the user")
    comm.reduce([0.0])


# -- a failure that no connection brings ---------------------------------------------------------


_Start = Callable[[Callable[[], None], tuple[()]], int]


def test_a_waiting_rank_finds_the_abort_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_LONG_S", 0.1)
    monkeypatch.setattr(reader, "_LOOK_S", 0.05)
    monkeypatch.setattr(node, "_EVERY_S", 0.05)

    def run(rank: int, world_size: int, store: Store) -> str:
        with joined(rank, world_size, store, document(LOOPBACK)) as comm:
            if rank == 0:
                text = '{"rank":7,"text":"what no connection told"}'
                comm._engine.node.rendezvous.tell_failure(text)
            with pytest.raises(stagelink.AbortedError) as caught:
                comm.wait(Future(), "what never happens")
            return str(caught.value)

    assert run_threads(run, 2) == ["rank 7 reports: what no connection told"] * 2


def _start_nothing(run: Callable[[], None], arguments: tuple[()]) -> int:
    raise RuntimeError("can't start new thread")


def _start_in_vain(run: Callable[[], None], arguments: tuple[()]) -> int:
    """As where the new thread has no memory for its first step."""
    return 0


@pytest.mark.parametrize("start", [_start_nothing, _start_in_vain])
def test_a_failure_is_told_though_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch, start: _Start
) -> None:
    connected = threading.Barrier(2, timeout=20)

    def run(rank: int, world_size: int, store: Store) -> str:
        with joined(rank, world_size, store, document(LOOPBACK)) as comm:
            connected.wait()
            monkeypatch.setattr(_thread, "start_new_thread", start)
            monkeypatch.setattr(threading, "_start_new_thread", start)
            if rank == 0:
                comm.abort(OSError("out of memory"))
            with pytest.raises(stagelink.AbortedError) as caught:
                comm.reduce([0.0])
            return str(caught.value)

    for text in run_threads(run, 2):
        assert "OSError: out of memory" in text


def test_a_failure_is_left_in_the_store() -> None:
    def run(rank: int, world_size: int, store: Store) -> str:
        keys = None
        try:
            with joined(rank, world_size, store, document(LOOPBACK)) as comm:
                rendezvous = comm._engine.node.rendezvous
                keys = PrefixStore(f"{rendezvous._keys.prefix}/{rendezvous.generation}", store)
                comm.reduce([0.0])
                if rank == 0:
                    _raise("user")
                comm.reduce([0.0])
        except (OSError, stagelink.AbortedError):
            pass
        assert keys is not None
        return keys.get("abort").decode()

    for text in run_threads(run, 2):
        assert text == '{"rank":0,"text":"rank 0 failed: OSError: the user is stuck"}'
