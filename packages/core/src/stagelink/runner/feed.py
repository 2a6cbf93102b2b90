"""The microbatches of batch after batch, numbered on, as far as anybody has asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    import torch

    from stagelink.runner.batches import Batch

__all__ = ["Feed"]


class Feed:
    """Share of a first stage's replica of the batches, which it sees one at a time.

    Args:
        batches: cut into microbatches.
        mine: the microbatches that this replica takes.

    Attributes:
        batches: how many have been taken in.
        items: their samples.
        microbatches: their microbatches: the number of the next one.
    """

    def __init__(self, batches: Iterator[Batch], mine: Container[int]) -> None:
        self._source = batches
        self._mine = mine
        self._parts: dict[int, dict[str, torch.Tensor]] = {}
        self.batches = 0
        self.items = 0
        self.microbatches = 0

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
