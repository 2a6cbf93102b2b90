"""Results of a loss, and what torch's own losses count.

A mean is over what the loss itself counted: targets that it ignores are none of it, and a class
weighs what its weight says. So the losses of microbatches make that of their batch as sums,
divided by the weights of all of them.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional

from stagelink.errors import UsageError


class LossSum(NamedTuple):
    """A loss, or a metric, that is the mean over something else than items.

    The result for many microbatches is the sum of their sums over the sum of their weights::

        def loss(output, target):
            total = F.cross_entropy(output, target, ignore_index=0, reduction="sum")
            return stagelink.LossSum(total, (target != 0).sum())

    Attributes:
        sum: over what was counted: a tensor with one element.
        weight: what it is to be divided by: how many were counted, or the sum of their weights.
            0 where nothing was. A number, or a tensor with one element.
    """

    sum: torch.Tensor
    weight: torch.Tensor | float


class BackwardDone(NamedTuple):
    """A loss whose gradients are already in ``grad``, of parameters and of what was received.

    What ran ``backward`` itself cannot be scaled by what is only known later. So it is for losses
    that are sums: with the runner's ``reduction="sum"``, or a `LossSum`, of whose ``sum`` the
    backward was run.

    Attributes:
        loss: its value; its graph, if it has one, is not used.
    """

    loss: torch.Tensor | LossSum


Loss = Callable[[Any, Any], torch.Tensor | LossSum | BackwardDone]
"""Takes what the last stage's module returned and the target; gives one number."""

Metric = Callable[[Any, Any], torch.Tensor | LossSum]
"""Takes the same; gives one number, a mean over the items of a microbatch or a `LossSum`."""

Reduction = Literal["mean", "sum"]
"""How a loss makes one number of many items."""

_IGNORED = -100
"""The target that torch's cross entropies ignore where nothing else is said."""


def counting(score: Any) -> Callable[[Any, Any], LossSum] | None:
    """One of torch's cross entropies with its weight; None for what is no mean of that kind.

    Known are `torch.nn.CrossEntropyLoss`, `NLLLoss` and `LinearCrossEntropyLoss`, and their
    functions, also by `functools.partial`.
    """
    found = _plain(score)
    if isinstance(found, torch.nn.Module):
        known = _is_own(found) and found.reduction == "mean"
        return functools.partial(_of_module, found) if known else None
    function, keys = _function(found)
    if function in _FUNCTIONS and reduction_of(found) in {None, "mean"}:
        return functools.partial(_of_function, function, keys)
    return None


def is_mean_of_unknown(score: Any) -> bool:
    """Whether it is made of one of torch's cross entropies, and what it counts is not known.

    That is one with a forward of its own, another method of one, and one that was scripted.
    """
    found = module_of(score)
    if isinstance(found, torch.jit.ScriptModule):
        return found.original_name in {known.__name__ for known in _MODULES}
    return isinstance(found, _MODULES) and not (found is _plain(score) and _is_own(found))


def elements_of(score: Any, output: Any, target: Any) -> int | None:
    """Number of elements that one of torch's losses makes a mean of; None for other losses."""
    found, keys = _function(_plain(score))
    if not isinstance(found, _ELEMENTWISE) and found not in _ELEMENTWISE_FUNCTIONS:
        return None
    if keys.get("reduction", getattr(found, "reduction", None)) == "batchmean":
        return None  # a mean over items
    if not isinstance(output, torch.Tensor):
        return None
    return max(output.numel(), target.numel() if isinstance(target, torch.Tensor) else 0)


def module_of(score: Any) -> torch.nn.Module | None:
    """The module that a loss is, wraps, or is a method of; it may have parameters."""
    found, _ = _function(_plain(score))
    found = found.__self__ if isinstance(found, MethodType) else found
    return found if isinstance(found, torch.nn.Module) else None


def reduction_of(score: Any) -> str | None:
    """Name the reduction of a loss; None where it has none.

    ``"batchmean"`` is the mean over items.
    """
    found = _plain(score)
    _, keys = _function(found)
    said = keys.get("reduction", getattr(found, "reduction", None))
    if keys.get("reduce") is not None or keys.get("size_average") is not None:  # torch's old ways
        mean = keys.get("size_average") is not False
        said = "none" if keys.get("reduce") is False else "mean" if mean else "sum"
    return "mean" if said == "batchmean" else said


def _plain(score: Any) -> Any:
    """Without what wraps it: `torch.compile`, a partial that adds nothing, a bound ``forward``."""
    if type(score).__name__ == "OptimizedModule":
        return _plain(score._orig_mod)
    if isinstance(score, MethodType) and _is_call(score):
        return _plain(score.__self__)
    if isinstance(score, functools.partial) and not score.args:
        inner = _plain(score.func)
        return functools.partial(inner, **score.keywords) if score.keywords else inner
    return _plain(score.__wrapped__) if _is_compiled(score) else score


def _is_call(method: MethodType) -> bool:
    """Whether it does what its module does when that is called."""
    owner: Any = type(method.__self__)
    if not issubclass(owner, torch.nn.Module):
        return False
    return method.__func__ is owner.forward or method.__func__ is owner.__call__


def _is_compiled(function: Any) -> bool:
    """Whether it is a wrapper of torch.compile's, and not a decorator of the user's."""
    code = getattr(function, "__code__", None)
    return hasattr(function, "__wrapped__") and "/torch/_dynamo/" in str(code and code.co_filename)


def _function(score: Any) -> tuple[Any, dict[str, Any]]:
    if isinstance(score, functools.partial):
        return score.func, score.keywords
    return score, {}


_MODULES: tuple[type[torch.nn.Module], ...] = tuple(
    getattr(torch.nn, name)
    for name in ("CrossEntropyLoss", "NLLLoss", "LinearCrossEntropyLoss")
    if hasattr(torch.nn, name)  # the last one is there from torch 2.13 on
)
_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)
_NAMES = "BCE BCEWithLogits HingeEmbedding Huber KLDiv L1 MSE PoissonNLL SmoothL1 SoftMargin"
_FUNCTION_NAMES = (
    "binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss huber_loss kl_div "
    "l1_loss mse_loss poisson_nll_loss smooth_l1_loss soft_margin_loss"
)
_ELEMENTWISE = tuple(getattr(torch.nn, f"{name}Loss") for name in _NAMES.split())
_ELEMENTWISE_FUNCTIONS = tuple(getattr(functional, name) for name in _FUNCTION_NAMES.split())


def _is_own(module: torch.nn.Module) -> bool:
    forwards = [known.forward for known in _MODULES]
    forward = inspect.getattr_static(type(module), "forward", None)
    return forward in forwards and "forward" not in vars(module)


def _of_module(module: Any, output: Any, target: Any) -> LossSum:
    twin = copy.copy(module)  # shares parameters, buffers and hooks
    twin.reduction = "sum"
    ignored = _IGNORED if module.ignore_index is None else module.ignore_index
    weigh = functools.partial(_weight, target, module.weight, ignored)
    return _sum(module, twin, output, target, weigh)


def _of_function(function: Any, keys: dict[str, Any], output: Any, target: Any) -> LossSum:
    others = {k: v for k, v in keys.items() if k not in {"reduction", "reduce", "size_average"}}
    mean = functools.partial(function, **others)
    total = functools.partial(function, **others, reduction="sum")
    ignored = keys.get("ignore_index", _IGNORED)
    weigh = functools.partial(_weight, target, keys.get("weight"), ignored)
    return _sum(mean, total, output, target, weigh)


def _sum(
    mean: Callable[..., Any],
    total: Callable[..., Any],
    output: Any,
    target: Any,
    weigh: Callable[[], torch.Tensor],
) -> LossSum:
    if not isinstance(output, torch.Tensor) or output.dtype is not torch.float16:
        return LossSum(total(output, target), weigh())
    # Of a batch of many targets a sum may be beyond what a half can hold; their mean is not.
    value, weight = mean(output, target), weigh()
    return LossSum(torch.where(weight == 0, 0.0, value.double()) * weight, weight)


def _weight(target: torch.Tensor, weight: torch.Tensor | None, ignored: int) -> torch.Tensor:
    """What torch divides the sum by."""
    if target.is_floating_point():  # probabilities of the classes: the weights do not count
        classes = target.shape[0 if target.dim() == 1 else 1]
        count = target.numel() / max(classes, 1)
        return torch.tensor(count, dtype=torch.float64, device=target.device)
    target = target.long()  # uint8 is taken, too, and -100 would be 156
    kept = target != ignored
    if weight is None:
        return kept.sum(dtype=torch.float64)
    flat = torch.where(kept, target, 0).flatten()
    return (weight.detach()[flat] * kept.flatten()).sum(dtype=torch.float64)


def one_number(what: str, value: object) -> torch.Tensor:
    """A score's value, if it is a tensor with one element, a real number; else `UsageError`."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise UsageError(f"{what} must be a tensor with one element, made of all items; got {got}")
    if value.is_complex() or value.is_meta:
        kind = f"dtype {value.dtype}" if value.is_complex() else "device meta"
        raise UsageError(f"{what} must be a real number; got a tensor of {kind}")
    return value
