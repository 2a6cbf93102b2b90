"""Tensors of a stage's step: what its optimizers hold, and what else has gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Trained", "held_by"]


def held_by(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """The tensors that optimizers hold, each once, in their order."""
    groups = chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
    return _once(chain.from_iterable(group["params"] for group in groups))


class Trained:
    """The tensors of a stage, asked for anew each time: groups may be added, layers unfrozen.

    Args:
        module: the stage's.
        loss: that of the last stage, where it is a module; it may have parameters.
        optimizers: of the stage.
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
