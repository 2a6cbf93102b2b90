"""Synchronisation of a stage's replicas: the same start, same gradients, same buffers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from stagelink.errors import MessageError
from stagelink.exchange.handler import Handler
from stagelink.runner.gradients import GradientSum
from stagelink.runner.replicas import ReplicaGroup
from stagelink.runner.step import Trained
from stagelink.transport.payload import bytes_of, memory_of

_SHAPES = (
    "what the optimizers train, or the buffers of module and loss, differ in number, order, shape "
    "or dtype"
)
_VALUES = (
    "they start with different weights; make them alike (torch.manual_seed before the module is "
    "built) or load the same state into each"
)


class ReplicaSync:
    """Keeps a stage's module equal on all its replicas. Every call is made by all of them.

    With ``all_gradients`` those that no optimizer steps are wanted, too: for a norm of all.

    Raises:
        StagelinkError: from every call, see `ReplicaGroup`.
        UsageError: from those with gradients, where one is sparse, or has no strided memory.
    """

    def __init__(self, comm: Handler, trained: Trained, *, all_gradients: bool) -> None:
        self._comm = comm
        self._of_stage = trained
        self._all_gradients = all_gradients
        self._group: ReplicaGroup | None = None
        self._trained: list[torch.Tensor] = []
        self._gradients: GradientSum | None = None

    def begin(self) -> None:
        """Make sure that the replicas match, before an epoch; blocks until all have come to it.

        Raises:
            DisagreementError: their tensors differ in number, order, shape or dtype; before the
                first epoch, also if in their values.
            MessageError: one has no strided memory of its own.
        """
        trained, buffers = self._of_stage.stepped(), self._of_stage.buffers()
        if self._all_gradients:
            trained += self._of_stage.beside()
        self._check_memory([*trained, *self._of_stage.parameters()], written=False)
        self._check_memory(buffers, written=True)
        is_new = self._group is None
        group = self._replicas()
        layouts = [f"{one.dtype} {tuple(one.shape)}\n" for one in [*trained, *buffers]]
        group.agree(_digest(map(str.encode, layouts)), _SHAPES)
        if is_new:
            tensors = dict.fromkeys([*trained, *self._of_stage.parameters(), *buffers])
            group.agree(_digest(bytes_of(one).cpu().numpy().data for one in tensors), _VALUES)
        if [*map(id, trained)] != [*map(id, self._trained)]:
            self._trained = trained
            self._gradients = GradientSum(group, trained) if trained else None

    def _check_memory(self, tensors: Iterable[torch.Tensor], *, written: bool) -> None:
        for tensor in tensors:
            try:
                memory_of(tensor, written=written)
            except MessageError as error:
                raise type(error)(
                    f"rank {self._comm.rank}: a parameter or buffer of stage "
                    f"{self._comm.stage.name!r} cannot be kept equal over replicas: {error}"
                ) from error

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Start to add gradients as they come in the block, the last backward before the sum."""
        with nullcontext() if self._gradients is None else self._gradients.watched():
            yield

    def add_gradients(self) -> None:
        """Replace every gradient by its sum over the replicas, added in their order."""
        if self._gradients is not None:
            self._gradients.finish()

    def average_gradients(self, *, takes_part: bool) -> None:
        """Replace every gradient by its mean over the replicas that take part, at least one."""
        if self._gradients is not None:
            self._gradients.finish(takes_part=takes_part, mean=True)

    def copy_buffers(self, replica: int) -> None:
        """Replace the buffers (running statistics) by those of one replica."""
        buffers = self._of_stage.buffers()
        if not buffers:
            return
        flat = torch.cat([bytes_of(buffer).cpu() for buffer in buffers])
        self._replicas().broadcast(flat, replica)
        parts = torch.split(flat, [buffer.numel() * buffer.element_size() for buffer in buffers])
        with torch.no_grad():
            for buffer, part in zip(buffers, parts, strict=True):
                # A copy, since a view as another dtype must begin at a multiple of its size.
                values = part.clone().view(buffer.dtype).view(buffer.shape)
                with torch.inference_mode(buffer.is_inference()):
                    buffer.copy_(values)

    def _replicas(self) -> ReplicaGroup:
        if self._group is None:
            self._group = ReplicaGroup(self._comm)
        return self._group


def _digest(parts: Iterable[bytes | memoryview]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()
