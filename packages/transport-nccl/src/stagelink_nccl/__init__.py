"""GPU tensors between processes of one server, by NCCL in groups of two ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagelink.transport.hooks import hookimpl
from stagelink_nccl.groups import NcclOptions
from stagelink_nccl.transport import Nccl

if TYPE_CHECKING:
    from stagelink.transport.contract import Transport

__all__ = ["Nccl", "NcclOptions"]


@hookimpl
def stagelink_register_transport() -> type[Transport]:
    """The one transport of this package."""
    return Nccl
