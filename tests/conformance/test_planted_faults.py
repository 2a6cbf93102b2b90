"""The conformance tests find planted faults, each by the test that is named after it."""

from __future__ import annotations

import inspect
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from stagelink.testing import RankFailedError, RankPool
from stagelink.testing.conformance import TransportConformance, ready, runner
from stagelink.testing.subject import Subject
from tests.conformance import planted, planted_waits

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PATIENCE_S = 1.5
"""Less than the kit has: most of what is planted here is found by waiting for so long."""


class Found(NamedTuple):
    """How a fault is found: by which test, with which of its parameters, in which words."""

    test: str
    text: str
    parameters: Mapping[str, Any] = MappingProxyType({})


FOUND_BY = {
    "DropsOne": Found(
        "test_nothing_is_lost",
        "lost: messages [3] of 30 never arrived",
        {"size_bytes": 100},
    ),
    "SwapsTwo": Found(
        "test_order_is_kept",
        "out of order: what came was [0, 1, 2, 4, 3, 5",
        {"size_bytes": 100},
    ),
    "ReusesABuffer": Found(
        "test_what_was_received_is_never_overwritten",
        "message 0 was overwritten while the user held it",
        {"size_bytes": 300_000},
    ),
    "WaitsInBegin": Found(
        "test_a_receive_keeps_its_deadline",
        "Receiver.begin still blocks 1.5 s after: it waits for the sender",
    ),
    "DoneTooSoon": Found("test_values", "arrived changed: "),
    "DoneTwice": Found("test_values", "a send is done twice"),
    "Overtakes": Found("test_values", "a send is done before the one that began before it"),
    "DoneUnannounced": Found("test_values", "a send is done and was not announced"),
    "NeverHasRoom": Found(
        "test_nothing_is_lost",
        "lost: messages [0, 1, 2, 3",
        {"size_bytes": 100},
    ),
    "HasRoomAndSaysNothing": Found(
        "test_what_had_no_room_is_sent_when_there_is",
        "Sender.begin, which returned False then, has not called port.room() since",
        {"size_bytes": 100},
    ),
    "WaitsForItsPeer": Found(
        "test_receives_out_of_order",
        "s on thread 'MainThread' in WaitingSender.begin (",
    ),
    "IsDoneWithALock": Found(
        "test_what_had_no_room_is_sent_when_there_is",
        "core called it in the done() of Locking.__call__ (",
        {"size_bytes": 4 * 1024 * 1024},
    ),
    "HasRoomWithALock": Found(
        "test_what_had_no_room_is_sent_when_there_is",
        "core called it in the port.room() of RoomySender.make_room (",
        {"size_bytes": 4 * 1024 * 1024},
    ),
    "AsksForEver": Found(
        "test_falls_silent", "an action of Port.watch returns True, and is called again, for ever"
    ),
    "LeavesItReady": Found(
        "test_falls_silent",
        "an action of Port.watch leaves its descriptor ready, and is called again, for ever",
    ),
    "KicksForEver": Found(
        "test_falls_silent", "an action of Port.call has itself called again, for ever"
    ),
    "IsNeverDone": Found(
        "test_what_had_no_room_is_sent_when_there_is",
        "link 0→1: the receive of microbatch 2 (forward, session 0) on edge 'e0', "
        "100 bytes, began ",
        {"size_bytes": 100},
    ),
    "BlocksReading": Found("test_values", "an action of Port.watch took 2.0 s, it had 0 s"),
    "SwallowsADeath": Found(
        "test_a_peer_that_breaks_off_is_no_end_of_a_message",
        "a receive is done as if the message had arrived, although the other end has broken off",
    ),
    "ChangesTheDtype": Found("test_values", "a receive changes the dtype: it gives torch.float32"),
    "LosesAHandle": Found(
        "test_every_handle_of_a_send_is_done",
        "the handle of the send of message 5 is lost",
        {"size_bytes": 100},
    ),
    "BlocksInClose": Found(
        "test_close_keeps_its_deadline", "Sender.close still blocks 1.5 s after"
    ),
    "LeaksAThread": Found("test_close_leaves_nothing", "  thread 'leaked'"),
    "Truncates": Found("test_sizes", "from byte 65536 to byte 65536", {"synchronous": False}),
    "DeathIsAnEnd": Found(
        "test_a_peer_that_dies_is_no_end_of_a_message",
        "a receive is done as if the message had arrived, although the other end has died",
    ),
    "LeavesAFile": Found(
        "test_close_leaves_nothing",
        "left behind in the folder for temporary files: ['litter",
    ),
    "BeginsOnOneThread": Found(
        "test_sends_outlive_their_session",
        "RuntimeError: another thread",
        {"size_bytes": 300_000},
    ),
    "StallsAtTheSixth": Found(
        "test_close_takes_in_what_is_queued",
        "closing with 6 messages queued: ",
    ),
    "HalfDuplex": Found("test_both_ends_close_at_once", "closing with 6 messages queued: "),
    "WaitsForNobody": Found(
        "test_close_waits_for_a_late_sender",
        "closing with 6 messages queued: TransportError: ",
    ),
    "IgnoresAbort": Found(
        "test_abort_ends_a_receive",
        "a receive still waits 1.5 s after its abort",
    ),
}


@pytest.fixture
def given(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What the tests of the kit have for parameters, for one transport and its own ranks."""
    fault = request.getfixturevalue("fault")
    cls = getattr(planted, fault, None) or getattr(planted_waits, fault)
    subject = ready(Subject(cls.name, (cls,), patience_s=PATIENCE_S))
    with RankPool() as pool:
        yield {"subject": subject, "run": runner(subject, pool)}


@pytest.mark.parametrize("fault", FOUND_BY)
def test_a_planted_fault_is_found_by_name(fault: str, given: dict[str, Any]) -> None:
    found = FOUND_BY[fault]
    test = getattr(TransportConformance(), found.test)
    given |= found.parameters
    with pytest.raises((AssertionError, RankFailedError)) as caught:
        test(**{name: given[name] for name in inspect.signature(test).parameters})
    assert found.text in str(caught.value)
