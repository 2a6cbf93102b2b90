"""A lost peer, an abort and a deadline end every wait, and nothing is left behind."""

from __future__ import annotations

import gc
import itertools
import signal
import threading
import time
import weakref
from typing import TYPE_CHECKING

import pytest
import torch

from stagelink.testing import run_fresh, run_threads
from stagelink.transport.contract import Deadline
from tests.gloo.twin import (
    LONG_S,
    SURVIVOR,
    Case,
    Twin,
    holdings,
    lo,
    lose_peer,
    pattern,
)

if TYPE_CHECKING:
    from torch.distributed import Store

ENDS = {"death": signal.SIGKILL, "abort": signal.SIGSTOP, "deadline": signal.SIGSTOP}
CASES = [
    Case(sends, under_way, ENDS[ends], ends)
    for sends, under_way, ends in itertools.product((True, False), (True, False), ENDS)
]
EXPECTED = {
    (True, "death"): "ConnectionAbortedError: rank 1 died",
    (True, "abort"): "ConnectionAbortedError: for a test",
    (True, "deadline"): "TimeoutError: 0→1 by gloo: sending: no receipt within 0.5 s",
    (False, "death"): "ConnectionError: 1→0 by gloo: receiving 1 bytes: ",
    (False, "abort"): "ConnectionError: 1→0 by gloo: receiving 1 bytes: ",
    (False, "deadline"): "TimeoutError: 1→0 by gloo: receiving 1 bytes: not done within 0.5 s",
}


def _name(case: Case) -> str:
    side = "sender" if case.sends else "receiver"
    return f"{side}-{'under-way' if case.under_way else 'before-payload'}-{case.ends}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_a_wait_ends(case: Case) -> None:
    with run_fresh(lose_peer, 2, case) as ranks:
        outcome = ranks.outcomes()[SURVIVOR]
    assert outcome.ok, outcome
    loss = outcome.value
    assert loss.error.startswith(EXPECTED[case.sends, case.ends])
    assert loss.seconds < (1.5 if case.ends == "deadline" else 1.0)
    assert not loss.arrived
    assert loss.left == (0, 0)
