"""Which tensors a stage's module takes and gives: the names of its parameters and of the plan.

A module is called with keyword arguments only, so a key of the batch, a tensor of the plan and a
parameter of ``forward`` that mean the same are spelt the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from inspect import Parameter
from typing import TYPE_CHECKING, Any

import torch

from stagelink.errors import UsageError

if TYPE_CHECKING:
    from stagelink.plan import Plan, Stage

__all__ = ["TARGET", "Names", "Tensors"]

TARGET = "target"
"""The tensor that the last stage compares its output with; its module does not get it."""

Tensors = Mapping[str, torch.Tensor | None]
"""Tensors by name; None is what was sent as None."""

_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class Names:
    """The names that matter on one stage.

    Args:
        module: the stage's module; its ``forward`` says what it takes.
        plan: the plan.
        stage: the stage.
        scored: whether the last stage has a loss, which needs the target.

    Attributes:
        first: whether the stage receives nothing, and so takes batches.
        last: whether the loss is computed here.
        receives: tensors that come from other stages, in the plan's order.
        produces: tensors that go to other stages, in the plan's order.

    Raises:
        UsageError: module and plan do not fit.
    """

    def __init__(
        self, module: torch.nn.Module, plan: Plan, stage: Stage, *, scored: bool = True
    ) -> None:
        self.receives = tuple(edge.tensor.name for edge in plan.inputs(stage.index))
        self.produces = tuple(dict.fromkeys(e.tensor.name for e in plan.outputs(stage.index)))
        self.first = not self.receives
        self.last = stage.index == len(plan.stages) - 1
        self._scored = scored
        self._stage = f"stage {stage.name!r}"
        signature = inspect.signature(module.forward)
        self._module = f"{type(module).__qualname__}.forward{signature}"
        parameters = signature.parameters.values()
        self._accepts = {p.name for p in parameters if p.kind in _BY_NAME}
        self._requires = {p.name for p in parameters if _is_required(p)}
        self._accepts_all = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
        by_position = [p.name for p in parameters if p.kind is Parameter.POSITIONAL_ONLY]
        self._check_place(self._requires.intersection(by_position))
        if not self.first:
            self._check_received()

    def of_batch(self, batch: Mapping[str, object], *, scored: bool = True) -> dict[str, object]:
        """The entries of a batch that this first stage has a use for; it may have others.

        Args:
            batch: the batch.
            scored: whether there is a loss, which needs its target.

        Raises:
            UsageError: one that the module requires, or the target of the loss, is missing.
        """
        required = self._requires | ({TARGET} if self.last and scored else set())
        missing = sorted(required - batch.keys())
        if missing:
            raise UsageError(
                f"{self._stage}: the batch has no {_quoted(missing)}; it has {_quoted(batch)}, "
                f"and {self._module} is called by name"
            )
        used = {*self._passed(batch), *self.produces} | required
        return {name: value for name, value in batch.items() if name in used}

    def arguments(self, tensors: Tensors) -> dict[str, torch.Tensor | None]:
        """What the module is called with.

        Args:
            tensors: what the stage received, or its part of the batch.
        """
        return {name: tensors[name] for name in self._passed(tensors)}

    def outputs(self, result: Any, tensors: Tensors) -> dict[str, torch.Tensor | None]:
        """What the stage sends.

        A tensor that the module does not return is taken from the batch.

        Args:
            result: what the module returned: a tensor where there is one to return, or a mapping.
            tensors: as for `arguments`.

        Raises:
            UsageError: the result lacks a tensor that the stage produces, or has one that it does
                not.
        """
        found = {**self._passing(tensors), **self._named(result, tensors)}
        missing = [name for name in self.produces if name not in found]
        unexpected = sorted(found.keys() - set(self.produces))
        if missing or unexpected:
            raise UsageError(
                f"{self._stage} produces {_quoted(self.produces)}; its module returned "
                f"{_quoted(result)}{_listed('missing', missing)}"
                f"{_listed('unexpected', unexpected)}"
            )
        return {name: found[name] for name in self.produces}

    def _named(self, result: Any, tensors: Tensors) -> Mapping[str, torch.Tensor | None]:
        if isinstance(result, Mapping):
            return result
        own = [name for name in self.produces if name not in self._passing(tensors)]
        names = own or self.produces
        if isinstance(result, torch.Tensor) and len(names) == 1:
            return {names[0]: result}
        wanted = "a tensor" if len(names) == 1 else "a mapping"
        raise UsageError(
            f"{self._stage}: its module must return {wanted} for {_quoted(names)}, which the "
            f"batch does not bring; it returned a {type(result).__qualname__}"
        )

    def _passing(self, tensors: Tensors) -> Tensors:
        return {name: tensors[name] for name in self.produces if name in tensors}

    def _passed(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self._is_argument(name)]

    def _is_argument(self, name: str) -> bool:
        if self.last and name == TARGET:
            return False
        return name in self._accepts or (self._accepts_all and name not in self.produces)

    def _check_place(self, by_position: Iterable[str]) -> None:
        if not self.last and not self.produces:
            raise UsageError(
                f"{self._stage} produces nothing, and only the last stage has a loss: give it a "
                "tensor in the plan, or drive it by hand"
            )
        if by_position:
            raise UsageError(
                f"{self._stage}: {self._module} takes {_quoted(sorted(by_position))} by position "
                "only, and is called by name"
            )
        if self.last and TARGET in self._requires:
            raise UsageError(
                f"{self._stage}: {self._module} takes {TARGET!r}, but on the last stage that goes "
                "to the loss, not to the module"
            )

    def _check_received(self) -> None:
        if self.last and self._scored and TARGET not in self.receives:
            raise UsageError(
                f"{self._stage} is the last, so it needs a tensor named {TARGET!r} for the loss; "
                f"it receives {_quoted(self.receives)}; add one to the plan"
            )
        given = [name for name in self.receives if not (self.last and name == TARGET)]
        missing = sorted(self._requires.difference(given))
        unexpected = [name for name in given if not self._is_argument(name)]
        if missing or unexpected:
            raise UsageError(
                f"{self._stage}: {self._module} is called by name with the tensors that the stage "
                f"receives, {_quoted(given)}{_listed('missing', missing)}"
                f"{_listed('unexpected', unexpected)}"
            )


def _is_required(parameter: Parameter) -> bool:
    variadic = parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return parameter.default is Parameter.empty and not variadic


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"


def _listed(what: str, names: Iterable[str]) -> str:
    text = ", ".join(map(repr, names))
    return f"; {what}: {text}" if text else ""
