"""The meeting of the two ends of a link: handles both ways, and a first piece that must arrive."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import torch

from stagelink.errors import StagelinkError
from stagelink.transport.blocking import synchronize
from stagelink.transport.board import Board

if TYPE_CHECKING:
    from stagelink.transport.contract import Deadline, Port
    from stagelink_cupy.region import Region

__all__ = ["meet_receiver", "meet_sender"]

_TEST_BYTES = 64
_YES, _NO = b"y", b"n"


def meet_receiver(port: Port, region: Region, deadline: Deadline) -> None:
    """The sender's part; blocks until the receiver has read a piece.

    Raises:
        TimeoutError: the receiver did not come in time, or a device did not finish.
        ConnectionError: it cannot use the memory; it has nothing open then.
    """
    board = _board(port, deadline)
    piece = secrets.token_bytes(_TEST_BYTES)
    buffer = port.stream.buffer(_TEST_BYTES)
    buffer.copy_(torch.frombuffer(bytearray(piece), dtype=torch.uint8))
    region.copy(0, region.address(0), buffer.data_ptr(), _TEST_BYTES)
    if not region.device_ordered:
        synchronize(port.stream.record(), port, deadline)
    board.put("offer", (piece + region.handles()).hex())
    answer = bytes.fromhex(board.take("answer", _missing(port, "answer")))
    if answer[:1] == _NO:
        region.exported = False
        raise ConnectionError(answer[1:].decode())
    region.open(answer[1:])
    # Once more, the other way: now the receiver's event is waited for.
    region.copy(0, buffer.data_ptr(), region.address(0), _TEST_BYTES)
    synchronize(port.stream.record(), port, deadline)


def meet_sender(port: Port, region: Region, deadline: Deadline) -> None:
    """The receiver's part; blocks until it has read what the sender has written.

    Raises:
        TimeoutError: the sender did not come in time, or a device did not finish.
        ConnectionError: the memory cannot be used; nothing is open then.
    """
    board = _board(port, deadline)
    offer = bytes.fromhex(board.take("offer", _missing(port, "offer")))
    try:
        region.open(offer[_TEST_BYTES:])
        _read(port, region, offer[:_TEST_BYTES], deadline)
    except (StagelinkError, TimeoutError):
        raise  # the device may be at work still: what is open stays so
    except Exception as error:
        text = f"rank {port.rank} cannot use the device memory of rank {port.peer}: {error}"
        region.close()
        board.put("answer", (_NO + text.encode()).hex())
        raise ConnectionError(text) from error
    board.put("answer", (_YES + region.handles()).hex())


def _read(port: Port, region: Region, expected: bytes, deadline: Deadline) -> None:
    buffer = port.stream.buffer(_TEST_BYTES)
    region.copy(0, buffer.data_ptr(), region.address(0), _TEST_BYTES)
    synchronize(port.stream.record(), port, deadline)
    if bytes(buffer.tolist()) != expected:
        raise ValueError("it does not hold what was written there")


def _board(port: Port, deadline: Deadline) -> Board:
    return Board(port, deadline, f"{port.link.source}-{port.link.target}/")


def _missing(port: Port, what: str) -> str:
    return f"no {what} of rank {port.peer} for {port.link}"
