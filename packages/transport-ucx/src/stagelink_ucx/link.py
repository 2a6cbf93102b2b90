"""The two ends of a link: the worker's messages, told apart by their tags.

The ends need each other's worker's address, which goes in a note. A tag is the sender's rank and
the number of the message on the link: so much is certain before a message that a receive never
gets the bytes of another one, after a failure too.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

from stagelink.transport.contract import Receiver, Sender
from stagelink_ucx.worker import Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from stagelink.transport.contract import Announce, Deadline, Done, Message, Port
    from stagelink.transport.header import Header
    from stagelink_ucx.worker import Worker

__all__ = ["UcxReceiver", "UcxSender"]

_NUMBERS = 1 << 32
_SEAL, _MAGIC = struct.Struct("<4sI"), b"ucx1"


def _sealed(address: bytes) -> bytes:
    """A worker's address, so that another worker can tell it from anything else.

    UCX itself takes it without its length, and ends the process where it cannot read it.
    """
    return _SEAL.pack(_MAGIC, zlib.crc32(address)) + address


def _unsealed(sealed: bytes) -> bytes:
    address = sealed[_SEAL.size :]
    if not address or sealed[: _SEAL.size] != _SEAL.pack(_MAGIC, zlib.crc32(address)):
        raise ValueError(f"{len(sealed)} bytes that are no address of a UCX worker")
    return address


class UcxSender(Sender):
    """The sending end.

    Args:
        worker: the rank's.
        port: for notes and the link's name.
    """

    def __init__(self, worker: Worker, port: Port) -> None:
        self._worker = worker
        self._port = port
        self._lane = Lane(port, f"{port.link}: sending")
        self._tag = port.rank * _NUMBERS
        self._number = 0
        worker.join(self._lane)
        port.note(_sealed(worker.address))

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        """Connect with the receiver's worker.

        Raises:
            ConnectionError: no wire leads there.
            ValueError: the note is no address.
        """
        del fds
        self._worker.connect(self._port.peer, _unsealed(note))
        self._port.room()

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        """Hand the payload to UCX, once the receiver's address is known.

        Raises:
            ConnectionError: UCX does not take it.
        """
        if not self._worker.connected(self._port.peer):
            return False
        announce()
        if message.header.payload_bytes:
            tag, self._number = self._tag + self._number, (self._number + 1) % _NUMBERS
            self._worker.send(self._lane, tag, message.payload, done)
        else:
            self._worker.pass_over(self._lane, message.payload, done)
        return True

    def abort(self, cause: BaseException) -> None:
        """Let the worker's close wait for nothing that the receiver has not taken."""
        del cause
        self._worker.give_up(self._port.peer)

    def close(self, deadline: Deadline) -> None:
        """Leave the worker; what UCX has of this end's it keeps until it is through with it."""
        del deadline
        self._worker.leave(self._lane)


class UcxReceiver(Receiver):
    """The receiving end.

    Args:
        worker: the rank's.
        port: for notes and the link's name.
    """

    def __init__(self, worker: Worker, port: Port) -> None:
        self._worker = worker
        self._port = port
        self._lane = Lane(port, f"{port.link}: receiving")
        self._tag = port.peer * _NUMBERS
        self._number = 0
        worker.join(self._lane)
        port.note(_sealed(worker.address))

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        """Connect with the sender's worker, so that UCX tells of its failure.

        Raises:
            ConnectionError: no wire leads there.
            ValueError: the note is no address.
        """
        del fds
        self._worker.connect(self._port.peer, _unsealed(note))

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        """Have UCX receive into the accepted buffer; the bytes may be here already.

        Raises:
            ConnectionError: UCX does not take it.
        """
        del note, fds
        buffer = accept()
        if header.payload_bytes:
            tag, self._number = self._tag + self._number, (self._number + 1) % _NUMBERS
            self._worker.receive(self._lane, tag, buffer, done)
        else:
            self._worker.pass_over(self._lane, buffer, done)

    def abort(self, cause: BaseException) -> None:
        """Abort; as `UcxSender.abort`."""
        del cause
        self._worker.give_up(self._port.peer)

    def close(self, deadline: Deadline) -> None:
        """Close; as `UcxSender.close`."""
        del deadline
        self._worker.leave(self._lane)
