"""The identity of a GPU on its server, and the others that it has access to."""

from __future__ import annotations

from typing import Any

__all__ = ["gpu_of", "others_of", "unreachable"]

_UUID_BYTES = 16


def gpu_of(rt: Any, device: int) -> str:
    """The same in every process of the server, whatever the GPU's number there.

    Its UUID, and its place on the bus: CuPy reads the UUID as a text that ends at a zero byte.
    """
    uuid: bytes = rt.getDeviceProperties(device)["uuid"]
    return f"{uuid[:_UUID_BYTES].hex()}@{rt.deviceGetPCIBusId(device)}"


def others_of(rt: Any, device: int) -> dict[str, bool]:
    """The other GPUs that this process sees, and whether this one has access to their memory."""
    others = (other for other in range(rt.getDeviceCount()) if other != device)
    return {gpu_of(rt, other): bool(rt.deviceCanAccessPeer(device, other)) for other in others}


def unreachable(mine: str, others: dict[str, bool], theirs: str) -> str | None:
    """Return why a GPU has no access to another; None where it has."""
    if mine == theirs or others.get(theirs):
        return None
    if theirs in others:
        return f"its GPU {mine} has no access to {theirs}"
    return f"it does not see {theirs}; is that one left out of its CUDA_VISIBLE_DEVICES?"
