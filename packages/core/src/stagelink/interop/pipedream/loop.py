"""The loop of PipeDream's caller on one rank: its phases, how far it has come, why it hangs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from stagelink.arguments import FLAG, expect, is_a
from stagelink.errors import DeadlineError, DisagreementError, UsageError
from stagelink.exchange.handler import Handler
from stagelink.interop.pipedream.meeting import Meeting
from stagelink.interop.pipedream.order import Assignment, explain
from stagelink.interop.pipedream.phase import Phase, Place
from stagelink.schedule import UNTIL_END
from stagelink.transport.interrupts import stops_caller


class Progress:
    """Counts of one phase on one rank."""

    def __init__(self) -> None:
        self.received = 0  # minibatches of which all was received, as the caller says
        self.returned = 0  # minibatches of which all was sent back, as the caller says
        self.forwards = 0  # minibatches that went, or came, forward
        self.backwards = 0  # minibatches that have begun to go back

    def go_on(self, *, sending: bool) -> None:
        """Count a minibatch of which all was received, or with ``sending`` sent back."""
        if sending:
            self.returned += 1
            self.began_backward(self.returned - 1)
        else:
            self.received += 1
            self.forwards = max(self.forwards, self.received)

    def sent(self, number: int) -> None:
        """Record that a tensor of this rank's n-th minibatch, from 0, was sent forward."""
        self.forwards = max(self.forwards, number + 1)

    def began_backward(self, number: int) -> None:
        """Record that the backward of this rank's n-th minibatch, from 0, has begun."""
        self.backwards = max(self.backwards, number + 1)

    @property
    def warm_up(self) -> int:
        """Forwards ahead of the first backward, asked for when that begins."""
        return max(self.forwards - 1, 0)

    def __str__(self) -> str:
        ahead = range(min(self.backwards, self.forwards), self.forwards)
        return (
            f"{self.forwards} forwards done, {self.backwards} backwards begun, minibatches "
            f"{', '.join(map(str, ahead)) or 'none'} forward and not back"
        )


class Loop:
    """Phases of one rank, one after the other.

    Where no rank has messages there is no ``comm``; ``meeting`` knows the others' warm-up.
    """

    def __init__(self, place: Place, comm: Handler | None, meeting: Meeting) -> None:
        self._place = place
        self._comm = comm
        self._meeting = meeting
        self._phase: Phase | None = None
        self._counts: list[list[int]] = []
        self.progress = Progress()

    def start(self, iterations: int, ack_shape: Sequence[int] | None) -> None:
        """Begin a phase with so many minibatches here; an evaluation has acks, of some shape."""
        rank = self._place.rank
        if self._phase is not None:
            raise UsageError(f"rank {rank}: wait() ends a phase before the next one starts")
        if type(iterations) is not int or iterations < 0:
            raise UsageError(
                f"rank {rank}: num_iterations must be an int from 0, not {iterations!r}"
            )
        if self._comm is not None:
            self._counts = self._agree(self._comm, iterations, ack_shape is not None)
            session = self._comm.train(UNTIL_END)
            self._phase = Phase(self._place, session, Assignment(self._counts), ack_shape)
        self.progress = Progress()

    def end(self) -> None:
        """End the phase, if there is one; waits for no other rank."""
        if self._phase is not None:
            phase, self._phase = self._phase, None
            phase.leave()

    def send(self, name: str, tensor: torch.Tensor | None, number: int, *, backward: bool) -> None:
        """Send a tensor of a minibatch forward; or backward the one that is due there."""
        phase = self._current(backward)
        with self._explained(phase):
            if backward:
                number = phase.due(name, self.progress.returned, back=True)
                self._begin_backward(phase, number)
                phase.answer(name, tensor, number)
            else:
                phase.send(name, tensor, number)
                self.progress.sent(number)

    def recv(self, name: str, number: int, *, backward: bool) -> torch.Tensor | None:
        """Receive what comes back for a minibatch; or what is due to come forward."""
        phase = self._current(backward)
        with self._explained(phase):
            if not backward:
                number = phase.due(name, self.progress.received, back=False)
                tensor = phase.recv(name, number)
                self.progress.sent(number)
                return tensor
            phase.minibatch(number)  # refused before it counts
            self._begin_backward(phase, number)
            return phase.answered(name, number)

    def _current(self, backward: bool) -> Phase:
        if not is_a(backward, bool):
            expect(f"rank {self._place.rank}", "backward", backward, FLAG)
        if self._phase is None:
            raise UsageError(
                f"rank {self._place.rank}: no phase: start_helper_threads comes first"
            )
        return self._phase

    def _agree(self, comm: Handler, iterations: int, forward_only: bool) -> list[list[int]]:
        """Every replica's number of minibatches by stage, told by all ranks to all."""
        ranks, rank = comm.plan.world_size, self._place.rank
        told = [0.0] * (2 * ranks)
        told[2 * rank : 2 * rank + 2] = [iterations, forward_only]
        heard = comm.reduce(told)
        evaluating = [one for one in range(ranks) if heard[2 * one + 1]]
        if len(evaluating) not in {0, ranks}:
            raise DisagreementError(
                f"ranks {evaluating} start an evaluation, the others a training; every rank goes "
                "through the same phases"
            )
        return [[int(heard[2 * one]) for one in stage] for stage in self._place.topology.stages]

    def _begin_backward(self, phase: Phase, number: int) -> None:
        if not self.progress.backwards and not phase.forward_only:
            self._meeting.tell_warm_up(self.progress.warm_up)
        self.progress.began_backward(number)

    @contextmanager
    def _explained(self, phase: Phase) -> Iterator[None]:
        """Say what a deadline means here, and tell the other ranks."""
        try:
            yield
        except DeadlineError as error:
            if self._comm is None or stops_caller(error):
                raise
            text = f"{error}. {self._state(phase, self._comm.plan.window)}"
            # Not the one that is raised: it would keep the caller's frames alive.
            self._comm.abort(DeadlineError(text))
            raise DeadlineError(text) from error

    def _state(self, phase: Phase, window: int | None) -> str:
        place = self._place
        kind = "evaluation" if phase.forward_only else "training"
        text = (
            f"Rank {place.rank} is replica {place.replica} of stage {place.stage}, in the {kind} "
            f"of {len(phase.mine)} minibatches of its own: {self.progress}; the window is "
            f"{window} for each tensor and pair of ranks"
        )
        if phase.forward_only:
            return text
        found = self._meeting.warm_up(place.topology.stages)
        return f"{text}. In PipeDream's schedule, {explain(place.topology, self._counts, found)}"
