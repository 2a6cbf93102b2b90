"""transport-gloo passes the conformance tests."""

from __future__ import annotations

from stagelink.testing.conformance import TransportConformance


class TestGloo(TransportConformance):
    transport = "gloo"
    options = {"interface": "lo"}
