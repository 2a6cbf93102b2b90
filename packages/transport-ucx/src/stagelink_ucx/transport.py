"""The transport's class: whether UCX can be used here, and the worker that links share."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from stagelink.transport.contract import API_VERSION, Capabilities, Transport, Verdict
from stagelink_ucx.context import Context, ContextError, check_names
from stagelink_ucx.library import LibraryError, load
from stagelink_ucx.link import UcxReceiver, UcxSender
from stagelink_ucx.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stagelink.transport.contract import Deadline, Endpoint, Link, Port, Receiver, Sender

__all__ = ["Ucx", "UcxOptions"]

_WITHIN_A_SERVER = frozenset({"sm", "shm", "mm", "posix", "sysv", "cma", "xpmem", "knem", "self"})


@dataclass(frozen=True, slots=True)
class UcxOptions:
    """Options in ``[transports.ucx]``. Everything else UCX takes from its own variables.

    Attributes:
        wires: UCX's transports to choose from, as in ``UCX_TLS``: ``"tcp"``, ``"rc,sm"`` or
            ``"^sm"``, all but that; None: what that variable says, else all that carry host
            memory.
        devices: network devices to choose from, as in ``UCX_NET_DEVICES``: ``"eth0"`` or
            ``"mlx5_0:1,mlx5_1:1"``; None: what that variable says, else all.
        library: name or path of ``libucp``; None: the system's ``libucp.so.0``, else that of the
            wheel ``libucx-cu12`` or ``-cu13``, which has no RDMA.
    """

    wires: str | None = None
    devices: str | None = None
    library: str | None = None

    @property
    def config(self) -> dict[str, str]:
        """Settings of UCX's configuration that they make."""
        named = {"TLS": self.wires, "NET_DEVICES": self.devices}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def within_a_server(self) -> bool:
        """Whether none of the wires leads out of a server."""
        wires = self.wires or os.environ.get("UCX_TLS")
        return wires is not None and _WITHIN_A_SERVER.issuperset(wires.split(","))


class Ucx(Transport):
    """Host memory over what UCX finds: RDMA fabrics, TCP, memory that processes share.

    Tested by TCP and by shared memory. No RDMA card has run it.
    """

    name: ClassVar[str] = "ucx"
    api_version: ClassVar[tuple[int, int]] = API_VERSION
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=frozenset({"cpu"}), auto_rank=5, in_flight=4
    )
    Options: ClassVar[type[Any]] = UcxOptions

    def __init__(self, options: UcxOptions) -> None:
        super().__init__(options)
        self._opening = threading.Lock()
        self._worker: Worker | None = None

    @classmethod
    def probe(cls, options: UcxOptions) -> Verdict:
        """Usable where a UCX is that is new enough, and has the wires and devices named."""
        try:
            ucx = load(options.library)
            check_names(ucx, options.wires, options.devices)
            Context(ucx, options.config).close()
        except (LibraryError, ContextError) as error:
            return Verdict(False, str(error))
        return Verdict(True)

    def describe(self) -> Mapping[str, Any]:
        """Tell whether no wire leads out of this server, and UCX's version."""
        version = ".".join(map(str, load(self.options.library).version))
        return {"within_a_server": self.options.within_a_server, "version": version}

    def can_connect(self, link: Link, local: Endpoint, remote: Endpoint) -> Verdict:
        """Refuse two servers where a rank's wires lead out of neither, and two versions."""
        del link
        for end in sorted((local, remote), key=lambda end: end.rank):
            if local.server != remote.server and end.description.get("within_a_server"):
                return Verdict(
                    False, f"the wires of rank {end.rank} do not lead out of its server"
                )
        versions = [str(end.description.get("version", "")) for end in (local, remote)]
        if all(versions) and len({tuple(each.split(".")[:2]) for each in versions}) > 1:
            text = f"UCX {' and '.join(versions)} may not read each other's addresses"
            return Verdict(False, text)
        return Verdict(True)

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
        """Open the sending end; it does not wait for the peer.

        Raises:
            LibraryError: UCX is not there.
            OSError: UCX cannot be used as the options say.
        """
        del link, deadline
        return UcxSender(self._shared(), port)

    def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> Receiver:
        """Open the receiving end; as `open_sender`."""
        del link, deadline
        return UcxReceiver(self._shared(), port)

    def _shared(self) -> Worker:
        with self._opening:  # links of several peers open at once
            if self._worker is None:
                context = Context(load(self.options.library), self.options.config)
                try:
                    self._worker = Worker(context)
                except BaseException:
                    context.close()
                    raise
            return self._worker

    def close(self, deadline: Deadline) -> None:
        """Close the worker; what it was given to send leaves this rank before."""
        if self._worker is not None:
            self._worker.close(deadline)
