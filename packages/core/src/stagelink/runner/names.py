"""Names of the tensors that a stage's module takes and gives: its parameters' and the plan's.

A key of the batch, a tensor of the plan and a parameter of ``forward`` that mean the same are
spelt the same, or the stage's ``arguments`` in the plan say which is which. A single tensor needs
neither: it is the call's one argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from stagelink.errors import UsageError
from stagelink.plan import Plan, Stage
from stagelink.runner.parameters import parameters_of
from stagelink.text import unknown

TARGET = "target"
"""The tensor that the last stage compares its output with; its module does not get it."""

Tensors = Mapping[str, torch.Tensor | None]
"""Tensors by name; None is what was sent as None."""


class Names:
    """The names that matter on one stage; the last one needs the target where it is ``scored``.

    Raises:
        UsageError: module and plan do not fit; or, from its calls, what these are given.
    """

    def __init__(
        self, module: torch.nn.Module, plan: Plan, stage: Stage, *, scored: bool = True
    ) -> None:
        # tensors that come from other stages, in the plan's order
        self.receives = tuple(edge.tensor.name for edge in plan.inputs(stage.index))
        # tensors that go to other stages, in the plan's order
        self.produces = tuple(dict.fromkeys(e.tensor.name for e in plan.outputs(stage.index)))
        self.first = not self.receives  # whether the stage receives nothing, and so takes batches
        self.last = stage.index == len(plan.stages) - 1  # whether the loss is computed here
        self._scored = scored
        self._stage = f"stage {stage.name!r}"
        self._renamed = stage.arguments
        self._parameters = parameters_of(module)
        self._check_place()
        self._check_arguments()
        if not self.first:
            self._check_received()

    def of_batch(self, batch: Mapping[str, object], *, scored: bool = True) -> dict[str, object]:
        """The entries of a batch that this first stage has a use for; it may have others."""
        bound = self._bound(batch)
        given = {to: name for name, to in self._renamed.items()}
        wanted = {given.get(to, to) for to in self._missing(bound)} | self._renamed.keys()
        wanted |= {TARGET} if self.last and scored else set()
        wanted |= set() if bound or self._parameters.sole is None else {self._parameters.sole}
        missing = sorted(wanted - batch.keys())
        if missing:
            raise UsageError(
                f"{self._stage}: the batch has no {_quoted(missing)}; it has {_quoted(batch)}, "
                f"and {self._parameters.text} is called by name{self._remedy(missing)}"
            )
        self._check_once(bound)
        used = {*bound, *self.produces} | wanted
        return {name: value for name, value in batch.items() if name in used}

    def arguments(
        self, tensors: Tensors
    ) -> tuple[list[torch.Tensor | None], dict[str, torch.Tensor | None]]:
        """Arguments of the module's call with a microbatch's tensors: by position, and by name."""
        bound = self._bound(tensors)
        return self._parameters.bind({to: tensors[name] for name, to in bound.items()})

    def outputs(self, result: Any, tensors: Tensors) -> dict[str, torch.Tensor | None]:
        """Tensors that the stage sends, by name.

        A tensor that the module does not return, alone or in a mapping, is taken from the batch.
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

    def _bound(self, names: Iterable[str]) -> dict[str, str]:
        """The parameter of each tensor, received or of the batch, that the module is given."""
        bound = {name: self._renamed.get(name, name) for name in names if self._is_argument(name)}
        sole, candidates = self._parameters.sole, [*filter(self._may_be_sole, names)]
        if sole is not None and sole not in bound.values() and len(candidates) == 1:
            bound |= dict.fromkeys(candidates, sole)
        return bound

    def _is_argument(self, name: str) -> bool:
        if self.last and name == TARGET:
            return False
        if name in self._renamed or name in self._parameters.named:
            return True
        return self._parameters.takes_any_name and name not in self.produces

    def _may_be_sole(self, name: str) -> bool:
        """Whether it is not spoken for: a first stage has a target and what it passes on, too."""
        if name in self._renamed or name in self._parameters.named:
            return False
        if self.first and name in self.produces:
            return False
        return name != TARGET or not (self.first or self.last)

    def _missing(self, bound: Mapping[str, str]) -> set[str]:
        return set(self._parameters.required.difference(bound.values()))

    def _remedy(self, missing: Iterable[str]) -> str:
        if (
            self._parameters.sole is not None
            and self._parameters.sole not in self._parameters.named
        ):
            return ". Several tensors need parameters with names"
        free = [n for n in missing if n in self._parameters.named and n not in self._renamed]
        if not free:
            return ""
        return (
            f". Name them alike, or say in the plan, in {self._stage}, which parameter takes "
            f'what: arguments = {{ NAME = "{free[0]}" }}'
        )

    def _check_place(self) -> None:
        if not self.last and not self.produces:
            raise UsageError(
                f"{self._stage} produces nothing, and only the last stage has a loss: give it a "
                "tensor in the plan, or drive it by hand"
            )
        asked = TARGET in self._missing(self._renamed) or TARGET in self._renamed
        if self.last and asked:
            raise UsageError(
                f"{self._stage}: {self._parameters.text} takes {TARGET!r}, but on the last stage "
                "that goes to the loss, not to the module"
            )

    def _check_arguments(self) -> None:
        known = self._parameters.named
        for name, to in self._renamed.items():
            if to not in known and not self._parameters.takes_any_name:
                text = unknown("parameter", to, known, owner=self._parameters.text)
                raise UsageError(f"{self._stage}: arguments.{name} in the plan: {text}")

    def _check_once(self, bound: Mapping[str, str]) -> None:
        for name, to in bound.items():
            others = [other for other in bound if bound[other] == to]
            if others != [name]:
                raise UsageError(
                    f"{self._stage}: {_quoted(others)} of the batch are all parameter {to!r} of "
                    f"{self._parameters.text}; leave all but one out, or name another in the "
                    "stage's arguments"
                )

    def _check_received(self) -> None:
        if self.last and self._scored and TARGET not in self.receives:
            raise UsageError(
                f"{self._stage} is the last, so it needs a tensor named {TARGET!r} for the loss; "
                f"it receives {_quoted(self.receives)}; add one to the plan"
            )
        given = [name for name in self.receives if not (self.last and name == TARGET)]
        bound = self._bound(given)
        missing = sorted(self._missing(bound))
        unexpected = [name for name in given if name not in bound]
        if missing or unexpected:
            raise UsageError(
                f"{self._stage}: {self._parameters.text} is called by name with the tensors that "
                f"the stage receives, {_quoted(given)}{_listed('missing', missing)}"
                f"{_listed('unexpected', unexpected)}{self._remedy(missing)}"
            )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"


def _listed(what: str, names: Iterable[str]) -> str:
    text = ", ".join(map(repr, names))
    return f"; {what}: {text}" if text else ""
