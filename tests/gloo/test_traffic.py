"""What is sent arrives whole and in order, in both directions at once."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from stagelink.deadline import Deadline
from stagelink.testing import run_fresh, run_threads
from stagelink_gloo import Gloo, GlooOptions
from tests.gloo.twin import LONG_S, Twin, exchange, fork_and_go_on, lo, pattern, send_huge

if TYPE_CHECKING:
    from torch.distributed import Store

    from stagelink.testing import RankPool
    from tests.gloo.twin import Sent

MIB = 1024 * 1024
SIZES = [1, 0, 2, 3, 63, 64, 4095, 4096, 0, 65537, MIB - 1, MIB, 4 * MIB + 3, 16 * MIB, 1]
IN_FLIGHT = 4


def done(*pendings: Sent) -> None:
    for pending in pendings:
        pending.wait()


def test_sizes_between_processes(rank_pool: RankPool) -> None:
    rank_pool.run(exchange, 2, SIZES)


def test_sizes_between_threads() -> None:
    run_threads(exchange, 2, SIZES)


@pytest.mark.slow
def test_a_message_of_more_than_two_gib(rank_pool: RankPool) -> None:
    rank_pool.run(send_huge, 2, 2049 * MIB, timeout_s=55)


def test_four_in_flight_stay_in_order_both_ways(twins: tuple[Twin, Twin]) -> None:
    sizes = [5000 * number + 1 for number in range(60)]

    def send(twin: Twin) -> None:
        under_way: deque[Sent] = deque()
        for number, size in enumerate(sizes):
            if len(under_way) == IN_FLIGHT:
                done(under_way.popleft())
            under_way.append(twin.send(pattern(size, number + twin.rank)))
        done(*under_way)

    def receive(twin: Twin) -> None:
        for number, size in enumerate(sizes):
            assert torch.equal(twin.next().take(), pattern(size, number + twin.peer))

    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(work, twin) for work in (send, receive) for twin in twins]
        for future in running:
            future.result()


def test_begin_waits_for_nobody() -> None:
    begun = threading.Event()

    def rank(me: int, world_size: int, store: Store) -> None:
        with Twin(lo(), me, 1 - me, store, reading=me == 0) as twin:
            if me == 0:
                under_way = [twin.send(pattern(MIB, number)) for number in range(IN_FLIGHT)]
                begun.set()  # and only now does the other side read its first header
                done(*under_way)
            else:
                assert begun.wait(LONG_S)
                twin.read()
                for number in range(IN_FLIGHT):
                    assert torch.equal(twin.next().take(), pattern(MIB, number))

    run_threads(rank, 2)


def test_the_bytes_come_in_before_anybody_asks(twins: tuple[Twin, Twin]) -> None:
    payload = torch.ones(MIB, dtype=torch.uint8)
    pending = twins[0].send(payload)
    incoming = twins[1].next()
    deadline = Deadline(LONG_S)
    while not incoming.buffer.all():
        assert not deadline.passed
    incoming.take()
    done(pending)


def test_a_send_is_done_only_when_it_has_been_received() -> None:
    waited = threading.Event()

    def rank(me: int, world_size: int, store: Store) -> None:
        with Twin(lo(), me, 1 - me, store, reading=me == 0) as twin:
            if me == 0:
                pending = twin.send(pattern(9))
                with pytest.raises(TimeoutError, match=r"not done within 0\.05 s"):
                    pending.wait(0.05)
                waited.set()
                done(pending)
            else:
                assert waited.wait(LONG_S)
                twin.read()
                twin.next().take()

    run_threads(rank, 2)


def test_an_empty_message_is_announced_and_done(twins: tuple[Twin, Twin]) -> None:
    assert twins[0].send(pattern(0)).over
    assert twins[1].next().take().numel() == 0


def test_a_rank_with_twenty_peers() -> None:
    peers = range(1, 21)

    def rank(me: int, world_size: int, store: Store) -> None:
        transport = lo()
        others = peers if me == 0 else [0]
        twins = [Twin(transport, me, other, store) for other in others]
        pendings = [twin.send(pattern(70000, me)) for twin in twins]
        for twin in twins:
            assert torch.equal(twin.next().take(), pattern(70000, twin.peer))
        done(*pendings)
        for twin in twins:
            twin.close()

    run_threads(rank, 21)


def test_an_interface_of_gloos_own_choice() -> None:
    def rank(me: int, world_size: int, store: Store) -> None:
        with Twin(Gloo(GlooOptions()), me, 1 - me, store) as twin:
            pending = twin.send(pattern(MIB, me))
            assert torch.equal(twin.next().take(), pattern(MIB, twin.peer))
            done(pending)

    run_threads(rank, 2)


def test_a_forked_child_leaves_the_connection_alone() -> None:
    """In fresh processes: what other tests have left to collect is none of this one's."""
    with run_fresh(fork_and_go_on, 2) as ranks:
        ranks.results()
