"""The two ends of a link between GPUs: by way of host memory, on the link's stream.

No GPU has run this module yet; on a double of one it has.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from stagelink.transport.blocking import Finisher, synchronize
from stagelink.transport.interrupts import stops_caller
from stagelink_gloo.link import GlooReceiver, GlooSender

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from stagelink.transport.contract import Announce, Deadline, Done, Message, Port
    from stagelink.transport.header import Header
    from stagelink_gloo.pair import Pair

__all__ = ["StagedReceiver", "StagedSender"]


class StagedSender(GlooSender):
    """The sending end: the copy to host memory is queued at once, and sent when it is there.

    Args:
        pair: the connection with the receiver's rank.
        port: for the stream.
    """

    def __init__(self, pair: Pair, port: Port) -> None:
        super().__init__(pair, port)
        self._port = port
        self._finisher = Finisher(port)

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        """Announce it, and queue the copy."""
        announce()
        size = message.header.payload_bytes
        if not size:
            done()
            return True
        stream = self._port.stream
        staging = stream.staging(size)
        stream.copy(staging, message.payload)
        copied = partial(synchronize, stream.record(), self._port)
        self._finisher.submit(copied, _Copied(self, staging, done))
        return True

    def close(self, deadline: Deadline) -> None:
        """End the thread that waits for copies."""
        self._finisher.close(deadline)
        super().close(deadline)


class _Copied:
    """What is done when a message is in host memory: it is sent from there."""

    def __init__(self, sender: GlooSender, staging: torch.Tensor, done: Done) -> None:
        self._sender = sender
        self._staging = staging
        self._done = done

    def __call__(self, payload: torch.Tensor | None = None) -> None:
        del payload
        try:
            self._sender.send(self._staging, self._done)
        except RuntimeError as error:
            if stops_caller(error):
                raise
            self.failed(error)

    def failed(self, error: BaseException) -> None:
        self._done.failed(error)


class StagedReceiver(GlooReceiver):
    """The receiving end.

    Args:
        pair: the connection with the sender's rank.
        port: for the stream and receipts.
    """

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        """Receive into host memory; the bytes come in whether anybody waits or not."""
        del note, fds
        buffer = accept()
        if not header.payload_bytes:
            done()
            return
        staging = self._port.stream.staging(header.payload_bytes)
        self._finisher.submit(partial(self._receive, self.receive(staging), staging, buffer), done)

    def _receive(
        self, wait: Callable[[], None], staging: torch.Tensor, buffer: torch.Tensor
    ) -> None:
        wait()
        self._port.stream.copy(buffer, staging)
        # To its end: the host memory goes back to where it came from.
        synchronize(self._port.stream.record(), self._port)
