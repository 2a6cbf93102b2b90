"""Open-ended inference: batches go in on the first stage, outputs come out on the last."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple, Self

import torch

from stagelink.errors import PeerClosedError
from stagelink.exchange.handler import Handler
from stagelink.exchange.session import Session
from stagelink.runner.batches import Feed
from stagelink.runner.epoch import cut_all, failing
from stagelink.runner.names import TARGET, Names, Tensors
from stagelink.schedule import UNTIL_END

_unfinished: set[Generator[Output, None, None]] = set()
_collecting: set[int] = set()
"""The threads in which the garbage collector is running."""


class Output(NamedTuple):
    """Output of the last stage for one microbatch.

    Attributes:
        microbatch: its number, from 0, over all batches.
        value: what the last stage's module returned.
    """

    microbatch: int
    value: Any


class Outputs(Iterator[Output]):
    """Outputs of one rank, as they are ready. Also a context manager, which closes it.

    Args:
        steps: makes the outputs; when it is closed it has every other rank's stream end.
        soon: calls an action soon, and takes no lock.
    """

    def __init__(
        self, steps: Generator[Output, None, None], soon: Callable[[Callable[[], None]], None]
    ) -> None:
        self._steps = steps
        self._soon = soon
        # Else the garbage collector may close it by itself; see `__del__`.
        _unfinished.add(steps)

    def __next__(self) -> Output:
        """The next output; blocks for it."""
        try:
            return next(self._steps)
        except BaseException:
            _unfinished.discard(self._steps)
            raise

    def close(self) -> None:
        """Stop, and have every other rank's stream end as well; nothing where it has ended.

        What is in flight may be dropped. A ``for`` loop that is left by ``break`` does it where
        nobody else holds the stream.
        """
        _unfinished.discard(self._steps)
        self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._steps not in _unfinished:
            return
        if threading.get_ident() in _collecting:  # in the middle of anything, locks held
            self._soon(self.close)
        else:
            self.close()


def _on_collection(phase: str, info: object) -> None:
    del info
    change = _collecting.add if phase == "start" else _collecting.discard
    change(threading.get_ident())


gc.callbacks.append(_on_collection)


def passing(
    comm: Handler, module: torch.nn.Module, names: Names, batches: Iterable[object]
) -> Generator[Output, None, None]:
    """Carry one session through until the batches end or a rank stops; see the runner's method."""
    with comm.evaluate(UNTIL_END if names.first else None) as session, failing(comm):
        feed = None
        if names.first:
            feed = Feed(cut_all(comm, names, batches, scored=False), session.mine)
        try:
            yield from _pass_on(session, module, names, feed)
        except PeerClosedError:
            if not session.stopped:
                raise
        if session.stopped:
            session.stop()  # there is no count that all would come to
        elif feed is not None:
            session.end(feed.microbatches)


def _pass_on(
    session: Session, module: torch.nn.Module, names: Names, feed: Feed | None
) -> Iterator[Output]:
    for number in _numbers(session, feed):
        if feed is not None:
            tensors: Tensors = feed.take(number)
        else:
            tensors = {n: session.recv(n, number, deadline_s=math.inf) for n in names.receives}
        # Not around the yield: it would be in force for the caller that iterates.
        args, kwargs = names.arguments(tensors)
        with torch.no_grad():
            result = module(*args, **kwargs)
        if names.last:
            yield Output(number, result)
            continue
        # A plan for training may send a target, which here nobody needs to have.
        outputs = names.outputs(result, {TARGET: None, **tensors})
        for name in names.produces:
            session.send(name, outputs[name], number, deadline_s=math.inf)


def _numbers(session: Session, feed: Feed | None) -> Iterator[int]:
    """This rank's microbatches, until there are no more or a peer stops."""
    if feed is None:
        yield from (action.microbatch for action in session.actions)
        return
    for number in session.mine:
        if session.stopped or not feed.reaches(number):
            return
        yield number
