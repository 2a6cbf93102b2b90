"""CPU tensors between processes of one server, by shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagelink.transport.hooks import hookimpl
from stagelink_shm.transport import Shm, ShmOptions

if TYPE_CHECKING:
    from stagelink.transport.contract import Transport

__all__ = ["Shm", "ShmOptions"]


@hookimpl
def stagelink_register_transport() -> type[Transport]:
    """The one transport of this package."""
    return Shm
