"""A rank whose time is up names the one that holds all up, not the one that it waited for."""

from __future__ import annotations

import signal
from concurrent.futures import Future
from typing import TYPE_CHECKING

import pytest
import torch

import stagelink
from stagelink.control.framing import encode
from stagelink.testing import report, run_threads
from stagelink.transport.header import Direction, Header, MessageKind
from tests.support.pipelines import LOOPBACK, SHM, document, joined, line, start_to_ends

if TYPE_CHECKING:
    from torch.distributed import Store

LIMITS = {"deadline_s": 20.0, "first_deadline_s": 20.0}


def _receive_down_the_line(comm: stagelink.Handler) -> None:
    """Each waits for a gradient of the next; the last one is stopped."""
    with comm.train(1) as session:
        if comm.rank == 3:
            report("here")
            comm.wait(Future(), "the signal")
        key = f"h{comm.rank}"
        session.send(key, torch.ones(2, requires_grad=True), 0)
        try:
            session.recv_grad(key, 0, deadline_s=2.0 if comm.rank == 0 else 20.0)
        except stagelink.StagelinkError as error:
            report("told", f"{type(error).__name__}: {error}")
            raise


def test_a_stopped_rank_is_named_by_all() -> None:
    plan = document(SHM, (1,) * 4, line(4), limits=LIMITS)
    with start_to_ends(plan, _receive_down_the_line) as ranks:
        ranks.wait_for(3, "here")
        ranks.kill(3, signal.SIGSTOP)
        texts = [ranks.wait_for(rank, "told") for rank in range(3)]
        ranks.kill(3)
        ranks.outcomes(20)
    assert texts[0].startswith("DeadlineError: rank 0: nothing came from rank 1")
    for text in texts:
        assert "rank 1 waits for rank 2 ('h1', microbatch 0 (backward, session 0))" in text
        assert "rank 2 waits for rank 3 ('h2', microbatch 0 (backward, session 0))" in text
        assert "rank 3 does not answer: it is stopped" in text


def _wait_in_turn(comm: stagelink.Handler, store: Store, kind: str) -> None:
    """Rank 0 waits for 1, that for 2; which is at work, or waits for rank 1."""
    with comm.train(1) as session:
        if comm.rank == 0:
            session.send("h0", torch.ones(2, requires_grad=True), 0)
            store.wait(["1 waits", "2 waits"])
            session.recv_grad("h0", 0, deadline_s=1.0)
        store.set(f"{comm.rank} waits", "")
        if comm.rank == 1:
            session.recv("h0", 0)
            session.send("h1", torch.ones(2, requires_grad=True), 0)
            session.recv_grad("h1", 0)
        elif kind == "cycle":
            comm.reduce([0.0])  # which rank 1 takes no part in
        comm.wait(Future(), "work of its own")


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("work", "rank 2 waits for no other: it is at work, or hangs, in code of its own"),
        (
            "cycle",
            "rank 2 waits for rank 1 (reduction 0), so the ranks wait for each other in a cycle",
        ),
    ],
)
def test_the_end_of_the_chain_is_told(kind: str, wanted: str) -> None:
    plan = document(LOOPBACK, (1, 1, 1), line(3), limits=LIMITS)

    def run(rank: int, world_size: int, store: Store) -> str:
        with (
            pytest.raises(stagelink.StagelinkError) as caught,
            joined(rank, world_size, store, plan) as comm,
        ):
            _wait_in_turn(comm, store, kind)
        return str(caught.value)

    for text in run_threads(run, 3):
        assert "rank 0: nothing came from rank 1 on edge 'h0' within 1 s" in text
        assert f"rank 1 waits for rank 2 ('h1', microbatch 0 (backward, session 0)), {wanted}" in (
            text
        )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"path": []},
        {"path": "1"},
        {"path": [0], "rank": "x"},
        {"path": [0], "rank": 1, "peer": []},
    ],
)
def test_a_question_along_no_ranks(fields: dict[str, object]) -> None:
    def run(rank: int, world_size: int, store: Store) -> str:
        with joined(rank, world_size, store, document(LOOPBACK)) as comm:
            comm.reduce([0.0])
            if rank:
                header = Header(MessageKind.WAITS, Direction.BACKWARD)
                comm._engine.plane.post(0, header, encode(fields))
            with pytest.raises(stagelink.StagelinkError) as caught:
                comm.wait(Future(), "nothing")
            return str(caught.value)

    assert "rank 1: WAITS " in run_threads(run, 2)[0]
