"""Synchronisation of a stage's replicas: the same start, same gradients, same buffers."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from stagelink.errors import MessageError, UsageError
from stagelink.exchange.handler import Handler
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
        self._gradients: list[GradientBuffer] = []

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
            by_dtype: defaultdict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
            for tensor in trained:
                by_dtype[tensor.dtype].append(tensor)
            self._gradients = [GradientBuffer(one, group.size) for one in by_dtype.values()]

    def _check_memory(self, tensors: Iterable[torch.Tensor], *, written: bool) -> None:
        for tensor in tensors:
            try:
                memory_of(tensor, written=written)
            except MessageError as error:
                raise type(error)(
                    f"rank {self._comm.rank}: a parameter or buffer of stage "
                    f"{self._comm.stage.name!r} cannot be kept equal over replicas: {error}"
                ) from error

    def add_gradients(self) -> None:
        """Replace every gradient by its sum over the replicas, added in their order."""
        self._combine(takes_part=True, mean=False)

    def average_gradients(self, *, takes_part: bool) -> None:
        """Replace every gradient by its mean over the replicas that take part, at least one."""
        self._combine(takes_part=takes_part, mean=True)

    def _combine(self, *, takes_part: bool, mean: bool) -> None:
        for gradients in self._gradients:
            gradients.fill(takes_part=takes_part)
            self._replicas().sum(gradients.values, gradients.scratch)
            gradients.hand_out(mean=mean)

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


class GradientBuffer:
    """The gradients of parameters of one dtype, flat, on the CPU, to be added over replicas.

    Behind the gradients there is a mark for each parameter that has one. In the sum it tells a
    gradient that nobody had from one that some had, which counts as zero for the others. A last
    mark says that this replica takes part in a mean. The parameters come in the same order on
    every replica, and the size is a multiple of ``multiple``.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], multiple: int) -> None:
        self._parameters = parameters
        sizes = [parameter.numel() for parameter in parameters]
        used = sum(sizes) + len(parameters) + 1
        padding = -used % multiple
        dtype = parameters[0].dtype
        # A sum of halves may be too large for one where their mean is not.
        added = torch.float32 if dtype in {torch.float16, torch.bfloat16} else dtype
        # gradients, then marks, then nothing of interest
        self.values = torch.zeros(used + padding, dtype=added, device="cpu")
        self.scratch = torch.empty_like(self.values)  # as large; for the reduction
        parts = torch.split(self.values, [*sizes, len(parameters), 1, padding])
        *self._gradients, self._marks, self._takes_part, _ = parts

    @torch.no_grad()  # a gradient may have a graph of its own
    def fill(self, *, takes_part: bool = True) -> None:
        """Take the parameters' gradients in, and whether this replica counts in a mean."""
        self._takes_part.fill_(takes_part)
        for place, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            self._marks[place] = gradient is not None
            if gradient is None:
                self._gradients[place].zero_()
            else:
                self._gradients[place].copy_(_dense(gradient).reshape(-1))

    @torch.no_grad()
    def hand_out(self, *, mean: bool = False) -> None:
        """Give the values back as the parameters' gradients; what nobody has stays None.

        A mean is over the replicas that took part, at least one.
        """
        if mean:
            for gradient in self._gradients:
                gradient.div_(self._takes_part)
        marks = self._marks.tolist()
        for parameter, values, mark in zip(self._parameters, self._gradients, marks, strict=True):
            if mark:
                if parameter.grad is None or not _is_writable(parameter.grad):
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(values.view(parameter.shape))


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient with memory, or `UsageError`."""
    try:
        return memory_of(gradient)[0]
    except MessageError as error:
        raise UsageError(
            f"the replicas of a stage add up dense gradients only: {error}"
        ) from error


def _is_writable(gradient: torch.Tensor) -> bool:
    try:
        return not memory_of(gradient, written=True)[0].is_inference()
    except MessageError:
        return False
