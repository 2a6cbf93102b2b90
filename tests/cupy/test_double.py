"""The double does what CUDA promises, no more, and is seen through by who breaks a rule."""

from __future__ import annotations

import os
import pickle
import threading
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

import pytest
import torch

from stagelink.testing import LeakCheck, report, run_fresh
from tests.cupy.codes import CUDARuntimeError, Status
from tests.cupy.double import CudaDouble
from tests.cupy.machine import DoubleConfig, Gpu
from tests.cupy.memory import POISON, Handle
from tests.cupy.ring import RULES, pass_messages, pass_over, pipe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from torch.distributed import Store

    from stagelink.testing import RankPool

SIZE = 4096
IPC = CudaDouble.eventInterprocess | CudaDouble.eventDisableTiming
ONE, OTHER = Gpu.numbered(1), Gpu.numbered(2)
QUICK = DoubleConfig(delay_s=0.0002)


@pytest.fixture
def rt() -> Iterator[CudaDouble]:
    with CudaDouble(QUICK) as rt:
        yield rt


def filled(value: int) -> torch.Tensor:
    return torch.full((SIZE,), value, dtype=torch.uint8)


def copy(rt: CudaDouble, target: int, source: int, stream: int = 0) -> None:
    rt.memcpyAsync(target, source, SIZE, rt.memcpyDeviceToDevice, stream)


def look(rt: CudaDouble, pointer: int) -> set[int]:
    """The values that are there."""
    seen = filled(0)
    rt.memcpy(seen.data_ptr(), pointer, SIZE, rt.memcpyDeviceToHost)
    return set(seen.tolist())


def put(rt: CudaDouble, pointer: int, value: int) -> None:
    source = filled(value)
    rt.memcpy(pointer, source.data_ptr(), SIZE, rt.memcpyHostToDevice)


def two_streams(rt: CudaDouble) -> tuple[int, int]:
    return (
        rt.streamCreateWithFlags(rt.streamNonBlocking),
        rt.streamCreateWithFlags(rt.streamDefault),
    )


def status_of(call: Callable[[], object]) -> int:
    """The status that a call fails with."""
    with pytest.raises(CUDARuntimeError) as caught:
        call()
    return caught.value.status


# -- the rules of a ring -------------------------------------------------------------------------


def test_a_ring_that_keeps_all_rules_loses_nothing(rank_pool: RankPool) -> None:
    wrong = rank_pool.run(pass_messages, 2, range(12), None)[1]
    assert wrong == [0] * 12


@pytest.mark.parametrize("rule", RULES)
def test_a_ring_that_breaks_a_rule_is_seen_through(rank_pool: RankPool, rule: str) -> None:
    wrong = rank_pool.run(pass_messages, 2, range(6), rule)[1]
    assert sum(wrong) > 0, wrong


# -- events and streams --------------------------------------------------------------------------


def test_a_record_counts_from_its_call(rt: CudaDouble) -> None:
    stream, _ = two_streams(rt)
    event = rt.eventCreateWithFlags(rt.eventDisableTiming)
    rt.pause()
    rt.eventRecord(event, stream)
    assert (rt.eventQuery(event), rt.streamQuery(stream)) == (600, 600)
    rt.resume()
    rt.eventSynchronize(event)
    rt.streamSynchronize(stream)
    assert (rt.eventQuery(event), rt.streamQuery(stream)) == (0, 0)


def test_a_wait_is_for_the_latest_record_before_its_call(rt: CudaDouble) -> None:
    stream, late = two_streams(rt)
    event = rt.eventCreateWithFlags(rt.eventDefault)
    source, target = filled(7), filled(0)
    rt.pause()
    copy(rt, target.data_ptr(), source.data_ptr(), late)
    rt.eventRecord(event, late)
    rt.streamWaitEvent(stream, event)
    rt.resume(stream)
    assert rt.streamQuery(stream) == 600
    rt.resume(late)
    rt.streamSynchronize(stream)
    assert bool((target == 7).all())


def test_a_wait_is_not_for_a_later_record(rt: CudaDouble) -> None:
    stream, late = two_streams(rt)
    event = rt.eventCreateWithFlags(rt.eventDisableTiming)
    rt.eventRecord(event, stream)
    rt.streamSynchronize(stream)
    rt.pause(late)
    rt.streamWaitEvent(stream, event)
    rt.eventRecord(event, late)
    rt.streamSynchronize(stream)
    assert rt.eventQuery(event) == 600  # the later record took the place of the first


def test_of_two_records_under_way_the_latest_counts(rt: CudaDouble) -> None:
    stream, late = two_streams(rt)
    event = rt.eventCreateWithFlags(rt.eventDisableTiming)
    rt.pause(late)
    rt.eventRecord(event, late)
    rt.eventRecord(event, stream)
    rt.eventSynchronize(event)
    assert (rt.eventQuery(event), rt.streamQuery(late)) == (0, 600)


def test_an_event_that_was_never_recorded_holds_nobody_up(rt: CudaDouble) -> None:
    event = rt.eventCreateWithFlags(rt.eventBlockingSync)
    rt.streamWaitEvent(0, event)
    rt.streamSynchronize(0)
    rt.eventSynchronize(event)
    assert rt.eventQuery(event) == 0


def test_a_stream_that_is_destroyed_does_its_work_first(rt: CudaDouble) -> None:
    stream, _ = two_streams(rt)
    source, target = filled(3), filled(0)
    event = rt.eventCreateWithFlags(rt.eventDisableTiming)
    rt.pause(stream)
    copy(rt, target.data_ptr(), source.data_ptr(), stream)
    rt.eventRecord(event, stream)
    rt.streamDestroy(stream)
    rt.eventSynchronize(event)
    assert bool((target == 3).all())
    assert rt.streamQuery(stream) == 400


def test_events_are_many_and_come_out_clean(rt: CudaDouble) -> None:
    rt.pause()
    event = rt.eventCreateWithFlags(rt.eventDisableTiming)
    rt.eventRecord(event, 0)
    rt.eventDestroy(event)  # before its record is done
    events: list[int] = []
    with suppress(CUDARuntimeError):
        while True:
            events.append(rt.eventCreateWithFlags(rt.eventDisableTiming))
    assert len(events) == 4095
    assert {rt.eventQuery(event) for event in events} == {0}
    rt.resume()
    rt.streamSynchronize(0)
    assert rt.eventQuery(rt.eventCreateWithFlags(rt.eventDisableTiming)) == 0
    assert status_of(lambda: rt.eventCreateWithFlags(2)) == Status.cudaErrorMemoryAllocation


def test_handles_are_of_one_kind(rt: CudaDouble) -> None:
    stream, _ = two_streams(rt)
    event = rt.eventCreateWithFlags(IPC)
    assert rt.eventQuery(stream) == rt.streamQuery(event) == 400
    assert status_of(lambda: rt.streamWaitEvent(event, stream)) == 400
    assert status_of(lambda: rt.streamDestroy(0)) == 400
    rt.eventDestroy(event)
    assert rt.eventQuery(event) == 400


@pytest.mark.parametrize("flags", [CudaDouble.eventInterprocess, 8, -1])
def test_flags_of_events(rt: CudaDouble, flags: int) -> None:
    assert status_of(lambda: rt.eventCreateWithFlags(flags)) == 1


def test_flags_of_streams(rt: CudaDouble) -> None:
    assert status_of(lambda: rt.streamCreateWithFlags(2)) == 1
    assert status_of(lambda: rt.streamWaitEvent(0, rt.eventCreateWithFlags(0), 1)) == 1


def test_delays_are_those_of_the_seed() -> None:
    def draws(seed: int, place: int) -> list[float]:
        with CudaDouble(DoubleConfig(seed=seed), place) as rt:
            rt.streamSynchronize(0)
            return [rt._streams[0]._random.random() for _ in range(5)]

    assert draws(1, 0) == draws(1, 0)
    assert draws(1, 0) != draws(2, 0)
    assert draws(1, 0) != draws(1, 1)


# -- memory --------------------------------------------------------------------------------------


def test_streams_keep_their_order(rt: CudaDouble) -> None:
    stream, _ = two_streams(rt)
    pointer = rt.malloc(SIZE)
    for value in range(20):
        rt.memsetAsync(pointer, value, SIZE, stream)
    rt.streamSynchronize(stream)
    assert look(rt, pointer) == {19}


def test_a_copy_within_the_gpu_does_not_wait(rt: CudaDouble) -> None:
    one, other = rt.malloc(SIZE), rt.malloc(SIZE)
    put(rt, one, 5)
    rt.pause()
    rt.memcpy(other, one, SIZE, rt.memcpyDeviceToDevice)
    assert rt.streamQuery(0) == 600
    rt.resume()
    rt.deviceSynchronize()
    assert look(rt, other) == {5}


def test_memory_has_an_end(rt: CudaDouble) -> None:
    free, total = rt.memGetInfo()
    assert free == total == 1 << 30
    pointer = rt.malloc(SIZE)
    assert rt.memGetInfo() == (total - SIZE, total)
    assert status_of(lambda: rt.malloc(total)) == Status.cudaErrorMemoryAllocation
    rt.free(pointer)
    assert rt.memGetInfo() == (total, total)
    assert rt.malloc(0) == 0
    rt.free(0)


def test_what_a_copy_is_refused_for(rt: CudaDouble) -> None:
    pointer, target = rt.malloc(SIZE), filled(0).data_ptr()
    assert status_of(lambda: copy(rt, target, pointer + 1)) == 1
    assert status_of(lambda: copy(rt, pointer + 1, target)) == 1
    assert status_of(lambda: copy(rt, 0, pointer)) == 1
    assert status_of(lambda: rt.memsetAsync(pointer + 1, 0, SIZE, 0)) == 1
    assert status_of(lambda: rt.memcpy(target, pointer, SIZE, 5)) == 1
    rt.memcpy(0, 0, 0, rt.memcpyDefault)


def test_what_can_be_freed(rt: CudaDouble) -> None:
    pointer = rt.malloc(SIZE)
    assert status_of(lambda: rt.free(pointer + 1)) == 1
    assert status_of(lambda: rt.ipcCloseMemHandle(pointer)) == 1
    rt.free(pointer)
    assert status_of(lambda: rt.free(pointer)) == 1


def test_free_waits_for_all_work(rt: CudaDouble) -> None:
    stream, _ = two_streams(rt)
    pointer, target = rt.malloc(SIZE), filled(0)
    put(rt, pointer, 9)
    copy(rt, target.data_ptr(), pointer, stream)
    rt.free(pointer)
    assert bool((target == 9).all())


def test_a_copy_from_freed_memory_is_an_error_that_stays(rt: CudaDouble) -> None:
    pointer, target = rt.malloc(SIZE), filled(0)
    event = rt.eventCreateWithFlags(IPC)
    rt.free(pointer)
    copy(rt, target.data_ptr(), pointer)
    assert status_of(lambda: rt.streamSynchronize(0)) == Status.cudaErrorIllegalAddress
    everything_reports(rt, event, Status.cudaErrorIllegalAddress)


def everything_reports(rt: CudaDouble, event: int, status: int) -> None:
    assert rt.eventQuery(event) == rt.streamQuery(0) == status
    assert status_of(lambda: rt.malloc(1)) == status
    assert status_of(lambda: rt.eventRecord(event, 0)) == status
    assert status_of(lambda: rt.ipcGetEventHandle(event)) == status
    assert status_of(rt.getDeviceCount) == status


# -- errors and the end --------------------------------------------------------------------------


def test_an_error_can_be_had(rt: CudaDouble) -> None:
    event = rt.eventCreateWithFlags(IPC)
    rt.fail(Status.cudaErrorLaunchFailure)
    everything_reports(rt, event, 719)


def test_a_function_can_be_made_to_fail() -> None:
    with CudaDouble(DoubleConfig(fails={"malloc": 2, "eventQuery": 999})) as rt:
        assert status_of(lambda: rt.malloc(1)) == 2
        assert rt.eventQuery(rt.eventCreateWithFlags(IPC)) == 999


WAITS: dict[str, Callable[[CudaDouble, int, int], None]] = {
    "stream": lambda rt, event, pointer: rt.streamSynchronize(0),
    "event": lambda rt, event, pointer: rt.eventSynchronize(event),
    "device": lambda rt, event, pointer: rt.deviceSynchronize(),
    "free": lambda rt, event, pointer: rt.free(pointer),
    "copy": lambda rt, event, pointer: put(rt, pointer, 1),
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("status", [4, 719])
def test_the_end_ends_whoever_waits(wait: str, status: int) -> None:
    seen: list[int] = []
    with CudaDouble(QUICK) as rt:
        event, pointer = rt.eventCreateWithFlags(IPC), rt.malloc(SIZE)
        rt.pause()
        rt.eventRecord(event, 0)
        waiter = threading.Thread(
            target=lambda: seen.append(status_of(lambda: WAITS[wait](rt, event, pointer)))
        )
        waiter.start()
        if status == 719:
            rt.fail(status)
            waiter.join()
    waiter.join()
    assert seen == [status]


def test_after_the_end_nothing_is_left_and_nothing_goes() -> None:
    check = LeakCheck("threads", "descriptors", "shared mappings")
    with CudaDouble(QUICK) as rt:
        stream, other = two_streams(rt)
        event, pointer = rt.eventCreateWithFlags(IPC), rt.malloc(SIZE)
        rt.ipcGetMemHandle(pointer)
        rt.free(rt.malloc(SIZE))
        rt.pause(other)
        rt.eventRecord(event, other)
        rt.streamWaitEvent(stream, event)
    check.verify()
    assert rt.eventQuery(event) == 4
    assert status_of(lambda: rt.malloc(1)) == 4
    rt.close()


def test_a_fork_has_no_cuda(rt: CudaDouble) -> None:
    child = os.fork()
    if child == 0:
        status = 0
        with suppress(BaseException):
            status = status_of(lambda: rt.malloc(1))
            rt.close()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert rt.malloc(1)


def test_what_travels_to_other_processes() -> None:
    config = DoubleConfig((ONE,), denied=frozenset({(ONE, OTHER)}), fails={"malloc": 2})
    assert pickle.loads(pickle.dumps(config)) == config
    error = pickle.loads(pickle.dumps(CUDARuntimeError(217)))
    assert error.status == 217
    assert str(error).startswith("cudaErrorPeerAccessUnsupported: peer access")


# -- devices -------------------------------------------------------------------------------------


def test_devices_are_known_by_their_bus_and_uuid() -> None:
    with CudaDouble(DoubleConfig((OTHER, ONE))) as rt:
        assert rt.getDeviceCount() == 2
        assert rt.deviceGetPCIBusId(1) == ONE.pci_bus_id == "0000:02:00.0"
        properties = rt.getDeviceProperties(0)
        assert properties["uuid"] == OTHER.uuid
        assert properties["name"] == b"Double"
        assert status_of(lambda: rt.getDeviceProperties(2)) == Status.cudaErrorInvalidDevice


@pytest.mark.parametrize(
    ("uuid", "seen"),
    [
        (b"0123456789abcdef", b"0123456789abcdefLUID"),
        (b"0123\x00456789abcde", b"0123"),
        (bytes(16), b""),
    ],
)
def test_a_uuid_is_taken_for_a_string(uuid: bytes, seen: bytes) -> None:
    with CudaDouble(DoubleConfig((Gpu(uuid, "0000:01:00.0", luid=b"LUID\0\0\0\0"),))) as rt:
        assert rt.getDeviceProperties(0)["uuid"] == seen


def test_access_is_one_way_and_not_to_oneself() -> None:
    config = DoubleConfig((ONE, OTHER), denied=frozenset({(ONE, OTHER)}))
    with CudaDouble(config) as rt:
        assert [rt.deviceCanAccessPeer(*pair) for pair in ((0, 0), (0, 1), (1, 0))] == [0, 0, 1]


def test_each_thread_has_its_device() -> None:
    with CudaDouble(DoubleConfig((ONE, OTHER))) as rt:
        rt.setDevice(1)
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(rt.getDevice()))
        thread.start()
        thread.join()
        assert (seen, rt.getDevice()) == ([0], 1)
        assert status_of(lambda: rt.setDevice(2)) == Status.cudaErrorInvalidDevice


def test_an_event_is_recorded_where_it_is() -> None:
    with CudaDouble(DoubleConfig((ONE, OTHER), delay_s=0)) as rt:
        event, stream = rt.eventCreateWithFlags(IPC), rt.streamCreateWithFlags(1)
        rt.setDevice(1)
        away = rt.streamCreateWithFlags(1)
        assert status_of(lambda: rt.eventRecord(event, away)) == 400
        assert status_of(lambda: rt.eventRecord(event, 0)) == 400  # it is the other one's now
        rt.eventRecord(event, stream)
        rt.streamWaitEvent(away, event)
        rt.streamSynchronize(away)


def test_no_gpu_and_no_driver() -> None:
    with CudaDouble(DoubleConfig(gpus=())) as rt:
        assert status_of(rt.getDeviceCount) == Status.cudaErrorNoDevice
        assert status_of(lambda: rt.malloc(1)) == Status.cudaErrorInvalidDevice
    with CudaDouble(DoubleConfig(driver_version=0)) as rt:
        assert (rt.driverGetVersion(), rt.runtimeGetVersion()) == (0, 12090)
        assert status_of(rt.getDeviceCount) == rt.eventQuery(0) == 35


# -- handles -------------------------------------------------------------------------------------


def test_a_handle_is_of_the_whole_allocation(rt: CudaDouble) -> None:
    pointer = rt.malloc(SIZE)
    handle = rt.ipcGetMemHandle(pointer)
    assert rt.ipcGetMemHandle(pointer + 100) == handle
    assert len(handle) == 64
    assert status_of(lambda: rt.ipcGetMemHandle(filled(0).data_ptr())) == 1


def test_a_handle_is_for_others(rt: CudaDouble) -> None:
    memory = rt.ipcGetMemHandle(rt.malloc(SIZE))
    event = rt.ipcGetEventHandle(rt.eventCreateWithFlags(IPC))
    assert status_of(lambda: rt.ipcOpenMemHandle(memory)) == 201
    assert status_of(lambda: rt.ipcOpenEventHandle(event)) == 201


def test_only_some_events_have_handles(rt: CudaDouble) -> None:
    event = rt.eventCreateWithFlags(rt.eventDisableTiming)
    assert status_of(lambda: rt.ipcGetEventHandle(event)) == 400


def test_what_is_no_handle(rt: CudaDouble) -> None:
    event = rt.ipcGetEventHandle(rt.eventCreateWithFlags(IPC))
    assert status_of(lambda: rt.ipcOpenMemHandle(event)) == 400
    assert status_of(lambda: rt.ipcOpenEventHandle(bytes(64))) == 400
    with pytest.raises(IndexError, match="63 values"):
        rt.ipcOpenMemHandle(event[:63])
    with pytest.raises(TypeError, match="expected bytes, got str"):
        rt.ipcOpenEventHandle("handle")  # type: ignore[arg-type]


# -- two processes -------------------------------------------------------------------------------


def _import_memory(rt: CudaDouble, other: Connection) -> int:
    return rt.ipcOpenMemHandle(other.recv())


def _export_memory(rt: CudaDouble, other: Connection, value: int) -> int:
    pointer = rt.malloc(SIZE)
    put(rt, pointer, value)
    other.send(rt.ipcGetMemHandle(pointer))
    return pointer


def opens_twice(rank: int, world_size: int, store: Store) -> None:
    with pipe(rank, store) as other, CudaDouble(QUICK, rank) as rt:
        if rank == 0:
            pointer = _export_memory(rt, other, 42)
            other.recv()
            assert look(rt, pointer) == {43}
            rt.free(pointer)
            assert rt.undefined == []
            other.send("freed")
            return
        handle = other.recv()
        pointer = rt.ipcOpenMemHandle(handle)
        assert rt.ipcOpenMemHandle(handle, rt.cudaIpcMemLazyEnablePeerAccess) == pointer
        assert status_of(lambda: rt.ipcOpenMemHandle(handle, 0)) == 1
        assert status_of(lambda: rt.free(pointer)) == 1
        assert status_of(lambda: rt.ipcGetMemHandle(pointer)) == 1
        assert rt.memGetInfo()[0] == 1 << 30
        rt.ipcCloseMemHandle(pointer)
        assert look(rt, pointer) == {42}
        put(rt, pointer, 43)
        rt.ipcCloseMemHandle(pointer)
        assert status_of(lambda: rt.ipcCloseMemHandle(pointer)) == 1
        other.send("closed")
        other.recv()
        assert status_of(lambda: rt.ipcOpenMemHandle(handle)) == 205
        target = filled(0)
        copy(rt, target.data_ptr(), pointer)
        assert status_of(lambda: rt.streamSynchronize(0)) == Status.cudaErrorIllegalAddress


def frees_too_early(rank: int, world_size: int, store: Store) -> list[str]:
    with pipe(rank, store) as other, CudaDouble(QUICK, rank) as rt:
        if rank == 0:
            pointer = _export_memory(rt, other, 42)
            other.recv()
            rt.free(pointer)
            other.send("freed")
            other.recv()
        else:
            pointer = _import_memory(rt, other)
            assert look(rt, pointer) == {42}
            other.send("open")
            other.recv()
            assert look(rt, pointer) == {POISON}
            rt.ipcCloseMemHandle(pointer)
            other.send("seen")
        return rt.undefined


def shares_an_event(rank: int, world_size: int, store: Store) -> list[str]:
    """The importer records, the exporter waits and destroys; then the importer goes on with it."""
    with pipe(rank, store) as other, CudaDouble(QUICK, rank) as rt:
        if rank == 0:
            event = rt.eventCreateWithFlags(IPC)
            other.send(rt.ipcGetEventHandle(event))
            other.recv()
            assert rt.eventQuery(event) == 600
            rt.streamWaitEvent(0, event)
            other.send("waiting")
            rt.streamSynchronize(0)
            assert rt.eventQuery(event) == 0
            rt.eventDestroy(event)
            other.send("destroyed")
        else:
            event = rt.ipcOpenEventHandle(other.recv())
            assert status_of(lambda: rt.ipcGetEventHandle(event)) == 400
            rt.pause()
            rt.eventRecord(event, 0)
            other.send("recorded")
            assert other.recv() == "waiting"
            rt.resume()
            assert other.recv() == "destroyed"
            assert status_of(lambda: rt.eventRecord(event, 0)) == 400
            rt.eventDestroy(event)
        return rt.undefined


def has_another_gpu(rank: int, world_size: int, store: Store, denied: bool) -> None:
    config = DoubleConfig(
        ((ONE, OTHER)[rank],), denied=frozenset({(OTHER, ONE)} if denied else ())
    )
    with pipe(rank, store) as other, CudaDouble(config, rank) as rt:
        if rank == 0:
            _export_memory(rt, other, 42)
            other.send(rt.ipcGetEventHandle(rt.eventCreateWithFlags(IPC)))
            other.recv()
            return
        handle = other.recv()
        if denied:
            assert status_of(lambda: rt.ipcOpenMemHandle(handle)) == 217
        else:
            assert look(rt, rt.ipcOpenMemHandle(handle)) == {42}
        event = rt.ipcOpenEventHandle(other.recv())
        rt.streamWaitEvent(0, event)
        assert status_of(lambda: rt.eventRecord(event, 0)) == 400
        other.send("done")


def test_an_open_counts(rank_pool: RankPool) -> None:
    rank_pool.run(opens_twice, 2)


def test_freed_memory_is_poison_for_who_has_it_open(rank_pool: RankPool) -> None:
    exporter, importer = rank_pool.run(frees_too_early, 2)
    assert [text.rpartition(" of ")[2] for text in exporter] == ["memory that is open elsewhere"]
    assert importer == []


def test_an_event_is_of_use_in_both_processes(rank_pool: RankPool) -> None:
    exporter, importer = rank_pool.run(shares_an_event, 2)
    assert exporter == []
    assert importer == ["use of an event that was destroyed where it was made"] * 2


@pytest.mark.parametrize("denied", [False, True])
def test_memory_of_another_gpu(rank_pool: RankPool, denied: bool) -> None:
    rank_pool.run(has_another_gpu, 2, denied)


# -- a process that is killed --------------------------------------------------------------------


def loses_its_peer(rank: int, world_size: int, store: Store, victim: int) -> None:
    check = LeakCheck("threads", "descriptors", "shared mappings")
    with pipe(rank, store) as other, CudaDouble(QUICK, rank) as rt:
        own = _export_memory(rt, other, rank)
        handle = other.recv()
        pointer = rt.ipcOpenMemHandle(handle)
        mine = rt.eventCreateWithFlags(IPC)
        other.send(rt.ipcGetEventHandle(mine))
        theirs = rt.ipcOpenEventHandle(other.recv())
        if rank == victim:
            rt.pause()
        rt.eventRecord(mine, 0)
        other.send("recorded")
        other.recv()
        report("there")
        with suppress(EOFError, ConnectionResetError):
            other.recv()
        fresh = Handle.unpack(handle, b"memory")._replace(token=1)  # as of memory not open yet
        assert status_of(lambda: rt.ipcOpenMemHandle(fresh.pack())) == 205
        rt.streamSynchronize(0)
        rt.free(own)  # the kernel has closed it for the peer
        assert rt.undefined == []
        assert look(rt, pointer) == {victim}
        stream, _ = two_streams(rt)
        rt.streamWaitEvent(stream, theirs)
        assert rt.eventQuery(theirs) == rt.streamQuery(stream) == 600
        rt.eventDestroy(theirs)
        assert look(rt, pointer) == {victim}  # the other streams go on
    check.verify()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_peer_that_is_killed_takes_nothing_with_it(victim: int) -> None:
    with run_fresh(loses_its_peer, 2, victim) as ranks:
        ranks.wait_for(victim, "there")
        ranks.wait_for(1 - victim, "there")
        ranks.kill(victim)
        outcome = ranks.outcomes(20.0)[1 - victim]
    assert outcome.ok, outcome.error


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_a_peer_can_be_killed_at_any_moment(victim: int, seed: int) -> None:
    with run_fresh(passes_until_killed, 2, seed) as ranks:
        ranks.wait_for(victim, "going")
        ranks.kill(victim)
        outcome = ranks.outcomes(20.0)[1 - victim]
    assert outcome.ok, outcome.error


def passes_until_killed(rank: int, world_size: int, store: Store, seed: int) -> None:
    """Rings, one after the other, until the peer is no more."""
    check = LeakCheck("threads", "descriptors", "shared mappings")
    with pipe(rank, store) as other, suppress(EOFError, ConnectionError, CUDARuntimeError):
        report("going")
        for number in count():
            pass_over(other, rank, 1000 * seed + number, None)
    check.verify()
