"""transport-tcp passes the conformance tests, in each of its modes."""

from __future__ import annotations

from typing import Any, ClassVar

from stagelink.testing.conformance import TransportConformance


class TestTcp(TransportConformance):
    transport = "tcp"


class TestTcpOverSeveralStreams(TransportConformance):
    transport = "tcp"
    options: ClassVar[dict[str, Any]] = {"interface": "lo", "streams": 3}
