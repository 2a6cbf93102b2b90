"""What CUDA's runtime answers when it refuses: numbers, names and texts as CuPy has them."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["CUDARuntimeError", "Status"]


class Status(IntEnum):
    """The results that the double gives, or is told to give."""

    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInitializationError = 3
    cudaErrorCudartUnloading = 4
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorInvalidDevice = 101
    cudaErrorDeviceUninitialized = 201
    cudaErrorMapBufferObjectFailed = 205
    cudaErrorPeerAccessUnsupported = 217
    cudaErrorInvalidResourceHandle = 400
    cudaErrorNotReady = 600
    cudaErrorIllegalAddress = 700
    cudaErrorLaunchFailure = 719
    cudaErrorUnknown = 999


_TEXTS = {
    Status.cudaErrorInvalidValue: "invalid argument",
    Status.cudaErrorMemoryAllocation: "out of memory",
    Status.cudaErrorInitializationError: "initialization error",
    Status.cudaErrorCudartUnloading: "driver shutting down",
    Status.cudaErrorInsufficientDriver: (
        "CUDA driver version is insufficient for CUDA runtime version"
    ),
    Status.cudaErrorNoDevice: "no CUDA-capable device is detected",
    Status.cudaErrorInvalidDevice: "invalid device ordinal",
    Status.cudaErrorDeviceUninitialized: "invalid device context",
    Status.cudaErrorMapBufferObjectFailed: "mapping of buffer object failed",
    Status.cudaErrorPeerAccessUnsupported: (
        "peer access is not supported between these two devices"
    ),
    Status.cudaErrorInvalidResourceHandle: "invalid resource handle",
    Status.cudaErrorNotReady: "device not ready",
    Status.cudaErrorIllegalAddress: "an illegal memory access was encountered",
    Status.cudaErrorLaunchFailure: "unspecified launch failure",
    Status.cudaErrorUnknown: "unknown error",
}


class CUDARuntimeError(RuntimeError):
    """A call failed, as CuPy says it.

    Args:
        status: one of `Status`.

    Attributes:
        status: the same, as a plain number.
    """

    def __init__(self, status: int) -> None:
        self.status = int(status)
        super().__init__(f"{Status(status).name}: {_TEXTS[Status(status)]}")

    def __reduce__(self) -> tuple[type[CUDARuntimeError], tuple[int]]:
        return type(self), (self.status,)
