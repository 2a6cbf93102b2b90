"""The transport passes stagelink's conformance tests."""

from __future__ import annotations

from stagelink.testing.conformance import TransportConformance


class TestSocketPair(TransportConformance):
    """All of them, between processes and threads of this host."""

    transport = "socketpair"
