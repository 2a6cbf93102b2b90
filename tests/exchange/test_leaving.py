"""A rank leaves in time though nobody beyond a cut cable answers, the store included."""

from __future__ import annotations

import time
from typing import Any

import stagelink
from stagelink.testing import report
from stagelink.transport import sockets
from tests.support.hosts import hosts
from tests.support.pipelines import GLOO, document


def _leave(rank: int, world_size: int, store: str, plan: dict[str, Any]) -> tuple[str, float]:
    """How the rank's work ended, and the seconds that it then took to leave."""
    sockets._USER_TIMEOUT_MS = 1500  # a cut is found after so long
    ended = 0.0
    try:
        with stagelink.connect(
            stagelink.Plan.from_dict(plan),
            rank=rank,
            world_size=world_size,
            store=store,
            run_id="run",
        ) as comm:
            comm.reduce([0.0])
            report("connected")
            try:
                while True:
                    comm.reduce([0.0])
            finally:
                ended = time.monotonic()
    except stagelink.StagelinkError as error:
        return str(error), time.monotonic() - ended
    raise AssertionError("the cable was not cut")


def test_a_cut_cable_keeps_nobody() -> None:
    plan = document(GLOO)
    plan["transports"] = {}
    with hosts(2) as two, two.start(_leave, [0, 1], plan) as ranks:
        for rank in (0, 1):
            ranks.wait_for(rank, "connected")
        two.cut(1)
        found = ranks.results(50)
    for rank, (text, seconds) in enumerate(found):
        assert f"rank {1 - rank}" in text
        assert seconds < 8, text
