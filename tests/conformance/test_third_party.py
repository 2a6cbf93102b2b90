"""The example of a transport by somebody else passes the conformance tests."""

from __future__ import annotations

from examples.third_party_transport.src.stagelink_plaintcp import PlainTcp

from stagelink.testing.conformance import TransportConformance


class TestPlainTcp(TransportConformance):
    transport = PlainTcp
