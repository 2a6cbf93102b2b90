"""The address of this host that gloo is to use, and whether the peer's can be reached from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagelink.errors import ConnectError
from stagelink.transport.addresses import Address, address_of, route_to
from stagelink.transport.gloo_groups import VARIABLE, named_by_variable
from stagelink.transport.interrupts import stops_caller

if TYPE_CHECKING:
    from stagelink.transport.contract import Port

__all__ = ["address_for", "check_route", "named_address"]

_OPTION = "[transports.gloo] interface"


def named_address(interface: str | None) -> Address | None:
    """The address of the interface that the option names, or else the variable; None: neither.

    Args:
        interface: the option.

    Raises:
        ConnectError: the interface cannot be used, or the variable names several.
    """
    return named_by_variable() if interface is None else address_of(interface, _OPTION)


def address_for(port: Port, interface: str | None) -> Address:
    """The address at which gloo is to listen for the port's peer; raises as `named_address`."""
    return named_address(interface) or Address(port.address, "as the control connection's")


def check_route(port: Port, mine: Address, theirs: str) -> None:
    """Make sure that this host has a way from its own address to the peer's.

    Raises:
        ConnectError: it has none, with both addresses.
    """
    try:
        route_to(theirs, mine.text)
    except OSError as error:
        if stops_caller(error):
            raise
        raise ConnectError(
            f"rank {port.rank} at {mine.text} ({mine.reason}) has no way to rank {port.peer} at "
            f"{theirs}: {error.strerror}; {_OPTION}, or {VARIABLE} on each host, names another "
            "interface"
        ) from error
