"""The optimizer step of one stage: clipping by the norm over all stages, step, schedule."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from stagelink.exchange.handler import Handler
    from stagelink.runner.summary import Clock

__all__ = ["OptimizerStep"]

_NOT_ZERO = 1e-6
"""What torch's own clipping adds to the norm before it divides."""


class OptimizerStep:
    """What one batch's gradients do to a stage's parameters.

    Args:
        comm: the handler.
        module: the stage's module.
        optimizer: of its parameters; None where nothing is trained.
        scheduler: of the optimizer's learning rate, stepped after it; None for none.
        clip_norm: bound on the norm of all stages' gradients together, the same on every rank;
            None for none.
    """

    def __init__(
        self,
        comm: Handler,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None,
        clip_norm: float | None,
    ) -> None:
        self._comm = comm
        self._module = module
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._clip_norm = clip_norm

    def clear(self) -> None:
        """Forget the gradients of the batch before."""
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)

    def take(self, clock: Clock) -> None:
        """Clip, step, and move the learning rate; with clipping it waits for every rank."""
        if self._clip_norm is not None:
            with clock.waiting:
                norm = self._norm_of_all_stages()
            self._scale(self._clip_norm / (norm + _NOT_ZERO))
        with clock.computing:
            if self._optimizer is not None:
                self._optimizer.step()
            if self._scheduler is not None:
                self._scheduler.step()

    def _gradients(self) -> list[torch.Tensor]:
        parameters = self._module.parameters()
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def _norm_of_all_stages(self) -> float:
        own = 0.0
        if self._comm.replica == 0:  # the others have the same gradients
            for gradient in self._gradients():
                own += float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2
        (total,) = self._comm.reduce([own])
        return math.sqrt(total)

    def _scale(self, factor: float) -> None:
        # A norm that is no number makes the factor none: the gradients then say so, as in torch.
        if not factor >= 1.0:
            for gradient in self._gradients():
                gradient.mul_(factor)
