"""Receives posted ahead: used by what fits them, in the way of nothing else, let go at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from stagelink_gloo.ahead import ABSENT, MOST_BYTES, STALE, Ask, Places, parse
from tests.gloo.conftest import close
from tests.gloo.twin import holdings, left_since, pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.gloo.twin import Sent, Twin

Twins = tuple["Twin", "Twin"]

SMALL, LARGE = 50_000, MOST_BYTES


def payload_of(size_bytes: int, seed: int = 0) -> torch.Tensor:
    """A pattern that may go into a posted receive."""
    payload = pattern(size_bytes, seed)
    payload[-1] = 1
    return payload


def passed(twins: Twins, payload: torch.Tensor) -> Ask:
    """Have a message arrive unchanged; how it went."""
    sent = twins[0].send(payload)
    incoming = twins[1].next()
    assert torch.equal(incoming.take(), payload)
    sent.wait()
    return parse(incoming.note)[0]


def post(twins: Twins, size_bytes: int) -> None:
    """Have a receive posted for this size."""
    assert passed(twins, payload_of(size_bytes)) is Ask.NOTHING
    assert passed(twins, payload_of(size_bytes)) is Ask.POST


@pytest.mark.parametrize("size_bytes", [SMALL, LARGE])
def test_a_size_that_comes_again_finds_its_receive_posted(twins: Twins, size_bytes: int) -> None:
    post(twins, size_bytes)
    for seed in range(5):
        assert passed(twins, payload_of(size_bytes, seed)) is Ask.TAKE


def test_it_goes_to_gloo_before_it_is_announced(
    twins: Twins, monkeypatch: pytest.MonkeyPatch
) -> None:
    post(twins, SMALL)
    order: list[str] = []
    pair, post_frame = twins[0].sender._pair, twins[0].post  # type: ignore[attr-defined]
    send = pair.send

    def sending(*given: Any) -> Any:
        order.append("gloo")
        return send(*given)

    def announcing(*given: Any) -> None:
        order.append("announce")
        post_frame(*given)

    monkeypatch.setattr(pair, "send", sending)
    monkeypatch.setattr(twins[0], "post", announcing)
    assert passed(twins, payload_of(SMALL)) is Ask.TAKE
    assert order == ["gloo", "announce"]


def test_a_payload_that_nobody_would_see_come_waits_for_its_receiver(twins: Twins) -> None:
    post(twins, SMALL)
    unseen = payload_of(SMALL)
    unseen[-1] = ABSENT
    assert passed(twins, unseen) is Ask.NOTHING
    assert passed(twins, payload_of(SMALL)) is Ask.TAKE


def test_other_sizes_pass_a_posted_receive(twins: Twins) -> None:
    post(twins, SMALL)
    for size_bytes in (SMALL - 1, SMALL + 1, 1, 0):
        assert passed(twins, payload_of(size_bytes) if size_bytes else pattern(0)) is Ask.NOTHING
    assert passed(twins, payload_of(SMALL)) is Ask.TAKE


def test_sizes_in_turn_have_a_receive_each(twins: Twins) -> None:
    sizes = (SMALL, LARGE)
    for size_bytes in sizes:
        post(twins, size_bytes)
    for number in range(6):
        assert passed(twins, payload_of(sizes[number % 2], number)) is Ask.TAKE


def test_none_is_posted_for_what_is_too_large(twins: Twins) -> None:
    for _ in range(3):
        assert passed(twins, payload_of(MOST_BYTES + 1)) is Ask.NOTHING


@pytest.mark.parametrize("size_bytes", [SMALL, LARGE])
def test_one_that_is_out_of_use_goes_to_another_size(twins: Twins, size_bytes: int) -> None:
    sizes = [size_bytes - number for number in range(twins[1].sender._places._most())]  # type: ignore[attr-defined]
    for size in sizes:
        post(twins, size)
    asked = [passed(twins, payload_of(100)) for _ in range(STALE + len(sizes) + 2)]
    assert asked.count(Ask.MOVE) == 1
    assert asked[-1] is Ask.TAKE
    assert passed(twins, payload_of(sizes[0])) is Ask.NOTHING  # it was the oldest
    for size in sizes[1:]:
        assert passed(twins, payload_of(size)) is Ask.TAKE


def test_four_in_flight_stay_in_order(twins: Twins) -> None:
    sizes = [SMALL, SMALL, LARGE, 9, SMALL, LARGE, SMALL, 10] * 5
    under_way: list[Sent] = []
    for number, size in enumerate(sizes):
        if len(under_way) == 4:
            under_way.pop(0).wait()
        under_way.append(twins[0].send(payload_of(size, number)))
    for number, size in enumerate(sizes):
        assert torch.equal(twins[1].next().take(), payload_of(size, number))
    for sent in under_way:
        sent.wait()


@pytest.mark.parametrize("size_bytes", [SMALL, LARGE])
def test_an_abort_wakes_who_waits_for_it(twins: Twins, size_bytes: int) -> None:
    post(twins, size_bytes)
    twins[0].only_announce(size_bytes, bytes([Ask.TAKE, 0]))
    incoming = twins[1].next()
    twins[1].fail(ConnectionAbortedError("for a test"))
    with pytest.raises(ConnectionError):
        incoming.take(2)


@pytest.mark.parametrize("aborted", [False, True])
def test_posted_receives_leave_nothing(connect: Callable[..., Twins], aborted: bool) -> None:
    close(connect())
    before = holdings()
    twins = connect()
    for size_bytes in (SMALL, LARGE):
        post(twins, size_bytes)
    if aborted:
        twins[0].fail(ConnectionAbortedError("for a test"))
    close(twins)
    assert left_since(before) == (0, 0)


def test_there_are_no_more_than_the_window_has() -> None:
    places = Places(lambda: 2)
    asked = [places.choose(payload_of(SMALL)).ask for _ in range(5)]
    assert asked == [Ask.NOTHING, Ask.POST, Ask.POST, Ask.NOTHING, Ask.NOTHING]
