"""Messages that come in just as their session is left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from stagelink.control.connection import Frame
from stagelink.exchange.incoming import Incoming
from stagelink.links.arrival import Key
from stagelink.links.window import PeerWindow
from stagelink.transport.header import Direction, Flag, Header, MessageKind

if TYPE_CHECKING:
    from collections.abc import Callable


class Rank:
    """What an `Incoming` needs of its rank; the lock lets another thread in as it is let go."""

    def __init__(self) -> None:
        self.credit: list[tuple[int, ...]] = []
        self.calls: list[Callable[[], None]] = []
        self.as_it_is_let_go: list[Callable[[], object]] = []
        plane = SimpleNamespace(
            lock=self,
            reader=SimpleNamespace(call=self.calls.append),
            handle=lambda kind, handler: None,
        )
        edge = SimpleNamespace(name="e", index=0)
        route = SimpleNamespace(
            answers=None, window=PeerWindow("e", 0), has_contract=False, edge=edge, peer=0
        )
        node: Any = SimpleNamespace(
            plane=plane,
            wiring=SimpleNamespace(into={(0, Direction.FORWARD, 0): route}),
            plan=SimpleNamespace(limits=SimpleNamespace(receive_bytes=None)),
        )
        sessions: Any = SimpleNamespace(find=lambda number, peer: None, records={}, left=-1)
        self.incoming = Incoming(node, sessions, cast("Any", self), None)

    def give_credit(self, *to: int) -> None:
        self.credit.append(to)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        if self.as_it_is_let_go:
            self.as_it_is_let_go.pop()()


def test_a_message_whose_session_is_left_as_it_comes_gives_its_credit_back_once() -> None:
    rank = Rank()

    def leave() -> None:
        message = rank.incoming.inbox.take_whole(Key(0, 0, Direction.FORWARD, 0))
        assert message is not None
        rank.incoming.drop([message])

    rank.as_it_is_let_go.append(leave)
    header = Header(
        MessageKind.DATA, Direction.FORWARD, Flag.INLINE, dtype_code=1, payload_bytes=4
    )
    rank.incoming._on_message(0, Frame(header, b"", b"abcd", []))
    for call in rank.calls:
        call()
    assert rank.credit == [(0, 0, 0, 0)]
