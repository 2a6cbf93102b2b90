"""A link's access to core, as a wrapper around a transport hands it on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from stagelink.transport.contract import Port

__all__ = ["MutedPort", "muted"]


class MutedPort:
    """A port whose `Port.sent` does nothing.

    For a wrapper whose own ``finish`` has to be called by the link's worker, and not when the
    transport inside says so.

    Args:
        port: what everything else is passed on to.
    """

    def __init__(self, port: Port) -> None:
        self._port = port

    def sent(self) -> None:
        """The worker is in the wrapper's ``finish`` already."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)


def muted(port: Port) -> Port:
    """The port with `Port.sent` muted."""
    return cast("Port", MutedPort(port))
