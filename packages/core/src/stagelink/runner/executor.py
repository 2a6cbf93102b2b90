"""One batch through one rank: the session's actions, and what each does to its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from stagelink.errors import UsageError
from stagelink.exchange.session import Session
from stagelink.runner.batches import items_of
from stagelink.runner.names import TARGET, Names, Tensors
from stagelink.runner.scores import Scores
from stagelink.runner.summary import Clock
from stagelink.schedule import Action, Kind

_LOSS = "loss"
_OWN_USES = 2
"""References to memory that one tensor has: its own, and that of the question."""

_ALONE = "Expected more than 1 value per channel when training"
"""How torch begins to say that a batch norm has one item only."""


class Station(NamedTuple):
    """Parts of an execution that stay the same from batch to batch."""

    module: torch.nn.Module  # the stage's
    names: Names  # what it takes and gives
    scores: Scores | None  # counts loss and metrics on the last stage; None elsewhere
    clock: Clock  # is told where the time goes
    trains: bool  # whether anything here wants a gradient of the loss
    # entered around the last backward before a step
    last_backward: Callable[[], AbstractContextManager[None]] = nullcontext


class _Kept(NamedTuple):
    """What a forward leaves for its backward: the ends of the graph between them."""

    owing: dict[str, torch.Tensor]
    outputs: Tensors


class Executor:
    """The microbatches of one session on this rank; ``part`` gives a first stage's share of data.

    A subclass may give another module, number of items or backward.
    """

    def __init__(
        self, session: Session, station: Station, part: Callable[[int], Tensors] | None
    ) -> None:
        self.session = session
        self.station = station
        self._names = station.names
        self._clock = station.clock
        self._part = part
        self._kept: dict[int, _Kept] = {}

    def run(self) -> None:
        """Carry out the session's actions; gradients are added to the parameters' ``grad``."""
        for action in self.session.actions:
            self.do(action)

    def do(self, action: Action) -> None:
        """Carry out one of the session's actions, in their order."""
        if action.kind is Kind.FORWARD:
            self.forward(action.microbatch)
        else:
            self._backward(action.microbatch)

    def forward(self, microbatch: int) -> None:
        """Carry out a forward."""
        tensors = self._take(microbatch)
        # Before the module, which may ask for a gradient of its input for purposes of its own.
        owing = {n: t for n, t in tensors.items() if t is not None and t.requires_grad}
        items = self.items_in(microbatch, tensors)
        with self._clock.computing, self._explained(microbatch, tensors):
            outputs = _run_forward(
                self.module_for(microbatch), self._names, tensors, self.station.scores, items
            )
        if self.session.mode == "train":
            owed = owing if self._part is None else {}
            self._check_graph(outputs, wanted=bool(owed) or self.station.trains)
            self._kept[microbatch] = _Kept(owed, outputs)
        for name in self._names.produces:
            with self._clock.sending:
                self.session.send(name, outputs[name], microbatch)

    def _check_graph(self, outputs: Tensors, *, wanted: bool) -> None:
        """Make sure that there is something to go backward from, where a gradient is wanted."""
        scores = self.station.scores
        if scores is None or scores.backward_done or not wanted:
            return
        for loss in outputs.values():
            if loss is not None and not loss.requires_grad and not scores.counted_nothing():
                raise UsageError(
                    "the loss does not depend on any parameter by a graph (detach(), argmax() and "
                    "torch.no_grad() cut it): nothing would be trained. If it runs its own "
                    "backward, it must be a sum and say so: return stagelink.BackwardDone(loss) "
                    "with reduction='sum' given to the runner, or BackwardDone(LossSum(sum, "
                    "weight)), after the backward of that sum"
                )

    @contextmanager
    def _explained(self, microbatch: int, tensors: Tensors) -> Iterator[None]:
        """Say of which cut a batch norm complains that was left alone with one item."""
        try:
            yield
        except ValueError as error:
            given = [len(t) for t in tensors.values() if t is not None and t.dim()]
            if _ALONE not in str(error) or 1 not in given:
                raise
            raise UsageError(
                f"{error}: microbatch {microbatch} has one item, since {self.cut_text()}; a batch "
                "norm needs two items in each microbatch: give it larger batches or fewer "
                "microbatches, and leave small last ones out (drop_last)"
            ) from error

    def cut_text(self) -> str:
        """Describe how microbatches come by their items."""
        items, parts = self.session.items, self.session.microbatches
        return f"a batch of {items} is cut into {parts} microbatches"

    def _take(self, microbatch: int) -> Tensors:
        if self._part is not None:
            return self._part(microbatch)
        with self._clock.waiting:
            return {name: self.session.recv(name, microbatch) for name in self._names.receives}

    def module_for(self, microbatch: int) -> Callable[..., Any]:
        """Callable of the microbatch's forward."""
        del microbatch
        return self.station.module

    def items_in(self, microbatch: int, tensors: Tensors) -> tuple[int, int]:
        """Samples in the microbatch, and in the batch that its loss is a share of."""
        del tensors
        of_items = self.session.items or 0
        return items_of(microbatch, of_items, self.session.microbatches), of_items

    def _backward(self, microbatch: int) -> None:
        owing, outputs = self._kept.pop(microbatch)
        gradients = self._take_gradients(microbatch, outputs)
        with self._clock.computing:
            self.run_backward(microbatch, partial(_run_backward, outputs, gradients))
        for name, tensor in owing.items():
            gradient = tensor.grad
            with self._clock.sending:
                # It lives until it is on its way; what is not its own may change before.
                copy = gradient is not None and not _is_own(gradient)
                self.session.send_grad(name, gradient, microbatch, copy=copy)

    def run_backward(self, microbatch: int, run: Callable[[], None]) -> None:
        """Run the backward of a microbatch, the oldest that has had its forward only."""
        is_last = microbatch == self.session.mine[-1]
        with self.station.last_backward() if is_last else nullcontext():
            run()

    def _take_gradients(self, microbatch: int, outputs: Tensors) -> Tensors:
        if self._names.last:
            # The gradient of the loss with respect to itself.
            return {n: None if t is None else torch.ones_like(t) for n, t in outputs.items()}
        with self._clock.waiting:
            return {n: self.session.recv_grad(n, microbatch) for n in self._names.produces}


def _run_forward(
    module: Callable[..., Any],
    names: Names,
    tensors: Tensors,
    scores: Scores | None,
    items: tuple[int, int],
) -> dict[str, torch.Tensor | None]:
    """Run the module on one microbatch, on the last stage with the loss.

    Returns by name what the stage sends; on the last stage the loss alone.
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


def _is_own(gradient: torch.Tensor) -> bool:
    """Whether no other tensor has the memory of a gradient.

    Autograd may give one gradient to several leaves where views come between, and then adds to
    that of a parameter in place, in the next microbatch's backward.
    """
    storage = gradient.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) <= _OWN_USES


def _run_backward(outputs: Tensors, gradients: Tensors) -> None:
    """Add the gradients of one microbatch to the parameters' and the received tensors' ``grad``.

    An output that does not require a gradient needs none.
    """
    pairs = [
        (output, gradient)
        for output, gradient in ((outputs[name], gradients[name]) for name in outputs)
        if output is not None and output.requires_grad and gradient is not None
    ]
    if pairs:
        roots, received = zip(*pairs, strict=True)
        torch.autograd.backward(roots, received)
