"""Core's own transport passes what it asks of others, in both of its forms."""

from __future__ import annotations

from typing import Any, ClassVar

from stagelink.testing.conformance import TransportConformance


class TestLoopback(TransportConformance):
    transport = "loopback"


class TestRendezvous(TransportConformance):
    transport = "loopback"
    options: ClassVar[dict[str, Any]] = {"rendezvous": True}
