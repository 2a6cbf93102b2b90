"""transport-nccl passes the conformance tests, with gloo in NCCL's place."""

from __future__ import annotations

from typing import Any, ClassVar

from stagelink.testing.conformance import TransportConformance
from tests.nccl.over_gloo import NcclOverGloo


class TestNcclOverGloo(TransportConformance):
    transport = NcclOverGloo


class TestEager(TransportConformance):
    """Groups are used before there is a message, and messages are sent and received."""

    transport = NcclOverGloo
    options: ClassVar[dict[str, Any]] = {"eager": True, "operation": "send_recv"}
