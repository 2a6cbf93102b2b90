"""Transports by somebody else pass: of sockets, of what can only block, of a shared worker."""

from __future__ import annotations

from examples.third_party_transport.src.stagelink_socketpair import SocketPair

from stagelink.testing.conformance import TransportConformance
from tests.conformance.blocking_tcp import BlockingTcp
from tests.conformance.shared_worker import SharedWorker


class TestSocketPair(TransportConformance):
    transport = SocketPair


class TestBlockingTcp(TransportConformance):
    transport = BlockingTcp


class TestSharedWorker(TransportConformance):
    transport = SharedWorker
