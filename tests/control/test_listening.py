"""Where a rank listens for ranks of other servers: the address, and the range of ports."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from stagelink.control.meeting import own_address_by
from stagelink.control.store import store_host
from stagelink.errors import ConnectError
from stagelink.plan.document import Control
from stagelink.transport.addresses import Address
from stagelink.transport.sockets import listen

HERE = Address("127.0.0.1", "a test says so")
KEY = "[control] ports"
WIDTH = 20


@pytest.fixture(scope="module")
def _served_before() -> None:
    """The first store that a process serves opens a pipe that stays, for good."""
    TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def _held() -> socket.socket:
    return socket.create_server((HERE.text, 0))


def _port(sock: socket.socket) -> int:
    port: int = sock.getsockname()[1]
    return port


def test_any_port_where_no_range_is_given() -> None:
    with closing(listen(HERE, None, KEY)) as one, closing(listen(HERE, None, KEY)) as other:
        assert _port(one) != _port(other)


def test_the_first_port_of_the_range_that_is_free() -> None:
    with _held() as held:
        first = _port(held)
        with closing(listen(HERE, (first, first + WIDTH), KEY)) as one:
            assert first < _port(one) <= first + WIDTH
            with closing(listen(HERE, (first, first + WIDTH), KEY)) as other:
                assert _port(one) < _port(other) <= first + WIDTH


def test_a_range_without_a_free_port() -> None:
    with _held() as held:
        port = _port(held)
        wanted = rf"no port from {port} to {port} \(\[control\] ports\) is free at 127.*: widen"
        with pytest.raises(ConnectError, match=wanted):
            listen(HERE, (port, port), KEY)


def test_an_address_that_is_none_of_this_host() -> None:
    with pytest.raises(ConnectError, match=r"cannot listen at 192\.0\.2\.1 \(why\): "):
        listen(Address("192.0.2.1", "why"), (20000, 20100), KEY)


def test_loopback_is_for_ranks_of_this_host_only() -> None:
    assert own_address_by(Control(), None, elsewhere=False).text == "127.0.0.1"
    named = Control(interface="lo")
    assert own_address_by(named, None, elsewhere=False).text == "127.0.0.1"
    wanted = r"other hosts cannot reach this one at 127\.0\.0\.1 \(\[control\] interface = 'lo'\)"
    with pytest.raises(ConnectError, match=wanted):
        own_address_by(named, None, elsewhere=True)


@pytest.mark.usefixtures("_served_before")
def test_the_host_of_a_store() -> None:
    served = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    assert store_host(PrefixStore("a", PrefixStore("b", served))) == "127.0.0.1"
    assert store_host(PrefixStore("a", HashStore())) is None
