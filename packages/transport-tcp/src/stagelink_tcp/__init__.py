"""Tensors between processes, on one server or on several, by TCP sockets and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagelink.transport.hooks import hookimpl
from stagelink_tcp.transport import Tcp, TcpOptions

if TYPE_CHECKING:
    from stagelink.transport.contract import Transport

__all__ = ["Tcp", "TcpOptions"]


@hookimpl
def stagelink_register_transport() -> type[Transport]:
    """The one transport of this package."""
    return Tcp
