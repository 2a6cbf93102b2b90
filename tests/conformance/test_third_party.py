"""Transports by somebody else pass the tests: the example, and one that can only block."""

from __future__ import annotations

from examples.third_party_transport.src.stagelink_plaintcp import PlainTcp

from stagelink.testing.conformance import TransportConformance
from tests.conformance.blocking_tcp import BlockingTcp


class TestPlainTcp(TransportConformance):
    transport = PlainTcp


class TestBlockingTcp(TransportConformance):
    transport = BlockingTcp
