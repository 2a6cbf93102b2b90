"""transport-gloo passes the conformance tests."""

from __future__ import annotations

from typing import Any, ClassVar

from stagelink.testing.conformance import TransportConformance


class TestGloo(TransportConformance):
    transport = "gloo"
    options: ClassVar[dict[str, Any]] = {"interface": "lo"}
