"""Sockets, calls from other threads, and when a wait spins."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from stagelink.control.poller import Poller

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def poller() -> Iterator[Poller]:
    with closing(Poller()) as poller:
        yield poller


@pytest.mark.parametrize("method", ["run", "watch"])
def test_a_call_wakes_who_waits(poller: Poller, method: str) -> None:
    blocks: dict[str, Callable[[], None]] = {
        "run": lambda: poller.run(20.0),
        "watch": poller.watch,
    }
    waiting = threading.Thread(target=blocks[method])
    waiting.start()
    while not (poller._waiting or poller._watching):
        pass
    called: list[int] = []
    poller.call(lambda: called.append(1))
    waiting.join(10)
    assert not waiting.is_alive()
    poller.run(0.0)
    assert called == [1]


def test_calls_come_in_order_and_those_they_lead_to_in_the_next_run(poller: Poller) -> None:
    called: list[str] = []

    def first() -> None:
        called.append("first")
        poller.call(lambda: called.append("third"))

    poller.call(first)
    poller.call(lambda: called.append("second"))
    poller.run(20.0)
    assert called == ["first", "second"]
    poller.run(20.0)
    assert called == ["first", "second", "third"]


def test_sockets_have_their_turn_after_calls(poller: Poller) -> None:
    mine, theirs = socket.socketpair()
    ready: list[int] = []
    with closing(mine), closing(theirs):
        poller.add(mine, ready.append)
        theirs.send(b"x")
        poller.call(lambda: None)
        poller.run(20.0)
        poller.run(20.0)
    assert len(ready) == 1


class Epoll:
    """Counts looks; something is ready at the look of that number."""

    def __init__(self, at_look: int) -> None:
        self.at_look = at_look
        self.looks = 0
        self.blocked = 0

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        self.looks += 1
        self.blocked += timeout_s > 0
        return [(-1, 0)] if self.looks >= self.at_look or timeout_s else []


def _wait(poller: Poller, at_look: int, monkeypatch: pytest.MonkeyPatch) -> Epoll:
    epoll = Epoll(at_look)
    with monkeypatch.context() as patch:
        patch.setattr(poller, "_epoll", epoll)
        poller.run(20.0)
    return epoll


def _wait_shortly_thrice(poller: Poller, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        _wait(poller, 1, monkeypatch)


def test_a_wait_spins_after_three_short_ones(
    poller: Poller, monkeypatch: pytest.MonkeyPatch
) -> None:
    poller.spin_s = 10.0
    blocked = [_wait(poller, 5, monkeypatch).blocked for _ in range(5)]
    assert blocked == [1, 1, 1, 0, 0]


def test_a_spin_that_met_nothing_is_not_tried_again_at_once(
    poller: Poller, monkeypatch: pytest.MonkeyPatch
) -> None:
    poller.spin_s = 10.0
    _wait_shortly_thrice(poller, monkeypatch)
    poller.spin_s = 1e-9
    assert _wait(poller, 10**9, monkeypatch).blocked == 1  # spun in vain
    poller.spin_s = 10.0
    assert [_wait(poller, 5, monkeypatch).blocked for _ in range(4)] == [1, 1, 1, 0]


def test_without_a_spin_every_wait_blocks(poller: Poller, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [_wait(poller, 5, monkeypatch).blocked for _ in range(5)] == [1] * 5


def test_a_look_without_a_wait_is_no_short_wait(
    poller: Poller, monkeypatch: pytest.MonkeyPatch
) -> None:
    poller.spin_s = 10.0
    for _ in range(5):
        poller.run(0.0)
    assert _wait(poller, 5, monkeypatch).blocked == 1


def test_a_spin_takes_no_longer_than_the_wait(
    poller: Poller, monkeypatch: pytest.MonkeyPatch
) -> None:
    poller.spin_s = 30.0
    _wait_shortly_thrice(poller, monkeypatch)
    began = time.monotonic()
    poller.run(0.01)
    assert time.monotonic() - began < 10


def test_a_call_ends_a_spin(poller: Poller, monkeypatch: pytest.MonkeyPatch) -> None:
    poller.spin_s = 10.0
    _wait_shortly_thrice(poller, monkeypatch)
    called: list[int] = []
    spinning = threading.Thread(target=poller.run, args=(20.0,))
    spinning.start()
    poller.call(lambda: called.append(1))
    spinning.join(5)
    assert not spinning.is_alive()
    assert called == [1]
