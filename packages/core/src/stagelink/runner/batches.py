"""A batch on a first stage: checked, else a `UsageError`, and cut into microbatches.

The cut is ``torch.tensor_split``'s, so that every rank knows the size of every microbatch from the
two numbers that a session is opened with.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from stagelink.errors import MessageError, UsageError
from stagelink.transport.interrupts import stops_caller
from stagelink.transport.payload import memory_of


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch in microbatches."""

    items: int  # how many samples it has
    microbatches: int  # how many parts it is cut into; at most ``items``
    # by tensor name, its part in every microbatch; views of the batch
    parts: Mapping[str, Sequence[torch.Tensor]] = field(default_factory=dict)

    def part(self, microbatch: int) -> dict[str, torch.Tensor]:
        """The tensors of one microbatch."""
        return {name: parts[microbatch] for name, parts in self.parts.items()}


END = Batch(items=0, microbatches=0)
"""What stands for the end of an epoch: a session without microbatches."""


class Feed:
    """Share of a first stage's replica of the batches, which it sees one at a time."""

    def __init__(self, batches: Iterator[Batch], mine: Container[int]) -> None:
        self._source = batches
        self._mine = mine
        self._parts: dict[int, dict[str, torch.Tensor]] = {}
        self.batches = 0  # how many have been taken in
        self.items = 0  # their samples
        self.microbatches = 0  # their microbatches: the number of the next one

    def reaches(self, microbatch: int) -> bool:
        """Take batches in until there is such a microbatch; False where they run out before."""
        while self.microbatches <= microbatch:
            batch = next(self._source, None)
            if batch is None:
                return False
            self._take_in(batch)
        return True

    def take(self, microbatch: int) -> dict[str, torch.Tensor]:
        """The tensors of a microbatch that was reached; once."""
        return self._parts.pop(microbatch)

    def _take_in(self, batch: Batch) -> None:
        for place in range(batch.microbatches):
            number = self.microbatches + place
            if number in self._mine:
                self._parts[number] = batch.part(place)
        self.batches += 1
        self.items += batch.items
        self.microbatches += batch.microbatches


def items_of(microbatch: int, items: int, microbatches: int) -> int:
    """Number of samples of a batch in one of its microbatches."""
    each, more = divmod(items, microbatches)
    return each + (microbatch < more)


def check_mapping(batch: object) -> Mapping[str, object]:
    """The batch, if it is a mapping from names."""
    if isinstance(batch, Mapping):
        for name in batch:
            if not isinstance(name, str):
                kind = type(name).__qualname__
                raise UsageError(f"the names of a batch are strings; one is a {kind}, {name!r}")
        return batch
    raise UsageError(
        f"a batch is a mapping from names to tensors, as {{'image': x, 'target': y}}; "
        f"got a {type(batch).__qualname__}"
    )


def cut(tensors: Mapping[str, object], microbatches: int) -> Batch:
    """Cut a batch along its first dimension, in fewer parts where it has fewer samples."""
    sizes = {name: _size(name, tensor) for name, tensor in tensors.items()}
    if len(set(sizes.values())) > 1:
        text = ", ".join(f"{name!r} has {size}" for name, size in sizes.items())
        raise UsageError(f"the tensors of a batch must have equally many items: {text}")
    items = next(iter(sizes.values()), 0)
    if items == 0:
        raise UsageError("a batch without items: leave it out, or drop it in the data loader")
    count = min(microbatches, items)
    split = {}
    for name, value in tensors.items():
        with _of_entry(name, value):
            split[name] = torch.tensor_split(_tensor(name, value), count)
    return Batch(items, count, split)


def _size(name: str, value: object) -> int:
    tensor = _tensor(name, value)
    with _of_entry(name, value):
        dims, size = tensor.dim(), tensor.shape[:1]
    if dims == 0:
        raise UsageError(f"batch entry {name!r} has no dimension to cut along: its shape is ()")
    return size[0]


def _tensor(name: str, value: object) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    raise UsageError(f"batch entry {name!r} is a {type(value).__qualname__}, not a tensor")


@contextmanager
def _of_entry(name: str, value: object) -> Iterator[None]:
    """Say of which entry torch knows no parts, and why; some tensors are more than memory."""
    try:
        yield
    except Exception as error:
        if stops_caller(error):
            raise
        why = f"{type(error).__name__}: {error}"
        try:
            memory_of(value)
        except MessageError as clearer:
            why = str(clearer)
        raise UsageError(
            f"batch entry {name!r}, a {type(value).__qualname__}, cannot be cut along its first "
            f"dimension: {why}"
        ) from error
