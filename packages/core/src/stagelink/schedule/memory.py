"""Bytes of messages that a rank may have to hold at once, by the windows of its edges."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from stagelink.plan.dtypes import DTYPE_BY_NAME
from stagelink.schedule.routing import channels, pairs, rank_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stagelink.plan import Edge, Plan, Stage, Tensor

__all__ = ["message_bytes", "receive_bytes"]


def message_bytes(tensor: Tensor) -> int | None:
    """Bytes of one message of the tensor; None where its dtype or shape is not fully declared."""
    if tensor.dtype is None or tensor.shape is None or -1 in tensor.shape:
        return None
    return DTYPE_BY_NAME[tensor.dtype].itemsize * math.prod(tensor.shape)


def receive_bytes(
    plan: Plan,
    microbatches: int,
    windows: Sequence[int],
    forward_windows: Sequence[int],
    *,
    unknown: int | None = None,
) -> dict[int, int | None]:
    """The most that each rank may hold of what was sent to it, in training or in evaluation.

    In training it holds a window of messages per sender, and of gradients per receiver of its own;
    no more than there are in the session. An evaluation is taken to be long.

    Args:
        plan: the plan.
        microbatches: how many a training session has in the whole pipeline, or `UNTIL_END`.
        windows: per edge, in training.
        forward_windows: per edge, in evaluation.
        unknown: what to take for the bytes of a message whose dtype or shape is not declared.

    Returns:
        Bytes by rank; None where it takes part in an edge whose message is ``unknown``.
    """
    each = [message_bytes(edge.tensor) for edge in plan.edges]
    each = [unknown if size is None else size for size in each]
    held: dict[int, int | None] = dict.fromkeys(range(plan.world_size), 0)
    for edge in plan.edges:
        for rank, messages in _held_in_training(plan, edge, windows[edge.index], microbatches):
            held[rank] = _plus(held[rank], messages, each[edge.index])
    for stage in plan.stages:
        in_evaluation = _held_in_evaluation(plan, stage, forward_windows, each)
        for rank in stage.ranks:
            held[rank] = _greater(held[rank], in_evaluation)
    return held


def _held_in_training(
    plan: Plan, edge: Edge, window: int, microbatches: int
) -> Iterator[tuple[int, int]]:
    """For each rank at an end of the edge and each of its peers there, how many messages."""
    source, target = plan.stages[edge.source], plan.stages[edge.target]
    returns = edge.tensor.grad and plan.schedule != "forward"
    of_edge = channels(plan, edge)
    sent: Counter[int] = Counter()
    first_of: dict[int, int] = {}
    for first, channel in enumerate(of_edge[:microbatches]):
        first_of.setdefault(channel, first)
        sent[channel] += len(range(first, microbatches, len(of_edge)))
    for channel, first in first_of.items():
        messages = min(window, sent[channel])
        yield rank_for(target, first), messages
        if returns:
            yield rank_for(source, first), messages


def _held_in_evaluation(
    plan: Plan, stage: Stage, windows: Sequence[int], each: Sequence[int | None]
) -> int | None:
    held: int | None = 0
    for edge in plan.inputs(stage.index):
        senders = max(Counter(target for _, target in pairs(plan, edge)).values())
        held = _plus(held, senders * windows[edge.index], each[edge.index])
    return held


def _plus(held: int | None, messages: int, each: int | None) -> int | None:
    return None if held is None or each is None else held + messages * each


def _greater(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else max(one, other)
