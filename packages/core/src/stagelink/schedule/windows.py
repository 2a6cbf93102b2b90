"""Windows, and the bytes of messages that a rank may have to hold at once by them.

A window says how many messages may be in flight between two ranks on an edge. It is as large as
the schedule's own order makes use of, so that it bounds memory and never throttles: in training,
as many microbatches as the producer forwards before it takes a gradient back; in forwards alone,
as many as fit along the longest path that the edge spans, since what goes by a shortcut waits for
what goes by every stage.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from stagelink.plan import Edge, Plan, Stage, Tensor
from stagelink.plan.dtypes import DTYPE_BY_NAME
from stagelink.schedule.routing import channels, pairs, rank_for


def forward_windows(plan: Plan) -> tuple[int, ...]:
    """The window of each edge in evaluation, and in training where the schedule is forwards alone.

    With microbatches ascending on every rank no window can hang: the rank that is at the lowest
    microbatch, furthest upstream, waits for nobody.
    """
    if plan.window is not None:
        return (plan.window,) * len(plan.edges)
    return at_least_two(distance + 1 for distance in distances(plan))


def training_windows(plan: Plan, microbatches: int, warm_up: Sequence[int]) -> tuple[int, ...]:
    """The window of each edge in training by the plan's schedule, with a warm-up per stage."""
    if plan.window is not None or plan.schedule == "forward":
        return forward_windows(plan)
    if plan.schedule == "gpipe":
        return at_least_two([microbatches] * len(plan.edges))
    return at_least_two(warm_up[edge.source] + 1 for edge in plan.edges)


def at_least_two(needed: Iterable[int]) -> tuple[int, ...]:
    """The windows needed, but two at least: one message is taken while the next one is made."""
    return tuple(max(2, window) for window in needed)


def consumers(plan: Plan) -> list[list[int]]:
    """Per stage, the stages that take something from it, ascending; all come after it."""
    return [sorted({edge.target for edge in plan.outputs(stage.index)}) for stage in plan.stages]


def distances(plan: Plan) -> list[int]:
    """Per edge, how many edges the longest path from its source to its target has, at least 1."""
    following = consumers(plan)
    longest = [_longest_paths(stage.index, following) for stage in plan.stages]
    return [longest[edge.source][edge.target] for edge in plan.edges]


def _longest_paths(start: int, following: Sequence[Sequence[int]]) -> dict[int, int]:
    """The longest path from a stage to each that can be reached, up to its furthest consumer."""
    longest = {start: 0}
    for stage in range(start, max(following[start], default=start)):
        if stage in longest:
            for consumer in following[stage]:
                longest[consumer] = max(longest.get(consumer, 0), longest[stage] + 1)
    return longest


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
    no more than there are in the session, or `UNTIL_END`. An evaluation is taken to be long.
    Windows are per edge. A message whose dtype or shape is not declared has ``unknown`` bytes; if
    that is None, a rank that takes part in its edge has None.
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
