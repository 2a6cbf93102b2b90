"""A mean is over what the loss counted: the weights are those of one process all the same."""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional as F

import stagelink
from stagelink import BackwardDone, LossSum, PipelineRunner
from stagelink.runner import losses as losses_module
from stagelink.runner.losses import counting, elements_of, module_of, reduction_of
from stagelink.runner.scores import Scores, means
from tests.runner.models import (
    CLASSES,
    SKIP,
    WIDTH,
    Shape,
    build,
    largest_difference,
    line,
    quick_sgd,
    run_stages,
    tensors_of,
    weights,
)
from tests.support.pipelines import GLOO, LOOPBACK, SHM, Ranks, Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stagelink import Handler
    from stagelink.runner import Summary
    from stagelink.testing import RankPool

CLASS_WEIGHTS = torch.tensor([0.2, 3.0, 1.1], dtype=torch.float64)
ONE_WITHOUT = torch.tensor([0.0, 3.0, 1.1], dtype=torch.float64)
IGNORED = -100
FEW = ("module", "a class without weight", "elements", "own", "own backward")
"""Cases for every shape and wire; for two epochs."""

Batches = list[dict[str, torch.Tensor]]
Trained = dict[str, tuple[int, "Summary", dict[str, float], dict[str, torch.Tensor]]]


def batches_of(targets: Sequence[Sequence[int]]) -> Batches:
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "x": torch.randn(len(target), WIDTH, generator=generator, dtype=torch.float64),
            "target": torch.tensor(target),
        }
        for target in targets
    ]


INDICES = [
    [0, 1, 2, IGNORED],
    [0, 1, IGNORED, IGNORED],  # a microbatch that counts nothing
    [IGNORED, IGNORED, 1, 0, 2, IGNORED, 0],
    [IGNORED, 0],
]


def with_another(ignored: int) -> list[list[int]]:
    return [[ignored if index == IGNORED else index for index in target] for target in INDICES]


def like(batches: Batches, kind: str) -> Batches:
    """The same, with targets of another kind."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for batch in batches:
        target = torch.rand(len(batch["x"]), CLASSES, generator=generator, dtype=torch.float64)
        if kind == "probabilities":
            target = target.softmax(dim=1)
        found.append({"x": batch["x"], "target": target})
    return found


def token_loss(output: torch.Tensor, target: torch.Tensor) -> LossSum:
    total = F.cross_entropy(output, target, ignore_index=1, reduction="sum")
    return LossSum(total, (target != 1).sum())


def unless_empty(output: torch.Tensor, target: torch.Tensor) -> LossSum:
    """Without a graph where it counts nothing."""
    kept = target != IGNORED
    if not bool(kept.any()):
        return LossSum(torch.zeros(()), weight=0)
    return LossSum(F.cross_entropy(output[kept], target[kept], reduction="sum"), kept.sum())


def squares(output: torch.Tensor, target: torch.Tensor) -> LossSum:
    """Weighs by a plain number."""
    hot = F.one_hot(target.clamp(min=0), CLASSES)
    kept = (target != IGNORED).double()
    return LossSum((((output - hot) ** 2).mean(dim=1) * kept).sum(), float(kept.sum()))


def backward_in_loss(output: torch.Tensor, target: torch.Tensor) -> Any:
    found = token_loss(output, target)
    if not output.requires_grad:
        return found
    found.sum.backward()
    return BackwardDone(found)


def backward_of_sum(output: torch.Tensor, target: torch.Tensor) -> Any:
    loss = F.cross_entropy(output, target, reduction="sum")
    if output.requires_grad:
        loss.backward()
    return BackwardDone(loss.detach())


def mean_of(loss: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """What one process computes where the pipeline's loss gives a `LossSum`."""

    def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        total, weight = loss(output, target)
        return total / weight  # type: ignore[no-any-return]

    return mean


@dataclass(frozen=True)
class Case:
    """A loss of the pipeline, and what it is in one process with the whole batch."""

    loss: Any
    batches: Batches
    alone: Any = None
    reduction: Any = "mean"
    epochs: int = 1


def cases(names: Sequence[str] = ()) -> dict[str, Case]:
    """All, for one epoch; or some, for two."""
    known = all_cases()
    return {name: replace(known[name], epochs=2) for name in names} or known


def all_cases() -> dict[str, Case]:
    nn, partial = torch.nn, functools.partial
    indices, other = batches_of(INDICES), batches_of(with_another(1))
    plain = batches_of([target for target in with_another(0) if any(target)])
    return {
        "module": Case(nn.CrossEntropyLoss(), indices),
        "index": Case(nn.CrossEntropyLoss(ignore_index=1), other),
        "weights": Case(nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), indices),
        "a class without weight": Case(nn.CrossEntropyLoss(weight=ONE_WITHOUT), plain),
        "smooth": Case(nn.CrossEntropyLoss(CLASS_WEIGHTS, label_smoothing=0.1), indices),
        "smooth without weights": Case(nn.CrossEntropyLoss(label_smoothing=0.1), indices),
        "probabilities": Case(nn.CrossEntropyLoss(CLASS_WEIGHTS), like(indices, "probabilities")),
        "function": Case(F.cross_entropy, indices),
        "partial": Case(partial(F.cross_entropy, weight=CLASS_WEIGHTS, ignore_index=1), other),
        "partial twice": Case(
            partial(partial(F.cross_entropy, weight=CLASS_WEIGHTS), reduction="mean"), indices
        ),
        "nll": Case(nn.NLLLoss(weight=CLASS_WEIGHTS), indices),
        "nll function": Case(partial(F.nll_loss, ignore_index=1), other),
        "bound": Case(nn.CrossEntropyLoss().forward, indices),
        "sum": Case(nn.CrossEntropyLoss(CLASS_WEIGHTS, reduction="sum"), indices, reduction="sum"),
        "partial sum": Case(partial(F.cross_entropy, reduction="sum"), indices, reduction="sum"),
        "elements": Case(nn.MSELoss(), like(indices, "values")),
        "logits": Case(nn.BCEWithLogitsLoss(weight=CLASS_WEIGHTS), like(indices, "probabilities")),
        "items": Case(nn.KLDivLoss(reduction="batchmean"), like(indices, "probabilities")),
        "own": Case(token_loss, other, mean_of(token_loss)),
        "own without a graph": Case(unless_empty, indices, mean_of(unless_empty)),
        "own number": Case(squares, indices, mean_of(squares)),
        "own backward": Case(backward_in_loss, other, mean_of(token_loss)),
        "own backward of a sum": Case(
            backward_of_sum, indices, partial(F.cross_entropy, reduction="sum"), "sum"
        ),
    }


def train(comm: Handler, shapes: Sequence[Shape], names: Sequence[str]) -> Trained:
    found: Trained = {}
    for name, case in cases(names).items():
        module = build(shapes, comm.stage.index)
        runner = PipelineRunner(
            comm,
            module,
            loss=case.loss,
            optimizer=quick_sgd(module),
            reduction=case.reduction,
            metrics={"again": token_loss, "own": torch.nn.CrossEntropyLoss(ignore_index=2)}
            if name == "own"
            else None,
        )
        batches = case.batches if comm.stage.index == 0 else None
        for _ in range(case.epochs):
            summary = runner.train(batches)
        found[name] = comm.stage.index, summary, runner.evaluate(batches), weights(module)
    return found


def train_alone(case: Case, shapes: Sequence[Shape]) -> list[torch.nn.Module]:
    modules: list[torch.nn.Module] = [build(shapes, stage) for stage in range(len(shapes))]
    optimizers = [quick_sgd(module) for module in modules]
    loss = case.alone or case.loss
    for batch in case.batches * case.epochs:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss(run_stages(modules, batch), batch["target"]).backward()
        for optimizer in optimizers:
            optimizer.step()
    return modules


def of_all(case: Case, modules: Sequence[torch.nn.Module], loss: Any = None) -> float:
    """The loss of all batches at once, which is what an epoch's mean is."""
    together = {name: torch.cat([b[name] for b in case.batches]) for name in ("x", "target")}
    loss = loss or case.alone or case.loss
    with torch.no_grad():
        return float(loss(run_stages(modules, together), together["target"]))


def check(ranks: list[Trained], shapes: Sequence[Shape], names: Sequence[str]) -> None:
    for name, case in cases(names).items():
        alone = train_alone(case, shapes)
        wanted = {"loss": of_all(case, alone)}
        if name == "own":
            wanted |= {
                "again": of_all(case, alone),
                "own": of_all(case, alone, torch.nn.CrossEntropyLoss(ignore_index=2)),
            }
        for stage, summary, results, found in (trained[name] for trained in ranks):
            assert largest_difference(found, weights(alone[stage])) <= 1e-12, name
            assert results == pytest.approx(wanted, rel=1e-12), name
            assert summary.items == sum(len(batch["x"]) for batch in case.batches)
        assert len({trained[name][1].loss for trained in ranks}) == 1


@pytest.mark.parametrize(
    ("replicas", "shapes", "schedule", "names"),
    [
        ((1, 1), line(2), "1f1b", ()),
        ((2, 3), line(2), "gpipe", FEW),
        ((1, 1, 2), SKIP, "1f1b", FEW),
    ],
    ids=["pair", "replicas", "skip"],
)
def test_weights_are_those_of_one_process(
    replicas: tuple[int, ...],
    shapes: list[Shape],
    schedule: str,
    names: Sequence[str],
    rank_pool: RankPool,
) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan(replicas, tensors_of(shapes), schedule=schedule, microbatches=2)
    check(ranks.run(plan, train, shapes, names), shapes, names)


@pytest.mark.parametrize("wire", [GLOO, SHM], ids=str)
def test_processes(wire: Wire, rank_pool: RankPool) -> None:
    ranks, shapes = Ranks(wire, rank_pool), line(2)
    plan = ranks.plan((1, 2), tensors_of(shapes), microbatches=2)
    names = ("module", "own backward")
    check(ranks.run(plan, train, shapes, names), shapes, names)


# -- more than one dimension of targets


class Tokens(torch.nn.Module):
    """Gives classes along the second dimension, as torch's losses take them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build(line(2), 1)

    def forward(self, h0: torch.Tensor) -> Any:
        return self.inner(h0=h0).transpose(1, 2)


def test_targets_of_several_dimensions(rank_pool: RankPool) -> None:
    losses: dict[str, Any] = {
        "module": torch.nn.CrossEntropyLoss(CLASS_WEIGHTS, ignore_index=1),
        "function": functools.partial(F.nll_loss, ignore_index=2),
    }
    generator = torch.Generator().manual_seed(1)
    batch = {
        "x": torch.randn(5, 4, WIDTH, generator=generator, dtype=torch.float64),
        "target": torch.randint(CLASSES, (5, 4), generator=generator),
    }

    def case(comm: Handler) -> Any:
        found = {}
        for name, loss in losses.items():
            module = build(line(2), 0) if comm.stage.index == 0 else Tokens()
            runner = PipelineRunner(comm, module, loss=loss, optimizer=quick_sgd(module))
            runner.train([batch])
            found[name] = weights(module)
        return comm.stage.index, found

    ranks = Ranks(LOOPBACK, rank_pool)
    trained = ranks.run(ranks.plan((1, 1), tensors_of(line(2)), microbatches=3), case)
    for name, loss in losses.items():
        alone = [build(line(2), 0), Tokens()]
        loss(alone[1](h0=alone[0](x=batch["x"])), batch["target"]).backward()
        for module in alone:
            quick_sgd(module).step()
        for stage, found in trained:
            assert largest_difference(found[name], weights(alone[stage])) <= 1e-12


# -- nothing counted at all


def test_a_batch_that_counts_nothing_trains_nothing(rank_pool: RankPool) -> None:
    """In one process its loss is nan and its gradients are zero."""

    def case(comm: Handler) -> Any:
        module = build(line(2), comm.stage.index)
        before = weights(module)
        runner = PipelineRunner(
            comm, module, loss=torch.nn.CrossEntropyLoss(), optimizer=quick_sgd(module)
        )
        batches = batches_of([[IGNORED] * 4]) if comm.rank == 0 else None
        losses = runner.train(batches).loss, runner.evaluate(batches)["loss"]
        gradients = [float(p.grad.abs().max()) for p in module.parameters() if p.grad is not None]
        return losses, gradients, largest_difference(before, weights(module))

    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((1, 1), tensors_of(line(2)), microbatches=2)
    for losses, gradients, change in ranks.run(plan, case):
        assert all(map(math.isnan, losses))
        assert gradients == [0.0] * 2
        assert change == 0.0


# -- what it costs


def test_only_what_counts_asks_all_ranks_in_every_batch(rank_pool: RankPool) -> None:
    def reductions(comm: Handler, loss: Any, count: int) -> int:
        module = build(line(2), comm.stage.index)
        runner = PipelineRunner(comm, module, loss=loss, optimizer=quick_sgd(module))
        calls: list[None] = []
        reduce = comm.reduce

        def counted(*args: Any, **more: Any) -> list[float]:
            calls.append(None)
            return reduce(*args, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(comm, "reduce", counted)
            runner.train(batches_of([[0, 1, 2, 0]] * count) if comm.rank == 0 else None)
        return len(calls)

    def case(comm: Handler) -> list[int]:
        losses: list[Any] = [by_hand, torch.nn.CrossEntropyLoss()]
        return [reductions(comm, loss, 6) - reductions(comm, loss, 1) for loss in losses]

    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((1, 1), tensors_of(line(2)), microbatches=2)
    assert ranks.run(plan, case) == [[0, 5]] * 2


# -- asynchronous schedules: every microbatch's mean counts for itself


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_each_microbatch_has_a_mean_of_its_own(schedule: str, rank_pool: RankPool) -> None:
    """And one that counts nothing has no gradient; the epoch's loss is over all that counted."""
    losses: dict[str, Any] = {
        "own": torch.nn.CrossEntropyLoss(ignore_index=1),
        "given": token_loss,
        "squares": ones_apart,
        "": by_hand,
    }
    batches = batches_of([*with_another(1), [1, 1, 1, 1]])

    def case(comm: Handler) -> Any:
        found = {}
        for name, loss in losses.items():
            module = build(line(2), comm.stage.index)
            runner = PipelineRunner(comm, module, loss=loss, optimizer=quick_sgd(module))
            loss_ = runner.train(batches if comm.stage.index == 0 else None).loss
            found[name] = loss_, weights(module)
        return found

    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((2, 1), tensors_of(line(2)), schedule=schedule, microbatches=2)
    for found in ranks.run(plan, case):
        for name in ("own", "given"):
            assert largest_difference(found[name][1], found[""][1]) <= 1e-12
        assert all(value.isfinite().all() for value in found["squares"][1].values())
        assert found["own"][0] == pytest.approx(found["given"][0])


def ones_apart(output: torch.Tensor, target: torch.Tensor) -> LossSum:
    return squares(output, torch.where(target == 1, IGNORED, target))


def by_hand(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if bool((target == 1).all()):
        return output.sum() * 0
    return F.cross_entropy(output, target, ignore_index=1)


# -- narrow types


def test_a_sum_of_halves_is_no_half() -> None:
    """It may be beyond what a half can hold, where their mean is not."""
    output = torch.tensor([[9000.0, -9000.0]] * 3, dtype=torch.float16, requires_grad=True)
    target = torch.tensor([1, 1, IGNORED])
    found = counting(torch.nn.CrossEntropyLoss())(output, target)  # type: ignore[misc]
    assert found.sum.item() == pytest.approx(36000, rel=1e-3)
    assert (found.sum.dtype, float(found.weight)) == (torch.float64, 2)
    found.sum.backward()
    assert output.grad is not None
    assert output.grad.tolist() == [[1, -1], [1, -1], [0, 0]]
    none = counting(F.cross_entropy)(output, torch.full((3,), IGNORED))  # type: ignore[misc]
    assert (none.sum.item(), float(none.weight)) == (0, 0)


def test_what_is_reported_is_added_up_as_doubles() -> None:
    """Items times a value may be beyond its type, or between two of its numbers."""
    for dtype, value in ((torch.float16, 100.0), (torch.bfloat16, 1.515625), (torch.uint8, 3.0)):
        given = torch.tensor(value, dtype=dtype)
        metrics: Any = {"same": lambda output, target: output}
        scores = Scores(lambda output, target: output, "mean", metrics, trains=False, apart=False)
        for items in (1000, 3):
            scores.add(given, None, items, 1003)
        assert means(scores.totals(), "mean") == [value, value]


@pytest.mark.parametrize("weights", [None, torch.rand(200)], ids=["", "weighted"])
def test_targets_of_bytes(weights: torch.Tensor | None) -> None:
    """As bytes -100, which is ignored, would be 156, which is a class."""
    output = torch.randn(4, 200)
    target = torch.tensor([156, 7, 0, 156], dtype=torch.uint8)
    loss = torch.nn.CrossEntropyLoss(weight=weights)
    found = counting(loss)(output, target)  # type: ignore[misc]
    torch.testing.assert_close((found.sum / found.weight).float(), loss(output, target))


# -- what is known


class Flattening(torch.nn.CrossEntropyLoss):
    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(output.flatten(0, -2), target.flatten())


class Renamed(torch.nn.CrossEntropyLoss):
    def tripled(self, output: torch.Tensor, target: torch.Tensor) -> Any:
        return 3 * self(output, target)


def test_what_is_known_of_losses() -> None:
    nn, partial = torch.nn, functools.partial
    for known in (Renamed(), nn.NLLLoss(), partial(nn.CrossEntropyLoss()), F.nll_loss):
        assert counting(known) is not None
    for bound in (Renamed().forward, Renamed().__call__):
        assert counting(bound) is not None
    for compiled in (F.nll_loss, nn.CrossEntropyLoss(), nn.NLLLoss().forward):
        assert counting(torch.compile(compiled, backend="eager")) is not None
    learnt = nn.LinearCrossEntropyLoss(2, CLASSES)
    assert counting(learnt) is not None
    assert module_of(partial(learnt, extra=1)) is learnt
    others = (nn.MSELoss(), nn.NLLLoss(reduction="sum"), Renamed().tripled, token_loss, max)
    for other in (Flattening(), *others):
        assert counting(other) is None
    assert module_of((renamed := Renamed()).tripled) is renamed
    said = {
        nn.MSELoss(): "mean",
        nn.KLDivLoss(reduction="batchmean"): "mean",
        nn.L1Loss(reduction="none"): "none",
        partial(F.cross_entropy, reduction="sum"): "sum",
        partial(F.cross_entropy, size_average=False): "sum",
        partial(F.cross_entropy, reduce=False): "none",
        partial(F.cross_entropy, size_average=True): "mean",
        token_loss: None,
    }
    assert {loss: reduction_of(loss) for loss in said} == said


# -- what is refused


def _trained_with(loss: Any, **more: Any) -> Any:
    def case(comm: Handler) -> str:
        module = build(line(2), comm.stage.index)
        runner = PipelineRunner(comm, module, loss=loss, optimizer=quick_sgd(module), **more)
        with pytest.raises(stagelink.StagelinkError) as caught, comm:
            runner.train(batches_of([[0, 1, 2, 0]] * 2) if comm.rank == 0 else None)
        return str(caught.value)

    return case


def alternating() -> Any:
    calls: list[None] = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> Any:
        calls.append(None)
        plain = F.cross_entropy(output, target)
        return plain if len(calls) == 2 else LossSum(plain, 1)

    return loss


def backward_at_times() -> Any:
    calls: list[None] = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> Any:
        calls.append(None)
        found = LossSum(F.cross_entropy(output, target, reduction="sum"), len(target))
        return backward_in_loss(output, target) if len(calls) == 2 else found

    return loss


def detached(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target).detach()


def hits(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(dim=1) == target).sum()


def without_grad(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return F.cross_entropy(output, target)


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(torch.nn.CrossEntropyLoss())


def returning(make: Callable[[torch.Tensor], Any]) -> Any:
    return lambda output, target: make(F.cross_entropy(output, target))


NO_GRAPH = "does not depend on any parameter by a graph"


SUM = {"reduction": "sum"}
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "detached": (detached, {}, NO_GRAPH),
    "detached, and what to do": (detached, {}, "it must be a sum and say so: return"),
    "integers": (hits, {}, NO_GRAPH),
    "no grad": (without_grad, {}, NO_GRAPH),
    "detached sum": (returning(lambda loss: LossSum(loss.detach(), 1)), {}, NO_GRAPH),
    "backward of a mean": (returning(BackwardDone), {}, "cannot be weighed any more"),
    "none": (returning(lambda loss: None), {}, "got None"),
    "tuple": (returning(lambda loss: (loss, loss)), {}, "must be a tensor with one element"),
    "two": (returning(lambda loss: loss.expand(2)), {}, "got shape (2,)"),
    "complex": (returning(lambda loss: loss + 1j), {}, "real number; got a tensor of dtype"),
    "meta": (returning(lambda loss: loss.to("meta")), {}, "got a tensor of device meta"),
    "negative": (returning(lambda loss: LossSum(loss, -1)), {}, "that is not negative; got -1"),
    "nan": (returning(lambda loss: LossSum(loss, math.nan)), {}, "got nan"),
    "text": (returning(lambda loss: LossSum(loss, "2")), {}, "got '2'"),  # type: ignore[arg-type]
    "two weights": (
        returning(lambda loss: LossSum(loss, torch.ones(2))),
        {},
        "the loss's weight must be",
    ),
    "number": (returning(lambda loss: LossSum(2.0, 1)), {}, "the loss's sum must be"),  # type: ignore[arg-type]
    "negative tensor": (
        returning(lambda loss: LossSum(loss, torch.tensor(-1))),
        {},
        "losses add up to -",
    ),
    "infinite tensor": (
        returning(lambda loss: LossSum(loss, torch.tensor(math.inf))),
        {},
        "losses add up to inf",
    ),
    "sum of a mean": (returning(lambda loss: LossSum(loss, 1)), SUM, "return its sum"),
    "alternating": (alternating(), {}, "keep to one"),
    "backward at times": (backward_at_times(), {}, "for some microbatches of a batch and not for"),
    "own forward": (Flattening(), {}, "of its own or scripted, so what its mean counts is not"),
    "another method": (Renamed().tripled, {}, "of its own or scripted, so what its mean counts"),
    "scripted": (scripted(), {}, "of its own or scripted, so what its mean counts is not known"),
}


@pytest.mark.parametrize(("loss", "more", "text"), REFUSED.values(), ids=REFUSED)
def test_a_loss_that_cannot_be_used(
    loss: Any, more: dict[str, Any], text: str, rank_pool: RankPool
) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((1, 1), tensors_of(line(2)), microbatches=2)
    for found in ranks.run(plan, _trained_with(loss, **more)):
        assert text in found


class Dropping(torch.nn.Module):
    """Keeps one item of a microbatch, all of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build(line(2), 0)
        self.calls = 0

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Any:
        self.calls += 1
        kept = slice(None if self.calls % 2 == 0 else 1)
        value = torch.rand(len(target), CLASSES, dtype=torch.float64)
        return {"h0": self.inner(x=x)[kept], "target": value[kept]}


def test_a_mean_over_elements_of_which_items_have_more_or_fewer(rank_pool: RankPool) -> None:
    """It cannot be weighed by items; in an evaluation, and as sum and weight, it goes."""

    def case(comm: Handler) -> str:
        module: torch.nn.Module = build(line(2), 1) if comm.stage.index else Dropping()
        batches = batches_of([[0, 1, 2, 0]] * 2) if comm.rank == 0 else None
        losses: list[Any] = [lambda o, t: LossSum(((o - t) ** 2).sum(), t.numel())]
        losses += [functools.partial(F.l1_loss, reduction="mean"), torch.nn.MSELoss()]
        for loss in losses:
            runner = PipelineRunner(comm, module, loss=loss, optimizer=quick_sgd(module))
            runner.evaluate(batches)
            if loss is losses[0]:
                runner.train(batches)
        with pytest.raises(stagelink.StagelinkError) as caught, comm:
            runner.train(batches)
        return str(caught.value)

    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((1, 1), tensors_of(line(2)), microbatches=2)
    for found in ranks.run(plan, case):
        assert "6 of 2 items in this microbatch, 3 of 2 in one before it, of the same" in found


@pytest.mark.parametrize("weight", [-1.0, math.inf, math.nan])
def test_weights_that_make_no_sense_where_nothing_is_scaled_by_their_sum(weight: float) -> None:
    """In an evaluation, and in an asynchronous schedule."""

    def metric(output: torch.Tensor, target: torch.Tensor) -> LossSum:
        return LossSum(output, torch.tensor(weight))

    for loss, metrics in ((metric, {}), (lambda output, target: output, {"m": metric})):
        scores = Scores(loss, "mean", metrics, trains=False, apart=True)
        scores.add(torch.tensor(2.0), None, 1, 1)
        with pytest.raises(stagelink.UsageError, match="or of a metric, add up to "):
            means(scores.totals(), "mean")


def test_torchs_losses_that_are_means_over_elements() -> None:
    nn, output, target = torch.nn, torch.ones(2, 3), torch.ones(2, 1)
    for loss in (nn.HuberLoss(), nn.KLDivLoss(), nn.HingeEmbeddingLoss(), F.kl_div):
        assert elements_of(loss, output, target) == 6
    for other in (
        nn.KLDivLoss(reduction="batchmean"),
        functools.partial(F.kl_div, reduction="batchmean"),
        nn.MultiLabelMarginLoss(),
        nn.CrossEntropyLoss(),
    ):
        assert elements_of(other, output, target) is None


def test_replicas_that_return_different_kinds(rank_pool: RankPool) -> None:
    def case(comm: Handler) -> str:
        loss = token_loss if comm.rank == 1 else by_hand
        return str(_trained_with(loss)(comm))

    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((1, 2), tensors_of(line(2)), microbatches=2)
    for found in ranks.run(plan, case):
        assert "the loss returned one number on rank 2, and a LossSum before" in found


def test_a_loss_that_is_no_number_passes(rank_pool: RankPool) -> None:
    def case(comm: Handler) -> float:
        module = build(line(2), comm.stage.index)
        loss = returning(lambda loss: loss * math.nan)
        runner = PipelineRunner(comm, module, loss=loss, optimizer=quick_sgd(module))
        return runner.train(batches_of([[0, 1, 2, 0]]) if comm.rank == 0 else None).loss

    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((1, 1), tensors_of(line(2)), microbatches=2)
    assert all(map(math.isnan, ranks.run(plan, case)))


def test_own_backward_of_means_in_an_asynchronous_schedule(rank_pool: RankPool) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((1, 1), tensors_of(line(2)), schedule="pipedream", microbatches=2)
    for found in ranks.run(plan, _trained_with(backward_in_loss)):
        assert "use reduction='sum'" in found


def test_what_a_sum_of_probabilities_is_divided_by_is_on_the_target_s_device() -> None:
    target = torch.ones(4, 3)
    with torch.device("meta"):
        weight = losses_module._weight(target, None, -100)
    assert weight.device == target.device
    assert weight == 4
