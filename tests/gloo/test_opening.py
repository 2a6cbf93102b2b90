"""What the transport says of itself, and how opening it can fail."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

import stagelink_gloo
from stagelink.transport.contract import Deadline, Link
from stagelink_gloo import Gloo, GlooOptions
from tests.gloo.twin import TwinPort, lo

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

LINK = Link(0, 1, "gloo", "cpu")


class LonelyPort(TwinPort):
    """A port whose peer never opens."""

    def __init__(self, rank: int, store: Store) -> None:
        self._rank = rank
        self._store = store
        self.link = LINK

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def peer(self) -> int:
        return 1 - self._rank

    def store(self) -> Store:
        return self._store

    def wait(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        threading.Event().wait(deadline.remaining_s)  # nothing ever happens here
        return ready()


def test_the_hook_returns_the_class() -> None:
    assert stagelink_gloo.stagelink_register_transport() is Gloo


def test_what_it_says_of_itself() -> None:
    assert Gloo.name == "gloo"
    assert Gloo.capabilities.devices == {"cpu", "cuda"}
    assert Gloo.capabilities.in_flight == 4
    assert not Gloo.capabilities.caller_thread
    assert not Gloo.capabilities.copies_on_begin
    assert lo().describe() == {}


def test_usable_here() -> None:
    assert Gloo.probe(GlooOptions())
    assert Gloo.probe(GlooOptions(interface="lo"))


def test_an_interface_that_is_not_there() -> None:
    verdict = Gloo.probe(GlooOptions(interface="ib7"))
    assert not verdict
    assert verdict.reason.startswith("no network interface 'ib7' here, only 'lo'")


@pytest.mark.parametrize("missing", ["is_available", "is_gloo_available"])
def test_a_torch_without_gloo(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(dist, missing, lambda: False)
    verdict = Gloo.probe(GlooOptions())
    assert not verdict
    assert verdict.reason == "this build of torch has no gloo"


def test_a_peer_that_never_comes() -> None:
    with pytest.raises(TimeoutError, match=r"rank 0: rank 1 did not come within 0\.3 s"):
        lo().open_sender(LINK, LonelyPort(0, HashStore()), Deadline(0.3))


def test_a_peer_that_dies_while_connecting() -> None:
    store = HashStore()
    store.set("here/1", "1")  # which is all that rank 1 does; rank 0 leaves a dead address
    with pytest.raises(ConnectionError, match="rank 0 connecting with rank 1 by gloo: "):
        lo().open_sender(LINK, LonelyPort(0, store), Deadline(0.5))
    start = time.monotonic()
    with pytest.raises(OSError, match="rank 1 connecting with rank 0 by gloo: "):
        lo().open_receiver(LINK, LonelyPort(1, store), Deadline(2))
    assert time.monotonic() - start < 15


def test_an_interface_without_an_address() -> None:
    transport = Gloo(GlooOptions(interface="ib7"))
    with pytest.raises(ConnectionError, match="ib7"):
        transport.open_receiver(LINK, LonelyPort(1, HashStore()), Deadline(1))
