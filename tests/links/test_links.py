"""The two ends of a link over transports that behave as they like."""

from __future__ import annotations

import os
import random
import threading
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stagelink.deadline import Deadline
from stagelink.errors import ClosedError, PeerClosedError, StagelinkError, TransportError
from stagelink.links.arrival import Arrival
from stagelink.links.bound import Bound
from stagelink.links.in_link import InLink
from stagelink.links.out_link import OutLink, SendJob
from stagelink.testing import LeakCheck
from stagelink.transport.buffers import BufferPool
from stagelink.transport.contract import (
    Capabilities,
    Link,
    Message,
    Receiver,
    Sender,
)
from stagelink.transport.header import Header, MessageKind
from stagelink.transport.streams import HostStream
from tests.support.interrupts import Interrupted, interrupted_everywhere, lock_is_free

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from stagelink.transport.contract import Announce, Done

LINK = Link(0, 1, "fake", "cpu")
SOON = 20.0


def _capabilities(**more: Any) -> Capabilities:
    return Capabilities(devices=frozenset({"cpu"}), auto_rank=0, **more)


def _header(number: int, size_bytes: int = 4) -> Header:
    return Header(MessageKind.DATA, microbatch=number, payload_bytes=size_bytes)


class FakeSender(Sender):
    """Begins as told; keeps what came, and each message's ``done``."""

    def __init__(self) -> None:
        self.full = False
        self.error: BaseException | None = None
        self.at_once = False
        self.announces = True
        self.begun: list[int] = []
        self.payloads: list[torch.Tensor] = []
        self.announce: list[Announce] = []
        self.done: list[Done] = []
        self.calls: list[str] = []
        self._inside = threading.Lock()

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        assert self._inside.acquire(blocking=False), "two begin at once"
        try:
            if self.error is not None:
                raise self.error
            if self.full:
                return False
            if self.announces:
                announce(b"note")
            self.begun.append(message.header.microbatch)
            self.payloads.append(message.payload)
            if self.at_once:
                done()
            else:
                self.announce.append(announce)
                self.done.append(done)
            return True
        finally:
            self._inside.release()

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        self.calls.append(f"note {note!r}")

    def abort(self, cause: BaseException) -> None:
        self.calls.append(f"abort {cause}")
        for done in self.done:
            done.failed(ConnectionAbortedError("aborted"))

    def close(self, deadline: Deadline) -> None:
        self.calls.append("close")


class Out:
    """An `OutLink`, what it announced and what it failed with."""

    def __init__(self, **capabilities: Any) -> None:
        self.announced: list[int] = []
        self.failures: list[StagelinkError] = []
        self.changes = threading.Condition()
        self.sender = FakeSender()
        self.link = OutLink(
            LINK,
            _capabilities(**capabilities),
            lambda header, note, fds: self.announced.append(header.microbatch),
            HostStream(BufferPool(2**20).take),
            self._changed,
            self._failed,
        )

    def _changed(self) -> None:
        with self.changes:
            self.changes.notify_all()

    def _failed(self, error: StagelinkError) -> None:
        self.failures.append(error)
        self._changed()

    def submit(self, number: int, *, copy: bool = False) -> SendJob:
        job = SendJob(_header(number), torch.full((4,), number % 256, dtype=torch.uint8))
        self.link.submit(job, copy=copy)
        return job

    def until(self, condition: Callable[[], bool]) -> None:
        with self.changes:
            assert self.changes.wait_for(condition, SOON)


@pytest.fixture
def out() -> Iterator[Callable[..., Out]]:
    with ExitStack() as stack:

        def make(*, opened: bool = True, **capabilities: Any) -> Out:
            end = Out(**capabilities)
            if opened:
                end.link.opened(end.sender)
            stack.callback(end.link.close, Deadline(SOON))
            return end

        yield make


def _worker_names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "stagelink" in thread.name]


def test_what_is_finished_at_once_needs_no_thread(out: Callable[..., Out]) -> None:
    end = out()
    end.sender.at_once = True
    job = end.submit(0)
    assert job.finished
    assert job.payload is None
    assert end.link.unfinished == 0
    assert _worker_names() == []


def test_a_message_is_finished_when_the_transport_says_so(out: Callable[..., Out]) -> None:
    end = out()
    job = end.submit(0)
    assert (job.finished, end.link.unfinished, end.announced) == (False, 1, [0])
    end.sender.done[0]()
    assert job.finished
    assert job.payload is None
    assert end.link.unfinished == 0
    assert _worker_names() == []


def test_no_more_begin_than_may_be_in_flight(out: Callable[..., Out]) -> None:
    end = out(in_flight=2)
    jobs = [end.submit(number) for number in range(5)]
    assert end.sender.begun == end.announced == [0, 1]
    for number, job in enumerate(jobs):
        end.sender.done[number]()
        assert job.finished
    assert end.sender.begun == [0, 1, 2, 3, 4]


def test_no_room_and_then_room(out: Callable[..., Out]) -> None:
    end = out()
    end.sender.at_once = end.sender.full = True
    jobs = [end.submit(number) for number in range(3)]
    end.link.room()
    assert end.announced == []
    end.sender.full = False
    assert end.submit(3).finished is False  # behind those that wait
    end.link.room()
    assert end.announced == [0, 1, 2, 3]
    assert all(job.finished for job in jobs)


def test_what_is_sent_before_the_link_is_open_waits(out: Callable[..., Out]) -> None:
    end = out(opened=False)
    end.sender.at_once = True
    jobs = [end.submit(number) for number in range(2)]
    end.link.note(b"early", ())
    assert end.announced == []
    end.link.opened(end.sender)
    end.link.note(b"later", ())
    assert end.announced == [0, 1]
    assert all(job.finished for job in jobs)
    assert end.sender.calls == ["note b'early'", "note b'later'"]


@pytest.mark.parametrize("copies_on_begin", [True, False])
@pytest.mark.parametrize("full", [True, False])
def test_a_copy_is_made_where_the_transport_makes_none(
    out: Callable[..., Out], copies_on_begin: bool, full: bool
) -> None:
    end = out(copies_on_begin=copies_on_begin)
    end.sender.at_once = True
    end.sender.full = full
    payload = torch.full((4,), 7, dtype=torch.uint8)
    end.link.submit(SendJob(_header(0), payload), copy=True)
    payload.fill_(9)
    end.sender.full = False
    end.link.room()
    (sent,) = end.sender.payloads
    copied = full or not copies_on_begin
    assert (sent.data_ptr() == payload.data_ptr()) != copied
    assert sent.tolist() == [7 if copied else 9] * 4


def test_without_a_copy_the_callers_memory_is_sent(out: Callable[..., Out]) -> None:
    end = out()
    payload = torch.zeros(4, dtype=torch.uint8)
    end.link.submit(SendJob(_header(0), payload), copy=False)
    assert end.sender.payloads[0].data_ptr() == payload.data_ptr()


def test_an_error_in_begin_is_the_callers(out: Callable[..., Out]) -> None:
    end = out()
    end.sender.error = OSError("no wire")
    with pytest.raises(TransportError, match="sending on 0→1 by fake: OSError: no wire") as caught:
        end.submit(0)
    assert isinstance(caught.value.__cause__, OSError)
    assert end.failures == []


def test_an_error_in_begin_of_what_waited_fails_the_handler(out: Callable[..., Out]) -> None:
    end = out()
    end.sender.full = True
    end.submit(0)
    end.sender.error = OSError("no wire")
    end.link.room()
    end.until(lambda: bool(end.failures))
    assert [str(error) for error in end.failures] == ["sending on 0→1 by fake: OSError: no wire"]


def test_a_message_that_fails_fails_the_handler(out: Callable[..., Out]) -> None:
    end = out(in_flight=2)
    end.submit(0)
    end.submit(1)
    end.sender.done[0].failed(OSError("cut"))
    end.until(lambda: bool(end.failures))
    assert str(end.failures[0]) == "sending on 0→1 by fake: OSError: cut"
    assert isinstance(end.failures[0], TransportError)
    assert isinstance(end.failures[0].__cause__, OSError)


@pytest.mark.parametrize("error", [ClosedError("closed"), PeerClosedError("gone")])
def test_a_link_is_given_up_where_an_end_is_closed(
    out: Callable[..., Out], error: StagelinkError
) -> None:
    end = out()
    job = end.submit(0)
    end.sender.done[0].failed(error)
    end.until(lambda: end.link.given_up)
    assert (job.finished, end.link.unfinished, end.failures) == (False, 1, [])


def _twice(end: Out) -> None:
    end.sender.done[0]()
    end.sender.done[0]()


def _out_of_order(end: Out) -> None:
    end.sender.done[1]()


def _before_it_is_announced(end: Out) -> None:
    end.sender.announces = False
    end.submit(2)
    end.sender.done[0]()
    end.sender.done[1]()
    end.sender.done[2]()


@pytest.mark.parametrize(
    ("does", "text"),
    [
        (_twice, "a message is done twice"),
        (_out_of_order, "a message is done before the one that has begun before it"),
        (_before_it_is_announced, "a message is done and was not announced"),
    ],
)
def test_what_no_done_may_say_fails_the_handler(
    out: Callable[..., Out], does: Callable[[Out], None], text: str
) -> None:
    end = out(in_flight=3)
    for number in range(2):
        end.submit(number)
    does(end)
    end.until(lambda: bool(end.failures))
    assert str(end.failures[0]) == f"sending on 0→1 by fake: {text}"


def test_what_is_done_in_its_begin_waits_for_none_before_it(out: Callable[..., Out]) -> None:
    end = out(in_flight=2)
    jobs = [end.submit(0)]
    end.sender.at_once = True
    jobs.append(end.submit(1))
    assert [job.finished for job in jobs] == [False, True]
    end.sender.done[0]()
    assert [job.finished for job in jobs] == [True, True]
    assert end.failures == []


def test_what_is_done_lets_the_next_begin_without_recursion(out: Callable[..., Out]) -> None:
    end = out()
    end.submit(0)
    end.sender.at_once = True
    jobs = [end.submit(number) for number in range(1, 2000)]
    end.sender.done[0]()
    assert end.announced == list(range(2000))
    assert all(job.finished for job in jobs)


@pytest.mark.parametrize("done_first", [True, False])
def test_a_message_that_a_begin_leads_to_waits_until_that_has_returned(
    out: Callable[..., Out], monkeypatch: pytest.MonkeyPatch, *, done_first: bool
) -> None:
    """As where the library, in a begin, completes what gives credit to a parked message."""
    end = out(in_flight=2)
    begin = end.sender.begin

    def leads_on(message: Message, announce: Announce, done: Done) -> bool:
        monkeypatch.setattr(end.sender, "begin", begin)
        announce()
        if done_first:
            done()
        jobs.append(end.submit(1))
        assert end.sender.begun == []
        if not done_first:
            done()
        return True

    monkeypatch.setattr(end.sender, "begin", leads_on)
    jobs: list[SendJob] = []
    jobs.insert(0, end.submit(0))
    assert end.announced == [0, 1]
    end.sender.done[0]()
    assert all(job.finished for job in jobs)
    assert end.link.unfinished == 0
    assert end.failures == []


def test_what_is_announced_while_an_action_is_queued_lets_it_run(out: Callable[..., Out]) -> None:
    end = out()
    end.sender.announces = False
    end.submit(0)

    class Queue(deque[Any]):
        def append(self, item: Any) -> None:
            thread = threading.Thread(target=end.sender.announce[0])
            thread.start()
            thread.join()
            super().append(item)

    end.link._queue = Queue()
    ran: list[int] = []
    end.link.when_announced(lambda: ran.append(1))
    assert ran == [1]


def test_a_sender_that_opens_after_a_failure_is_aborted(out: Callable[..., Out]) -> None:
    end = out(opened=False)
    end.submit(0)
    end.link.abort(TransportError("over"))
    end.link.opened(end.sender)
    assert end.sender.calls == ["abort over"]
    assert end.sender.begun == []


def test_what_is_done_while_another_thread_begins_does_not_wait_for_it(
    out: Callable[..., Out],
) -> None:
    end = out(in_flight=2)
    first = end.submit(0)
    inside, goes_on = threading.Event(), threading.Event()

    def announce(header: Header, note: bytes, fds: Sequence[int]) -> None:
        inside.set()
        assert goes_on.wait(SOON)

    end.link._announce = announce
    other = threading.Thread(target=end.submit, args=(1,))
    other.start()
    assert inside.wait(SOON)
    end.sender.done[0]()  # returns, though the other is in a begin
    assert not first.finished
    goes_on.set()
    other.join(SOON)
    assert first.finished


def test_an_announcement_that_comes_later_lets_go_what_waits_for_it(
    out: Callable[..., Out],
) -> None:
    end = out()
    end.sender.announces = False
    end.submit(0)
    order: list[str] = []
    end.link.when_announced(lambda: order.append("announced"))
    assert order == []
    end.sender.announce[0](b"")
    assert order == ["announced"]
    with pytest.raises(TransportError, match="a message is announced twice"):
        end.sender.announce[0](b"")


def test_after_an_abort_nothing_is_done(out: Callable[..., Out]) -> None:
    end = out()
    job = end.submit(0)
    end.link.abort(TransportError("elsewhere"))
    end.sender.done[0]()
    assert (job.finished, end.failures) == (False, [])
    assert end.submit(1).finished is False
    assert end.sender.begun == [0]


def test_after_all_that_was_submitted(out: Callable[..., Out]) -> None:
    end = out()
    end.sender.at_once = True
    order: list[str] = []
    end.link.when_announced(lambda: order.append("idle"))
    assert order == ["idle"]
    end.sender.full = True
    end.submit(0)
    end.link.when_announced(lambda: order.append(f"after {end.announced}"))
    end.submit(1)
    assert order == ["idle"]
    end.sender.full = False
    end.link.room()
    assert order == ["idle", "after [0]"]
    assert end.announced == [0, 1]


def test_close_aborts_what_is_on_its_way_and_gives_back(out: Callable[..., Out]) -> None:
    end = out()
    job = end.submit(0)
    end.link.close(Deadline(SOON))
    assert not job.finished
    assert end.sender.calls[0].startswith("abort ")
    assert end.sender.calls[-1] == "close"
    assert _worker_names() == []
    with pytest.raises(ClosedError, match="0→1 by fake is being closed"):
        end.link.check_open()


class Weather(threading.Thread):
    """Says that messages are done, lets the sender be full now and then, until all is sent."""

    def __init__(self, end: Out) -> None:
        super().__init__()
        self.over = threading.Event()
        self._end = end
        self._draw = random.Random(1)
        self._done = 0

    def run(self) -> None:
        while not self.over.is_set():
            self._change(full=self._draw.random() < 0.3)
        while self._end.link.unfinished:
            self._change(full=False)

    def _change(self, *, full: bool) -> None:
        sender = self._end.sender
        for done in sender.done[self._done : self._done + 3]:
            done()
            self._done += 1
        sender.full = full
        if not full:
            self._end.link.room()


def test_the_order_of_begin_is_the_order_of_headers_from_any_thread(
    out: Callable[..., Out],
) -> None:
    end = out(in_flight=3)
    weather = Weather(end)

    def send(first: int) -> None:
        for number in range(first, first + 100):
            end.submit(number, copy=True)

    senders = [threading.Thread(target=send, args=(100 * n,)) for n in range(8)]
    for thread in (weather, *senders):
        thread.start()
    for thread in senders:
        thread.join(SOON)
    weather.over.set()
    weather.join(SOON)
    assert not weather.is_alive()
    assert end.sender.begun == end.announced
    assert sorted(end.announced) == list(range(800))
    for n in range(8):
        mine = [number for number in end.announced if number // 100 == n]
        assert mine == sorted(mine)


# -- the receiving end ---------------------------------------------------------------------------


class FakeReceiver(Receiver):
    def __init__(self) -> None:
        self.begun: list[int] = []
        self.payloads: list[torch.Tensor | None] = []
        self.done: list[Done] = []
        self.error: BaseException | None = None
        self.into_buffer = True
        self.aborted: BaseException | None = None
        self.calls: list[str] = []

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        if self.error is not None:
            raise self.error
        self.begun.append(header.microbatch)
        payload = torch.full((header.payload_bytes,), header.microbatch, dtype=torch.uint8)
        if self.into_buffer:
            accept().copy_(payload)
        self.payloads.append(None if self.into_buffer else payload)
        self.done.append(done)

    def let(self, number: int) -> None:
        self.done[number](self.payloads[number])

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        self.calls.append(f"note {note!r}")

    def abort(self, cause: BaseException) -> None:
        self.aborted = cause
        for done in self.done:
            done.failed(ConnectionAbortedError("aborted"))

    def close(self, deadline: Deadline) -> None:
        self.calls.append("close")


class In:
    """An `InLink`, what it settled and what it failed with."""

    def __init__(self, **capabilities: Any) -> None:
        self.settled: deque[Arrival] = deque()
        self.failures: list[StagelinkError] = []
        self.changes = threading.Condition()
        self.receiver = FakeReceiver()
        self.link = InLink(
            LINK,
            _capabilities(**capabilities),
            HostStream(BufferPool(2**20).take),
            Bound(2**40, "a test"),
            lambda: None,
            self._failed,
        )

    def _settled(self, arrival: Arrival) -> None:
        with self.changes:
            arrival.settled = True
            self.settled.append(arrival)
            self.changes.notify_all()

    def _failed(self, error: StagelinkError) -> None:
        with self.changes:
            self.failures.append(error)
            self.changes.notify_all()

    def announce(self, number: int) -> Arrival:
        arrival = Arrival(_header(number), 0, self._settled)
        self.link.announced(arrival, b"note", ())
        return arrival

    def until(self, condition: Callable[[], bool]) -> None:
        with self.changes:
            assert self.changes.wait_for(condition, SOON)


@pytest.fixture
def into() -> Iterator[Callable[..., In]]:
    with ExitStack() as stack:

        def make(*, opened: bool = True, **capabilities: Any) -> In:
            end = In(**capabilities)
            if opened:
                end.link.opened(end.receiver)
            stack.callback(end.link.close, Deadline(SOON))
            return end

        yield make


@pytest.mark.parametrize("into_buffer", [True, False])
def test_a_payload_in_the_buffer_or_in_memory_of_the_transport(
    into: Callable[..., In], into_buffer: bool
) -> None:
    end = into()
    end.receiver.into_buffer = into_buffer
    arrival = end.announce(3)
    end.receiver.let(0)
    assert arrival.settled
    assert isinstance(arrival.payload, torch.Tensor)
    assert arrival.payload.tolist() == [3] * 4


def test_what_is_announced_begins_though_nobody_asks(into: Callable[..., In]) -> None:
    end = into(in_flight=2)
    arrivals = [end.announce(number) for number in range(4)]
    assert end.receiver.begun == [0, 1]
    for number in range(4):
        end.receiver.let(number)
        assert arrivals[number].settled
    assert end.receiver.begun == [0, 1, 2, 3]
    assert list(end.settled) == arrivals
    assert _worker_names() == []


def test_headers_before_the_link_is_open_are_held(into: Callable[..., In]) -> None:
    end = into(opened=False)
    arrival = end.announce(0)
    end.link.note(b"early", ())
    assert end.receiver.begun == []
    end.link.opened(end.receiver)
    end.receiver.let(0)
    assert arrival.settled
    assert end.receiver.calls == ["note b'early'"]


def test_descriptors_of_what_never_begins_are_closed(into: Callable[..., In]) -> None:
    end, check = into(opened=False), LeakCheck("descriptors")
    arrival = Arrival(_header(0), 0)
    end.link.announced(arrival, b"note", os.pipe())
    end.link.close(Deadline(SOON))
    check.verify()


def test_an_error_in_begin_is_the_reading_threads(into: Callable[..., In]) -> None:
    end = into()
    end.receiver.error = OSError("no wire")
    with pytest.raises(TransportError, match="receiving on 0→1 by fake: OSError: no wire"):
        end.announce(0)


def test_a_message_that_fails_at_its_receiver_fails_the_handler(into: Callable[..., In]) -> None:
    end = into()
    end.announce(0)
    end.receiver.done[0].failed(OSError("cut"))
    end.until(lambda: bool(end.failures))
    assert "receiving on 0→1 by fake: OSError: cut" in str(end.failures[0])


def test_a_payload_of_another_size_fails_the_handler(into: Callable[..., In]) -> None:
    end = into()
    arrival = end.announce(7)
    end.receiver.done[0](torch.zeros(3, dtype=torch.uint8))
    end.until(lambda: bool(end.failures))
    wanted = "receiving on 0→1 by fake, microbatch 7: the transport truncates: it gives 3 bytes"
    assert str(end.failures[0]).startswith(wanted)
    assert not arrival.settled


def test_close_in_the_middle_of_a_payload(into: Callable[..., In]) -> None:
    end = into()
    arrival = end.announce(0)
    end.link.close(Deadline(SOON))
    assert not arrival.settled
    assert _worker_names() == []
    assert end.receiver.calls == ["close"]


def test_a_thread_that_says_done_may_be_interrupted_anywhere(into: Callable[..., In]) -> None:
    end = into(in_flight=4)

    def call() -> None:
        nonlocal end
        if end.link.unfinished:  # the interrupt before this came in the middle: it is broken
            end = into(in_flight=4)
        end.announce(0)
        end.receiver.let(-1)

    modules = ("stagelink.links.in_link", "stagelink.links.completion")
    for place, error in interrupted_everywhere(call, *modules):
        assert isinstance(error, Interrupted), (place, error)
        assert lock_is_free(end.link._lock), place


def test_a_receiver_that_opens_after_a_failure_is_aborted_and_begins_nothing(
    into: Callable[..., In],
) -> None:
    end = into(opened=False)
    end.announce(0)
    over = TransportError("over")
    end.link.abort(over)
    end.link.opened(end.receiver)
    assert end.receiver.aborted is over
    assert end.receiver.begun == []
