"""One pass of microbatches through the pipeline, as a rank's own code drives it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import takewhile
from typing import Self

import torch

from stagelink.exchange.engine import Engine
from stagelink.exchange.handles import RecvHandle, SendHandle
from stagelink.exchange.openings import Opening
from stagelink.exchange.sessions import STOPPED, SessionRecord
from stagelink.exchange.traffic import Traffic
from stagelink.schedule import Action, Mode, actions_of


class Session:
    """Sends and receives of one rank for the microbatches of one pass; made by the handler.

    Used by one thread at a time. Leaving it (the end of its ``with`` block, by an error as well)
    waits for no peer, and takes back nothing: what `isend` has taken goes as its window has places
    for it, also in sessions after this one, and `stagelink.Handler.close` delivers it or says that
    it could not. A peer that could wait for what will not come hears at once that the session was
    left, and still gets what is due.

    Attributes:
        number: the session's place in the handler's life, from 0.
        mode: ``"train"`` or ``"evaluate"``.
        microbatches: how many there are in the whole pipeline; their ids are 0 to that, globally.
            `stagelink.UNTIL_END` in a session that was opened so, until it is known here.
        items: samples in the batch as the first stage gave it, or None.
        mine: ids of the microbatches that this replica handles, ascending.
        actions: what this rank does, in the schedule's order; if open-ended, an iterator
            that asks `has` before each forward.
        warm_up: forwards of this stage ahead of its first backward.
        open: whether it has not been left.
    """

    def __init__(
        self,
        engine: Engine,
        record: SessionRecord,
        opening: Opening,
        warm_up: int,
        actions: Sequence[Action] | None,
        keeps: object,
    ) -> None:
        self.number = record.number
        self.mode: Mode = opening.mode
        self.items = opening.items
        self.warm_up = warm_up
        self._engine = engine
        self._record = record
        self._keeps = keeps
        self._traffic = Traffic(engine, record, opening.mode, opening.microbatches)
        if actions is None:
            plan, own = engine.plan, takewhile(self.has, self.mine)
            stage = plan.stage_of(engine.rank)
            self.actions: Iterable[Action] = actions_of(plan, stage, own, warm_up, self.mode)
        else:
            self.actions = actions

    @property
    def microbatches(self) -> int:
        """Number of microbatches in the whole pipeline; see the class."""
        return self._traffic.microbatches

    @property
    def mine(self) -> Sequence[int]:
        """Ids of the microbatches that this replica handles; see the class."""
        return self._traffic.mine

    @property
    def open(self) -> bool:
        """Whether it has not been left."""
        return self._traffic.open

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self.open and kind is GeneratorExit:
            self.stop()  # the caller has stopped iterating
        elif self.open:
            self._leave("" if error is None else f" after {type(error).__name__}: {error}")

    def leave(self) -> None:
        """End the session on this rank: free what was not answered and tell the peers."""
        self._leave("")

    def stop(self) -> None:
        """Leave, and have the others leave: their `stopped` is true, and `has` says no more."""
        self._leave(STOPPED)

    def _leave(self, why: str) -> None:
        owed, done = self._traffic.leave()
        self._engine.leave_session(self.number, owed, why, tells=bool(why) or not done)

    @property
    def stopped(self) -> bool:
        """Whether a peer has stopped this session; who sees it calls `stop`, for its own peers."""
        return self._record.stopped

    # -- the end of the data

    def has(self, microbatch: int) -> bool:
        """Whether the session has a microbatch; `actions` asks it in an open-ended session.

        Blocks there until the microbatch is announced or the end is known, however long that
        takes; death, abort and goodbye end it. There it is announced when the headers of all that
        its forward takes are here. A rank that receives nothing knows the end only from its own
        `end`. False as well when a peer has stopped the session.

        Args:
            microbatch: one of `mine`, should the session have it.
        """
        return self._traffic.has(microbatch)

    def end(self, microbatches: int) -> None:
        """End an open-ended session's stream: it has ``microbatches`` in the whole pipeline.

        For ranks that receive nothing; returns at once.

        Raises:
            UsageError: the number does not cover what was sent, or the end is known already.
            DisagreementError: another rank said another number.
        """
        self._traffic.end(microbatches)

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

        Waits for nothing but credit. The autograd graph of ``tensor`` stays as it is; receivers
        get its values.

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
        return self._traffic.send(name, tensor, microbatch, deadline_s, copy=copy, waits=True)

    def isend(
        self, name: str, tensor: torch.Tensor | None, microbatch: int, *, copy: bool = True
    ) -> SendHandle:
        """Send without waiting: a message without credit starts later.

        It starts when the receiver has answered one before it, be it after this session was left.
        With ``copy=False`` the tensor must stay as it is until then, see the handle.
        """
        return self._traffic.send(name, tensor, microbatch, None, copy=copy, waits=False)

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
        route, key = self._traffic.in_route(name, microbatch)
        return self._traffic.recv(route, key, deadline_s)

    def irecv(self, name: str, microbatch: int) -> RecvHandle:
        """Receive like `recv`, with a handle to wait on."""
        return self._traffic.irecv(name, microbatch)

    # -- gradients

    def send_grad(
        self, name: str, gradient: torch.Tensor | None, microbatch: int, *, copy: bool = True
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
        return self._traffic.send_grad(name, gradient, microbatch, copy=copy)

    def isend_grad(
        self, name: str, gradient: torch.Tensor | None, microbatch: int, *, copy: bool = True
    ) -> SendHandle:
        """Call `send_grad`, which never waits; here for symmetry with `isend`."""
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
        traffic = self._traffic
        return traffic.recv_grad(traffic.gradients(name, microbatch), deadline_s)

    def irecv_grad(self, name: str, microbatch: int) -> RecvHandle:
        """Receive like `recv_grad`, with a handle to wait on."""
        return self._traffic.irecv_grad(name, microbatch)


# -- for torch.compile, which breaks its graph at these calls and does not look into them

_CALLS = (
    "send", "isend", "recv", "irecv", "send_grad", "isend_grad", "recv_grad", "irecv_grad",
    "has", "end", "leave",
)  # fmt: skip


def session_class() -> type[Session]:
    """`Session`, or where the compiler is loaded a subclass whose calls it leaves alone.

    The compiler takes more than a second to load, so nobody is made to load it for this.
    """
    return _left_alone() if "torch._dynamo" in sys.modules else Session


@cache
def _left_alone() -> type[Session]:
    calls = {name: torch.compiler.disable(getattr(Session, name)) for name in _CALLS}
    return type(Session.__name__, (Session,), {"__doc__": Session.__doc__, **calls})
