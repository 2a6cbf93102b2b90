"""What nobody has asked for is bounded; beyond the bound a send waits until it is asked for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from stagelink.control.connection import Frame
from stagelink.errors import ProtocolError
from stagelink.interop.c10d import C10dOptions
from stagelink.interop.c10d.mailbox import MAX_TEXT, Mailbox, MatchingKey, cost_of
from stagelink.testing import run_fresh
from stagelink.transport.header import Direction, Flag, Header, MessageKind
from tests.interop import c10d_features as features
from tests.interop.c10d_callers import deepspeed, megatron
from tests.interop.c10d_features import SHORT, SMALL, filled, refused
from tests.interop.c10d_programs import STAGELINK, in_world, pipelining, world

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

    from stagelink.links.out_link import SendJob
    from stagelink.testing import RankPool

MIB = 1 << 20
LARGE = 100_000
NEVER = C10dOptions({"c10d": {"eager_bytes": 0}})
FEW = C10dOptions({"c10d": {"eager_bytes": 4 * (LARGE + 1024)}})
"""Four large messages and no more."""


def peak_bytes() -> int:
    """The most memory that this process has had, shared memory included."""
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    )
    return int(line.split()[1]) * 1024


def box_of_world() -> Mailbox:
    group: Any = dist.group.WORLD
    box: Mailbox = group._meshes["cpu"].box
    return box


def held_of_world() -> dict[int, int]:
    group: Any = dist.group.WORLD
    found: dict[int, int] = group._meshes["cpu"].outbox.held()
    return found


class Warnings(logging.Handler):
    """Texts of what the library logs in this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("stagelink").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


# -- a receiver that does not come


def _never_receives(rank: int, size: int, store: Store) -> tuple[int, list[str]]:
    logged = Warnings()
    patient = C10dOptions({"limits": {"close_deadline_s": 1000}})
    with world(rank, size, store, options=patient):
        dist.barrier()
        before = peak_bytes()
        sent = torch.full((MIB,), 7, dtype=torch.uint8)
        works = [dist.isend(sent, 1) for _ in range(10_000)] if rank == 0 else []
        dist.barrier()
        grown = peak_bytes() - before
        # Both are alive, and nothing waits behind what nobody asks for.
        for length in (SMALL, LARGE):
            got = torch.zeros(length, dtype=torch.uint8)
            work = dist.isend(filled(length, rank), 1 - rank, tag=1)
            dist.recv(got, 1 - rank, tag=1)
            assert work is not None
            assert work.wait()
            assert torch.equal(got, filled(length, 1 - rank))
        for _ in range(100 if rank == 1 else 0):
            got = torch.zeros(MIB, dtype=torch.uint8)
            dist.recv(got, 0)
            assert got.eq(7).all()
        if rank == 0:
            for work in works[:100]:
                assert work is not None
                assert work.wait()
            assert held_of_world()[1] > 9_000
            store.set("received", "")
            with refused(r"send to rank 1 with tag 0: .* rank 1 closed; a receive there expected"):
                works[-1].wait()  # type: ignore[union-attr]
        else:
            store.wait(["received"])
    return grown, logged.texts


@pytest.mark.timeout(120)
def test_a_rank_that_never_receives() -> None:
    with run_fresh(_never_receives, 2) as ranks:
        sender, receiver = ranks.outcomes(timeout_s=100)
    assert sender.ok, str(sender)
    assert receiver.ok, str(receiver)
    for grown, _ in (sender.value, receiver.value):
        assert grown < 160 * MIB  # 64 of them unasked for, and 10,000 works
    (warned,) = sender.value[1]
    assert "messages that rank 1 has not asked for" in warned
    assert receiver.value[1] == []


def _both_send_first(rank: int, size: int, store: Store) -> str:
    with world(rank, size, store, options=FEW):
        peer = 1 - rank
        for _ in range(4):
            dist.send(filled(LARGE, rank), peer)
        work = dist.isend(filled(LARGE, rank), peer)
        assert work is not None
        with refused("send to rank") as found:
            work.wait(SHORT)
        assert not work.is_completed()
        dist.barrier()
        for _ in range(5):
            got = torch.zeros(LARGE, dtype=torch.uint8)
            dist.recv(got, peer)
            assert torch.equal(got, filled(LARGE, peer))
        assert work.wait()  # nothing was lost
        assert held_of_world() == {}
    return str(found.value)


def test_two_ranks_that_send_first_wait_for_each_other_beyond_the_bound(
    rank_pool: RankPool,
) -> None:
    for said in rank_pool.run(_both_send_first, 2):
        assert "not done within 0.05 s, and not asked for" in said
        assert "(c10d.eager_bytes)" in said


def _sends_all(rank: int, size: int, store: Store) -> int:
    """The most bytes that waited for this rank at once."""
    most = 0
    with world(rank, size, store, options=FEW):
        if rank == 0:
            works = [dist.isend(filled(LARGE, n), 1, tag=n % 3) for n in range(60)]
            dist.barrier()
            for work in works:
                assert work is not None
                work.wait()
            return 0
        dist.barrier()
        for n in (*range(2, 60, 3), *range(1, 60, 3), *range(0, 60, 3)):
            most = max(most, box_of_world()._unasked_bytes[0])
            got = torch.zeros(LARGE, dtype=torch.uint8)
            dist.recv(got, 0, tag=n % 3)
            assert torch.equal(got, filled(LARGE, n))
        assert box_of_world()._unasked_bytes[0] == 0
    return most


def test_whatever_is_asked_for_comes_and_the_rest_keeps_to_the_bound(rank_pool: RankPool) -> None:
    _, most = rank_pool.run(_sends_all, 2)
    assert most == 4 * (LARGE + 1024)


def _ends_with_messages_held(rank: int, size: int, store: Store) -> None:
    with world(rank, size, store, options=NEVER):
        if rank == 0:
            for n in range(3):
                dist.isend(filled(LARGE, n), 1)
            dist.isend(filled(SMALL, 3), 1)
        else:
            store.wait(["closing"])
            for n, length in enumerate((LARGE, LARGE, LARGE, SMALL)):
                got = torch.zeros(length, dtype=torch.uint8)
                dist.recv(got, 0)
                assert torch.equal(got, filled(length, n))
            return
        group: Any = dist.group.WORLD
        group._meshes["cpu"].node.on_close.append(lambda: store.set("closing", ""))


def test_what_is_held_is_delivered_while_its_sender_closes(rank_pool: RankPool) -> None:
    rank_pool.run(_ends_with_messages_held, 2)


def _parts_as_it_starts(
    rank: int, size: int, store: Store, eager_bytes: int, lengths: tuple[int, ...]
) -> list[bool]:
    """Whether the sender says goodbye between what lets a message go and its start."""
    said: list[bool] = []
    with world(rank, size, store, options=C10dOptions({"c10d": {"eager_bytes": eager_bytes}})):
        if rank == 0:
            group: Any = dist.group.WORLD
            outbox, goodbyes = group._meshes["cpu"].outbox, group._meshes["cpu"].plane.goodbyes
            start = outbox._start

            def part_then_start(peer: int, job: SendJob) -> None:
                said.append(goodbyes.say(peer))
                store.set("starting", "")
                start(peer, job)

            outbox._start = part_then_start
            for n, length in enumerate(lengths):
                dist.isend(filled(length, n), 1)
        for n, length in enumerate(lengths if rank == 1 else ()):
            if n == 2:  # it must start by what is granted, not by being asked for
                store.wait(["starting"])
            got = torch.zeros(length, dtype=torch.uint8)
            dist.recv(got, 0)
            assert torch.equal(got, filled(length, n))
    return said


@pytest.mark.parametrize(
    ("eager_bytes", "lengths"),
    [
        (0, (SMALL,)),
        (0, (LARGE,)),
        (2 * (SMALL + 1024), (SMALL, SMALL, SMALL)),
        (LARGE + 1024, (LARGE,)),
    ],
    ids=["asked for", "large and asked for", "granted later", "granted"],
)
def test_no_goodbye_comes_between_what_lets_a_message_go_and_its_start(
    eager_bytes: int, lengths: tuple[int, ...], rank_pool: RankPool
) -> None:
    said, _ = rank_pool.run(_parts_as_it_starts, 2, eager_bytes, lengths)
    assert said == [False]


def _forgets_a_group(rank: int, size: int, store: Store) -> None:
    with world(rank, size, store, options=FEW):
        group = dist.new_group([0, 1])
        works = [dist.isend(filled(LARGE, n), 1 - rank, group=group) for n in range(20)]
        dist.barrier()
        store.set(f"sent/{rank}", "")
        store.wait([f"sent/{1 - rank}"])
        dist.barrier()
        dist.destroy_process_group(group)
        for work in works:  # dropped there, and over here
            assert work is not None
            work.wait()
        assert box_of_world()._unasked_bytes[1 - rank] == 0
        dist.barrier()
        a_message_each_way(rank)


def a_message_each_way(rank: int) -> None:
    got = torch.zeros(LARGE, dtype=torch.uint8)
    work = dist.isend(filled(LARGE, rank), 1 - rank)
    dist.recv(got, 1 - rank)
    assert work is not None
    work.wait()
    assert torch.equal(got, filled(LARGE, 1 - rank))


def test_a_group_that_is_destroyed_holds_nobodys_messages(rank_pool: RankPool) -> None:
    rank_pool.run(_forgets_a_group, 2)


def _to_itself(rank: int, size: int, store: Store) -> None:
    with world(rank, size, store, options=FEW):
        sent = filled(LARGE, 0)
        works = [dist.isend(sent, rank) for _ in range(6)]
        assert all(work is not None and work.is_completed() for work in works[:4])
        for work in works[4:]:
            with refused(r"send to rank 0 with tag 0: not done within 0\.05 s"):
                work.wait(SHORT)  # type: ignore[union-attr]
        for work in works:
            got = torch.zeros(LARGE, dtype=torch.uint8)
            dist.irecv(got, rank).wait()  # type: ignore[union-attr]
            assert torch.equal(got, sent)
            assert work is not None
            assert work.is_completed()
        group = dist.new_group([0])
        works = [dist.isend(sent, rank, group=group) for _ in range(6)]
        assert not works[-1].is_completed()  # type: ignore[union-attr]
        dist.destroy_process_group(group)
        assert all(work is not None and work.is_completed() for work in works)
        box = box_of_world()
        assert (box._here, box._lent, box._unasked_bytes[rank]) == ({}, {}, 0)


def test_messages_to_oneself(rank_pool: RankPool) -> None:
    rank_pool.run(_to_itself, 1)


# -- programs that go on where sends wait for their receivers


def _without_room(
    rank: int, size: int, store: Store, program: Callable[..., Any], *args: Any
) -> Any:
    with world(rank, size, store, options=NEVER):
        found = program(rank, size, *args)
        dist.barrier()
        assert held_of_world() == {}
        return found


@pytest.mark.parametrize(
    "program",
    [
        features.dtypes,
        features.objects,
        features.tags_in_any_order,
        features.a_batch_in_a_ring,
        features.many_threads,
        features.a_work_of_a_receive,
        features.a_refused_message_in_a_batch,
    ],
    ids=lambda program: program.__name__,
)
def test_what_goes_on_gloo_goes_without_room(
    program: Callable[[int, int], None], rank_pool: RankPool
) -> None:
    rank_pool.run(_without_room, 2, program)


@pytest.mark.parametrize(
    ("ranks", "program"),
    [
        (3, (pipelining, "1F1B", 1)),
        (2, (pipelining, "Interleaved1F1B", 2)),
        (2, (pipelining, "ZBVZeroBubble", 2)),
        (3, (megatron, "batched")),
        (3, (megatron, "even and odd")),
        (3, (deepspeed,)),
    ],
    ids=lambda given: (
        " ".join(getattr(one, "__name__", str(one)) for one in given)
        if isinstance(given, tuple)
        else None
    ),
)
def test_schedules_do_not_deadlock_without_room(
    ranks: int, program: tuple[Callable[..., list[torch.Tensor]], Any], rank_pool: RankPool
) -> None:
    train, *arguments = program
    ours = rank_pool.run(_without_room, ranks, train, *arguments)
    theirs = rank_pool.run(in_world, ranks, train, STAGELINK, *arguments)
    for mine, other in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, mine, other))


# -- the bound, as the receiver keeps it


class Recorded:
    """A control plane that keeps what is posted."""

    def __init__(self) -> None:
        self.rank, self.peers = 0, (1,)
        self.handlers: dict[MessageKind, Callable[[int, Frame], None]] = {}
        self.posted: list[Header] = []

    def handle(
        self, kind: MessageKind, handler: Callable[[int, Frame], None], **_: object
    ) -> None:
        self.handlers[kind] = handler

    def post(self, peer: int, header: Header, *_: object) -> None:
        self.posted.append(header)

    def changed(self) -> None: ...

    def hear(
        self, address: MatchingKey, kind: MessageKind, size_bytes: int = 0, note: bytes = b""
    ) -> None:
        flags = Flag.INLINE if kind is MessageKind.DATA else 0
        like = Header(kind, flags=flags, payload_bytes=size_bytes, shape=(size_bytes,))
        header = address.header(Direction.FORWARD, like)
        self.handlers[kind](1, Frame(header, note, bytes(size_bytes), []))


class Asked:
    """A posted receive that keeps what it takes."""

    def __init__(self) -> None:
        self.taken: list[Any] = []

    def meet(self, arrival: Any) -> None: ...

    def take(self, arrival: Any) -> None:
        self.taken.append(arrival)

    def give_up(self) -> None: ...


BOUND = 10 * cost_of(Header(MessageKind.DATA, payload_bytes=100))


@pytest.fixture
def plane() -> Recorded:
    return Recorded()


@pytest.fixture
def box(plane: Recorded) -> Mailbox:
    made = Mailbox(plane, lambda peer: None, BOUND)  # type: ignore[arg-type, return-value]
    made.open()
    assert [(one.kind, one.sequence) for one in plane.posted] == [(MessageKind.CREDIT, BOUND)]
    plane.posted.clear()
    return made


def test_a_peer_that_sends_more_than_it_was_granted_fails(plane: Recorded, box: Mailbox) -> None:
    for number in range(10):
        plane.hear(MatchingKey(1, 1, 0, number), MessageKind.DATA, 100)
    with pytest.raises(ProtocolError, match=rf"granted are {BOUND} \(c10d\.eager_bytes\)"):
        plane.hear(MatchingKey(1, 1, 0, 10), MessageKind.DATA, 100)


def test_of_why_a_message_was_refused_the_first_characters_are_kept(
    plane: Recorded, box: Mailbox
) -> None:
    key, asked = MatchingKey(1, 1, 0, 0), Asked()
    plane.hear(key, MessageKind.REFUSED, note=b"x" * 60_000)
    assert box._here[key].refusal == "x" * MAX_TEXT
    box.ask(key, asked)
    (taken,) = asked.taken
    assert taken.refusal == "x" * MAX_TEXT


def _refuses_at_length(rank: int, size: int, store: Store) -> None:
    with world(rank, size, store):
        group: Any = dist.group.WORLD
        mesh, key = group._meshes["cpu"], MatchingKey(group._number, 1 - rank, 0, 0)
        posted: list[bytes] = []
        post = mesh.plane.post

        def keep_then_post(peer: int, header: Header, note: bytes = b"", *rest: Any) -> None:
            if header.kind is MessageKind.REFUSED:
                posted.append(note)
            post(peer, header, note, *rest)

        mesh.plane.post = keep_then_post
        mesh.refuse(key, "é" * 60_000)
        assert [note.decode() for note in posted] == ["é" * MAX_TEXT]
        with refused("é") as found:
            dist.recv(torch.zeros(3), 1 - rank)
        assert str(found.value).count("é") == MAX_TEXT


def test_why_a_message_was_refused_is_told_in_so_many_characters(rank_pool: RankPool) -> None:
    rank_pool.run(_refuses_at_length, 2)


def test_what_is_asked_for_is_granted_again_and_in_few_words(
    plane: Recorded, box: Mailbox
) -> None:
    asked = Asked()
    for number in range(20):  # asked for before and after
        if number % 2:
            box.ask(MatchingKey(1, 1, 0, number), asked)
        plane.hear(MatchingKey(1, 1, 0, number), MessageKind.DATA, 100)
        if not number % 2:
            box.ask(MatchingKey(1, 1, 0, number), asked)
    assert len(asked.taken) == 20
    assert [one.kind for one in plane.posted] == [MessageKind.CREDIT] * 4
    assert sum(one.sequence for one in plane.posted) == 2 * BOUND


def test_a_sender_that_waits_is_granted_all_that_is_owed(plane: Recorded, box: Mailbox) -> None:
    asked, waiting = Asked(), MatchingKey(1, 1, 0, 1)
    plane.hear(MatchingKey(1, 1, 0, 0), MessageKind.DATA, 100)
    box.ask(MatchingKey(1, 1, 0, 0), asked)
    assert plane.posted == []
    plane.hear(waiting, MessageKind.RTS)
    (granted,) = plane.posted
    assert (granted.kind, granted.sequence) == (MessageKind.CREDIT, BOUND // 10)
    box.ask(waiting, asked)
    assert plane.posted[1].kind is MessageKind.CTS
    assert MatchingKey.of(1, plane.posted[1]) == waiting
    assert box.awaits(waiting)
    plane.hear(waiting, MessageKind.DATA, 100)
    assert len(asked.taken) == 2


def test_a_message_that_is_asked_for_first_is_cleared_at_once(
    plane: Recorded, box: Mailbox
) -> None:
    box.ask(MatchingKey(1, 1, 0, 0), Asked())
    plane.hear(MatchingKey(1, 1, 0, 0), MessageKind.RTS)
    assert [one.kind for one in plane.posted] == [MessageKind.CTS]
    plane.hear(MatchingKey(1, 1, 0, 1), MessageKind.RTS)
    with pytest.raises(ProtocolError, match="two messages of MatchingKey"):
        plane.hear(MatchingKey(1, 1, 0, 1), MessageKind.RTS)


def test_a_message_that_found_room_is_offered_no_more(plane: Recorded, box: Mailbox) -> None:
    address, asked = MatchingKey(1, 1, 0, 0), Asked()
    plane.hear(address, MessageKind.RTS)
    plane.hear(address, MessageKind.DATA, 100)
    box.ask(address, asked)
    assert len(asked.taken) == 1
    assert plane.posted == []
    assert box._offered == set()


def test_what_comes_for_a_destroyed_group_is_taken_and_dropped(
    plane: Recorded, box: Mailbox
) -> None:
    plane.hear(MatchingKey(7, 1, 0, 0), MessageKind.RTS)
    for number in range(1, 10):
        plane.hear(MatchingKey(7, 1, 0, number), MessageKind.DATA, 100)
    box.forget(7)
    assert [one.kind for one in plane.posted] == [MessageKind.CTS, MessageKind.CREDIT]
    plane.hear(MatchingKey(7, 1, 0, 10), MessageKind.RTS)
    for number in (0, 10):
        plane.hear(MatchingKey(7, 1, 0, number), MessageKind.DATA, 100)
    kinds = [one.kind for one in plane.posted]
    assert kinds.count(MessageKind.CTS) == 2
    assert sum(one.sequence for one in plane.posted if one.kind is MessageKind.CREDIT) == 9 * (
        BOUND // 10
    )
    assert (box._here, box._unasked_bytes[1]) == ({}, 0)
