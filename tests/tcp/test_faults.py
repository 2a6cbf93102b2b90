"""A peer that dies and a stream that breaks end every wait, by name, and leave nothing."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest
import torch

import stagelink
from stagelink.testing import no_leaks, run_fresh, run_threads
from stagelink_tcp import flow, transport
from stagelink_tcp.flow import Flow
from tests.support.pipelines import Wire, document, joined

if TYPE_CHECKING:
    from torch.distributed import Store

    from tests.support.pipelines import Document

LARGE = 8 << 20
DEADLINE_S = 20.0
STREAMS = pytest.mark.parametrize("streams", [1, 3], ids=["one stream", "three streams"])


def plan(streams: int) -> Document:
    return document(Wire("tcp", options={"streams": streams}))


def _meet(rank: int, world_size: int, store: Store, plan: Document) -> None:
    with joined(rank, world_size, store, plan) as comm:
        _exchange(comm)


def _exchange(comm: stagelink.Handler) -> None:
    """One large message forward, and its gradient back."""
    with comm.train(1) as session:
        if comm.rank == 0:
            session.send("h", torch.ones(LARGE // 4, requires_grad=True), 0)
            session.recv_grad("h", 0, deadline_s=DEADLINE_S)
        else:
            found = session.recv("h", 0, deadline_s=DEADLINE_S)
            session.send_grad("h", found, 0)


# -- a peer that dies


def _die_half_way() -> None:
    """Have this process die as soon as part of a message has gone."""
    ready = Flow._ready

    def killed(self: Flow) -> bool:
        if self._sends and self._left is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return ready(self)

    flow._SHARE_BYTES = 1000
    Flow._ready = killed  # type: ignore[method-assign]


def _lose(
    rank: int, world_size: int, store: Store, plan: Document, dies: int
) -> tuple[str, float]:
    """What the survivor is told, and the seconds that it took."""
    if rank == dies:
        _die_half_way()
    began = time.monotonic()
    with pytest.raises(stagelink.PeerLostError) as caught:
        _meet(rank, world_size, store, plan)
    return str(caught.value), time.monotonic() - began


@STREAMS
@pytest.mark.parametrize("dies", [0, 1], ids=["who sends first", "who answers"])
def test_a_peer_that_dies_half_way_is_named(streams: int, dies: int) -> None:
    with run_fresh(_lose, 2, plan(streams), dies) as ranks:
        outcomes = ranks.outcomes()
    assert outcomes[dies].signal is signal.SIGKILL
    survivor = outcomes[1 - dies]
    assert survivor.ok, survivor.error
    text, took_s = survivor.value
    assert f"rank {dies}" in text
    assert took_s < DEADLINE_S


# -- a stream that breaks


class _Breaks(Flow):
    """The last stream of a link is cut off when part of a message has gone over it."""

    def _ready(self) -> bool:
        if self._sends and self._left is not None:
            self._sock.shutdown(socket.SHUT_RDWR)
        return super()._ready()


def _break(rank: int, world_size: int, store: Store, plan: Document) -> str:
    with pytest.raises(stagelink.StagelinkError) as caught:
        _meet(rank, world_size, store, plan)
    return f"{type(caught.value).__name__}: {caught.value}"


@STREAMS
def test_a_stream_that_breaks_fails_both_ends_and_leaves_nothing(
    streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "_SHARE_BYTES", 1000)
    monkeypatch.setattr(transport, "Flow", _Breaks)
    run_threads(lambda *_: None, 2)  # what the first use of threads keeps
    with no_leaks("threads", "descriptors"):
        found = run_threads(_break, 2, plan(streams))
    for text in found:
        assert "0→1 by tcp" in text
    assert any("the other end has closed" in text or "BrokenPipe" in text for text in found)


# -- what is left


@STREAMS
def test_ten_times_opened_and_closed_leaves_nothing(streams: int) -> None:
    run_threads(_meet, 2, plan(streams))
    with no_leaks("threads", "descriptors"):
        for _ in range(10):
            run_threads(_meet, 2, plan(streams))
