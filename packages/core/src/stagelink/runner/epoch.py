"""The sessions of an epoch: one for each batch, and one without microbatches that ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from operator import length_hint
from typing import TYPE_CHECKING, NamedTuple

from tqdm import tqdm

from stagelink.errors import UsageError
from stagelink.runner.batches import END, Batch, check_mapping, cut

if TYPE_CHECKING:
    from stagelink.exchange.handler import Handler
    from stagelink.exchange.session import Session
    from stagelink.runner.names import Names
    from stagelink.runner.summary import Clock

__all__ = ["Bar", "Counts", "Epoch", "cut_all", "failing"]


class Bar(tqdm):  # type: ignore[type-arg]  # generic in its stubs only
    """A progress bar."""

    # Nothing that outlives it: by default a thread looks after bars, and a lock that processes
    # share guards their output.
    monitor_interval = 0
    _lock = threading.RLock()


class Counts(NamedTuple):
    """Numbers of one pass over batches, the same on every rank.

    Attributes:
        batches: how many.
        items: their samples.
        microbatches: of the last session.
    """

    batches: int
    items: int
    microbatches: int


class Epoch:
    """One pass over batches, which only the first stage sees.

    Args:
        comm: the handler.
        names: what this rank's stage takes and gives.
        clock: is told how long sessions are waited for.
    """

    def __init__(self, comm: Handler, names: Names, clock: Clock) -> None:
        self._comm = comm
        self._names = names
        self._clock = clock

    def run(
        self,
        open_session: Callable[..., Session],
        batches: Iterable[object],
        work: Callable[[Session, Batch | None], None],
        title: str | None,
    ) -> Counts:
        """Open the sessions one after another; an error in one of them fails every rank.

        Args:
            open_session: ``train`` or ``evaluate`` of the handler.
            batches: on a first stage.
            work: is called with each session, and its batch on a first stage.
            title: of a progress bar on stderr; None: without one.

        Raises:
            UsageError: a batch is not what it should be.
        """
        feed: Iterable[Batch | None] = repeat(None)
        if self._names.first:
            feed = chain(cut_all(self._comm, self._names, batches), [END])
        total = length_hint(batches) or None
        counts = Counts(0, 0, 0)
        with Bar(desc=title, total=total, unit="batch", disable=title is None) as bar:
            for batch in feed:
                with self._open(open_session, batch) as session, failing(self._comm):
                    if session.microbatches == 0:
                        break
                    items = counts.items + self._items(session)
                    counts = Counts(counts.batches + 1, items, session.microbatches)
                    work(session, batch)
                bar.update()
        return counts

    def _open(self, open_session: Callable[..., Session], batch: Batch | None) -> Session:
        with self._clock.waiting:
            if batch is None:
                return open_session()
            return open_session(batch.microbatches, items=batch.items)

    def _items(self, session: Session) -> int:
        if session.items is None:
            raise UsageError(
                f"rank {self._comm.rank}: nobody said how many items session {session.number} "
                "has; where the first stage is driven by hand, open sessions with items=…"
            )
        return session.items


def cut_all(
    comm: Handler, names: Names, batches: Iterable[object], *, scored: bool = True
) -> Iterator[Batch]:
    """The batches of a first stage, each cut into the plan's number of microbatches.

    Args:
        comm: the handler.
        names: what the stage takes and gives.
        batches: from names to tensors.
        scored: whether there is a loss, which needs its target.

    Raises:
        UsageError: one is not what it should be.
    """
    for batch in batches:
        yield cut(names.of_batch(check_mapping(batch), scored=scored), comm.plan.microbatches)


@contextmanager
def failing(comm: Handler) -> Iterator[None]:
    """Fail every rank with an error that leaves the block.

    Inside the session: after it is left, the others would hear of that and not of the cause.
    """
    try:
        yield
    except GeneratorExit:  # the caller has stopped iterating, which is no failure
        raise
    except BaseException as error:
        comm.abort(error)
        raise
