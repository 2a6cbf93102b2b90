"""Which replica handles a microbatch: one pure function, asked by both ends of every edge.

Round robin: microbatch ``g`` runs on replica ``g mod R`` of a stage of ``R`` replicas. So any
counts of replicas and of microbatches fit, and nothing has to be remembered between messages.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stagelink.plan import Edge, Plan, Stage

__all__ = ["cycle", "microbatches_of", "pairs", "peers", "rank_for", "replica_for"]


def replica_for(stage: Stage, microbatch: int) -> int:
    """The replica of the stage that handles the microbatch."""
    return microbatch % stage.replicas


def rank_for(stage: Stage, microbatch: int) -> int:
    """The rank that handles the microbatch for the stage."""
    return stage.ranks[microbatch % stage.replicas]


def microbatches_of(stage: Stage, replica: int, microbatches: int) -> range:
    """The microbatches that the replica handles, ascending; none where there are too few.

    Args:
        stage: the stage.
        replica: the replica's number in it.
        microbatches: how many the session has in the whole pipeline.
    """
    return range(replica, microbatches, stage.replicas)


def cycle(plan: Plan, edge: Edge) -> int:
    """Microbatches after which the pairs of ranks that talk on the edge repeat.

    Within one cycle no pair comes twice, so it is also how many pairs there are.
    """
    return math.lcm(plan.stages[edge.source].replicas, plan.stages[edge.target].replicas)


def pairs(plan: Plan, edge: Edge) -> tuple[tuple[int, int], ...]:
    """The (source rank, target rank) pairs that ever talk on the edge, ascending."""
    source, target = plan.stages[edge.source], plan.stages[edge.target]
    return tuple(
        sorted((rank_for(source, g), rank_for(target, g)) for g in range(cycle(plan, edge)))
    )


def peers(plan: Plan, rank: int) -> tuple[int, ...]:
    """The ranks with which the rank shares an edge, ascending."""
    stage, replica = plan.stage_of(rank), plan.replica_of(rank)
    others = [(edge, edge.source) for edge in plan.inputs(stage.index)]
    others += [(edge, edge.target) for edge in plan.outputs(stage.index)]
    return tuple(
        sorted(
            {
                rank_for(plan.stages[other], microbatch)
                for edge, other in others
                for microbatch in microbatches_of(stage, replica, cycle(plan, edge))
            }
        )
    )
