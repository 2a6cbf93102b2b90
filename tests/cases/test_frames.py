"""Headers that claim what cannot be: refused with peer, link, field and bound, before memory."""

from __future__ import annotations

import os
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest

from stagelink.plan.dtypes import DTYPE_BY_NAME
from stagelink.transport.header import Flag, Header, MessageKind

if TYPE_CHECKING:
    import stagelink
    from tests.support.pipelines import Ranks

HUGE = 2**60
MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _claims(comm: stagelink.Handler, fields: dict[str, Any], contents: bytes) -> None:
    if comm.rank == 0:
        kind = MessageKind.DATA
        comm._plane.post(1, Header(kind, **fields), b"", contents)
    comm.wait(Future(), "what never happens")


def _told(ranks: Ranks, fields: dict[str, Any], **plan: Any) -> str:
    told, end = ranks.run_to_ends(ranks.plan(**plan), _claims, fields, b"")
    assert (end.kind, told.kind) == ("ProtocolError", "AbortedError")
    assert end.text in told.text
    assert max(end.seconds, told.seconds) < 10
    return end.text


def _bytes(size_bytes: int, **fields: Any) -> dict[str, Any]:
    code = DTYPE_BY_NAME["uint8"].code
    return {"dtype_code": code, "payload_bytes": size_bytes, "shape": (size_bytes,), **fields}


@pytest.mark.parametrize("size_bytes", [2**46, MEMORY + 1])
def test_more_than_the_machine_has(ranks: Ranks, size_bytes: int) -> None:
    assert _told(ranks, _bytes(size_bytes)) == (
        f"rank 1: from rank 0: 0→1 by {ranks.wire.transport}: a header of microbatch 0 with "
        f"payload_bytes = {size_bytes}; at most {MEMORY} can be received (the memory of this "
        "machine)"
    )


def test_more_than_anybody_has(ranks: Ranks) -> None:
    text = _told(ranks, _bytes(HUGE))
    assert text.startswith("rank 1: from rank 0: ")
    assert str(HUGE) in text
    assert "; at most " in text


def test_another_shape_than_the_plan_declares(ranks: Ranks) -> None:
    declared = [{"name": "h", "from": "s0", "to": ["s1"], "shape": [3, -1], "dtype": "uint8"}]
    text = _told(ranks, _bytes(2**40), tensors=declared)
    assert text == (
        f"rank 1: from rank 0: edge 'h': a header with shape [{2**40}]; the plan declares [3, -1]"
    )
    wide = {**_bytes(12), "shape": (3,), "dtype_code": DTYPE_BY_NAME["float32"].code}
    text = _told(ranks, wide, tensors=declared)
    assert text.endswith("edge 'h': a header with dtype float32; the plan declares uint8")


def test_a_payload_of_no_type(ranks: Ranks) -> None:
    text = _told(ranks, {"payload_bytes": 2**40})
    assert text == "rank 1: from rank 0: unknown dtype code 0 in a header"


def test_more_than_travels_inline(ranks: Ranks) -> None:
    text = _told(ranks, _bytes(HUGE, flags=Flag.INLINE))
    assert text.startswith("rank 1: from rank 0: an inline payload of ")
    assert f"{HUGE} bytes" in text
