"""How the two ends of a link meet: handles both ways, and a first piece that must arrive."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import torch

from stagelink.errors import StagelinkError
from stagelink.transport.contract import Deadline
from stagelink.transport.lanes import reach

if TYPE_CHECKING:
    from stagelink.transport.contract import Port
    from stagelink_cupy.region import Region

__all__ = ["meet_receiver", "meet_sender"]

_LOOK_S = 0.005
_TEST_BYTES = 64
_YES, _NO = b"y", b"n"


def meet_receiver(port: Port, region: Region, deadline: Deadline) -> None:
    """The sender's part; blocks until the receiver has read a piece.

    Raises:
        TimeoutError: the receiver did not come in time, or a device did not finish.
        ConnectionError: it cannot use the memory; it has nothing open then.
    """
    board = _Board(port, deadline)
    piece = secrets.token_bytes(_TEST_BYTES)
    buffer = port.lane.buffer(_TEST_BYTES)
    buffer.copy_(torch.frombuffer(bytearray(piece), dtype=torch.uint8))
    region.copy(0, region.address(0), buffer.data_ptr(), _TEST_BYTES)
    if not region.device_ordered:
        reach(port.lane.moment(), port, deadline)
    board.put("offer", piece + region.handles())
    answer = board.take("answer")
    if answer[:1] == _NO:
        region.exported = False
        raise ConnectionError(answer[1:].decode())
    region.open(answer[1:])
    # Once more, the other way: now the receiver's event is waited for.
    region.copy(0, buffer.data_ptr(), region.address(0), _TEST_BYTES)
    reach(port.lane.moment(), port, deadline)


def meet_sender(port: Port, region: Region, deadline: Deadline) -> None:
    """The receiver's part; blocks until it has read what the sender has written.

    Raises:
        TimeoutError: the sender did not come in time, or a device did not finish.
        ConnectionError: the memory cannot be used; nothing is open then.
    """
    board = _Board(port, deadline)
    offer = board.take("offer")
    try:
        region.open(offer[_TEST_BYTES:])
        _read(port, region, offer[:_TEST_BYTES], deadline)
    except (StagelinkError, TimeoutError):
        raise  # the device may be at work still: what is open stays so
    except Exception as error:
        text = f"rank {port.rank} cannot use the device memory of rank {port.peer}: {error}"
        region.close()
        board.put("answer", _NO + text.encode())
        raise ConnectionError(text) from error
    board.put("answer", _YES + region.handles())


def _read(port: Port, region: Region, expected: bytes, deadline: Deadline) -> None:
    buffer = port.lane.buffer(_TEST_BYTES)
    region.copy(0, buffer.data_ptr(), region.address(0), _TEST_BYTES)
    reach(port.lane.moment(), port, deadline)
    if bytes(buffer.tolist()) != expected:
        raise ValueError("it does not hold what was written there")


class _Board:
    """What the ends of one link write to each other in the store of their pair."""

    def __init__(self, port: Port, deadline: Deadline) -> None:
        self._store = port.store()
        self._port = port
        self._deadline = deadline

    def put(self, what: str, value: bytes) -> None:
        self._store.set(self._key(what), value.hex())

    def take(self, what: str) -> bytes:
        """Wait for it in steps, so that a failure of the pipeline ends the wait."""
        key, port = self._key(what), self._port
        while not self._store.check([key]):
            if self._deadline.passed:
                raise TimeoutError(
                    f"rank {port.rank}: no {what} of rank {port.peer} for {port.link} within "
                    f"{self._deadline.seconds:g} s"
                )
            port.wait(_never, Deadline(_LOOK_S))
        return bytes.fromhex(self._store.get(key).decode())

    def _key(self, what: str) -> str:
        return f"{self._port.link.source}-{self._port.link.target}/{what}"


def _never() -> bool:
    return False
