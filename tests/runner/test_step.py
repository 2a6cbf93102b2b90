"""Clipping counts every stage's gradients, schedulers move with the steps, all of it is saved."""

from __future__ import annotations

import copy
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stagelink import Handler, PipelineRunner
from stagelink.errors import UsageError
from stagelink.testing import run_threads
from tests.runner.models import (
    CLASSES,
    WIDTH,
    build,
    fill,
    largest_difference,
    line,
    make_batches,
    tensors_of,
    weights,
)
from tests.support.pipelines import LOOPBACK, Ranks, document, joined

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

    from stagelink.testing import RankPool

Weights = dict[str, torch.Tensor]

SHAPES = line(3)
SIZES = [12, 12, 7]
CLIP_NORM = 0.05


def train(comm: Handler, clip_norm: float | None) -> tuple[int, Weights, float]:
    """This stage's index, its weights, and the learning rate at the end."""
    module = build(SHAPES, comm.stage.index)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    runner = PipelineRunner(
        comm,
        module,
        loss=torch.nn.functional.cross_entropy,
        optimizer=optimizer,
        clip_norm=clip_norm,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1),
    )
    runner.train(make_batches(SIZES) if comm.stage.index == 0 else None)
    state = runner.state_dict()
    runner.load_state_dict(state)
    assert state["scheduler"]["last_epoch"] == len(SIZES)
    return comm.stage.index, module.state_dict(), optimizer.param_groups[0]["lr"]


def train_alone(clip_norm: float | None) -> list[Weights]:
    """Each stage's weights after the same in one process, by torch's own clipping."""
    modules = torch.nn.ModuleList(build(SHAPES, stage) for stage in range(3))
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    for batch in make_batches(SIZES):
        optimizer.zero_grad()
        out = modules[2](h1=modules[1](h0=modules[0](x=batch["x"])))
        torch.nn.functional.cross_entropy(out, batch["target"]).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(modules.parameters(), clip_norm)
        optimizer.step()
        scheduler.step()
    return [module.state_dict() for module in modules]


@pytest.mark.parametrize("clip_norm", [CLIP_NORM, 1e6, None])
def test_weights_are_those_of_one_process(clip_norm: float | None) -> None:
    plan = document(LOOPBACK, [2, 1, 2], tensors_of(SHAPES))

    def rank(rank: int, world_size: int, store: Store) -> tuple[int, Weights, float]:
        with joined(rank, world_size, store, plan) as comm:
            return train(comm, clip_norm)

    alone = train_alone(clip_norm)
    for stage, found, lr in run_threads(rank, 5):
        assert lr == pytest.approx(0.05)
        for name, value in found.items():
            assert torch.allclose(value, alone[stage][name], rtol=0, atol=1e-12)


def test_clipping_changes_something() -> None:
    clipped, free = train_alone(CLIP_NORM), train_alone(None)
    assert not torch.allclose(clipped[0]["maps.x-h0.weight"], free[0]["maps.x-h0.weight"])


def test_a_norm_that_bounds_nothing_is_refused() -> None:
    plan = document(LOOPBACK, [1, 1], tensors_of(line(2)))

    def rank(rank: int, world_size: int, store: Store) -> str:
        with joined(rank, world_size, store, plan) as comm:
            with pytest.raises(UsageError, match="clip_norm 0: must be above 0"):
                PipelineRunner(comm, build(line(2), comm.stage.index), clip_norm=0)
            # Any real number, as one of numpy's.
            PipelineRunner(comm, build(line(2), comm.stage.index), clip_norm=Fraction(1, 2))  # type: ignore[arg-type]
            return "refused"

    assert run_threads(rank, 2) == ["refused"] * 2


# -- what one process holds in one place --------------------------------------------------------

PAIR = line(2)
STEPS = 3
cross_entropy = torch.nn.functional.cross_entropy


class Model:
    """Two stages, a loss, and an optimizer for each stage; the same on every thread."""

    def __init__(self) -> None:
        self.stages: list[torch.nn.Module] = [build(PAIR, stage) for stage in range(2)]
        self.loss: Any = torch.nn.CrossEntropyLoss(ignore_index=1)

    def held(self, stage: int) -> list[torch.Tensor]:
        """What the stage's optimizer holds."""
        return list(self.stages[stage].parameters())

    def all(self) -> list[torch.Tensor]:
        """What one process clips."""
        loss = self.loss.parameters() if isinstance(self.loss, torch.nn.Module) else ()
        return [*self.stages[0].parameters(), *self.stages[1].parameters(), *loss]

    def kept(self, stage: int) -> dict[str, torch.Tensor]:
        """What is compared."""
        return weights(self.stages[stage])


class Tempered(torch.nn.Module):
    """A loss that learns a temperature, and sees how often it is called."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.t = torch.nn.Parameter(torch.tensor(3.0, dtype=torch.float64))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return cross_entropy(output * self.t, target)


class WithLoss(Model):
    def __init__(self) -> None:
        super().__init__()
        self.loss = Tempered()

    def held(self, stage: int) -> list[torch.Tensor]:
        return super().held(stage) + list(self.loss.parameters()) * stage

    def kept(self, stage: int) -> dict[str, torch.Tensor]:
        t = {"t": self.loss.t.detach().clone()}
        return super().kept(stage) | t if stage == 1 else super().kept(stage)


class LearntClasses(Model):
    """A loss of torch's own with parameters, which ignores some targets."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = torch.nn.LinearCrossEntropyLoss(
            CLASSES, CLASSES, ignore_index=1, dtype=torch.float64
        )
        fill(self.loss, 9)

    def held(self, stage: int) -> list[torch.Tensor]:
        return super().held(stage) + list(self.loss.parameters()) * stage

    def kept(self, stage: int) -> dict[str, torch.Tensor]:
        found = super().kept(stage)
        return found | weights(self.loss) if stage == 1 else found


class InNoModule(Model):
    """A function that closes over what it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.t = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
        self.loss = lambda output, target: cross_entropy(output * self.t, target)

    def held(self, stage: int) -> list[torch.Tensor]:
        return super().held(stage) + [self.t] * stage

    def all(self) -> list[torch.Tensor]:
        return [*super().all(), self.t]

    def kept(self, stage: int) -> dict[str, torch.Tensor]:
        found = super().kept(stage)
        return found | {"t": self.t.detach().clone()} if stage == 1 else found


class Beside(Model):
    """The biases get gradients, which count for the norm, and no optimizer holds them."""

    def held(self, stage: int) -> list[torch.Tensor]:
        return [tensor for tensor in super().held(stage) if tensor.dim() == 2]


class Complex(Model):
    """Weights of complex numbers on the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.stages[0] = ComplexLayer()


class ComplexLayer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.complex128)
        fill(self, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.to(torch.complex128)).abs()  # type: ignore[no-any-return]


class Conjugated(Model):
    """Gradients that are views of their conjugates."""

    def __init__(self) -> None:
        super().__init__()
        self.stages[0] = ConjugatedLayer()


class ConjugatedLayer(ComplexLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.inner.weight.conj()
        return (x.to(torch.complex128).unsqueeze(1) * weight).sum(dim=2).abs()


class Tied(Model):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.stages[0] = TiedLayers()


class TiedLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.other = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.other.weight = self.one.weight
        fill(self, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x).tanh())  # type: ignore[no-any-return]


class Infinite(Model):
    """Gradients without a finite norm: clipped to nan where torch clips them to nan."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = lambda output, target: cross_entropy(output, target) * 1e308 * 1e10


class NoNumber(Model):
    def __init__(self) -> None:
        super().__init__()
        self.loss = lambda output, target: cross_entropy(output, target) * float("nan")


def optimizer_of(tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=0.1)


def clipped(comm: Handler, kind: type[Model]) -> tuple[int, Weights, Weights]:
    """The stage; what it keeps after training, and what a second one has from its state."""
    stage, model, other = comm.stage.index, kind(), kind()
    runner, second = (
        PipelineRunner(
            comm,
            one.stages[stage],
            loss=one.loss,
            optimizer=optimizer_of(one.held(stage)),
            clip_norm=CLIP_NORM,
        )
        for one in (model, other)
    )
    runner.train(make_batches([6] * STEPS) if stage == 0 else None)
    second.load_state_dict(copy.deepcopy(runner.state_dict()))
    return stage, model.kept(stage), other.kept(stage)


def clipped_alone(kind: type[Model]) -> Model:
    model = kind()
    optimizers = [optimizer_of(model.held(stage)) for stage in range(2)]
    for batch in make_batches([6] * STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        output = model.stages[1](h0=model.stages[0](x=batch["x"]))
        model.loss(output, batch["target"]).backward()
        torch.nn.utils.clip_grad_norm_(model.all(), CLIP_NORM, foreach=False)
        for optimizer in optimizers:
            optimizer.step()
    return model


@pytest.mark.parametrize("replicas", [(1, 1), (2, 3)], ids=str)
def test_all_that_is_trained_is_clipped_and_saved(
    replicas: tuple[int, ...], rank_pool: RankPool
) -> None:
    kinds = [Model, WithLoss, LearntClasses, InNoModule, Beside, Complex, Conjugated, Tied]
    kinds += [Infinite, NoNumber]

    def case(comm: Handler) -> list[tuple[int, Weights, Weights]]:
        return [clipped(comm, kind) for kind in kinds]

    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan(replicas, tensors_of(PAIR), microbatches=3)
    found = ranks.run(plan, case)
    for place, kind in enumerate(kinds):
        alone = clipped_alone(kind)
        for stage, kept, loaded in (rank[place] for rank in found):
            for name, value in alone.kept(stage).items():
                for got in (kept[name], loaded[name]):
                    torch.testing.assert_close(
                        got, value, rtol=0, atol=1e-12, equal_nan=True, msg=f"{kind} {name}"
                    )


class Looking(torch.nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(3, WIDTH, sparse=sparse, dtype=torch.float64)
        fill(self, 0)

    def forward(self, x: torch.Tensor) -> Any:
        return self.table((x[:, 0] > 0).long())


def test_sparse_gradients_are_clipped_as_dense_ones(rank_pool: RankPool) -> None:
    def case(comm: Handler) -> list[Weights]:
        found = []
        for sparse in (True, False):
            first = comm.stage.index == 0
            module = Looking(sparse=sparse) if first else build(PAIR, 1)
            optimizer = optimizer_of(list(module.parameters()))
            loss = torch.nn.CrossEntropyLoss(ignore_index=1)
            runner = PipelineRunner(
                comm, module, loss=loss, optimizer=optimizer, clip_norm=CLIP_NORM
            )
            runner.train(make_batches([6] * STEPS) if first else None)
            found.append(weights(module))
        return found

    ranks = Ranks(LOOPBACK, rank_pool)
    for sparse, dense in ranks.run(ranks.plan((1, 1), tensors_of(PAIR), microbatches=3), case):
        assert largest_difference(sparse, dense) <= 1e-12


def test_buffers_of_a_loss_are_those_of_the_last_microbatch(rank_pool: RankPool) -> None:
    def case(comm: Handler) -> int:
        loss = Tempered()
        loss.calls.fill_(10 * (comm.replica if comm.stage.index else 0))
        module = build(PAIR, comm.stage.index)
        tensors = [*module.parameters(), *(loss.parameters() if comm.stage.index else ())]
        runner = PipelineRunner(comm, module, loss=loss, optimizer=optimizer_of(tensors))
        loss.calls.zero_()
        runner.train(make_batches([3]) if comm.stage.index == 0 else None)
        return int(loss.calls)

    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((1, 2), tensors_of(PAIR), microbatches=3)
    assert ranks.run(plan, case)[1:] == [2, 2]


# -- several optimizers, and schedulers of every kind -------------------------------------------

L = torch.optim.lr_scheduler

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "plateau": lambda o: L.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=10.0),
    "sequential": lambda o: L.SequentialLR(o, [L.ConstantLR(o), L.ExponentialLR(o, 0.5)], [2]),
    "chained": lambda o: L.ChainedScheduler([L.ConstantLR(o), L.ExponentialLR(o, 0.5)]),
    "one cycle": lambda o: L.OneCycleLR(o, max_lr=0.2, total_steps=12),
    "cosine": lambda o: L.CosineAnnealingWarmRestarts(o, T_0=2),
    "lambda": lambda o: L.LambdaLR(o, lambda step: 1 / (1 + step)),
}


def two_optimizers(modules: list[torch.nn.Module]) -> tuple[list[Any], list[Any]]:
    """One for matrices, one for the rest; the schedulers of every kind of the first."""
    tensors = [tensor for module in modules for tensor in module.parameters()]
    optimizers: list[Any] = [
        torch.optim.SGD([t for t in tensors if t.dim() == 2], lr=0.1, momentum=0.5),
        torch.optim.Adam([t for t in tensors if t.dim() == 1], lr=0.01),
    ]
    return optimizers, [L.StepLR(optimizers[1], 3)]


def test_several_optimizers_and_every_scheduler(rank_pool: RankPool) -> None:
    batches, loss, epochs = make_batches([6, 4]), torch.nn.CrossEntropyLoss(), 3

    def case(comm: Handler) -> list[tuple[int, Weights, float]]:
        found = []
        for make in SCHEDULERS.values():
            module = build(PAIR, comm.stage.index)
            optimizers, schedulers = two_optimizers([module])
            schedulers.append(make(optimizers[0]))
            runner = PipelineRunner(
                comm, module, loss=loss, optimizer=optimizers, scheduler=schedulers
            )
            for _ in range(epochs):
                runner.train(batches if comm.stage.index == 0 else None)
                runner.load_state_dict(copy.deepcopy(runner.state_dict()))
            found.append((comm.stage.index, weights(module), optimizers[0].param_groups[0]["lr"]))
        return found

    ranks = Ranks(LOOPBACK, rank_pool)
    trained = ranks.run(ranks.plan((2, 1), tensors_of(PAIR), microbatches=2), case)
    for place, (name, make) in enumerate(SCHEDULERS.items()):
        alone, lr_alone = scheduled_alone(make, batches, epochs)
        for stage, kept, lr in (rank[place] for rank in trained):
            assert lr == pytest.approx(lr_alone, rel=1e-12), name
            assert largest_difference(kept, weights(alone[stage])) <= 1e-12, name


def scheduled_alone(
    make: Callable[[Any], Any], batches: list[Weights], epochs: int
) -> tuple[list[torch.nn.Module], float]:
    alone: list[torch.nn.Module] = [build(PAIR, stage) for stage in range(2)]
    optimizers, schedulers = two_optimizers(alone)
    one = make(optimizers[0])
    waits = isinstance(one, L.ReduceLROnPlateau)
    for _ in range(epochs):
        total = 0.0
        for batch in batches:
            for optimizer in optimizers:
                optimizer.zero_grad()
            value = cross_entropy(alone[1](h0=alone[0](x=batch["x"])), batch["target"])
            value.backward()
            total += value.item() * len(batch["x"])
            for stepper in [*optimizers, *schedulers, *([] if waits else [one])]:
                stepper.step()
        if waits:
            one.step(total / sum(len(batch["x"]) for batch in batches))
    return alone, optimizers[0].param_groups[0]["lr"]
