"""Ranks of several hosts, each with a network of its own, joined by cables that can be cut."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from stagelink.transport.host import server_id
from tests.support.hosts import hosts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.hosts import Host, Hosts


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    with hosts(2) as laid:
        yield laid


def _about(rank: int, world_size: int, store: str) -> tuple[str, ...]:
    del rank, world_size
    return server_id(), socket.gethostname(), socket.gethostbyname("host1"), store


def test_a_host_is_a_server_of_its_own(two: Hosts) -> None:
    with two.start(_about, [0, 1, 1]) as ranks:
        zero, one, other = ranks.results()
    assert zero[0] != one[0] == other[0]
    assert (zero[1], one[1]) == ("host0", "host1")
    assert zero[2] == one[2] == two[1].address
    assert zero[3].startswith(f"tcp://{two[0].address}:")


def _carrier(host: Host) -> bool:
    return "LOWER_UP" in host.run("ip", "link", "show", host.interface)


def test_a_cable_is_cut_and_mended(two: Hosts) -> None:
    assert _carrier(two[1])
    two.cut(1)
    assert (_carrier(two[0]), _carrier(two[1])) == (True, False)
    two.restore(1)
    assert (_carrier(two[0]), _carrier(two[1])) == (True, True)
