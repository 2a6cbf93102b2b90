"""The handler of one rank, as its user has it: sessions, reductions, close."""

from __future__ import annotations

import _thread
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Self

from torch.distributed import Store

from stagelink.arguments import (
    CALLABLE,
    COUNT,
    FLAG,
    MAPPING,
    NAME,
    Expected,
    checked,
    given_seconds,
    instance,
    optional,
)
from stagelink.control.meeting import gloo_address_by
from stagelink.deadline import Deadline
from stagelink.errors import DeadlineError, PeerClosedError, StagelinkError, UsageError
from stagelink.exchange.engine import Engine
from stagelink.exchange.handles import AnyFuture
from stagelink.exchange.session import Session, session_class
from stagelink.exchange.unclosed import closed, opened
from stagelink.plan import Plan, Stage
from stagelink.schedule import (
    UNTIL_END,
    Action,
    Mode,
    Verification,
    actions_of,
    check_microbatches,
    microbatches_of,
    require,
    verify,
)
from stagelink.transport.contract import Link
from stagelink.transport.events import LinkCounters

_FUTURE = Expected(
    "a future of torch or of the standard library",
    lambda value: hasattr(value, "done") and hasattr(value, "add_done_callback"),
)


class Handler:
    """One rank's connection to the pipeline, made by `connect`.

    Leaving its ``with`` block closes it; an exception that leaves the block reaches every other
    rank with its text, unless it is `SystemExit` with code 0. So does one that a signal handler
    raises while a call waits: it leaves the call as it is, and this handler has failed. One that
    nobody has closed is left when it is dropped or its process ends: what was sent is delivered,
    and the peers hear "left without close", or the exception that ended the process. A warning is
    logged.

    Attributes:
        plan: the plan.
        rank: this rank.
        stage: the stage that it holds a replica of.
        replica: which replica.
    """

    def __init__(self, engine: Engine, verification: Verification) -> None:
        self.plan: Plan = engine.plan
        self.rank: int = engine.rank
        self.stage: Stage = self.plan.stage_of(self.rank)
        self.replica = self.plan.replica_of(self.rank)
        self._engine = engine
        self._plane = engine.plane
        self._verification = verification
        self._verifications = {verification.microbatches: verification}
        self._last_actions: dict[Mode, tuple[int, tuple[Action, ...]]] = {}
        self._session: Session | None = None
        self._next_session = 0
        opened(engine)
        self._dropped = weakref.finalize(self, _leave_soon, engine)
        self._dropped.atexit = False  # `opened` has seen to that

    # -- sessions

    @checked(items=optional(COUNT), actions=optional(MAPPING))
    def train(
        self,
        microbatches: int | None = None,
        *,
        items: int | None = None,
        actions: Mapping[int, Sequence[Action]] | None = None,
    ) -> Session:
        """Open a session in which gradients come back; use it in a ``with`` block.

        Every rank opens the same sessions in the same order. Blocks only where ``microbatches`` is
        left out, until a neighbour says the number.

        Args:
            microbatches: how many there are in the whole pipeline; may be left out on ranks that
                are not of a first stage. 0 is a session without any; `stagelink.UNTIL_END` one
                whose first stage says later, by `Session.end`.
            items: samples in the batch, told to the other ranks as `Session.items`.
            actions: a schedule of the caller's own, the actions of every rank; it is verified.

        Raises:
            VerificationError: the schedule cannot run with this many microbatches.
            PlanError: there are more microbatches than a session may have.
            DisagreementError: another rank opened this session with other values.
            UsageError: the session before is still open, or the number is wrong or missing.
        """
        if self.plan.schedule == "forward":
            raise UsageError(
                f"rank {self.rank}: the plan's schedule is 'forward', so no gradient comes back; "
                "use evaluate, or a schedule that trains"
            )
        if actions is not None and microbatches == UNTIL_END:
            raise UsageError(
                f"rank {self.rank}: lists of actions have an end: say how many microbatches"
            )
        return self._open("train", microbatches, items, actions)

    @checked(items=optional(COUNT))
    def evaluate(self, microbatches: int | None = None, *, items: int | None = None) -> Session:
        """Open a session that only goes forward; as `train` otherwise."""
        return self._open("evaluate", microbatches, items, None)

    def _open(
        self,
        mode: Mode,
        microbatches: int | None,
        items: int | None,
        actions: Mapping[int, Sequence[Action]] | None,
    ) -> Session:
        self._plane.check()
        self._check_opening(microbatches)
        trains = mode == "train"
        if trains and microbatches is not None:  # of peers' numbers `Sessions` sees to it
            self._verified(microbatches, actions)
        number = self._next_session
        self._next_session += 1
        record, opening = self._engine.sessions.open(number, mode, microbatches, items)
        # Forwards alone, each rank's in ascending order, cannot deadlock.
        verification = (
            self._verified(opening.microbatches, actions) if trains else self._verification
        )
        windows = verification.windows if trains else verification.forward_windows
        self._engine.enter_session(number, windows)
        warm_up = verification.warm_up[self.stage.index]
        if actions is not None:
            own: Sequence[Action] | None = tuple(actions.get(self.rank, ()))
        else:
            own = self._actions(mode, opening.microbatches, warm_up)
        self._session = session_class()(self._engine, record, opening, warm_up, own, self)
        return self._session

    def _actions(self, mode: Mode, microbatches: int, warm_up: int) -> Sequence[Action] | None:
        """What this rank does by the plan's schedule; None until the end is known."""
        if microbatches == UNTIL_END:
            return None
        known, actions = self._last_actions.get(mode, (None, ()))
        if known != microbatches:
            mine = microbatches_of(self.stage, self.replica, microbatches)
            actions = tuple(actions_of(self.plan, self.stage, mine, warm_up, mode))
            self._last_actions[mode] = microbatches, actions
        return actions

    def _check_opening(self, microbatches: object) -> None:
        if self._session is not None and self._session.open:
            raise UsageError(
                f"rank {self.rank}: session {self._session.number} is still open; leave its "
                "with block before the next one, or close the stream that it belongs to"
            )
        if microbatches.__class__ is int and microbatches in self._verifications:
            return  # it was looked at before
        if microbatches is None:
            if not self.plan.inputs(self.stage.index):
                raise UsageError(
                    f"rank {self.rank}: stage {self.stage.name!r} receives nothing, so it must "
                    "say how many microbatches there are"
                )
        elif (
            not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 0
        ):
            raise UsageError(
                f"rank {self.rank}: microbatches must be a whole number from 0, not "
                f"{microbatches!r}"
            )
        else:
            check_microbatches(self.plan, microbatches)

    def _verified(
        self, microbatches: int, actions: Mapping[int, Sequence[Action]] | None
    ) -> Verification:
        if actions is not None:
            return require(verify(self.plan, microbatches, actions))
        if microbatches not in self._verifications:
            self._verifications[microbatches] = require(verify(self.plan, microbatches))
        return self._verifications[microbatches]

    # -- all ranks together

    def reduce(
        self, values: Sequence[float], op: str = "sum", *, deadline_s: float | None = None
    ) -> list[float]:
        """Combine small values over all ranks; blocks until every rank has called.

        Args:
            values: as many on every rank.
            op: ``"sum"``, ``"max"`` or ``"min"``, element by element.
            deadline_s: seconds to wait; None: the plan's ``limits.first_deadline_s``.

        Returns:
            The same values on every rank, bit for bit.

        Raises:
            DeadlineError: a rank did not take part.
        """
        seconds = given_seconds(
            "reduce", "deadline_s", deadline_s, self.plan.limits.first_deadline_s
        )
        return self._engine.reducer.reduce(values, op, Deadline(seconds))

    @property
    def counters(self) -> Mapping[Link, LinkCounters]:
        """Totals of every link that begins or ends here, live."""
        return self._engine.node.wiring.counters

    @property
    def transports(self) -> Mapping[Link, str]:
        """Name of the transport of every link that begins or ends here."""
        return {link: link.transport for link in self._engine.node.wiring.links}

    # -- for a process group of the caller's own

    @checked(drop=CALLABLE)
    def replica_store(self, drop: Callable[[], None]) -> Store:
        """A store that the replicas of this stage share, to build a process group of theirs on.

        A new one at every call; the replicas call in the same order.

        Args:
            drop: gives up what is built there. Called when this handler fails or is closed, or
                both; on any thread, and must return at once.

        Raises:
            StagelinkError: this handler failed or was closed.
        """
        self._plane.check()
        number = len(self._engine.node.on_close)
        self._engine.node.on_close.append(drop)
        self.on_failure(lambda _: drop())
        return self._engine.node.rendezvous.pair_store(f"stage {self.stage.index}/{number}")

    @property
    def failure(self) -> StagelinkError | None:
        """Error that failed this handler, or None."""
        return self._plane.failure.error

    @checked(callback=CALLABLE)
    def on_failure(self, callback: Callable[[StagelinkError], None]) -> None:
        """Call back once when this handler fails; on any thread, and must return at once."""
        self._plane.failure.on_failure(callback)

    @checked(elsewhere=FLAG)
    def gloo_address(self, *, elsewhere: bool) -> str:
        """This host's address for such a group of gloo's, IPv4 or IPv6.

        That of the interface which the variable ``GLOO_SOCKET_IFNAME`` or the plan names, else
        loopback, or the one that other hosts reach. May block while names are resolved.

        Args:
            elsewhere: whether some of the group's members are on other hosts.

        Raises:
            ConnectError: the interface cannot be used, or other hosts cannot reach this one there;
                or none is named, and nothing tells which address is to be used.
        """
        control, host = self.plan.control, self._engine.node.rendezvous.store_host
        return gloo_address_by(control, host, elsewhere=elsewhere)

    @checked(future=_FUTURE, what=NAME)
    def wait(self, future: AnyFuture, what: str, deadline_s: float | None = None) -> None:
        """Block until a future of the caller's own is done, or the pipeline has failed.

        Args:
            future: of torch or of the standard library; its result is not looked at.
            what: what is waited for, for the error.
            deadline_s: seconds to wait; None: the plan's ``limits.deadline_s``.

        Raises:
            DeadlineError: it was not done in time.
            StagelinkError: this handler failed or was closed.
        """
        seconds = given_seconds("wait", "deadline_s", deadline_s, self.plan.limits.deadline_s)
        future.add_done_callback(lambda _: self._plane.changed())
        if not self._plane.wait(future.done, Deadline(seconds)):
            raise DeadlineError(f"rank {self.rank}: {what}: not done within {seconds:g} s")

    # -- the end

    @checked(action=CALLABLE)
    def soon(self, action: Callable[[], None]) -> None:
        """Have an action called soon on the thread that reads; takes no lock, for finalizers.

        The action returns at once and never raises.
        """
        self._plane.reader.call(action)

    @checked(error=instance(BaseException, "an exception"))
    def abort(self, error: BaseException) -> None:
        """Fail this rank and every other with the error's text; returns at once."""
        self._engine.node.fail(error)

    def close(self, timeout_s: float | None = None) -> None:
        """Let what was sent reach its peers, say goodbye, and give everything back.

        Nobody here asks for anything any more; yet what the peers have queued for this rank is
        taken in until each of them has nothing left, so that it is not lost to their sends.

        Always returns within about ``timeout_s``; the second call does nothing. Sends and receives
        that wait in other threads end with `ClosedError`.

        Args:
            timeout_s: seconds; None: the plan's ``limits.close_deadline_s``.

        Raises:
            DeadlineError: messages could not be delivered in time; everything was given back.
            PeerClosedError: messages could not be delivered, since their receivers had closed.
            StagelinkError: the handler had failed, and no call has said so yet.
        """
        limit_s = self.plan.limits.close_deadline_s
        seconds = given_seconds("close", "timeout_s", timeout_s, limit_s)
        if not self._start_closing():
            return
        lost = self._engine.node.close(Deadline(seconds))
        self._plane.failure.check_reported()
        if lost:
            text = ", ".join(f"{count} on {link}" for link, count in lost.items())
            if self._engine.node.wiring.receivers_closed:
                raise PeerClosedError(f"rank {self.rank}: not delivered, the peer closed: {text}")
            raise DeadlineError(f"rank {self.rank}: not delivered within {seconds:g} s: {text}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        elif self._start_closing():
            self._engine.node.abandon(error)

    def _start_closing(self) -> bool:
        self._dropped.detach()
        closed(self._engine)
        return not self._plane.failure.forked and self._plane.start_closing()


def _leave_soon(engine: Engine) -> None:
    """Leave for a handler that was dropped; wherever that was, so a thread does it.

    Below `threading`, whose locks may be held here.
    """

    def leave() -> None:
        engine.leave(None, "its handler was dropped")
        closed(engine)  # not before: else the process could end meanwhile

    with suppress(RuntimeError):  # there is none at the interpreter's end, which sees to it itself
        _thread.start_new_thread(leave, ())
