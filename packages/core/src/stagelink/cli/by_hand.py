"""What changes because a window was set by hand, beside what the schedule would take."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rich.filesize import decimal

from stagelink.schedule import verify

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stagelink.plan import Plan
    from stagelink.schedule import Verification

__all__ = ["window_by_hand"]


def window_by_hand(plan: Plan, result: Verification) -> str | None:
    """The difference in words; None where no window was set by hand.

    Args:
        plan: the plan.
        result: of its verification.
    """
    if plan.window is None:
        return None
    own = verify(dataclasses.replace(plan, window=None), result.microbatches)
    return f"window = {plan.window} by hand: {'; '.join(_differences(plan, result, own))}"


def _differences(plan: Plan, result: Verification, own: Verification) -> Iterator[str]:
    others = sorted(set(own.windows))
    yield f"the schedule's own windows are {', '.join(map(str, others)) or 'none'}"
    if result.ok and own.ok:
        changed = result.rounds != own.rounds
        without = f"instead of {own.rounds}" if changed else "as without"
        yield f"all {result.microbatches} microbatches take {result.rounds} rounds, {without}"
    for rank in range(plan.world_size):
        here, there = result.receive_bytes[rank], own.receive_bytes[rank]
        if here is not None and there is not None and here != there:
            yield f"rank {rank} may have to hold {decimal(here)} instead of {decimal(there)}"
