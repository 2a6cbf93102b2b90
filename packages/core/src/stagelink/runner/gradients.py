"""Sums of gradients over the replicas of a stage, bucket by bucket while the backward goes on.

The last backward before a step makes gradients final one after another, those of the last layers
first. A bucket of them is on its way to the other replicas as soon as it is whole, as in torch's
DDP. All replicas start the same buckets in the same order, whatever the order in which gradients
come on each: one that is whole waits for those before it. The last bucket starts when the backward
has ended, and carries what is known only then: which parameters have a gradient at all, and which
buckets went too early.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from stagelink.errors import MessageError, UsageError
from stagelink.runner.replicas import ReplicaGroup
from stagelink.transport.payload import memory_of

BUCKET_BYTES = 25 * 2**20
"""Size from which a bucket is full, as in DDP."""


class GradientSum:
    """The gradients of a stage's parameters, to be added over its replicas.

    A gradient that is changed after its bucket has started, as by a hook of the module's or where
    a parameter is in several reentrant checkpoints, is sent once more, with its bucket, after the
    backward; from then on that bucket waits for the backward's end.

    Args:
        group: the replicas.
        parameters: the same ones in the same order on every replica; at least one.
    """

    def __init__(self, group: ReplicaGroup, parameters: Sequence[torch.Tensor]) -> None:
        self._group = group
        self._parameters = parameters
        self._place_of = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._lock = threading.Lock()  # the backwards of several devices run on several threads
        self._late: set[int] = set()
        self._came: list[int] | None = []
        self._lay_out([*reversed(range(len(parameters)))])

    def _lay_out(self, order: Sequence[int]) -> None:
        self._members = _in_buckets(self._parameters, order)
        self._bucket_of = {
            place: number for number, places in enumerate(self._members) for place in places
        }
        # A mark for each parameter, a flag for each bucket, and whether this replica takes part.
        beside = len(self._parameters) + len(self._members) + 1
        self._buckets = [self._bucket(places) for places in self._members[:-1]]
        self._buckets.append(self._bucket(self._members[-1], beside))
        self._begin()

    def _bucket(self, places: Sequence[int], beside: int = 0) -> Bucket:
        return Bucket([self._parameters[place] for place in places], beside)

    def _begin(self) -> None:
        self._started = 0
        self._awaited = [{*places} for places in self._members]

    # -- in the last backward

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Start buckets as they become whole, in the backward that is run in the block."""
        with ExitStack() as hooks:
            for parameter in self._parameters if len(self._buckets) > 1 else ():
                if parameter.requires_grad:
                    # Anew each time: behind the hooks that the parameter has by now.
                    hook = parameter.register_post_accumulate_grad_hook(self._arrived)
                    hooks.callback(hook.remove)
            yield

    def _arrived(self, parameter: torch.Tensor) -> None:
        place = self._place_of[id(parameter)]
        with self._lock:
            if self._came is not None:
                self._came.append(place)
            if place not in self._late:
                self._awaited[self._bucket_of[place]].discard(place)
            while self._started < len(self._buckets) - 1 and not self._awaited[self._started]:
                self._start()

    def _start(self) -> None:
        bucket = self._buckets[self._started]
        self._group.start_sum(bucket.take(), bucket.values)
        self._started += 1

    # -- after it

    def finish(self, *, takes_part: bool = True, mean: bool = False) -> None:
        """Replace every gradient by its sum over the replicas, added in their order.

        What nobody has stays None. Blocks until all replicas have come.

        Args:
            takes_part: whether this replica counts in a mean; one of them does at least.
            mean: give the mean over the replicas that take part.
        """
        changed = [bucket.changed() for bucket in self._buckets]
        for places, which in zip(self._members, changed, strict=True):
            self._late.update(places[member] for member in which)
        marks = [parameter.grad is not None for parameter in self._parameters]
        beside = self._buckets[-1].beside
        beside.copy_(torch.tensor([*marks, *map(bool, changed), takes_part], device="cpu"))
        while self._started < len(self._buckets):
            self._start()
        self._group.finish_sums()
        *found, count = beside.tolist()
        self._sum_again(found[len(marks) :])
        for bucket, places in zip(self._buckets, self._members, strict=True):
            bucket.hand_out([found[place] for place in places], count.real if mean else 1)
        self._begin()
        self._learn()

    def _sum_again(self, flags: Sequence[complex]) -> None:
        buckets = [bucket for bucket, flag in zip(self._buckets, flags, strict=True) if flag]
        for bucket in buckets:
            self._group.start_sum(bucket.take(), bucket.values)
        if buckets:
            self._group.finish_sums()

    def _learn(self) -> None:
        """After the first backward, lay the buckets out anew: as gradients came on one replica."""
        came, self._came = self._came, None
        if came is None or len(self._buckets) == 1:
            return
        before = [place for places in self._members for place in places]
        order = torch.tensor([*dict.fromkeys([*came, *before])], device="cpu")
        self._group.broadcast(order, 0)
        self._buckets.clear()  # before there is memory for others
        self._lay_out(order.tolist())


def _in_buckets(parameters: Sequence[torch.Tensor], order: Sequence[int]) -> list[list[int]]:
    """The parameters' places in buckets, each of one dtype."""
    full: list[list[int]] = []
    filling: dict[torch.dtype, list[int]] = {}
    bytes_in: dict[torch.dtype, int] = {}
    for place in order:
        parameter = parameters[place]
        dtype = parameter.dtype
        filling.setdefault(dtype, []).append(place)
        bytes_in[dtype] = bytes_in.get(dtype, 0) + parameter.numel() * parameter.element_size()
        if bytes_in[dtype] >= BUCKET_BYTES:
            full.append(filling.pop(dtype))
            bytes_in[dtype] = 0
    return [*full, *filling.values()]


class Bucket:
    """The gradients of parameters of one dtype, flat, on the CPU."""

    def __init__(self, parameters: Sequence[torch.Tensor], beside: int = 0) -> None:
        self._parameters = parameters
        sizes = [parameter.numel() for parameter in parameters]
        dtype = parameters[0].dtype
        # A sum of halves may be too large for one where their mean is not.
        added = torch.float32 if dtype in {torch.float16, torch.bfloat16} else dtype
        # of the gradients, then further numbers that are added likewise
        self.values = torch.zeros(sum(sizes) + beside, dtype=added, device="cpu")
        *self._gradients, self.beside = torch.split(self.values, [*sizes, beside])
        self._taken: list[tuple[torch.Tensor | None, int]] = []

    @torch.no_grad()  # a gradient may have a graph of its own
    def take(self) -> torch.Tensor:
        """Take the parameters' gradients in; one that is missing counts as zeros.

        Returns:
            ``values``, or the memory of the only gradient, which then must stay as it is.
        """
        gradients = [parameter.grad for parameter in self._parameters]
        self._taken = [(one, _version_of(one)) for one in gradients]
        for place, gradient in zip(self._gradients, gradients, strict=True):
            if gradient is None:
                place.zero_()
                continue
            dense, is_plain = _dense(gradient)
            alike = dense.dtype == place.dtype and dense.device == place.device
            if is_plain and alike and place.numel() == self.values.numel():
                return dense.view(-1)
            place.copy_(dense.reshape(-1))
        return self.values

    def changed(self) -> list[int]:
        """Numbers of the parameters whose gradients are not what was taken in; none before."""
        taken = zip(self._parameters, self._taken, strict=False)  # none where nothing was taken
        return [
            member
            for member, (parameter, (gradient, version)) in enumerate(taken)
            if parameter.grad is not gradient or _version_of(gradient) != version
        ]

    @torch.no_grad()
    def hand_out(self, marks: Sequence[complex], count: float = 1) -> None:
        """Give the values, divided by a count, back as gradients where a parameter has a mark."""
        self._taken = []
        for parameter, values, mark in zip(self._parameters, self._gradients, marks, strict=True):
            if not mark:
                continue
            if count != 1:
                values.div_(count)
            if parameter.grad is None or not _is_writable(parameter.grad):
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(values.view(parameter.shape))


def _dense(gradient: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """A gradient with memory, and whether its values lie there as they are; or `UsageError`."""
    try:
        dense, _, is_plain = memory_of(gradient)
    except MessageError as error:
        raise UsageError(
            f"the replicas of a stage add up dense gradients only: {error}"
        ) from error
    return dense, is_plain


def _version_of(gradient: torch.Tensor | None) -> int:
    """What changes when a gradient is changed in place."""
    return 0 if gradient is None or gradient.is_inference() else gradient._version


def _is_writable(gradient: torch.Tensor) -> bool:
    try:
        return not memory_of(gradient, written=True)[0].is_inference()
    except MessageError:
        return False
