"""Checks of what a runner is made of: a `UsageError` at once where it could not be used."""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter
from numbers import Real
from typing import Any, get_args

import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import ReduceLROnPlateau

from stagelink.errors import DisagreementError, UsageError
from stagelink.exchange.handler import Handler
from stagelink.runner.losses import Reduction, module_of, reduction_of
from stagelink.runner.step import Steppers, Trained, held_by
from stagelink.text import kind, shown


def check_parts(comm: object, module: object, progress: object) -> None:
    """Make sure that a runner is given a handler and a module, and told whether it shows a bar."""
    if not isinstance(progress, bool):
        raise UsageError(
            f"progress is {kind(progress)}, {shown(progress)}; it must be True or False"
        )
    if not isinstance(comm, Handler):
        raise UsageError(
            f"comm is {kind(comm)}; it must be the handler that stagelink.connect gives"
        )
    if not isinstance(module, torch.nn.Module):
        raise UsageError(
            f"module is {kind(module)}; it must be a torch.nn.Module{_instance(module)}"
        )


def check_scores(
    loss: object, reduction: object, metrics: object, *, last: bool
) -> dict[str, Callable[..., Any]]:
    """Make sure that loss and metrics can be called, and are what the reduction says.

    With ``last`` the loss's own reduction, too.

    Returns:
        The metrics by name.
    """
    known = get_args(Reduction)
    if not isinstance(reduction, str) or reduction not in known:
        raise UsageError(f"reduction {shown(reduction)}: must be one of {known}")
    if loss is not None:
        _check_function("loss", loss)
    own = reduction_of(loss)
    if last and loss is not None and own not in {None, reduction}:
        way = "" if own not in known else f"give the runner reduction={own!r}, or "
        raise UsageError(
            f"the loss has reduction {own!r}, the runner {reduction!r}: {way}let the loss make "
            f"one number of its items by reduction={reduction!r}"
        )
    if metrics is not None and not isinstance(metrics, Mapping):
        raise UsageError(
            f"metrics is {kind(metrics)}; it must be a mapping from names to functions"
        )
    found = dict(metrics or {})
    for name, metric in found.items():
        _check_metric(name, metric)
    return found


def _check_metric(name: object, metric: object) -> None:
    if not isinstance(name, str):
        raise UsageError(f"a metric's name is {kind(name)}, {name!r}; it must be a string")
    if name == "loss":
        raise UsageError("metric 'loss': the name is taken by the loss itself")
    _check_function(f"metric {name!r}", metric)
    own = reduction_of(metric)
    if own not in {None, "mean"}:
        raise UsageError(f"metric {name!r} has reduction {own!r}; a metric is a mean")


def _check_function(what: str, value: object) -> None:
    if isinstance(value, type) or not callable(value):
        raise UsageError(
            f"{what} is {kind(value)}; it must be a function of output and "
            f"target{_instance(value)}"
        )


def steppers_of(optimizer: object, scheduler: object, clip_norm: object) -> Steppers:
    """Gather what steps the parameters: optimizers and schedulers, each one, several or None."""
    optimizers = _several("optimizer", optimizer)
    for one in optimizers:
        _check_optimizer(one)
    schedulers = _several("scheduler", scheduler)
    for one in schedulers:
        _check_scheduler(one, optimizers)
    return Steppers(optimizers, schedulers, _norm(clip_norm))


def _norm(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageError(f"clip_norm {shown(value)}: must be a number above 0, or None")
    try:
        found = float(value)
    except OverflowError:  # a whole number beyond all floats
        found = math.nan
    if not found > 0:
        raise UsageError(f"clip_norm {shown(value)}: must be above 0, or None")
    return found


def _several(what: str, value: object) -> list[Any]:
    if value is None:
        return []
    found = list(value) if isinstance(value, (list, tuple)) else [value]
    if not found:
        raise UsageError(f"{what} is an empty {type(value).__name__}: give one, or None")
    if len({id(one) for one in found}) < len(found):
        raise UsageError(f"{what}: the same one is there twice, and would step twice")
    return found


def _check_optimizer(value: Any) -> None:
    lacks = [name for name in ("step", "zero_grad") if not callable(getattr(value, name, None))]
    lacks += ["param_groups"] * (not isinstance(getattr(value, "param_groups", None), Sequence))
    if isinstance(value, type) or lacks:
        without = f" without {', '.join(lacks)}" if lacks else ""
        raise UsageError(
            f"optimizer is {kind(value)}{without}; it must be a torch.optim.Optimizer, or a list "
            f"of them{_instance(value)}"
        )
    if wanted := _required(value):
        raise UsageError(
            f"optimizer {type(value).__name__}: its step() wants {wanted}; a closure would run "
            "forward and backward of the whole model, which the schedule does: use an optimizer "
            "whose step() needs nothing"
        )
    _check_zero_grad(value)


def _check_zero_grad(optimizer: Any) -> None:
    try:
        inspect.signature(optimizer.zero_grad).bind(set_to_none=True)
    except ValueError:  # a function that does not say
        return
    except TypeError as error:
        raise UsageError(
            f"optimizer {type(optimizer).__name__}: its zero_grad() is called with "
            f"set_to_none=True, as torch's own take it: {error}"
        ) from error


def _check_scheduler(value: Any, optimizers: Sequence[Any]) -> None:
    if isinstance(value, type) or not callable(getattr(value, "step", None)):
        raise UsageError(
            f"scheduler is {kind(value)}; it must be a torch.optim.lr_scheduler.LRScheduler, or a "
            f"list of them{_instance(value)}"
        )
    name = type(value).__name__
    if isinstance(value, ReduceLROnPlateau):
        if value.mode != "min":
            raise UsageError(
                f"scheduler {name} has mode {value.mode!r}; it is given the loss of each epoch, "
                "which falls: use mode='min'"
            )
    elif wanted := _required(value):
        raise UsageError(
            f"scheduler {name}: its step() wants {wanted}; of those that do, only "
            "ReduceLROnPlateau is served, with the loss of each epoch: step this one yourself"
        )
    of = getattr(value, "optimizer", None)
    if not optimizers or (of is not None and not any(of is one for one in optimizers)):
        raise UsageError(
            f"scheduler {name} is of another optimizer than the runner's: give both, made for "
            "each other"
        )


def _required(stepper: object) -> str:
    """The arguments without which its ``step`` cannot be called."""
    step = getattr(type(stepper), "step", None)  # the object's own may be wrapped by a scheduler
    try:
        _, *parameters = inspect.signature(step).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a function that does not say
        return ""
    free = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    names = [p.name for p in parameters if p.default is Parameter.empty and p.kind not in free]
    return ", ".join(map(repr, names))


def check_trainable(comm: Handler, trained: Trained, loss: object, steppers: Steppers) -> None:
    """Make sure that optimizers, module and loss belong to each other on this stage."""
    where = f"rank {comm.rank}, stage {comm.stage.name!r}"
    if steppers.clip_norm is not None and comm.plan.asynchronous:
        raise UsageError(
            f"clip_norm: with the schedule {comm.plan.schedule!r} the stages step at different "
            "times, so there is no norm of all their gradients"
        )
    held = {id(tensor) for tensor in held_by(steppers.optimizers)}
    own = trained.parameters()
    last = comm.stage.index == len(comm.plan.stages) - 1
    scoring = module_of(loss)
    if not last and scoring is not None and not held.isdisjoint(map(id, scoring.parameters())):
        raise UsageError(
            f"{where}: the optimizer holds parameters of the loss, which is computed on stage "
            f"{comm.plan.stages[-1].name!r}: leave them to an optimizer there"
        )
    wants = any(parameter.requires_grad for parameter in own)
    if held and wants and held.isdisjoint(map(id, own)):
        raise UsageError(
            f"{where}: the optimizer holds {len(held)} tensors, and none of the {len(own)} "
            "parameters of the module: make it of this module's parameters"
        )
    needs_shapes = comm.plan.asynchronous or comm.stage.replicas > 1
    if needs_shapes and any(map(is_lazy, own)):
        raise UsageError(
            f"{where}: the module has parameters without a shape yet (a lazy layer); run it on an "
            "example before the runner is made"
        )


def agree(comm: Handler, settings: Mapping[str, object]) -> None:
    """Make sure that every rank gives its runner the same; blocks until all have called.

    Raises `DisagreementError` for the setting that differs.
    """
    own = [float(zlib.crc32(repr(value).encode())) for value in settings.values()]
    found = comm.reduce([*own, *(-value for value in own)], "max")
    for place, (name, value) in enumerate(settings.items()):
        if found[place] != -found[len(own) + place]:
            raise DisagreementError(
                f"rank {comm.rank}: the runner's {name} is {value!r} here and something else on "
                "another rank: give every rank's runner the same"
            )


def check_batches(comm: Handler, batches: Any, *, first: bool) -> Iterable[object]:
    """The batches, if a first stage can take some from them; none elsewhere, if left out."""
    if not first:
        return () if batches is None else batches
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
    found: Iterable[object] = batches
    return found


def check_scored(comm: Handler, loss: object) -> None:
    """Make sure that the last stage has a loss."""
    if loss is None and comm.stage.index == len(comm.plan.stages) - 1:
        raise UsageError(
            f"rank {comm.rank} holds the last stage, {comm.stage.name!r}: give the runner a loss"
        )


def check_trains(comm: Handler, trained: Trained, *, has_optimizer: bool) -> None:
    """Make sure that a stage can be trained: there are backwards, gradients and an optimizer."""
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


def _instance(value: object) -> str:
    return f", so an instance: {value.__name__}(…)" if isinstance(value, type) else ""
