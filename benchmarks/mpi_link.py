"""OpenMPI between two processes of this machine, by the same rules as ``stagelink bench``.

Blocking Send and Recv one way, Isend and Irecv into buffers that are used again in a stream.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from measuring import record

from stagelink.bench import SIZES_BYTES, Job
from stagelink.bench.pipes import IN_FLIGHT, Pipe, buffers_of
from stagelink.bench.ranks import pin, records_of, rounds
from stagelink.bench.records import Subject

MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]


class MpiPipe(Pipe):
    """The world of two."""

    subject = Subject("openmpi", "raw")

    def __init__(self, world: Any) -> None:
        self.rank = world.Get_rank()
        self._world = world

    @contextmanager
    def round(self, kind: str, size_bytes: int, count: int) -> Iterator[None]:
        """Receives are posted ahead in a stream."""
        self._blocking = kind == "one_way"
        self._out = [tensor.numpy() for tensor in buffers_of(size_bytes)]
        self._in = [tensor.numpy() for tensor in buffers_of(size_bytes)]
        self._sent: list[Any] = [None] * IN_FLIGHT
        self._posted: list[Any] = [None] * IN_FLIGHT
        self._sends = self._recvs = self._posts = 0
        self._to_post = count if kind == "duplex" or self.rank == 1 else 0
        for _ in range(0 if self._blocking else IN_FLIGHT):
            self._post()
        yield

    def _post(self) -> None:
        if self._posts < self._to_post:
            slot = self._posts % IN_FLIGHT
            self._posted[slot] = self._world.Irecv(self._in[slot], 1 - self.rank)
            self._posts += 1

    def send(self) -> None:
        """One message."""
        slot = self._sends % IN_FLIGHT
        self._sends += 1
        if self._blocking:
            self._world.Send(self._out[slot], 1 - self.rank)
            return
        if self._sent[slot] is not None:
            self._sent[slot].Wait()
        self._sent[slot] = self._world.Isend(self._out[slot], 1 - self.rank)

    def recv(self) -> None:
        """One message."""
        slot = self._recvs % IN_FLIGHT
        self._recvs += 1
        if self._blocking:
            self._world.Recv(self._in[slot], 1 - self.rank)
            return
        self._posted[slot].Wait()
        self._post()

    def settle(self) -> None:
        """Wait for the sends."""
        for request in self._sent:
            if request is not None:
                request.Wait()
        self._sent = [None] * IN_FLIGHT


def rank(job: Job) -> None:
    """What each of the two runs; rank 0 keeps the records."""
    from mpi4py import MPI  # noqa: PLC0415 - to import it starts MPI

    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    pin(world.Get_rank())
    found = list(rounds(job, [MpiPipe(world)], world.Get_rank(), world.Barrier))
    both = world.gather(found)
    if both is not None:
        record("mpi_link", [asdict(one) for one in records_of(*both)])


def main() -> None:
    """Start both."""
    if "--rank" in sys.argv:
        rank(Job((), SIZES_BYTES, rounds=9, progress=True))
        return
    subprocess.run([*MPIRUN, sys.executable, __file__, "--rank"], check=True)


if __name__ == "__main__":
    main()
