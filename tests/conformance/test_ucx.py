"""transport-ucx passes the conformance tests, by each wire that needs no card."""

from __future__ import annotations

from typing import Any, ClassVar

from stagelink.testing.conformance import TransportConformance


class TestByTcp(TransportConformance):
    transport = "ucx"
    options: ClassVar[dict[str, Any]] = {"wires": "tcp", "devices": "lo"}


class TestBySharedMemory(TransportConformance):
    transport = "ucx"
    options: ClassVar[dict[str, Any]] = {"wires": "sm"}
