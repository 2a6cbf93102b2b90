"""transport-shm passes the conformance tests."""

from __future__ import annotations

from typing import Any, ClassVar

from stagelink.testing.conformance import TransportConformance


class TestShm(TransportConformance):
    transport = "shm"


class TestLittleMemory(TransportConformance):
    """Large messages go in pieces, and most others are copied out of their slots at once."""

    transport = "shm"
    options: ClassVar[dict[str, Any]] = {"link_bytes": 512 * 1024}
