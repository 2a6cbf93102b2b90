"""When an operation is issued, and what becomes of the others where one is late or stuck."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch

import stagelink
from stagelink.transport.streams import HostStream, StreamEvent
from stagelink_nccl import issuer
from stagelink_nccl.link import _LinkTask
from tests.nccl.over_gloo import GlooGroup, NcclOverGloo, let_issuers_end
from tests.support.pipelines import Wire, document, joined, tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import Store

    from stagelink.testing import RankPool
    from stagelink.transport.contract import Link
    from stagelink.transport.streams import Stream

LATE_S = 0.3


class Late(StreamEvent):
    """Is reached a while after it was made."""

    def __init__(self, *moments: StreamEvent) -> None:
        self._at = time.monotonic() + LATE_S
        self._moments = moments

    @property
    def reached(self) -> bool:
        if self._moments:
            return all(moment.reached for moment in self._moments)
        return time.monotonic() >= self._at


class LateStream(HostStream):
    """A stream whose caller is always a while ahead of it; it waits for all that it is told to."""

    def __init__(self) -> None:
        super().__init__(lambda size: torch.empty(size, dtype=torch.uint8))
        self.waits: list[StreamEvent] = []

    def record_caller(self) -> StreamEvent:  # type: ignore[override]
        return Late()

    def record(self) -> StreamEvent | None:  # type: ignore[override]
        return Late(*self.waits) if self.waits else None

    @contextmanager
    def entered(self, after: StreamEvent | None = None) -> Iterator[None]:
        if after is not None:
            self.waits.append(after)
        yield

    def cloned(self, payload: torch.Tensor) -> torch.Tensor:
        return payload.clone()


class LateNccl(NcclOverGloo):
    name = "nccl-on-late-stream"

    def stream(self, link: Link) -> Stream:
        del link
        return LateStream()


LATE = Wire(LateNccl.name, processes=True)


def _look_at_what_is_waited_for(rank: int, world_size: int, store: Store) -> list[bool]:
    """For each operation, whether its message was there, and its stream waited for nothing."""
    found: list[bool] = []
    do = _LinkTask._do
    last = threading.Event()

    def look(task: Any, operation: Any) -> None:
        first = Late(*task._port.stream.waits[: len(found) + 1])
        found.append(first.reached and all(moment.reached for moment in task._stream.waits))
        do(task, operation)

    plan = document(LATE, microbatches=4, window=4)
    with (
        patch.object(_LinkTask, "_do", look),
        joined(rank, world_size, store, plan, [LateNccl]) as comm,
        comm.evaluate(4) as session,
    ):
        for number in session.mine:
            if rank == 0:
                last.wait(LATE_S / 10)  # messages are computed one after the other
                session.isend("h", torch.full((3000,), float(number)), number)
            else:
                got = session.recv("h", number)
                assert got is not None
                assert bool((got == number).all())
    return found


def test_an_operation_waits_for_nothing_but_the_other_rank(rank_pool: RankPool) -> None:
    sender, _ = rank_pool.run(_look_at_what_is_waited_for, 2)
    assert sender == [True] * 4


def _receive_too_early(rank: int, world_size: int, store: Store) -> tuple[bool, str]:
    with (
        joined(rank, world_size, store, document(LATE), [LateNccl]) as comm,
        comm.evaluate(1) as session,
    ):
        if rank == 0:
            session.send("h", torch.ones(3000), 0)
            return True, ""
        done = session.irecv("h", 0).done()
        text = ""
        try:
            session.recv("h", 0, deadline_s=LATE_S / 10)
        except stagelink.DeadlineError as error:
            text = str(error)
        got = session.recv("h", 0)
        assert got is not None
        assert bool((got == 1).all())
        return done, text


def test_a_receive_that_is_too_early_can_be_tried_again(rank_pool: RankPool) -> None:
    done, text = rank_pool.run(_receive_too_early, 2)[1]
    assert not done
    assert "from rank 0" in text


EAGER = Wire(NcclOverGloo.name, options={"eager": True}, processes=True)


def _leave_early(rank: int, world_size: int, store: Store) -> None:
    """Rank 1 leaves at once; the others go on."""
    tensors = [tensor("a", 0, 1), tensor("b", 0, 2)]
    with joined(rank, world_size, store, document(EAGER, (1, 1, 1), tensors), [NcclOverGloo]) as c:
        if rank == 1:
            return
        with c.evaluate(4) as session:
            for number in session.mine:
                if rank == 0:
                    session.send("b", torch.full((3000,), float(number)), number)
                else:
                    assert session.recv("b", number) is not None


def test_one_who_leaves_keeps_nobodys_slot(rank_pool: RankPool) -> None:
    for _ in range(3):
        rank_pool.run(_leave_early, 3)


def _close_with(rank: int, world_size: int, store: Store, how: str) -> list[bool]:
    """Exchange and close, or fail; whether each group was given back as broken."""
    given_back: list[bool] = []
    close = GlooGroup.close

    def note(group: GlooGroup, *, broken: bool) -> None:
        given_back.append(broken)
        close(group, broken=broken)
        if how == "raises":
            raise RuntimeError("NCCL cannot give it back")

    wire = Wire(NcclOverGloo.name, processes=True)
    with patch.object(GlooGroup, "close", note):
        try:
            with joined(rank, world_size, store, document(wire), [NcclOverGloo]) as comm:
                with comm.evaluate(1) as session:
                    if rank == 0:
                        session.send("h", torch.ones(3000), 0)
                    else:
                        session.recv("h", 0)
                if how == "fails":
                    _fail()
        except (ValueError, stagelink.StagelinkError):
            assert how == "fails"
            let_issuers_end()
    return given_back


@pytest.mark.parametrize(("how", "broken"), [("clean", False), ("raises", False), ("fails", True)])
def test_every_group_is_given_back(how: str, broken: bool, rank_pool: RankPool) -> None:
    assert rank_pool.run(_close_with, 2, how) == [[broken] * 2] * 2


class Failed:
    """Work that is over, and says only to those who give it time that it went wrong."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: object = None) -> None:
        if timeout is not None:
            raise RuntimeError("NCCL error: unhandled")


def _receive_what_failed(rank: int, world_size: int, store: Store) -> str:
    wire = Wire(NcclOverGloo.name, processes=True)
    with patch.object(GlooGroup, "start", lambda *_: Failed()):
        try:
            with (
                joined(rank, world_size, store, document(wire), [NcclOverGloo]) as comm,
                comm.evaluate(1) as session,
            ):
                if rank == 0:
                    session.send("h", torch.ones(3000), 0)
                    comm.reduce([0.0])
                else:
                    session.recv("h", 0)
        except stagelink.StagelinkError as error:
            let_issuers_end()
            return str(error)
    return "it was taken for good"


def test_what_failed_is_not_handed_out(rank_pool: RankPool) -> None:
    for text in rank_pool.run(_receive_what_failed, 2):
        assert "NCCL error: unhandled" in text


def _close_while_stuck(rank: int, world_size: int, store: Store) -> tuple[float, str]:
    """How long a close took where the issuing thread is stuck, and what is said afterwards."""
    stuck, free = threading.Event(), threading.Event()

    def start(*_: object) -> None:
        stuck.set()
        free.wait()
        raise RuntimeError("let go")

    plan = document(Wire(NcclOverGloo.name, processes=True))
    began = time.monotonic()
    with patch.object(GlooGroup, "start", start):
        try:
            with joined(rank, world_size, store, plan, [NcclOverGloo]) as comm:
                with comm.evaluate(1) as session:
                    if rank == 0:
                        session.send("h", torch.ones(3000), 0)
                    stuck.wait()
                    comm.reduce([0.0])  # the other may have failed before it is through here
                _fail()
        except (ValueError, stagelink.StagelinkError):
            took_s = time.monotonic() - began
    try:
        with joined(rank, world_size, _second(store), plan, [NcclOverGloo]):
            said = "it was opened"
    except stagelink.StagelinkError as error:
        said = str(error)
    free.set()
    let_issuers_end()
    assert not issuer._only_one.locked()
    return took_s, said


def _fail() -> None:
    raise ValueError("the user's own")


def _second(store: Store) -> Store:
    return torch.distributed.PrefixStore("second", store)


def test_a_stuck_thread_holds_nobody_up(rank_pool: RankPool) -> None:
    for took_s, said in rank_pool.run(_close_while_stuck, 2):
        assert took_s < 10.0
        assert "while NCCL was stuck" in said
