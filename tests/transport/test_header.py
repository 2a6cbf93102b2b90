"""The wire's header: what goes in comes out, and damaged bytes are a protocol error."""

from __future__ import annotations

import struct
from contextlib import suppress
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagelink.errors import ProtocolError
from stagelink.plan import DTYPES, MAX_DIMS
from stagelink.transport.header import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    TRACE_BYTES,
    Direction,
    Flag,
    Header,
    MessageKind,
)

shapes = st.lists(st.integers(0, 2**20), max_size=MAX_DIMS).filter(
    lambda shape: prod(shape) <= MAX_PAYLOAD_BYTES // 16
)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    kind = draw(st.sampled_from(MessageKind))
    tensor = kind in {MessageKind.DATA, MessageKind.GRAD}
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(shapes))
    return Header(
        kind,
        draw(st.sampled_from(Direction)),
        draw(st.sampled_from([0, Flag.REQUIRES_GRAD])),
        draw(st.integers(0, 2**32 - 1)),
        draw(st.integers(0, 2**32 - 1)),
        draw(st.integers(-(2**63), 2**63 - 1)),
        draw(st.integers(0, 2**64 - 1)),
        draw(st.integers(0, 2**16 - 1)),
        dtype.code if tensor else 0,
        payload_bytes=prod(shape) * dtype.itemsize if tensor else 0,
        shape=shape,
        trace=draw(st.binary(min_size=TRACE_BYTES, max_size=TRACE_BYTES)),
    )


@given(header=headers(), note_bytes=st.integers(0, 2**20), fds=st.integers(0, 253))
def test_what_goes_in_comes_out(header: Header, note_bytes: int, fds: int) -> None:
    if header.kind not in {MessageKind.DATA, MessageKind.GRAD, MessageKind.NOTE}:
        fds = 0
    data = b"before" + header.pack(note_bytes, fds)
    assert len(data) == 6 + HEADER_BYTES
    back = Header.unpack(data, 6)
    assert back == header._replace(note_bytes=note_bytes, fds=fds)
    assert isinstance(back.kind, MessageKind)
    assert isinstance(back.direction, Direction)
    assert back.body_bytes == note_bytes


@given(data=st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_bytes_are_a_header_or_a_protocol_error(data: bytes) -> None:
    try:
        header = Header.unpack(data)
    except ProtocolError:
        return
    assert header.body_bytes >= 0


@given(header=headers(), at=st.integers(0, HEADER_BYTES - 1), value=st.integers(0, 255))
def test_one_damaged_byte_never_raises_anything_else(header: Header, at: int, value: int) -> None:
    data = bytearray(header.pack())
    data[at] = value
    with suppress(ProtocolError):
        Header.unpack(data)


def test_a_dimension_past_two_to_the_31_fits() -> None:
    header = Header(MessageKind.DATA, dtype_code=12, shape=(2**31, 0))
    assert Header.unpack(header.pack()).shape == (2**31, 0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({0: b"XLNK"}, "not a stagelink frame: it begins with b'XLNK'"),
        ({4: b"\x09"}, "wire version 9 from the peer, 4 here"),
        ({5: b"\x63"}, "no kind or direction 99"),
        ({6: b"\x02"}, "no kind or direction 2"),
        ({35: b"\x09"}, "9 dims"),
        ({38: struct.pack("<I", 2**30)}, "a note of 1073741824 bytes"),
        ({34: b"\xc8"}, "unknown dtype code 200"),
        ({42: struct.pack("<Q", 7)}, "takes 24 bytes, the header announces 7"),
        ({50: struct.pack("<q", -2)}, r"shape \(-2, 3\)"),
    ],
)
def test_each_damage_has_its_text(change: dict[int, bytes], text: str) -> None:
    data = bytearray(
        Header(MessageKind.DATA, dtype_code=12, shape=(2, 3), payload_bytes=24).pack()
    )
    for at, new in change.items():
        data[at : at + len(new)] = new
    with pytest.raises(ProtocolError, match=text):
        Header.unpack(data)


def test_an_inline_payload_is_bounded() -> None:
    header = Header(
        MessageKind.DATA, flags=Flag.INLINE, dtype_code=2, shape=(70_000,), payload_bytes=70_000
    )
    with pytest.raises(ProtocolError, match="an inline payload of 70000 bytes"):
        Header.unpack(header.pack())
