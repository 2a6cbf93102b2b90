"""OpenTelemetry spans of a pipeline's messages: one trace on both ranks of each message."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from stagelink.transport.hooks import hookimpl
from stagelink_opentelemetry.spans import Spans

if TYPE_CHECKING:
    from stagelink.transport.contract import Link
    from stagelink.transport.events import Event
    from stagelink.transport.header import Direction

__all__ = ["Spans"]


@cache
def _default() -> Spans:
    return Spans()


@hookimpl
def stagelink_trace(
    link: Link, edge: str, direction: Direction, microbatch: int, session: int
) -> bytes | None:
    """Start the send's span at the global provider."""
    return _default().stagelink_trace(link, edge, direction, microbatch, session)


@hookimpl
def stagelink_event(event: Event) -> None:
    """End the send's span, or make that of a receive or wait, at the global provider."""
    _default().stagelink_event(event)


@hookimpl
def stagelink_link_closed(link: Link) -> None:
    """End the spans of what was never sent."""
    _default().stagelink_link_closed(link)
