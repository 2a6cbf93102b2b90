"""The walk: the actions of all ranks, run against each other in rounds, without time or tensors.

It is a game of tokens. Each step of an action takes one, which it may have to wait for, and gives
one to another rank: a receive takes the message that a send gave, a send takes the credit that a
receive gave back. In a round, every rank that has what it needs does one action; what it gives can
be taken in the next round, so the order in which a round is gone through changes nothing.

A token wakes the one rank that can wait for it, so a walk takes time in proportion to its messages
however many ranks wait. For a walk with durations, the list of ready ranks becomes a heap by time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stagelink.plan import Plan, Stage
from stagelink.schedule.actions import Action, Kind, Mode
from stagelink.schedule.routing import channels, microbatches_of, most_of_one, rank_for
from stagelink.schedule.waits import Step, Wait

_NONE = -1

_Part = tuple[Step, Callable[["_Walker", int, int], bool], int]
"""A step, what does it (false: it has to wait), and the index of its edge."""


class _Tokens:
    """Numbers for the tokens of a session, so that a walk's state is one flat list of counts.

    A token is something one rank gives and one rank takes: an arrived message, an arrived
    gradient, a credit of a channel, the release from a barrier. A channel is an (edge, source
    rank, target rank) that talks.
    """

    def __init__(self, plan: Plan, microbatches: int) -> None:
        messages = len(plan.edges) * microbatches
        self._microbatches = microbatches
        self._gradients = messages
        self._releases = 2 * messages
        self._credits: list[int] = []
        self._channels = [channels(plan, edge) for edge in plan.edges]
        self._count = self._releases + plan.world_size
        for of_edge in self._channels:
            self._credits.append(self._count)
            # Replicas without a common factor may need more microbatches than there are.
            self._count += max(of_edge[:microbatches], default=-1) + 1

    def message(self, edge: int, microbatch: int) -> int:
        return edge * self._microbatches + microbatch

    def gradient(self, edge: int, microbatch: int) -> int:
        return self._gradients + edge * self._microbatches + microbatch

    def release(self, rank: int) -> int:
        return self._releases + rank

    def credit(self, edge: int, microbatch: int) -> int:
        """A credit of the channel that the microbatch takes along the edge."""
        of_edge = self._channels[edge]
        return self._credits[edge] + of_edge[microbatch % len(of_edge)]

    def at_start(self, windows: Sequence[int]) -> list[int]:
        """Count each at first: nothing has arrived, and each edge has its window's credits."""
        counts = [0] * self._count
        ends = [*self._credits[1:], self._count]
        for window, first, end in zip(windows, self._credits, ends, strict=False):
            counts[first:end] = [window] * (end - first)
        return counts


@dataclass(frozen=True, slots=True)
class Walked:
    """Result of a walk."""

    waits: tuple[Wait, ...]  # the ranks that never got through, ascending; empty where all did
    # per edge, the most messages that were ever in flight between two ranks on it
    peaks: tuple[int, ...]
    rounds: int  # how many rounds it took: the time, if actions took equal time and messages none
    # by rank, the round of each action that it got through, from 0
    ends: tuple[tuple[int, ...], ...]


def walk(
    plan: Plan,
    programs: Sequence[Sequence[Action]],
    microbatches: int,
    windows: Sequence[int] | None = None,
    *,
    mode: Mode = "train",
    synchronise: bool = False,
) -> Walked:
    """Run the actions of all ranks against each other until nothing moves.

    An edge with gradient is taken to return one for every message in training. Where one at run
    time returns none, its credit is returned at the receive already: what got through still does.

    Args:
        plan: the plan.
        programs: the actions of each rank, indexed by rank: one forward of each of its
            microbatches and, in training, one backward after it.
        microbatches: how many the session has in the whole pipeline.
        windows: per edge, how many messages may be in flight between two ranks; None: any number.
        mode: in evaluation no message returns a gradient.
        synchronise: whether the replicas of a stage wait for each other in every backward, between
            receiving and sending gradients; one that is through already takes part idle.
    """
    if windows is None:
        windows = [microbatches] * len(plan.edges)
    returns = [mode == "train" and edge.tensor.grad for edge in plan.edges]
    return _Walk(plan, microbatches, windows, returns, synchronise).run(programs)


class _Walker:
    """Where one rank is: which action, which part of it, and the token it waits for."""

    __slots__ = ("action", "awaited", "ends", "part", "program", "rank", "stage")

    def __init__(self, rank: int, stage: Stage, program: Sequence[Action]) -> None:
        self.rank = rank
        self.stage = stage
        self.program = program
        self.action = 0
        self.part = 0
        self.awaited = _NONE
        self.ends: list[int] = []


class _Walk:
    def __init__(
        self,
        plan: Plan,
        microbatches: int,
        windows: Sequence[int],
        returns: Sequence[bool],
        synchronise: bool,
    ) -> None:
        self._plan = plan
        self._microbatches = microbatches
        self._windows = windows
        self._returns = returns
        self._synchronise = synchronise
        self._tokens = _Tokens(plan, microbatches)
        self._counts = self._tokens.at_start(windows)
        self._given: list[tuple[int, int]] = []
        self._round = 0
        self._peaks = [0] * len(plan.edges)
        self._at_barrier = [0] * len(plan.stages)
        self._idle: list[list[int]] = [[] for _ in plan.stages]
        self._most = [most_of_one(stage, microbatches) for stage in plan.stages]
        self._sources = [plan.stages[edge.source] for edge in plan.edges]
        self._targets = [plan.stages[edge.target] for edge in plan.edges]
        self._parts = [self._parts_of(stage) for stage in plan.stages]

    def _parts_of(self, stage: Stage) -> dict[Kind, list[_Part]]:
        inputs = [edge.index for edge in self._plan.inputs(stage.index)]
        outputs = [edge.index for edge in self._plan.outputs(stage.index)]
        forward: list[_Part] = [(Step.RECEIVE, self._receive, edge) for edge in inputs]
        forward += [(Step.SEND, self._send, edge) for edge in outputs]
        backward: list[_Part] = [
            (Step.RECEIVE_GRADIENT, self._receive_gradient, edge)
            for edge in outputs
            if self._returns[edge]
        ]
        if self._synchronise:
            backward.append((Step.SYNCHRONISE, self._wait_for_replicas, _NONE))
        backward += [
            (Step.SEND_GRADIENT, self._send_gradient, edge)
            for edge in inputs
            if self._returns[edge]
        ]
        return {Kind.FORWARD: forward, Kind.BACKWARD: backward}

    def run(self, programs: Sequence[Sequence[Action]]) -> Walked:
        walkers = [
            _Walker(rank, self._plan.stage_of(rank), program)
            for rank, program in enumerate(programs)
        ]
        ready = [walker for walker in walkers if self._has_more(walker)]
        while ready:
            ready = [walker for walker in ready if self._turn(walker)]
            ready += self._wake(walkers)
            self._round += 1
        waits = [self._wait_of(walker, walkers) for walker in walkers if walker.awaited != _NONE]
        ends = tuple(tuple(walker.ends) for walker in walkers)
        return Walked(tuple(waits), tuple(self._peaks), self._round, ends)

    def _turn(self, walker: _Walker) -> bool:
        """Go on with the rank's action, to its end or to a wait; whether it can go on after."""
        action = walker.program[walker.action]
        parts = self._parts[walker.stage.index][action.kind]
        for place in range(walker.part, len(parts)):
            _, do, edge = parts[place]
            if not do(walker, edge, action.microbatch):
                walker.part = place
                return False
        walker.part = 0
        walker.action += 1
        walker.ends.append(self._round)
        return self._has_more(walker)

    def _has_more(self, walker: _Walker) -> bool:
        """Whether the rank has another action; one that has none takes part idle from now on."""
        if walker.action < len(walker.program):
            return True
        if self._synchronise:
            self._join_idle(walker)
        return False

    def _wake(self, walkers: Sequence[_Walker]) -> list[_Walker]:
        """Hand over the round's tokens; the ranks that waited for one of them."""
        woken = []
        for token, rank in self._given:
            self._counts[token] += 1
            walker = walkers[rank]
            if walker.awaited == token:
                walker.awaited = _NONE
                woken.append(walker)
        self._given.clear()
        return woken

    def _take(self, walker: _Walker, token: int) -> bool:
        if self._counts[token]:
            self._counts[token] -= 1
            return True
        walker.awaited = token
        return False

    def _receive(self, walker: _Walker, edge: int, microbatch: int) -> bool:
        if not self._take(walker, self._tokens.message(edge, microbatch)):
            return False
        if not self._returns[edge]:
            self._give_credit(edge, microbatch)
        return True

    def _send(self, walker: _Walker, edge: int, microbatch: int) -> bool:
        credit = self._tokens.credit(edge, microbatch)
        if not self._take(walker, credit):
            return False
        in_flight = self._windows[edge] - self._counts[credit]
        self._peaks[edge] = max(self._peaks[edge], in_flight)
        message = self._tokens.message(edge, microbatch)
        self._given.append((message, rank_for(self._targets[edge], microbatch)))
        return True

    def _receive_gradient(self, walker: _Walker, edge: int, microbatch: int) -> bool:
        if not self._take(walker, self._tokens.gradient(edge, microbatch)):
            return False
        self._give_credit(edge, microbatch)
        return True

    def _send_gradient(self, _walker: _Walker, edge: int, microbatch: int) -> bool:
        gradient = self._tokens.gradient(edge, microbatch)
        self._given.append((gradient, rank_for(self._sources[edge], microbatch)))
        return True

    def _give_credit(self, edge: int, microbatch: int) -> None:
        credit = self._tokens.credit(edge, microbatch)
        self._given.append((credit, rank_for(self._sources[edge], microbatch)))

    def _wait_for_replicas(self, walker: _Walker, _edge: int, _microbatch: int) -> bool:
        if self._take(walker, self._tokens.release(walker.rank)):
            return True
        self._join_barrier(walker.stage)
        return False

    def _join_barrier(self, stage: Stage) -> None:
        """One more replica has come to the stage's barrier; the last one releases all."""
        self._at_barrier[stage.index] += 1
        if self._at_barrier[stage.index] == stage.replicas:
            self._given += [(self._tokens.release(rank), rank) for rank in stage.ranks]
            idle = [more - 1 for more in self._idle[stage.index] if more > 1]
            self._idle[stage.index] = idle
            self._at_barrier[stage.index] = len(idle)

    def _join_idle(self, walker: _Walker) -> None:
        """Take part in the backwards that other replicas of the stage have more, if they do."""
        replica = self._plan.replica_of(walker.rank)
        own = len(microbatches_of(walker.stage, replica, self._microbatches))
        more = self._most[walker.stage.index] - own
        if more:
            self._idle[walker.stage.index].append(more)
            self._join_barrier(walker.stage)

    def _wait_of(self, walker: _Walker, walkers: Sequence[_Walker]) -> Wait:
        action = walker.program[walker.action]
        step, _, edge = self._parts[walker.stage.index][action.kind][walker.part]
        if step is Step.SYNCHRONISE:
            return Wait(walker.rank, action, step, None, self._missing(walker.stage, walkers))
        blocker = self._blocker(step, edge, action.microbatch)
        return Wait(walker.rank, action, step, self._plan.edges[edge], blocker)

    def _blocker(self, step: Step, edge: int, microbatch: int) -> int:
        is_own = step is Step.SEND and self._returns[edge]
        at_source = is_own or step is Step.RECEIVE
        return rank_for((self._sources if at_source else self._targets)[edge], microbatch)

    def _missing(self, stage: Stage, walkers: Sequence[_Walker]) -> int:
        """A replica that has not come to the stage's barrier."""
        return next(
            rank
            for rank in stage.ranks
            if walkers[rank].awaited not in {_NONE, self._tokens.release(rank)}
        )
