"""At the edges: who leaves before others meet, groups made again, aborts, modes, no memory."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from stagelink.deadline import Deadline
from stagelink.errors import ConnectError, ProtocolError, StagelinkError
from stagelink.interop import collectives
from stagelink.interop.c10d import C10dOptions
from stagelink.interop.c10d import group as c10d_group
from stagelink.interop.c10d.mailbox import Mailbox, MatchingKey
from stagelink.interop.c10d.mesh import Mesh
from stagelink.interop.c10d.options import EAGER_BYTES
from stagelink.links.arrival import Arrival
from stagelink.testing import no_leaks, run_fresh
from stagelink.transport.header import Header, MessageKind
from tests.interop.c10d_features import filled, refused
from tests.interop.c10d_programs import PATIENCE, STAGELINK, world

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store

    from stagelink.plan import Plan
    from stagelink.testing import RankPool

GLOO = C10dOptions({"links": [{"transport": "gloo"}]})


def _meets_nobody_that_left(rank: int, size: int, store: Store) -> None:
    with no_leaks("threads"), world(rank, size, store, options=GLOO):
        if rank == 1:
            return
        group: Any = dist.group.WORLD
        plane = group._meshes["cpu"].plane
        plane.wait(lambda: 1 in plane.gone, Deadline(20))
        if rank == 0:
            with refused("peer rank 1 closed"):
                dist.recv(torch.zeros(3), 1)
            for thread in threading.enumerate():
                if thread.name.startswith("stagelink-open-"):
                    thread.join(20)
        # There and back by the links, so that they are open when either leaves.
        payload, other = filled(100_000, 1), 2 - rank
        for source in (0, 2):
            if rank == source:
                dist.send(payload, other)
            else:
                dist.recv(payload, other)


def test_a_first_contact_with_who_has_left_harms_nobody_else(rank_pool: RankPool) -> None:
    rank_pool.run(_meets_nobody_that_left, 3)


def _waits_under_a_mode(rank: int, size: int, store: Store, options: C10dOptions) -> None:
    """Whoever waits reads for all, and what it allocates is not what the program's mode says."""
    with world(rank, size, store, options=options):
        if rank == 0:
            dist.send(filled(100_000, 1), 1, tag=1)
            dist.send(torch.ones(3), 1, tag=2)
            return
        unasked = torch.zeros(100_000, dtype=torch.uint8)
        last = torch.zeros(3)
        torch.set_default_device("meta")
        try:
            work = dist.irecv(last, 0, tag=2)
            assert work is not None
            work.wait()
            dist.recv(unasked, 0, tag=1)
        finally:
            torch.set_default_device(None)
        assert torch.equal(unasked, filled(100_000, 1))


@pytest.mark.parametrize("options", [C10dOptions(), GLOO], ids=["shm", "gloo"])
def test_a_default_device(options: C10dOptions, rank_pool: RankPool) -> None:
    rank_pool.run(_waits_under_a_mode, 2, options)


def _receives_in_inference_mode(rank: int, size: int, store: Store, length: int) -> None:
    with world(rank, size, store):
        if rank == 0:
            store.wait(["posted"])
            dist.send(torch.ones(length), 1)
            dist.barrier()
            return
        with torch.inference_mode():
            into = torch.zeros(2 * length)[::2]
            work = dist.irecv(into, 0)
        assert work is not None
        store.set("posted", "")
        dist.barrier()  # a thread of the library finishes it
        work.wait()
        assert bool(into.eq(1).all())


@pytest.mark.parametrize("length", [100, 100_000])
def test_inference_mode(length: int, rank_pool: RankPool) -> None:
    rank_pool.run(_receives_in_inference_mode, 2, length)


def _again_by_the_same_name(rank: int, size: int, store: Store) -> None:
    with world(rank, size, store):
        ranks = [*range(size)]
        for number in range(3):
            group = dist.new_group(ranks, use_local_synchronization=True)
            if rank == 0:
                dist.send(torch.full((3,), float(number)), 1, group=group)
                dist.send(torch.full((3,), -1.0), 1, group=group)
            else:
                got = torch.zeros(3)
                dist.recv(got, 0, group=group)
                assert got.eq(number).all()
                posted = dist.irecv(got, 0, group=group, tag=7)
                assert posted is not None
            dist.barrier()
            dist.destroy_process_group(group)
            if rank == 1:
                with refused("the group was destroyed before the message came"):
                    posted.wait()  # type: ignore[union-attr]
        whole: Any = dist.group.WORLD
        box = whole._meshes["cpu"].box
        assert (box._here, box._claims, box._claimed) == ({}, {}, {})


def test_a_subgroup_is_destroyed_and_made_again(rank_pool: RankPool) -> None:
    rank_pool.run(_again_by_the_same_name, 2)


def test_a_destroyed_group_keeps_nothing_and_no_message_takes_anothers_place() -> None:
    class Quiet:
        def handle(self, *given: object) -> None: ...

        def changed(self) -> None: ...

    box = Mailbox(Quiet(), lambda peer: None, EAGER_BYTES)  # type: ignore[arg-type, return-value]
    kept, dropped = MatchingKey(1, 0, 0, 0), MatchingKey(2, 0, 0, 0)
    for address in (kept, dropped):
        box.put(address, Arrival(Header(MessageKind.DATA), 0))
    with pytest.raises(ProtocolError, match="two messages of MatchingKey"):
        box.put(kept, Arrival(Header(MessageKind.DATA), 0))
    box.forget(2)
    box.put(dropped, Arrival(Header(MessageKind.DATA), 0))
    assert [*box._here] == [kept]


def _refused_on_two_meshes(rank: int, size: int, store: Store) -> None:
    """As with CPU and CUDA tensors; here the second mesh is one for CPU tensors, too."""
    plan = C10dOptions.plan

    def on_cpu(self: C10dOptions, ranks: Sequence[int], device: str) -> Plan:
        return replace(plan(self, ranks, "cpu"), name=f"c10d-{device}")

    module: Any = c10d_group
    module.torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True))
    C10dOptions.plan = on_cpu  # type: ignore[method-assign]
    try:
        dist.init_process_group(STAGELINK, store=store, rank=rank, world_size=size)
    finally:
        C10dOptions.plan = plan  # type: ignore[method-assign]
        module.torch = torch
    group: Any = dist.group.WORLD
    boxes = [mesh.box for mesh in group._meshes.values()]
    assert len(boxes) == 2
    for peer in (1 - rank, rank):
        for is_first in (True, False):  # before the receive, and after it
            work = None if is_first else group.recv([torch.zeros(3)], peer)
            dist.barrier()
            with refused("device 'meta' has no data"):
                group.send([torch.empty(3, device="meta")], peer)
            if is_first:
                for mesh in group._meshes.values():
                    mesh.plane.wait(lambda box=mesh.box: box._here, Deadline(20))
                    assert len(mesh.box._here) == 1
            with refused("device 'meta' has no data"):
                (work or group.recv([torch.zeros(3)], peer)).wait()
            for mesh in group._meshes.values():
                assert mesh.plane.wait(lambda box=mesh.box: not box._claims, Deadline(20))
            assert [(box._here, box._claims) for box in boxes] == [({}, {})] * 2
            dist.barrier()
    dist.destroy_process_group()


def test_a_refusal_that_is_received_is_kept_on_no_other_device(rank_pool: RankPool) -> None:
    rank_pool.run(_refused_on_two_meshes, 2)


def _too_large_to_send(rank: int, size: int, store: Store) -> None:
    with world(rank, size, store):
        if rank == 0:
            with pytest.raises(RuntimeError, match="allocate"):
                dist.isend(torch.zeros(1).expand(2**45), 1)
            dist.send(torch.ones(3), 1)
        else:
            dist.recv(torch.zeros(3), 0)


def test_what_cannot_be_made_contiguous_takes_no_number(rank_pool: RankPool) -> None:
    rank_pool.run(_too_large_to_send, 2)


def _aborts(rank: int, size: int, store: Store) -> None:
    with no_leaks("threads"):
        dist.init_process_group(STAGELINK, store=store, rank=rank, world_size=size)
        store.set(f"joined/{rank}", "")
        store.wait([f"joined/{peer}" for peer in range(size)])
        dist.distributed_c10d._abort_process_group()
        assert "stagelink" not in str(threading.enumerate())
        with world(rank, size, dist.PrefixStore("second", store), "gloo"):
            group: Any = dist.new_group(backend="stagelink")
            assert group._owns
            if rank == 0:
                dist.send(torch.ones(3), 1, group=group)
            else:
                dist.recv(torch.ones(3), 0, group=group)


def test_an_aborted_world_is_gone(rank_pool: RankPool) -> None:
    rank_pool.run(_aborts, 2)


def _patience(rank: int, size: int, store: Store, tables: dict[str, Any]) -> list[float]:
    waited: list[float] = []
    join = Mesh._join

    def spy(self: Mesh, deadline: Deadline) -> None:
        waited.append(deadline.seconds)
        join(self, deadline)

    Mesh._join = spy  # type: ignore[method-assign]
    try:
        with world(rank, size, store, options=C10dOptions(tables)):
            return waited
    finally:
        Mesh._join = join  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("tables", "seconds"),
    [({}, PATIENCE.total_seconds()), ({"limits": {"connect_deadline_s": 7}}, 7.0)],
)
def test_how_long_the_others_are_waited_for(
    tables: dict[str, Any], seconds: float, rank_pool: RankPool
) -> None:
    assert rank_pool.run(_patience, 1, tables) == [[seconds]]


def _misses_the_last(rank: int, size: int, store: Store) -> str:
    with world(rank, size, store):
        said = ""
        dist.barrier()
        if rank < 2:
            with pytest.raises(ConnectError) as found:
                dist.new_group([0, 1, 2], timeout=timedelta(seconds=2))
            said = str(found.value)
        # No part of the world is harmed.
        dist.barrier()
        if rank == 0:
            dist.send(torch.ones(3), 2)
        elif rank == 2:
            dist.recv(torch.zeros(3), 0)
        dist.barrier()
        return said


def test_who_does_not_make_a_group_is_named(rank_pool: RankPool) -> None:
    *came, _ = rank_pool.run(_misses_the_last, 3)
    for rank, said in enumerate(came):
        assert said.startswith(f"rank {rank}: missing: 2: no part in making the group of ranks 0,")
        assert "within 2 s" in said


def _dies_half_way(rank: int, size: int, store: Store) -> str:
    """Rank 2 has met the others, and ends before it makes the group for collectives with them."""
    if rank == 2:
        collectives.__dict__["gloo_group"] = lambda *given, **options: os._exit(1)
    with pytest.raises(StagelinkError) as found:
        dist.init_process_group(
            STAGELINK,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=1),  # of gloo; to meet there is more
            pg_options=C10dOptions({"limits": {"connect_deadline_s": 25}}),
        )
    return str(found.value)


def test_who_dies_before_the_collectives_are_there_is_named() -> None:
    with run_fresh(_dies_half_way, 3) as ranks:
        *others, died = ranks.outcomes()
    assert not died.ok
    for outcome in others:
        assert "rank 2 died" in outcome.value


def _options_of_a_subgroup(rank: int, size: int, store: Store) -> None:
    with (
        world(rank, size, store),
        pytest.raises(ValueError, match="give pg_options to init_process_group"),
    ):
        dist.new_group([0], pg_options=GLOO, timeout=timedelta(seconds=5))


def test_a_subgroup_has_no_options_of_its_own(rank_pool: RankPool) -> None:
    rank_pool.run(_options_of_a_subgroup, 1)


def _breaks_in_the_middle(
    rank: int, size: int, store: Store, method: str, error: BaseException, text: str
) -> None:
    """A number is taken, and the message does not go, or the receive is not posted."""

    def breaks(*_: object) -> None:
        raise error

    dist.init_process_group(STAGELINK, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    if rank == 0:
        group: Any = dist.group.WORLD
        mesh = group._meshes["cpu"]
        setattr(mesh.outbox if method == "post" else mesh.box, method, breaks)
        with pytest.raises(type(error)):
            (dist.isend if method == "post" else dist.irecv)(torch.ones(3), 1)
    with refused(text):
        dist.recv(torch.ones(3), 1 - rank, tag=1)
    dist.destroy_process_group()


@pytest.mark.parametrize("method", ["post", "ask"])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyboardInterrupt(), "rank 0 was stopped by KeyboardInterrupt"),
        (MemoryError("no more"), "rank 0 failed: MemoryError: no more"),
    ],
    ids=["stopped", "no memory"],
)
def test_a_call_that_breaks_in_the_middle_leaves_no_peer_waiting(
    method: str, error: BaseException, text: str, rank_pool: RankPool
) -> None:
    rank_pool.run(_breaks_in_the_middle, 2, method, error, text)
