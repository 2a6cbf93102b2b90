"""The two ends by hand, each alone; and how they meet, fail and part, in two processes."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from stagelink.deadline import Deadline
from stagelink.errors import ClosedError, StagelinkError
from stagelink.testing import LeakCheck, run_threads
from stagelink.transport.contract import Link, Message
from stagelink.transport.header import Header, MessageKind
from stagelink_cupy.holding import Holding
from stagelink_cupy.notes import Piece, returned
from stagelink_cupy.receiver import CupyReceiver
from stagelink_cupy.region import SLOTS, Region
from stagelink_cupy.sender import CupySender
from tests.cupy import driving
from tests.cupy.codes import Status
from tests.cupy.double import CudaDouble
from tests.cupy.driving import LITTLE, SLOT_BYTES, connected, held_bytes, options
from tests.cupy.machine import DoubleConfig, Gpu
from tests.cupy.on_double import DoubleStream, on_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import Store

    from stagelink.testing import RankPool
    from stagelink.transport.blocking import Finisher
    from stagelink.transport.contract import Port

LINK = Link(0, 1, "cupy", "cpu")
SOON_S = 10.0
AT_ONCE_S = 0.05


class Alone:
    """What `stagelink.transport.contract.Port` asks for, without a peer.

    Attributes:
        notes: what was sent.
        fds: what was sent along.
        failure: what was reported.
        while_waiting: called again and again in a wait.
        closed: whether nobody waits any more.
    """

    link = LINK
    rank, peer = 0, 1

    def __init__(self, rt: CudaDouble) -> None:
        self.stream = DoubleStream(rt)
        self.notes: list[bytes] = []
        self.fds: list[int] = []
        self.failure: BaseException | None = None
        self.while_waiting: Callable[[], None] = lambda: None
        self.closed = False

    def note(self, note: bytes, fds: Sequence[int] = ()) -> None:
        self.notes.append(note)
        self.fds += map(os.dup, fds)

    def fail(self, error: BaseException) -> None:
        self.failure = error

    def wake(self) -> None:
        """Nobody waits in another thread."""

    def wait(self, ready: Callable[[], bool], deadline: Deadline | None = None) -> bool:
        while not ready():
            if deadline is not None and deadline.passed:
                return False
            self.while_waiting()
            self.pause(0)
        return True

    def pause(self, seconds: float) -> None:
        if self.closed:
            raise ClosedError("the test is over")
        time.sleep(seconds)

    @property
    def pieces(self) -> list[Piece]:
        return [Piece.unpack(note) for note in self.notes]


class Told:
    """What a message's `stagelink.transport.contract.Done` is told."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._error: BaseException | None = None

    def __call__(self, payload: torch.Tensor | None = None) -> None:
        assert payload is None
        self._event.set()

    def failed(self, error: BaseException) -> None:
        self._error = error
        self._event.set()

    def within(self, seconds: float) -> bool:
        """Whether the message is done by then; raises what it has failed with."""
        told = self._event.wait(seconds)
        if self._error is not None:
            raise self._error
        return told


@contextmanager
def held(finisher: Finisher) -> Iterator[None]:
    """Have nothing waited for as long as the block takes."""
    jobs: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finisher, "submit", lambda *job: jobs.append(job))
        yield
    for job in jobs:
        finisher.submit(*job)


@pytest.fixture
def rt() -> Iterator[CudaDouble]:
    with CudaDouble(DoubleConfig(delay_s=0.0002)) as rt:
        yield rt
        DoubleStream.streams.pop((rt, 0), None)


@pytest.fixture(params=[False, True], ids=["host", "device"])
def device_ordered(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def port(rt: CudaDouble) -> Alone:
    return Alone(rt)


@pytest.fixture
def region(rt: CudaDouble, port: Alone, device_ordered: bool) -> Region:
    """Of this process's own memory, for either end: nobody can tell."""
    region = Region(rt, 0, port.stream.handle, LITTLE)
    region.allocate()
    if device_ordered:
        region.make_events()
    return region


@pytest.fixture
def sender(port: Alone, region: Region) -> Iterator[CupySender]:
    sender = CupySender(cast("Port", port), Holding(cast("Port", port), region))
    yield sender
    port.closed = True
    sender._finisher.close(Deadline(SOON_S))


@pytest.fixture
def receiver(port: Alone, region: Region) -> Iterator[CupyReceiver]:
    receiver = CupyReceiver(cast("Port", port), Holding(cast("Port", port), region))
    yield receiver
    port.closed = True
    receiver._finisher.close(Deadline(SOON_S))


def filled(size: int, number: int) -> torch.Tensor:
    return torch.full((size,), number, dtype=torch.uint8)


def begin(sender: CupySender, payload: torch.Tensor) -> Told:
    announced: list[bytes] = []
    header = Header(MessageKind.DATA, payload_bytes=payload.numel())

    def announce(note: bytes = b"", fds: Sequence[int] = ()) -> None:
        assert not sender_notes(sender)[before:]
        announced.append(note)

    before = len(sender_notes(sender))
    told = Told()
    assert sender.begin(Message(header, payload), announce, told)
    assert announced == [b""]
    return told


def sender_notes(sender: CupySender) -> list[bytes]:
    return cast("Alone", sender.port).notes


def look(region: Region, slot: int, size: int) -> torch.Tensor:
    seen = filled(size, 0)
    region._rt.memcpy(seen.data_ptr(), region.address(slot), size, region._rt.memcpyDefault)
    return seen


# -- the sender ----------------------------------------------------------------------------------


def test_a_message_in_one_slot(sender: CupySender, region: Region, port: Alone) -> None:
    with held(sender._finisher):
        told = begin(sender, filled(1000, 7))
        assert port.notes == []
    assert told.within(SOON_S)
    (piece,) = port.pieces
    assert piece.size_bytes == 1000
    assert torch.equal(look(region, piece.slot, 1000), filled(1000, 7))


def test_an_empty_one_takes_no_slot(sender: CupySender, port: Alone) -> None:
    assert begin(sender, filled(0, 0)).within(SOON_S)
    assert port.notes == []


def test_what_is_told_before_it_is_copied(
    rt: CudaDouble, sender: CupySender, port: Alone, device_ordered: bool
) -> None:
    rt.pause()
    told = begin(sender, filled(2 * SLOT_BYTES, 7))
    assert not told.within(AT_ONCE_S)  # in no case is it done
    assert len(port.notes) == (2 if device_ordered else 0)
    rt.resume()
    rt.deviceSynchronize()  # as long as the tensors are there


def test_two_copies_at_most_are_queued_ahead(
    rt: CudaDouble, sender: CupySender, monkeypatch: pytest.MonkeyPatch, device_ordered: bool
) -> None:
    copies: list[int] = []
    copy = rt.memcpyAsync

    def count(*args: int) -> None:
        copies.append(1)
        copy(*args)

    monkeypatch.setattr(rt, "memcpyAsync", count)
    rt.pause()
    with held(sender._finisher):
        told = [begin(sender, filled(3 * SLOT_BYTES, 7)) for _ in range(2)]
        assert len(copies) == 2  # one of each message, before anybody finishes
    assert not told[0].within(AT_ONCE_S)
    assert len(copies) == (4 if device_ordered else 3)
    rt.resume()
    rt.deviceSynchronize()  # as long as the tensors are there


def test_a_message_waits_for_slots(sender: CupySender, port: Alone) -> None:
    homes: deque[int] = deque()
    seen = 0

    def read() -> None:
        nonlocal seen
        homes.extend(piece.slot for piece in port.pieces[seen:])
        seen = len(port.notes)
        if homes:
            sender.on_note(returned(homes.popleft()), ())

    port.while_waiting = read
    assert begin(sender, filled(20 * SLOT_BYTES, 7)).within(SOON_S)
    assert len(port.notes) == 20
    assert {piece.slot for piece in port.pieces} <= set(range(SLOTS))


def test_no_slot_comes_home(sender: CupySender, port: Alone) -> None:
    assert not begin(sender, filled(LITTLE + 1, 7)).within(AT_ONCE_S)
    assert len(port.notes) == SLOTS


@pytest.mark.parametrize(
    ("note", "text"),
    [(b"xyz", "a note of 3 bytes"), (struct.pack("<I", 3), "slot 3 was returned and was not out")],
)
def test_a_note_that_does_not_fit_fails_the_link(
    sender: CupySender, port: Alone, note: bytes, text: str
) -> None:
    sender.on_note(note, ())
    assert text in str(port.failure)


# -- the receiver --------------------------------------------------------------------------------


def put(region: Region, slot: int, payload: torch.Tensor) -> bytes:
    """Fill a slot; the note that says so."""
    rt, size = region._rt, payload.numel()
    rt.memcpy(region.address(slot), payload.data_ptr(), size, rt.memcpyDefault)
    rt.deviceSynchronize()
    return Piece(slot, size).pack()


def begin_receiving(receiver: CupyReceiver, size: int) -> tuple[Told, torch.Tensor]:
    told, buffer = Told(), filled(size, 0)
    header = Header(MessageKind.DATA, payload_bytes=size)
    receiver.begin(header, b"", (), lambda: buffer, told)
    return told, buffer


def test_pieces_before_and_after_their_message(receiver: CupyReceiver, region: Region) -> None:
    receiver.on_note(put(region, 3, filled(SLOT_BYTES, 1)), ())
    first, one = begin_receiving(receiver, SLOT_BYTES + 5)
    second, other = begin_receiving(receiver, 100)
    receiver.on_note(put(region, 0, filled(5, 2)), ())
    receiver.on_note(put(region, 1, filled(100, 3)), ())
    assert first.within(SOON_S)
    assert second.within(SOON_S)
    assert torch.equal(one, torch.cat([filled(SLOT_BYTES, 1), filled(5, 2)]))
    assert torch.equal(other, filled(100, 3))
    assert cast("Alone", receiver.port).notes == [returned(slot) for slot in (3, 0, 1)]
    assert begin_receiving(receiver, 0)[0].within(SOON_S)


def test_what_is_free_before_it_is_read(
    rt: CudaDouble, receiver: CupyReceiver, region: Region, port: Alone, device_ordered: bool
) -> None:
    note = put(region, 0, filled(100, 1))
    rt.pause()
    told, buffer = begin_receiving(receiver, 100)
    receiver.on_note(note, ())
    assert not told.within(AT_ONCE_S)  # in no case is the message there
    assert len(port.notes) == (1 if device_ordered else 0)
    rt.resume()
    rt.deviceSynchronize()  # as long as the tensors are there
    assert torch.equal(buffer, filled(100, 1))


def test_a_piece_that_does_not_come(receiver: CupyReceiver) -> None:
    told, _ = begin_receiving(receiver, 100)
    assert not told.within(AT_ONCE_S)


@pytest.mark.parametrize("piece", [Piece(SLOTS, 100), Piece(0, 99), Piece(0, 101)])
def test_a_piece_that_does_not_fit(receiver: CupyReceiver, piece: Piece) -> None:
    told, _ = begin_receiving(receiver, 100)
    receiver.on_note(piece.pack(), ())
    with pytest.raises(ValueError, match=rf"slot {piece.slot} came with {piece.size_bytes} bytes"):
        told.within(SOON_S)


def test_a_damaged_note_fails_the_link(receiver: CupyReceiver, port: Alone) -> None:
    receiver.on_note(b"xyz", ())
    assert "a note of 3 bytes, not 12" in str(port.failure)


def test_an_error_of_the_device_is_told_by_its_name(rt: CudaDouble, sender: CupySender) -> None:
    rt.pause()
    told = begin(sender, filled(1000, 7))
    rt.fail(Status.cudaErrorIllegalAddress)
    with pytest.raises(rt.CUDARuntimeError, match="cudaErrorIllegalAddress: an illegal memory"):
        told.within(SOON_S)


# -- one end, and what the other says ------------------------------------------------------------


@pytest.fixture
def lent(port: Alone, region: Region) -> Holding:
    """Memory that a twin has opened."""
    holding = Holding(cast("Port", port), region)
    region.exported = True
    holding.call_twin()
    return holding


def test_memory_is_freed_when_the_twin_says_so(rt: CudaDouble, port: Alone, lent: Holding) -> None:
    twin = Holding(cast("Port", port), Region(rt, 0, port.stream.handle, LITTLE))
    twin.answer(port.fds.pop())
    twin.close(Deadline(SOON_S))
    twin.give_back(Deadline(SOON_S))
    lent.close(Deadline(SOON_S))
    lent.give_back(Deadline(float("inf")))
    assert held_bytes(rt) == 0


def test_memory_of_a_twin_that_dies_is_left(
    rt: CudaDouble, port: Alone, lent: Holding, caplog: pytest.LogCaptureFixture
) -> None:
    os.close(port.fds.pop())
    lent.give_back(Deadline(float("inf")))
    assert held_bytes(rt) == LITTLE
    assert "rank 0 leaves its device memory to the end of its process" in caplog.text


def test_memory_of_a_twin_that_says_nothing_is_left(
    rt: CudaDouble, port: Alone, lent: Holding
) -> None:
    lent.give_back(Deadline(AT_ONCE_S))
    assert held_bytes(rt) == LITTLE
    os.close(port.fds.pop())


def test_memory_is_left_where_to_free_it_would_take_too_long(
    rt: CudaDouble, port: Alone, lent: Holding
) -> None:
    twin = Holding(cast("Port", port), Region(rt, 0, port.stream.handle, LITTLE))
    twin.answer(port.fds.pop())
    twin.close(Deadline(SOON_S))
    twin.give_back(Deadline(SOON_S))
    rt.pause()
    lent.give_back(Deadline(AT_ONCE_S))
    assert held_bytes(rt) == LITTLE


# -- how they meet -------------------------------------------------------------------------------


def _ends(
    rank: int,
    world_size: int,
    store: Store,
    configs: dict[int, DoubleConfig],
    given: dict[str, Any],
    case: Callable[[Any, CudaDouble], Any] | None,
) -> tuple[str, int]:
    """How a rank ended, and how much device memory was left by then."""
    check = LeakCheck("threads", "descriptors", "shared mappings")
    text = "fine"
    with on_device(configs.get(rank, DoubleConfig()), rank) as rt:
        try:
            with connected(rank, world_size, store, given) as comm:
                if case is not None:
                    case(comm, rt)
        except StagelinkError as error:
            text = f"{type(error).__name__}: {error}"
        assert rt.undefined == []
        left = held_bytes(rt) if not rt._progress.error else -1
    check.verify()
    return text, left


def meet(
    pool: RankPool,
    configs: dict[int, DoubleConfig],
    given: dict[str, Any] | None = None,
    case: Callable[[Any, CudaDouble], Any] | None = None,
) -> list[tuple[str, int]]:
    return pool.run(_ends, 2, configs, given or options(device_ordered=True), case)


def failing(**status: int) -> DoubleConfig:
    return DoubleConfig(fails=status)


def test_no_memory_for_the_region(rank_pool: RankPool) -> None:
    ends = meet(rank_pool, {0: failing(malloc=Status.cudaErrorMemoryAllocation)})
    assert all("cudaErrorMemoryAllocation: out of memory" in text for text, _ in ends)
    assert "rank 0 cannot open its links with rank 1" in ends[0][0]
    assert [left for _, left in ends] == [0, 0]


def test_memory_that_cannot_be_exported(rank_pool: RankPool) -> None:
    # The memory that was allocated is given back: nobody knows of it.
    ends = meet(rank_pool, {0: failing(ipcGetMemHandle=Status.cudaErrorInvalidValue)})
    assert all("cudaErrorInvalidValue" in text for text, _ in ends)
    assert [left for _, left in ends] == [0, 0]


@pytest.mark.parametrize("function", ["ipcOpenMemHandle", "ipcOpenEventHandle"])
def test_what_cannot_be_opened(rank_pool: RankPool, function: str) -> None:
    status = Status.cudaErrorPeerAccessUnsupported
    ends = meet(rank_pool, {1: failing(**{function: status})})
    for text, left in ends:
        assert "rank 1 cannot use the device memory of rank 0: cudaErrorPeerAccess" in text
        assert left == 0  # the receiver said that it has nothing open


def _read_other_bytes(
    rank: int, world_size: int, store: Store, given: dict[str, Any]
) -> tuple[str, int]:
    copy = Region.copy

    def copy_nothing(self: Region, slot: int, target: int, source: int, size: int) -> None:
        copy(self, slot, target, source, 0 if self._opened_memory else size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Region, "copy", copy_nothing)
        return _ends(rank, world_size, store, {}, given, None)


def test_a_first_piece_that_does_not_arrive(rank_pool: RankPool, device_ordered: bool) -> None:
    given = options(device_ordered=device_ordered)
    for text, left in rank_pool.run(_read_other_bytes, 2, given):
        assert "rank 1 cannot use the device memory of rank 0: it does not hold what was" in text
        assert left == 0


@pytest.mark.parametrize("seed", range(2))
def test_a_first_piece_that_takes_its_time(
    rank_pool: RankPool, device_ordered: bool, seed: int
) -> None:
    given = options(device_ordered=device_ordered)
    ends = meet(rank_pool, {0: DoubleConfig(seed=seed, delay_s=0.1)}, given)
    assert ends == [("fine", 0)] * 2


def test_one_process_is_refused() -> None:
    with pytest.raises(StagelinkError, match="needs the ranks in two processes"):
        run_threads(_connect, 2)


def _connect(rank: int, world_size: int, store: Store) -> None:
    connected(rank, world_size, store, {}).close()


# -- how they part -------------------------------------------------------------------------------


def test_all_memory_is_given_back(rank_pool: RankPool, device_ordered: bool) -> None:
    given = options(device_ordered=device_ordered)
    assert meet(rank_pool, {}, given, _exchange_once) == [("fine", 0)] * 2


def _on_gpu(
    rank: int, world_size: int, store: Store, numbers: Sequence[int], given: dict[str, Any]
) -> int:
    config = DoubleConfig(gpus=(Gpu.numbered(1), Gpu.numbered(2)))
    with on_device(config, rank, numbers[rank]) as rt:
        with connected(rank, world_size, store, given) as comm:
            wrong = driving.exchange(comm)
            assert [held_bytes(rt, number) for number in (0, 1)] == [
                LITTLE * (number == numbers[rank]) for number in (0, 1)
            ]
            rt.setDevice(0)
        assert rt.undefined == []
        assert [held_bytes(rt, number) for number in (0, 1)] == [0, 0]
    return wrong


@pytest.mark.parametrize("numbers", [(1, 1), (0, 1)])
def test_another_gpu_than_the_first(
    rank_pool: RankPool, numbers: tuple[int, int], device_ordered: bool
) -> None:
    """Which is the one that is current for CuPy on every new thread."""
    given = options(device_ordered=device_ordered)
    assert rank_pool.run(_on_gpu, 2, numbers, given) == [0, 0]


def _exchange_once(comm: Any, rt: CudaDouble) -> None:
    assert held_bytes(rt) == LITTLE
    assert driving.held_events(rt) in (0, 4 * SLOTS)  # two links, at each an end's and its twin's
    assert driving.exchange(comm) == 0


def test_a_device_that_fails_fails_the_pipeline(rank_pool: RankPool) -> None:
    (sender, _), (receiver, left) = meet(rank_pool, {}, None, _fail_in_the_middle)
    assert sender.startswith("TransportError: ")
    assert "cudaErrorLaunchFailure: unspecified launch failure" in sender
    assert receiver.startswith("AbortedError: rank 0 reports: ")
    assert "cudaErrorLaunchFailure" in receiver
    assert left == LITTLE


def _fail_in_the_middle(comm: Any, rt: CudaDouble) -> None:
    with comm.evaluate(100) as session:
        for number in range(100):
            if number == 10 and comm.rank == 0:
                rt.fail(Status.cudaErrorLaunchFailure)
            if comm.rank == 0:
                session.send("e0", driving.value(number), number)
            else:
                session.recv("e0", number)


def test_after_a_failure_nothing_is_freed(rank_pool: RankPool) -> None:
    for text, left in meet(rank_pool, {}, None, _give_up):
        assert "for a test" in text
        assert left == LITTLE


def _give_up(comm: Any, rt: CudaDouble) -> None:
    if comm.rank == 0:
        comm.abort(RuntimeError("for a test"))
    comm.reduce([0.0])


def test_a_device_that_does_not_come_to_rest(rank_pool: RankPool) -> None:
    """Nothing is freed while it may be read, and close does not wait for ever."""
    began = time.monotonic()
    assert meet(rank_pool, {}, None, _close_at_work) == [("fine", LITTLE)] * 2
    assert time.monotonic() - began < SOON_S


def _close_at_work(comm: Any, rt: CudaDouble) -> None:
    comm.reduce([0.0])
    rt.pause()
    comm.close(0.5)
