"""What a transport's end of a link asks of core."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from stagelink.errors import TransportError
from stagelink.exchange.out_link import OutLink
from stagelink.transport.header import Header, MessageKind
from stagelink.transport.interrupts import stops_caller

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from stagelink.exchange.link_end import LinkEnd
    from stagelink.exchange.wiring import Wiring
    from stagelink.transport.contract import Deadline, Link, Port
    from stagelink.transport.lanes import Lane

__all__ = ["other_end", "port_of"]


def other_end(link: Link, rank: int) -> int:
    """The rank at the end that is not this rank's."""
    return link.target if link.source == rank else link.source


def port_of(wiring: Wiring, link: Link, end: LinkEnd, number: int) -> Port:
    """What a transport gets with a link's end.

    Args:
        wiring: whose link it is.
        link: the link.
        end: this rank's end of it.
        number: what the link is called in notes between its two ranks.
    """
    return _Port(wiring, link, end, number)


class _Port:
    def __init__(self, wiring: Wiring, link: Link, end: LinkEnd, number: int) -> None:
        self.link = link
        self._wiring = wiring
        self._end = end
        self._number = number

    @property
    def rank(self) -> int:
        return self._wiring.rank

    @property
    def peer(self) -> int:
        return other_end(self.link, self.rank)

    @property
    def address(self) -> str:
        return self._wiring.plane.address_with(self.peer)

    @property
    def window(self) -> int:
        return self._wiring.window_of(self.link)

    @property
    def lane(self) -> Lane:
        return self._end.lane

    def note(self, note: bytes, fds: Sequence[int] = ()) -> None:
        self._wiring.plane.post(
            self.peer, Header(MessageKind.NOTE, link=self._number), note, fds=fds
        )

    def room(self) -> None:
        if isinstance(self._end, OutLink):
            self._end.room()

    def sent(self) -> None:
        if isinstance(self._end, OutLink):
            self._end.finish_oldest()

    def fail(self, error: BaseException) -> None:
        if stops_caller(error):  # which is no failure of the transport's
            raise error
        failure = TransportError(f"{self.link}: {type(error).__name__}: {error}")
        failure.__cause__ = error
        self._wiring.plane.blame(failure)

    def wait(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        def look() -> bool:
            if ready():
                return True
            self._end.check_open()
            return self._wiring.plane.check_here(self.peer, f"an answer on {self.link}")

        return self._wiring.plane.wait_while_closing(look, deadline)

    def pause(self, seconds: float) -> None:
        # Not by reading, which counts whole milliseconds.
        self._end.check_open()
        self._wiring.plane.check_failure()
        time.sleep(seconds)

    def wake(self) -> None:
        self._wiring.plane.changed()

    def call(self, action: Callable[[], None]) -> None:
        self._wiring.plane.poller.call(action)

    def store(self) -> Store:
        low, high = sorted((self.link.source, self.link.target))
        return self._wiring.rendezvous.pair_store(f"{low}-{high}/{self.link.transport}")

    def buffer(self, size_bytes: int) -> torch.Tensor:
        return self._wiring.pool.take(size_bytes)
