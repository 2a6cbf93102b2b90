"""A message is copied once where that can be, and nobody ever waits for a consumer that keeps."""

from __future__ import annotations

import os
import signal
import struct
import sys
from unittest.mock import Mock

import pytest
import torch

from stagelink.deadline import Deadline
from stagelink.testing import LeakCheck
from stagelink.transport.header import Header, MessageKind
from stagelink_shm import Shm, ShmOptions
from stagelink_shm.memory import mapped, new_memory
from stagelink_shm.notes import BOARD, pack_filled
from tests.shm.pair import SOON_S, Pair, pattern
from tests.support.completion import Completion
from tests.support.interrupts import struck

KIB = 1024
MIB = 1024 * KIB


def slots_of(pair: Pair) -> int:
    return len(pair.receiver._slots)  # type: ignore[attr-defined]


def returned(pair: Pair) -> list[tuple[int, bool]]:
    """The slots that the sender finds when it next needs one."""
    board = pair.sender._board  # type: ignore[attr-defined]
    return [] if board is None else [*board.collect()]


# -- one copy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [32 * KIB, MIB, 3 * MIB + 5])
def test_a_large_message_is_a_view_of_its_slot(size: int) -> None:
    pair, payload = Pair(), pattern(size)
    got = pair.pass_on(payload)
    assert torch.equal(got, payload)
    assert got.untyped_storage().nbytes() == size
    assert got.data_ptr() % 64 == 0
    payload.fill_(0)
    assert torch.equal(got, pattern(size))
    assert returned(pair) == []
    del got
    assert returned(pair) == [(0, True)]


@pytest.mark.parametrize("size", [1, 64, 9 * KIB, 32 * KIB - 1])
def test_a_small_one_is_copied_out_and_its_slot_is_free(size: int) -> None:
    pair, payload = Pair(), pattern(size)
    got = [pair.pass_on(payload) for _ in range(30)]
    assert all(torch.equal(one, payload) for one in got)
    assert slots_of(pair) == 1


def test_an_empty_one_takes_no_slot() -> None:
    pair = Pair()
    assert pair.pass_on(pattern(0)).numel() == 0
    assert slots_of(pair) == 0


def test_one_slot_is_enough_for_one_message_at_a_time() -> None:
    pair = Pair()
    for number in range(50):
        got = pair.pass_on(pattern(MIB, number))
        assert torch.equal(got, pattern(MIB, number))
        del got
        pair.read()
    assert slots_of(pair) == 1


# -- a consumer that keeps -----------------------------------------------------------------------


def test_what_is_kept_is_never_written_again() -> None:
    pair = Pair(window=4)
    kept = [pair.pass_on(pattern(100 * KIB, number)) for number in range(40)]
    for number, got in enumerate(kept):
        assert torch.equal(got, pattern(100 * KIB, number))
    assert slots_of(pair) == 5  # four are kept, the rest is copied out through one more


def test_a_graph_keeps_its_slots() -> None:
    pair = Pair(window=3)
    weights = torch.ones(100 * KIB // 4, requires_grad=True)
    losses = []
    for number in range(10):
        payload = torch.full((100 * KIB // 4,), float(number)).view(torch.uint8)
        losses.append((pair.pass_on(payload).view(torch.float32) * weights).sum())
    for number, loss in enumerate(losses):
        (gradient,) = torch.autograd.grad(loss, weights)
        assert bool((gradient == number).all())
    pair.read()
    assert torch.equal(pair.pass_on(pattern(100 * KIB)), pattern(100 * KIB))


def test_a_view_of_a_view_keeps_its_slot() -> None:
    pair = Pair(window=2)
    kept = pair.pass_on(pattern(MIB)).view(torch.int32)[100:200].view(10, 10).t()
    expected = kept.clone()
    for number in range(1, 20):
        pair.pass_on(pattern(MIB, number))
        pair.read()
    assert torch.equal(kept, expected)


def test_what_the_receiver_has_not_read_counts_as_kept() -> None:
    pair = Pair(window=2)
    pair.hold = True
    sent = 0
    while pair.send(pattern(MIB, sent)) is not None:
        sent += 1
    assert sent == 4
    assert pair.from_sender.rooms == 0
    pair.show()
    pair.read()
    assert pair.from_sender.rooms == 1  # two were copied out, whose slots are home
    for number in range(sent):
        assert torch.equal(pair.take(), pattern(MIB, number))


def test_memory_of_a_fork_is_not_written_again() -> None:
    pair = Pair()
    got = pair.pass_on(pattern(MIB))
    expected = got.numpy().tobytes()
    asked, told = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # should the parent fail
        os.read(asked, 1)  # until it has sent more
        os._exit(0 if got.numpy().tobytes() == expected else 1)
    del got
    pair.read()
    for number in range(1, 10):
        pair.pass_on(pattern(MIB, number))
        pair.read()
    os.write(told, b"x")
    assert os.waitpid(child, 0)[1] == 0
    os.close(asked)
    os.close(told)


# -- pieces --------------------------------------------------------------------------------------


def pieces(window: int = 4) -> Pair:
    """A link whose largest slot has 64 KiB."""
    return Pair(window, link_bytes=512 * KIB)


def finish(pair: Pair, done: Completion | None) -> None:
    """Let slots come home until a message in pieces is through."""
    assert done is not None
    soon = Deadline(SOON_S)
    while not done.over and not soon.passed:
        pair.read()
    assert done.wait(0) is None


def whole(done: Completion | None) -> bool:
    """Whether a message went in a slot of its own."""
    return done is not None and done.over


@pytest.mark.parametrize("size", [64 * KIB + 1, 128 * KIB, MIB + 7])
def test_more_than_a_slot_holds_goes_in_pieces(size: int) -> None:
    pair, payload = pieces(), pattern(size)
    pending = pair.send(payload)
    payload.fill_(0)  # it has been read
    finish(pair, pending)
    assert torch.equal(pair.take(), pattern(size))


def test_pieces_go_past_whole_messages_and_those_past_them() -> None:
    pair = pieces()
    first, second = pair.send(pattern(MIB, 1)), pair.send(pattern(MIB, 2))
    assert whole(pair.send(pattern(40 * KIB, 3)))
    finish(pair, first)
    finish(pair, second)
    assert [torch.equal(pair.take(), pattern(size, seed)) for size, seed in (
        (MIB, 1), (MIB, 2), (40 * KIB, 3)
    )] == [True] * 3  # fmt: skip


def test_pieces_may_come_before_their_message_has_begun() -> None:
    pair = pieces()
    pair.hold = True
    pending = pair.send(pattern(200 * KIB))
    finish(pair, pending)
    pair.show()
    assert torch.equal(pair.take(), pattern(200 * KIB))


def test_pieces_wait_for_slots() -> None:
    pair = pieces(window=2)
    pair.hold = True
    for seed in range(3):
        assert whole(pair.send(pattern(64 * KIB, seed)))
    pending = pair.send(pattern(MIB, 3))
    assert len(pair.held) == 4
    pair.read()
    assert not whole(pending)
    pair.show()
    finish(pair, pending)
    for seed, size in enumerate([64 * KIB] * 3 + [MIB]):
        assert torch.equal(pair.take(), pattern(size, seed))


def test_pieces_that_get_no_slot_are_not_through() -> None:
    pair = pieces(window=2)
    pair.hold = True
    pending = pair.send(pattern(MIB))
    assert pending is not None
    pair.read()
    assert not pending.over
    pair.show()
    assert not pair.begun[0][0].over
    finish(pair, pending)
    assert torch.equal(pair.take(), pattern(MIB))


def test_pieces_that_no_memory_is_left_for_fail_their_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "memfd_create", refuse)
    done = pieces().send(pattern(MIB))
    assert done is not None
    with pytest.raises(OSError, match="Cannot allocate memory"):
        done.wait(0)


# -- what must not come --------------------------------------------------------------------------


def _begin(pair: Pair, note: bytes, size: int, fds: tuple[int, ...] = ()) -> None:
    header = Header(MessageKind.DATA, payload_bytes=size)
    pair.receiver.begin(
        header, note, fds, lambda: torch.empty(size, dtype=torch.uint8), Completion()
    )


@pytest.mark.parametrize(
    ("note", "size", "text"),
    [
        (b"xyz", 5, "a note of 3 bytes, not 16"),
        (pack_filled(7, True, 5), 5, "slot 7 is not of 5 bytes"),
        (pack_filled(0, True, 4096), 5, "slot 0 has 4096 bytes of 5"),
        (pack_filled(0, True, 4097), 4097, "slot 0 is not of 4097 bytes"),
    ],
)
def test_a_note_that_does_not_fit(note: bytes, size: int, text: str) -> None:
    pair = Pair()
    pair.pass_on(pattern(100))
    with pytest.raises(ValueError, match=text):
        _begin(pair, note, size)


def test_a_slot_on_loan_is_not_taken_again() -> None:
    pair = Pair()
    got = pair.pass_on(pattern(MIB))
    with pytest.raises(ValueError, match="slot 0 came again before it was returned"):
        _begin(pair, pack_filled(0, True, MIB), MIB)
    del got


def test_a_descriptor_that_is_no_memory_is_refused_and_closed() -> None:
    pair, check = Pair(), LeakCheck("descriptors")
    one, other = os.pipe()
    with pytest.raises(ValueError, match="slot 0 is not of 5 bytes"):
        _begin(pair, pack_filled(0, True, 5), 5, (one,))
    os.close(other)
    check.verify()


def test_notes_out_of_place_fail_the_link() -> None:
    pair = Pair()
    pair.receiver.on_note(b"xyz", ())
    pair.sender.on_note(struct.pack("<I", 3), ())
    assert "a note of 3 bytes" in str(pair.from_receiver.failure)
    assert "a note of 4 bytes, where an empty one is due" in str(pair.from_sender.failure)


def test_a_slot_that_is_returned_and_was_not_out_fails_the_next_message() -> None:
    pair = Pair()
    pair.pass_on(pattern(100))
    pair.receiver._returns.board.post(3, usable=True)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="slot 3 was returned and was not out"):
        pair.send(pattern(100))


def test_a_board_that_is_too_small_fails_the_link() -> None:
    pair, descriptor = Pair(), new_memory(100)
    pair.receiver.on_note(BOARD, (descriptor,))
    assert "a board of 100 bytes, not 1024" in str(pair.from_receiver.failure)


def test_a_slot_without_a_board_is_refused() -> None:
    pair = Pair()
    with pytest.raises(ValueError, match="slot 0 cannot be returned: it is on no board"):
        _begin(pair, pack_filled(0, True, 5), 5, (new_memory(4096),))


# -- memory --------------------------------------------------------------------------------------


def test_memory_cannot_be_cut_short() -> None:
    descriptor = new_memory(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 4096)
    memory = mapped(descriptor)
    os.close(descriptor)
    assert memory.numel() == 8192


def test_no_descriptor_and_no_mapping_is_left() -> None:
    check = LeakCheck("descriptors", "shared mappings")
    pair = Pair()
    kept = [pair.pass_on(pattern(MIB, number)) for number in range(3)]
    open_now = LeakCheck("descriptors")
    kept.append(pair.pass_on(pattern(MIB)))
    open_now.verify()  # a slot takes none, once both ends have it
    pair.receiver.close(Deadline(SOON_S))
    pair.sender.close(Deadline(SOON_S))  # which may live on, in a handler that is closed
    assert torch.equal(kept[2], pattern(MIB, 2))  # a tensor outlives its link
    del kept
    check.verify()


def test_a_system_without_it_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert Shm.probe(ShmOptions()).reason == "it needs Linux's memfd, this is darwin"


def test_a_kernel_that_refuses_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    reason = Shm.probe(ShmOptions()).reason
    assert reason == "no shared memory without a name: [Errno 1] Operation not permitted"


@pytest.mark.parametrize("raised", [TimeoutError, RuntimeError])
def test_what_a_signal_handler_raises_is_no_verdict(
    raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "memfd_create", struck(raised))
    with pytest.raises(raised, match="a handler's"):
        Shm.probe(ShmOptions())


def test_what_a_signal_handler_raises_is_no_end_of_a_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair()
    monkeypatch.setattr(pair.receiver, "_look", struck(ValueError))
    with pytest.raises(ValueError, match="a handler's"):
        pair.receiver.on_note(pack_filled(0, True, 1), ())


def test_what_a_signal_handler_raises_is_no_failed_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, leaving = Pair(), Mock(pieces=[torch.zeros(1)])
    monkeypatch.setattr(pair.sender, "_pass", struck(TimeoutError))
    with pytest.raises(TimeoutError, match="a handler's"):
        pair.sender._pass_piece(leaving)  # type: ignore[attr-defined]
    leaving.done.failed.assert_not_called()


def test_a_python_without_it_asks_the_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert Shm.probe(ShmOptions())
    assert torch.equal(Pair().pass_on(pattern(MIB)), pattern(MIB))


def test_the_receiver_lets_go_of_what_the_sender_gives_up() -> None:
    pair = Pair(window=30, link_bytes=64 * MIB)
    kept = [pair.pass_on(pattern(2 * MIB)) for _ in range(24)]
    assert slots_of(pair) == 24
    del kept
    pair.read()
    kept = [pair.pass_on(pattern(8 * MIB, number)) for number in range(6)]
    assert sum(slot.numel() for slot in pair.receiver._slots.values()) <= 64 * MIB  # type: ignore[attr-defined]
    assert slots_of(pair) == pair.sender._ring.count  # type: ignore[attr-defined]
    for number, got in enumerate(kept):
        assert torch.equal(got, pattern(8 * MIB, number))


def test_a_larger_window_makes_for_more_slots() -> None:
    pair = Pair(window=2)
    kept = [pair.pass_on(pattern(MIB)) for _ in range(6)]
    pair.from_sender.window = 8
    kept += [pair.pass_on(pattern(MIB)) for _ in range(12)]
    assert slots_of(pair) == 9  # eight of ten are kept, one copies out


def test_however_large_the_window_what_is_kept_does_not_exhaust_mappings() -> None:
    pair = Pair(window=100_000, link_bytes=1024 * MIB)
    kept = [pair.pass_on(pattern(32 * KIB, number)) for number in range(1100)]
    assert slots_of(pair) == 1023  # 1022 are kept, the rest is copied out through one more
    for number, got in enumerate(kept):
        assert torch.equal(got, pattern(32 * KIB, number))
    assert Shm(ShmOptions()).footprint(100_000, 32 * KIB).slots == 1024


def test_a_piece_beyond_its_message_fails_the_link() -> None:
    pair = pieces()
    pair.hold = True
    _begin(pair, b"", 40 * KIB)
    pending = pair.send(pattern(MIB))
    assert pending is not None
    pair.read()
    assert not pending.over  # in core the failure ends it
    assert "65536 bytes do not fit into 40960" in str(pair.from_receiver.failure)


def test_descriptors_of_a_bad_note_are_closed() -> None:
    pair, check = Pair(), LeakCheck("descriptors")
    with pytest.raises(ValueError, match="a note of 3 bytes"):
        _begin(pair, b"abc", 5, os.pipe())
    check.verify()
