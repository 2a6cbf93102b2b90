"""Asynchronous schedules: weights are those of the delayed-gradient rule, whatever the timing."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import stagelink
from stagelink import PipelineRunner
from stagelink.runner.versions import Versions
from stagelink.schedule import replica_for, safe_warm_up
from tests.runner.models import (
    SKIP,
    Shape,
    Toy,
    build,
    largest_difference,
    line,
    make_batches,
    quick_sgd,
    run_stages,
    sgd,
    tensors_of,
    weights,
)
from tests.support.pipedream import SHAPES
from tests.support.pipelines import GLOO, LOOPBACK, Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from stagelink import Handler
    from stagelink.plan import Stage
    from stagelink.runner import Summary
    from stagelink.testing import RankPool

LINES = [(1, 1), (1, 1, 1), (2, 1), (3, 2), (4, 3, 1)]

Trained = tuple[int, "Summary", dict[str, torch.Tensor], int]
Batches = list[dict[str, torch.Tensor]]


def adam(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.02)


# -- a plain reference ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """Of a stage: which microbatches make an update, and how many updates each comes late.

    Attributes:
        group: the number of the update that takes a microbatch's gradient.
        delay: a microbatch of group ``k`` meets what ``max(0, k - delay)`` updates have made.
    """

    group: Callable[[int], int]
    delay: int


class Delayed:
    """All stages in one process; each microbatch waits for the versions that it is to meet.

    An update takes the sum of its gradients, each of a loss that counts ``weight``; or their mean.
    """

    def __init__(
        self,
        modules: list[Toy],
        make_optimizer: Any,
        rules: Sequence[Rule],
        pieces: Batches,
        weight: float | None,
    ) -> None:
        self.modules = modules
        self.losses: dict[int, float] = {}
        self._optimizers = [make_optimizer(module) for module in modules]
        self._versions = [[copy.deepcopy(module)] for module in modules]
        self._rules = rules
        self._pieces = pieces
        self._weight = weight
        self._used: dict[int, list[Toy]] = {}

    def finish(self) -> None:
        for stage, rule in enumerate(self._rules):
            groups = {rule.group(number) for number in range(len(self._pieces))}
            self._version(stage, len(groups))

    def _version(self, stage: int, wanted: int) -> Toy:
        versions = self._versions[stage]
        while len(versions) <= wanted:
            self._update(stage, len(versions) - 1)
        return versions[wanted]

    def _update(self, stage: int, group: int) -> None:
        numbers = [n for n in range(len(self._pieces)) if self._rules[stage].group(n) == group]
        used = [self._run(number)[stage] for number in numbers]
        master = self.modules[stage]
        for parameter, *others in zip(
            master.parameters(), *(module.parameters() for module in used), strict=True
        ):
            gradients = [other.grad for other in others if other.grad is not None]
            total = torch.stack(gradients).sum(0)
            parameter.grad = total / len(numbers) if self._weight is None else total
        self._optimizers[stage].step()
        self._versions[stage].append(copy.deepcopy(master))

    def _run(self, number: int) -> list[Toy]:
        if number not in self._used:
            used = [
                copy.deepcopy(self._version(stage, max(0, rule.group(number) - rule.delay)))
                for stage, rule in enumerate(self._rules)
            ]
            for module in used:
                module.zero_grad(set_to_none=True)
            piece = self._pieces[number]
            loss = torch.nn.functional.cross_entropy(run_stages(used, piece), piece["target"])
            (loss if self._weight is None else loss * self._weight).backward()
            self.losses[number] = loss.item()
            self._used[number] = used
        return self._used[number]


def microbatches_of(batches: Batches, parts: int) -> Batches:
    found = []
    for batch in batches:
        count = min(parts, len(batch["x"]))
        for part in range(count):
            found.append({name: value.tensor_split(count)[part] for name, value in batch.items()})
    return found


def train_delayed(
    shapes: Sequence[Shape],
    make_optimizer: Callable[[torch.nn.Module], Any],
    pieces: Batches,
    rules: Sequence[Rule],
    *,
    weight: float | None = None,
) -> tuple[list[Toy], float]:
    """The modules after all microbatches, and the mean loss of an item."""
    modules = [build(shapes, stage) for stage in range(len(shapes))]
    delayed = Delayed(modules, make_optimizer, rules, pieces, weight)
    delayed.finish()
    items = [len(piece["x"]) for piece in pieces]
    total = sum(delayed.losses[number] * count for number, count in enumerate(items))
    return modules, total / sum(items)


def train_pipedream(
    shapes: Sequence[Shape],
    make_optimizer: Callable[[torch.nn.Module], Any],
    batches: Batches,
    parts: int,
    replicas: Sequence[int],
) -> tuple[list[Toy], float]:
    """A round is a microbatch on each replica; an update per round, the warm-up's rounds late."""
    rules = [
        Rule(lambda number, count=count: number // count, warm_up)  # type: ignore[misc]
        for count, warm_up in zip(replicas, safe_warm_up(replicas), strict=True)
    ]
    return train_delayed(shapes, make_optimizer, microbatches_of(batches, parts), rules)


# -- the pipeline --------------------------------------------------------------------------------


def train(
    comm: Handler, shapes: Sequence[Shape], sizes: Sequence[int], make_optimizer: Any
) -> Trained:
    return train_module(comm, build(shapes, comm.stage.index), sizes, make_optimizer)


def train_module(
    comm: Handler, module: torch.nn.Module, sizes: Sequence[int], make_optimizer: Any
) -> Trained:
    runner = PipelineRunner(
        comm,
        module,
        loss=torch.nn.functional.cross_entropy,
        optimizer=make_optimizer(module),
    )
    batches = iter(make_batches(sizes)) if comm.stage.index == 0 else None
    summary = runner.train(batches)
    return comm.stage.index, summary, weights(module), comm.rank


def check(ranks: list[Trained], alone: list[Toy], loss: float) -> None:
    for stage, summary, found, _ in ranks:
        assert largest_difference(found, weights(alone[stage])) <= 1e-12
        assert summary.loss == pytest.approx(loss, rel=1e-9)
    assert [rank[1] for rank in ranks] == [ranks[0][1]] * len(ranks)


@pytest.mark.parametrize("make_optimizer", [sgd, adam])
@pytest.mark.parametrize("replicas", LINES, ids=str)
def test_pipedream(replicas: tuple[int, ...], make_optimizer: Any, rank_pool: RankPool) -> None:
    """Batches of one to four microbatches; 17 in all, which nothing divides."""
    shapes, sizes = line(len(replicas)), [9, 8, 3, 7, 2, 1]
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan(replicas, tensors_of(shapes), schedule="pipedream", microbatches=4)
    alone, loss = train_pipedream(shapes, make_optimizer, make_batches(sizes), 4, replicas)
    trained = ranks.run(plan, train, shapes, sizes, make_optimizer)
    check(trained, alone, loss)
    assert (trained[0][1].batches, trained[0][1].items) == (len(sizes), sum(sizes))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 11])
def test_any_number_of_microbatches(count: int, rank_pool: RankPool) -> None:
    shapes, replicas = line(3), (2, 3, 1)
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan(replicas, tensors_of(shapes), schedule="pipedream", microbatches=1)
    if not count:
        trained = ranks.run(plan, train, shapes, [], sgd)
        assert all(summary.items == 0 for _, summary, _, _ in trained)
        return
    alone, loss = train_pipedream(shapes, sgd, make_batches([3] * count), 1, replicas)
    check(ranks.run(plan, train, shapes, [3] * count, sgd), alone, loss)


def test_a_tensor_that_passes_a_stage(rank_pool: RankPool) -> None:
    ranks, replicas = Ranks(LOOPBACK, rank_pool), (2, 1, 1)
    plan = ranks.plan(replicas, tensors_of(SKIP), schedule="pipedream", microbatches=2)
    sizes = [4] * 6
    alone, loss = train_pipedream(SKIP, sgd, make_batches(sizes), 2, replicas)
    check(ranks.run(plan, train, SKIP, sizes, sgd), alone, loss)


def test_processes(rank_pool: RankPool) -> None:
    shapes, replicas, sizes = line(3), (2, 1, 1), [6, 6, 5, 6]
    ranks = Ranks(GLOO, rank_pool)
    plan = ranks.plan(replicas, tensors_of(shapes), schedule="pipedream", microbatches=3)
    alone, loss = train_pipedream(shapes, quick_sgd, make_batches(sizes), 3, replicas)
    check(ranks.run(plan, train, shapes, sizes, quick_sgd), alone, loss)


@pytest.mark.parametrize("replicas", LINES, ids=str)
@pytest.mark.parametrize("make_optimizer", [sgd, adam])
def test_two_versions(replicas: tuple[int, ...], make_optimizer: Any, rank_pool: RankPool) -> None:
    shapes, sizes, parts = line(len(replicas)), [13, 12, 12, 17, 12], 12
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan(replicas, tensors_of(shapes), schedule="pipedream_2bw", microbatches=parts)
    alone, loss = train_delayed(
        shapes,
        make_optimizer,
        microbatches_of(make_batches(sizes), parts),
        [Rule(lambda number: number // parts, 1)] * len(replicas),
        weight=1 / parts,
    )
    check(ranks.run(plan, train, shapes, sizes, make_optimizer), alone, loss)


def test_two_versions_need_enough_microbatches() -> None:
    plan = stagelink.Plan.from_dict(
        Ranks(LOOPBACK, None).plan((2, 1, 1), [], schedule="pipedream_2bw", microbatches=3)  # type: ignore[arg-type]
        | {"tensors": tensors_of(line(3))}
    )
    problem = stagelink.verify(plan).problem
    assert problem == (
        "stage 's0': microbatches = 3 will not do for pipedream_2bw; it takes a multiple of the "
        "stage's 2 replicas, and at least 2 for its warm-up of 1"
    )


def _small_batch(comm: Handler) -> None:
    with pytest.raises(stagelink.StagelinkError) as caught:
        train(comm, line(2), [4, 3], sgd)
    text = "a batch of 3 items: pipedream_2bw cuts every batch into 4 microbatches"
    assert text in str(caught.value)


def test_two_versions_refuse_a_small_batch(rank_pool: RankPool) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((1, 1), tensors_of(line(2)), schedule="pipedream_2bw", microbatches=4)
    ranks.run_to_ends(plan, _small_batch)


class Checkpointed(Toy):
    """Runs its forward again in the backward."""

    def forward(self, **tensors: torch.Tensor) -> Any:
        forward = super().forward
        return checkpoint(lambda: forward(**tensors), use_reentrant=False)


def _checkpointed(comm: Handler, sizes: Sequence[int]) -> Trained:
    stage = comm.stage.index
    return train_module(comm, Checkpointed(line(2)[stage], stage, torch.float64), sizes, sgd)


def test_what_runs_again_meets_the_same_weights(rank_pool: RankPool) -> None:
    shapes, sizes = line(2), [4] * 7
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((2, 1), tensors_of(shapes), schedule="pipedream", microbatches=2)
    alone, loss = train_pipedream(shapes, sgd, make_batches(sizes), 2, (2, 1))
    check(ranks.run(plan, _checkpointed, sizes), alone, loss)


class Counting(Toy):
    """Keeps in a buffer what it saw last."""

    def __init__(self, stage: int) -> None:
        super().__init__(line(2)[stage], stage, torch.float64)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, **tensors: torch.Tensor) -> Any:
        self.seen.copy_(next(iter(tensors.values())).detach().sum())
        return super().forward(**tensors)


def _buffers(comm: Handler, sizes: Sequence[int]) -> Trained:
    return train_module(comm, Counting(comm.stage.index), sizes, sgd)


def test_buffers_are_those_of_the_last_microbatch(rank_pool: RankPool) -> None:
    sizes = [2, 2, 2, 2]
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((3, 1), tensors_of(line(2)), schedule="pipedream", microbatches=1)
    last = make_batches(sizes)[-1]["x"].sum()
    for stage, _, values, _ in ranks.run(plan, _buffers, sizes):
        assert stage == 1 or torch.equal(values["seen"], last)


def _no_items(comm: Handler) -> None:
    module = build(line(2), comm.stage.index)
    runner = PipelineRunner(comm, module, loss=_sum_loss, optimizer=sgd(module), reduction="sum")
    batch = {"x": make_batches([2])[0]["x"], "target": torch.zeros(2, 0, dtype=torch.int64)}
    runner.train([batch, {**batch, "target": torch.zeros((0, 2))}] if comm.rank == 0 else None)


def test_a_target_needs_items(rank_pool: RankPool) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((1, 1), tensors_of(line(2)), schedule="pipedream", microbatches=1)
    ends = ranks.run_to_ends(plan, _no_items)
    assert all(end.kind != "" for end in ends)


def _waits(comm: Handler) -> Summary:
    module = build(line(2), comm.stage.index)
    runner = PipelineRunner(
        comm, module, loss=torch.nn.functional.cross_entropy, optimizer=quick_sgd(module)
    )

    def slowly() -> Iterator[dict[str, torch.Tensor]]:
        for batch in make_batches([2] * 4):
            time.sleep(0.1)
            yield batch

    return runner.train(slowly() if comm.rank == 0 else None)


def test_to_wait_for_the_next_microbatch_counts_as_waiting(rank_pool: RankPool) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((1, 1), tensors_of(line(2)), schedule="pipedream", microbatches=1)
    shares = ranks.run(plan, _waits)[0].shares
    assert shares["s1"].waiting > 0.5
    assert shares["s0"].waiting < 0.5


def _clips(comm: Handler) -> None:
    module = build(line(2), comm.stage.index)
    with pytest.raises(stagelink.UsageError, match="the stages step at different times"):
        PipelineRunner(
            comm,
            module,
            loss=torch.nn.functional.cross_entropy,
            optimizer=sgd(module),
            clip_norm=1.0,
        )


def test_no_norm_of_all_stages(rank_pool: RankPool) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    ranks.run(ranks.plan((1, 1), tensors_of(line(2)), schedule="pipedream"), _clips)


def _evaluates(comm: Handler) -> dict[str, float]:
    module = build(line(3), comm.stage.index)
    runner = PipelineRunner(
        comm, module, loss=torch.nn.functional.cross_entropy, optimizer=sgd(module)
    )
    first = comm.stage.index == 0
    found = {}
    for _ in range(2):
        runner.train(make_batches([7, 4, 6]) if first else None)
        found = runner.evaluate(make_batches([5, 9]) if first else None)
    return found


def test_epochs_and_evaluation_take_turns(rank_pool: RankPool) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((2, 3, 1), tensors_of(line(3)), schedule="pipedream", microbatches=3)
    found = ranks.run(plan, _evaluates)
    assert found == [found[0]] * 6
    assert 0 < found[0]["loss"] < 10


@pytest.mark.parametrize("replicas", SHAPES, ids=str)
def test_shapes_that_people_ran(replicas: tuple[int, ...], rank_pool: RankPool) -> None:
    """Some hang with PipeDream's own warm-up; 50 microbatches, which fit none of them."""
    shapes = line(len(replicas))
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan(replicas, tensors_of(shapes), schedule="pipedream", microbatches=1)
    trained = ranks.run(plan, train, shapes, [1] * 50, quick_sgd)
    assert {summary.items for _, summary, _, _ in trained} == {50}


@pytest.mark.parametrize("replicas", [(3, 2), (2, 4), (1, 3, 1), (4, 3, 1)], ids=str)
@pytest.mark.parametrize("count", [3, 14, 26])
def test_the_diagonal(replicas: tuple[int, ...], count: int, rank_pool: RankPool) -> None:
    """Replicas may differ by more than one microbatch; each still takes part in every round."""
    shapes = line(len(replicas))
    ranks = Ranks(LOOPBACK, rank_pool)
    document = ranks.plan(
        replicas, tensors_of(shapes), schedule="pipedream", microbatches=1, routing="diagonal"
    )
    plan = stagelink.Plan.from_dict(document)
    rules = [
        Rule(lambda number, stage=stage: _round(stage, number), warm_up)  # type: ignore[misc]
        for stage, warm_up in zip(plan.stages, stagelink.verify(plan).warm_up, strict=True)
    ]
    alone, loss = train_delayed(shapes, quick_sgd, make_batches([2] * count), rules)
    check(ranks.run(document, train, shapes, [2] * count, quick_sgd), alone, loss)


def _round(stage: Stage, number: int) -> int:
    mine = replica_for(stage, number)
    return [replica_for(stage, other) for other in range(number)].count(mine)


def _summed(comm: Handler) -> Trained:
    module = build(line(2), comm.stage.index)
    runner = PipelineRunner(
        comm, module, loss=_sum_loss, optimizer=quick_sgd(module), reduction="sum"
    )
    summary = runner.train(make_batches([4, 4, 4]) if comm.stage.index == 0 else None)
    return comm.stage.index, summary, weights(module), comm.rank


def _sum_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 0.01 * torch.nn.functional.cross_entropy(output, target, reduction="sum")


def test_with_sums_the_replicas_gradients_are_added(rank_pool: RankPool) -> None:
    """Two replicas of one microbatch each do what one does that takes both in one step."""
    ranks = Ranks(LOOPBACK, rank_pool)
    found = []
    for replicas, parts in (((2, 2), 2), ((1, 1), 1)):
        plan = ranks.plan(replicas, tensors_of(line(2)), schedule="pipedream", microbatches=parts)
        found.append({stage: values for stage, _, values, _ in ranks.run(plan, _summed)})
    for stage in (0, 1):
        assert largest_difference(found[0][stage], found[1][stage]) <= 1e-12


def _flat_targets(comm: Handler) -> float:
    shapes = line(2)
    module: torch.nn.Module = build(shapes, comm.stage.index)
    if comm.stage.index == 0:
        module = _Flattens(module)
    runner = PipelineRunner(
        comm, module, loss=torch.nn.functional.cross_entropy, optimizer=quick_sgd(module)
    )
    batch = make_batches([8])[0]
    batches = [{"x": batch["x"].view(2, 4, -1), "target": batch["target"].view(2, 4)}]
    return runner.train(batches if comm.stage.index == 0 else None).loss


class _Flattens(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"h0": self.inner(x=x.flatten(0, 1)), "target": target.flatten()}


def test_the_loss_is_a_mean_over_the_targets_items(rank_pool: RankPool) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    losses = []
    for schedule in ("1f1b", "pipedream"):
        plan = ranks.plan((1, 1), tensors_of(line(2)), schedule=schedule, microbatches=1)
        losses.append(ranks.run(plan, _flat_targets)[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_hooks_of_parameters_are_refused_where_copies_would_not_call_them() -> None:
    module = torch.nn.Linear(2, 2)
    module.weight.register_hook(lambda gradient: gradient)
    Versions(module, direct=True, two=False)
    with pytest.raises(stagelink.UsageError, match="parameter 'weight' has hooks"):
        Versions(module, direct=False, two=False)


# -- versions ------------------------------------------------------------------------------------


def test_no_more_copies_than_versions_under_way() -> None:
    module = torch.nn.Linear(3, 2)
    versions = Versions(module, direct=False, two=False)
    for step in range(20):
        versions.forward_on(versions.newest)(input=torch.ones(1, 3)).sum().backward()
        if step >= 3:
            versions.backward(lambda: None)
            versions.about_to_update()
        assert versions.kept <= 4
    for _ in range(3):
        versions.backward(lambda: None)
        versions.about_to_update()
    assert versions.kept == 0


def test_weights_that_are_gone_or_to_come_are_not_given() -> None:
    versions = Versions(torch.nn.Linear(3, 2), direct=False, two=False)
    versions.about_to_update()
    for version in (0, 2):
        with pytest.raises(RuntimeError, match=f"version {version}: the newest is 1"):
            versions.forward_on(version)


def test_weights_that_a_forward_changes_are_refused() -> None:
    module = torch.nn.Embedding(4, 2, max_norm=0.1)
    versions = Versions(module, direct=False, two=False)
    loss = versions.forward_on(0)(input=torch.arange(4)).sum()
    with pytest.raises(stagelink.UsageError, match="'weight': the module's forward changes it"):
        versions.backward(loss.backward)


class _PastItsName(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.all = [self.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.all[0]


@pytest.mark.parametrize("before", [None, 1.0])
def test_weights_that_a_forward_reaches_past_their_names(before: float | None) -> None:
    module = _PastItsName()
    versions = Versions(module, direct=False, two=False)
    if before is not None:
        module.weight.grad = torch.full((2,), before)
    loss = versions.forward_on(0)(x=torch.ones(2)).sum()
    with pytest.raises(stagelink.UsageError, match="'weight': the module's forward reaches it"):
        versions.backward(loss.backward)


def test_a_copy_keeps_its_values_when_the_module_is_stepped() -> None:
    module = torch.nn.Linear(3, 2, bias=False)
    torch.nn.init.constant_(module.weight, 2.0)
    versions = Versions(module, direct=False, two=True)
    forward = versions.forward_on(0)
    before = forward(input=torch.ones(1, 3))
    versions.about_to_update()
    with torch.no_grad():
        module.weight.add_(1.0)
    assert torch.equal(forward(input=torch.ones(1, 3)), before)
    assert torch.equal(versions.forward_on(1)(input=torch.ones(1, 3)), before + 3)
    before.sum().backward()
    versions.backward(lambda: None)
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad, torch.ones(2, 3))
