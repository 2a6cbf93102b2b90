"""Forward and backward of one microbatch on one stage: tensors to tensors, nothing is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from stagelink.runner.names import TARGET

if TYPE_CHECKING:
    from stagelink.runner.names import Names, Tensors
    from stagelink.runner.scores import Scores

__all__ = ["backward", "forward", "is_own", "seed"]

_LOSS = "loss"


def forward(
    module: Callable[..., Any],
    names: Names,
    tensors: Tensors,
    scores: Scores | None,
    items: tuple[int, int],
) -> dict[str, torch.Tensor | None]:
    """Run the module on one microbatch, on the last stage with the loss.

    Args:
        module: the stage's, or what stands for it.
        names: what it takes and gives.
        tensors: what was received, or the microbatch's part of the batch.
        scores: what counts the loss on the last stage; None elsewhere.
        items: samples in the microbatch, and in the batch.

    Returns:
        By name what the stage sends; on the last stage the loss alone. What `backward` goes from.

    Raises:
        UsageError: the module's result does not fit the plan, or the loss is not one number.
    """
    tensors = {name: None if one is None else _no_leaf(one) for name, one in tensors.items()}
    args, kwargs = names.arguments(tensors)
    result = module(*args, **kwargs)
    if scores is None:
        return names.outputs(result, tensors)
    return {_LOSS: scores.add(result, tensors[TARGET], *items)}


def _no_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a stage of one process would have it: a result, which may be changed in place.

    A leaf that requires a gradient may not be. This is neither a copy nor, to autograd, a view.
    """
    if not (tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled()):
        return tensor
    result: torch.Tensor = torch.ops.aten._unsafe_view.default(tensor, tensor.shape)
    return result


_OWN_USES = 2
"""References to memory that one tensor has: its own, and that of the question."""


def is_own(gradient: torch.Tensor) -> bool:
    """Whether no other tensor has the memory of a gradient.

    Autograd may give one gradient to several leaves where views come between, and then adds to
    that of a parameter in place, in the next microbatch's backward.
    """
    storage = gradient.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) <= _OWN_USES


def seed(outputs: Tensors) -> dict[str, torch.Tensor | None]:
    """The gradient of the loss with respect to itself."""
    return {
        name: None if loss is None else torch.ones_like(loss) for name, loss in outputs.items()
    }


def backward(outputs: Tensors, gradients: Tensors) -> None:
    """Add the gradients of one microbatch to the parameters' and the received tensors' ``grad``.

    Args:
        outputs: what `forward` returned.
        gradients: by the same names; None where there is none. An output that does not require a
            gradient needs none.
    """
    pairs = [
        (output, gradient)
        for output, gradient in ((outputs[name], gradients[name]) for name in outputs)
        if output is not None and output.requires_grad and gradient is not None
    ]
    if pairs:
        roots, received = zip(*pairs, strict=True)
        torch.autograd.backward(roots, received)
