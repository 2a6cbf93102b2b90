"""Checks of a runner's calls: refused before anything begins where they could not be done."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from stagelink.errors import DisagreementError, UsageError
from stagelink.runner.arguments import kind

if TYPE_CHECKING:
    from stagelink.exchange.handler import Handler
    from stagelink.runner.trained import Trained

__all__ = ["agree", "check_batches", "check_scored", "check_trains"]


def agree(comm: Handler, settings: Mapping[str, object]) -> None:
    """Make sure that every rank gives its runner the same; blocks until all have called.

    Args:
        comm: the handler.
        settings: by name; in the same order everywhere.

    Raises:
        DisagreementError: one differs.
    """
    own = [float(zlib.crc32(repr(value).encode())) for value in settings.values()]
    found = comm.reduce([*own, *(-value for value in own)], "max")
    for place, (name, value) in enumerate(settings.items()):
        if found[place] != -found[len(own) + place]:
            raise DisagreementError(
                f"rank {comm.rank}: the runner's {name} is {value!r} here and something else on "
                "another rank: give every rank's runner the same"
            )


def check_batches(comm: Handler, batches: object, *, first: bool) -> None:
    """Make sure that a first stage is given something to take batches from.

    Args:
        comm: the handler.
        batches: what the caller gave.
        first: whether this stage takes them.

    Raises:
        UsageError: it is not.
    """
    if not first:
        return
    if batches is None:
        raise UsageError(
            f"rank {comm.rank}: stage {comm.stage.name!r} receives nothing, so it needs batches"
        )
    single = isinstance(batches, (Mapping, torch.Tensor, str, bytes))
    if single or (not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__")):
        raise UsageError(
            f"batches is {kind(batches)}; it must be an iterable of batches, each a mapping from "
            "names to tensors, as [{'image': x, 'target': y}]"
        )


def check_scored(comm: Handler, loss: object) -> None:
    """Make sure that the last stage has a loss.

    Raises:
        UsageError: it has none.
    """
    if loss is None and comm.stage.index == len(comm.plan.stages) - 1:
        raise UsageError(
            f"rank {comm.rank} holds the last stage, {comm.stage.name!r}: give the runner a loss"
        )


def check_trains(comm: Handler, trained: Trained, *, has_optimizer: bool) -> None:
    """Make sure that a stage can be trained.

    Args:
        comm: the handler.
        trained: the stage's parameters.
        has_optimizer: whether anything steps them.

    Raises:
        UsageError: the plan has no backwards, gradients are switched off, or nothing would step.
    """
    if comm.plan.schedule == "forward":
        raise UsageError("schedule 'forward' has no backwards; this plan can only evaluate")
    if not torch.is_grad_enabled():
        raise UsageError(
            f"rank {comm.rank}: train() was called under torch.no_grad() or inference_mode(), "
            "where there are no gradients"
        )
    if trained.any() and not has_optimizer:
        raise UsageError(
            f"rank {comm.rank}: the module of stage {comm.stage.name!r} has parameters to train: "
            "give the runner an optimizer, or freeze them with requires_grad_(False)"
        )
