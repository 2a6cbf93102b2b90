"""Routes of a microbatch's tensors from and to one rank, and whose microbatch it is."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from math import lcm

from stagelink.arguments import NAME, expect, is_a
from stagelink.errors import UsageError
from stagelink.links.route import InRoute, OutRoute
from stagelink.links.wiring import Wiring
from stagelink.plan import Edge, Plan
from stagelink.schedule import microbatches_of, period, rank_for
from stagelink.transport.header import Direction

_SHOWN = 5


class RoutingTable:
    """The routes of one rank by tensor and microbatch, found once and looked up from then on."""

    def __init__(self, plan: Plan, rank: int, wiring: Wiring) -> None:
        self._plan = plan
        self._rank = rank
        self._wiring = wiring
        self._stage = plan.stage_of(rank)
        self._replica = plan.replica_of(rank)
        self._last_count, self._last_mine = 0, microbatches_of(self._stage, self._replica, 0)
        self._outputs = _by_name(plan.outputs(self._stage.index))
        self._inputs = _by_name(plan.inputs(self._stage.index))
        # microbatches after which routes repeat
        self.period = lcm(*(period(stage) for stage in plan.stages))
        self.inputs = tuple(self._inputs)  # the tensors that a microbatch's forward takes
        stage = self._stage.index
        # indices of the edges that begin there
        self.produced = frozenset(edge.index for edge in plan.outputs(stage))
        # indices of the edges that begin or end at this rank's stage
        self.edges = (*(edge.index for edge in plan.inputs(stage)), *self.produced)
        # routes to the consumers of a tensor, by its name and the place in the period
        self.out: dict[tuple[str, int], tuple[OutRoute, ...]] = {}
        # the route from the producer of a tensor, likewise
        self.into: dict[tuple[str, int], InRoute] = {}

    def outgoing(self, name: str, microbatch: int) -> tuple[OutRoute, ...]:
        """The route to each consumer of a tensor that this stage produces; or `UsageError`."""
        edges = self._edges(self._outputs, name, "produces")
        peers = (self._rank_of(edge.target, microbatch) for edge in edges)
        found = tuple(
            self._wiring.out[edge.index, Direction.FORWARD, peer]
            for edge, peer in zip(edges, peers, strict=True)
        )
        return self.out.setdefault((name, microbatch % self.period), found)

    def incoming(self, name: str, microbatch: int) -> InRoute:
        """The route from the producer of a tensor that this stage consumes; as `outgoing`."""
        edge = self._edges(self._inputs, name, "consumes")[0]
        producer = self._rank_of(edge.source, microbatch)
        found = self._wiring.into[edge.index, Direction.FORWARD, producer]
        return self.into.setdefault((name, microbatch % self.period), found)

    def mine(self, microbatches: int) -> Sequence[int]:
        """The microbatches that this replica handles of a session of so many."""
        if microbatches != self._last_count:
            self._last_mine = microbatches_of(self._stage, self._replica, microbatches)
            self._last_count = microbatches
        return self._last_mine

    def check_mine(self, microbatch: object, mine: Sequence[int], microbatches: int) -> None:
        """Raise `UsageError` for a microbatch that is none of those that this replica handles."""
        if not isinstance(microbatch, int):
            raise UsageError(
                f"rank {self._rank}: a microbatch is an int, not {type(microbatch).__name__!r} "
                f"({microbatch!r:.80})"
            )
        if microbatch in mine:
            return
        holder = (
            "nobody's"
            if not 0 <= microbatch < microbatches
            else f"rank {rank_for(self._stage, microbatch)}'s"
        )
        raise UsageError(
            f"rank {self._rank}: microbatch {microbatch!r} is {holder}; this replica of stage "
            f"{self._stage.name!r} handles {_listed(mine)} of {microbatches}"
        )

    def _edges(self, edges: Mapping[str, Sequence[Edge]], name: str, does: str) -> Sequence[Edge]:
        if not is_a(name, str):  # what cannot be hashed fits no table
            expect(f"rank {self._rank}", "a tensor's name", name, NAME)
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
