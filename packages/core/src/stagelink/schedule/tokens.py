"""Numbers for the tokens of a walk, so that its state is one flat list of counts.

A token is something one rank gives and one rank takes: an arrived message, an arrived gradient, a
free place on a channel, the release from a barrier. A channel is an (edge, source rank, target
rank) that talks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagelink.schedule.routing import channels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stagelink.plan import Plan

__all__ = ["Tokens"]


class Tokens:
    """The numbers of one session's tokens.

    Args:
        plan: the plan.
        microbatches: how many the session has in the whole pipeline.
    """

    def __init__(self, plan: Plan, microbatches: int) -> None:
        messages = len(plan.edges) * microbatches
        self._microbatches = microbatches
        self._gradients = messages
        self._releases = 2 * messages
        self._places: list[int] = []
        self._channels = [channels(plan, edge) for edge in plan.edges]
        self._count = self._releases + plan.world_size
        for of_edge in self._channels:
            self._places.append(self._count)
            # Replicas without a common factor may need more microbatches than there are.
            self._count += max(of_edge[:microbatches], default=-1) + 1

    def message(self, edge: int, microbatch: int) -> int:
        """A message that has arrived."""
        return edge * self._microbatches + microbatch

    def gradient(self, edge: int, microbatch: int) -> int:
        """A gradient that has arrived, of a message that went along the edge."""
        return self._gradients + edge * self._microbatches + microbatch

    def release(self, rank: int) -> int:
        """The rank's release from the barrier of its stage's replicas."""
        return self._releases + rank

    def place(self, edge: int, microbatch: int) -> int:
        """A free place on the channel that the microbatch takes along the edge."""
        of_edge = self._channels[edge]
        return self._places[edge] + of_edge[microbatch % len(of_edge)]

    def at_start(self, windows: Sequence[int]) -> list[int]:
        """Count each at first: nothing has arrived, and the windows are free.

        Args:
            windows: the credits of each channel, per edge.
        """
        counts = [0] * self._count
        ends = [*self._places[1:], self._count]
        for window, first, end in zip(windows, self._places, ends, strict=False):
            counts[first:end] = [window] * (end - first)
        return counts
