"""The transport's class: whether NCCL can be used here, and between which ranks."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

from stagelink.transport.contract import API_VERSION, Capabilities, Transport, Verdict
from stagelink_nccl.groups import NcclGroups, NcclOptions
from stagelink_nccl.issuer import Issuer
from stagelink_nccl.link import NcclReceiver, NcclSender

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stagelink.transport.contract import Deadline, Endpoint, Link, Port, Receiver, Sender
    from stagelink_nccl.groups import Groups

__all__ = ["Nccl", "NcclOptions"]


class Nccl(Transport):
    """CUDA tensors within a server, by NCCL in groups of two.

    Run over gloo on CPU tensors, in place of NCCL; no GPU has run it yet.
    """

    name: ClassVar[str] = "nccl"
    api_version: ClassVar[tuple[int, int]] = API_VERSION
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=frozenset({"cuda"}),
        auto_rank=32,
        same_server=True,
        distinct_processes=True,
        in_flight=4,
    )
    Options: ClassVar[type[Any]] = NcclOptions
    groups: ClassVar[Groups] = NcclGroups()
    """What does the work; a test puts another in its place."""

    def __init__(self, options: NcclOptions) -> None:
        super().__init__(options)
        self._issuer = Issuer()

    @classmethod
    def probe(cls, options: NcclOptions) -> Verdict:
        """Usable where torch has NCCL and there is a GPU."""
        del options
        return cls.groups.probe()

    def describe(self) -> Mapping[str, Any]:
        """The device, NCCL's version, and the options."""
        return {**self.groups.describe(), "options": asdict(self.options)}

    def can_connect(self, link: Link, local: Endpoint, remote: Endpoint) -> Verdict:
        """Two GPUs, one NCCL and one set of options."""
        del link
        mine, theirs = local.description, remote.description
        for what in ("options", "version"):
            if mine.get(what) != theirs.get(what):
                return Verdict(
                    False, f"the ranks differ in {what}: {mine.get(what)}, {theirs.get(what)}"
                )
        return self._two_devices(mine, theirs)

    @staticmethod
    def _two_devices(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Verdict:
        shares = mine.get("shares_device") and theirs.get("shares_device")
        if mine.get("uuid") != theirs.get("uuid") or shares:
            return Verdict(True)
        return Verdict(
            False, f"both ranks are on one GPU ({mine.get('uuid')}), and NCCL wants one each"
        )

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
        """Open the sending end.

        Raises:
            RuntimeError: another handler of this process uses NCCL.
        """
        self._issuer.start()
        group = self.groups.connect(port, self.options, deadline)
        # On a stream of its own: on the link's it would wait for messages that come after it.
        stream = self.stream(link) or port.stream
        return NcclSender(port, group, self._issuer, stream, eager=self.options.eager)

    def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> Receiver:
        """Open the receiving end; as `open_sender`."""
        del link
        self._issuer.start()
        group = self.groups.connect(port, self.options, deadline)
        return NcclReceiver(port, group, self._issuer, eager=self.options.eager)

    def close(self, deadline: Deadline) -> None:
        """End the issuing thread, which gives the groups back."""
        self._issuer.close(deadline)
