"""Tensors between processes, on one server or on several, by the Gloo inside PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagelink.transport.hooks import hookimpl
from stagelink_gloo.transport import Gloo, GlooOptions

if TYPE_CHECKING:
    from stagelink.transport.contract import Transport

__all__ = ["Gloo", "GlooOptions"]


@hookimpl
def stagelink_register_transport() -> type[Transport]:
    """The one transport of this package."""
    return Gloo
