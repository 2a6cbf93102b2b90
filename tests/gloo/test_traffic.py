"""What is sent arrives whole and in order, in both directions at once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

from stagelink.testing import run_threads
from stagelink.transport.contract import FINISHED, Deadline
from tests.gloo.twin import LONG_S, Twin, exchange, fork_and_go_on, lo, pattern, send_huge

if TYPE_CHECKING:
    from torch.distributed import Store

    from stagelink.testing import RankPool

MIB = 1024 * 1024
SIZES = [1, 0, 2, 3, 63, 64, 4095, 4096, 0, 65537, MIB - 1, MIB, 4 * MIB + 3, 16 * MIB, 1]
IN_FLIGHT = 4


def test_sizes_between_processes(rank_pool: RankPool) -> None:
    rank_pool.run(exchange, 2, SIZES)


def test_sizes_between_threads() -> None:
    run_threads(exchange, 2, SIZES)


@pytest.mark.slow
def test_a_message_of_three_gib(rank_pool: RankPool) -> None:
    rank_pool.run(send_huge, 2, 3 * 1024 * MIB, timeout_s=55)


def test_four_in_flight_stay_in_order() -> None:
    def rank(me: int, world_size: int, store: Store) -> None:
        with Twin(lo(), me, 1 - me, store) as twin:
            under_way = []
            for number in range(60):
                if len(under_way) == IN_FLIGHT:
                    under_way.pop(0).finish(Deadline(LONG_S))
                    expected = pattern(5000 * (number - IN_FLIGHT) + 1, number - IN_FLIGHT)
                    assert torch.equal(twin.next().take(), expected)
                under_way.append(twin.send(pattern(5000 * number + 1, number)))
            for pending in under_way:
                pending.finish(Deadline(LONG_S))
            for number in range(60 - IN_FLIGHT, 60):
                expected = pattern(5000 * number + 1, number)
                assert torch.equal(twin.next().take(), expected)

    run_threads(rank, 2)


def test_begin_waits_for_nobody() -> None:
    begun = threading.Event()

    def rank(me: int, world_size: int, store: Store) -> None:
        with Twin(lo(), me, 1 - me, store, reading=me == 0) as twin:
            if me == 0:
                under_way = [twin.send(pattern(MIB, number)) for number in range(IN_FLIGHT)]
                begun.set()  # and only now does the other side read its first header
                for pending in under_way:
                    pending.finish(Deadline(LONG_S))
            else:
                assert begun.wait(LONG_S)
                twin.read()
                for number in range(IN_FLIGHT):
                    assert torch.equal(twin.next().take(), pattern(MIB, number))

    run_threads(rank, 2)


def test_the_bytes_come_in_before_anybody_asks() -> None:
    def rank(me: int, world_size: int, store: Store) -> None:
        with Twin(lo(), me, 1 - me, store) as twin:
            if me == 0:
                sent = [twin.send(pattern(MIB)), twin.send(pattern(1))]
                for pending in sent:
                    pending.finish(Deadline(LONG_S))
            else:
                first, second = twin.next(), twin.next()
                while first.buffer[-1] != pattern(MIB)[-1]:
                    pass
                first.take()
                second.take()

    run_threads(rank, 2)


def test_an_empty_message_is_announced_and_done() -> None:
    def rank(me: int, world_size: int, store: Store) -> None:
        with Twin(lo(), me, 1 - me, store) as twin:
            assert twin.send(pattern(0)) is FINISHED
            assert twin.next().take().numel() == 0

    run_threads(rank, 2)


def test_received_where_it_was_accepted() -> None:
    def rank(me: int, world_size: int, store: Store) -> None:
        with Twin(lo(), me, 1 - me, store) as twin:
            pending = twin.send(pattern(MIB))
            incoming = twin.next()
            address = incoming.buffer.data_ptr()
            assert incoming.take().data_ptr() == address
            pending.finish(Deadline(LONG_S))

    run_threads(rank, 2)


def test_a_rank_with_twenty_peers() -> None:
    peers = range(1, 21)

    def rank(me: int, world_size: int, store: Store) -> None:
        transport = lo()
        others = peers if me == 0 else [0]
        twins = [Twin(transport, me, other, store) for other in others]
        pendings = [twin.send(pattern(70000, me)) for twin in twins]
        for twin in twins:
            assert torch.equal(twin.next().take(), pattern(70000, twin.peer))
        for pending in pendings:
            pending.finish(Deadline(LONG_S))
        for twin in twins:
            twin.close()

    run_threads(rank, 21)


def test_a_forked_child_leaves_the_connection_alone(rank_pool: RankPool) -> None:
    rank_pool.run(fork_and_go_on, 2)
