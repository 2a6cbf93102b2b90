"""What has arrived is found by its key, whatever came before."""

from __future__ import annotations

import pytest

from stagelink.errors import ProtocolError
from stagelink.exchange.inbox import Inbox
from stagelink.links.arrival import Arrival, Key
from stagelink.transport.header import Direction, Header, MessageKind


def _arrival(
    microbatch: int,
    *,
    session: int = 0,
    edge: int = 0,
    direction: Direction = Direction.FORWARD,
    peer: int = 1,
    payload_bytes: int = 0,
) -> Arrival:
    header = Header(
        MessageKind.DATA,
        direction,
        session=session,
        edge=edge,
        microbatch=microbatch,
        payload_bytes=payload_bytes,
    )
    return Arrival(header, peer)


def test_each_field_of_a_key_tells_messages_apart() -> None:
    inbox: Inbox[Arrival] = Inbox()
    arrivals = [
        _arrival(0),
        _arrival(1),
        _arrival(0, session=1),
        _arrival(0, edge=1),
        _arrival(0, direction=Direction.BACKWARD),
    ]
    for arrival in arrivals:
        inbox.put(arrival)
    assert len(inbox) == 5
    for arrival in reversed(arrivals):
        assert inbox.get(arrival.key) is arrival
        assert inbox.take(arrival.key) is arrival
        assert inbox.get(arrival.key) is None
    assert len(inbox) == 0


def test_the_same_message_twice_is_a_protocol_error() -> None:
    inbox: Inbox[Arrival] = Inbox()
    inbox.put(_arrival(3, edge=2))
    with pytest.raises(ProtocolError, match=r"rank 1 sent microbatch 3 \(forward, session 0\) of"):
        inbox.put(_arrival(3, edge=2))


def test_a_second_try_takes_the_place_of_what_was_refused() -> None:
    inbox: Inbox[Arrival] = Inbox()
    refused, better = _arrival(0), _arrival(0)
    refused.refusal = "wrong shape"
    inbox.put(refused)
    inbox.put(better)
    assert inbox.take(better.key) is better


def test_a_session_is_taken_as_a_whole() -> None:
    inbox: Inbox[Arrival] = Inbox()
    mine = [_arrival(0), _arrival(1, edge=1)]
    other = _arrival(0, session=1)
    for arrival in (*mine, other):
        inbox.put(arrival)
    assert inbox.take_session(0) == mine
    assert inbox.get(other.key) is other


def test_all_is_taken_at_the_end() -> None:
    inbox: Inbox[Arrival] = Inbox()
    arrivals = [_arrival(0), _arrival(0, session=1)]
    for arrival in arrivals:
        inbox.put(arrival)
    assert inbox.clear() == arrivals
    assert len(inbox) == 0


def test_the_last_one_is_remembered_by_edge_direction_peer_and_session() -> None:
    inbox: Inbox[Arrival] = Inbox()
    key = Key(0, 0, Direction.FORWARD, 9)
    assert inbox.last_microbatch(key, 1) is None
    for arrival in (_arrival(4), _arrival(2), _arrival(7, peer=2), _arrival(8, edge=1)):
        inbox.put(arrival)
        inbox.take(arrival.key)
    assert inbox.last_microbatch(key, 1) == 2
    assert inbox.last_microbatch(key, 2) == 7
    assert inbox.last_microbatch(key._replace(direction=Direction.BACKWARD), 1) is None
    assert inbox.last_microbatch(key._replace(session=1), 1) is None


def test_a_key_reads_well() -> None:
    assert str(Key(2, 0, Direction.BACKWARD, 5)) == "microbatch 5 (backward, session 2)"


def test_it_knows_how_much_it_holds() -> None:
    inbox: Inbox[Arrival] = Inbox()
    for microbatch in range(4):
        inbox.put(_arrival(microbatch, session=microbatch // 2, payload_bytes=10**microbatch))
    refused = _arrival(4, session=1, payload_bytes=7)
    refused.refusal = "not now"
    inbox.put(refused)
    inbox.put(_arrival(4, session=1, payload_bytes=20_000))
    assert inbox.held_bytes == 21_111
    inbox.take(_arrival(1).key)
    assert inbox.held_bytes == 21_101
    inbox.take_session(1)
    assert inbox.held_bytes == 1
    inbox.clear()
    assert inbox.held_bytes == 0
