"""Loss and metrics on the last stage, added up over the microbatches of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from stagelink.errors import UsageError

__all__ = ["Loss", "Metric", "Reduction", "Scores", "means"]

Loss = Callable[[Any, Any], torch.Tensor]
"""Takes what the last stage's module returned and the target; gives one number."""

Metric = Callable[[Any, Any], torch.Tensor]
"""Takes the same; gives one number, the mean over the items of a microbatch."""

Reduction = Literal["mean", "sum"]
"""How a loss makes one number of many items."""


class Scores:
    """Loss and metrics of a rank's microbatches.

    The losses of a batch's microbatches add up to that of one process with the whole batch: with
    ``"mean"`` a microbatch weighs its items over the batch's items, with ``"sum"`` 1.

    Args:
        loss: the loss.
        reduction: how it makes one number of many items.
        metrics: by name.
    """

    def __init__(self, loss: Loss, reduction: Reduction, metrics: Mapping[str, Metric]) -> None:
        self._loss = loss
        self._mean = reduction == "mean"
        self._metrics = metrics
        self._totals: list[torch.Tensor | float] = [0.0] * (1 + len(metrics))

    def add(self, output: Any, target: Any, items: int, of_items: int) -> torch.Tensor:
        """Count one microbatch.

        Args:
            output: what the module returned.
            target: what it is compared with.
            items: samples in the microbatch.
            of_items: samples in the batch.

        Returns:
            Its share of the batch's loss, to go backward from.

        Raises:
            UsageError: loss or metric is not one number.
        """
        loss = _number("the loss", self._loss(output, target))
        self._count(0, loss, items if self._mean else 1)
        for place, (name, metric) in enumerate(self._metrics.items(), start=1):
            self._count(place, _number(f"metric {name!r}", metric(output, target)), items)
        return loss * (items / of_items) if self._mean else loss

    def _count(self, place: int, value: torch.Tensor, weight: int) -> None:
        # Stays on its device: to ask for the number would wait for a GPU.
        self._totals[place] = self._totals[place] + value.detach().double().reshape(()) * weight

    def totals(self) -> list[float]:
        """The loss and each metric, to be added over ranks and given to `means`."""
        return [float(total) for total in self._totals]


def means(totals: Sequence[float], items: int, reduction: Reduction) -> list[float]:
    """All ranks' totals as results: per item, but for a loss that is a sum; nan without items."""
    over = items or float("nan")
    loss = totals[0] / over if reduction == "mean" else totals[0]
    return [loss, *(total / over for total in totals[1:])]


def _number(what: str, value: object) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value
    got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    raise UsageError(f"{what} must be a tensor with one element, made of all items; got {got}")
