"""The transport's class: whether CuPy finds a GPU here, and which pairs of GPUs can be linked."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from stagelink.transport.contract import API_VERSION, Capabilities, Transport, Verdict
from stagelink.transport.streams import device_here
from stagelink_cupy.gpus import gpu_of, others_of, unreachable
from stagelink_cupy.holding import Holding
from stagelink_cupy.opening import meet_receiver, meet_sender
from stagelink_cupy.receiver import CupyReceiver
from stagelink_cupy.region import Region
from stagelink_cupy.sender import CupySender

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stagelink.transport.contract import Deadline, Endpoint, Link, Port, Receiver, Sender

__all__ = ["Cupy", "CupyOptions"]

_LEAST_BYTES = 2 * 1024 * 1024
"""CUDA hands memory out in blocks of this size, and exports whole blocks."""


@dataclass(frozen=True, slots=True)
class CupyOptions:
    """Options in ``[transports.cupy]``.

    Attributes:
        region_bytes: device memory that one direction of a link takes, on the sender's GPU, from
            connect to close: a power of two, at least 2 MiB. An eighth of it is a slot; a larger
            message goes in pieces.
        device_ordered: CUDA's events order what the two processes do with a slot, and not their
            hosts: one wait of the host for each message, where there was one for each piece.

    Raises:
        ValueError: the memory is too little, or no power of two.
    """

    region_bytes: int = 64 * 1024 * 1024
    device_ordered: bool = False

    def __post_init__(self) -> None:
        if self.region_bytes < _LEAST_BYTES or self.region_bytes & (self.region_bytes - 1):
            raise ValueError(
                f"region_bytes = {self.region_bytes}; a power of two is needed, at least "
                f"{_LEAST_BYTES}"
            )


class Cupy(Transport):
    """CUDA tensors within a server: copied into memory that both processes see, and out of it.

    That memory is the transport's own, so it does not matter how torch allocates tensors.

    No GPU has run this yet. In the tests all of it runs on a double of CUDA's runtime that keeps
    the documented rules of CUDA IPC. They do not show that CUDA keeps them as well, nor what it
    does where a process dies.
    """

    name: ClassVar[str] = "cupy"
    api_version: ClassVar[tuple[int, int]] = API_VERSION
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=frozenset({"cuda"}),
        auto_rank=30,
        same_server=True,
        distinct_processes=True,
        in_flight=4,
    )
    Options: ClassVar[type[Any]] = CupyOptions

    def __init__(self, options: CupyOptions) -> None:
        super().__init__(options)
        self._holdings: list[Holding] = []

    @classmethod
    def runtime(cls) -> Any:
        """The module with CUDA's functions.

        Raises:
            ImportError: CuPy is not there, or does not find what it needs.
        """
        import cupy  # not before somebody asks: it takes a while

        return cupy.cuda.runtime

    @classmethod
    def device(cls) -> int:
        """The number of the GPU that is current on this thread."""
        return device_here("cuda").index

    @classmethod
    def probe(cls, options: CupyOptions) -> Verdict:
        """Usable on Linux with CuPy, a driver, a GPU, and a torch that is made for CUDA."""
        del options
        if sys.platform != "linux":
            return Verdict(False, f"it needs Linux's CUDA IPC, this is {sys.platform}")
        try:
            rt = cls.runtime()
        except ImportError as error:
            if error.name != "cupy":
                return Verdict(False, f"CuPy cannot be imported: {error}")
            extra = "pip install 'stagelink-cupy[cuda12]', or [cuda13]"
            return Verdict(False, f"CuPy is not installed: {extra}")
        missing = _missing(rt)
        if missing is None and not cls._torch_has_its_tensors():
            missing = "this build of torch has no CUDA"
        return Verdict(missing is None, missing or "")

    @classmethod
    def _torch_has_its_tensors(cls) -> bool:
        return "cuda" not in cls.capabilities.devices or torch.backends.cuda.is_built()

    def describe(self) -> Mapping[str, Any]:
        """The GPU here, those that it has access to, and the options."""
        rt, device = self.runtime(), self.device()
        return {
            "gpu": gpu_of(rt, device),
            "others": others_of(rt, device),
            "options": asdict(self.options),
        }

    def can_connect(self, link: Link, local: Endpoint, remote: Endpoint) -> Verdict:
        """On one GPU, or on two that have access to each other, by the same options."""
        del link
        one, other = sorted((local, remote), key=lambda place: place.rank)
        here, there = one.description.get("options"), other.description.get("options")
        if here != there:
            return Verdict(False, f"{here} on rank {one.rank}, {there} on rank {other.rank}")
        for place, peer in ((one, other), (other, one)):
            mine, others = place.description["gpu"], place.description["others"]
            reason = unreachable(mine, others, peer.description["gpu"])
            if reason is not None:
                return Verdict(False, f"rank {place.rank}: {reason}")
        return Verdict(True)

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
        """Allocate the memory, and wait until the receiver has read a first piece out of it.

        Raises:
            TimeoutError: the receiver did not come before the deadline.
            ConnectionError: it cannot use the memory.
        """
        del link
        holding = self._hold(port)
        holding.region.allocate()
        meet_receiver(port, holding.region, deadline)
        holding.call_twin()
        return CupySender(port, holding)

    def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> Receiver:
        """Open the sender's memory, and read a first piece out of it.

        Raises:
            TimeoutError: the sender did not come before the deadline.
            ConnectionError: its memory cannot be used here.
        """
        del link
        holding = self._hold(port)
        meet_sender(port, holding.region, deadline)
        return CupyReceiver(port, holding)

    def _hold(self, port: Port) -> Holding:
        region = Region(
            self.runtime(), self.device(), port.stream.handle, self.options.region_bytes
        )
        region.use()
        holding = Holding(port, region)
        self._holdings.append(holding)  # pairs of ranks are opened side by side
        if self.options.device_ordered:
            region.make_events()
        return holding

    def close(self, deadline: Deadline) -> None:
        """Give back what the peers have closed; what they may still use goes with the process."""
        while self._holdings:
            self._holdings.pop().give_back(deadline)


def _missing(rt: Any) -> str | None:
    try:
        if not rt.driverGetVersion():
            return "there is no CUDA driver"
        rt.getDeviceCount()
    except rt.CUDARuntimeError as error:
        return f"CUDA finds no GPU: {error}"
    return None
