"""The bytes of one connection, cut into frames; of a stranger no more than it takes to know it.

A stranger is a peer that has not shown the job's proof: it may send the header of a HELLO and the
proof behind it, and nothing else is read, let alone parsed, before the proof was looked at.
"""

from __future__ import annotations

import hmac
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from stagelink.errors import ProtocolError
from stagelink.transport.header import HEADER_BYTES, Flag, Header, MessageKind

MAX_FDS = 253
"""File descriptors that one frame may carry: what the kernel takes at once."""

READ_BYTES = 64 * 1024
"""The most bytes of a connection that are read at once."""

PROOF_BYTES = 32
"""What comes first in the note of every HELLO."""


class Frame(NamedTuple):
    """One frame as it came in. Its descriptors are closed unless they are taken."""

    header: Header
    note: bytes
    payload: bytes
    fds: list[int]

    def take_fds(self) -> tuple[int, ...]:
        """The descriptors, the caller's to close from now on."""
        fds = tuple(self.fds)
        self.fds.clear()
        return fds


class Proof:
    """A job's secret of `PROOF_BYTES` ASCII characters: shown, and wanted to be shown."""

    def __init__(self, token: str) -> None:
        self.shown = token.encode("ascii").ljust(PROOF_BYTES)[:PROOF_BYTES]

    def check(self, shown: bytes) -> None:
        """Look at what another rank shows, in a time that does not tell how much of it is right.

        Raises `ProtocolError` where it is not this job's.
        """
        if not hmac.compare_digest(shown, self.shown):
            raise ProtocolError("HELLO without this job's token")


class Framing:
    """Bytes of a stream that are no whole frame yet.

    ``check_proof`` raises if a stranger's proof is wrong; without it the other end is known.
    """

    def __init__(self, check_proof: Callable[[bytes], None] | None) -> None:
        self.trusted = check_proof is None
        self._check_proof = check_proof
        self._held = bytearray()
        self._needed = HEADER_BYTES
        self._begun: Header | None = None
        self._fds: deque[int] = deque()

    @property
    def room(self) -> int:
        """Limit of bytes that may be read next."""
        return READ_BYTES if self.trusted else min(self._needed - len(self._held), READ_BYTES)

    def add_fds(self, fds: Iterable[int]) -> None:
        """Take descriptors, which came with the first of the bytes that are fed next."""
        self._fds.extend(fds)

    def frames(self, data: bytes) -> Iterable[Frame]:
        """The frames that are complete with these bytes, of a peer that is trusted; as `feed`."""
        size = len(data)
        if self._held or self._fds or size < HEADER_BYTES:
            return self.feed(data)
        header = Header.unpack(data)
        split = HEADER_BYTES + header.note_bytes
        end = split + header.payload_bytes if header.flags & Flag.INLINE else split
        if end != size or header.fds:
            return self.feed(data, header)
        return (tuple.__new__(Frame, (header, data[HEADER_BYTES:split], data[split:], [])),)

    def feed(self, data: bytes, first: Header | None = None) -> Iterator[Frame]:
        """Yield the frames that are complete with these bytes; a ``first`` header may be given.

        Raises `ProtocolError` where they are no frames, or no stranger's HELLO.
        """
        if self._held or not self.trusted:
            self._held += data
            if len(self._held) < self._needed:  # a large frame is looked at when it is whole
                self._check_announced()
                return
            if not self.trusted:
                yield from self._greeting()
                return
            data = bytes(self._held)
            self._held.clear()
        at, size = 0, len(data)
        self._needed, self._begun = HEADER_BYTES, None
        while size - at >= HEADER_BYTES:
            header, first = first or Header.unpack(data, at), None
            body = at + HEADER_BYTES
            end = body + header.body_bytes
            if end > size:
                self._begun, self._needed = header, end - at
                break
            split = body + header.note_bytes
            fds = self._take_fds(header) if header.fds else []
            at = end
            yield Frame(header, data[body:split], data[split:end], fds)
        if at < size:
            self._held += memoryview(data)[at:]
        self._check_announced()

    def _greeting(self) -> Iterator[Frame]:
        """A stranger's HELLO, step by step: its header, its proof, the rest."""
        header = Header.unpack(self._held)
        if header.kind is not MessageKind.HELLO:
            raise ProtocolError(f"{header.kind.name} before HELLO")
        if header.note_bytes < PROOF_BYTES or header.body_bytes > header.note_bytes:
            raise ProtocolError("HELLO without this job's token")
        body = HEADER_BYTES + PROOF_BYTES
        if self._check_proof is not None and len(self._held) >= body:
            self._check_proof(bytes(self._held[HEADER_BYTES:body]))
            self._check_proof = None
        self._needed = body if self._check_proof else HEADER_BYTES + header.body_bytes
        if self._check_proof is None and len(self._held) >= self._needed:
            note = bytes(self._held[body:])
            self._held.clear()
            self._needed = HEADER_BYTES
            yield Frame(header, note, b"", [])

    def _take_fds(self, header: Header) -> list[int]:
        if header.fds > len(self._fds):
            raise ProtocolError(
                f"a frame announces {header.fds} descriptors, {len(self._fds)} came"
            )
        return [self._fds.popleft() for _ in range(header.fds)]

    def _check_announced(self) -> None:
        """What is left belongs to a frame that has begun to come."""
        if not self._fds:
            return
        announced = self._begun.fds if self._begun else MAX_FDS if self._held else 0
        if len(self._fds) > announced:
            raise ProtocolError(f"{len(self._fds)} descriptors came, {announced} are announced")

    def close(self) -> None:
        """Close the descriptors that nobody took."""
        close_all(self._fds)
        self._fds.clear()


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors that nobody will take."""
    for fd in fds:
        os.close(fd)


def encode(fields: Mapping[str, Any]) -> bytes:
    """Fields as bytes."""
    return json.dumps(fields, separators=(",", ":")).encode()


def decode(data: bytes | str) -> dict[str, Any]:
    """The fields that `encode` was given; `ProtocolError` where these are no JSON object."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"damaged message: {error}") from None
    if not isinstance(fields, dict):
        raise ProtocolError("damaged message: no object")
    return fields
