"""A lost peer and an abort end every wait, and nothing is left behind."""

from __future__ import annotations

import gc
import itertools
import signal
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch

from stagelink.deadline import Deadline
from stagelink.testing import run_fresh
from stagelink.transport.addresses import Address
from stagelink_gloo import addresses, pair, staged
from stagelink_gloo.link import GlooSender
from stagelink_gloo.pair import Operation
from tests.gloo.conftest import close
from tests.gloo.twin import LONG_S, SURVIVOR, Case, Twin, holdings, left_since, lose_peer, pattern
from tests.support.completion import Completion
from tests.support.interrupts import struck

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Twins = tuple[Twin, Twin]

ENDS = {"death": signal.SIGKILL, "abort": signal.SIGSTOP}
CASES = [
    Case(sends, under_way, ENDS[ends], ends)
    for sends, under_way, ends in itertools.product((True, False), (True, False), ENDS)
]
EXPECTED = {
    (True, "death"): "ConnectionAbortedError: rank 1 died",
    (True, "abort"): "ConnectionAbortedError: for a test",
    (False, "death"): "ConnectionError: 1→0 by gloo: receiving 1 bytes: ",
    (False, "abort"): "ConnectionError: 1→0 by gloo: receiving 1 bytes: ",
}


def _name(case: Case) -> str:
    side = "sender" if case.sends else "receiver"
    return f"{side}-{'under way' if case.under_way else 'before payload'}-{case.ends}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_a_wait_ends(case: Case) -> None:
    with run_fresh(lose_peer, 2, case) as ranks:
        outcome = ranks.outcomes()[SURVIVOR]
    assert outcome.ok, outcome
    loss = outcome.value
    assert loss.error.startswith(EXPECTED[case.sends, case.ends])
    assert loss.seconds < 1.0
    assert not loss.arrived
    assert loss.left == (0, 0)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def _blocked(threads: ThreadPoolExecutor, call: Callable[[], object]) -> Future[object]:
    """A call that is under way in another thread."""
    entered = threading.Event()

    def run() -> object:
        entered.set()
        return call()

    future = threads.submit(run)
    assert entered.wait(LONG_S)
    return future


@pytest.mark.parametrize("aborts", [0, 1], ids=["its own", "the peer's"])
def test_an_abort_wakes_a_receiver(twins: Twins, threads: ThreadPoolExecutor, aborts: int) -> None:
    twins[1].only_announce(9)
    waiting = _blocked(threads, twins[0].next().take)
    twins[aborts].fail(ConnectionAbortedError("for a test"))
    with pytest.raises(ConnectionError, match="1→0 by gloo: receiving 1 bytes: "):
        waiting.result(timeout=1)


def test_an_abort_wakes_a_sender(
    connect: Callable[..., Twins], threads: ThreadPoolExecutor
) -> None:
    twins = connect(reading=False)
    pending = twins[0].send(pattern(9))
    waiting = _blocked(threads, pending.wait)
    twins[0].fail(ConnectionAbortedError("for a test"))
    with pytest.raises(ConnectionAbortedError):
        waiting.result(timeout=1)


def test_what_an_abort_cleaned_up_raises_when_it_is_waited_for(twins: Twins) -> None:
    pair = twins[0].transport._pairs[1]
    operation = pair.receive(pattern(1), 1, "1→0 by gloo: receiving")
    twins[0].fail(ConnectionAbortedError("for a test"))
    _wait_broken(twins[0])
    with pytest.raises(ConnectionError, match="receiving 1 bytes: given up, the connection is"):
        operation.wait()


def test_nothing_begins_after_an_abort(twins: Twins) -> None:
    twins[0].fail(ConnectionAbortedError("for a test"))
    _wait_broken(twins[0])
    with pytest.raises(RuntimeError):
        twins[0].send(pattern(9))


def test_nothing_begins_to_a_peer_that_is_gone(twins: Twins) -> None:
    twins[1].only_announce(9)
    incoming = twins[0].next()
    twins[1].transport.close(Deadline(LONG_S))
    with pytest.raises(ConnectionError, match=r"receiving 1 bytes: .* by peer"):
        incoming.take()
    with pytest.raises(RuntimeError, match="by peer"):
        twins[0].send(pattern(9))


def test_one_thread_breaks_off_for_all_links(twins: Twins) -> None:
    seen = []
    start = threading.Thread.start

    def counted(thread: threading.Thread) -> None:
        seen.append(thread.name)
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", counted)
        for _ in range(3):
            twins[0].fail(ConnectionAbortedError("for a test"))
    assert seen == ["stagelink-gloo-break-1"]


def test_a_close_while_an_abort_begins_waits_for_it(twins: Twins) -> None:
    start = threading.Thread.start
    closing = threading.Thread(target=twins[0].transport.close, args=(Deadline(LONG_S),))

    def start_late(thread: threading.Thread) -> None:
        start(closing)
        closing.join(0.1)  # time enough to go wrong
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_late)
        twins[0].fail(ConnectionAbortedError("for a test"))
    closing.join()  # an error of its own fails the test: warnings are errors
    assert not [thread for thread in threading.enumerate() if "gloo" in thread.name]


def test_an_abort_after_the_close_does_nothing(twins: Twins) -> None:
    close(twins)
    twins[0].fail(ConnectionAbortedError("for a test"))
    assert not [thread for thread in threading.enumerate() if "gloo" in thread.name]


def _wait_broken(twin: Twin) -> None:
    for thread in threading.enumerate():
        if thread.name == f"stagelink-gloo-break-{twin.peer}":
            thread.join(LONG_S)


# -- what is left ---------------------------------------------------------------------------------


def test_twenty_cycles_leave_nothing(connect: Callable[..., Twins]) -> None:
    close(connect())
    before = holdings()
    for _ in range(20):
        twins = connect()
        pendings = [twin.send(pattern(100_000)) for twin in twins]
        for twin in twins:
            twin.next().take()
        for pending in pendings:
            pending.wait()
        close(twins)
        assert left_since(before) == (0, 0)


def test_a_connection_costs_each_end_one_thread(twins: Twins) -> None:
    names = [comm.read_text() for comm in Path("/proc/self/task").glob("*/comm")]
    assert [name for name in names if "gloo" in name] == ["gloo_tcp_loop\n" for _ in twins]


def test_an_abort_with_messages_under_way_leaves_nothing(connect: Callable[..., Twins]) -> None:
    close(connect())
    before = holdings()
    twins = connect(reading=False)
    payloads = [pattern(10_000_000) for _ in range(4)]
    buffers = weakref.WeakSet(payloads)
    pendings = [twins[0].send(payload) for payload in payloads]
    del payloads
    for _ in range(4):
        twins[1].only_announce(10_000_000)
    incoming = [twins[0].next() for _ in range(4)]
    buffers.update(message.buffer for message in incoming)
    assert len(buffers) == 8
    twins[0].fail(ConnectionAbortedError("for a test"))
    close(twins)
    assert not [thread for thread in threading.enumerate() if "gloo" in thread.name]
    assert left_since(before) == (0, 0)
    del pendings, incoming
    gc.collect()
    assert not buffers


def test_a_close_with_messages_under_way_leaves_nothing(connect: Callable[..., Twins]) -> None:
    close(connect())
    before = holdings()
    twins = connect()
    pendings = [twins[0].send(pattern(10_000_000)) for _ in range(4)]
    incoming = [twins[1].next() for _ in pendings]
    close(twins)
    assert left_since(before) == (0, 0)
    del pendings, incoming


def test_an_error_that_is_kept_keeps_nothing_alive(connect: Callable[..., Twins]) -> None:
    close(connect())
    before = holdings()
    twins = connect()
    twins[1].only_announce(9)
    incoming = twins[0].next()
    twins[0].fail(ConnectionAbortedError("for a test"))
    with pytest.raises(ConnectionError) as caught:
        incoming.take()
    close(twins)
    assert left_since(before) == (0, 0)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("waiting", [Operation.wait, Operation.let_go])
def test_what_a_signal_handler_raises_is_no_closed_connection(
    waiting: Callable[[Operation], None],
) -> None:
    handles: dict[Operation, Any] = {}
    operation = Operation(handles, torch.zeros(1), "a test")
    handles[operation] = Mock(wait=struck(RuntimeError))
    with pytest.raises(RuntimeError, match="a handler's"):
        waiting(operation)


def test_what_a_signal_handler_raises_is_no_failed_send() -> None:
    """Its receipt is in: the wait for gloo is interrupted."""
    sender, done = GlooSender(Mock(), Mock()), Completion()
    sender.send(torch.zeros(1), done)
    sender._sent[0].operations[0].wait = struck(TimeoutError)  # type: ignore[method-assign]
    with pytest.raises(TimeoutError, match="a handler's"):
        sender.on_note(b"", ())
    assert not done.over


def test_what_a_signal_handler_raises_is_no_missing_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addresses, "route_to", struck(TimeoutError))
    with pytest.raises(TimeoutError, match="a handler's"):
        addresses.check_route(Mock(), Address("127.0.0.1", "a test"), "127.0.0.1")


def test_what_a_signal_handler_raises_is_no_failed_copy() -> None:
    done = Completion()
    copied = staged._Copied(Mock(send=struck(RuntimeError)), torch.zeros(1), done)
    with pytest.raises(RuntimeError, match="a handler's"):
        copied()
    assert not done.over


def test_what_a_signal_handler_raises_is_no_lost_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "_meet", struck(RuntimeError))
    with pytest.raises(RuntimeError, match="a handler's"):
        pair.connect(Mock(rank=0, peer=1, address="127.0.0.1"), "lo", Deadline(LONG_S))
