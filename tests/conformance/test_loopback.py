"""Core's own transport passes what it asks of others."""

from __future__ import annotations

from stagelink.testing.conformance import TransportConformance


class TestLoopback(TransportConformance):
    transport = "loopback"
