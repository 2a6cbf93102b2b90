"""Transports by somebody else pass: of sockets, of what can only block, of a shared worker."""

from __future__ import annotations

from examples.third_party_transport.src.stagelink_plaintcp import PlainTcp

from stagelink.testing.conformance import TransportConformance
from tests.conformance.blocking_tcp import BlockingTcp
from tests.conformance.shared_worker import SharedWorker


class TestPlainTcp(TransportConformance):
    transport = PlainTcp


class TestBlockingTcp(TransportConformance):
    transport = BlockingTcp


class TestSharedWorker(TransportConformance):
    transport = SharedWorker
