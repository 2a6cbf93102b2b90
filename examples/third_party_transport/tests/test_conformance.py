"""The transport passes stagelink's conformance tests."""

from __future__ import annotations

from typing import Any, ClassVar

from stagelink.testing.conformance import TransportConformance


class TestPlainTcp(TransportConformance):
    """All of them, between processes and threads of this host."""

    transport = "plaintcp"
    options: ClassVar[dict[str, Any]] = {"host": "127.0.0.1"}
