"""The gradients of many parameters as one flat buffer, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stagelink.errors import MessageError, UsageError
from stagelink.transport.payload import memory_of

__all__ = ["GradientBuffer"]


class GradientBuffer:
    """The gradients of parameters of one dtype, flat, on the CPU, to be added over replicas.

    Behind the gradients there is a mark for each parameter that has one. In the sum it tells a
    gradient that nobody had from one that some had, which counts as zero for the others. A last
    mark says that this replica takes part in a mean.

    Args:
        parameters: whose gradients; in the same order on every replica.
        multiple: the size is a multiple of this.

    Attributes:
        values: gradients, then marks, then nothing of interest.
        scratch: as large; for the reduction.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], multiple: int) -> None:
        self._parameters = parameters
        sizes = [parameter.numel() for parameter in parameters]
        used = sum(sizes) + len(parameters) + 1
        padding = -used % multiple
        dtype = parameters[0].dtype
        # A sum of halves may be too large for one where their mean is not.
        added = torch.float32 if dtype in {torch.float16, torch.bfloat16} else dtype
        self.values = torch.zeros(used + padding, dtype=added, device="cpu")
        self.scratch = torch.empty_like(self.values)
        parts = torch.split(self.values, [*sizes, len(parameters), 1, padding])
        *self._gradients, self._marks, self._takes_part, _ = parts

    @torch.no_grad()  # a gradient may have a graph of its own
    def fill(self, *, takes_part: bool = True) -> None:
        """Take the parameters' gradients in.

        Args:
            takes_part: whether this replica counts where `hand_out` makes a mean.

        Raises:
            UsageError: one is sparse, or has no strided memory of its own.
        """
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

        Args:
            mean: over the replicas that took part, at least one.
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
    """A gradient with memory.

    Raises:
        UsageError: it has none; named.
    """
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
