"""What a transport does when its peer falls silent, breaks off, or its own side gives up.

A scene lets a small message through and a large one begin, and then the ranks play their parts in
its two ``finish`` calls by turns, which they take in the store: no part depends on who is faster.
A transport whose message is through before has nothing to wait for, which is told as that.
"""

from __future__ import annotations

import enum
import os
import signal
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
from torch.distributed import PrefixStore

from stagelink.deadline import Deadline
from stagelink.errors import StagelinkError
from stagelink.testing.ports import MutedPort
from stagelink.testing.samples import difference, tensors_of_sizes
from stagelink.transport.contract import Pending, Ready, Receiver, Sender
from stagelink.transport.payload import payload_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import Store

    from stagelink.testing.subject import Subject
    from stagelink.transport.contract import Announce, Link, Message, Port, Transport
    from stagelink.transport.header import Header

__all__ = ["NOTHING_TO_WAIT_FOR", "Scene", "plays_scene"]

NOTHING_TO_WAIT_FOR = "the whole message is through before anybody waits for it"

_SIZE_BYTES = 32 * 1024 * 1024
"""More than any socket's buffers hold."""

_TURN_S = 20.0
_DEADLINE_S = 0.2


class Scene(enum.Enum):
    """What happens to the message."""

    SILENT_SENDER = "the sender goes no further; the receiver's finish has a deadline"
    SILENT_RECEIVER = "the receiver goes no further; the sender's finish has a deadline"
    BROKEN_OFF = "the sender's end is aborted; the receiver's finish must not take that for an end"
    DIED = (
        "the sender's process dies half way; the receiver's finish must not take that for an end"
    )
    RECEIVER_ABORTS = "the receiver's end is aborted while it waits"
    SENDER_ABORTS = "the sender's end is aborted while it waits"
    CLOSED = "an end is closed, with a deadline"

    @property
    def at_sender(self) -> bool:
        """Whether it is the sender's finish that is looked at."""
        return self in {Scene.SILENT_RECEIVER, Scene.SENDER_ABORTS}


_GONE = {Scene.BROKEN_OFF: "has broken off", Scene.DIED: "has died"}


class _OverError(Exception):
    """The scene is over; it ends the pipeline."""


def plays_scene(rank: int, world_size: int, store: Store, subject: Subject, name: str) -> str:
    """Play one `Scene`, by its name.

    Returns:
        What the transport did wrong, `NOTHING_TO_WAIT_FOR`, or nothing.
    """
    scene = Scene[name]
    stage = _Stage(scene, PrefixStore("scene", store), subject)
    playing = subject.wrapped(lambda transport: _staged(transport, stage))
    sent = subject.on_device(_expected())
    try:
        with (
            playing.connect(playing.plan(), rank, world_size, store) as comm,
            comm.evaluate(2) as session,
        ):
            for microbatch, tensor in enumerate((sent[:1000], sent)):
                if rank == 0:
                    session.send("e0", tensor, microbatch)
                else:
                    session.recv("e0", microbatch)
            comm.reduce([0.0])  # nobody leaves before it is through
    except StagelinkError:
        if not stage.played:  # else it is how the scene ends
            raise
    return stage.verdict


def _expected() -> torch.Tensor:
    return next(tensors_of_sizes((_SIZE_BYTES,)))


class _Stage:
    """The scene on one rank."""

    def __init__(self, scene: Scene, store: Store, subject: Subject) -> None:
        self.scene = scene
        self.verdict = ""
        self.played = False
        self.looked = False
        self._over = False
        self._store = store
        self._device = subject.device
        self._patience_s = subject.patience_s

    def tell(self, turn: str) -> None:
        self._store.set(turn, "1")

    def wait(self, turn: str) -> None:
        self._store.wait([turn], timedelta(seconds=_TURN_S))

    def is_for(self, header: Header) -> bool:
        """Whether this is the message that the scene is about; then it has begun."""
        self.played = self.scene is not Scene.CLOSED and header.payload_bytes == _SIZE_BYTES
        return self.played

    # -- the two parts: each ends the scene, whatever it sees

    def send(self, end: Sender, port: _StagePort, pending: Pending) -> None:
        """The sender's part, in place of its pending's ``finish``."""
        if self.scene.at_sender:
            self._look(pending.finish, end, port)
        elif self.scene is Scene.BROKEN_OFF:
            self.wait("receiver is there")
            self.break_off(end)
            self.wait("seen")
        elif self.scene is Scene.DIED:
            # As much of it leaves as is taken by nobody.
            _Call(lambda: pending.finish(Deadline(float("inf"))), port).join(_DEADLINE_S)
            self.die()
        else:
            self.wait("seen")
        raise _OverError

    def die(self) -> None:
        self.wait("receiver is there")
        self.tell("dying")
        os.kill(os.getpid(), signal.SIGKILL)

    def break_off(self, end: Sender) -> None:
        end.abort(ConnectionAbortedError("the other end has gone"))
        self.tell("broken off")

    def receive(
        self, end: Receiver, port: _StagePort, pending: Pending, lent: torch.Tensor | None
    ) -> None:
        """The receiver's part, in place of its pending's ``finish``."""
        if self._over:  # core may ask once more, when it gives everything up
            raise _OverError
        self._over = True
        self.tell("receiver is there")
        if self.scene.at_sender:
            self.wait("seen")
            raise _OverError
        if self.scene is Scene.BROKEN_OFF:
            self.wait("broken off")
        elif self.scene is Scene.DIED:
            self.wait("dying")
        payload = self._look(pending.finish, end, port)
        if payload is not _NOTHING and self.scene is not Scene.RECEIVER_ABORTS:
            self.arrived(payload, lent)
        raise _OverError

    def arrived(self, payload: object, lent: torch.Tensor | None) -> None:
        """The receiver has got something: it must be the message."""
        problem = payload_problem(payload, _SIZE_BYTES, lent, self._device)
        whole = lent if payload is None else payload
        if problem is None and isinstance(whole, torch.Tensor):
            problem = difference(whole.cpu(), _expected())
        if problem:
            gone = _GONE.get(self.scene, "sends no more")
            self.verdict = (
                "a receive returns as if the message had arrived, although the other end "
                f"{gone}: {problem}"
            )
        else:
            self.verdict = NOTHING_TO_WAIT_FOR
        self.tell("seen")

    def at_once(self) -> None:
        """The sender has nothing left to finish."""
        if self.scene.at_sender:
            self.verdict = NOTHING_TO_WAIT_FOR
            self.tell("seen")

    def _look(
        self,
        finish: Callable[[Deadline], torch.Tensor | None],
        end: Sender | Receiver,
        port: _StagePort,
    ) -> object:
        """Call a finish as the scene has it; `_NOTHING` unless it returned."""
        aborts = self.scene in {Scene.RECEIVER_ABORTS, Scene.SENDER_ABORTS}
        deadline_s = float("inf") if aborts else _DEADLINE_S
        if self.scene in _GONE:
            deadline_s = 1.0
        call = _Call(lambda: finish(Deadline(deadline_s)), port)
        by_itself = True
        if aborts:
            call.join(_DEADLINE_S)
            by_itself = not call.is_alive()
            self._abort(end, port)
            call.join(self._patience_s)
        else:
            call.join(deadline_s + self._patience_s)
        self._judge(call, deadline_s, by_itself=by_itself)
        self.looked = True
        if call.is_alive():
            self._abort(end, port)
            call.join(self._patience_s)
        self.tell("seen")
        return call.value

    @staticmethod
    def _abort(end: Sender | Receiver, port: _StagePort) -> None:
        port.fail_waits()
        end.abort(ConnectionAbortedError("this end has given up"))

    def _judge(self, call: _Call, deadline_s: float, *, by_itself: bool) -> None:
        which = "send" if self.scene.at_sender else "receive"
        if call.is_alive():
            late = (
                f"still blocks {self._patience_s:g} s after its abort"
                if deadline_s == float("inf")
                else f"ignores its deadline: it still blocks {self._patience_s:g} s after"
            )
            self.verdict = f"the finish of a {which} {late}"
        elif call.error is None:
            self.verdict = NOTHING_TO_WAIT_FOR if by_itself else ""
        elif self.scene.name.startswith("SILENT") and not isinstance(call.error, TimeoutError):
            self.verdict = (
                f"the finish of a {which} raises {call.error!r} at its deadline, where the "
                "contract has TimeoutError"
            )

    def close(self, what: str, close: Callable[[Deadline], None], port: _StagePort | None) -> None:
        """Close an end, and look how long it takes."""
        if self.scene is not Scene.CLOSED:
            close(Deadline(self._patience_s))
            return
        call = _Call(lambda: close(Deadline(_DEADLINE_S)), port)
        call.join(_DEADLINE_S + self._patience_s)
        if call.is_alive():
            self.verdict = f"{what} still blocks {self._patience_s:g} s after its deadline"
        elif call.error is not None:
            self.verdict = f"{what} raises {call.error!r}"


_NOTHING = object()


class _Call(threading.Thread):
    """A call that may never return, on a thread that nobody need wait for."""

    def __init__(self, call: Callable[[], object], port: _StagePort | None) -> None:
        super().__init__(name="stagelink-scene", daemon=True)
        self._call = call
        self._port = port
        self.value: object = _NOTHING
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            if self._port is None:
                self.value = self._call()
            else:
                with self._port.lane.entered():
                    self.value = self._call()
        except BaseException as error:  # for whoever looks at it
            self.error = error


class _StagePort(MutedPort):
    """A port that can fail the link's waits, as core's do when the handler has failed."""

    failed = False

    def fail_waits(self) -> None:
        self.failed = True
        self._port.wake()

    def wait(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        done = self._port.wait(lambda: self.failed or ready(), deadline)
        self._check()
        return done

    def pause(self, seconds: float) -> None:
        self._port.pause(seconds)
        self._check()

    def _check(self) -> None:
        if self.failed:
            raise StagelinkError("this end has given up")


def _staged(transport: type[Transport], stage: _Stage) -> type[Transport]:
    def open_sender(self: Transport, link: Link, port: Port, deadline: Deadline) -> Sender:
        staged = _StagePort(port)
        inner = transport.open_sender(self, link, cast("Port", staged), deadline)
        return _Sender(inner, staged, stage)

    def open_receiver(self: Transport, link: Link, port: Port, deadline: Deadline) -> Receiver:
        staged = _StagePort(port)
        inner = transport.open_receiver(self, link, cast("Port", staged), deadline)
        return _Receiver(inner, staged, stage)

    def close(self: Transport, deadline: Deadline) -> None:
        stage.close("Transport.close", lambda limit: transport.close(self, limit), None)

    attributes = {
        "__doc__": f"{transport.__name__} on a stage.",
        "__module__": __name__,
        "name": f"staged-{transport.name}",
        "open_sender": open_sender,
        "open_receiver": open_receiver,
        "close": close,
    }
    return type(f"Staged{transport.__name__}", (transport,), attributes)


class _Sender(Sender):
    def __init__(self, inner: Sender, port: _StagePort, stage: _Stage) -> None:
        self._inner = inner
        self._port = port
        self._stage = stage

    def begin(self, message: Message, announce: Announce) -> Pending | None:
        pending = self._inner.begin(message, announce)
        if pending is None or not self._stage.is_for(message.header):
            return pending
        if isinstance(pending, Ready):
            self._stage.at_once()
            if self._stage.scene is Scene.BROKEN_OFF:
                self._stage.break_off(self._inner)
            elif self._stage.scene is Scene.DIED:
                self._stage.die()
            return pending
        return _Sending(self._stage, self._inner, self._port, pending, message)

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        self._inner.on_note(note, fds)

    def abort(self, cause: BaseException) -> None:
        self._inner.abort(cause)

    def close(self, deadline: Deadline) -> None:
        del deadline
        self._stage.close("Sender.close", self._inner.close, self._port)


@dataclass
class _Sending(Pending):
    stage: _Stage
    end: Sender
    port: _StagePort
    inner: Pending
    message: Message  # kept alive

    def finish(self, deadline: Deadline) -> None:
        del deadline
        self.stage.send(self.end, self.port, self.inner)


class _Receiver(Receiver):
    def __init__(self, inner: Receiver, port: _StagePort, stage: _Stage) -> None:
        self._inner = inner
        self._port = port
        self._stage = stage

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
    ) -> Pending:
        lent: list[torch.Tensor] = []

        def lend() -> torch.Tensor:
            lent.append(accept().zero_())
            return lent[-1]

        pending = self._inner.begin(header, note, fds, lend)
        buffer = lent[-1] if lent else None
        if not self._stage.is_for(header):
            return pending
        if isinstance(pending, Ready):
            self._stage.tell("receiver is there")
            self._stage.arrived(pending.payload, buffer)
            return pending
        return _Receiving(self._stage, self._inner, self._port, pending, buffer)

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        self._inner.on_note(note, fds)

    def abort(self, cause: BaseException) -> None:
        # Core's, since the sender has died: what the transport makes of that alone is looked at.
        if self._stage.scene is not Scene.DIED or self._stage.looked:
            self._inner.abort(cause)

    def close(self, deadline: Deadline) -> None:
        del deadline
        self._stage.close("Receiver.close", self._inner.close, self._port)


@dataclass
class _Receiving(Pending):
    stage: _Stage
    end: Receiver
    port: _StagePort
    inner: Pending
    lent: torch.Tensor | None

    def finish(self, deadline: Deadline) -> None:
        del deadline
        self.stage.receive(self.end, self.port, self.inner, self.lent)
