"""Bound of a message that a peer announces, before any memory is asked for."""

from __future__ import annotations

import os
from typing import NamedTuple, NoReturn

from stagelink.errors import ProtocolError
from stagelink.plan import Edge, Limits
from stagelink.transport.contract import Link
from stagelink.transport.header import Header


class Bound(NamedTuple):
    """The most that one payload may have."""

    most_bytes: int
    source: str  # where the number is from, for the error

    @classmethod
    def of(cls, limits: Limits) -> Bound:
        """Bound by what the plan allows a rank to receive, or by what this machine has."""
        here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if limits.receive_bytes is not None and limits.receive_bytes <= here:
            return cls(limits.receive_bytes, "limits.receive_bytes")
        return cls(here, "the memory of this machine")

    def refuse(self, link: Link, header: Header) -> NoReturn:
        """Raise `ProtocolError` for a message that is larger."""
        raise ProtocolError(
            f"{link}: a header of microbatch {header.microbatch} with payload_bytes = "
            f"{header.payload_bytes}; at most {self.most_bytes} can be received "
            f"({self.source})"
        )


def check_declared(edge: Edge, header: Header) -> None:
    """Hold the header of a tensor, or of its gradient, against what the plan declares.

    Raises `ProtocolError` where no rank with this plan sends such a one.
    """
    declared, dtype, shape = edge.tensor, header.dtype.name, header.shape
    if declared.dtype not in {None, dtype}:
        raise ProtocolError(
            f"edge {edge.name!r}: a header with dtype {dtype}; the plan declares {declared.dtype}"
        )
    wanted = declared.shape
    if wanted is not None and (
        len(wanted) != len(shape)
        or any(want not in (-1, size) for want, size in zip(wanted, shape, strict=True))
    ):
        raise ProtocolError(
            f"edge {edge.name!r}: a header with shape {list(shape)}; the plan declares "
            f"{list(wanted)}"
        )
