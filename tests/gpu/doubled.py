"""The double of a GPU as a machine for the points."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from tests.cupy.machine import DoubleConfig
from tests.cupy.on_double import CupyOnDouble, on_device
from tests.gpu.machines import Machine
from tests.nccl.over_gloo import GlooGroups, NcclOverGloo

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from stagelink.transport.contract import Transport
    from stagelink_nccl.groups import Groups

__all__ = ["DoubleMachine", "OneGpu"]


class OneGpu(GlooGroups):
    """All ranks are on one GPU, and as NCCL does it takes a variable to allow that."""

    version: ClassVar[tuple[int, ...]] = (2, 30, 0)

    def describe(self) -> Mapping[str, Any]:
        shares = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        return {"version": list(self.version), "uuid": "double", "shares_device": shares}


class NcclOnDouble(NcclOverGloo):
    name = "nccl_on_double"
    groups: ClassVar[Groups] = OneGpu()


class DoubleMachine(Machine):
    """Tensors of the CPU, and a double of CUDA in each process.

    Args:
        orders: fewer than there are, to be quick.
    """

    device = "cpu"
    cupy = CupyOnDouble.name
    nccl = NcclOnDouble.name
    transports: ClassVar[tuple[type[Transport], ...]] = (CupyOnDouble, NcclOnDouble)
    collectives = "gloo"
    settle_s = 0.3
    elements = 100_000
    large_bytes = 3_000_000
    sizes_bytes = (64 * 1024, 256 * 1024)
    rounds = 1

    def __init__(self, *orders: str) -> None:
        self.orders = orders or Machine.orders

    @contextmanager
    def process(self, rank: int) -> Iterator[Any]:
        with on_device(DoubleConfig(delay_s=0.0001), rank) as rt:
            yield rt

    def hold(self, rt: Any, stream: int, seconds: float) -> None:
        del seconds
        rt.pause(stream)

    def release(self, rt: Any, stream: int) -> None:
        rt.resume(stream)

    def linger(self) -> None:
        """Nothing computes by itself."""

    def side_stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def synchronize(self) -> None:
        """Whatever was called is done."""

    def allocator(self) -> str:
        return "native"

    def nccl_version(self) -> tuple[int, ...] | None:
        return (2, 29, 0)
