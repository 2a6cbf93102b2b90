"""What the control plane's own messages say: a JSON object as the note of their frame."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from stagelink.errors import ProtocolError

__all__ = ["decode", "encode"]


def encode(fields: Mapping[str, Any]) -> bytes:
    """Fields as bytes."""
    return json.dumps(fields, separators=(",", ":")).encode()


def decode(data: bytes | str) -> dict[str, Any]:
    """The fields that `encode` was given.

    Raises:
        ProtocolError: the bytes are no JSON object.
    """
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"damaged message: {error}") from None
    if not isinstance(fields, dict):
        raise ProtocolError("damaged message: no object")
    return fields
