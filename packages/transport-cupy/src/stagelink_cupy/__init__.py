"""CUDA tensors between processes of one server, by CUDA IPC through CuPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagelink.transport.hooks import hookimpl
from stagelink_cupy.transport import Cupy, CupyOptions

if TYPE_CHECKING:
    from stagelink.transport.contract import Transport

__all__ = ["Cupy", "CupyOptions"]


@hookimpl
def stagelink_register_transport() -> type[Transport]:
    """The one transport of this package."""
    return Cupy
