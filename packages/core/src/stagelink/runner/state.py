"""A stage's state: all that its optimizers hold, and what they and the schedulers keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stagelink.errors import UsageError
from stagelink.exchange.handler import Handler
from stagelink.runner.step import Steppers, Trained
from stagelink.text import shown


class State:
    """Gives a stage's state, and takes one over; of a loss where it keeps anything."""

    def __init__(
        self,
        comm: Handler,
        module: torch.nn.Module,
        loss: torch.nn.Module | None,
        trained: Trained,
        steppers: Steppers,
    ) -> None:
        self._who = f"rank {comm.rank}"
        self._stage = comm.stage.name
        self._module = module
        self._loss = loss if loss is not None and _keeps(loss) else None
        self._trained = trained
        self._steppers = steppers

    def get(self) -> dict[str, Any]:
        """The state; tensors in it are the stage's own, as in torch."""
        loss = None if self._loss is None else self._loss.state_dict()
        return {
            "stage": self._stage,
            "module": self._module.state_dict(),
            "loss": loss or None,
            "others": [tensor.detach() for tensor in self._trained.in_no_module()],
            **{what: _states(what, parts) for what, parts in self._steps().items()},
        }

    def put(self, state: object) -> None:
        """Take over a state that `get` gave, if it is this stage's and fits what is here."""
        found = self._checked(state)
        self._load("module", self._module.load_state_dict, found["module"])
        if self._loss is not None and found["loss"] is not None:
            self._load("loss", self._loss.load_state_dict, found["loss"])
        with torch.no_grad():
            for tensor, value in zip(self._trained.in_no_module(), found["others"], strict=True):
                tensor.copy_(value)
        for what, parts in self._steps().items():
            for part, one in zip(parts, found[what], strict=True):
                self._load(what, part.load_state_dict, one)

    def _steps(self) -> dict[str, Sequence[Any]]:
        return {"optimizer": self._steppers.optimizers, "scheduler": self._steppers.schedulers}

    def _checked(self, state: object) -> dict[str, Any]:
        if not isinstance(state, Mapping):
            raise UsageError(
                f"{self._who}: a state is the mapping that state_dict() gave; got a "
                f"{type(state).__qualname__}"
            )
        missing = [
            key for key in ("stage", "module", "optimizer", "scheduler") if key not in state
        ]
        if missing:
            raise UsageError(
                f"{self._who}: this is no state of a runner: it has no "
                f"{', '.join(map(repr, missing))}"
            )
        stage = state["stage"]
        if not isinstance(stage, str) or stage != self._stage:
            raise UsageError(
                f"{self._who}: this is the state of stage {shown(stage)}; the rank holds "
                f"stage {self._stage!r}"
            )
        # States of before had neither the loss nor others.
        found = {"loss": None, "others": [], **state}
        for what, parts in self._steps().items():
            found[what] = self._as_many(what, found[what], len(parts))
        self._check_others(found["others"])
        self._check_loss(state)
        return found

    def _check_loss(self, state: Mapping[str, Any]) -> None:
        if "loss" not in state:
            return
        keeps = self._loss is not None and bool(self._loss.state_dict())
        if (state["loss"] is not None) != keeps:
            has, lacks = ("runner", "state") if keeps else ("state", "runner")
            raise UsageError(
                f"{self._who}: the {has} of stage {self._stage!r} has a loss that keeps "
                f"something, the {lacks} has none"
            )

    def _as_many(self, what: str, states: Any, count: int) -> list[Any]:
        if (states is not None) != (count > 0):
            has, lacks = ("state", "runner") if count == 0 else ("runner", "state")
            article = "an" if what == "optimizer" else "a"
            raise UsageError(
                f"{self._who}: the {has} of stage {self._stage!r} has {article} {what}, the "
                f"{lacks} has none"
            )
        listed = (
            states if isinstance(states, (list, tuple)) else [] if states is None else [states]
        )
        if len(listed) != count:
            raise UsageError(
                f"{self._who}: the state of stage {self._stage!r} has {len(listed)} {what}s, the "
                f"runner {count}"
            )
        return list(listed)

    def _check_others(self, values: Any) -> None:
        if not isinstance(values, (list, tuple)) or not all(
            isinstance(value, torch.Tensor) for value in values
        ):
            raise UsageError(
                f"{self._who}: 'others' in a state is a list of tensors; got {shown(values)}"
            )
        own = [tuple(tensor.shape) for tensor in self._trained.in_no_module()]
        theirs = [tuple(value.shape) for value in values]
        if own != theirs:
            raise UsageError(
                f"{self._who}: beside module and loss the optimizers hold tensors of "
                f"shapes {own}; in the state they are {theirs}"
            )

    def _load(self, what: str, load: Callable[[Any], object], state: object) -> None:
        try:
            load(state)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise UsageError(
                f"{self._who}: the {what} of stage {self._stage!r} does not take this state: "
                f"{error}"
            ) from error


def _keeps(loss: torch.nn.Module) -> bool:
    """Whether a loss has a state; the class weights of torch's own are a setting."""
    own = type(loss).__module__ == torch.nn.CrossEntropyLoss.__module__
    return next(loss.parameters(), None) is not None or not own


def _states(what: str, parts: Sequence[Any]) -> Any:
    for part in parts:
        if not callable(getattr(part, "state_dict", None)):
            raise UsageError(f"{what} {type(part).__name__} has no state_dict() to be saved by")
    states = [part.state_dict() for part in parts]
    return states if len(states) > 1 else next(iter(states), None)
