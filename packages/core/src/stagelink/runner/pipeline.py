"""The runner: epochs of training and evaluation of one stage's module by the plan's schedule."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from stagelink.exchange.handler import Handler
from stagelink.exchange.session import Session
from stagelink.runner.arguments import (
    agree,
    check_batches,
    check_parts,
    check_scored,
    check_scores,
    check_trainable,
    check_trains,
    steppers_of,
)
from stagelink.runner.batches import Batch
from stagelink.runner.epoch import AsyncEpoch, Counts, Epoch
from stagelink.runner.executor import Executor, Station
from stagelink.runner.losses import Loss, Metric, Reduction, module_of
from stagelink.runner.names import Names
from stagelink.runner.scores import Counted, Scores, means
from stagelink.runner.state import State
from stagelink.runner.step import OptimizerStep, Trained
from stagelink.runner.stream import Output, Outputs, passing
from stagelink.runner.summary import Clock, Summary, shares_of_all
from stagelink.runner.sync import ReplicaSync
from stagelink.schedule import replica_for


class PipelineRunner:
    """Trains and evaluates a stage's module together with the other ranks' runners.

    Every rank makes one, with the same ``reduction``, names of ``metrics``, ``progress`` and
    ``clip_norm``, and makes the same calls in the same order.

    A batch is a mapping from names to tensors with the items along their first dimension. It is
    given to every replica of a first stage (one that receives nothing), is cut into the plan's
    number of microbatches (fewer if it has fewer items), and each replica takes its own.

    The module is called with the tensors that its stage receives, or its part of the batch, by
    the names of its ``forward``'s parameters or those that the stage's ``arguments`` in the plan
    say; where there is one tensor and one required parameter, whatever they are called. It may
    change them in place: they are its own, but for parts of the caller's batches.
    It returns the tensors that the stage produces: one as it is, several as a mapping. One
    that it does not return is taken from the batch, as the target usually is. On the last stage
    ``loss(output, target)`` gets whatever the module returned, and the tensor named ``"target"``,
    which the module does not get.

    The weights after each step are those of one process with the whole batch: the gradients of the
    microbatches are added in ascending order on each replica, and then in the replicas' order.
    A mean is over what the loss counts, and that is known of torch's cross entropies alone
    (`torch.nn.CrossEntropyLoss`, `NLLLoss`, `LinearCrossEntropyLoss`, `cross_entropy`, `nll_loss`,
    also by `functools.partial` or compiled): targets that are ignored and class weights come out
    as in one process. Of any other function it cannot be known: what it returns is taken as a mean
    over items, however it was made. One that calls a cross entropy with an ``ignore_index``, or
    that leaves out padding, returns a `LossSum` of what it counted. Then, and with torch's cross
    entropies, ranks exchange one number per batch.

    With an asynchronous schedule they are those of the delayed-gradient rule, see
    `stagelink.schedule.versions`; an epoch is then one session, and a scheduler is stepped after
    every update of the stage. Every microbatch counts alike there, however many items it has, and
    its mean is over what was counted in it: one that counts nothing has no gradient. The replicas'
    gradients of a round make their mean, or with ``reduction="sum"`` their sum.

    Args:
        comm: the handler.
        module: this stage's part of the model, on the stage's device; alike on all its replicas.
        loss: needed on the last stage, but for `stream`. Gives one number with a graph, or a
            `LossSum`, or `BackwardDone` where it runs its own backward. Its parameters, if it has
            any, are trained by an optimizer of the last stage.
        optimizer: of this stage's parameters; several in a list, stepped in its order; None where
            nothing is to be trained. Their ``step`` is called without a closure.
        reduction: how the loss makes one number of many items: ``"mean"`` or ``"sum"``.
        metrics: further results of `evaluate` by name: functions like the loss, each the mean over
            the items that it is given, or a `LossSum`.
        progress: whether rank 0 shows a bar on stderr.
        clip_norm: before each step gradients are scaled down so that the norm of all stages'
            gradients together, as one process would have it, is at most this: of what optimizers
            hold, and of parameters of module and loss that get gradients beside. A norm that is
            not finite is not raised: it makes the gradients nan or 0, as in torch.
        scheduler: a learning-rate scheduler of an optimizer, or several in a list, stepped after
            every optimizer step; `ReduceLROnPlateau` after every epoch, with its loss.

    Raises:
        UsageError: module, loss, optimizer and plan do not fit each other, or one is nothing that
            a runner can use.
    """

    def __init__(  # noqa: PLR0913 - what makes up a training; only the first two are always needed
        self,
        comm: Handler,
        module: torch.nn.Module,
        *,
        loss: Loss | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        reduction: Reduction = "mean",
        metrics: Mapping[str, Metric] | None = None,
        progress: bool = False,
        clip_norm: float | None = None,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    ) -> None:
        check_parts(comm, module, progress)
        self._comm = comm
        self._module = module
        self._names = Names(module, comm.plan, comm.stage, scored=loss is not None)
        self._metrics = check_scores(loss, reduction, metrics, last=self._names.last)
        self._loss = loss
        self._reduction: Reduction = reduction
        self._progress = progress
        steppers = steppers_of(optimizer, scheduler, clip_norm)
        scoring = module_of(loss) if self._names.last else None
        self._trained = Trained(module, scoring, steppers.optimizers)
        check_trainable(comm, self._trained, loss, steppers)
        self._trains = bool(steppers.optimizers)
        self._common: dict[str, object] | None = {
            "clip_norm": steppers.clip_norm,
            "reduction": reduction,
            "metrics": list(self._metrics),
        }
        self._update = OptimizerStep(comm, self._trained, steppers)
        self._state = State(comm, module, scoring, self._trained, steppers)
        self._sync: ReplicaSync | None = None
        if comm.stage.replicas > 1:
            clips = steppers.clip_norm is not None
            self._sync = ReplicaSync(comm, self._trained, all_gradients=clips)

    # -- training

    def train(self, batches: Iterable[Mapping[str, torch.Tensor]] | None = None) -> Summary:
        """Train one epoch: an optimizer step for each batch, or as an asynchronous schedule says.

        The modules' train or eval mode is left as it is. Buffers (running statistics) are those of
        the replica that had the last microbatch, so with replicas they differ from one process's.

        Args:
            batches: on every replica of a first stage, the same ones; on other ranks it may be
                left out, and is not touched.

        Returns:
            What came of it, the same on every rank.

        Raises:
            UsageError: a batch, the module's result or the loss is not as it should be.
            DisagreementError: replicas of the stage differ in their parameters.
            StagelinkError: a rank failed; every rank gets its text.
        """
        check_scored(self._comm, self._loss)
        check_trains(self._comm, self._trained, has_optimizer=self._trains)
        given = check_batches(self._comm, batches, first=self._names.first)
        clock = Clock(self._comm)
        if self._sync is not None:
            with clock.waiting:
                self._sync.begin()
        station = self._station(None, clock)
        if self._comm.plan.asynchronous:
            mean = self._reduction == "mean"
            epoch = AsyncEpoch(self._comm, station, self._update, self._sync, mean=mean)
            counts = epoch.run(given, self._title("train"))
        else:
            work = partial(self._step, station)
            synchronous = Epoch(self._comm, self._names, clock)
            counts = synchronous.run(self._comm.train, given, work, self._title("train"))
        if self._sync is not None and counts.microbatches:
            with clock.waiting:
                self._sync.copy_buffers(replica_for(self._comm.stage, counts.microbatches - 1))
        summary = self._summary(counts, station)
        if summary.batches:
            self._update.end_epoch(summary.loss)
        return summary

    def _step(self, station: Station, session: Session, batch: Batch | None) -> None:
        self._update.begin_batch()
        _pass(station, session, batch)
        if self._sync is not None and self._trains:
            with station.clock.waiting:
                self._sync.add_gradients()
        scores = station.scores
        counted = Counted() if scores is None else scores.finish_batch()
        self._agree(station.clock)
        self._update.end_batch(station.clock, counted)
        self._update.take(station.clock)

    def _agree(self, clock: Clock) -> None:
        """Compare what all ranks must give alike: once, where all come by for the first time."""
        if self._common is not None:
            with clock.waiting:
                agree(self._comm, self._common)
            self._common = None

    def _summary(self, counts: Counts, station: Station) -> Summary:
        self._agree(station.clock)
        shares = shares_of_all(self._comm, station.clock.fractions())
        (seconds,) = self._comm.reduce([station.clock.seconds], "max")
        (loss,) = self._results(station.scores, 1)
        return Summary(loss, counts.items, counts.batches, seconds, shares)

    # -- evaluation

    def evaluate(
        self, batches: Iterable[Mapping[str, torch.Tensor]] | None = None
    ) -> dict[str, float]:
        """Go over batches once, forward only, in eval mode and without gradients.

        Args:
            batches: as for `train`.

        Returns:
            ``"loss"`` and each metric, over all items, or over what it counted; the same on every
            rank. Nan where nothing was counted.

        Raises:
            UsageError: a batch, the module's result, the loss or a metric is not as it should be.
            StagelinkError: a rank failed; every rank gets its text.
        """
        check_scored(self._comm, self._loss)
        given = check_batches(self._comm, batches, first=self._names.first)
        clock = Clock(self._comm)
        station = self._station(self._metrics, clock)
        epoch = Epoch(self._comm, self._names, clock)
        with torch.no_grad(), _eval_mode(self._module):
            epoch.run(self._comm.evaluate, given, partial(_pass, station), self._title("evaluate"))
        self._agree(clock)
        names = ["loss", *self._metrics]
        results = self._results(station.scores, len(names))
        return dict(zip(names, results, strict=True))

    # -- inference

    def stream(self, batches: Iterable[Mapping[str, torch.Tensor]] | None = None) -> Outputs:
        """Run batches through, forward only, in eval mode and without gradients, without an end.

        An iterator, which every rank goes through: on the last stage it gives outputs as they are
        ready, elsewhere nothing. Each replica of the last stage gives those of its own
        microbatches, in their order. How many microbatches are between the stages is bounded by
        the windows: when nobody takes outputs, the first stage soon takes no more batches.

        It ends when the batches do, on all replicas of the first stage after the same ones, and
        all that went in has come out. A rank that stops before ends it for all, and what is in
        flight may be dropped: by ``break`` out of ``for output in runner.stream(…)``; where a name
        holds the stream by its ``close()``, which the end of a ``with`` block calls. An error in
        the loop's body stops it likewise, and then reaches the ranks that have not closed. A first
        stage that waits in its own ``batches`` hears of it when it gets the next one. No loss is
        needed, nor a target in the batches.

        Args:
            batches: on a first stage; taken one at a time, when there is room.

        Raises:
            UsageError: a batch or the module's result is not as it should be.
            StagelinkError: a rank failed; every rank gets its text.
        """
        given = check_batches(self._comm, batches, first=self._names.first)
        return Outputs(self._stream(given), self._comm.soon)

    def _stream(self, batches: Iterable[object]) -> Generator[Output, None, None]:
        with _eval_mode(self._module):
            yield from passing(self._comm, self._module, self._names, batches)

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """The state of this stage: module, loss, optimizers, schedulers; alike on its replicas.

        Of the loss where it is a module, on the last stage; and of tensors that an optimizer
        holds though they are in neither. Where the runner has several optimizers or schedulers,
        theirs are lists.
        """
        return self._state.get()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that `state_dict` gave; every replica of the stage loads the same.

        Raises:
            UsageError: it is another stage's, or does not fit what the runner has.
        """
        self._state.put(state)

    # -- inside

    def _station(self, metrics: Mapping[str, Metric] | None, clock: Clock) -> Station:
        """What a pass needs; for training without metrics."""
        scores = None
        if self._loss is not None and self._names.last:
            apart = self._comm.plan.asynchronous
            trains, found = metrics is None, metrics or {}
            scores = Scores(self._loss, self._reduction, found, trains=trains, apart=apart)
        station = Station(self._module, self._names, scores, clock, trains=self._trained.any())
        if self._sync is None or not self._trains:
            return station
        return station._replace(last_backward=self._sync.last_backward)

    def _results(self, scores: Scores | None, count: int) -> list[float]:
        own = [0.0] * (2 * count) if scores is None else scores.totals()
        return means(self._comm.reduce(own), self._reduction)

    def _title(self, doing: str) -> str | None:
        return doing if self._progress and self._comm.rank == 0 else None


def _pass(station: Station, session: Session, batch: Batch | None) -> None:
    Executor(session, station, None if batch is None else batch.part).run()


@contextmanager
def _eval_mode(module: torch.nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
