"""Prometheus metrics of a pipeline's messages, waits and links."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from stagelink.transport.hooks import hookimpl
from stagelink_prometheus.metrics import Metrics

if TYPE_CHECKING:
    from stagelink.transport.contract import Link
    from stagelink.transport.events import Event

__all__ = ["Metrics"]


@cache
def _default() -> Metrics:
    return Metrics()


@hookimpl
def stagelink_link_opened(link: Link) -> None:
    """Count it in the default registry."""
    _default().stagelink_link_opened(link)


@hookimpl
def stagelink_link_closed(link: Link) -> None:
    """Count it in the default registry."""
    _default().stagelink_link_closed(link)


@hookimpl
def stagelink_event(event: Event) -> None:
    """Count it in the default registry."""
    _default().stagelink_event(event)
