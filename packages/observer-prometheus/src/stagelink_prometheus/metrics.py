"""Metrics and their labels; no label grows with the length of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from stagelink.transport.hooks import hookimpl

if TYPE_CHECKING:
    from stagelink.transport.contract import Link
    from stagelink.transport.events import Event, EventName

__all__ = ["WAIT_BUCKETS_S", "Metrics"]

WAIT_BUCKETS_S = (
    1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0,
)  # fmt: skip
"""Upper bounds of the histogram's buckets: from a message that is here already to a deadline."""

_LABELS = ("rank", "peer", "transport", "edge", "direction")

_Record = Callable[["Event"], None]


class _Families(NamedTuple):
    sent_messages: Counter
    sent_bytes: Counter
    received_messages: Counter
    received_bytes: Counter
    waits: Histogram
    links: Gauge


class Metrics:
    """An observer that counts into a registry.

    May serve any number of ranks and handlers, one after another and at once; others on the same
    registry share its metrics.

    Args:
        registry: where the metrics are registered; None: Prometheus' default one.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._families = _families_of(REGISTRY if registry is None else registry)
        # What Prometheus looks up by labels, under a lock, is looked up once.
        self._records: dict[tuple[EventName, Link, str], _Record] = {}

    @hookimpl
    def stagelink_link_opened(self, link: Link) -> None:
        """One more end is open."""
        self._families.links.labels(link.source, link.target, link.transport).inc()

    @hookimpl
    def stagelink_link_closed(self, link: Link) -> None:
        """One less is."""
        self._families.links.labels(link.source, link.target, link.transport).dec()

    @hookimpl
    def stagelink_event(self, event: Event) -> None:
        """Count a message, or a wait's seconds."""
        key = (event.name, event.link, event.edge)  # the way that it goes follows from these
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = self._record_for(event)
        record(event)

    def _record_for(self, like: Event) -> _Record:
        direction = like.direction.name.lower()
        labels = (like.rank, like.peer, like.link.transport, like.edge, direction)
        families = self._families
        if like.name == "send":
            return _counting(families.sent_messages, families.sent_bytes, labels)
        if like.name == "recv":
            return _counting(families.received_messages, families.received_bytes, labels)
        wait = families.waits.labels(*labels, like.name.removeprefix("wait_"))
        return lambda event: wait.observe(event.seconds)


def _counting(messages: Counter, payload: Counter, labels: tuple[object, ...]) -> _Record:
    its_messages, its_payload = messages.labels(*labels), payload.labels(*labels)

    def record(event: Event) -> None:
        its_messages.inc()
        its_payload.inc(event.payload_bytes)

    return record


_made: WeakKeyDictionary[CollectorRegistry, _Families] = WeakKeyDictionary()
_making = threading.Lock()


def _families_of(registry: CollectorRegistry) -> _Families:
    """The metrics of a registry, which takes each name only once."""
    with _making:
        if registry not in _made:
            _made[registry] = _make_families(registry)
        return _made[registry]


def _make_families(registry: CollectorRegistry) -> _Families:
    def counter(name: str, text: str) -> Counter:
        return Counter(f"stagelink_{name}", text, _LABELS, registry=registry)

    return _Families(
        counter("sent_messages", "Messages handed to a link."),
        counter("sent_bytes", "Payload of the messages handed to a link, in bytes."),
        counter("received_messages", "Messages handed to their receiver's code."),
        counter("received_bytes", "Payload of the messages received, in bytes."),
        Histogram(
            "stagelink_wait_seconds",
            "Waits of sends for credit, of receives for peer and wire, in seconds.",
            (*_LABELS, "waited_for"),
            buckets=WAIT_BUCKETS_S,
            registry=registry,
        ),
        Gauge(
            "stagelink_open_links",
            "Ends of links that are open in this process.",
            ("source", "target", "transport"),
            registry=registry,
            multiprocess_mode="livesum",
        ),
    )
