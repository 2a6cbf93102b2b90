"""A span for each send, receive and wait; the send's is the parent of its message's others."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from stagelink.transport.hooks import hookimpl
from stagelink_opentelemetry.packing import pack, unpack

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanContext, TracerProvider

    from stagelink.transport.contract import Link
    from stagelink.transport.events import Event
    from stagelink.transport.header import Direction

__all__ = ["Spans"]


class _Sending(NamedTuple):
    link: Link
    span: Span


class Spans:
    """An observer that makes spans.

    A send's span is a child of the span that is current in the sending thread; it begins before
    the wait for the window and ends when the message has been handed to its link, on whatever
    thread that is. Its context travels with the message, so the receive's span and those of waits
    are its children, wherever they are. Where another trace is current at the receiver, its
    current span is linked to.

    May serve any number of ranks and handlers, one after another and at once.

    Args:
        tracer_provider: where the spans go; None: the process's global one, also where that is set
            later.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("stagelink", tracer_provider=tracer_provider)
        self._sending: dict[bytes, _Sending] = {}

    @hookimpl
    def stagelink_trace(
        self, link: Link, edge: str, direction: Direction, microbatch: int, session: int
    ) -> bytes | None:
        """Start the send's span; its context is what the message carries.

        None where spans go nowhere.
        """
        span = self._tracer.start_span(
            f"send {edge}",
            kind=SpanKind.PRODUCER,
            attributes={
                **_attributes(link, edge, direction, microbatch, session),
                "stagelink.rank": link.source,
                "stagelink.peer": link.target,
            },
        )
        context = span.get_span_context()
        if not context.is_valid:
            return None
        packed = pack(context)
        self._sending[packed] = _Sending(link, span)
        return packed

    @hookimpl
    def stagelink_event(self, event: Event) -> None:
        """End the send's span, or make the one of a receive or wait, which is over."""
        if event.name != "send":
            self._make_span(event)
            return
        sending = self._sending.pop(event.trace, None)
        if sending is not None:
            sending.span.set_attribute("stagelink.payload_bytes", event.payload_bytes)
            sending.span.end()

    @hookimpl
    def stagelink_link_closed(self, link: Link) -> None:
        """End the spans of what was never sent: its window stayed full, or the send failed."""
        for packed, sending in self._sending.copy().items():
            if sending.link == link and self._sending.pop(packed, None) is not None:
                sending.span.set_status(Status(StatusCode.ERROR, "not sent"))
                sending.span.end()

    def _make_span(self, event: Event) -> None:
        sender = unpack(event.trace, is_remote=event.rank != event.link.source)
        ended_ns = time.time_ns() - round((time.monotonic() - event.ended_s) * 1e9)
        span = self._tracer.start_span(
            f"{event.name} {event.edge}",
            context=_under(sender),
            kind=SpanKind.CONSUMER if event.name == "recv" else SpanKind.INTERNAL,
            attributes={
                **_attributes(
                    event.link, event.edge, event.direction, event.microbatch, event.session
                ),
                "stagelink.rank": event.rank,
                "stagelink.peer": event.peer,
                "stagelink.payload_bytes": event.payload_bytes,
            },
            links=_links_beside(sender),
            start_time=ended_ns - round(event.seconds * 1e9),
        )
        span.end(ended_ns)


def _attributes(
    link: Link, edge: str, direction: Direction, microbatch: int, session: int
) -> dict[str, str | int]:
    return {
        "stagelink.edge": edge,
        "stagelink.direction": direction.name.lower(),
        "stagelink.microbatch": microbatch,
        "stagelink.session": session,
        "stagelink.transport": link.transport,
    }


def _under(parent: SpanContext | None) -> Context | None:
    """A context whose current span is the parent; None, the current one, where there is none."""
    if parent is None:
        return None
    return trace.set_span_in_context(trace.NonRecordingSpan(parent))


def _links_beside(parent: SpanContext | None) -> list[trace.Link]:
    here = trace.get_current_span().get_span_context()
    if parent is None or not here.is_valid or here.trace_id == parent.trace_id:
        return []
    return [trace.Link(here)]
