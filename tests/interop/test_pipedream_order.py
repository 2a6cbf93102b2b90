"""Messages under PipeDream's names come in PipeDream's order, for every shape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from stagelink.errors import DisagreementError
from stagelink.interop.pipedream.order import Assignment
from tests.interop.pipedream_driver import Job, drive

if TYPE_CHECKING:
    from stagelink.testing import RankPool

# For (previous stage's replicas, this stage's): whom each replica here receives from, in turn.
RECEIVES = {
    (1, 1): [[0]],
    (2, 1): [[0, 1]],
    (1, 2): [[0], [0]],
    (2, 2): [[0, 1], [1, 0]],
    (3, 2): [[0, 2, 1], [1, 0, 2]],
    (4, 2): [[0, 2, 1, 3], [1, 3, 0, 2]],
    (2, 4): [[0, 1], [1, 0], [1, 0], [1, 0]],
    (3, 1): [[0, 1, 2]],
    (2, 3): [[0, 1], [1, 0], [1, 0]],
    (1, 3): [[0], [0], [0]],
}
# Observed of PipeDream itself: (sender, sender's own number) of each minibatch, on (3, 2).
OBSERVED = [
    [(0, 0), (2, 0), (1, 1), (0, 2), (2, 2), (1, 3)],
    [(1, 0), (0, 1), (2, 1), (1, 2), (0, 3), (2, 3)],
]


def walked(previous: int, here: int, replica: int, count: int) -> list[tuple[int, int]]:
    """Whom a replica receives from, by PipeDream's rows and columns, and the sender's number."""
    rows = [row for row in ([*range(r, previous, here)] for r in range(here)) if row]
    row, column, senders = min(replica, len(rows) - 1), 0, []
    for _ in range(count):
        senders.append(rows[row][column])
        column += 1
        if column == len(rows[row]):
            row, column = (row - 1) % len(rows), 0
    next_of: defaultdict[int, int] = defaultdict(lambda: -1)
    found: list[tuple[int, int]] = []
    for sender in senders:
        number = next_of[sender] + 1
        while (number + sender) % here != replica:
            number += 1
        next_of[sender] = number
        found.append((sender, number))
    return found


def check_order(job: Job, logs: Sequence[Sequence[Sequence[tuple[int, int]]]]) -> None:
    """Hold what each rank has seen in every phase against PipeDream's walk."""
    for stage, ranks in enumerate(job.stages[1:], 1):
        for replica, rank in enumerate(ranks):
            for log in logs[rank]:
                shape = job.shape[stage - 1], job.shape[stage]
                assert list(log) == walked(*shape, replica, len(log)), (rank, log)
                assert log


def test_the_walk_is_the_table() -> None:
    for (previous, here), tables in RECEIVES.items():
        for replica, table in enumerate(tables):
            senders = [sender for sender, _ in walked(previous, here, replica, 2 * len(table))]
            assert senders == table * 2
    assert [walked(3, 2, replica, 6) for replica in range(2)] == OBSERVED


@pytest.mark.parametrize("previous", range(1, 9))
def test_turns_are_the_walk_for_every_pair(previous: int) -> None:
    for here in range(1, 9):
        assignment = Assignment([[2 * here] * previous, [2 * previous] * here])
        place = {g: (r, f) for r, own in enumerate(assignment.mine[0]) for f, g in enumerate(own)}
        for replica, own in enumerate(assignment.mine[1]):
            assert [place[g] for g in own] == walked(previous, here, replica, 2 * previous)


@pytest.mark.parametrize("shape", [(2, 3, 1), (3, 2, 4), (2, 3, 2, 3), (4, 2, 2), (5, 3, 2, 1)])
def test_turns_are_the_walk_from_each_stage_to_the_next(shape: tuple[int, ...]) -> None:
    total = 1
    for replicas in shape:
        total *= replicas
    assignment = Assignment([[2 * total // replicas] * replicas for replicas in shape])
    for stage in range(1, len(shape)):
        before = assignment.mine[stage - 1]
        place = {g: (r, f) for r, own in enumerate(before) for f, g in enumerate(own)}
        for replica, own in enumerate(assignment.mine[stage]):
            expected = walked(shape[stage - 1], shape[stage], replica, len(own))
            assert [place[g] for g in own] == expected


def test_each_replica_has_what_it_asked_for() -> None:
    counts = [[5, 3], [1, 0, 7], [4, 4]]
    assignment = Assignment(counts)
    assert assignment.total == 8
    for stage, own in enumerate(assignment.mine):
        assert [len(mine) for mine in own] == counts[stage]
        assert sorted(g for mine in own for g in mine) == list(range(8))
        for replica, mine in enumerate(own):
            assert {assignment.replicas[stage][g] for g in mine} <= {replica}
    assert Assignment([[3], [0, 1, 2]]).mine == [[[0, 1, 2]], [[], [0], [1, 2]]]
    assert Assignment([[0, 0], [0]]).mine == [[[], []], [[]]]


def test_stages_must_have_the_same_number() -> None:
    with pytest.raises(DisagreementError, match=r"stage 0 were .* 4, 4 .*in all 8, .*stage 1 .*4"):
        Assignment([[4, 4], [4]])


# Minibatches of each rank of the first stage: enough for two rounds of each table.
EVEN = [
    Job((1, 1), (("train", 4),)),
    Job((2, 1), (("train", 3),), aux=True),
    Job((1, 2), (("train", 6),), relayed=True),
    Job((2, 2), (("train", 4),), aux=True, relayed=True),
    Job((3, 2), (("train", 4),), relayed=True),
    Job((4, 2, 2), (("train", 4),), relayed=True),
    Job((3, 1), (("train", 2),)),
    Job((1, 3), (("train", 6),)),
    Job((2, 3), (("train", 6),)),
    Job((2, 4), (("train", 8),), warm_up=(2, 0)),
    # More than two stages: what the third receives follows the second's own order.
    Job((2, 3, 1), (("train", 6),), warm_up=(4, 1, 0)),
]


@pytest.mark.parametrize("job", EVEN, ids=lambda job: str(job.shape))
def test_the_order_on_every_rank(job: Job, rank_pool: RankPool) -> None:
    reports = rank_pool.run(drive, job.world_size, job)
    check_order(job, [report.log for report in reports])


def test_it_is_the_order_that_was_observed(rank_pool: RankPool) -> None:
    reports = rank_pool.run(drive, 5, Job((3, 2), (("train", 4),)))
    assert [reports[rank].log for rank in (3, 4)] == [[OBSERVED[0]], [OBSERVED[1]]]
