"""Messages by a worker: their order, their memory, a peer that is lost, and the end."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stagelink.deadline import Deadline
from stagelink_ucx import worker as module
from tests.support.interrupts import struck
from tests.ucx.ends import SOON_S, Ends, pattern, worker
from tests.ucx.here import needs_ucx

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.completion import Completion

pytestmark = needs_ucx

LARGE_BYTES = 8 << 20
"""More than UCX takes before the receiver has asked for it."""


@pytest.fixture(params=["tcp", "sm"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    yield from opened(request.param)


@pytest.fixture
def ends_by_tcp() -> Iterator[Ends]:
    yield from opened("tcp")


def opened(wires: str) -> Iterator[Ends]:
    both = Ends(wires).connect()
    yield both
    both.close()


def all_over(*completions: Completion) -> bool:
    return all(one.over for one in completions)


def test_a_sender_takes_nothing_before_it_knows_the_address() -> None:
    ends = Ends("tcp")
    with pytest.raises(AssertionError):
        ends.send(pattern(1))
    ends.connect()
    assert ends.ports[0].rooms == 1
    ends.send(pattern(1))
    ends.close()


def test_messages_are_done_in_their_order(ends: Ends) -> None:
    """Though UCX is through with the small ones first."""
    payloads = [pattern(size, size) for size in (LARGE_BYTES, 1, 0, 70_000, 0, 9)]
    sends = [ends.send(payload) for payload in payloads]
    assert ends.sent == []
    receives = [ends.receive(payload.numel()) for payload in payloads]
    ends.progress_until(lambda: all_over(*sends, *(done for done, _ in receives)))
    assert ends.sent == ends.received == list(range(len(payloads)))
    for payload, (done, buffer) in zip(payloads, receives, strict=True):
        assert done.wait(0) is None
        assert torch.equal(buffer, payload)


def test_nothing_is_kept_of_what_is_done(ends: Ends) -> None:
    payload = pattern(LARGE_BYTES)
    sent = ends.send(payload)
    received, buffer = ends.receive(LARGE_BYTES)
    kept = weakref.ref(payload), weakref.ref(buffer)
    del payload, buffer
    assert None not in [one() for one in kept]
    ends.progress_until(lambda: all_over(sent, received))
    gc.collect()
    assert [one() for one in kept] == [None, None]


def test_memory_that_ucx_was_given_is_kept_though_the_call_was_interrupted(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a signal handler's exception as soon as the call has returned."""
    ucx = ends.workers[0]._ucx
    real = ucx.send

    def interrupted(*arguments: Any) -> None:
        real(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(ucx, "send", interrupted)
    payload = pattern(LARGE_BYTES)
    kept = weakref.ref(payload)
    with pytest.raises(KeyboardInterrupt):
        ends.send(payload)
    monkeypatch.undo()
    del payload
    gc.collect()
    assert kept() is not None
    received, buffer = ends.receive(LARGE_BYTES)
    ends.progress_until(lambda: received.over)
    assert torch.equal(buffer, pattern(LARGE_BYTES))
    ends.sender.close(Deadline(SOON_S))
    gc.collect()
    assert kept() is not None
    ends.close()
    gc.collect()
    assert kept() is None


def test_a_receiver_hears_of_a_sender_that_went_without_a_word(ends_by_tcp: Ends) -> None:
    ends = ends_by_tcp
    met = ends.send(pattern(9)), ends.receive(9)[0]
    ends.progress_until(lambda: all_over(*met))
    waiting, _ = ends.receive(9)
    ends.sender.abort(ConnectionAbortedError("for a test"))
    ends.workers[0].close(Deadline(SOON_S))
    ends.progress_until(lambda: bool(ends.ports[1].failures), ends.workers[1])
    (failure,) = ends.ports[1].failures
    assert str(failure) == "UCX has lost its connection with rank 0"
    assert isinstance(failure, ConnectionError)
    assert not waiting.over


def test_a_sender_hears_of_a_receiver_that_went_without_a_word(ends_by_tcp: Ends) -> None:
    ends = ends_by_tcp
    met = ends.send(pattern(9)), ends.receive(9)[0]
    ends.progress_until(lambda: all_over(*met))
    sent = ends.send(pattern(LARGE_BYTES))
    ends.receiver.abort(ConnectionAbortedError("for a test"))
    ends.workers[1].close(Deadline(SOON_S))
    ends.progress_until(lambda: sent.over and bool(ends.ports[0].failures), ends.workers[0])
    with pytest.raises(ConnectionError, match=f"0→1 by ucx: sending {LARGE_BYTES} bytes: UCX: "):
        sent.wait(0)
    with pytest.raises(ConnectionError, match="sending 9 bytes: UCX: "):
        ends.send(pattern(9)).wait(0)


def test_an_end_that_has_left_is_told_nothing(ends_by_tcp: Ends) -> None:
    ends = ends_by_tcp
    met = ends.send(pattern(9)), ends.receive(9)[0]
    ends.progress_until(lambda: all_over(*met))
    ends.receiver.close(Deadline(SOON_S))
    ends.workers[0].close(Deadline(SOON_S))
    lost = ends.workers[1]
    ends.progress_until(lambda: 0 in lost._given_up, lost)
    assert ends.ports[1].failures == []


def test_no_wire_leads_to_the_peer() -> None:
    by_memory, by_tcp = worker("sm"), worker("tcp")
    with pytest.raises(ConnectionError, match="connecting with rank 1: Destination is unreach"):
        by_memory.connect(1, by_tcp.address)
    for each in by_memory, by_tcp:
        each.close(Deadline(SOON_S))


def test_what_is_sent_arrives_though_its_end_is_closed(ends: Ends) -> None:
    """UCX calls a message sent that has not left its own buffers."""
    payload = pattern(100_000)
    sends = [ends.send(payload)]
    while sends[-1].over:
        sends.append(ends.send(payload))
    closing = threading.Thread(target=ends.workers[0].close, args=(Deadline(SOON_S),))
    closing.start()
    receives = [ends.receive(payload.numel()) for _ in sends]
    ends.progress_until(lambda: all_over(*(done for done, _ in receives)), ends.workers[1])
    closing.join()
    assert all(torch.equal(buffer, payload) for _, buffer in receives)


def test_a_close_does_not_wait_for_a_peer_that_is_given_up(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FAREWELL_S", 1000.0)
    ends.send(pattern(LARGE_BYTES))
    ends.sender.abort(ConnectionAbortedError("for a test"))
    ends.workers[0].close(Deadline(1000))


def test_a_close_keeps_its_deadline(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FAREWELL_S", 1000.0)
    ends.send(pattern(LARGE_BYTES))
    ends.workers[0].close(Deadline(0.1))


def test_nothing_begins_after_the_end(ends: Ends) -> None:
    ends.workers[1].close(Deadline(SOON_S))
    ends.workers[1].close(Deadline(SOON_S))
    assert not ends.workers[1].progress()
    with pytest.raises(ConnectionError, match="receiving: the worker is closed"):
        ends.receive(9)


@pytest.mark.parametrize("size_bytes", [5, LARGE_BYTES])
def test_a_message_that_is_shorter_than_its_header_says(ends: Ends, size_bytes: int) -> None:
    ends.send(pattern(size_bytes))
    done, _ = ends.receive(size_bytes + 4)
    ends.progress_until(lambda: done.over)
    with pytest.raises(ConnectionError, match=f"{size_bytes + 4} bytes: {size_bytes} came"):
        done.wait(0)


@pytest.mark.parametrize("note", [b"", b"\xff" * 40, b"ucx1"])
def test_a_note_that_is_no_address(ends_by_tcp: Ends, note: bytes) -> None:
    """UCX itself would end the process."""
    for end in (ends_by_tcp.sender, ends_by_tcp.receiver):
        with pytest.raises(ValueError, match="no address of a UCX worker"):
            end.on_note(note, ())


def test_an_address_that_was_cut() -> None:
    ends = Ends("tcp")
    with pytest.raises(ValueError, match="no address of a UCX worker"):
        ends.sender.on_note(ends.ports[1].notes[0][:-1], ())
    ends.connect()
    ends.close()


def test_a_send_that_failed_and_was_interrupted(
    ends_by_tcp: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it returned is an error, and no operation that UCX could be asked of."""
    worker = ends_by_tcp.workers[0]
    monkeypatch.setattr(worker._ucx, "send", lambda *_: (1 << 64) - 3)
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_begun", struck(RuntimeError))
        with pytest.raises(RuntimeError, match="a handler's"):
            ends_by_tcp.send(pattern(9))
    worker.progress()
    assert worker._pending == []
