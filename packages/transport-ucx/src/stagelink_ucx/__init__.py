"""CPU tensors between processes, within a server and across servers, by UCX: RDMA, TCP, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagelink.transport.hooks import hookimpl
from stagelink_ucx.transport import Ucx, UcxOptions

if TYPE_CHECKING:
    from stagelink.transport.contract import Transport

__all__ = ["Ucx", "UcxOptions"]


@hookimpl
def stagelink_register_transport() -> type[Transport]:
    """The one transport of this package."""
    return Ucx
