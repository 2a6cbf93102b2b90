"""Listening for ranks of other servers: at which address, and on which port."""

from __future__ import annotations

import errno
import socket

from stagelink.errors import ConnectError
from stagelink.plan.document import Control
from stagelink.transport.addresses import Address, address_of, check_reachable, own_address
from stagelink.transport.gloo_groups import VARIABLE, named_by_variable

__all__ = ["gloo_address_by", "listen", "own_address_by"]

_KEY = "[control] interface"
_LOOPBACK = Address("127.0.0.1", "all ranks are on this host")


def own_address_by(control: Control, host: str | None, *, elsewhere: bool) -> Address:
    """The address at which this rank listens for ranks of other servers.

    Args:
        control: the interface, where the plan names one.
        host: of the job's store, see `stagelink.control.store.store_host`.
        elsewhere: whether some of them are on other hosts; else they are reached at loopback.

    Raises:
        ConnectError: the interface cannot be used, or its address cannot be reached from another
            host; or none is named, and nothing tells which address is to be used.
    """
    if control.interface is not None:
        address = address_of(control.interface, _KEY)
    elif elsewhere:
        address = own_address(host)
    else:
        return _LOOPBACK
    if elsewhere:
        check_reachable(address, _KEY)
    return address


def gloo_address_by(control: Control, host: str | None, *, elsewhere: bool) -> str:
    """The address of this host for a gloo group: that of torch's variable, else `own_address_by`.

    Raises:
        ConnectError: as `own_address_by`, and for the interface that the variable names.
    """
    named = named_by_variable()
    if named is None:
        return own_address_by(control, host, elsewhere=elsewhere).text
    if elsewhere:
        check_reachable(named, VARIABLE)
    return named.text


def listen(address: Address, ports: tuple[int, int] | None, backlog: int) -> socket.socket:
    """Listen at an address of this host, on the first port of a range that is free, or on any.

    Raises:
        ConnectError: no port of the range is free, or the address cannot be listened at.
    """
    family = socket.AF_INET6 if ":" in address.text else socket.AF_INET
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        try:
            return socket.create_server((address.text, port), family=family, backlog=backlog)
        except OSError as error:
            if ports is None or error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise ConnectError(
                    f"cannot listen at {address.text} ({address.reason}): {error}"
                ) from error
    raise ConnectError(
        f"no port from {first} to {last} ([control] ports) is free at {address.text}; every rank "
        "with peers on other servers takes one: widen the range, or end what holds them"
    )
