"""What a transport does against its contract is an error that says which, on what link."""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest
import torch

import stagelink
from stagelink.control import failure
from stagelink.deadline import Deadline
from stagelink.transport.blocking import Finisher
from stagelink.transport.contract import Message, Receiver, Sender
from stagelink.transport.header import MAX_NOTE_BYTES
from stagelink.transport.loopback import Loopback
from tests.support.pipelines import LOOPBACK, document

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stagelink.transport.contract import Announce, Done, Link, Port
    from stagelink.transport.header import Header
    from tests.support.pipelines import Document, Ranks

    Begin = Callable[["OddSender", Message, Announce, Done], Any]


@pytest.fixture(autouse=True)
def _no_other_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody dies here, so it need not be waited for."""
    monkeypatch.setattr(failure, "_EXPLAIN_S", 0.01)


class Odd(Loopback):
    """Loopback, but for what a test says of its ends."""

    name: ClassVar[str] = "odd"
    begin: ClassVar[Begin | None] = None
    give: ClassVar[Callable[[torch.Tensor], object] | None] = None
    at_note: ClassVar[Callable[[], None] | None] = None

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
        return OddSender(super().open_sender(link, port, deadline), port, type(self))

    def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> Receiver:
        return OddReceiver(super().open_receiver(link, port, deadline), type(self))


class OddSender(Sender):
    def __init__(self, inner: Sender, port: Port, odd: type[Odd]) -> None:
        self.inner = inner
        self.port = port
        self.odd = odd
        self.asked = 0

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        if self.odd.begin is None:
            return self.inner.begin(message, announce, done)
        return cast("bool", self.odd.begin(self, message, announce, done))

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        self.inner.on_note(note, fds)


class OddReceiver(Receiver):
    def __init__(self, inner: Receiver, odd: type[Odd]) -> None:
        self.inner = inner
        self.odd = odd

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        given = done if self.odd.give is None else cast("Done", Given(done, self.odd.give))
        self.inner.begin(header, note, fds, accept, given)

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        if self.odd.at_note is not None:
            self.odd.at_note()


class Given:
    def __init__(self, done: Done, give: Callable[[torch.Tensor], object]) -> None:
        self.done = done
        self.give = give

    def __call__(self, payload: torch.Tensor) -> None:
        self.done(cast("torch.Tensor | None", self.give(payload)))


def _odd(**what: Any) -> type[Odd]:
    return type("Odd", (Odd,), {key: staticmethod(value) for key, value in what.items()})


def _plan(**more: Any) -> Document:
    plan = document(LOOPBACK, **more)
    plan["links"] = [{"transport": "odd"}]
    return plan


def _send_one(comm: stagelink.Handler) -> None:
    with comm.evaluate(1) as session:
        if comm.rank == 0:
            session.send("h", torch.ones(3), 0, copy=False)
        else:
            got = session.recv("h", 0)
            assert got is not None
            assert got.tolist() == [1, 1, 1]
        comm.reduce([0.0])


# -- begin ----------------------------------------------------------------------------------------


def _twice(sender: OddSender, message: Message, announce: Announce, done: Done) -> bool:
    begun = sender.inner.begin(message, announce, done)
    if begun:
        announce()
    return begun


def _done_twice(sender: OddSender, message: Message, announce: Announce, done: Done) -> bool:
    begun = sender.inner.begin(message, announce, done)
    if begun:
        done()
    return begun


def _never(sender: OddSender, message: Message, announce: Announce, done: Done) -> bool:
    done()
    return True


def _never_to_the_end(sender: OddSender, message: Message, announce: Announce, done: Done) -> bool:
    sender.port.call(done)
    return True


def _false_behind_it(sender: OddSender, message: Message, announce: Announce, done: Done) -> bool:
    sender.inner.begin(message, announce, lambda: None)  # type: ignore[arg-type]
    return False


def _false_and_done(sender: OddSender, message: Message, announce: Announce, done: Done) -> bool:
    done()
    return False


def _something(sender: OddSender, message: Message, announce: Announce, done: Done) -> object:
    return sender.inner.begin(message, announce, done) and "something"


def _raises(sender: OddSender, message: Message, announce: Announce, done: Done) -> bool:
    raise LookupError("nowhere to put it")


def _long_note(sender: OddSender, message: Message, announce: Announce, done: Done) -> bool:
    announce(bytes(MAX_NOTE_BYTES + 1))
    return True


def _long_note_by_the_port(
    sender: OddSender, message: Message, announce: Announce, done: Done
) -> bool:
    sender.port.note(bytes(MAX_NOTE_BYTES + 1))
    return True


def _text(sender: OddSender, message: Message, announce: Announce, done: Done) -> bool:
    announce(cast("bytes", "a text"))
    return True


def _closed_descriptor(
    sender: OddSender, message: Message, announce: Announce, done: Done
) -> bool:
    announce(b"", (1_000_000,))
    return True


def _room_for_ever(sender: OddSender, message: Message, announce: Announce, done: Done) -> bool:
    sender.port.room()
    return False


def _waits(sender: OddSender, message: Message, announce: Announce, done: Done) -> bool:
    sender.port.wait(lambda: False, Deadline(60))
    return True


def _waits_in_an_action(
    sender: OddSender, message: Message, announce: Announce, done: Done
) -> bool:
    descriptor = os.eventfd(1)

    def act() -> bool:
        try:
            return sender.port.wait(lambda: False, Deadline(60))
        finally:
            sender.port.unwatch(descriptor)
            os.close(descriptor)

    sender.port.watch(descriptor, act)
    return True


def _leaves(sender: OddSender, message: Message, announce: Announce, done: Done) -> bool:
    def leave() -> None:
        raise SystemExit(0)

    if not sender.inner.begin(message, announce, lambda: None):  # type: ignore[arg-type]
        return False
    Finisher(sender.port).submit(leave, done)
    return True


SENDING: dict[Begin, str] = {
    _twice: "sending on 0→1 by odd: a message is announced twice",
    _done_twice: "sending on 0→1 by odd: a message is done twice",
    _never: "sending on 0→1 by odd: a message is done and was not announced",
    _never_to_the_end: "sending on 0→1 by odd: a message is done and was not announced",
    _false_behind_it: "0→1 by odd: its begin returns False, as if there were no room, after it "
    "has announced",
    _false_and_done: "0→1 by odd: its begin returns False, as if there were no room, after it "
    "has said that the message is done",
    _something: "sending on 0→1 by odd: its begin returns 'something', where True or False is due",
    _raises: "sending on 0→1 by odd: LookupError: nowhere to put it",
    _long_note: "0→1 by odd: a note of 16777217 bytes to rank 1; it takes 16777216",
    _long_note_by_the_port: "0→1 by odd: a note of 16777217 bytes to rank 1; it takes 16777216",
    _text: "0→1 by odd: a note is bytes, not str",
    _closed_descriptor: "0→1 by odd: descriptors (1000000,) to rank 1: OSError: [Errno 9]",
    _room_for_ever: "0→1 by odd: its begin finds no room, and says by port.room() that there is",
    _waits: "0→1 by odd: port.wait in a begin, which must not wait",
    _waits_in_an_action: "0→1 by odd: port.wait on the thread that reads, which must not wait",
    _leaves: "0→1 by odd: SystemExit: 0",
}


@pytest.mark.parametrize("begin", SENDING, ids=lambda begin: begin.__name__.strip("_"))
def test_a_sender_against_its_contract(ranks: Ranks, begin: Begin) -> None:
    ends = ranks.run_to_ends(_plan(), _send_one, transports=[_odd(begin=begin)])
    for end in ends:
        assert SENDING[begin] in end.text, ends
        assert end.seconds < 10
    assert [end.kind for end in ends] == ["TransportError", "AbortedError"]


def _room_when_asked_again(
    sender: OddSender, message: Message, announce: Announce, done: Done
) -> bool:
    sender.asked += 1
    if sender.asked % 3:
        sender.port.room()
        return False
    return sender.inner.begin(message, announce, done)


class Telling(Odd):
    """Its sender says out of its begin that the message before it is done."""

    capabilities = replace(Loopback.capabilities, copies_on_begin=False, in_flight=2)

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
        return TellingSender(super().open_sender(link, port, deadline))


class TellingSender(Sender):
    def __init__(self, inner: Sender) -> None:
        self.inner = inner
        self.before: Done | None = None

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        if not self.inner.begin(message, announce, lambda: None):  # type: ignore[arg-type]
            return False
        if self.before is not None:
            self.before()
        self.before = done
        if message.header.microbatch == 2:
            done()
        return True

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        self.inner.on_note(note, fds)


def _send_three(comm: stagelink.Handler) -> None:
    with comm.evaluate(3) as session:
        handles = []
        for mb in range(3):
            if comm.rank == 0:
                handles.append(session.isend("h", torch.ones(3), mb))
            else:
                session.recv("h", mb)
        comm.reduce([0.0])
        for handle in handles[:1]:
            handle.wait()


@pytest.mark.parametrize("odd", [_odd(begin=_room_when_asked_again), Telling])
def test_what_a_begin_says_of_its_own_link_is_heard_behind_it(
    ranks: Ranks, odd: type[Odd]
) -> None:
    for end in ranks.run_to_ends(_plan(), _send_three, transports=[odd]):
        assert end.text == ""
        assert end.seconds < 10


# -- done -----------------------------------------------------------------------------------------

GIVEN: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "too small": (lambda it: it[:5], "truncates: it gives 5 bytes, a flat uint8 tensor of 12"),
    "too large": (lambda it: torch.cat([it, it]), "gives shape (24,), a flat uint8 tensor of 12"),
    "of floats": (lambda it: it.view(torch.float32), "changes the dtype: it gives torch.float32"),
    "two-dimensional": (lambda it: it.view(3, 4), "gives shape (3, 4), a flat uint8 tensor"),
    "with gaps": (lambda it: torch.cat([it, it])[::2], "gives strides (2,)"),
    "sparse": (lambda it: it.to_sparse(), "gives a tensor of layout torch.sparse_coo"),
    "elsewhere": (lambda it: it.to("meta"), "gives a tensor on 'meta'"),
    "bytes": (lambda it: it.numpy().tobytes(), "gives bytes in place of a tensor"),
    "nothing": (lambda it: None, "gives None and has accepted no buffer"),
}


@pytest.mark.parametrize("what", GIVEN)
def test_a_receiver_that_gives_something_else(ranks: Ranks, what: str) -> None:
    give, text = GIVEN[what]
    told, end = ranks.run_to_ends(_plan(), _send_one, transports=[_odd(give=give)])
    wanted = f"receiving on 0→1 by odd, microbatch 0: the transport {text}"
    assert (end.kind, told.kind) == ("TransportError", "AbortedError")
    assert wanted in end.text
    assert wanted in told.text


# -- notes, opening, abort, close -----------------------------------------------------------------


def _raise() -> None:
    raise KeyError("what is that")


def _announced_with_a_note(
    sender: OddSender, message: Message, announce: Announce, done: Done
) -> bool:
    begun = sender.inner.begin(message, announce, done)
    if begun:
        sender.port.note(b"what nobody understands")
    return begun


def _send_and_wait(comm: stagelink.Handler) -> None:
    _send_one(comm)
    comm.wait(Future(), "what never happens")


def test_a_note_that_is_not_understood(ranks: Ranks) -> None:
    odd = _odd(begin=_announced_with_a_note, at_note=_raise)
    for end in ranks.run_to_ends(_plan(), _send_and_wait, transports=[odd]):
        assert "0→1 by odd: a note: KeyError: 'what is that'" in end.text


class Unopened(Odd):
    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
        return cast("Sender", "an end")


def test_an_end_that_is_none(ranks: Ranks) -> None:
    with pytest.raises(Exception, match=r"by odd: open_sender gives 'an end', no Sender"):
        ranks.run(_plan(), _send_one, transports=[Unopened])


class Stubborn(Odd):
    """Cannot be aborted, and never returns from its close before it is let."""

    def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> Receiver:
        receiver: Any = super().open_receiver(link, port, deadline)
        receiver.abort = lambda cause: _raise()
        return cast("Receiver", receiver)


def _fails(comm: stagelink.Handler) -> None:
    _send_one(comm)
    if comm.rank == 0:
        raise ZeroDivisionError("of the user")
    comm.reduce([0.0])


def test_an_abort_that_raises_hides_no_failure(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "stagelink"):
        ends = ranks.run_to_ends(_plan(), _fails, transports=[Stubborn])
    assert [end.kind for end in ends] == ["ZeroDivisionError", "AbortedError"]
    assert "ZeroDivisionError: of the user" in ends[1].text
    assert "0→1 by odd: aborting it: KeyError: 'what is that'" in caplog.text


def test_a_close_that_does_not_return_is_left_behind(ranks: Ranks) -> None:
    held = threading.Event()

    class Staying(Odd):
        def close(self, deadline: Deadline) -> None:
            held.wait()

    def close(comm: stagelink.Handler) -> float:
        _send_one(comm)
        began = time.monotonic()
        with pytest.raises(
            stagelink.TransportError, match="closing transport 'odd': it has not returned"
        ):
            comm.close(0.5)
        return time.monotonic() - began

    try:
        assert max(ranks.run(_plan(), close, transports=[Staying])) < 5
    finally:
        held.set()
