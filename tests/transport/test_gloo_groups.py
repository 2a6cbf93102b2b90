"""Groups of torch's gloo: at the address that is asked for, and shut once they are complete."""

from __future__ import annotations

import socket
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stagelink.errors import ConnectError
from stagelink.testing import run_threads
from stagelink.transport import gloo_groups
from stagelink.transport.gloo_groups import VARIABLE, gloo_group, named_by_variable
from tests.support.listeners import listeners

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import Store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
HERE = "127.0.0.3"
"""One of loopback's addresses that nothing else here listens at."""


def _connect(rank: int, size: int, store: Store, *, lazy: bool = False) -> Any:
    limit = timedelta(seconds=20)
    return gloo_group(store, rank, size, address=HERE, timeout=limit, threads=1, lazy=lazy)


def _shut() -> list[bool]:
    return [listener.shut for listener in listeners() if listener.host == HERE]


@pytest.fixture(autouse=True)
def _groups_are_given_up() -> Iterator[None]:
    yield
    assert _shut() == []


def test_a_complete_group_is_shut_and_works() -> None:
    def rank(me: int, size: int, store: Store) -> float:
        group = _connect(me, size, store)
        store.set(f"connected/{me}", "")
        store.wait([f"connected/{other}" for other in range(size)])
        assert _shut() == [True] * size
        for listener in listeners():
            if listener.host == HERE:
                with socket.socket() as stranger:
                    stranger.setblocking(False)
                    stranger.connect_ex((HERE, listener.port))
                    with pytest.raises(OSError, match="not connected"):
                        stranger.getpeername()
        value = torch.ones(3) * (me + 1)
        group.allreduce([value]).wait()
        store.set(f"done/{me}", "")
        store.wait([f"done/{other}" for other in range(size)])
        return value.sum().item()

    assert run_threads(rank, 3) == [18.0] * 3


def test_a_lazy_group_stays_open() -> None:
    def rank(me: int, size: int, store: Store) -> None:
        group = _connect(me, size, store, lazy=True)
        store.set(f"connected/{me}", "")
        store.wait([f"connected/{other}" for other in range(size)])
        assert _shut() == [False] * size
        group.barrier().wait()
        store.set(f"done/{me}", "")
        store.wait([f"done/{other}" for other in range(size)])

    run_threads(rank, 2)


def test_what_else_begins_to_listen_there_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    look = gloo_groups._sockets
    begun: list[socket.socket] = []

    def sockets() -> dict[str, int]:
        found = look()
        if not begun:  # it was the first look
            begun.append(socket.create_server((HERE, 0)))
        return found

    monkeypatch.setattr(gloo_groups, "_sockets", sockets)

    def rank(me: int, size: int, store: Store) -> None:
        group = _connect(me, size, store)
        assert _shut() == [False, False]
        del group

    run_threads(rank, 1)
    begun[0].close()


def test_where_there_is_no_such_filter(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="stagelink")
    monkeypatch.setattr(gloo_groups, "_SO_ATTACH_FILTER", 2**15)

    def rank(me: int, size: int, store: Store) -> None:
        group = _connect(me, size, store)
        assert _shut() == [False]
        del group

    run_threads(rank, 1)
    assert "gloo's port stays open to strangers: " in caplog.text


def test_where_there_is_no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(path: object) -> list[str]:
        raise FileNotFoundError(path)

    def rank(me: int, size: int, store: Store) -> Any:
        return _connect(me, size, store)

    with monkeypatch.context() as patch:
        patch.setattr("stagelink.transport.gloo_groups.os.listdir", absent)
        groups = run_threads(rank, 1)
    assert _shut() == [False]
    del groups


def test_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert named_by_variable() is None
    monkeypatch.setenv(VARIABLE, "lo")
    assert named_by_variable() == ("127.0.0.1", f"{VARIABLE} = 'lo'")
    monkeypatch.setenv(VARIABLE, "lo,eth0")
    with pytest.raises(ConnectError, match="'lo,eth0' names several interfaces"):
        named_by_variable()
