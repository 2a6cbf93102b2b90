"""Chain of waits: a rank whose time is up asks along it, and names the last.

The rank that it waited for may itself wait for another. So it asks; a rank that is asked says at
once what it waits for, and asks that rank in turn. Reading answers for a rank that computes or
waits; one that is stopped says nothing, and is the last that is named.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from stagelink.control.connection import Frame
from stagelink.control.framing import decode, encode
from stagelink.control.reader import Reader
from stagelink.deadline import Deadline
from stagelink.errors import ProtocolError
from stagelink.transport.header import Direction, Header, MessageKind

_ANSWER_S = 1.0
"""How long the ranks of a chain have to answer, all together."""

_MAX_TEXT = 500


class Awaited(NamedTuple):
    """Target of a caller's wait: the rank that it is to come from, and what tells what it is."""

    peer: int
    what: Callable[[], str]


class _Step(NamedTuple):
    peer: int | None
    what: str


class Chain:
    """Waits of one rank, and what it hears of the others'."""

    def __init__(
        self,
        rank: int,
        reader: Reader,
        peers: Collection[int],
        post: Callable[[int, Header, bytes], None],
        wait: Callable[[Callable[[], bool], Deadline], bool],
    ) -> None:
        self._rank = rank
        self._reader = reader
        self._peers = peers
        self._post = post
        self._wait = wait
        self.waits: dict[int, Awaited] = {}  # what each thread waits for, by its identifier
        self._heard: dict[int, dict[int, _Step]] = {}
        self._asked = 0

    def explain(self, awaited: Awaited) -> str:
        """Explain why what is awaited does not come: the end of a sentence that has said who was.

        Asks, for a second at most; raises the failure of a handler that failed meanwhile.
        """
        peer = awaited.peer
        if peer not in self._peers:
            return ""
        with self._reader.lock:
            number, self._asked = self._asked, self._asked + 1
            heard = self._heard[number] = {}
        self.waits[threading.get_ident()] = awaited  # others may ask at this very moment
        try:
            self._ask(peer, number, [self._rank])
            self._wait(lambda: self._is_whole(peer, heard), Deadline(_ANSWER_S))
        finally:
            self.waits.pop(threading.get_ident(), None)
            del self._heard[number]
        return self._told(peer, heard)

    def _ask(self, peer: int, number: int, path: list[int]) -> None:
        header = Header(MessageKind.WAITS, Direction.FORWARD, sequence=number)
        self._post(peer, header, encode({"path": path}))

    def _is_whole(self, peer: int, heard: Mapping[int, _Step]) -> bool:
        *before, last = self._follow(peer, heard)
        cycle = last in (self._rank, *before)
        return cycle or (last in heard and heard[last].peer is None)

    def _follow(self, peer: int, heard: Mapping[int, _Step]) -> list[int]:
        """The ranks of the chain, from the one that was waited for to the last that is known."""
        ranks = [peer]
        while (step := heard.get(ranks[-1])) is not None and step.peer is not None:
            ranks.append(step.peer)
            if step.peer in (self._rank, *ranks[:-1]):  # a cycle
                break
        return ranks

    def _told(self, peer: int, heard: Mapping[int, _Step]) -> str:
        *before, last = self._follow(peer, heard)
        words = [f"rank {rank} waits for rank {heard[rank].peer} ({heard[rank].what})"
                 for rank in before]  # fmt: skip
        if last in (self._rank, *before):
            words.append("so the ranks wait for each other in a cycle")
        elif last in heard:
            words.append(
                f"rank {last} waits for no other: it is at work, or hangs, in code of its own"
            )
        else:
            words.append(
                f"rank {last} does not answer: it is stopped, out of reach, or in code that keeps "
                "Python's interpreter from its other threads"
            )
        return f"; {', '.join(words)}"

    # -- on the reading thread

    def hear(self, peer: int, frame: Frame) -> None:
        """Answer a question that came, hear an answer, or pass either on."""
        fields, number = decode(frame.note), frame.header.sequence
        path = fields.get("path")
        if not isinstance(path, list) or not path or not all(type(rank) is int for rank in path):
            raise ProtocolError(f"rank {peer}: WAITS along {path!r:.50}, which are no ranks")
        if frame.header.direction is Direction.FORWARD:
            self._answer(peer, number, path)
        elif len(path) == 1:
            self._keep(peer, number, fields)
        elif path[-2] in self._peers:
            self._say(path[-2], number, path[:-1], fields)

    def _answer(self, peer: int, number: int, path: list[int]) -> None:
        mine = next(iter(tuple(self.waits.values())), None)
        step = {"rank": self._rank, "peer": None, "what": ""}
        if mine is not None:
            step |= {"peer": mine.peer, "what": mine.what()[:_MAX_TEXT]}
        self._say(peer, number, path, step)
        if mine is not None and mine.peer not in path and mine.peer in self._peers:
            self._ask(mine.peer, number, [*path, self._rank])

    def _say(self, peer: int, number: int, path: list[int], fields: Mapping[str, Any]) -> None:
        header = Header(MessageKind.WAITS, Direction.BACKWARD, sequence=number)
        said = {name: fields.get(name) for name in ("rank", "peer", "what")}
        self._post(peer, header, encode({"path": path, **said}))

    def _keep(self, peer: int, number: int, fields: Mapping[str, Any]) -> None:
        rank, awaited, what = (fields.get(name) for name in ("rank", "peer", "what"))
        if type(rank) is not int or not (awaited is None or type(awaited) is int):
            raise ProtocolError(f"rank {peer}: WAITS of rank {rank!r:.50} for {awaited!r:.50}")
        with self._reader.lock:
            heard = self._heard.get(number)
            if heard is not None:
                heard[rank] = _Step(awaited, str(what)[:_MAX_TEXT])
        self._reader.changed()
