"""The check tells what a transport does against the contract, in the contract's words."""

from __future__ import annotations

import re
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from stagelink.deadline import Deadline
from stagelink.plugins.problems import transport_problems
from stagelink.testing.contract_check import ContractCheck, UnfinishedError, checked
from stagelink.transport.contract import Link, Message, NoOptions, Receiver, Sender
from stagelink.transport.header import Header, MessageKind
from stagelink.transport.loopback import Loopback
from stagelink.transport.payload import payload_problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from stagelink.transport.contract import Port

LINK = Link(0, 1, "x", "cpu")
LANE = SimpleNamespace(device=torch.device("cpu"))
HEADER = Header(MessageKind.DATA, payload_bytes=4)
BYTES = torch.arange(4, dtype=torch.uint8)


class FakePort:
    """A port that keeps what is watched."""

    link = LINK
    stream = LANE

    def __init__(self) -> None:
        self.actions: list[Callable[[], bool]] = []

    def watch(self, fd: int, action: Callable[[], bool], *, writable: bool = False) -> None:
        self.actions.append(action)

    def room(self) -> None:
        pass


class Told:
    """Core's `Done`; keeps what it is told."""

    def __init__(self) -> None:
        self.payloads: list[Any] = []
        self.errors: list[BaseException] = []

    def __call__(self, payload: Any = None) -> None:
        self.payloads.append(payload)

    def failed(self, error: BaseException) -> None:
        self.errors.append(error)


class Ends(Sender):
    """A sender that does what it is told."""

    def __init__(self, begin: Callable[[Any, Any], Any]) -> None:
        self.how = begin

    def begin(self, message: Message, announce: Any, done: Any) -> Any:
        return self.how(announce, done)

    def abort(self, cause: BaseException) -> None:
        raise OSError("no")

    def close(self, deadline: Deadline) -> None:
        time.sleep(0.01)


class Takes(Receiver):
    """A receiver that does what it is told."""

    def __init__(self, begin: Callable[[Any, Any], Any]) -> None:
        self.how = begin

    def begin(self, header: Header, note: bytes, fds: Any, accept: Any, done: Any) -> Any:
        return self.how(accept, done)


def sender(check: ContractCheck, begin: Callable[[Any, Any], Any]) -> Sender:
    class Given(Loopback):
        def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
            return Ends(begin)

    port = cast("Port", FakePort())
    return checked(Given, check)(NoOptions()).open_sender(LINK, port, Deadline(1))


def send(check: ContractCheck, begin: Callable[[Any, Any], Any]) -> Told:
    told = Told()
    sender(check, begin).begin(Message(HEADER, BYTES), lambda note=b"", fds=(): None, told)
    return told


def receive(check: ContractCheck, begin: Callable[[Any, Any], Any]) -> Told:
    class Given(Loopback):
        def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> Receiver:
            return Takes(begin)

    told, port = Told(), cast("Port", FakePort())
    receiver = checked(Given, check)(NoOptions()).open_receiver(LINK, port, Deadline(1))
    receiver.begin(HEADER, b"", (), BYTES.clone, told)
    return told


def does(*calls: Callable[[], object], returns: Any = None) -> Any:
    for call in calls:
        call()
    return returns


def test_core_accepts_the_class() -> None:
    assert transport_problems(checked(Loopback, ContractCheck())) == []


def test_nothing_is_said_of_what_is_right() -> None:
    check = ContractCheck()
    assert send(check, lambda announce, done: does(announce, done, returns=True)).payloads
    assert not send(check, lambda announce, done: does(announce, returns=True)).payloads
    assert not send(check, lambda announce, done: False).payloads
    assert receive(check, lambda accept, done: done(BYTES)).payloads == [BYTES]
    assert receive(check, does).payloads == [None]
    assert not receive(check, lambda accept, done: None).payloads
    check.verify()


@pytest.mark.parametrize(
    ("begin", "problem"),
    [
        (lambda tell, done: does(tell, tell, returns=True), "a send is announced twice"),
        (lambda tell, done: does(tell, returns=False), "returns False after it has announced"),
        (
            lambda tell, done: does(tell, done, returns="done"),
            "Sender.begin returns 'done', no bool",
        ),
        (does, "Sender.begin returns None, no bool"),
    ],
)
def test_a_senders_begin(begin: Callable[[Any, Any], Any], problem: str) -> None:
    check = ContractCheck()
    with pytest.raises(AssertionError, match=problem):
        send(check, begin)
    with pytest.raises(AssertionError, match=f"against the contract: .*{problem}"):
        check.verify()


@pytest.mark.parametrize(
    ("begin", "problem"),
    [
        (lambda tell, done: does(done, returns=True), "a send is done and was not announced"),
        (lambda tell, done: does(tell, done, done, returns=True), "a send is done twice"),
        (
            lambda tell, done: does(tell, lambda: done(BYTES), returns=True),
            "a send is done with a payload",
        ),
    ],
)
def test_a_sends_completion(begin: Callable[[Any, Any], Any], problem: str) -> None:
    check = ContractCheck()
    (error,) = send(check, begin).errors
    assert problem in str(error)
    with pytest.raises(AssertionError, match=f"against the contract: .*{problem}"):
        check.verify()


@pytest.mark.parametrize(
    ("begin", "problem"),
    [
        (lambda accept, done: done(), "gives None and has accepted no buffer"),
        (lambda accept, done: done(BYTES.int()), "changes the dtype: it gives torch.int32, a f"),
        (lambda accept, done: done(BYTES[:3]), "truncates: it gives 3 bytes, a flat uint8 tens"),
        (lambda accept, done: done(BYTES.view(2, 2)), "gives shape (2, 2), a flat uint8"),
        (lambda accept, done: done(b"1234"), "gives bytes in place of a tensor"),
        (lambda accept, done: does(accept, done, done), "a receive is done twice"),
    ],
)
def test_a_receives_completion(begin: Callable[[Any, Any], Any], problem: str) -> None:
    check = ContractCheck()
    (error,) = receive(check, begin).errors
    assert problem in str(error)
    assert len(check.broken) == 1


@pytest.mark.parametrize(
    ("begin", "problem"),
    [
        (lambda accept, done: True, "Receiver.begin returns True, where None is due"),
        (lambda accept, done: does(accept, accept), "a receive asks for a buffer twice"),
        (
            lambda accept, done: does(accept, done, accept),
            "a receive asks for a buffer when it is done",
        ),
    ],
)
def test_a_receivers_begin(begin: Callable[[Any, Any], Any], problem: str) -> None:
    check = ContractCheck()
    with pytest.raises(AssertionError, match=problem):
        receive(check, begin)
    assert len(check.broken) == 1


def begun(check: ContractCheck) -> tuple[Sender, list[Any], Told]:
    """Two messages that have begun."""
    dones: list[Any] = []

    def begin(announce: Any, done: Any) -> bool:
        announce()
        dones.append(done)
        return True

    end, told = sender(check, begin), Told()
    for _ in range(2):
        end.begin(Message(HEADER, BYTES), lambda note=b"", fds=(): None, told)
    return end, dones, told


def test_messages_are_done_in_order_on_any_thread() -> None:
    check = ContractCheck()
    _, dones, told = begun(check)
    for done in dones:
        thread = threading.Thread(target=done)
        thread.start()
        thread.join()
    check.verify()
    assert len(told.payloads) == 2


def test_a_message_that_overtakes_another() -> None:
    check = ContractCheck()
    _, dones, told = begun(check)
    dones[1]()
    assert "a send is done before the one that began before it" in str(told.errors[0])


def test_what_is_done_within_its_begin_may_overtake() -> None:
    check = ContractCheck()
    end, _, told = begun(check)
    assert isinstance(end, Sender)
    cast("Any", end).inner.how = lambda announce, done: does(announce, done, returns=True)
    end.begin(Message(HEADER, BYTES), lambda note=b"", fds=(): None, told)
    check.verify()


def test_nothing_is_said_of_what_is_done_after_an_abort() -> None:
    check = ContractCheck()
    end, dones, _ = begun(check)
    cast("Any", end).inner.abort = lambda cause: None
    end.abort(OSError())
    dones[1]()
    dones[1].failed(OSError())
    check.verify()


def test_an_action_that_blocks_or_says_nothing() -> None:
    check = ContractCheck(patience_s=0.0)
    fake = FakePort()

    class Given(Loopback):
        def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
            port.watch(0, lambda: does(lambda: time.sleep(0.01), returns=True))
            port.watch(0, does)
            return Ends(lambda announce, done: False)

    checked(Given, check)(NoOptions()).open_sender(LINK, cast("Port", fake), Deadline(1))
    assert fake.actions[0]() is True
    assert "an action of Port.watch took 0.0 s, it had 0 s" in check.broken
    with pytest.raises(AssertionError, match=r"an action of Port\.watch returns None, no bool"):
        fake.actions[1]()


def test_equal_actions_stay_equal() -> None:
    check, fake = ContractCheck(), FakePort()

    def action() -> bool:
        return False

    class Given(Loopback):
        def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
            port.watch(0, action)
            return Ends(lambda announce, done: False)

    for _ in range(2):
        checked(Given, check)(NoOptions()).open_sender(LINK, cast("Port", fake), Deadline(1))
    assert fake.actions[0] == fake.actions[1]


def test_a_payload_on_another_device() -> None:
    problem = payload_problem(BYTES.to("meta"), 4, None)
    assert problem == "gives a tensor on 'meta', a flat uint8 tensor of 4 bytes on 'cpu' is due"


def test_an_abort_that_raises_and_a_close_that_takes_too_long() -> None:
    class Given(Loopback):
        def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
            return Ends(lambda announce, done: False)

    check = ContractCheck(patience_s=0.0)
    port = cast("Port", FakePort())
    end = checked(Given, check)(NoOptions()).open_sender(LINK, port, Deadline(1))
    end.abort(OSError())
    end.close(Deadline(0))
    text = "; ".join(check.broken)
    assert "Sender.abort raised OSError: no" in text
    assert "Sender.close took 0.0 s, it had 0 s" in text


class Freeing(FakePort):
    """A port by whose failure those who wait go on."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = threading.Event()

    def fail(self, error: BaseException) -> None:
        self.failed.set()


@pytest.mark.parametrize("within", [None, "done"])
def test_a_call_that_blocks_is_told_while_it_does(
    capsys: pytest.CaptureFixture[str], within: str | None
) -> None:
    check, port = ContractCheck(patience_s=0.02), Freeing()
    begun: list[Any] = []

    def begin(announce: Any, done: Any) -> bool:
        announce()
        begun.append(done)
        if len(begun) == (1 if within is None else 2):
            port.failed.wait()
        return True

    class Given(Loopback):
        def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
            return Ends(begin)

    end = checked(Given, check)(NoOptions()).open_sender(LINK, cast("Port", port), Deadline(1))

    def send(payload: Any = None) -> None:
        end.begin(Message(HEADER, BYTES), lambda note=b"", fds=(): None, cast("Any", send))

    check.start()
    try:
        send()
        if within:
            begun[0]()
    finally:
        with pytest.raises(AssertionError) as caught:
            check.verify()
    assert re.search(
        r"against the contract: Sender\.begin has blocked for 0\.\d s on thread 'MainThread' in .*"
        r"begin \(.*test_contract_check\.py:\d+\) → Event\.wait \(.*Condition\.wait \(",
        str(caught.value),
    )
    lead = r"core called it in the done\(\) of test_a_call_that_blocks.* \(.*test_contract_check"
    assert bool(re.search(lead, str(caught.value))) is bool(within)
    assert capsys.readouterr().err.startswith("against the contract: Sender.begin has blocked")


def test_of_calls_within_each_other_the_inner_one_is_told() -> None:
    check, port = ContractCheck(patience_s=0.02), Freeing()
    check.start()
    outer = check.quick("outer", port=cast("Port", port))
    with outer, check.quick("inner", port=cast("Port", port)):
        port.failed.wait()
    with pytest.raises(AssertionError, match="inner has blocked") as caught:
        check.verify()
    assert "outer" not in str(caught.value)


def test_what_begins_and_is_never_done_is_told_with_its_message() -> None:
    check = ContractCheck()
    end, dones, _ = begun(check)
    cast("Any", end).inner.abort = lambda cause: None
    dones[0].began_s -= 9
    end.abort(OSError())
    with pytest.raises(UnfinishedError) as caught:
        check.verify()
    assert re.search(
        r"link 0→1: the send of microbatch 0 \(forward, session 0\) on edge 'e0', 4 bytes, began "
        r"9\.0 s before its end was closed or aborted, and it neither called done\(\) nor",
        str(caught.value),
    )


@pytest.mark.parametrize("asked_again", [False, True])
def test_a_sender_without_room_must_say_when_it_has_some(asked_again: bool) -> None:
    check, fake = ContractCheck(patience_s=0.0), FakePort()
    ports: list[Any] = []

    class Given(Loopback):
        def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
            ports.append(port)
            return Ends(lambda announce, done: False)

    end = checked(Given, check)(NoOptions()).open_sender(LINK, cast("Port", fake), Deadline(1))
    end.begin(Message(HEADER, BYTES), lambda note=b"", fds=(): None, Told())
    if asked_again:
        ports[0].room()
    end.close(Deadline(1))
    assert bool(check.unfinished) is not asked_again
    assert asked_again or "which returned False then, has not" in check.unfinished[0]
