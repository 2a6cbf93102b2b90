"""Descriptors that a link has watched by core's reader, until it is closed."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from stagelink.control.reader import Reader
from stagelink.deadline import Deadline
from stagelink.errors import ClosedError, StagelinkError
from stagelink.links.bound import Bound
from stagelink.links.in_link import InLink
from stagelink.transport.buffers import BufferPool
from stagelink.transport.contract import Capabilities, Link
from stagelink.transport.streams import HostStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stagelink.control.watches import Watch

SOON = 20.0


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader("stand-by")
    yield reader
    reader.stop(Deadline(SOON))
    reader.close()


@pytest.fixture
def ready() -> Iterator[int]:
    """A descriptor that can be read."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        theirs.send(b"x")
        yield mine.fileno()


class Watching:
    """A link that watches, and how often its actions were called."""

    def __init__(self, reader: Reader, source: int = 0) -> None:
        self.reader = reader
        self.calls: list[str] = []
        self.failures: list[StagelinkError] = []
        self.link = InLink(
            Link(source, 9, "fake", "cpu"),
            Capabilities(devices=frozenset({"cpu"}), auto_rank=0),
            HostStream(BufferPool(2**20).take),
            Bound(2**40, "a test"),
            lambda: None,
            self.failures.append,
        )

    def action(self, name: str) -> Callable[[], bool]:
        def act() -> bool:
            self.calls.append(name)
            return False

        return act

    def watch(self, fd: int, action: Callable[[], bool]) -> None:
        self.link.watch(self.reader, fd, action, writable=False)

    def turns(self, count: int = 3) -> list[str]:
        """What is called in some turns of reading."""
        self.calls.clear()
        left = iter(range(count))
        self.reader.wait(lambda: next(left, None) is None, Deadline(SOON))
        return self.calls


def test_a_later_watch_of_a_descriptor_replaces_the_former(reader: Reader, ready: int) -> None:
    one = Watching(reader)
    one.watch(ready, one.action("first"))
    assert set(one.turns()) == {"first"}
    one.watch(ready, one.action("second"))
    assert set(one.turns()) == {"second"}
    one.link.close(Deadline(SOON))


def test_to_unwatch_is_idempotent(reader: Reader, ready: int) -> None:
    one = Watching(reader)
    one.watch(ready, one.action("called"))
    for _ in range(2):
        one.link.unwatch(ready)
    reader.call(lambda: None)
    assert one.turns(1) == []
    one.link.close(Deadline(SOON))


def test_an_action_may_unwatch_before_the_call_that_watches_has_returned(
    reader: Reader, ready: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs on another thread, as soon as the reader knows of it."""
    one = Watching(reader)
    begin = reader.watch
    acting = threading.Thread(target=lambda: one.link.unwatch(ready))

    def watch(*args: Any, **how: Any) -> Watch:
        watch = begin(*args, **how)
        acting.start()
        acting.join(0.05)
        return watch

    monkeypatch.setattr(reader, "watch", watch)
    one.watch(ready, one.action("called"))
    acting.join(SOON)
    reader.call(lambda: None)
    assert one.turns(1) == []
    one.link.close(Deadline(SOON))


def test_links_that_share_a_worker_have_it_called_once_until_the_last_has_ended(
    reader: Reader, ready: int
) -> None:
    links = [Watching(reader, source) for source in range(2)]
    act = links[0].action("worker")
    for one in links:
        one.watch(ready, act)
    links[0].turns(1)
    assert len(links[0].turns(5)) <= 5
    links[0].link.close(Deadline(SOON))
    assert links[0].turns()  # the other has it watched still
    links[1].link.close(Deadline(SOON))
    reader.call(lambda: None)
    assert links[0].turns(1) == []


def test_what_an_action_raises_fails_the_handler_by_the_link(reader: Reader, ready: int) -> None:
    one = Watching(reader)

    def act() -> bool:
        raise KeyError("of the library")

    one.watch(ready, act)
    one.turns()
    soon = Deadline(SOON)
    while not one.failures and not soon.passed:
        pass
    assert [str(failure) for failure in one.failures] == [
        "0→9 by fake: KeyError: 'of the library'"
    ]
    one.link.close(Deadline(SOON))


def test_a_link_that_is_closed_watches_nothing(reader: Reader, ready: int) -> None:
    one = Watching(reader)
    one.watch(ready, one.action("called"))
    one.link.close(Deadline(SOON))
    with pytest.raises(ClosedError, match="0→9 by fake is being closed"):
        one.watch(ready, one.action("too late"))
    reader.call(lambda: None)
    assert one.turns(1) == []
