"""OpenMPI between two processes of this machine, by the same rules as ``stagelink bench``.

Blocking Send and Recv one way, Isend and Irecv into buffers that are used again in a stream.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from measuring import record

from stagelink.bench import SIZES_BYTES, Job
from stagelink.bench.pipes import buffers_of
from stagelink.bench.ranks import pin, records_of, rounds
from stagelink.bench.raw import PostedPipe
from stagelink.bench.records import Subject

MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]


class MpiPipe(PostedPipe):
    """The world of two."""

    subject = Subject("openmpi", "raw")

    def __init__(self, world: Any) -> None:
        self.rank = world.Get_rank()
        self._world = world

    def buffers(self, size_bytes: int) -> Sequence[Any]:
        """As MPI takes them, once and not for each message."""
        return [tensor.numpy() for tensor in buffers_of(size_bytes)]

    def post_send(self, buffer: Any) -> Any:
        """By Isend."""
        return self._world.Isend(buffer, 1 - self.rank)

    def post_recv(self, buffer: Any) -> Any:
        """By Irecv."""
        return self._world.Irecv(buffer, 1 - self.rank)

    def send_now(self, buffer: Any) -> None:
        """By Send."""
        self._world.Send(buffer, 1 - self.rank)

    def recv_now(self, buffer: Any) -> None:
        """By Recv."""
        self._world.Recv(buffer, 1 - self.rank)

    def wait(self, posted: Any) -> None:
        """By the request's own."""
        posted.Wait()


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
