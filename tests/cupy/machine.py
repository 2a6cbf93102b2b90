"""What a double is built from: the GPUs that its process sees, and what is to go wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["DoubleConfig", "Gpu"]


@dataclass(frozen=True)
class Gpu:
    """One GPU of the machine, by whatever ordinal a process knows it.

    Attributes:
        uuid: sixteen bytes.
        pci_bus_id: as CUDA writes it, ``"0000:01:00.0"``.
        name: of the product.
        memory_bytes: how much can be allocated, by one process.
        compute_mode: 0, the default, lets many processes in.
        luid: what happens to lie behind the UUID in CUDA's struct.
    """

    uuid: bytes
    pci_bus_id: str
    name: str = "Double"
    memory_bytes: int = 1 << 30
    compute_mode: int = 0
    luid: bytes = b""

    @classmethod
    def numbered(cls, number: int) -> Gpu:
        """One of up to 255."""
        uuid = hashlib.sha256(b"GPU %d" % number).digest()[:16].replace(b"\0", b"\1")
        return cls(uuid, f"0000:{number + 1:02X}:00.0")

    def properties(self) -> dict[str, object]:
        """As CuPy hands them out: it takes the UUID for a C string.

        So it ends at its first zero byte, and where it has none it goes on to the next field.
        """
        return {
            "name": self.name.encode(),
            "uuid": (self.uuid + self.luid).partition(b"\0")[0],
            "totalGlobalMem": self.memory_bytes,
            "computeMode": self.compute_mode,
            "unifiedAddressing": 1,
            "pciDomainID": int(self.pci_bus_id[:4], 16),
            "pciBusID": int(self.pci_bus_id[5:7], 16),
            "pciDeviceID": int(self.pci_bus_id[8:10], 16),
        }


@dataclass(frozen=True)
class DoubleConfig:
    """What doubles are built from, one in each process; it can be pickled.

    Attributes:
        gpus: those that the process sees, by their ordinals.
        seed: of all delays.
        delay_s: the longest delay before an operation of a stream.
        denied: pairs of GPUs of which the first cannot reach the second.
        fails: the status with which a function of that name always fails.
        driver_version: 0 where there is no driver, so that nearly everything fails.
    """

    gpus: tuple[Gpu, ...] = (Gpu.numbered(0),)
    seed: int = 0
    delay_s: float = 0.0005
    denied: frozenset[tuple[Gpu, Gpu]] = frozenset()
    fails: Mapping[str, int] = field(default_factory=dict)
    driver_version: int = 13000
