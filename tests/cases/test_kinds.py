"""Tensors that are more than their memory: they arrive as data, or both ends say what they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import stagelink
from tests.support import tensors
from tests.support.pipelines import TCP, Ranks, check_same

if TYPE_CHECKING:
    from stagelink.testing import RankPool

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
"""Torch calls some of them prototypes, and others deprecated."""

LENGTHS = (12, 50_000)
KINDS = {**tensors.DATA, "zeros": tensors.zeros}


def _values(name: str, length: int) -> torch.Tensor:
    return torch.zeros(length) if name == "zeros" else torch.arange(float(length))


def _travel(comm: stagelink.Handler) -> None:
    for length in LENGTHS:
        with comm.evaluate(len(KINDS)) as session:
            for number, (name, make) in enumerate(KINDS.items()):
                if comm.rank == 0:
                    given = make(torch.arange(float(length)))
                    send = session.send if number % 2 else session.isend
                    send("h", given, number, copy=number % 4 < 2).wait()
                else:
                    got = session.recv("h", number)
                    assert type(got) is torch.Tensor
                    check_same(got, _values(name, length))


def test_data_arrive_as_tensors(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(), _travel)


def _travel_back(comm: stagelink.Handler) -> None:
    for length in LENGTHS:
        with comm.train(len(KINDS)) as session:
            for action in session.actions:
                number = action.microbatch
                name, make = list(KINDS.items())[number]
                if action.kind.name == "FORWARD":
                    _there(comm, session, number, length)
                elif comm.rank == 0:
                    check_same(session.recv_grad("h", number), _values(name, length))
                else:
                    session.send_grad("h", make(torch.arange(float(length))), number)


def _there(comm: stagelink.Handler, session: stagelink.Session, number: int, length: int) -> None:
    """As what requires a gradient, which the result of a collective may."""
    make = tensors.DATA["collective with a graph" if number % 2 else "methods, a parameter"]
    if comm.rank == 0:
        session.send("h", make(torch.ones(length)), number)
        return
    got = session.recv("h", number)
    check_same(got, torch.ones(length))
    assert got is not None
    assert got.requires_grad


def test_data_go_back_as_gradients(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(), _travel_back)


def _are_refused(comm: stagelink.Handler) -> None:
    values = torch.arange(12.0)
    with comm.evaluate(len(tensors.REFUSED)) as session:
        for number, (make, text) in enumerate(tensors.REFUSED.values()):
            said = rf"rank 0: microbatch {number} .*of edge 'h': .*{text}"
            if comm.rank == 0:
                send = session.send if number % 2 else session.isend
                with pytest.raises(stagelink.MessageTypeError, match=said):
                    send("h", make(values), number)
                comm.reduce([0.0])  # the other has heard
                session.send("h", values, number)
            else:
                with pytest.raises(stagelink.RefusedError, match=said):
                    session.recv("h", number)
                comm.reduce([0.0])
                check_same(session.recv("h", number), values)


def test_what_has_no_memory_is_refused_at_both_ends(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(), _are_refused)


def _gradients_are_refused(comm: stagelink.Handler) -> None:
    ones = torch.ones(12, requires_grad=True)
    with comm.train(len(tensors.REFUSED)) as session:
        for action in session.actions:
            number = action.microbatch
            make, text = list(tensors.REFUSED.values())[number]
            if action.kind.name == "FORWARD":
                session.send("h", ones, number) if comm.rank == 0 else session.recv("h", number)
            elif comm.rank == 0:
                with pytest.raises(stagelink.RefusedError, match=text):
                    session.recv_grad("h", number)
                comm.reduce([0.0])
                check_same(session.recv_grad("h", number), ones)
            else:
                with pytest.raises(stagelink.MessageTypeError, match=text):
                    session.send_grad("h", make(torch.arange(12.0)), number)
                comm.reduce([0.0])
                session.send_grad("h", ones.detach(), number)


def test_gradients_without_memory_are_refused_at_both_ends(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(), _gradients_are_refused)


def _under_a_mode(comm: stagelink.Handler) -> None:
    """What is received under a mode can be used without; who waits reads for everybody."""
    for mode in tensors.MODES.values():
        for length in LENGTHS:
            with comm.train(2) as session:
                sent = torch.arange(float(length), requires_grad=True)
                if comm.rank == 0:
                    with mode():
                        for number in range(2):
                            session.send("h", sent, number)
                        comm.reduce([0.0])
                    for number in range(2):
                        check_same(session.recv_grad("h", number), sent)
                    continue
                with mode():
                    comm.reduce([0.0])
                    first = session.recv("h", 0)
                second = session.recv("h", 1)
                for number, got in enumerate((first, second)):
                    check_same(got, sent)
                    assert got is not None
                    (got * sent.detach()).sum().backward()
                    with mode():
                        session.send_grad("h", got.grad, number)


def test_a_mode_makes_no_difference(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(window=4), _under_a_mode)


def test_nor_where_it_moves_a_message_by_a_watched_action(rank_pool: RankPool) -> None:
    ranks = Ranks(TCP, rank_pool)
    ranks.run(ranks.plan(window=4), _under_a_mode)
