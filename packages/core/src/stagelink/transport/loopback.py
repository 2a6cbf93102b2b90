"""Core's own transport: between ranks that are threads of one process.

It makes a whole pipeline debuggable in one process and is the oracle of the tests. A message is
handed over in ``begin``, on both sides: nothing is left to wait for.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar
from weakref import WeakValueDictionary

import torch

from stagelink.deadline import Deadline
from stagelink.transport.contract import (
    API_VERSION,
    Announce,
    Capabilities,
    Done,
    Link,
    Message,
    NoOptions,
    Port,
    Receiver,
    Sender,
    Transport,
    Verdict,
)
from stagelink.transport.header import Header
from stagelink.transport.hooks import hookimpl


class _Mailbox:
    """Messages between two threads, in order. Both ends hold it, so it dies with the later one."""

    def __init__(self) -> None:
        self._messages: deque[torch.Tensor] = deque()
        self._closed = False
        self._lock = threading.Lock()

    def put(self, message: torch.Tensor) -> None:
        with self._lock:
            if not self._closed:
                self._messages.append(message)

    def take(self) -> torch.Tensor | None:
        with self._lock:
            return self._messages.popleft() if self._messages else None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._messages.clear()

    def __len__(self) -> int:
        return len(self._messages)


_mailboxes: WeakValueDictionary[bytes, _Mailbox] = WeakValueDictionary()
_names = itertools.count()


class Loopback(Transport):
    """Hands tensors over within the process."""

    name: ClassVar[str] = "loopback"
    api_version: ClassVar[tuple[int, int]] = API_VERSION
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=frozenset({"cpu"}),
        auto_rank=0,
        same_server=True,
        same_process=True,
        in_flight=4,
        copies_on_begin=True,
    )

    @classmethod
    def probe(cls, options: NoOptions) -> Verdict:
        """Always usable."""
        del options
        return Verdict(True)

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
        """Needs no peer."""
        del link, deadline
        return _Sender(port)

    def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> Receiver:
        """Needs no peer."""
        del link, deadline
        return _Receiver(port)


class _Sender(Sender):
    def __init__(self, port: Port) -> None:
        self._port = port
        self._mailbox: _Mailbox | None = None

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        if self._mailbox is None:
            return False  # the receiver's note has not come yet
        self._mailbox.put(message.payload.clone())
        announce()
        done()
        return True

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        """The mailbox's name."""
        del fds
        self._mailbox = _mailboxes.get(note)
        if self._mailbox is None:  # the receiver has closed already
            self._mailbox = _Mailbox()
            self._mailbox.close()
        self._port.room()

    def abort(self, cause: BaseException) -> None:
        # Not on close: a peer that is slow to read still finds what was sent to it.
        del cause
        if self._mailbox is not None:
            self._mailbox.close()


class _Receiver(Receiver):
    def __init__(self, port: Port) -> None:
        self._mailbox = _Mailbox()
        name = b"%d" % next(_names)
        _mailboxes[name] = self._mailbox
        port.note(name)

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        del header, note, fds, accept  # the sender's copy becomes the receiver's tensor
        payload = self._mailbox.take()
        if payload is None:
            done.failed(ConnectionError("the sender has given the message up"))
        else:
            done(payload)

    def abort(self, cause: BaseException) -> None:
        del cause
        self._mailbox.close()

    def close(self, deadline: Deadline) -> None:
        del deadline
        self._mailbox.close()


@hookimpl
def stagelink_register_transport() -> type[Transport]:
    """Core's transport comes in by the same door as everybody's."""
    return Loopback
