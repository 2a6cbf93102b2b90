"""Inference without an end: batches go in on the first stage, outputs come out on the last."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stagelink.errors import PeerClosedError
from stagelink.runner.epoch import cut_all, failing
from stagelink.runner.feed import Feed
from stagelink.runner.names import TARGET
from stagelink.schedule import UNTIL_END

if TYPE_CHECKING:
    from stagelink.exchange.handler import Handler
    from stagelink.exchange.session import Session
    from stagelink.runner.names import Names, Tensors

__all__ = ["Output", "stream"]


class Output(NamedTuple):
    """What came out for one microbatch.

    Attributes:
        microbatch: its number, from 0, over all batches.
        value: what the last stage's module returned.
    """

    microbatch: int
    value: Any


def stream(
    comm: Handler, module: torch.nn.Module, names: Names, batches: Iterable[object] | None
) -> Iterator[Output]:
    """Carry one session through until the batches end or a rank stops; see the runner's method."""
    with comm.evaluate(UNTIL_END if names.first else None) as session, failing(comm):
        feed = None
        if names.first:
            feed = Feed(cut_all(comm, names, batches, scored=False), session.mine)
        try:
            yield from _pass_on(session, module, names, feed)
        except PeerClosedError:
            if not session.left_by_choice:
                raise
            return  # somebody has stopped; there is no count that all would come to
        if feed is not None:
            session.end(feed.microbatches)


def _pass_on(
    session: Session, module: torch.nn.Module, names: Names, feed: Feed | None
) -> Iterator[Output]:
    for number in _numbers(session, feed):
        if feed is not None:
            tensors: Tensors = feed.take(number)
        else:
            tensors = {name: session.recv(name, number) for name in names.receives}
        # Not around the yield: it would be in force for whoever iterates.
        with torch.no_grad():
            result = module(**names.arguments(tensors))
        if names.last:
            yield Output(number, result)
            continue
        # A plan for training may send a target, which here nobody needs to have.
        outputs = names.outputs(result, {TARGET: None, **tensors})
        for name in names.produces:
            session.send(name, outputs[name], number, deadline_s=math.inf)


def _numbers(session: Session, feed: Feed | None) -> Iterator[int]:
    """This rank's microbatches, until there are no more."""
    if feed is None:
        yield from (action.microbatch for action in session.actions)
        return
    for number in session.mine:
        if not feed.reaches(number):
            return
        yield number
