"""OpenMPI, shm and a copy in one thread between two processes of this machine, in one run.

By the rules of ``stagelink bench``: each round measures all of them in turn. OpenMPI has blocking
Send and Recv one way, else Isend and Irecv into buffers that are used again; shm is measured by a
link alone and by a handler's sessions; copies are torch's and the C library's. Times are medians,
microseconds a message; a ratio is below 1 where shm took less than OpenMPI.

In ``one_way_read`` the receiver reads the message before it answers: what is in shared memory
has to come to its core then, where what OpenMPI has just copied may still be.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measuring import record
from torch.distributed import FileStore
from tqdm import tqdm

from stagelink.bench import SIZES_BYTES, Measurement, Record
from stagelink.bench.pipes import ONE_WAY_READ, Contender, buffers_of
from stagelink.bench.raw import COPIERS, PostedPipe
from stagelink.bench.rounds import pin, pipes_of, records_of, rounds

MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]
MEASURED = ("one_way", ONE_WAY_READ, "stream", "duplex")
LAYERS = ("link", "handler", "handler-copy")


class MpiPipe(PostedPipe):
    """The world of two."""

    contender = Contender("openmpi", "raw")

    def __init__(self, world: Any) -> None:
        self.rank = world.Get_rank()
        self._world = world

    def buffers(self, size_bytes: int) -> Sequence[Any]:
        """Make buffers as MPI takes them, once and not for each message."""
        return [tensor.numpy() for tensor in buffers_of(size_bytes)]

    def post_send(self, buffer: Any) -> Any:
        """Call Isend."""
        return self._world.Isend(buffer, 1 - self.rank)

    def post_recv(self, buffer: Any) -> Any:
        """Call Irecv."""
        return self._world.Irecv(buffer, 1 - self.rank)

    def send_now(self, buffer: Any) -> None:
        """Call Send."""
        self._world.Send(buffer, 1 - self.rank)

    def recv_now(self, buffer: Any) -> None:
        """Call Recv."""
        self._world.Recv(buffer, 1 - self.rank)

    def wait(self, posted: Any) -> None:
        """Wait for the request."""
        posted.Wait()


def memmove(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy by the C library, as shm does."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def rank(measurement: Measurement, path: str) -> None:
    """Run one of the two ranks; rank 0 keeps the figures."""
    from mpi4py import MPI  # noqa: PLC0415 - to import it starts MPI

    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    here = world.Get_rank()
    pin(here)
    copiers = {**COPIERS, Contender("memmove", "raw"): memmove}
    with pipes_of("shm", here, FileStore(path, 2), world.Barrier) as ours:
        parts = rounds(measurement, [MpiPipe(world), *ours], here, world.Barrier, copiers)
        bar = tqdm(parts, total=len(measurement.parts), disable=here != 0, unit="kind")
        both = world.gather(list(chain.from_iterable(bar)))
    if both is not None:
        record("mpi_link", list(rows(records_of(*both))))


def rows(records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """A row for each kind and size: what each took, and shm's times as multiples of OpenMPI's."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for each in records:
        name = each.layer if each.transport == "shm" else each.transport
        found.setdefault((each.kind, each.payload_bytes), {})[name] = each.median_us
    for (kind, size), times in sorted(found.items(), key=lambda item: MEASURED.index(item[0][0])):
        ratios = {f"{layer}/openmpi": times[layer] / times["openmpi"] for layer in LAYERS}
        yield {"kind": kind, "payload_bytes": size, **times, **ratios}


def main() -> None:
    """Start both, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--size", type=int, action="append", help="bytes; may be given repeatedly")
    parser.add_argument("--store", help=argparse.SUPPRESS)  # given to those whom mpirun starts
    chosen = parser.parse_args()
    if chosen.store is None:
        with TemporaryDirectory() as folder:
            command = [sys.executable, *sys.argv, f"--store={folder}/store"]
            subprocess.run([*MPIRUN, *command], check=True)
        return
    sizes = chosen.size or SIZES_BYTES
    rank(Measurement((), sizes, chosen.rounds, MEASURED, MEASURED), chosen.store)


if __name__ == "__main__":
    main()
