"""Python calls that a message of 64 bytes takes, between two processes, where nobody observes."""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from tests.support.pipelines import GLOO, Ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    import stagelink
    from stagelink.testing import RankPool

MESSAGES = 40
WARM = 8
WAITED_FOR = range(20, 30)
COMPILER = re.compile(r"torch/(_dynamo|compiler)/")


def _calls_of(action: Callable[[], object]) -> list[str]:
    """The Python functions that an action calls on this thread, its own left out.

    And those of torch's compiler, where an earlier test of this process has loaded it.
    """
    found: list[str] = []

    def note(frame: Any, event: str, arg: object) -> None:
        del arg
        if event == "call" and not COMPILER.search(frame.f_code.co_filename):
            found.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return found[1:]


def _count(comm: stagelink.Handler) -> dict[str, list[str]]:
    tensor = torch.ones(16)
    with comm.evaluate(MESSAGES) as session:
        if comm.rank == 0:
            for mb in range(WARM):  # routes are found once
                session.send("h", tensor, mb)
            comm.reduce([0.0])
            sends = [
                _calls_of(lambda mb=mb: session.send("h", tensor, mb))  # type: ignore[misc]
                for mb in range(WARM, WAITED_FOR.start)
            ]
            comm.reduce([0.0])
            for mb in WAITED_FOR:
                time.sleep(0.05)
                session.send("h", tensor, mb)
            comm.reduce([0.0])
            return {"send": min(sends, key=len)}
        for mb in range(WARM):
            session.recv("h", mb)
        comm.reduce([0.0])
        comm.reduce([0.0])
        handle = session.irecv("h", WAITED_FOR.start - 1)
        while not handle.done():
            time.sleep(0.001)
        here = [
            _calls_of(lambda mb=mb: session.recv("h", mb))  # type: ignore[misc]
            for mb in range(WARM, WAITED_FOR.start)
        ]
        waiting = [
            _calls_of(lambda mb=mb: session.recv("h", mb))  # type: ignore[misc]
            for mb in WAITED_FOR
        ]
        comm.reduce([0.0])
        least = [min(found, key=len) for found in (here, waiting)]
        return dict(zip(("recv of what is here", "recv that waits"), least, strict=True))


def test_a_small_message_takes_few_calls(rank_pool: RankPool) -> None:
    ranks = Ranks(GLOO, rank_pool)
    plan = ranks.plan(window=MESSAGES) | {"control": {}}  # small payloads go with their headers
    zero, one = ranks.run(plan, _count)
    most = {"send": 10, "recv of what is here": 13, "recv that waits": 38}
    for what, calls in (zero | one).items():
        assert len(calls) <= most[what], f"{what}: {len(calls)} calls: {', '.join(calls)}"
