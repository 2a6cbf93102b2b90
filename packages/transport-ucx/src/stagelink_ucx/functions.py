"""Functions, structures and constants of UCX that this package uses, as ctypes have them.

Each structure begins with a mask of the fields that count, so a newer UCX, which knows more of
them, reads those that are given here and no other.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int8, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any, ClassVar

__all__ = [
    "BUSY",
    "IN_PROGRESS",
    "OK",
    "ContextParams",
    "EndpointParams",
    "ErrorCallback",
    "Functions",
    "OperationParams",
    "Received",
    "WorkerParams",
    "status_in",
]

OK = 0
IN_PROGRESS = 1
BUSY = -15
_LAST_ERROR = -100

ErrorCallback = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)
"""Called with the argument that the endpoint was given, and the endpoint. (The third, a status, is
left in its register.)"""

_CPUS = 1024
_FEATURE_TAG, _FEATURE_WAKEUP = 1 << 0, 1 << 4
_SERIALIZED = 1
_IGNORE_LEAKS = 1 << 0
_PEER_MODE = 1
_HOST_MEMORY = 0


class ContextParams(ctypes.Structure):
    """Abilities that a context is made with: messages with tags, and an event descriptor."""

    _fields_: ClassVar[list[Any]] = [("mask", c_uint64), ("features", c_uint64)]

    def __init__(self) -> None:
        super().__init__(1 << 0, _FEATURE_TAG | _FEATURE_WAKEUP)


class WorkerParams(ctypes.Structure):
    """Use that is made of a worker: by one thread at a time.

    It does not warn of operations that were given up, whose handles are lost.
    """

    _fields_: ClassVar[list[Any]] = [
        ("mask", c_uint64),
        ("thread_mode", c_int),
        ("cpus", ctypes.c_ulong * (_CPUS // (8 * ctypes.sizeof(ctypes.c_ulong)))),
        ("events", c_uint),
        ("user_data", c_void_p),
        ("event_fd", c_int),
        ("flags", c_uint64),
    ]

    def __init__(self) -> None:
        super().__init__(1 << 0 | 1 << 5, thread_mode=_SERIALIZED, flags=_IGNORE_LEAKS)


class EndpointParams(ctypes.Structure):
    """Destination of an endpoint, and the callback of its failure.

    Args:
        address: of the peer's worker.
        failed: called out of the worker's progress when the endpoint fails.
        argument: for that.
    """

    _fields_: ClassVar[list[Any]] = [
        ("mask", c_uint64),
        ("address", c_char_p),
        ("error_mode", c_int),
        ("error_callback", ErrorCallback),
        ("error_argument", c_void_p),
    ]

    def __init__(self, address: bytes, failed: Any, argument: int) -> None:
        super().__init__(1 << 0 | 1 << 1 | 1 << 2, address, _PEER_MODE, failed, argument)


class Received(ctypes.Structure):
    """Tag and bytes of a message that has come."""

    _fields_: ClassVar[list[Any]] = [("tag", c_uint64), ("size_bytes", c_size_t)]


class OperationParams(ctypes.Structure):
    """Parameters of a send, a receive, a flush or a close, beside the operands.

    Args:
        mask: of the fields that count.
        flags: of the operation.
    """

    _fields_: ClassVar[list[Any]] = [
        ("mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("callback", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("received", c_void_p),
    ]

    @classmethod
    def into(cls, received: Received) -> OperationParams:
        """Make those of a receive into host memory; what is there at once is told in this."""
        return cls(1 << 6 | 1 << 7, memory_type=_HOST_MEMORY, received=ctypes.addressof(received))

    @classmethod
    def on_host(cls) -> OperationParams:
        """Make those of a message in host memory, so that UCX need not find out."""
        return cls(1 << 6, memory_type=_HOST_MEMORY)

    @classmethod
    def by_force(cls) -> OperationParams:
        """Make those of a close that does not wait for the peer."""
        return cls(1 << 4, flags=1)


class Functions:
    """UCX's functions, with their types. A status is a signed byte, 0 or less than that.

    Those that may copy a payload or wait for the kernel let other threads run meanwhile; what
    takes less time than that does not.

    Args:
        file: the library's path or name.

    Raises:
        OSError: it cannot be loaded.
        AttributeError: it has not all functions; it is too old.
    """

    def __init__(self, file: str) -> None:
        free, quick = ctypes.CDLL(file), ctypes.PyDLL(file)
        out = POINTER(c_void_p)
        self.get_version = _typed(free.ucp_get_version, None, *[POINTER(c_uint)] * 3)
        self.status_string = _typed(quick.ucs_status_string, c_char_p, c_int8)
        self.config_read = _typed(free.ucp_config_read, c_int8, c_char_p, c_char_p, out)
        self.config_modify = _typed(free.ucp_config_modify, c_int8, c_void_p, c_char_p, c_char_p)
        self.config_release = _typed(free.ucp_config_release, None, c_void_p)
        self.init = _typed(
            free.ucp_init_version, c_int8, c_uint, c_uint, POINTER(ContextParams), c_void_p, out
        )
        self.cleanup = _typed(free.ucp_cleanup, None, c_void_p)
        self.worker_create = _typed(
            free.ucp_worker_create, c_int8, c_void_p, POINTER(WorkerParams), out
        )
        self.worker_destroy = _typed(free.ucp_worker_destroy, None, c_void_p)
        self.worker_address = _typed(
            free.ucp_worker_get_address, c_int8, c_void_p, out, POINTER(c_size_t)
        )
        self.release_address = _typed(free.ucp_worker_release_address, None, c_void_p, c_void_p)
        self.worker_fd = _typed(free.ucp_worker_get_efd, c_int8, c_void_p, POINTER(c_int))
        self.progress = _typed(free.ucp_worker_progress, c_uint, c_void_p)
        self.arm = _typed(quick.ucp_worker_arm, c_int8, c_void_p)
        self.signal = _typed(quick.ucp_worker_signal, c_int8, c_void_p)
        self.connect = _typed(free.ucp_ep_create, c_int8, c_void_p, POINTER(EndpointParams), out)
        params = POINTER(OperationParams)
        self.flush = _typed(free.ucp_ep_flush_nbx, c_void_p, c_void_p, params)
        self.close = _typed(free.ucp_ep_close_nbx, c_void_p, c_void_p, params)
        self.send = _typed(
            free.ucp_tag_send_nbx, c_void_p, c_void_p, c_void_p, c_size_t, c_uint64, params
        )
        self.receive = _typed(
            free.ucp_tag_recv_nbx,
            c_void_p,
            *(c_void_p, c_void_p, c_size_t, c_uint64, c_uint64, params),
        )
        self.status_of = _typed(quick.ucp_request_check_status, c_int8, c_void_p)
        self.receive_status_of = _typed(
            quick.ucp_tag_recv_request_test, c_int8, c_void_p, POINTER(Received)
        )
        self.cancel = _typed(free.ucp_request_cancel, None, c_void_p, c_void_p)
        self.free = _typed(quick.ucp_request_free, None, c_void_p)

    @property
    def version(self) -> tuple[int, int, int]:
        """Version of the library."""
        parts = [c_uint() for _ in range(3)]
        self.get_version(*parts)
        major, minor, patch = (part.value for part in parts)
        return major, minor, patch

    def text(self, status: int) -> str:
        """Say a status in UCX's words."""
        return str(self.status_string(status).decode())


def _typed(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


def status_in(handle: int | None) -> int:
    """Read the status out of what an operation returns; in progress where that is a handle."""
    if not handle:
        return OK
    error = handle - (1 << 64)
    return error if error >= _LAST_ERROR else IN_PROGRESS
