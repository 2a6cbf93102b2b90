"""Versions of a stage's weights that microbatches meet in the asynchronous schedules.

Version ``v`` is what ``v`` updates of the stage have made. A microbatch meets the same version in
its forward and in its backward, whatever the timing; different stages may have different ones.

*pipedream.* The stage is updated after each round of backwards; a round is one microbatch on each
replica. The forward of round ``k`` comes behind ``k - W`` backwards, with the stage's warm-up
``W``, so it meets version ``max(0, k - W)``: weights that lack the last ``W`` updates.

*pipedream_2bw.* The stage is updated once per batch of ``m`` microbatches, with the mean of their
gradients, and every stage meets the version before the newest that a flush would give: batch ``t``
meets ``max(0, t - 1)``. Two versions are enough, and the delay is the same on all stages
(Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021, section 3.1). It asks
that the gradients of batch ``t - 2`` are in before the first forward of batch ``t``, so that no
warm-up reaches over a whole batch: ``W * R <= m``; and that each replica has as many of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stagelink.plan import Plan, Stage


def rounds_per_update(plan: Plan, stage: Stage) -> int:
    """Rounds of backwards for one update of the stage, in an asynchronous schedule."""
    return plan.microbatches // stage.replicas if plan.two_versions else 1


def version_for(plan: Plan, stage: Stage, round_: int, warm_up: int) -> int:
    """The version that the microbatch of a round meets on the stage, in an asynchronous schedule.

    Its replica has had ``round_`` microbatches before it, and the stage's ``warm_up`` is given.
    """
    if plan.two_versions:
        return max(0, round_ // rounds_per_update(plan, stage) - 1)
    return max(0, round_ - warm_up)


def version_problems(plan: Plan, warm_up: Sequence[int]) -> Iterator[str]:
    """Find why two versions are not enough, a line per stage; nothing for other schedules."""
    if not plan.two_versions:
        return
    if plan.routing != "round_robin":
        yield "pipedream_2bw goes with round_robin, where all replicas have as many of a batch"
        return
    for stage, ahead in zip(plan.stages, warm_up, strict=True):
        count, replicas = plan.microbatches, stage.replicas
        least = max(ahead, 1) * replicas
        if count % replicas or count < least:
            yield (
                f"stage {stage.name!r}: microbatches = {count} will not do for pipedream_2bw; it "
                f"takes a multiple of the stage's {replicas} replicas, and at least {least} for "
                f"its warm-up of {ahead}"
            )
