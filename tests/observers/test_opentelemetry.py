"""Spans of both ranks of a message are in one trace, with the send's as the parent."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Sampler
from opentelemetry.trace import SpanContext, SpanKind, StatusCode, TraceFlags

from stagelink.testing import RankFailedError, run_fresh, run_threads
from stagelink.transport.contract import Link
from stagelink.transport.events import Event
from stagelink.transport.header import NO_TRACE, TRACE_BYTES, Direction
from stagelink_opentelemetry import Spans
from stagelink_opentelemetry.packing import pack, unpack
from tests.observers.watching import NARROW, Keeper, connect, exchange, overfill, park, run
from tests.support.pipelines import INLINE, LOOPBACK, SHM, Document, Wire, document, tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.sdk.trace import ReadableSpan
    from torch.distributed import Store

    import stagelink

SpanIds = tuple[int, int]
"""Of the trace, and of the span."""


@dataclass
class Site:
    """A provider of a test's own, and what has ended there."""

    sampler: Sampler | None = None
    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def __post_init__(self) -> None:
        self.provider = TracerProvider(sampler=self.sampler, shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def observer(self) -> Spans:
        return Spans(self.provider)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


def context_of(span: ReadableSpan) -> SpanContext:
    context = span.get_span_context()
    assert isinstance(context, SpanContext)
    return context


def by_message(spans: Sequence[ReadableSpan]) -> dict[Any, ReadableSpan]:
    """By (direction, microbatch); each once."""
    found = {
        (about["stagelink.direction"], about["stagelink.microbatch"]): span
        for span in spans
        if (about := span.attributes) is not None
    }
    assert len(found) == len(spans)
    return found


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


# -- a message


@pytest.mark.parametrize("wire", [LOOPBACK, INLINE[0]], ids=str)
def test_a_receive_is_the_child_of_its_send(wire: Wire) -> None:
    site = Site()
    run(document(wire), exchange, 3, observers=[site.observer])
    sends, recvs = (by_message(site.named(f"{name} h")) for name in ("send", "recv"))
    ways = [(way, m) for way in ("forward", "backward") for m in range(3)]
    assert sorted(sends) == sorted(recvs) == sorted(ways)
    for key, recv in recvs.items():
        sent = context_of(sends[key])
        assert recv.parent is not None
        assert (recv.parent.trace_id, recv.parent.span_id) == (sent.trace_id, sent.span_id)
        assert recv.parent.is_remote
        assert sends[key].parent is None
        assert (sends[key].kind, recv.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert len({context_of(span).trace_id for span in sends.values()}) == 6


def test_the_attributes_of_both() -> None:
    site = Site()
    run(document(LOOPBACK), exchange, 1, observers=[site.observer])
    for name, rank in (("send h", 1), ("recv h", 0)):
        span = by_message(site.named(name))["backward", 0]
        assert dict(span.attributes or {}) == {
            "stagelink.edge": "h",
            "stagelink.direction": "backward",
            "stagelink.microbatch": 0,
            "stagelink.session": 0,
            "stagelink.transport": "loopback",
            "stagelink.rank": rank,
            "stagelink.peer": 1 - rank,
            "stagelink.payload_bytes": 12,
        }


def test_waits_are_children_of_the_send_and_lie_within_the_receive(full: threading.Event) -> None:
    site, keeper = Site(), Keeper()
    run(NARROW, overfill, full, observers=[site.observer, keeper])
    sends, recvs = (by_message(site.named(f"{name} h")) for name in ("send", "recv"))
    for name in ("wait_peer", "wait_wire"):
        for key, wait in by_message(site.named(f"{name} h")).items():
            assert wait.parent is not None
            assert wait.parent.span_id == context_of(sends[key]).span_id
            assert wait.kind is SpanKind.INTERNAL
    slack_ns = 1_000_000  # of two clocks, read one after the other
    for key, recv in recvs.items():
        peer, wire = (by_message(site.named(f"{n} h"))[key] for n in ("wait_peer", "wait_wire"))
        assert times(recv)[0] == pytest.approx(times(peer)[0], abs=slack_ns)
        assert times(peer)[1] == pytest.approx(times(wire)[0], abs=slack_ns)
        assert times(wire)[1] == pytest.approx(times(recv)[1], abs=slack_ns)
    (window,) = site.named("wait_window h")
    assert window.parent is not None
    assert (window.parent.span_id, window.parent.is_remote) == (
        context_of(sends["forward", 1]).span_id,
        False,
    )
    began, ended = times(sends["forward", 1])
    assert began <= times(window)[0] + slack_ns
    assert times(window)[1] <= ended + slack_ns
    (event,) = keeper.named("wait_window")
    assert times(window)[1] - times(window)[0] == pytest.approx(event.seconds * 1e9, abs=1000)


def test_a_span_lies_where_its_event_was() -> None:
    site = Site()
    link = Link(0, 1, "loopback", "cpu")
    five_s_ago = time.monotonic() - 5
    event = Event("recv", link, "h", Direction.FORWARD, 0, 0, 8, 2.0, five_s_ago, NO_TRACE)
    site.observer.stagelink_event(event)
    (span,) = site.named("recv h")
    began, ended = times(span)
    assert ended - began == 2_000_000_000
    assert 4.99 < time.time() - ended * 1e-9 < 10.0


def _in_steps(comm: stagelink.Handler, site: Site) -> None:
    with site.provider.get_tracer("test").start_as_current_span(f"step {comm.rank}"):
        exchange(comm, 2)


def test_under_a_step_all_that_is_sent_in_it_is_its_trace() -> None:
    site = Site()
    run(document(LOOPBACK), _in_steps, site, observers=[site.observer])
    steps = [context_of(site.named(f"step {rank}")[0]) for rank in range(2)]
    for key, send in by_message(site.named("send h")).items():
        sender, receiver = steps if key[0] == "forward" else steps[::-1]
        assert send.parent is not None
        assert send.parent.span_id == sender.span_id
        assert send.links == ()
        recv = by_message(site.named("recv h"))[key]
        assert context_of(recv).trace_id == sender.trace_id
        assert [link.context.span_id for link in recv.links] == [receiver.span_id]


def _to_two(comm: stagelink.Handler) -> None:
    with comm.evaluate(1) as session:
        if comm.stage.index == 0:
            session.send("h", torch.ones(2), 0)
        else:
            session.recv("h", 0)


def test_several_receivers_have_a_send_each() -> None:
    site = Site()
    plan = document(LOOPBACK, (1, 1, 1), [tensor("h", 0, 1, 2)])
    run(plan, _to_two, observers=[site.observer])
    for edge in ("h>1", "h>2"):
        (send,), (recv,) = site.named(f"send {edge}"), site.named(f"recv {edge}")
        assert recv.parent is not None
        assert recv.parent.span_id == context_of(send).span_id


# -- what does not go as usual


def test_a_parked_send_ends_when_it_starts() -> None:
    site = Site()
    run(NARROW, park, threading.Event(), 2, observers=[site.observer])
    sends = by_message(site.named("send h"))
    assert {span.status.status_code for span in sends.values()} == {StatusCode.UNSET}
    first = by_message(site.named("recv h"))["forward", 0]
    assert times(sends["forward", 1])[1] >= times(first)[0]


def test_what_was_never_sent_is_an_error() -> None:
    site = Site()
    with pytest.raises(RankFailedError, match="nothing is taken"):
        run(NARROW, park, threading.Event(), 0, observers=[site.observer])
    sends = by_message(site.named("send h"))
    assert sends["forward", 0].status.status_code is StatusCode.UNSET
    lost = sends["forward", 1].status
    assert (lost.status_code, lost.description) == (StatusCode.ERROR, "not sent")


def _with_contract(comm: stagelink.Handler) -> None:
    with comm.evaluate(1) as session:
        if comm.rank == 0:
            session.send("h", torch.ones(2).to_sparse(), 0)


def test_what_cannot_be_sent_begins_no_span() -> None:
    site = Site()
    with pytest.raises(RankFailedError, match="sparse"):
        run(document(LOOPBACK), _with_contract, observers=[site.observer])
    assert site.exporter.get_finished_spans() == ()


def test_what_the_sender_does_not_sample_nobody_does() -> None:
    sites = [Site(ALWAYS_OFF), Site()]
    keeper = Keeper()

    def enter(rank: int, world_size: int, store: Store) -> None:
        del world_size
        with connect(document(LOOPBACK), rank, store, [sites[rank].observer, keeper]) as comm:
            exchange(comm, 2)

    run_threads(enter, 2)
    assert NO_TRACE not in {event.trace for event in keeper.events}
    assert sites[0].exporter.get_finished_spans() == ()
    for span in sites[1].exporter.get_finished_spans():  # of what it sent itself
        assert (span.attributes or {})["stagelink.direction"] == "backward"
        assert span.name == "send h"


def test_without_a_provider_nothing_travels() -> None:
    keeper = Keeper()
    observer = Spans(trace.NoOpTracerProvider())
    run(document(LOOPBACK), exchange, 2, observers=[observer, keeper])
    assert {event.trace for event in keeper.events} == {NO_TRACE}
    link = keeper.events[0].link
    assert observer.stagelink_trace(link, "h", Direction.FORWARD, 0, 0) is None


def test_a_sender_without_the_observer_leaves_the_receiver_its_own_trace() -> None:
    site = Site()

    def enter(rank: int, world_size: int, store: Store) -> None:
        del world_size
        observers = [site.observer] if rank == 1 else []
        with connect(document(LOOPBACK), rank, store, observers) as comm:
            _in_steps(comm, site)

    run_threads(enter, 2)
    (step,) = site.named("step 1")
    received = [s for s in site.named("recv h") if (s.attributes or {})["stagelink.rank"] == 1]
    assert len(received) == 2
    for span in received:
        assert span.parent is not None
        assert span.parent.span_id == context_of(step).span_id


def test_handlers_one_after_another_and_nothing_stays_open() -> None:
    site = Site()
    observer = site.observer
    for count in (2, 3):
        run(document(LOOPBACK), exchange, count, observers=[observer])
    assert len(site.named("recv h")) == len(site.named("send h")) == 10
    assert observer._sending == {}


# -- by a plan, in processes


def _by_plan(
    rank: int, world_size: int, store: Store, plan: Document
) -> tuple[set[SpanIds], set[SpanIds]]:
    """The global provider's sends, and the parents of its receives."""
    del world_size
    site = Site()
    trace.set_tracer_provider(site.provider)
    with connect(plan, rank, store) as comm:
        exchange(comm, 2, size=5000)
    sent = {_ids(context_of(span)) for span in site.named("send h")}
    return sent, {_ids(span.parent) for span in site.named("recv h") if span.parent is not None}


def _ids(context: SpanContext) -> SpanIds:
    return context.trace_id, context.span_id


def test_a_plan_switches_them_on_at_the_global_provider() -> None:
    plan = document(SHM, observers=["opentelemetry"])
    with run_fresh(_by_plan, 2, plan) as ranks:
        (sent, received), (sent_back, received_back) = ranks.results()
    assert sent == received_back
    assert sent_back == received
    assert len(sent) == len(sent_back) == 2


# -- packing


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 255))
def test_a_context_goes_through_the_header(trace_id: int, span_id: int, flags: int) -> None:
    context = SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(flags))
    packed = pack(context)
    assert len(packed) == TRACE_BYTES
    assert packed == bytes.fromhex(f"{trace_id:032x}{span_id:016x}{flags:02x}")  # as W3C's
    back = unpack(packed, is_remote=True)
    assert back is not None
    assert (back.trace_id, back.span_id, back.trace_flags) == (trace_id, span_id, flags)
    assert back.is_remote


def test_no_context_and_damaged_ones_are_none() -> None:
    assert unpack(NO_TRACE, is_remote=True) is None
    assert unpack(b"\x01" * 16 + bytes(9), is_remote=True) is None
