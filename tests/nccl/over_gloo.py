"""The nccl transport with gloo in NCCL's place, on CPU tensors.

Gloo forgives what NCCL does not: operations issued by any thread, in any order. So a test that
uses this proves that messages arrive; `tests.nccl.journal` proves that NCCL would have let them.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist

from stagelink.transport.contract import Capabilities, Verdict
from stagelink_nccl import Nccl
from stagelink_nccl.groups import Group, Groups, PairGroup

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from stagelink.deadline import Deadline
    from stagelink.transport.contract import Port
    from stagelink_nccl.groups import NcclOptions, Work

CONNECT_S = 20.0
STUCK_S = 4.0
"""Gloo does not tell an operation whose bytes are on their way that its peer has died."""


class GlooGroups(Groups):
    """Groups by gloo."""

    def probe(self) -> Verdict:
        return Verdict(True)

    def describe(self) -> Mapping[str, Any]:
        return {"version": [0], "uuid": f"process {os.getpid()}"}

    def connect(self, port: Port, options: NcclOptions, deadline: Deadline) -> Group:
        gloo: Any = dist.ProcessGroupGloo
        given = gloo._Options()
        given._devices = [gloo.create_device(interface="lo", lazy_init=False)]
        given._threads = 1
        given._timeout = timedelta(seconds=min(CONNECT_S, deadline.remaining_s))
        sends = port.rank == port.link.source
        store = dist.PrefixStore(f"from {port.link.source}", port.store())
        backend = gloo(store, int(not sends), 2, given)
        backend._set_default_timeout(timedelta(seconds=STUCK_S))
        return GlooGroup(backend, options, sends=sends)


class GlooGroup(PairGroup):
    """Two ranks by gloo. A send or receive of its cannot be asked, only waited for."""

    def start(self, buffer: torch.Tensor) -> Work:
        work = super().start(buffer)
        return work if self._broadcasts else _Waited(work)

    def close(self, *, broken: bool) -> None:
        del broken
        self._backend = None  # closes its sockets, which ends what the other rank waits for


def let_issuers_end() -> None:
    """Wait for the issuing threads of handlers that failed; until then no other may begin."""
    for thread in threading.enumerate():
        if thread.name == "stagelink-nccl-issue":
            thread.join(CONNECT_S)


class _Waited:
    def __init__(self, work: Work) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._wait, args=(work,), name="gloo-wait")
        self._thread.start()

    def _wait(self, work: Work) -> None:
        try:
            work.wait(timedelta(seconds=CONNECT_S))
        except RuntimeError as error:
            self._error = error

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout: timedelta) -> None:
        self._thread.join(timeout.total_seconds())
        if self._error is not None:
            raise self._error


class NcclOverGloo(Nccl):
    """The transport itself; only what does the work is another."""

    name = "nccl-over-gloo"
    capabilities: ClassVar[Capabilities] = dataclasses.replace(
        Nccl.capabilities, devices=frozenset({"cpu"})
    )
    groups: ClassVar[Groups] = GlooGroups()
