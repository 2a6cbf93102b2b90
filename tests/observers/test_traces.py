"""A message's trace context: asked for once, in every event of the message, never unasked."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

from stagelink.errors import PluginError
from stagelink.testing import RankFailedError
from stagelink.transport.header import NO_TRACE, TRACE_BYTES
from stagelink.transport.hooks import hookimpl
from tests.observers.watching import NARROW, Keeper, exchange, overfill, run
from tests.support.pipelines import INLINE, LOOPBACK, Wire, document, tensor

if TYPE_CHECKING:
    import stagelink
    from stagelink.transport.contract import Link
    from stagelink.transport.events import Event
    from stagelink.transport.header import Direction


class Numbering:
    """Gives each message a number for its trace, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: dict[bytes, tuple[object, ...]] = {}
        self.threads: set[str] = set()

    @hookimpl
    def stagelink_trace(
        self, link: Link, edge: str, direction: Direction, microbatch: int, session: int
    ) -> bytes:
        trace = len(self.asked).to_bytes(TRACE_BYTES, "big")
        self.asked[trace] = (link, edge, direction, microbatch, session)
        self.threads.add(threading.current_thread().name)
        return trace


class Wrong:
    def __init__(self, answer: object) -> None:
        self.answer = answer

    @hookimpl
    def stagelink_trace(self) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("wire", [LOOPBACK, INLINE[0]], ids=str)
def test_it_is_in_every_event_of_its_message_on_both_ranks(wire: Wire) -> None:
    keeper, numbering = Keeper(), Numbering()
    run(document(wire, (1, 1)), exchange, 4, observers=[keeper, numbering])
    assert len(numbering.asked) == 8
    assert numbering.threads <= {"rank 0", "rank 1"}
    for event in keeper.events:
        about = (event.link, event.edge, event.direction, event.microbatch, event.session)
        assert numbering.asked[event.trace] == about
    for name in ("send", "wait_peer", "wait_wire", "recv"):
        assert sorted(e.trace for e in keeper.named(name)) == sorted(numbering.asked)


def _to_two(comm: stagelink.Handler) -> None:
    with comm.evaluate(1) as session:
        if comm.stage.index == 0:
            session.send("h", torch.ones(2), 0)
        else:
            session.recv("h", 0)


def test_each_receiver_s_message_has_its_own() -> None:
    keeper = Keeper()
    plan = document(LOOPBACK, (1, 1, 1), [tensor("h", 0, 1, 2)])
    run(plan, _to_two, observers=[keeper, Numbering()])
    by_peer = {event.peer: event.trace for event in keeper.named("send")}
    assert by_peer == {event.rank: event.trace for event in keeper.named("recv")}
    assert len(set(by_peer.values())) == 2


def test_without_an_implementation_there_is_none() -> None:
    keeper = Keeper()
    run(document(LOOPBACK), exchange, 2, observers=[keeper])
    assert {event.trace for event in keeper.events} == {NO_TRACE}


def test_nobody_has_an_opinion() -> None:
    keeper = Keeper()
    run(document(LOOPBACK), exchange, 2, observers=[keeper, Wrong(None)])
    assert {event.trace for event in keeper.events} == {NO_TRACE}


def test_an_event_says_when_it_ended_and_whose_it_is() -> None:
    keeper = Keeper()
    run(document(LOOPBACK), exchange, 1, observers=[keeper])

    def of(name: str) -> Event:
        return next(e for e in keeper.named(name) if e.direction == 0)

    peer, wire, recv = of("wait_peer"), of("wait_wire"), of("recv")
    assert recv.ended_s == wire.ended_s
    assert abs(wire.ended_s - wire.seconds - peer.ended_s) < 1e-9
    assert abs(recv.seconds - peer.seconds - wire.seconds) < 1e-9
    assert (of("send").rank, of("send").peer) == (0, 1)
    assert {(e.rank, e.peer) for e in (peer, wire, recv)} == {(1, 0)}


def test_a_wait_for_the_window_is_the_sender_s(full: threading.Event) -> None:
    keeper, numbering = Keeper(), Numbering()
    run(NARROW, overfill, full, observers=[keeper, numbering])
    (wait,) = keeper.named("wait_window")
    (send,) = (event for event in keeper.named("send") if event.microbatch == 1)
    assert (wait.rank, wait.peer, wait.microbatch, wait.payload_bytes) == (0, 1, 1, 16)
    assert wait.trace == send.trace
    assert wait.seconds > 0
    assert wait.ended_s <= send.ended_s


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"short", rf"of .*Wrong.* answered b'short'; a trace context is {TRACE_BYTES} bytes"),
        ("x" * TRACE_BYTES, r"of .*Wrong.* answered 'xxx"),
        (ZeroDivisionError("dear me"), r"of .*Wrong.* raised ZeroDivisionError: dear me"),
    ],
)
def test_a_wrong_answer_fails_every_rank(answer: object, text: str) -> None:
    with pytest.raises(RankFailedError, match=f"stagelink_trace {text}") as caught:
        run(document(LOOPBACK), exchange, 1, observers=[Wrong(answer)])
    assert isinstance(caught.value.__cause__, PluginError)
    assert "rank 1" in str(caught.value)
