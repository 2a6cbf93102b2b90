"""The sessions of an epoch, synchronous and asynchronous.

A synchronous one has a session for each batch, and one without microbatches that ends it. An
asynchronous one is one session, in which weights change all the while and nothing is drained
between batches. Each backward is followed by its round's update, or by one of a whole batch with
two versions; which weights a microbatch meets is said in `stagelink.schedule.versions`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, repeat
from operator import length_hint
from typing import Any, NamedTuple

from tqdm import tqdm

from stagelink.errors import UsageError
from stagelink.exchange.handler import Handler
from stagelink.exchange.session import Session
from stagelink.runner.batches import END, Batch, Feed, check_mapping, cut
from stagelink.runner.executor import Executor, Station
from stagelink.runner.names import TARGET, Names, Tensors
from stagelink.runner.step import OptimizerStep
from stagelink.runner.summary import Clock
from stagelink.runner.sync import ReplicaSync
from stagelink.runner.versions import Versions
from stagelink.schedule import UNTIL_END, Action, Kind, most_of_one, rounds_per_update, version_for


class Bar(tqdm):  # type: ignore[type-arg]  # generic in its stubs only
    """A progress bar."""

    # Nothing that outlives it: by default a thread looks after bars, and a lock that processes
    # share guards their output.
    monitor_interval = 0
    _lock = threading.RLock()


class Counts(NamedTuple):
    """Numbers of one pass over batches, the same on every rank."""

    batches: int  # how many
    items: int  # their samples
    microbatches: int  # of the last session


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over batches, which only the first stage sees; the clock hears of its waits."""

    comm: Handler
    names: Names
    clock: Clock

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
        """
        feed: Iterable[Batch | None] = repeat(None)
        if self.names.first:
            feed = chain(cut_all(self.comm, self.names, batches), [END])
        total = length_hint(batches) or None
        counts = Counts(0, 0, 0)
        with Bar(desc=title, total=total, unit="batch", disable=title is None) as bar:
            for batch in feed:
                with self._open(open_session, batch) as session, failing(self.comm):
                    if session.microbatches == 0:
                        break
                    items = counts.items + self._items(session)
                    counts = Counts(counts.batches + 1, items, session.microbatches)
                    work(session, batch)
                bar.update()
        return counts

    def _open(self, open_session: Callable[..., Session], batch: Batch | None) -> Session:
        with self.clock.waiting:
            if batch is None:
                return open_session()
            return open_session(batch.microbatches, items=batch.items)

    def _items(self, session: Session) -> int:
        if session.items is None:
            raise UsageError(
                f"rank {self.comm.rank}: nobody said how many items session {session.number} "
                "has; where the first stage is driven by hand, open sessions with items=…"
            )
        return session.items


def cut_all(
    comm: Handler, names: Names, batches: Iterable[object], *, scored: bool = True
) -> Iterator[Batch]:
    """The batches of a first stage, each cut into the plan's number of microbatches.

    Where it is ``scored`` each has a target.
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


@dataclass(frozen=True, slots=True)
class AsyncEpoch:
    """One epoch on this rank.

    With ``mean`` a round's gradient is the mean over the replicas, whose gradients ``sync`` makes
    one, else their sum.
    """

    comm: Handler
    station: Station
    update: OptimizerStep
    sync: ReplicaSync | None
    mean: bool

    def run(self, batches: Iterable[object], title: str | None) -> Counts:
        """Open the session and carry it out to the end of the batches; as `Epoch.run`."""
        first = self.station.names.first
        with self.station.clock.waiting:
            session = self.comm.train(UNTIL_END if first else None)
        with (
            Bar(desc=title, unit="microbatch", disable=title is None) as bar,
            session,
            failing(self.comm),
        ):
            cut = map(self._whole, cut_all(self.comm, self.station.names, batches))
            feed = Feed(cut, session.mine) if first else None
            all_ = length_hint(batches) * self.comm.plan.microbatches
            bar.total = all_ // self.comm.stage.replicas or None
            executor = _AsyncExecutor(self.comm, session, self.station, feed)
            self._carry_out(session, executor, bar)
        # Only the first stage has seen batches.
        seen = [0, 0] if feed is None else [feed.batches, feed.items]
        count, items = map(int, self.comm.reduce(seen, "max"))
        return Counts(count, items, session.microbatches)

    def _whole(self, batch: Any) -> Any:
        wanted = self.comm.plan.microbatches
        if self.comm.plan.two_versions and batch.microbatches != wanted:
            raise UsageError(
                f"a batch of {batch.items} items: pipedream_2bw cuts every batch into "
                f"{wanted} microbatches; leave smaller ones out (drop_last)"
            )
        return batch

    def _carry_out(self, session: Session, executor: _AsyncExecutor, bar: Bar) -> None:
        per_update = rounds_per_update(self.comm.plan, self.comm.stage)
        rounds = 0
        self.update.clear()
        executor.look_ahead()
        actions = iter(session.actions)
        while (action := self._next(actions)) is not None:
            executor.do(action)
            if action.kind is Kind.BACKWARD:
                rounds += 1
                bar.update()
                if rounds % per_update == 0:
                    self._next_version(executor.versions, takes_part=True)
        for _ in range(rounds, most_of_one(self.comm.stage, session.microbatches)):
            self._next_version(executor.versions, takes_part=False)  # the others have more

    def _next(self, actions: Iterator[Action]) -> Action | None:
        with self.station.clock.waiting:  # for the announcement of a microbatch, or of the end
            return next(actions, None)

    def _next_version(self, versions: Versions, *, takes_part: bool) -> None:
        versions.about_to_update()
        if self.sync is not None:
            with self.station.clock.waiting:
                if self.mean and not self.comm.plan.two_versions:
                    self.sync.average_gradients(takes_part=takes_part)
                else:
                    self.sync.add_gradients()
        self.update.take(self.station.clock)
        self.update.clear()


class _AsyncExecutor(Executor):
    """Carries actions out with the weights that each microbatch meets."""

    def __init__(
        self, comm: Handler, session: Session, station: Station, feed: Feed | None
    ) -> None:
        super().__init__(session, station, None if feed is None else feed.take)
        self._plan = comm.plan
        self._stage = comm.stage
        self._feed = feed
        self._rounds = 0
        self._warm_up = session.warm_up
        two = comm.plan.two_versions
        self._direct = self._warm_up == 0 and not two
        self.versions = Versions(station.module, direct=self._direct, two=two)

    def look_ahead(self) -> None:
        """On a first stage, see whether there is a next microbatch before the schedule asks."""
        if self._feed is None or self.session.microbatches != UNTIL_END:
            return
        if not self._feed.reaches(self.session.mine[self._rounds]):
            self.session.end(self._feed.microbatches)

    def forward(self, microbatch: int) -> None:
        super().forward(microbatch)
        self._rounds += 1
        self.look_ahead()

    def run_backward(self, microbatch: int, run: Callable[[], None]) -> None:
        del microbatch
        # On copies the parameters' own gradients come when it has ended.
        with self.station.last_backward() if self._direct else nullcontext():
            self.versions.backward(run)

    def module_for(self, microbatch: int) -> Callable[..., Any]:
        del microbatch
        return self.versions.forward_on(
            version_for(self._plan, self._stage, self._rounds, self._warm_up)
        )

    def cut_text(self) -> str:
        return f"batches are cut into {self._plan.microbatches} microbatches"

    def items_in(self, microbatch: int, tensors: Tensors) -> tuple[int, int]:
        if self.station.scores is None:
            return 0, 1
        target = tensors[TARGET]
        if target is None or target.dim() == 0 or not len(target):
            raise UsageError(
                f"the target of microbatch {microbatch} has no items along a first dimension"
            )
        parts = self._plan.microbatches if self._plan.two_versions else 1
        return len(target), len(target) * parts
