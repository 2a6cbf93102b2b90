"""A context of UCX, made as the options say: which wires and devices there are to choose from."""

from __future__ import annotations

import os
from ctypes import byref, c_void_p
from typing import TYPE_CHECKING

from stagelink_ucx.functions import OK, ContextParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stagelink_ucx.functions import Functions

__all__ = ["Context", "ContextError", "check_names"]

_UNLESS_SET = {
    "MM_ERROR_HANDLING": "yes",  # shared memory: without it no endpoint that tells of a failure
    "TLS": "^cuda,rocm,ze",  # which carry no host memory
    "WARN_INVALID_CONFIG": "no",  # of wires that this machine lacks; names are checked here
}
"""Where neither an option nor the environment says something else."""

_KINDS_OF_DEVICES = ("NET_DEVICES", "SHM_DEVICES", "ACC_DEVICES", "SELF_DEVICES")
_NONE = "none"
"""A device's name that no machine has."""


class ContextError(OSError):
    """UCX makes no context with these options."""


class Context:
    """A context; not thread-safe.

    Args:
        ucx: the library.
        config: UCX's configuration, without the ``UCX_`` before the names; goes before that of
            the environment.

    Raises:
        ContextError: it cannot be made; no device is there, say.
    """

    def __init__(self, ucx: Functions, config: Mapping[str, str]) -> None:
        self.ucx = ucx
        self.handle = c_void_p()
        descriptor = c_void_p()
        self._check(ucx.config_read(None, None, byref(descriptor)), "reading its configuration")
        try:
            for name, value in self._with_defaults(config).items():
                status = ucx.config_modify(descriptor, name.encode(), value.encode())
                self._check(status, f"UCX_{name}={value}")
            params = ContextParams()
            major, minor, _ = ucx.version
            status = ucx.init(major, minor, byref(params), descriptor, byref(self.handle))
            self._check(status, "looking for devices")
        finally:
            ucx.config_release(descriptor)

    def _check(self, status: int, what: str) -> None:
        if status != OK:
            raise ContextError(f"UCX, {what}: {self.ucx.text(status)}")

    @staticmethod
    def _with_defaults(config: Mapping[str, str]) -> dict[str, str]:
        defaults = {
            name: value for name, value in _UNLESS_SET.items() if f"UCX_{name}" not in os.environ
        }
        return {**defaults, **config}

    def close(self) -> None:
        """Give it back; once, after all that was made with it."""
        self.ucx.cleanup(self.handle)


def check_names(ucx: Functions, wires: str | None, devices: str | None) -> None:
    """Check that each wire and each device that is named is there.

    UCX leaves out in silence what it does not have.

    Raises:
        ContextError: one of them is not, with its name.
    """
    if wires is not None and not wires.startswith("^"):
        for wire in wires.split(","):
            _try(ucx, {"TLS": wire}, f"the wire {wire!r}")
    by_wires, of_wires = ({}, "") if wires is None else ({"TLS": wires}, f" by {wires!r}")
    for device in [] if devices is None else devices.split(","):
        only = dict.fromkeys(_KINDS_OF_DEVICES, _NONE) | {"NET_DEVICES": device}
        _try(ucx, {**by_wires, **only}, f"the network device {device!r}{of_wires}")


def _try(ucx: Functions, config: Mapping[str, str], what: str) -> None:
    try:
        Context(ucx, config).close()
    except ContextError as error:
        raise ContextError(f"this UCX has nothing here for {what}") from error
