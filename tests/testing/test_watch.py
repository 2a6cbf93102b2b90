"""The watch tells what a transport does against the contract, in the contract's words."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from stagelink.deadline import Deadline
from stagelink.plugins.problems import transport_problems
from stagelink.testing.watch import Watch, watched
from stagelink.transport.contract import FINISHED, Link, Message, Pending, Ready, Receiver, Sender
from stagelink.transport.header import Header, MessageKind
from stagelink.transport.loopback import Loopback, LoopbackOptions
from stagelink.transport.payload import payload_problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from stagelink.transport.contract import Port

LINK = Link(0, 1, "x", "cpu")
PORT = cast("Port", SimpleNamespace(lane=SimpleNamespace(device=torch.device("cpu"))))
HEADER = Header(MessageKind.DATA, payload_bytes=4)
BYTES = torch.arange(4, dtype=torch.uint8)


class Late(Pending):
    def __init__(self, then: Callable[[], Any] = lambda: None) -> None:
        self.then = then

    def finish(self, deadline: Deadline) -> Any:
        return self.then()


class Ends(Sender):
    """A sender that does what it is told."""

    def __init__(self, begin: Callable[[Any], Any]) -> None:
        self.how = begin

    def begin(self, message: Message, announce: Any) -> Any:
        return self.how(announce)

    def abort(self, cause: BaseException) -> None:
        raise OSError("no")

    def close(self, deadline: Deadline) -> None:
        time.sleep(0.01)


class Takes(Receiver):
    """A receiver that does what it is told."""

    def __init__(self, begin: Callable[[Any], Any]) -> None:
        self.how = begin

    def begin(self, header: Header, note: bytes, fds: Any, accept: Any) -> Any:
        return self.how(accept)


def send(watch: Watch, begin: Callable[[Any], Any]) -> Any:
    class Given(Loopback):
        def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
            return Ends(begin)

    sender = watched(Given, watch)(LoopbackOptions()).open_sender(LINK, PORT, Deadline(1))
    pending = sender.begin(Message(HEADER, BYTES), lambda note=b"", fds=(): None)
    return pending and pending.finish(Deadline(1))


def receive(watch: Watch, begin: Callable[[Any], Any]) -> Any:
    class Given(Loopback):
        def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> Receiver:
            return Takes(begin)

    receiver = watched(Given, watch)(LoopbackOptions()).open_receiver(LINK, PORT, Deadline(1))
    return receiver.begin(HEADER, b"", (), BYTES.clone).finish(Deadline(1))


def announced(announce: Any, answer: Any, times: int = 1) -> Any:
    for _ in range(times):
        announce()
    return answer


def test_core_accepts_the_class() -> None:
    assert transport_problems(watched(Loopback, Watch())) == []


def test_nothing_is_said_of_what_is_right() -> None:
    watch = Watch()
    assert send(watch, lambda announce: announced(announce, FINISHED)) is None
    assert send(watch, Late) is None
    assert send(watch, lambda announce: None) is None
    assert receive(watch, lambda accept: Ready(BYTES)) is BYTES
    assert receive(watch, lambda accept: accept() is not None and Late()) is None
    watch.verify()


@pytest.mark.parametrize(
    ("begin", "problem"),
    [
        (lambda tell: announced(tell, FINISHED, 2), "announces a message twice"),
        (lambda tell: announced(tell, None), "returns None after it has announced"),
        (lambda tell: FINISHED, "has not announced its message when its begin returns FINISHED"),
        (lambda tell: Late(), "has not announced its message when its finish returns"),
        (lambda tell: announced(tell, "done"), "returns 'done', no Pending"),
        (lambda tell: announced(tell, Late(lambda: BYTES)), "a send's finish returns something"),
    ],
)
def test_a_sender(begin: Callable[[Any], Any], problem: str) -> None:
    watch = Watch()
    with pytest.raises(AssertionError, match=problem):
        send(watch, begin)
    with pytest.raises(AssertionError, match=f"against the contract: .*{problem}"):
        watch.verify()


@pytest.mark.parametrize(
    ("begin", "problem"),
    [
        (lambda accept: Late(), "gives None and has accepted no buffer"),
        (lambda accept: Ready(), "None and has accepted no buffer"),
        (lambda accept: Late(BYTES.int), "changes the dtype: it gives torch.int32, a f"),
        (lambda accept: Late(lambda: BYTES[:3]), "truncates: it gives 3 bytes, a flat uint8 tens"),
        (lambda accept: Late(lambda: BYTES.view(2, 2)), r"gives shape \(2, 2\), a flat uint8"),
        (lambda accept: Late(lambda: b"1234"), "gives bytes in place of a tensor"),
        (lambda accept: None, "returns None, no Pending"),
    ],
)
def test_a_receiver(begin: Callable[[Any], Any], problem: str) -> None:
    watch = Watch()
    with pytest.raises(AssertionError, match=problem):
        receive(watch, begin)
    assert len(watch.broken) == 1


def test_a_payload_on_another_device() -> None:
    problem = payload_problem(BYTES.to("meta"), 4, None)
    assert problem == "gives a tensor on 'meta', a flat uint8 tensor of 4 bytes on 'cpu' is due"


def test_an_abort_that_raises_and_a_close_that_takes_too_long() -> None:
    class Given(Loopback):
        def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
            return Ends(lambda announce: None)

    watch = Watch(patience_s=0.0)
    sender = watched(Given, watch)(LoopbackOptions()).open_sender(LINK, PORT, Deadline(1))
    sender.abort(OSError())
    sender.close(Deadline(0))
    text = "; ".join(watch.broken)
    assert "Sender.abort raised OSError: no" in text
    assert "Sender.close took 0.0 s, it had 0 s" in text
