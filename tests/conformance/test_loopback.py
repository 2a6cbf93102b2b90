"""Core's own transport passes what it asks of others, in both of its forms."""

from __future__ import annotations

from stagelink.testing.conformance import TransportConformance


class TestLoopback(TransportConformance):
    transport = "loopback"


class TestRendezvous(TransportConformance):
    transport = "loopback"
    options = {"rendezvous": True}
