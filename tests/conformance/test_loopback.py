"""Core's own transport passes what it asks of others."""

from __future__ import annotations

from stagelink.testing.conformance import TransportConformance
from stagelink.testing.synchronous import synchronous
from stagelink.transport.loopback import Loopback


class TestLoopback(TransportConformance):
    transport = "loopback"


class TestSynchronous(TransportConformance):
    transport = synchronous(Loopback)
