"""Whether this machine can be checked at all, and what is on it."""

from __future__ import annotations

import importlib
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stagelink_cupy import Cupy, CupyOptions
from tests.gpu.answers import Answer

if TYPE_CHECKING:
    from tests.gpu.machines import Machine

__all__ = ["about"]


def about(machine: Machine) -> Answer:
    """The versions, or why nothing can be tried."""
    usable = Cupy.probe(CupyOptions())
    if not usable:
        return Answer("skipped", usable.reason, _software(None))
    if not torch.cuda.is_available():
        return Answer("skipped", f"torch {torch.__version__} finds no GPU", _software(None))
    with machine.process(0) as rt:
        return Answer("ok", "", [*_software(machine), *_hardware(rt)])


def _fact(what: str, value: object) -> dict[str, Any]:
    return {"what": what, "is": str(value)}


def _software(machine: Machine | None) -> list[dict[str, Any]]:
    nccl = None if machine is None else machine.nccl_version()
    return [
        _fact("Python", platform.python_version()),
        _fact("kernel", f"{platform.system()} {platform.release()} {platform.machine()}"),
        _fact("torch", torch.__version__),
        _fact("CUDA of torch", torch.version.cuda),
        _fact("CuPy", _cupy_version()),
        _fact("NCCL", nccl and ".".join(map(str, nccl))),
    ]


def _cupy_version() -> object:
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        return error
    return getattr(cupy, "__version__", "of no version")


def _hardware(rt: Any) -> list[dict[str, Any]]:
    properties = torch.cuda.get_device_properties(0)
    file = Path("/proc/driver/nvidia/version")
    driver = file.read_text().splitlines()[0] if file.exists() else "not told by the kernel"
    return [
        _fact("CUDA of CuPy", rt.runtimeGetVersion()),
        _fact("CUDA of the driver", rt.driverGetVersion()),
        _fact("driver", driver),
        _fact("GPU", f"{properties.name}, {properties.total_memory >> 20} MiB"),
        _fact("GPUs", torch.cuda.device_count()),
        _fact("compute mode", rt.getDeviceProperties(0).get("computeMode")),
    ]
