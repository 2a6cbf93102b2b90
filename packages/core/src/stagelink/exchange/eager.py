"""Sessions that `torch.compile` does not look into: it breaks its graph at their calls."""

from __future__ import annotations

import sys
from functools import cache

import torch

from stagelink.exchange.session import Session

__all__ = ["session_class"]

_CALLS = (
    "send",
    "isend",
    "recv",
    "irecv",
    "send_grad",
    "isend_grad",
    "recv_grad",
    "irecv_grad",
    "has",
    "end",
    "leave",
)


def session_class() -> type[Session]:
    """`Session`, or where the compiler is loaded a subclass whose calls it leaves alone.

    The compiler takes more than a second to load, so nobody is made to load it for this.
    """
    return _left_alone() if "torch._dynamo" in sys.modules else Session


@cache
def _left_alone() -> type[Session]:
    calls = {name: torch.compiler.disable(getattr(Session, name)) for name in _CALLS}
    return type(Session.__name__, (Session,), {"__doc__": Session.__doc__, **calls})
