"""The optimizer step of one stage: scale, clip by the norm over all stages, step, schedule."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from stagelink.errors import UsageError
from stagelink.exchange.handler import Handler
from stagelink.runner.scores import Counted
from stagelink.runner.summary import Clock


def held_by(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """The tensors that optimizers hold, each once, in their order."""
    groups = chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
    return _once(chain.from_iterable(group["params"] for group in groups))


class Trained:
    """The tensors of a stage, asked for anew each time: groups may be added, layers unfrozen.

    The loss is that of the last stage, where it is a module; it may have parameters.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        loss: torch.nn.Module | None,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self._modules = [module] if loss is None else [module, loss]
        self._optimizers = optimizers

    def stepped(self) -> list[torch.Tensor]:
        """Tensors that the optimizers step, whether a module's or not."""
        return [tensor for tensor in held_by(self._optimizers) if tensor.requires_grad]

    def beside(self) -> list[torch.Tensor]:
        """Parameters that get gradients though no optimizer holds them."""
        held = set(map(id, held_by(self._optimizers)))
        return [p for p in self.parameters() if p.requires_grad and id(p) not in held]

    def in_no_module(self) -> list[torch.Tensor]:
        """Tensors of the optimizers that are neither the module's nor the loss's."""
        known = set(map(id, self.parameters()))
        return [tensor for tensor in held_by(self._optimizers) if id(tensor) not in known]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of module and loss."""
        return _once(chain.from_iterable(module.parameters() for module in self._modules))

    def buffers(self) -> list[torch.Tensor]:
        """The buffers of module and loss."""
        return _once(chain.from_iterable(module.buffers() for module in self._modules))

    def any(self) -> bool:
        """Whether there is anything to train."""
        return bool(self.stepped() or self.beside())


def _once(tensors: Iterator[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


_NOT_ZERO = 1e-6
"""What torch's own clipping adds to the norm before it divides."""


class Steppers(NamedTuple):
    """Optimizers and schedulers of a stage's parameters."""

    # stepped in this order; none where nothing is trained
    optimizers: Sequence[torch.optim.Optimizer] = ()
    schedulers: Sequence[LRScheduler] = ()  # of their learning rates
    # bound on the norm of all stages' gradients together, the same on every rank; None for none
    clip_norm: float | None = None


class OptimizerStep:
    """Step of a stage's parameters by one batch's gradients."""

    def __init__(self, comm: Handler, trained: Trained, steppers: Steppers) -> None:
        self._comm = comm
        self._trained = trained
        self._steppers = steppers
        self._beside: list[torch.Tensor] = []
        self._set_aside: list[torch.Tensor | None] = []
        self._counts: bool | None = None

    def clear(self) -> None:
        """Forget the gradients of the batch before."""
        for optimizer in self._steppers.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def begin_batch(self) -> None:
        """Forget the gradients of the batch before; those that no optimizer clears are kept.

        They are set aside until `end_batch`, so that what is done to this batch's gradients is
        not done to them again.
        """
        self.clear()
        self._beside = self._trained.beside()
        self._set_aside = [parameter.grad for parameter in self._beside]
        for parameter in self._beside:
            parameter.grad = None

    def end_batch(self, clock: Clock, counted: Counted) -> None:
        """Scale the batch's gradients as what the loss counted and the bound on the norm ask.

        Waits for every rank: with a bound, where the loss says what it counted, and in the first
        batch, to hear whether it does.
        """
        self._scale_counted(clock, counted)
        for parameter, before in zip(self._beside, self._set_aside, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        self._beside, self._set_aside = [], []
        if self._steppers.clip_norm is not None:
            with clock.waiting:
                norm = self._norm_of_all_stages()
            factor = self._steppers.clip_norm / (norm + _NOT_ZERO)
            # A norm that is no number makes it none: the gradients then say so, as in torch.
            if not factor >= 1.0:
                self._scale(factor)

    def take(self, clock: Clock) -> None:
        """Step, and move the learning rates."""
        with clock.computing:
            for optimizer in self._steppers.optimizers:
                optimizer.step()
            for scheduler in self._steppers.schedulers:
                if not isinstance(scheduler, ReduceLROnPlateau):
                    scheduler.step()

    def end_epoch(self, loss: float) -> None:
        """Move the learning rates that wait for the loss of an epoch."""
        for scheduler in self._steppers.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(loss)

    def _scale_counted(self, clock: Clock, counted: Counted) -> None:
        if self._counts is not False:
            with clock.waiting:
                counts, weight = self._comm.reduce([bool(counted.counts), counted.weight])
            if self._counts is None:
                self._counts = counts > 0
            if not 0 <= weight < math.inf:
                raise UsageError(f"the weights of a batch's losses add up to {weight}")
            # Where nothing was counted, nothing was learnt: the gradients are zeros.
            if self._counts and weight not in {0.0, 1.0}:
                self._scale(1 / weight)
        if counted.counts not in {None, self._counts}:
            kinds = ("a LossSum", "one number")
            here, elsewhere = kinds if counted.counts else reversed(kinds)
            raise UsageError(
                f"the loss returned {here} on rank {self._comm.rank}, and {elsewhere} before or "
                "on another rank: keep to one"
            )

    def _gradients(self) -> list[torch.Tensor]:
        tensors = [*self._trained.stepped(), *self._trained.beside()]
        return [tensor.grad for tensor in tensors if tensor.grad is not None]

    def _norm_of_all_stages(self) -> float:
        # Replicas have the same gradients: one of them counts.
        own = _sum_of_squares(self._gradients()) if self._comm.replica == 0 else 0.0
        (total,) = self._comm.reduce([own])
        return math.sqrt(total)

    def _scale(self, factor: float) -> None:
        for gradient in self._gradients():
            gradient.mul_(factor)


def _sum_of_squares(gradients: Iterable[torch.Tensor]) -> float:
    norms: defaultdict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        dense = gradient.coalesce().values() if gradient.is_sparse else gradient
        # A conjugate may be a view, of which there is no view as real numbers.
        real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        norms[gradient.device].append(torch.linalg.vector_norm(real, dtype=torch.float64))
    # One wait for each device, not for each gradient.
    return sum(float(torch.stack(of_one).square().sum()) for of_one in norms.values())
