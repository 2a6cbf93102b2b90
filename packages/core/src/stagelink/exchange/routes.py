"""Which ways a tensor of a microbatch takes from and to one rank, and whose microbatch it is."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from math import lcm
from typing import TYPE_CHECKING

from stagelink.arguments import NAME, expect, is_a
from stagelink.errors import UsageError
from stagelink.schedule import microbatches_of, period, rank_for
from stagelink.transport.header import Direction

if TYPE_CHECKING:
    from stagelink.exchange.mail import Mail
    from stagelink.links.ways import WayIn, WayOut
    from stagelink.plan import Edge, Plan

__all__ = ["Routes"]

_SHOWN = 5


class Routes:
    """The ways of one rank in a session of so many microbatches.

    Args:
        plan: the plan.
        rank: this rank.
        mail: the ways.
        microbatches: how many the session has in the whole pipeline.

    Attributes:
        mine: the microbatches that this replica handles.
    """

    def __init__(self, plan: Plan, rank: int, mail: Mail, microbatches: int) -> None:
        self._plan = plan
        self._rank = rank
        self._mail = mail
        self._stage = plan.stage_of(rank)
        self._outputs = _by_name(plan.outputs(self._stage.index))
        self._inputs = _by_name(plan.inputs(self._stage.index))
        self._microbatches = microbatches
        # Ways repeat with this period. Found afresh, they would be a tenth of a small message.
        self._period = lcm(*(period(stage) for stage in plan.stages))
        self._ways_out: dict[tuple[str, int], list[WayOut]] = {}
        self._ways_back: dict[tuple[str, int], list[WayIn]] = {}
        self._ways_in: dict[tuple[str, int], WayIn] = {}
        self.mine = microbatches_of(self._stage, plan.replica_of(rank), microbatches)

    def outgoing(self, name: str, microbatch: int) -> list[WayOut]:
        """The way to each consumer of a tensor that this stage produces.

        Raises:
            UsageError: it produces no such tensor, or the microbatch is not this replica's.
        """
        place = self._place(name, microbatch)
        ways = self._ways_out.get(place)
        if ways is None:
            known = self._mail.out.ways
            self._ways_out[place] = ways = [
                known[edge.index, Direction.FORWARD, self._rank_of(edge.target, microbatch)]
                for edge in self._edges(self._outputs, name, "produces")
            ]
        return ways

    def incoming(self, name: str, microbatch: int) -> WayIn:
        """The way from the producer of a tensor that this stage consumes; raises as `outgoing`."""
        place = self._place(name, microbatch)
        way = self._ways_in.get(place)
        if way is None:
            edge = self._edges(self._inputs, name, "consumes")[0]
            producer = self._rank_of(edge.source, microbatch)
            way = self._mail.into.ways[edge.index, Direction.FORWARD, producer]
            self._ways_in[place] = way
        return way

    def gradients(self, name: str, microbatch: int) -> list[WayIn]:
        """The ways by which gradients of a tensor come back, if any do; raises as `outgoing`."""
        place = self._place(name, microbatch)
        ways = self._ways_back.get(place)
        if ways is None:
            known = self._mail.into.ways
            self._ways_back[place] = ways = [
                known[way.edge.index, Direction.BACKWARD, way.peer]
                for way in self.outgoing(name, microbatch)
                if way.edge.tensor.grad
            ]
        return ways

    def all_incoming(self, microbatch: int) -> list[WayIn]:
        """The ways of all messages that a microbatch's forward takes; raises as `outgoing`."""
        self._in_period(microbatch)
        return [self.incoming(name, microbatch) for name in self._inputs]

    def end(self, microbatches: int) -> Sequence[int]:
        """The session turns out to have so many microbatches; those of them that are `mine`."""
        self._microbatches = microbatches
        self.mine = microbatches_of(self._stage, self._plan.replica_of(self._rank), microbatches)
        return self.mine

    def _place(self, name: str, microbatch: int) -> tuple[str, int]:
        if not is_a(name, str):  # what cannot be hashed fits no table
            expect(f"rank {self._rank}", "a tensor's name", name, NAME)
        return name, self._in_period(microbatch)

    def _in_period(self, microbatch: int) -> int:
        """The microbatch's place in the period, where it is one of `mine`."""
        if not isinstance(microbatch, int):
            raise UsageError(
                f"rank {self._rank}: a microbatch is an int, not {type(microbatch).__name__!r} "
                f"({microbatch!r:.80})"
            )
        if microbatch in self.mine:
            return microbatch % self._period
        holder = (
            "nobody's"
            if not 0 <= microbatch < self._microbatches
            else (f"rank {rank_for(self._stage, microbatch)}'s")
        )
        raise UsageError(
            f"rank {self._rank}: microbatch {microbatch!r} is {holder}; this replica of stage "
            f"{self._stage.name!r} handles {_listed(self.mine)} of {self._microbatches}"
        )

    def _edges(self, edges: Mapping[str, Sequence[Edge]], name: str, does: str) -> Sequence[Edge]:
        found = edges.get(name)
        if found is not None:
            return found
        near = difflib.get_close_matches(str(name), edges, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(
            f"rank {self._rank}: stage {self._stage.name!r} {does} no tensor {name!r}; "
            f"it {does} {', '.join(map(repr, edges)) or 'none'}{hint}"
        )

    def _rank_of(self, stage: int, microbatch: int) -> int:
        return rank_for(self._plan.stages[stage], microbatch)


def _by_name(edges: Sequence[Edge]) -> dict[str, list[Edge]]:
    names: defaultdict[str, list[Edge]] = defaultdict(list)
    for edge in edges:
        names[edge.tensor.name].append(edge)
    return dict(names)


def _listed(mine: Sequence[int]) -> str:
    first = [*islice(mine, _SHOWN + 1)]
    some = ", ".join(map(str, first[:_SHOWN]))
    return f"{some}, …" if len(first) > _SHOWN else (some or "none")
