"""A span's context in a message's header: trace id, span id and flags, big-endian as in W3C's."""

from __future__ import annotations

import struct

from opentelemetry.trace import SpanContext, TraceFlags

__all__ = ["pack", "unpack"]

_LAYOUT = struct.Struct(">16s8sB")


def pack(context: SpanContext) -> bytes:
    """The context in `stagelink.transport.header.TRACE_BYTES` bytes, without its trace state."""
    return _LAYOUT.pack(
        context.trace_id.to_bytes(16, "big"),
        context.span_id.to_bytes(8, "big"),
        context.trace_flags & 0xFF,
    )


def unpack(packed: bytes, *, is_remote: bool) -> SpanContext | None:
    """The context that a message carries; None where it carries none.

    Args:
        packed: from the header.
        is_remote: whether another rank has packed it.
    """
    trace_id, span_id, flags = _LAYOUT.unpack(packed)
    context = SpanContext(
        int.from_bytes(trace_id, "big"),
        int.from_bytes(span_id, "big"),
        is_remote,
        TraceFlags(flags),
    )
    return context if context.is_valid else None
