"""Loss and metrics on the last stage, added up over the microbatches of a batch and an epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch

from stagelink.errors import UsageError
from stagelink.runner.losses import (
    BackwardDone,
    Loss,
    LossSum,
    Metric,
    Reduction,
    counting,
    elements_of,
    is_mean_of_unknown,
    one_number,
)

_Total = torch.Tensor | float

_UNKNOWN = (
    "{} is made of a cross entropy of torch, with a method of its own or scripted, so what its "
    "mean counts is not known: let it return stagelink.LossSum(sum, weight)"
)


class Counted(NamedTuple):
    """Count of a batch's losses on this rank, by which its gradients are to be scaled."""

    counts: bool | None = None  # whether they were `LossSum`; None where there was none
    weight: float = 0.0  # the sum of their weights, in the unit that the gradients are of now


class Scores:
    """Loss and metrics of a rank's microbatches.

    The losses of a batch's microbatches add up to that of one process with the whole batch. With
    ``"mean"`` a microbatch weighs its items over the batch's items; where the loss says what it
    counted, its sum is taken, to be divided by the batch's weight once that is known. With
    ``"sum"`` it weighs 1.

    Args:
        trains: whether `finish_batch` is called behind each batch, for its gradients.
        apart: whether each microbatch's mean counts for itself, as in an asynchronous schedule.
    """

    def __init__(
        self,
        loss: Loss,
        reduction: Reduction,
        metrics: Mapping[str, Metric],
        *,
        trains: bool,
        apart: bool,
    ) -> None:
        mean = reduction == "mean"
        self._mean = mean
        self._trains = trains
        self._apart = apart
        self._loss = (counting(loss) if mean else None) or loss
        self._must_count = mean and is_mean_of_unknown(loss)
        self._of_elements: tuple[int, int] | None = None
        self._metrics = {name: counting(metric) or metric for name, metric in metrics.items()}
        self._sums: list[_Total] = [0.0] * (1 + len(metrics))
        self._weights: list[_Total] = [0.0] * (1 + len(metrics))
        self._counts: bool | None = None
        self._by_own: dict[bool, _Total] = {False: 0.0, True: 0.0}
        self._last_weight: _Total | None = None
        self.backward_done = False  # whether the last loss has run its own backward

    def add(self, output: Any, target: Any, items: int, of_items: int) -> torch.Tensor:
        """Count one microbatch, of so many items of the batch's.

        Returns:
            Its share of the batch's loss, to go backward from.
        """
        result = self._loss(output, target)
        self.backward_done = isinstance(result, BackwardDone)
        if isinstance(result, BackwardDone):
            result = result.loss
            self._check_done(counts=isinstance(result, LossSum))
        share = self._share(result, output, target, (items, of_items))
        for place, (name, metric) in enumerate(self._metrics.items(), start=1):
            what, value = f"metric {name!r}", metric(output, target)
            if isinstance(value, LossSum):
                self._count(place, *_pair(what, value))
            elif is_mean_of_unknown(metric):
                raise UsageError(_UNKNOWN.format(what))
            else:
                self._count(place, one_number(what, value), items, times=items)
        return share.detach() if self.backward_done else share

    def _share(
        self, result: object, output: Any, target: Any, count: tuple[int, int]
    ) -> torch.Tensor:
        items, of_items = count
        self._check_kind(counts=isinstance(result, LossSum))
        if not isinstance(result, LossSum):
            self._last_weight = None
            loss = one_number("the loss", result)
            if self._mean and self._trains and not self._apart:
                self._check_elements(elements_of(self._loss, output, target), items)
            self._count(0, loss, items, times=items if self._mean else 1)
            return loss * (items / of_items) if self._mean else loss
        total, weight = _pair("the loss", result)
        self._last_weight = weight
        self._count(0, total, weight)
        if self._apart:
            # A microbatch that counts nothing has no mean, and no gradient.
            counted = torch.as_tensor(weight, device=total.device).double()
            each = torch.where(counted == 0, 0.0, 1 / counted).to(total.dtype)
            return total * each * (items / of_items)
        # Only the batch's end tells its weight. Its items stand in, so that halves have room.
        unit = 1 if self.backward_done else of_items
        self._by_own[self.backward_done] = self._by_own[self.backward_done] + weight / unit
        return total / unit

    def _count(self, place: int, value: torch.Tensor, weight: _Total, *, times: int = 1) -> None:
        # Stays on its device: to ask for the number would wait for a GPU. As a double first: the
        # product may be beyond what a half or an uint8 can hold.
        self._sums[place] = self._sums[place] + value.detach().double().reshape(()) * times
        self._weights[place] = self._weights[place] + weight

    def _check_kind(self, *, counts: bool) -> None:
        if counts and not self._mean:
            raise UsageError(
                "the loss returned a LossSum, which makes a mean; with reduction='sum' return its "
                "sum, or give the runner reduction='mean'"
            )
        if self._must_count and not counts:
            raise UsageError(_UNKNOWN.format("the loss"))
        if self._counts is not None and counts != self._counts:
            one, other = ("one number", "a LossSum") if counts else ("a LossSum", "one number")
            raise UsageError(f"the loss returned {one} before and {other} now: keep to one")
        self._counts = counts

    def _check_elements(self, elements: int | None, items: int) -> None:
        """Make sure that a mean over elements is one over items: each has as many."""
        if elements is None:
            return
        before, before_items = self._of_elements or (elements, items)
        self._of_elements = elements, items
        if elements * before_items != before * items:
            raise UsageError(
                f"the loss is a mean over elements: {elements} of {items} items in this "
                f"microbatch, {before} of {before_items} in one before it, of the same batch. "
                "Only their sums add up: let it return stagelink.LossSum(sum, weight)"
            )

    def _check_done(self, *, counts: bool) -> None:
        if self._mean and not counts:
            raise UsageError(
                "the loss has run its own backward, and its mean over items cannot be weighed any "
                "more: make it a sum, with reduction='sum' or by BackwardDone(LossSum(…))"
            )
        if self._mean and self._apart:
            raise UsageError(
                "the loss has run its own backward of a LossSum; an asynchronous schedule does "
                "not divide it any more: use reduction='sum'"
            )

    def counted_nothing(self) -> bool:
        """Say of the last loss that it was a `LossSum` of nothing, which may lack a graph.

        Waits for a GPU.
        """
        return self._last_weight is not None and not float(self._last_weight)

    def finish_batch(self) -> Counted:
        """Return what the batch's losses counted, before the next one begins. Waits for a GPU."""
        weights = [float(weight) for weight in self._by_own.values()]
        if all(weights):
            raise UsageError(
                "the loss has run its own backward for some microbatches of a batch and not for "
                "others, and their gradients are of different scales: keep to one"
            )
        self._by_own = {False: 0.0, True: 0.0}
        self._of_elements = None
        return Counted(self._counts, sum(weights))

    def totals(self) -> list[float]:
        """Loss and metrics, to be added over ranks and given to `means`: sums, then weights."""
        return [float(total) for total in [*self._sums, *self._weights]]


def means(totals: Sequence[float], reduction: Reduction) -> list[float]:
    """All ranks' totals as results: means, but for a loss that is a sum; nan without a weight."""
    half = len(totals) // 2
    sums, weights = totals[:half], totals[half:]
    for weight in weights:
        if not 0 <= weight < math.inf:
            raise UsageError(f"the weights of the losses, or of a metric, add up to {weight}")
    results = [s / w if w else math.nan for s, w in zip(sums, weights, strict=True)]
    return [sums[0], *results[1:]] if reduction == "sum" else results


def _pair(what: str, value: LossSum) -> tuple[torch.Tensor, _Total]:
    total = one_number(f"{what}'s sum", value.sum)
    weight: object = value.weight
    if isinstance(weight, torch.Tensor):
        return total, one_number(f"{what}'s weight", weight).detach().double().reshape(())
    if isinstance(weight, Real) and 0 <= float(weight) < math.inf:
        return total, float(weight)
    raise UsageError(f"{what}'s weight must be a number that is not negative; got {weight!r}")
