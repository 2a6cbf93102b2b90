"""What the transport says of itself, and how opening it can fail."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

import stagelink_gloo
from stagelink.deadline import Deadline
from stagelink.errors import ConnectError
from stagelink.testing import run_fresh
from stagelink.transport.contract import Endpoint, Link
from stagelink.transport.gloo_groups import VARIABLE
from stagelink.transport.host import server_id
from stagelink_gloo import Gloo, GlooOptions
from tests.gloo.twin import TwinPort, be_flooded, lo

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

    from tests.gloo.conftest import Twins

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

    def wait(self, ready: Callable[[], bool], deadline: Deadline | None = None) -> bool:
        assert deadline is not None
        threading.Event().wait(deadline.remaining_s)  # nothing ever happens here
        return ready()


def test_the_hook_returns_the_class() -> None:
    assert stagelink_gloo.stagelink_register_transport() is Gloo


def test_what_it_says_of_itself() -> None:
    assert Gloo.name == "gloo"
    assert Gloo.capabilities.devices == {"cpu", "cuda"}
    assert Gloo.capabilities.in_flight == 4
    assert not Gloo.capabilities.copies_on_begin
    assert lo().describe() == {
        "host": server_id(),
        "named": ["127.0.0.1", "[transports.gloo] interface = 'lo'"],
    }
    assert Gloo(GlooOptions()).describe() == {"host": server_id(), "named": None}


def test_usable_here() -> None:
    assert Gloo.probe(GlooOptions())
    assert Gloo.probe(GlooOptions(interface="lo"))


def test_an_interface_that_is_not_there() -> None:
    verdict = Gloo.probe(GlooOptions(interface="ib7"))
    assert not verdict
    assert verdict.reason.startswith(
        "[transports.gloo] interface = 'ib7': there is no such network interface; this host can "
        "use "
    )


def test_torch_s_variable_for_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "lo")
    assert Gloo.probe(GlooOptions())
    assert Gloo(GlooOptions()).describe()["named"] == ["127.0.0.1", f"{VARIABLE} = 'lo'"]
    monkeypatch.setenv(VARIABLE, "ib7")
    assert Gloo.probe(GlooOptions()).reason.startswith(f"{VARIABLE} = 'ib7': there is no such")
    assert Gloo.probe(GlooOptions(interface="lo"))  # the plan goes before it
    monkeypatch.setenv(VARIABLE, "lo,lo")
    assert f"{VARIABLE} = 'lo,lo' names several" in Gloo.probe(GlooOptions()).reason
    monkeypatch.setenv(VARIABLE, "")
    assert Gloo(GlooOptions()).describe()["named"] is None


def _place(rank: int, host: str, *named: str) -> Endpoint:
    return Endpoint(rank, host, f"{host}/{rank}", {"host": host, "named": named or None})


def test_no_loopback_between_hosts() -> None:
    zero, one = _place(0, "a", "10.1.0.1", "eth0"), _place(1, "b", "127.0.0.1", "it is so named")
    for local, remote in ((zero, one), (one, zero)):
        verdict = lo().can_connect(LINK, local, remote)
        assert not verdict
        assert "cannot reach rank 1 at 127.0.0.1 (it is so named); name another" in verdict.reason
    assert lo().can_connect(LINK, zero, _place(1, "b", "10.1.0.2", "eth0"))
    assert lo().can_connect(LINK, zero, _place(1, "b"))
    assert lo().can_connect(LINK, _place(0, "b"), one)


def test_no_way_to_the_peer() -> None:
    store = HashStore()
    store.set("here/1", "192.0.2.1")  # which loopback does not lead to
    wanted = (
        r"rank 0 at 127\.0\.0\.1 \(\[transports\.gloo\] interface = 'lo'\) has no way to rank 1 "
        r"at 192\.0\.2\.1: .*GLOO_SOCKET_IFNAME on each host"
    )
    with pytest.raises(ConnectError, match=wanted):
        lo().open_sender(LINK, LonelyPort(0, store), Deadline(20))


def test_the_address_in_use_is_logged(
    caplog: pytest.LogCaptureFixture, connect: Callable[[], Twins]
) -> None:
    caplog.set_level(logging.INFO, logger="stagelink")
    connect()
    wanted = "gloo with rank 1 at 127.0.0.1 ([transports.gloo] interface = 'lo')"
    assert f"rank 0: {wanted}" in caplog.messages


def test_strangers_cannot_end_a_rank() -> None:
    """Gloo ends a process that has no file descriptor left for one who connects."""
    with run_fresh(be_flooded, 2, 128, 1100) as ranks:
        assert ranks.results() == [0, 0]


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
    store.set("here/1", "127.0.0.1")
    store.set("reachable/1", "1")  # which is all that rank 1 does; rank 0 leaves a dead address
    with pytest.raises(ConnectionError, match=r"rank 0 at .* with rank 1 at 127.* by gloo: "):
        lo().open_sender(LINK, LonelyPort(0, store), Deadline(0.5))
    start = time.monotonic()
    with pytest.raises(OSError, match=r"rank 1 at .* with rank 0 at 127.* by gloo: "):
        lo().open_receiver(LINK, LonelyPort(1, store), Deadline(2))
    assert time.monotonic() - start < 15


def test_an_interface_without_an_address() -> None:
    transport = Gloo(GlooOptions(interface="ib7"))
    with pytest.raises(ConnectionError, match="ib7"):
        transport.open_receiver(LINK, LonelyPort(1, HashStore()), Deadline(1))
