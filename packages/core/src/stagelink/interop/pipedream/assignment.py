"""Assignment of a phase's minibatches to replicas, in the order of PipeDream's callers.

Replica ``r`` of a stage sends its ``f``-th minibatch to replica ``(f + r) mod C`` of the ``C`` of
the next stage, and each of those takes them by ``f``, then by ``r``. Numbers of minibatches need
not divide: a replica that has as many as it asked for is passed over. Minibatches have numbers in
the pipeline as a whole, in the order in which the first stage's replicas take turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain, zip_longest

from stagelink.errors import DisagreementError

__all__ = ["Assignment"]


class Assignment:
    """The minibatches of every replica of every stage.

    Args:
        counts: for each stage how many minibatches each replica has.

    Raises:
        DisagreementError: the stages do not have the same number in all.

    Attributes:
        total: how many there are in the whole pipeline.
        mine: for each stage and replica its minibatches, in its order.
    """

    def __init__(self, counts: Sequence[Sequence[int]]) -> None:
        self.total = sum(counts[0])
        for stage, own in enumerate(counts):
            if sum(own) != self.total:
                raise DisagreementError(
                    f"the replicas of stage 0 were started with {_listed(counts[0])} iterations, "
                    f"in all {self.total}, those of stage {stage} with {_listed(own)}, in all "
                    f"{sum(own)}; every stage handles every minibatch once"
                )
        self.mine = [_first(counts[0])]
        for own in counts[1:]:
            self.mine.append(_next(self.mine[-1], own))

    @cached_property
    def replicas(self) -> list[list[int]]:
        """Replica of each minibatch, by stage."""
        found = [[0] * self.total for _ in self.mine]
        for table, stage in zip(found, self.mine, strict=True):
            for replica, own in enumerate(stage):
                for minibatch in own:
                    table[minibatch] = replica
        return found


def _first(counts: Sequence[int]) -> list[list[int]]:
    mine: list[list[int]] = [[] for _ in counts]
    steps = (r for step in range(max(counts)) for r, own in enumerate(counts) if step < own)
    for minibatch, replica in enumerate(steps):
        mine[replica].append(minibatch)
    return mine


def _next(before: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
    mine: list[list[int]] = [[] for _ in counts]
    for minibatch, step, sender in _by_step(before):
        replica = (step + sender) % len(counts)
        while len(mine[replica]) == counts[replica]:
            replica = (replica + 1) % len(counts)
        mine[replica].append(minibatch)
    return mine


def _by_step(mine: Sequence[Sequence[int]]) -> Iterable[tuple[int, int, int]]:
    """Every minibatch with its place among its replica's own, and the replica: by the two."""
    steps = (
        [(own, step, replica) for replica, own in enumerate(column) if own is not None]
        for step, column in enumerate(zip_longest(*mine))
    )
    return chain.from_iterable(steps)


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))
