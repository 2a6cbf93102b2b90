"""No peer's word is trusted: what cannot be is an error that names peer, field and bound."""

from __future__ import annotations

import json
import re
import struct
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest
import torch

import stagelink
from stagelink.testing import run_threads
from stagelink.transport.header import Direction, Flag, Header, MessageKind
from tests.support.interrupts import lock_is_free
from tests.support.pipelines import LOOPBACK, document, joined, line

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

_DTYPE = 1
"""Code of float32's bytes on the wire does not matter: what is checked comes before it."""


class Liar:
    """Rank 0 of a line of two, that says what no rank would say."""

    def __init__(self, comm: stagelink.Handler) -> None:
        self._plane = comm._engine.plane

    def say(self, kind: MessageKind, note: bytes = b"", **fields: Any) -> None:
        self._plane.post(1, Header(kind, **fields), note)

    def open(self, session: int = 0, **said: object) -> None:
        fields = {"mode": "evaluate", "microbatches": 4, "items": None} | said
        self.say(MessageKind.OPEN, json.dumps(fields).encode(), session=session)

    def data(self, microbatch: int, session: int = 0) -> None:
        self.say(MessageKind.NONE, session=session, microbatch=microbatch)


def _too_many(liar: Liar) -> None:
    liar.open()
    for microbatch in range(3):
        liar.data(microbatch)


def _too_many_before_it_opens(liar: Liar) -> None:
    for microbatch in range(8000):
        liar.data(microbatch)
    liar.open()


def _twice(liar: Liar) -> None:
    liar.open()
    liar.data(0)
    liar.data(0)


def _opened_twice(liar: Liar) -> None:
    liar.open()
    liar.open()


LIES: dict[str, tuple[Callable[[Liar], None], str]] = {
    "too many": (_too_many, "rank 0 sent 3 messages of edge 'h0' without an .* window is 2"),
    "too many, early": (_too_many_before_it_opens, "rank 0 sent 8000 messages .* window is 2"),
    "twice": (_twice, r"rank 0 sent microbatch 0 \(session 0\) of edge 'h0' twice"),
    "microbatch -1": (lambda liar: liar.data(-1), "rank 0: NONE of microbatch -1 on edge 'h0'"),
    "10^7 microbatches": (
        lambda liar: liar.open(microbatches=10**7),
        "rank 0: OPEN of session 0 with microbatches 10000000; .* at most 500000",
    ),
    "microbatches in words": (
        lambda liar: liar.open(microbatches="4"),
        "rank 0: OPEN of session 0 with microbatches '4'; ",
    ),
    "mode": (
        lambda liar: liar.open(mode="guess"),
        "rank 0: OPEN of session 0 with mode 'guess'; it is 'train' or 'evaluate'",
    ),
    "items": (
        lambda liar: liar.open(items=-3),
        "rank 0: OPEN of session 0 with items -3; it is a number from 0, or null",
    ),
    "opened twice": (_opened_twice, "rank 0: OPEN of session 0, and it has opened session 0"),
    "credit": (
        lambda liar: liar.say(MessageKind.CREDIT, direction=Direction.BACKWARD, microbatch=3),
        r"rank 1: from rank 0: rank 0: CREDIT for edge 0, which does not go there",
    ),
    "reduce of 7 bytes": (
        lambda liar: liar.say(MessageKind.REDUCE, bytes(7), direction=Direction.BACKWARD),
        "rank 0: REDUCE 0 of 7 bytes, which are no values of 8 bytes each",
    ),
    "reduce of the future": (
        lambda liar: liar.say(
            MessageKind.REDUCE, struct.pack("<d", 1.0), direction=Direction.BACKWARD, sequence=9
        ),
        "rank 0: REDUCE 9 is not due; this rank has begun 1",
    ),
    "reduce upwards": (
        lambda liar: liar.say(MessageKind.REDUCE, direction=Direction.FORWARD),
        "rank 0: REDUCE 0 from a child, which it is not",
    ),
    "last": (
        lambda liar: liar.say(MessageKind.LAST, microbatch=-2),
        "rank 0: LAST of session 0 with -2 microbatches; they are 0 or more",
    ),
    "an edge that there is not": (
        lambda liar: liar.say(MessageKind.NONE, edge=77),
        "rank 0 sent NONE on edge 77, which does not come from it",
    ),
    "a link that there is not": (
        lambda liar: liar.say(MessageKind.NOTE, link=9),
        "a note for link 9 with rank 0, which has 2",
    ),
}


def _tell(comm: stagelink.Handler, lie: Callable[[Liar], None]) -> str:
    comm.reduce([0.0])
    lie(Liar(comm))
    with pytest.raises(stagelink.AbortedError) as caught:
        comm.wait(Future(), "what the other says")
    return str(caught.value)


def _believe(comm: stagelink.Handler) -> str:
    free: SimpleQueue[bool] = SimpleQueue()
    lock = comm._engine.plane.lock
    # Again and again: another thread may have it for a moment.
    comm.on_failure(lambda _: free.put(any(lock_is_free(lock) for _ in range(100))))
    with pytest.raises(stagelink.ProtocolError) as caught:
        _go_on(comm)
    # Else a transport's thread and its abort could wait for each other. It is called once, and
    # maybe after this thread has seen the failure.
    assert free.get(timeout=20)
    assert free.empty()
    return str(caught.value)


def _go_on(comm: stagelink.Handler) -> None:
    comm.reduce([0.0])
    comm.evaluate()
    comm.wait(Future(), "what comes")


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_named(name: str) -> None:
    lie, wanted = LIES[name]
    plan = document(LOOPBACK, (1, 1), line(2), limits={"receive_bytes": 2**30})

    def run(rank: int, world_size: int, store: Store) -> str:
        with joined(rank, world_size, store, plan) as comm:
            return _believe(comm) if rank else _tell(comm, lie)

    told, found = run_threads(run, 2)
    assert found.startswith("rank 1: from rank 0: ") or "window is" in found
    assert re.search(wanted, found), found
    assert told == f"rank 1 reports: {found}"


# -- answers to what was not sent


def _answer(comm: stagelink.Handler, kind: MessageKind, again: bool) -> str:
    """Rank 1 is the liar: it answers what was not sent, or what it has answered."""
    with comm.train(2) as session:
        if comm.rank == 0:
            session.send("h0", torch.ones(2, requires_grad=True), 0)
            with pytest.raises(stagelink.StagelinkError) as caught:
                comm.reduce([0.0])
            return str(caught.value)
        session.recv("h0", 0)
        header = Header(kind, Direction.BACKWARD, microbatch=0 if again else 1)
        if again:
            comm._engine.plane.post(0, header._replace(kind=MessageKind.CREDIT))
        if kind is MessageKind.GRAD:
            header = header._replace(
                dtype_code=_DTYPE, flags=Flag.INLINE, shape=(0,), payload_bytes=0
            )
        comm._engine.plane.post(0, header)
        with pytest.raises(stagelink.AbortedError) as told:
            comm.reduce([0.0])
    return str(told.value)


@pytest.mark.parametrize("again", [False, True], ids=["never sent", "answered before"])
@pytest.mark.parametrize("kind", [MessageKind.CREDIT, MessageKind.GRAD, MessageKind.NONE])
def test_an_answer_to_nothing_is_named(kind: MessageKind, *, again: bool) -> None:
    def run(rank: int, world_size: int, store: Store) -> str:
        with joined(rank, world_size, store, document(LOOPBACK, (1, 1), line(2))) as comm:
            return _answer(comm, kind, again)

    found, told = run_threads(run, 2)
    wanted = f"rank 1: {kind.name} for microbatch {0 if again else 1} (session 0) of edge 'h0'"
    assert wanted in found
    assert "it was not sent, or has been answered" in found
    assert wanted in told
