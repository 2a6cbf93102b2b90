"""The one frame of the wire: a fixed binary header, then a note, then a payload, if any.

Everything on a control connection is such a frame, so one reader parses all. Numbers are
little-endian; nothing is pickled. Layout, in bytes:

==========  ====  =============================================================
field       size  meaning
==========  ====  =============================================================
magic       4     ``SLNK``
version     1     `VERSION`
kind        1     a `MessageKind`
direction   1     0 = forward (activation), 1 = backward (gradient)
flags       1     bit set of `Flag`
session     4     number of the session on this handler, from 0
edge        4     `stagelink.plan.Edge.index`
microbatch  8     global id, signed
sequence    8     number of a reduction, a c10d message or a question, from 0, or bytes of
                  credit that a c10d rank grants; elsewhere 0
link        2     number of the link among those of this pair of ranks
dtype       1     `stagelink.plan.dtypes.DType.code`; 0: no tensor
dims        1     how many of the shape's fields count, 0 to 8
fds         1     file descriptors that travel with this frame
reserved    1     0
note        4     bytes of the note that follows the header
payload     8     bytes of the payload, inline or by the transport
shape       64    8 signed sizes
trace       25    trace context of the message (`TRACE_BYTES`), 0 when tracing is off
==========  ====  =============================================================
"""

from __future__ import annotations

import enum
import struct
from math import prod
from typing import NamedTuple

from stagelink.errors import ProtocolError
from stagelink.plan.dtypes import DTYPE_BY_CODE, MAX_DIMS, DType

MAGIC = b"SLNK"
VERSION = 4
MAX_INLINE_BYTES = 64 * 1024
MAX_NOTE_BYTES = 16 * 1024 * 1024
MAX_PAYLOAD_BYTES = 1 << 47
"""More than the address space of a process holds."""

TRACE_BYTES = 25
"""Size of a message's trace context, which core carries and does not look into.

Observers of one job must agree on it. What is meant, in W3C Trace Context's terms: the trace id
(16 bytes), the id of the sender's span (8) and the trace flags (1).
"""

NO_TRACE = bytes(TRACE_BYTES)
"""The trace context of a message that has none."""

_LAYOUT = struct.Struct(f"<4sBBBBIIqQHBBBBIQ{8 * MAX_DIMS}s{TRACE_BYTES}s")
HEADER_BYTES = _LAYOUT.size
_SIZES = tuple(struct.Struct(f"<{dims}q") for dims in range(MAX_DIMS + 1))


class MessageKind(enum.IntEnum):
    """Kind of a frame."""

    __hash__ = int.__hash__  # in C; these are looked up for every frame

    HELLO = 1
    CHOSEN = 2
    OPEN = 3
    DATA = 4
    GRAD = 5
    NONE = 6
    CREDIT = 7
    NOTE = 8
    REFUSED = 9
    END = 10
    REDUCE = 11
    ABORT = 12
    BYE = 13
    READY = 14
    LAST = 15
    WAITS = 16
    RTS = 17
    """Ready to send: a c10d message waits at its sender until it is asked for."""

    CTS = 18
    """Clear to send: it is asked for."""


class Direction(enum.IntEnum):
    """Direction of a message along its edge."""

    __hash__ = int.__hash__

    FORWARD = 0
    BACKWARD = 1


class Flag:
    """Facts about one message, as bits; plain numbers, since enum's operators are slow."""

    REQUIRES_GRAD = 1
    INLINE = 2


_TENSORS = frozenset({MessageKind.DATA, MessageKind.GRAD})
"""Kinds that have a payload."""

_WITH_FDS = _TENSORS | {MessageKind.NOTE}
"""Kinds that come from a transport, and may carry its descriptors."""

_FLAGS = Flag.REQUIRES_GRAD | Flag.INLINE
_KINDS = {int(kind): kind for kind in MessageKind}
_DIRECTIONS = {int(direction): direction for direction in Direction}


class Header(NamedTuple):
    """One frame's header; see the module's table. ``shape`` is a tuple of 0 to 8 sizes."""

    kind: MessageKind
    direction: Direction = Direction.FORWARD
    flags: int = 0
    session: int = 0
    edge: int = 0
    microbatch: int = 0
    sequence: int = 0
    link: int = 0
    dtype_code: int = 0
    fds: int = 0
    note_bytes: int = 0
    payload_bytes: int = 0
    shape: tuple[int, ...] = ()
    trace: bytes = NO_TRACE

    @property
    def dtype(self) -> DType:
        """The element type.

        Raises:
            ProtocolError: the code is unknown; the peer is newer or the bytes are damaged.
        """
        try:
            return DTYPE_BY_CODE[self.dtype_code]
        except KeyError:
            raise ProtocolError(f"unknown dtype code {self.dtype_code} in a header") from None

    @property
    def inline(self) -> bool:
        """Whether the payload follows in the same frame."""
        return bool(self.flags & Flag.INLINE)

    @property
    def requires_grad(self) -> bool:
        """Whether the sender's tensor takes a gradient."""
        return bool(self.flags & Flag.REQUIRES_GRAD)

    @property
    def body_bytes(self) -> int:
        """Bytes that follow this header in its frame."""
        inline = self.flags & Flag.INLINE
        return self.note_bytes + (self.payload_bytes if inline else 0)

    def pack(self, note_bytes: int = 0, fds: int = 0) -> bytes:
        """Encode as `HEADER_BYTES` bytes, for a frame with a note of this size and these fds."""
        (kind, direction, flags, session, edge, microbatch, sequence, link, dtype_code, _, _,
         payload_bytes, shape, trace) = self  # fmt: skip
        dims = len(shape)
        return _LAYOUT.pack(
            MAGIC, VERSION, kind, direction, flags, session, edge, microbatch, sequence, link,
            dtype_code, dims, fds, 0, note_bytes, payload_bytes, _SIZES[dims].pack(*shape), trace,
        )  # fmt: skip

    @classmethod
    def unpack(cls, data: bytes | bytearray, at: int = 0) -> Header:  # noqa: C901 - as quick
        """Decode the `HEADER_BYTES` bytes at an offset, trusting nothing in them.

        Raises:
            ProtocolError: foreign magic, another version, an unknown kind, or sizes that do not
                agree with each other.
        """
        (magic, version, kind, direction, flags, session, edge, microbatch, sequence, link,
         dtype_code, dims, fds, _, note_bytes, payload_bytes, sizes, trace,
        ) = _LAYOUT.unpack_from(data, at)  # fmt: skip
        if magic != MAGIC:
            raise ProtocolError(f"not a stagelink frame: it begins with {magic!r}")
        if version != VERSION:
            raise ProtocolError(f"wire version {version} from the peer, {VERSION} here")
        if dims > MAX_DIMS or note_bytes > MAX_NOTE_BYTES:
            raise ProtocolError(f"damaged header: {dims} dims, a note of {note_bytes} bytes")
        try:
            known_kind, known_direction = _KINDS[kind], _DIRECTIONS[direction]
        except KeyError as error:
            raise ProtocolError(f"damaged header: no kind or direction {error}") from None
        shape = _SIZES[dims].unpack_from(sizes)
        header = tuple.__new__(cls, (
            known_kind, known_direction, flags, session, edge, microbatch, sequence, link,
            dtype_code, fds, note_bytes, payload_bytes, shape, trace,
        ))  # fmt: skip
        if flags & ~_FLAGS:
            raise ProtocolError(f"damaged header: flags {flags:#x}, known are {_FLAGS:#x}")
        if fds and known_kind not in _WITH_FDS:
            raise ProtocolError(f"{known_kind.name} with {fds} descriptors takes none")
        if dtype_code or payload_bytes:
            dtype = DTYPE_BY_CODE.get(dtype_code)
            if (
                dtype is None
                or prod(shape) * dtype.itemsize != payload_bytes
                or payload_bytes > MAX_INLINE_BYTES
                or known_kind not in _TENSORS
                or (shape and min(shape) < 0)
            ):
                header._check_sizes()
        return header

    def _check_sizes(self) -> None:
        if self.kind not in _TENSORS:
            raise ProtocolError(
                f"{self.kind.name} with dtype code {self.dtype_code} and a payload of "
                f"{self.payload_bytes} bytes takes neither"
            )
        limit = MAX_INLINE_BYTES if self.flags & Flag.INLINE else MAX_PAYLOAD_BYTES
        if self.payload_bytes > limit:
            where = "an inline payload" if self.inline else "a payload"
            raise ProtocolError(f"{where} of {self.payload_bytes} bytes; at most {limit} may come")
        if not self.dtype_code:
            return
        dtype = DTYPE_BY_CODE.get(self.dtype_code) or self.dtype  # which says what is wrong
        needed = prod(self.shape) * dtype.itemsize
        if min(self.shape, default=0) < 0 or needed != self.payload_bytes:
            raise ProtocolError(
                f"shape {self.shape} of {dtype.name} takes {needed} bytes, "
                f"the header announces {self.payload_bytes}"
            )
