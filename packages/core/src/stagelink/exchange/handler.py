"""The handler of one rank: connect, open sessions, reduce, close."""

from __future__ import annotations

import json
import os
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch

from stagelink.control.meeting import Meeting
from stagelink.control.plane import Plane
from stagelink.control.reduce import Reducer, spanning_tree
from stagelink.control.rendezvous import Launch, Rendezvous, open_store
from stagelink.errors import (
    AbortedError,
    DeadlineError,
    DisagreementError,
    PeerClosedError,
    PlanError,
    StagelinkError,
    UsageError,
)
from stagelink.exchange.mail import Mail
from stagelink.exchange.opening import Openings
from stagelink.exchange.session import Session
from stagelink.exchange.watch import AbortWatch
from stagelink.exchange.wiring import Wiring, neighbours, routes_of
from stagelink.plan import differences
from stagelink.schedule import Verdict, actions_for, require, verify
from stagelink.transport.buffers import BufferPool
from stagelink.transport.choice import asked_for, asker
from stagelink.transport.contract import Deadline, Link
from stagelink.transport.events import Event, LinkCounters
from stagelink.transport.host import process_id, server_id
from stagelink.transport.offers import End, Survey, survey
from stagelink.transport.plugins import Plugins

if TYPE_CHECKING:
    from types import TracebackType

    from torch.distributed import Store

    from stagelink.exchange.arrival import Key
    from stagelink.exchange.handles import Awaited
    from stagelink.exchange.opening import Mode
    from stagelink.plan import Edge, Plan, Stage
    from stagelink.schedule import Action
    from stagelink.transport.contract import Transport
    from stagelink.transport.events import EventName

__all__ = ["Handler", "connect"]

_MAX_FACTS_BYTES = 64 * 1024 * 1024
_SPIN_S = 50e-6


def connect(
    plan: Plan,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    store: Store | str | None = None,
    run_id: str | None = None,
    transports: Iterable[type[Transport]] = (),
    observers: Iterable[object] = (),
) -> Handler:
    """Join the pipeline as one rank; blocks until every peer has joined and every link is open.

    What is not given is read from torchrun's environment variables, which are never changed. The
    user's process groups are not touched.

    Args:
        plan: the same on every rank.
        rank: this process's (or thread's) rank in the plan.
        world_size: must be the plan's.
        store: an open c10d store, or its address: ``tcp://host:port`` (rank 0 hosts it) or
            ``file:///path``.
        run_id: tells runs apart that share a store.
        transports: transport classes of the caller's own; they must be given on every rank.
        observers: objects or modules with observer hooks, beside those that the plan names.

    Raises:
        PlanError: rank, world size or options do not fit the plan; nothing was started.
        VerificationError: the schedule cannot run; nothing was started.
        PluginError: a transport or observer that is asked for is missing or broken.
        NoTransportError: nothing can carry some link.
        DisagreementError: another rank holds another plan, version or choice of transports.
        RankTakenError: the rank is held by another process.
        ConnectError: ranks did not come within ``limits.connect_deadline_s``, or the store failed.
    """
    launch = Launch.resolve(rank, world_size, store, run_id)
    plan.check_launch(launch.rank, launch.world_size)
    me: int = launch.rank
    _check_device(plan.stage_of(me), me)
    verdict = require(verify(plan))
    plugins = Plugins(transports, observers)
    plugins.load_observers(plan.observers)
    found = survey(plugins, asked_for(plan, routes_of(plan, me)), plan.transports)
    deadline = Deadline(plan.limits.connect_deadline_s)
    opened = open_store(launch.store, me, plan.world_size, deadline)
    hosts = isinstance(launch.store, str) and launch.store.startswith("tcp:") and me == 0
    rendezvous = Rendezvous(opened, f"{launch.run_id}/{plan.name}", me, plan.world_size)
    handler = Handler(plan, me, verdict, plugins, rendezvous, hosts_store=hosts)
    try:
        handler._connect(found, deadline)
    except BaseException as error:
        handler._abandon(error)
        raise
    return handler


def _check_device(stage: Stage, rank: int) -> None:
    if stage.device == "cuda" and not torch.cuda.is_available():
        raise PlanError(
            f"rank {rank}: stage {stage.name!r} is on device 'cuda', and CUDA is not available "
            f'(torch {torch.__version__}); set device = "cpu", or run on a machine with a GPU'
        )


class Handler:
    """One rank's connection to the pipeline, made by `connect`.

    Leaving its ``with`` block closes it; an exception that leaves the block reaches every other
    rank with its text.

    Attributes:
        plan: the plan.
        rank: this rank.
        stage: the stage that it holds a replica of.
        replica: which replica.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        verdict: Verdict,
        plugins: Plugins,
        rendezvous: Rendezvous,
        *,
        hosts_store: bool,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.stage: Stage = plan.stage_of(rank)
        self.replica = plan.replica_of(rank)
        self._plugins = plugins
        self._rendezvous = rendezvous
        self._hosts_store = hosts_store
        self._verdict = verdict
        self._verdicts = {verdict.microbatches: verdict}
        self._transports: Mapping[str, Transport] = {}
        self._session: Session | None = None
        self._next_session = 0
        self._drops: list[Callable[[], None]] = []
        self._neighbours = neighbours(plan)
        self._plane = Plane(rank)
        self._pool = BufferPool(plan.limits.pool_bytes)
        observe = self._observe if plugins.hooks.wants_events else None
        self._mail = Mail(self._plane, plan.control.inline_bytes, observe)
        self._openings = Openings(self._plane)
        self._reducer = Reducer(self._plane, spanning_tree(self._neighbours, rank))
        self._wiring = Wiring(plan, rank, self._plane, self._mail, self._pool, rendezvous)
        self._watch = AbortWatch(self._plane, rendezvous)

    # -- connecting

    def _connect(self, found: Survey, deadline: Deadline) -> None:
        self._transports = found.transports
        me = End(self.rank, self._server(), process_id(), found.offers)
        greeting = {
            "facts": _pack_facts(self.plan),
            "digest": self.plan.digest,
            "end": me.to_json(),
        }
        meeting = Meeting(
            self._plane,
            self._rendezvous,
            greeting,
            self._judge,
            me.server,
            self.plan.control.interface,
        )
        self._plane.start()
        meeting.meet(self._neighbours[self.rank], deadline)
        ends = {peer: End.from_json(said["end"]) for peer, said in meeting.greetings.items()}
        ends[self.rank] = me
        self._plane.poller.spin_s = self._spin_s(ends)
        self._wiring.agree(ends, found, asker(found, self._plugins.hooks, self.rank), deadline)
        self._wiring.open(found.transports, deadline)
        for link in self._wiring.links:
            self._plugins.hooks.link_opened(link)

    def _server(self) -> str:
        index = self.plan.server_of(self.rank)
        return server_id() if index is None else f"server {index}"

    def _spin_s(self, ends: Mapping[int, End]) -> float:
        if self.plan.control.spin_us is not None:
            return self.plan.control.spin_us * 1e-6
        here = sum(end.server == ends[self.rank].server for end in ends.values())
        return _SPIN_S if here <= len(os.sched_getaffinity(0)) else 0.0

    def _judge(self, peer: int, greeting: dict[str, Any]) -> None:
        if greeting.get("digest") == self.plan.digest:
            return
        theirs = _unpack_facts(str(greeting.get("facts")))
        found = differences(self.plan.facts(), theirs, f"rank {peer}")
        raise DisagreementError(
            f"rank {self.rank} and rank {peer} hold different plans: {'; '.join(found)}"
        )

    def _abandon(self, error: BaseException) -> None:
        self._fail(error)
        self._close(Deadline(self.plan.limits.close_deadline_s))

    # -- sessions

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
                are not of a first stage. 0 is a session without any.
            items: samples in the batch, told to the other ranks as `Session.items`.
            actions: a schedule of the caller's own, the actions of every rank; it is verified.

        Raises:
            VerificationError: the schedule cannot run with this many microbatches.
            DisagreementError: another rank opened this session with other values.
            UsageError: the session before is still open, or the number is wrong or missing.
        """
        if self.plan.schedule == "forward":
            raise UsageError(
                f"rank {self.rank}: the plan's schedule is 'forward', so no gradient comes back; "
                "use evaluate, or a schedule that trains"
            )
        return self._open("train", microbatches, items, actions)

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
        if mode == "train" and microbatches is not None:
            self._verified(microbatches, actions)
        number = self._next_session
        self._next_session += 1
        opening = self._openings.open(number, mode, microbatches, items)
        # Forwards alone, each rank's in ascending order, cannot wait in a circle.
        trains = mode == "train"
        verdict = self._verified(opening.microbatches, actions) if trains else self._verdict
        windows = verdict.windows if trains else verdict.forward_windows
        self._mail.enter(lambda edge: windows[edge.index])
        own = actions_for(self.plan, self.rank, opening.microbatches, verdict.warm_up, mode)
        mine = own if actions is None else actions.get(self.rank, ())
        self._session = Session(number, opening, (self.plan, self.rank), self._mail, mine)
        return self._session

    def _check_opening(self, microbatches: object) -> None:
        if self._session is not None and self._session.open:
            raise UsageError(
                f"rank {self.rank}: session {self._session.number} is still open; leave its "
                "with block before the next one"
            )
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

    def _verified(
        self, microbatches: int, actions: Mapping[int, Sequence[Action]] | None
    ) -> Verdict:
        if actions is not None:
            return require(verify(self.plan, microbatches, actions))
        if microbatches not in self._verdicts:
            self._verdicts[microbatches] = require(verify(self.plan, microbatches))
        return self._verdicts[microbatches]

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
        seconds = self.plan.limits.first_deadline_s if deadline_s is None else deadline_s
        return self._reducer.reduce(values, op, Deadline(seconds))

    @property
    def counters(self) -> Mapping[Link, LinkCounters]:
        """Totals of every link that begins or ends here, live."""
        return self._wiring.counters

    @property
    def transports(self) -> Mapping[Link, str]:
        """Name of the transport of every link that begins or ends here."""
        return {link: link.transport for link in self._wiring.links}

    def _observe(
        self, name: EventName, link: Link, key: Key, payload_bytes: int, seconds: float
    ) -> None:
        edge: Edge = self.plan.edges[key.edge]
        event = Event(
            name,
            link,
            edge.name,
            key.direction,
            key.microbatch,
            key.session,
            payload_bytes,
            seconds,
        )
        self._plugins.hooks.event(event)

    # -- for a process group of the caller's own

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
        number = len(self._drops)
        self._drops.append(drop)
        self._plane.on_failure(lambda _: drop())
        return self._rendezvous.pair_store(f"stage {self.stage.index}/{number}")

    def wait(self, future: Awaited, what: str, deadline_s: float | None = None) -> None:
        """Block until a future of the caller's own is done, or the pipeline has failed.

        Args:
            future: of torch or of the standard library; its result is not looked at.
            what: what is waited for, for the error.
            deadline_s: seconds to wait; None: the plan's ``limits.deadline_s``.

        Raises:
            DeadlineError: it was not done in time.
            StagelinkError: this handler failed or was closed.
        """
        seconds = self.plan.limits.deadline_s if deadline_s is None else deadline_s
        future.add_done_callback(lambda _: self._plane.changed())
        if not self._plane.wait(future.done, Deadline(seconds)):
            raise DeadlineError(f"rank {self.rank}: {what}: not done within {seconds:g} s")

    # -- the end

    def abort(self, error: BaseException) -> None:
        """Fail this rank and every other with the error's text; returns at once."""
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        failure = (
            error
            if isinstance(error, StagelinkError)
            else AbortedError(f"rank {self.rank} failed: {type(error).__name__}: {error}")
        )
        if failure is not error:
            failure.__cause__ = error
        self._plane.fail(failure)

    def close(self, timeout_s: float | None = None) -> None:
        """Let what was sent reach its peers, say goodbye, and give everything back.

        Always returns within about ``timeout_s``; the second call does nothing. Sends and receives
        that wait in other threads end with `ClosedError`.

        Args:
            timeout_s: seconds; None: the plan's ``limits.close_deadline_s``.

        Raises:
            DeadlineError: messages could not be delivered in time; everything was given back.
            PeerClosedError: messages could not be delivered, since their receivers had closed.
            StagelinkError: the handler had failed, and no call has said so yet.
        """
        if self._plane.forked or not self._plane.start_closing():
            return
        seconds = self.plan.limits.close_deadline_s if timeout_s is None else timeout_s
        lost = self._close(Deadline(seconds))
        self._plane.check_reported()
        if lost:
            text = ", ".join(f"{count} on {link}" for link, count in lost.items())
            if all(link.target in self._plane.gone for link in lost):
                raise PeerClosedError(f"rank {self.rank}: not delivered, the peer closed: {text}")
            raise DeadlineError(f"rank {self.rank}: not delivered within {seconds:g} s: {text}")

    def _close(self, deadline: Deadline) -> dict[Link, int]:
        self._plane.start_closing()
        for drop in self._drops:
            drop()
        self._mail.abandon()
        lost = self._drain(deadline)
        self._wiring.close(deadline)
        self._plane.close(deadline)
        for transport in self._transports.values():
            transport.close(deadline)
        self._watch.finish(min(1.0, deadline.remaining_s))
        self._rendezvous.leave()
        if self._hosts_store:
            self._rendezvous.wait_left(deadline)
        for link, counters in self._wiring.counters.items():
            self._plugins.hooks.link_closed(link, counters)
        return lost

    def _drain(self, deadline: Deadline) -> dict[Link, int]:
        try:
            return self._wiring.drain(deadline)
        except StagelinkError:  # it failed meanwhile, which `close` reports if nobody has
            return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif not self._plane.forked:
            self._fail(error)
            if self._plane.start_closing():
                self._close(Deadline(self.plan.limits.close_deadline_s))


def _pack_facts(plan: Plan) -> str:
    return b64encode(zlib.compress(json.dumps(plan.facts()).encode())).decode()


def _unpack_facts(packed: str) -> dict[str, str]:
    raw = zlib.decompressobj().decompress(b64decode(packed), _MAX_FACTS_BYTES)
    facts: dict[str, str] = json.loads(raw)
    return facts
