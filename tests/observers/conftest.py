"""What the tests of observers wait for."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from stagelink.exchange.outgoing import Outgoing


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set as soon as a send has found its window full."""
    found = threading.Event()
    wait_credit = Outgoing._wait_credit

    def waits(outgoing: Outgoing, *args: Any) -> float:
        found.set()
        return wait_credit(outgoing, *args)

    monkeypatch.setattr(Outgoing, "_wait_credit", waits)
    return found
