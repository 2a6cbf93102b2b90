"""One pass of microbatches through the pipeline, as a rank's own code drives it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Self

from stagelink.arguments import COUNT, FLAG, SECONDS, expect, is_a
from stagelink.deadline import Deadline
from stagelink.errors import MessageError, UsageError
from stagelink.exchange.envelope import Terms, check_contract, check_gradient, seal, unseal
from stagelink.exchange.handles import RecvHandle, SendHandle
from stagelink.exchange.marks import Marks
from stagelink.exchange.presence import STOPPED
from stagelink.exchange.routes import Routes
from stagelink.links.arrival import Arrival, Key
from stagelink.links.out_link import SendJob
from stagelink.schedule import UNTIL_END, rank_for
from stagelink.transport.header import Direction, Header
from stagelink.transport.lanes import device_here
from stagelink.transport.modes import outside_modes

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from stagelink.exchange.mail import Mail
    from stagelink.exchange.opening import Mode, Opening
    from stagelink.links.ways import WayIn, WayOut
    from stagelink.plan import Limits, Plan
    from stagelink.schedule import Action

__all__ = ["Session"]


class Session:
    """Sends and receives of one rank for the microbatches of one pass; made by the handler.

    Used by one thread at a time. Leaving it (the end of its ``with`` block, by an error as well)
    waits for no peer, and takes back nothing: what `isend` has taken goes as its window has places
    for it, also in sessions after this one, and `stagelink.Handler.close` delivers it or says that
    it could not. The peers hear at once that the session was left, and still get what is due.

    Attributes:
        number: the session's place in the handler's life, from 0.
        mode: ``"train"`` or ``"evaluate"``.
        microbatches: how many there are in the whole pipeline; their ids are 0 to that, globally.
            `stagelink.UNTIL_END` in a session that was opened so, until it is known here.
        items: samples in the batch as the first stage gave it, or None.
        mine: ids of the microbatches that this replica handles, ascending.
        actions: what this rank does, in the schedule's order; until the end, an iterator that asks
            `has` before each forward.
        warm_up: forwards of this stage ahead of its first backward.
        open: whether it has not been left.
        keeps: what must not be dropped while the session is there.
    """

    def __init__(
        self,
        number: int,
        opening: Opening,
        place: tuple[Plan, int],
        mail: Mail,
    ) -> None:
        self._plan, self._rank = place
        self.number = number
        self.mode: Mode = opening.mode
        self.microbatches = opening.microbatches
        self.items = opening.items
        self.actions: Iterable[Action] = ()
        self.warm_up = 0
        self._routes = Routes(self._plan, self._rank, mail, self.microbatches)
        self.mine = self._routes.mine
        device = device_here(self._plan.stage_of(self._rank).device)
        self._terms = Terms(self.mode == "train", mail.out.inline_bytes, device)
        self._mail = mail
        self._limits: Limits = self._plan.limits
        self.open = True
        self.keeps: object = None
        self._had_message = False
        self._sent: defaultdict[int, Marks] = defaultdict(Marks)
        self._highest = -1
        self._returning: set[tuple[int, int]] = set()
        self._taken: defaultdict[tuple[int, Direction], Marks] = defaultdict(Marks)
        self._owed: dict[tuple[int, int], Header] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.open and kind is GeneratorExit:
            self.stop()  # whoever iterates has stopped
        elif self.open:
            self._leave("" if error is None else f" after {type(error).__name__}: {error}")

    def leave(self) -> None:
        """End the session on this rank: free what was not answered and tell the peers."""
        self._leave("")

    def stop(self) -> None:
        """Leave, and have the others leave: their `stopped` is true, and `has` says no more."""
        self._leave(STOPPED)

    def _leave(self, why: str) -> None:
        self.open = False
        owed = []
        for edge, microbatch in self._owed:
            source = self._plan.stages[self._plan.edges[edge].source]
            key = Key(self.number, edge, Direction.FORWARD, microbatch)
            owed.append((rank_for(source, microbatch), key))
        self._owed.clear()
        self._mail.leave(self.number, owed, why)

    @property
    def stopped(self) -> bool:
        """Whether a peer has stopped this session; who sees it calls `stop`, for its own peers."""
        return self._mail.stopped(self.number)

    # -- the end of the data

    def has(self, microbatch: int) -> bool:
        """Whether the session has a microbatch; what `actions` asks in a session until the end.

        Blocks there until the microbatch is announced or the end is known, however long that
        takes; death, abort and goodbye end it. There it is announced when the headers of all that
        its forward takes are here. A rank that receives nothing knows the end only from its own
        `end`. False as well when a peer has stopped the session.

        Args:
            microbatch: one of `mine`, should the session have it.
        """
        self._check_open()
        if not is_a(microbatch, int):
            expect(f"rank {self._rank}", "a microbatch", microbatch, COUNT)
        if self.microbatches == UNTIL_END:
            for way in self._routes.all_incoming(microbatch):
                key = Key(self.number, way.edge.index, Direction.FORWARD, microbatch)
                if not self._has_taken(key):
                    self._mail.into.wait_announced(way, key, self._ends)
            self._learn_end()
            if self.stopped:
                return False
        return 0 <= microbatch < self.microbatches

    def end(self, microbatches: int) -> None:
        """The data have run out: the session has so many microbatches in the whole pipeline.

        For ranks that receive nothing, in a session until the end; returns at once.

        Raises:
            UsageError: the number does not cover what was sent, or the end is known already.
            DisagreementError: another rank said another number.
        """
        self._check_open()
        if self.microbatches != UNTIL_END:
            raise UsageError(
                f"rank {self._rank}: session {self.number} has {self.microbatches} microbatches "
                "already; only one that was opened with UNTIL_END is ended so"
            )
        if self._plan.inputs(self._plan.stage_of(self._rank).index):
            raise UsageError(
                f"rank {self._rank}: only a stage that receives nothing knows where the data end"
            )
        if type(microbatches) is not int or not self._highest < microbatches < UNTIL_END:
            raise UsageError(
                f"rank {self._rank}: microbatches must be a whole number above those that were "
                f"sent, from {self._highest + 1}, not {microbatches!r}"
            )
        self._mail.endings.tell(self.number, microbatches)
        self._learn_end()

    def _ends(self) -> bool:
        return self.stopped or self._mail.endings.known(self.number) is not None

    def _learn_end(self) -> None:
        known = self._mail.endings.known(self.number)
        if known is not None:
            self.microbatches = known
            self.mine = self._routes.end(known)

    # -- activations

    def send(
        self,
        name: str,
        tensor: torch.Tensor | None,
        microbatch: int,
        *,
        copy: bool = True,
        deadline_s: float | None = None,
    ) -> SendHandle:
        """Send one microbatch's tensor to every stage that consumes it.

        Waits for nothing but a free place in the window. The autograd graph of ``tensor`` stays
        as it is; the receivers get its values.

        Args:
            name: a tensor of the plan that this stage produces.
            tensor: what to send; None arrives as None. The result of an asynchronous collective
                is waited for; subclasses that only add to a tensor arrive as tensors. Whatever
                has no strided memory of its own, as a DTensor or a nested one, is refused.
            microbatch: one of `mine`.
            copy: with True the tensor may be changed as soon as this returns. With False it must
                stay as it is until the handle is done.
            deadline_s: seconds to wait for a place; None: the plan's limits.

        Returns:
            A handle, which need not be looked at with ``copy=True``.

        Raises:
            MessageError: the tensor cannot be sent or breaks the plan's contract; the receivers'
                ``recv`` raises the same text, and nothing else is harmed.
            DeadlineError: no place came free.
            PeerClosedError: a receiver left the session or closed.
            UsageError: a name or microbatch that is not this rank's to send, or sent before.
        """
        deadline = self._deadline(deadline_s)
        return self._send_forward(name, tensor, microbatch, copy=copy, deadline=deadline)

    def isend(
        self, name: str, tensor: torch.Tensor | None, microbatch: int, *, copy: bool = True
    ) -> SendHandle:
        """As `send`, but never waits: a message that finds its window full starts later.

        It starts when the receiver has answered one before it, be it after this session was left.
        With ``copy=False`` the tensor must stay as it is until then, see the handle.
        """
        return self._send_forward(name, tensor, microbatch, copy=copy, deadline=None)

    def recv(
        self, name: str, microbatch: int, *, deadline_s: float | None = None
    ) -> torch.Tensor | None:
        """Receive one microbatch's tensor; blocks until it is here.

        The tensor is the caller's own: contiguous, a leaf, never written again by the library. It
        requires a gradient exactly when the sender's does, in training, on a tensor whose plan
        entry has ``grad``; then `send_grad` is owed for it. It cannot be resized in place
        (``resize_``): its memory may be the transport's, where there is no more.

        Args:
            name: a tensor of the plan that this stage consumes.
            microbatch: one of `mine`.
            deadline_s: seconds to wait; None: the plan's limits.

        Returns:
            The tensor, or None where the sender sent None.

        Raises:
            DeadlineError: it did not come in time.
            RefusedError: the sender could not send it.
            PeerClosedError: the sender left the session or closed before it.
            UsageError: a name or microbatch that is not this rank's to receive, or received
                before.
        """
        way, key = self._incoming(name, microbatch)
        return self._recv_forward(way, key, deadline_s)

    def irecv(self, name: str, microbatch: int) -> RecvHandle:
        """As `recv`, with a handle to wait on."""
        way, key = self._incoming(name, microbatch)
        return RecvHandle(
            partial(self._mail.into.here, way, key), partial(self._recv_forward, way, key)
        )

    # -- gradients

    def send_grad(
        self,
        name: str,
        gradient: torch.Tensor | None,
        microbatch: int,
        *,
        copy: bool = True,
    ) -> SendHandle:
        """Send back the gradient of a tensor that was received; never waits for the peer.

        Nothing is sent to a peer that has closed, where nobody asks for it any more.

        Args:
            name: a tensor of the plan that this stage consumes.
            gradient: of the tensor's shape and dtype; None says that there is none. For a tensor
                that takes no gradient None is the only value, and nothing is sent.
            microbatch: one that was received.
            copy: as for `send`.

        Raises:
            MessageError: shape or dtype differ from the tensor's; the peer is told.
            UsageError: the tensor was not received, takes no gradient, or has been answered.
        """
        if not is_a(copy, bool):
            expect(f"rank {self._rank}", "copy", copy, FLAG)
        way_in, key = self._incoming(name, microbatch)
        like = self._owed.get((key.edge, microbatch))
        if like is None:
            self._check_nothing_owed(name, key, gradient)
            return self._sent_by((), ())
        way = self._mail.out.ways[key.edge, Direction.BACKWARD, way_in.peer]
        back = key._replace(direction=Direction.BACKWARD)
        job = self._job([way], back, gradient, partial(check_gradient, like))
        del self._owed[key.edge, microbatch]
        self._mail.out.send(way, back, job, copy=copy, deadline=None)
        return self._sent_by((way,), (job,))

    def isend_grad(
        self, name: str, gradient: torch.Tensor | None, microbatch: int, *, copy: bool = True
    ) -> SendHandle:
        """The same as `send_grad`, which never waits; here for symmetry with `isend`."""
        return self.send_grad(name, gradient, microbatch, copy=copy)

    def recv_grad(
        self, name: str, microbatch: int, *, deadline_s: float | None = None
    ) -> torch.Tensor | None:
        """Receive the gradient of a tensor that was sent; blocks until every consumer's is here.

        Args:
            name: a tensor of the plan that this stage produces.
            microbatch: one that was sent.
            deadline_s: seconds to wait; None: the plan's limits.

        Returns:
            The consumers' gradients summed in the order of the plan's ``to``; None where no
            consumer has one, and at once for a tensor that was sent without requiring a gradient.

        Raises:
            DeadlineError, RefusedError, PeerClosedError: as for `recv`.
            UsageError: the tensor was not sent, or its gradient was received before.
        """
        keys = self._gradient_keys(name, microbatch)
        return self._recv_backward(keys, deadline_s)

    def irecv_grad(self, name: str, microbatch: int) -> RecvHandle:
        """As `recv_grad`, with a handle to wait on."""
        keys = self._gradient_keys(name, microbatch)
        awaited = [(w, key) for w, key in keys if (key.edge, microbatch) in self._returning]

        def ready() -> bool:
            return all(self._mail.into.here(way, key) for way, key in awaited)

        return RecvHandle(ready, partial(self._recv_backward, keys))

    # -- inside

    def _send_forward(
        self,
        name: str,
        tensor: torch.Tensor | None,
        microbatch: int,
        *,
        copy: bool,
        deadline: Deadline | None,
    ) -> SendHandle:
        if not is_a(copy, bool):
            expect(f"rank {self._rank}", "copy", copy, FLAG)
        ways = self._outgoing(name, microbatch)
        edge = ways[0].edge
        self._mail.endings.check(self.number, microbatch)
        key = Key(self.number, edge.index, Direction.FORWARD, microbatch)
        check = partial(check_contract, edge) if edge.tensor.has_contract else None
        job = self._job(ways, key, tensor, check)
        header = job.header
        jobs = [job]
        for way in ways[1:]:
            # Every consumer's message is the same but for its edge, and for where it is carried.
            if way.link.lane.device == ways[0].link.lane.device:
                same = header._replace(edge=way.edge.index)
                jobs.append(SendJob(same, job.payload, private=job.private))
            else:
                jobs.append(self._job([way], key._replace(edge=way.edge.index), tensor, check))
        for way, own in zip(ways, jobs, strict=True):
            key = key if own is job else key._replace(edge=way.edge.index)
            if self._mail.out.send(way, key, own, copy=copy, deadline=deadline):
                self._had_message = True
            self._sent[key.edge].add(self.mine.index(microbatch))
            self._highest = max(self._highest, microbatch)
            if header.requires_grad:
                self._returning.add((key.edge, microbatch))
        return self._sent_by(ways, jobs)

    def _job(
        self,
        ways: Sequence[WayOut],
        key: Key,
        tensor: torch.Tensor | None,
        check: Callable[[torch.Tensor], None] | None,
    ) -> SendJob:
        try:
            return seal(ways, key, tensor, check, self._terms)
        except MessageError as error:
            text = f"rank {self._rank}: {key} of edge {ways[0].edge.name!r}: {error}"
            for way in ways:
                self._mail.out.refuse(way, key._replace(edge=way.edge.index), text)
            raise type(error)(text) from error

    def _recv_forward(self, way: WayIn, key: Key, deadline_s: float | None) -> torch.Tensor | None:
        self._check_not_taken(way, key)
        arrival = self._receive(way, key, self._deadline(deadline_s))
        if arrival.header.requires_grad:
            self._owed[key.edge, key.microbatch] = arrival.header
        else:
            self._mail.into.post_credit(way.peer, key)
        tensor = unseal(arrival, self._terms)
        if tensor is not None and arrival.header.requires_grad:
            with outside_modes():
                tensor.requires_grad_()
        return tensor

    def _recv_backward(
        self, keys: Sequence[tuple[WayIn, Key]], deadline_s: float | None
    ) -> torch.Tensor | None:
        deadline = self._deadline(deadline_s)
        for way, key in keys:
            self._check_not_taken(way, key)
        awaited = [(w, k) for w, k in keys if (k.edge, k.microbatch) in self._returning]
        if len(awaited) > 1:
            for way, key in awaited:
                # All are here before one is taken: what is taken cannot be asked for again.
                self._mail.into.wait_whole(way, key, deadline)
        total: torch.Tensor | None = None
        for way, key in awaited:
            gradient = unseal(self._receive(way, key, deadline), self._terms)
            forward = self._mail.out.ways[key.edge, Direction.FORWARD, way.peer]
            self._mail.out.release(forward, self.number, key.microbatch)
            self._returning.remove((key.edge, key.microbatch))
            if gradient is not None:
                with outside_modes():
                    total = gradient if total is None else total.add_(gradient)
        return total

    def _receive(self, way: WayIn, key: Key, deadline: Deadline) -> Arrival:
        arrival = self._mail.into.receive(way, key, deadline)
        self._had_message = True
        self._taken[key.edge, key.direction].add(self.mine.index(key.microbatch))
        return arrival

    def _has_taken(self, key: Key) -> bool:
        return self.mine.index(key.microbatch) in self._taken[key.edge, key.direction]

    def _check_not_taken(self, way: WayIn, key: Key) -> None:
        self._check_open()
        if self._has_taken(key):
            raise UsageError(
                f"rank {self._rank}: {key} of edge {way.edge.name!r} was received before"
            )

    def _deadline(self, deadline_s: float | None) -> Deadline:
        if deadline_s is not None:
            expect(f"rank {self._rank}", "deadline_s", deadline_s, SECONDS)
            return Deadline(deadline_s)
        limits = self._limits
        return Deadline(limits.deadline_s if self._had_message else limits.first_deadline_s)

    def _sent_by(self, ways: Sequence[WayOut], jobs: Sequence[SendJob]) -> SendHandle:
        def wait(jobs: Sequence[SendJob], deadline_s: float | None) -> None:
            sent = [*zip(ways, jobs, strict=True)]
            self._mail.out.wait_sent(sent, self._deadline(deadline_s))

        return SendHandle(jobs, wait)

    def _check_open(self) -> None:
        if not self.open:
            raise UsageError(f"rank {self._rank}: session {self.number} was left")

    def _outgoing(self, name: str, microbatch: int) -> list[WayOut]:
        self._check_open()
        ways = self._routes.outgoing(name, microbatch)
        # Where one of several consumers left no place, a second try is for that one only.
        place = self.mine.index(microbatch)
        unsent = [way for way in ways if place not in self._sent[way.edge.index]]
        if not unsent:
            raise UsageError(
                f"rank {self._rank}: {name!r} of microbatch {microbatch} was sent before"
            )
        return unsent

    def _incoming(self, name: str, microbatch: int) -> tuple[WayIn, Key]:
        self._check_open()
        way = self._routes.incoming(name, microbatch)
        return way, Key(self.number, way.edge.index, Direction.FORWARD, microbatch)

    def _gradient_keys(self, name: str, microbatch: int) -> list[tuple[WayIn, Key]]:
        self._check_open()
        ways = self._routes.outgoing(name, microbatch)
        place = self.mine.index(microbatch)
        if any(place not in self._sent[way.edge.index] for way in ways):
            raise UsageError(
                f"rank {self._rank}: {name!r} of microbatch {microbatch} was not sent in this "
                "session, so no gradient comes back for it"
            )
        return [
            (way, Key(self.number, way.edge.index, Direction.BACKWARD, microbatch))
            for way in self._routes.gradients(name, microbatch)
        ]

    def _check_nothing_owed(self, name: str, key: Key, gradient: torch.Tensor | None) -> None:
        if not self._has_taken(key):
            raise UsageError(
                f"rank {self._rank}: {name!r} of microbatch {key.microbatch} was not received in "
                "this session, so it has no gradient to send"
            )
        if gradient is not None:
            raise UsageError(
                f"rank {self._rank}: {name!r} of microbatch {key.microbatch} takes no gradient: "
                "it was answered before, or its sender's tensor did not require one"
            )
