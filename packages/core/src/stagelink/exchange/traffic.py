"""The messages of one session: from the user's tensors to routes and back, each once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from stagelink.arguments import COUNT, FLAG, SECONDS, expect, is_a
from stagelink.deadline import Deadline
from stagelink.errors import MessageError, UsageError
from stagelink.exchange.engine import Engine
from stagelink.exchange.envelope import seal, unseal
from stagelink.exchange.handles import SENT, RecvHandle, SendHandle
from stagelink.exchange.incoming import Received
from stagelink.exchange.ledger import Ledger
from stagelink.exchange.sessions import SessionRecord
from stagelink.links.arrival import Key
from stagelink.links.route import InRoute, OutRoute
from stagelink.schedule import UNTIL_END, Mode
from stagelink.transport.header import Direction, Flag
from stagelink.transport.interrupts import stops_caller
from stagelink.transport.modes import outside_modes

_FORWARD, _BACKWARD = Direction.FORWARD, Direction.BACKWARD


class Traffic:
    """Messages that one rank sends and receives in one session."""

    def __init__(
        self, engine: Engine, record: SessionRecord, mode: Mode, microbatches: int
    ) -> None:
        self.open = True  # whether the session has not been left
        self._highest = -1
        self._rank = engine.rank
        self._limits = engine.plan.limits
        self._sessions = engine.sessions
        self._out = engine.out
        self._into = engine.into
        self._table = engine.table
        self._terms = engine.terms[mode]
        self._record = record
        self._number = record.number
        self._until_end = microbatches == UNTIL_END
        self._patience_s = engine.plan.limits.first_deadline_s
        self._ledgers = {edge: Ledger() for edge in engine.table.edges}
        self._bound(microbatches)

    def _bound(self, microbatches: int) -> None:
        self.microbatches = microbatches  # of the whole pipeline, as far as that is known
        self.mine = self._table.mine(microbatches)  # those that this replica handles

    def leave(self) -> tuple[list[Received], bool]:
        """Nothing is sent or received any more.

        Returns:
            What was received and is still owed a gradient; and whether no peer can wait for
            anything of this rank any more: all that is its to send was sent, and all that is its
            to take was taken and answered.
        """
        self.open = False
        owed = [message for ledger in self._ledgers.values() for message in ledger.owed.values()]
        done = not owed and self._is_through(len(self.mine))
        self._ledgers.clear()
        return owed, done

    def _is_through(self, microbatches: int) -> bool:
        produced = self._table.produced
        return all(
            len(ledger.sent if edge in produced else ledger.taken) == microbatches
            for edge, ledger in self._ledgers.items()
        )

    def check_open(self) -> None:
        """Raise if the session was left."""
        if not self.open:
            raise UsageError(f"rank {self._rank}: session {self._number} was left")

    # -- the end of the data

    def has(self, microbatch: int) -> bool:
        """See `stagelink.Session.has`."""
        self.check_open()
        if not is_a(microbatch, int):
            expect(f"rank {self._rank}", "a microbatch", microbatch, COUNT)
        record = self._record
        if self.microbatches == UNTIL_END:

            def ends() -> bool:
                return record.stopped or record.count is not None

            for name in self._table.inputs:
                route, key = self.in_route(name, microbatch)
                if self.mine.index(microbatch) not in self._ledgers[key.edge].taken:
                    self._into.wait_announced(route, key, ends)
            if record.count is not None:
                self._bound(record.count)
            if record.stopped:
                return False
        return 0 <= microbatch < self.microbatches

    def end(self, microbatches: int) -> None:
        """See `stagelink.Session.end`."""
        self.check_open()
        if self.microbatches != UNTIL_END:
            raise UsageError(
                f"rank {self._rank}: session {self._number} has {self.microbatches} microbatches "
                "already; only one that was opened with UNTIL_END is ended so"
            )
        if self._table.inputs:
            raise UsageError(
                f"rank {self._rank}: only a stage that receives nothing knows where the data end"
            )
        if type(microbatches) is not int or not self._highest < microbatches < UNTIL_END:
            raise UsageError(
                f"rank {self._rank}: microbatches must be a whole number above those that were "
                f"sent, from {self._highest + 1}, not {microbatches!r}"
            )
        self._sessions.tell_count(self._record, microbatches)
        self._bound(microbatches)

    # -- messages

    def send(  # noqa: C901, PLR0912 - no frame more for each message
        self,
        name: str,
        tensor: torch.Tensor | None,
        microbatch: int,
        deadline_s: float | None,
        *,
        copy: bool,
        waits: bool,
    ) -> SendHandle:
        """See `stagelink.Session.send`, or `isend` where it does not wait."""
        if type(copy) is not bool:
            expect(f"rank {self._rank}", "copy", copy, FLAG)  # type: ignore[unreachable]
        deadline = None if deadline_s is None else self._deadline(deadline_s)
        routes = self._out_routes(name, microbatch)
        place, ledgers = self.mine.index(microbatch), self._ledgers
        sent = ledgers[routes[0].edge.index].sent
        if len(routes) > 1 or (place != sent.below and place in sent):
            routes = self._unsent(routes, place, f"{name!r} of microbatch {microbatch}")
        record, out = self._record, self._out
        if self._until_end:
            record.check(microbatch)
        key = tuple.__new__(Key, (self._number, routes[0].edge.index, _FORWARD, microbatch))
        try:
            jobs = seal(routes, key, tensor, self._terms)
        except MessageError as error:
            raise out.refused(routes, key, error) from error
        for route, job in zip(routes, jobs, strict=True):
            index = route.edge.index
            if index != key.edge:
                key = key._replace(edge=index)
            if not out.send_nowait(route, record, key, job, copy=copy):
                if not waits:
                    out.park(route, key, job, copy=copy)
                else:
                    deadline = deadline or self._deadline(None)
                    out.send(route, key, job, deadline, copy=copy)
                    self._patience_s = self._limits.deadline_s
            ledger = ledgers[index]
            sent = ledger.sent
            if place == sent.below and not sent.others:
                sent.below = place + 1
            else:
                sent.add(place)
            if job.header.flags & Flag.REQUIRES_GRAD:
                ledger.returning.add(microbatch)
            if self._until_end:
                self._highest = max(self._highest, microbatch)
        if len(jobs) == 1 and jobs[0].finished:
            return SENT
        return SendHandle([*zip(routes, jobs, strict=True)], out.wait_sent, self._deadline)

    def _unsent(self, routes: Sequence[OutRoute], place: int, what: str) -> Sequence[OutRoute]:
        """The routes to consumers that had no credit at the first try: this is for them."""
        ledgers = self._ledgers
        unsent = [route for route in routes if place not in ledgers[route.edge.index].sent]
        if not unsent:
            raise UsageError(f"rank {self._rank}: {what} was sent before")
        return unsent

    def recv(self, route: InRoute, key: Key, deadline_s: float | None) -> torch.Tensor | None:
        """See `stagelink.Session.recv`; of a message that `in_route` has found."""
        deadline = None if deadline_s is None else self._deadline(deadline_s)
        arrival = self._receive(route, key, deadline)
        tensor = unseal(arrival, self._terms)
        if arrival.header.flags & Flag.REQUIRES_GRAD:
            arrival.payload = None  # it is kept for its answer
            if tensor is not None:
                with outside_modes():
                    tensor.requires_grad_()
        return tensor

    def recv_grad(
        self, gradients: Sequence[tuple[InRoute, Key]], deadline_s: float | None
    ) -> torch.Tensor | None:
        """See `stagelink.Session.recv_grad`; of what `gradients` has found."""
        self.check_open()
        deadline, awaited = self._deadline(deadline_s), []
        for route, key in gradients:
            ledger = self._ledgers[key.edge]
            if self.mine.index(key.microbatch) in ledger.taken:
                raise _received_before(self._rank, route, key)
            if key.microbatch in ledger.returning:
                awaited.append((route, key))
        if len(awaited) > 1:
            for route, key in awaited:
                # All are here before one is taken: what is taken cannot be asked for again.
                self._into.wait_whole(route, key, deadline)
        total: torch.Tensor | None = None
        for route, key in awaited:
            gradient = unseal(self._receive(route, key, deadline), self._terms)
            self._ledgers[key.edge].returning.remove(key.microbatch)
            if gradient is not None:
                with outside_modes():
                    total = gradient if total is None else total.add_(gradient)
        return total

    def _receive(self, route: InRoute, key: Key, deadline: Deadline | None) -> Received:
        if not self.open:
            self.check_open()
        ledger, place = self._ledgers[key.edge], self.mine.index(key.microbatch)
        taken = ledger.taken
        if place != taken.below and place in taken:
            raise _received_before(self._rank, route, key)
        arrival = self._into.take_nowait(route, key)
        if arrival is None:
            arrival = self._into.take(route, key, deadline or Deadline(self._patience_s))
        self._patience_s = self._limits.deadline_s
        if place == taken.below and not taken.others:
            taken.below = place + 1
        else:
            taken.add(place)
        if arrival.header.flags & Flag.REQUIRES_GRAD:
            ledger.owed[key.microbatch] = arrival
        return arrival

    def _deadline(self, deadline_s: float | None) -> Deadline:
        if deadline_s is not None:
            expect(f"rank {self._rank}", "deadline_s", deadline_s, SECONDS)
            return Deadline(deadline_s)
        return Deadline(self._patience_s)

    def _out_routes(self, name: str, microbatch: int) -> Sequence[OutRoute]:
        if not self.open:
            self.check_open()
        if microbatch.__class__ is not int or microbatch not in self.mine:
            self._table.check_mine(microbatch, self.mine, self.microbatches)
        try:
            return self._table.out[name, microbatch % self._table.period]
        except (KeyError, TypeError) as error:  # the first time, or it is no name
            if stops_caller(error):
                raise
            return self._table.outgoing(name, microbatch)

    def in_route(self, name: str, microbatch: int) -> tuple[InRoute, Key]:
        """Find the route that a tensor comes by, and its key there."""
        if not self.open:
            self.check_open()
        if microbatch.__class__ is not int or microbatch not in self.mine:
            self._table.check_mine(microbatch, self.mine, self.microbatches)
        try:
            route = self._table.into[name, microbatch % self._table.period]
        except (KeyError, TypeError) as error:
            if stops_caller(error):
                raise
            route = self._table.incoming(name, microbatch)
        return route, tuple.__new__(Key, (self._number, route.edge.index, _FORWARD, microbatch))

    def gradients(self, name: str, microbatch: int) -> list[tuple[InRoute, Key]]:
        """Find the routes that the gradients of a tensor come by, and their keys there."""
        routes = self._out_routes(name, microbatch)
        place = self.mine.index(microbatch)
        if any(place not in self._ledgers[route.edge.index].sent for route in routes):
            raise UsageError(
                f"rank {self._rank}: {name!r} of microbatch {microbatch} was not sent in this "
                "session, so no gradient comes back for it"
            )
        return [
            (route.back, Key(self._number, route.edge.index, _BACKWARD, microbatch))
            for route in routes
            if route.back is not None
        ]

    def irecv(self, name: str, microbatch: int) -> RecvHandle:
        """See `stagelink.Session.irecv`."""
        route, key = self.in_route(name, microbatch)
        return RecvHandle(partial(self._into.here, route, key), partial(self.recv, route, key))

    def irecv_grad(self, name: str, microbatch: int) -> RecvHandle:
        """See `stagelink.Session.irecv_grad`."""
        gradients = self.gradients(name, microbatch)
        awaited = [
            (route, key)
            for route, key in gradients
            if microbatch in self._ledgers[key.edge].returning
        ]
        into = self._into
        return RecvHandle(
            lambda: all(into.here(route, key) for route, key in awaited),
            partial(self.recv_grad, gradients),
        )

    def send_grad(
        self, name: str, gradient: torch.Tensor | None, microbatch: int, *, copy: bool
    ) -> SendHandle:
        """See `stagelink.Session.send_grad`."""
        if not is_a(copy, bool):
            expect(f"rank {self._rank}", "copy", copy, FLAG)
        route, key = self.in_route(name, microbatch)
        ledger = self._ledgers[key.edge]
        owed = ledger.owed.get(microbatch)
        if owed is None or route.back is None:
            taken = self.mine.index(microbatch) in ledger.taken
            _check_nothing_owed(f"rank {self._rank}: {name!r}", microbatch, gradient, taken=taken)
            return SENT
        back, answer = route.back, key._replace(direction=_BACKWARD)
        out = self._out
        try:
            (job,) = seal((back,), answer, gradient, self._terms, owed.header)
        except MessageError as error:
            raise out.refused((back,), answer, error) from error
        out.answer(back, answer, job, ledger.owed, copy=copy)
        if job.finished:
            return SENT
        return SendHandle([(back, job)], out.wait_sent, self._deadline)


def _received_before(rank: int, route: InRoute, key: Key) -> UsageError:
    return UsageError(f"rank {rank}: {key} of edge {route.edge.name!r} was received before")


def _check_nothing_owed(
    what: str, microbatch: int, gradient: torch.Tensor | None, *, taken: bool
) -> None:
    if not taken:
        raise UsageError(
            f"{what} of microbatch {microbatch} was not received in this session, so it has no "
            "gradient to send"
        )
    if gradient is not None:
        raise UsageError(
            f"{what} of microbatch {microbatch} takes no gradient: it was answered before, or its "
            "sender's tensor did not require one"
        )
