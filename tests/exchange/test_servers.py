"""Ranks of several servers: control connections by TCP, beside Unix sockets within each."""

from __future__ import annotations

import signal
import socket
from typing import TYPE_CHECKING

import torch

from stagelink.schedule import Kind
from stagelink.testing import report
from tests.support.pipelines import GLOO, Ranks, check_same, document, line, start_to_ends

if TYPE_CHECKING:
    import stagelink
    from stagelink.testing import RankPool

SERVERS = [[0, 2], [3, 1]]
PLAN = document(
    GLOO,
    (2, 1, 1),
    line(3),
    servers=SERVERS,
    control={"interface": "lo"},
    limits={"deadline_s": 60.0, "first_deadline_s": 60.0},
)


def _families(comm: stagelink.Handler) -> dict[int, int]:
    connections = comm._plane.connections
    return {peer: connection.sock.family for peer, connection in connections.items()}


def _round(comm: stagelink.Handler, size: int) -> None:
    last, stage = len(comm.plan.stages) - 1, comm.stage.index
    with comm.train(6) as session:
        for action in session.actions:
            mb = action.microbatch
            value = torch.full((size,), float(mb))
            if action.kind is Kind.FORWARD:
                if stage:
                    check_same(session.recv(f"h{stage - 1}", mb), value)
                if stage < last:
                    session.send(f"h{stage}", value.requires_grad_(), mb)
            else:
                if stage < last:
                    check_same(session.recv_grad(f"h{stage}", mb), value)
                if stage:
                    session.send_grad(f"h{stage - 1}", value, mb)


def _rounds(comm: stagelink.Handler) -> dict[int, int]:
    for size in (3, 100_000):
        _round(comm, size)
    return _families(comm)


def test_unix_within_a_server_and_tcp_between(rank_pool: RankPool) -> None:
    for rank, families in enumerate(Ranks(GLOO, rank_pool).run(PLAN, _rounds)):
        mine = next(server for server in SERVERS if rank in server)
        for peer, family in families.items():
            assert family == (socket.AF_UNIX if peer in mine else socket.AF_INET)
    assert families


def _for_ever(comm: stagelink.Handler) -> None:
    for number in range(1_000_000):
        _round(comm, 3)
        if number == 0:
            report("going")


def test_a_death_on_another_server(rank_pool: RankPool) -> None:
    with start_to_ends(PLAN, _for_ever) as ranks:
        for rank in range(4):
            ranks.wait_for(rank, "going")
        ranks.kill(2)
        outcomes = ranks.outcomes(10)
    assert outcomes[2].signal == signal.SIGKILL
    for rank in (0, 1, 3):
        assert outcomes[rank].ok, outcomes[rank]
        assert "rank 2 died" in outcomes[rank].value.text
        assert outcomes[rank].value.left == ()
