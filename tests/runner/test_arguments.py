"""Whatever a runner cannot use is refused when it is made or called, in a sentence."""

from __future__ import annotations

import functools
import math
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stagelink import PipelineRunner, StagelinkError, UsageError
from tests.runner.models import build, line, make_batches, sgd, tensors_of
from tests.support.pipelines import LOOPBACK, Ranks
from tests.sweep.values import Call, Hostile, complaint, variants

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stagelink import Handler
    from stagelink.testing import RankPool

SHAPES = line(2)
cross_entropy = torch.nn.functional.cross_entropy
L = torch.optim.lr_scheduler


class Greedy(torch.optim.SGD):
    """Wants more at each step."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        del closure


class Zeroing(torch.optim.SGD):
    """Has a way of its own to forget gradients."""

    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad()


class Wanting:
    """A scheduler of somebody else's."""

    def step(self, metric: float) -> None:
        raise NotImplementedError


def stranger() -> torch.optim.Optimizer:
    return sgd(build(SHAPES, 0))


def scheduled(make: Callable[[Any], Any]) -> Callable[[torch.nn.Module], dict[str, Any]]:
    """An optimizer of the module, with a scheduler."""

    def settings(module: torch.nn.Module) -> dict[str, Any]:
        optimizer = sgd(module)
        return {"optimizer": optimizer, "scheduler": make(optimizer)}

    return settings


def optimized(make: Callable[[Any], Any]) -> Callable[[torch.nn.Module], dict[str, Any]]:
    return lambda module: {"optimizer": make(list(module.parameters()))}


def twice(module: torch.nn.Module) -> dict[str, Any]:
    optimizer = sgd(module)
    return {"optimizer": [optimizer, optimizer]}


def given(**settings: Any) -> Callable[[torch.nn.Module], dict[str, Any]]:
    return lambda module: {"optimizer": sgd(module), **settings}


def each(name: str, words: tuple[str, ...], bad: Sequence[object]) -> list[Any]:
    """A row for every value of one argument."""
    return [(given(**{name: value}), words) for value in bad]


MODULE = "must be a torch.nn.Module"
HANDLER = "must be the handler that"
OPTIMIZER = "must be a torch.optim.Optimizer, or a list of them"
SCHEDULER = "must be a torch.optim.lr_scheduler.LRScheduler, or a list of them"
FUNCTION = "must be a function of output and target"
NORM = "above 0, or None"

MADE: list[tuple[Callable[[torch.nn.Module], dict[str, Any]], tuple[str, ...]]] = [
    # the handler and the module
    *each("comm", ("comm is", HANDLER), (None, 1, "comm", [], object())),
    *each("module", ("module is", MODULE), (None, 1, "m", [], abs)),
    (given(module=torch.nn.Linear), ("the class Linear", "so an instance: Linear(…)")),
    (given(module=[torch.nn.Linear(1, 1)]), ("module is a list", MODULE)),
    # the loss and the reduction
    *each("loss", ("loss is", FUNCTION), (1, "mse", [], torch.ones(1))),
    (given(loss=torch.nn.MSELoss), ("the class MSELoss", "so an instance: MSELoss(…)")),
    *each(
        "reduction",
        ("reduction ", "one of ('mean', 'sum')"),
        (None, 1, "none", "", [], torch.ones(2)),
    ),
    (
        given(loss=functools.partial(cross_entropy, reduction="sum")),
        ("the loss has reduction 'sum', the runner 'mean'",),
    ),
    (
        given(loss=torch.nn.MSELoss(reduction="none")),
        ("has reduction 'none', the runner 'mean': let the loss make one number",),
    ),
    (given(loss=cross_entropy, reduction="mean", metrics=0), ("metrics is a int", "a mapping")),
    (given(metrics=[abs]), ("metrics is a list", "a mapping from names to functions")),
    (given(metrics={1: abs}), ("a metric's name is a int, 1",)),
    (given(metrics={"m": 1}), ("metric 'm' is a int", FUNCTION)),
    (given(metrics={"m": torch.nn.L1Loss}), ("metric 'm' is the class L1Loss", "an instance")),
    (
        given(metrics={"m": torch.nn.L1Loss(reduction="sum")}),
        ("metric 'm' has reduction 'sum'; a metric is a mean",),
    ),
    (given(metrics={"loss": abs}), ("metric 'loss': the name is taken",)),
    *each("progress", ("progress is", "must be True or False"), (None, "yes", 2, [])),
    # the norm
    *each("clip_norm", ("clip_norm", f"must be {NORM}"), (0, -1, math.nan)),
    *each("clip_norm", ("clip_norm", f"must be a number {NORM}"), ("1", [], True, 1j)),
    # optimizers
    *each("optimizer", ("optimizer is", OPTIMIZER), (1, "sgd", abs, {}, object())),
    (given(optimizer=torch.optim.SGD), ("the class SGD", "so an instance: SGD(…)")),
    (given(optimizer=torch.amp.GradScaler("cpu")), ("a GradScaler without", OPTIMIZER)),
    (given(optimizer=[]), ("optimizer is an empty list: give one, or None",)),
    (given(optimizer=[None]), ("optimizer is None", OPTIMIZER)),
    (twice, ("the same one is there twice",)),
    (optimized(torch.optim.LBFGS), ("optimizer LBFGS: its step() wants 'closure'",)),
    (optimized(Zeroing), ("optimizer Zeroing: its zero_grad() is called with set_to_none=True",)),
    (optimized(Greedy), ("optimizer Greedy: its step() wants 'closure'",)),
    (
        given(optimizer=stranger()),
        ("holds 2 tensors, and none of the 2 parameters of the module",),
    ),
    # schedulers
    *each("scheduler", ("scheduler is", SCHEDULER), (1, "step", abs, {})),
    (given(scheduler=L.StepLR), ("the class StepLR", "so an instance: StepLR(…)")),
    (given(scheduler=()), ("scheduler is an empty tuple: give one, or None",)),
    (
        given(scheduler=L.StepLR(stranger(), 1)),
        ("scheduler StepLR is of another optimizer than the runner's",),
    ),
    (
        given(scheduler=L.ReduceLROnPlateau(stranger())),
        ("scheduler ReduceLROnPlateau is of another optimizer",),
    ),
    (
        lambda module: {"scheduler": L.StepLR(sgd(module), 1)},
        ("scheduler StepLR is of another optimizer",),
    ),
    (
        scheduled(lambda o: L.ReduceLROnPlateau(o, mode="max")),
        ("ReduceLROnPlateau has mode 'max'", "use mode='min'"),
    ),
    (
        scheduled(lambda o: [L.StepLR(o, 1), Wanting()]),
        ("scheduler Wanting: its step() wants 'metric'", "step this one yourself"),
    ),
]


@pytest.fixture
def run(rank_pool: RankPool) -> Callable[..., list[Any]]:
    """Run a case on a stage of two replicas and a last one."""
    ranks = Ranks(LOOPBACK, rank_pool)

    def on(case: Any, replicas: tuple[int, ...] = (2, 1), **tables: Any) -> list[Any]:
        connected = threading.Barrier(sum(replicas))

        def begin(comm: Handler) -> Any:
            connected.wait(20.0)  # or a rank that fails at once would fail another's connect
            return case(comm)

        return ranks.run(ranks.plan(replicas, tensors_of(SHAPES), **tables), begin)

    return on


def test_what_a_runner_cannot_be_made_of(run: Callable[..., Any]) -> None:
    def case(comm: Handler) -> None:
        for settings, words in MADE:
            module = build(SHAPES, comm.stage.index)
            arguments: dict[str, Any] = {"comm": comm, "module": module, "loss": cross_entropy}
            arguments |= settings(module)
            if comm.stage.index == 0 and "runner" in words[0]:
                continue  # only the last stage asks the loss
            with pytest.raises(UsageError) as caught:
                PipelineRunner(**arguments)
            for word in words:
                assert word in str(caught.value)

    run(case)


class Tempered(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output * self.t, target)


def test_a_loss_is_trained_on_the_last_stage(run: Callable[..., Any]) -> None:
    """Its parameters in another's optimizer would never get a gradient; and nobody's are told."""

    def case(comm: Handler) -> str:
        loss, module = Tempered(), build(SHAPES, comm.stage.index)
        if comm.stage.index == 0:
            both = [*module.parameters(), *loss.parameters()]
            with pytest.raises(UsageError) as caught:
                PipelineRunner(comm, module, loss=loss, optimizer=torch.optim.SGD(both))
        else:
            module.requires_grad_(requires_grad=False)
            with pytest.raises(UsageError) as caught:
                PipelineRunner(comm, module, loss=loss).train()
        return str(caught.value)

    first, _, last = run(case)
    assert "holds parameters of the loss, which is computed on stage 's1'" in first
    assert "has parameters to train: give the runner an optimizer" in last


class Lazy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.LazyLinear(6)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


def test_layers_without_a_shape(run: Callable[..., Any]) -> None:
    """They work where nothing has to look at their parameters before the first forward."""

    def case(comm: Handler) -> Any:
        if comm.stage.index:
            module: torch.nn.Module = build(SHAPES, 1, torch.float32)
            runner = PipelineRunner(comm, module, loss=cross_entropy, optimizer=sgd(module))
            return runner.train().items if comm.stage.ranks == (1,) else None
        module = Lazy()
        if comm.stage.replicas == 1:
            runner = PipelineRunner(comm, module, optimizer=sgd(module))
            return runner.train(make_batches([4], torch.float32)).items
        with pytest.raises(UsageError) as caught:
            PipelineRunner(comm, module, optimizer=sgd(module))
        return str(caught.value)

    assert "parameters without a shape yet (a lazy layer)" in run(case)[0]
    assert run(case, (1, 1)) == [4, 4]


def test_the_norm_of_stages_that_step_at_different_times(run: Callable[..., Any]) -> None:
    def case(comm: Handler) -> None:
        module = build(SHAPES, comm.stage.index)
        with pytest.raises(UsageError, match="the stages step at different times"):
            PipelineRunner(comm, module, loss=cross_entropy, optimizer=sgd(module), clip_norm=1.0)

    run(case, schedule="pipedream")


ALIKE: dict[str, dict[str, Any]] = {
    "clip_norm": {"clip_norm": 1.0},
    "reduction": {"reduction": "sum"},
    "metrics": {"metrics": {"m": cross_entropy}},
}


@pytest.mark.parametrize(
    ("name", "call", "schedule"),
    [
        ("clip_norm", "train", "1f1b"),
        ("reduction", "train", "pipedream"),
        ("reduction", "evaluate", "1f1b"),
        ("metrics", "evaluate", "1f1b"),
    ],
)
def test_what_ranks_must_give_alike(
    name: str, call: str, schedule: str, run: Callable[..., Any]
) -> None:
    """In the first batch or at the end of the first epoch, before any rank would wait for it."""

    def case(comm: Handler) -> str:
        settings = ALIKE[name] if comm.rank == 1 else {}
        module = build(SHAPES, comm.stage.index)
        runner = PipelineRunner(comm, module, loss=plain, optimizer=sgd(module), **settings)
        with pytest.raises(StagelinkError) as caught, comm:
            getattr(runner, call)(make_batches([4, 4]) if comm.stage.index == 0 else None)
        return str(caught.value)

    for found in run(case, schedule=schedule):
        assert f"the runner's {name} is " in found
        assert "here and something else on another rank" in found


def plain(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output, target)


# -- every argument by every wrong value

_SETTINGS: dict[str, Callable[[], Any]] = {
    "loss": lambda: cross_entropy,
    "optimizer": lambda: None,
    "reduction": lambda: "mean",
    "metrics": lambda: None,
    "progress": lambda: False,
    "clip_norm": lambda: None,
    "scheduler": lambda: None,
}


def test_every_argument_by_every_wrong_value(run: Callable[..., Any]) -> None:
    def case(comm: Handler) -> dict[str, str]:
        module = build(SHAPES, comm.stage.index)
        runner = PipelineRunner(comm, module, loss=cross_entropy, optimizer=sgd(module))
        made = {"comm": lambda: comm, "module": lambda: module, **_SETTINGS}
        state = {"state": runner.state_dict}
        calls = [
            Call("PipelineRunner", PipelineRunner, made),
            Call("load_state_dict", runner.load_state_dict, state),
        ]
        if comm.stage.index == 0:
            # Lists are batches, of which the first is refused when it is taken.
            batches, fits = {"batches": lambda: None}, {"an empty list", "a list of lists"}
            called = {"train": runner.train, "evaluate": runner.evaluate, "stream": runner.stream}
            calls += [Call(name, call, batches, fits) for name, call in called.items()]
        found = {
            words: complaint(functools.partial(call.function, **given))
            for call in calls
            for words, given in variants(call)
        }
        return {words: text for words, text in found.items() if text is not None}

    assert run(case) == [{}] * 3


# -- calls


BATCHES: list[Any] = [
    1,
    "batches",
    b"",
    torch.ones(2),
    {"x": torch.ones(2, 6), "target": torch.ones(2)},
    object(),
    abs,
]


def test_what_is_no_batches(run: Callable[..., Any]) -> None:
    """Refused before anything begins: the ranks are as they were, and train."""

    def case(comm: Handler) -> int:
        module = build(SHAPES, comm.stage.index)
        runner = PipelineRunner(comm, module, loss=cross_entropy, optimizer=sgd(module))
        first = comm.stage.index == 0
        for bad in BATCHES if first else ():
            for call in (runner.train, runner.evaluate, runner.stream):
                with pytest.raises(UsageError, match="must be an iterable of batches"):
                    call(bad)
        for call in (runner.train, runner.evaluate, runner.stream) if first else ():
            with pytest.raises(UsageError, match="'s0' receives nothing, so it needs batches"):
                call()
        with torch.no_grad(), pytest.raises(UsageError, match="was called under"):
            runner.train(make_batches([4]))
        with torch.inference_mode(), pytest.raises(UsageError, match="or inference_mode"):
            runner.train(make_batches([4]))
        runner.evaluate(make_batches([4]) if first else None)
        return runner.train(make_batches([4]) if first else None).items

    assert run(case) == [4] * 3


class Named(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = build(SHAPES, 0)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x=x)


GOOD = {"x": torch.ones(4, 6).double(), "target": torch.zeros(4, dtype=torch.int64)}

BATCH: dict[str, tuple[Any, str]] = {
    "none": (None, "a batch is a mapping from names to tensors"),
    "tensor": (torch.ones(2), "got a Tensor"),
    "empty": ({}, "the batch has no 'x'; it has nothing"),
    "unknown names": ({"y": torch.ones(4), "z": torch.ones(4)}, "no 'x'; it has 'y', 'z'"),
    "numbers for names": (
        {**GOOD, 1: torch.ones(4)},
        "are strings; one is a int",
    ),
    "no tensor": ({**GOOD, "x": 3}, "batch entry 'x' is a int, not a tensor"),
    "no items": ({"x": torch.ones(0, 6), "target": torch.ones(0)}, "a batch without items"),
    "no dimension": ({**GOOD, "target": torch.tensor(0)}, "'target' has no dimension"),
    "other sizes": ({**GOOD, "target": torch.zeros(3)}, "'x' has 4, 'target' has 3"),
}


@pytest.mark.parametrize(("bad", "text"), BATCH.values(), ids=BATCH)
def test_a_batch_that_cannot_be_cut(bad: Any, text: str, run: Callable[..., Any]) -> None:
    def case(comm: Handler) -> str:
        module: torch.nn.Module = build(SHAPES, 1) if comm.stage.index else Named()
        runner = PipelineRunner(comm, module, loss=cross_entropy, optimizer=sgd(module))
        with pytest.raises(StagelinkError) as caught, comm:
            runner.train([GOOD, bad] if comm.stage.index == 0 else None)
        return str(caught.value)

    for found in run(case):
        assert text in found


def test_states_that_do_not_fit(run: Callable[..., Any]) -> None:
    def case(comm: Handler) -> None:
        def runner_of(loss: Any, *, more: int = 0, scheduled: bool = False) -> PipelineRunner:
            module = build(SHAPES, comm.stage.index)
            tensors = [torch.ones(2, requires_grad=True) for _ in range(more)]
            optimizer = torch.optim.SGD([*module.parameters(), *tensors])
            scheduler = L.StepLR(optimizer, 1) if scheduled else None
            return PipelineRunner(
                comm, module, loss=loss, optimizer=optimizer, scheduler=scheduler
            )

        plain, learnt = runner_of(cross_entropy), runner_of(Tempered())
        state = plain.state_dict()
        last = comm.stage.index == 1
        refused: list[tuple[Any, str]] = [
            (None, "a state is the mapping that state_dict"),
            ([], "got a list"),
            ({}, "this is no state of a runner: it has no 'stage', 'module'"),
            ({**state, "module": {}}, "the module of stage 's"),
            ({**state, "module": 1}, "does not take this state"),
            ({**state, "optimizer": {}}, "the optimizer of stage 's"),
            ({**state, "optimizer": [state["optimizer"]] * 2}, "has 2 optimizers, the runner 1"),
            (runner_of(cross_entropy, scheduled=True).state_dict(), "has a scheduler, the runner"),
            (runner_of(cross_entropy, more=1).state_dict(), "tensors of shapes []; in the state"),
            ({**state, "others": None}, "'others' in a state is a list of tensors; got None"),
            ({**state, "others": [1]}, "is a list of tensors; got [1]"),
            (
                {**state, "stage": Hostile()},
                "this is the state of stage <tests.sweep.values.Hostile object",
            ),
            *([(learnt.state_dict(), "the state of stage 's1' has a loss")] * last),
        ]
        for bad, text in refused:
            with pytest.raises(UsageError) as caught:
                plain.load_state_dict(bad)
            assert text in str(caught.value)
        if last:
            with pytest.raises(UsageError, match="the runner of stage 's1' has a loss that keeps"):
                learnt.load_state_dict(state)
        weighted = runner_of(torch.nn.CrossEntropyLoss(torch.ones(3)))
        assert weighted.state_dict()["loss"] is None  # class weights are a setting
        weighted.load_state_dict(state)
        for key in ("loss", "others"):  # as states of before were
            del state[key]
        learnt.load_state_dict(state)

    run(case)


def test_what_has_no_state(run: Callable[..., Any]) -> None:
    class Bare:
        def __init__(self, module: torch.nn.Module) -> None:
            self.param_groups = [{"params": list(module.parameters())}]

        def zero_grad(self, *, set_to_none: bool) -> None:
            raise NotImplementedError

        def step(self) -> None:
            raise NotImplementedError

    def case(comm: Handler) -> None:
        module = build(SHAPES, comm.stage.index)
        optimizer: Any = Bare(module)
        runner = PipelineRunner(comm, module, loss=cross_entropy, optimizer=optimizer)
        with pytest.raises(UsageError, match="optimizer Bare has no state_dict"):
            runner.state_dict()

    run(case)


# -- a batch norm that is left alone with one item


class Normed(torch.nn.Module):
    def __init__(self, stage: int) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6, dtype=torch.float64)
        self.inner = build(SHAPES, stage)

    def forward(self, **tensors: torch.Tensor) -> Any:
        return self.inner(**{name: self.norm(tensor) for name, tensor in tensors.items()})


@pytest.mark.parametrize(
    ("schedule", "stage", "text"),
    [
        ("1f1b", 0, "microbatch 1 has one item, since a batch of 3 is cut into 2 microbatches"),
        ("1f1b", 1, "microbatch 1 has one item, since a batch of 3 is cut into 2 microbatches"),
        ("pipedream", 0, "microbatch 3 has one item, since batches are cut into 2 microbatches"),
        ("pipedream", 1, "microbatch 3 has one item, since batches are cut into 2 microbatches"),
    ],
)
def test_a_batch_norm_says_which_cut_left_it_one_item(
    schedule: str, stage: int, text: str, run: Callable[..., Any]
) -> None:
    def case(comm: Handler) -> str:
        own = comm.stage.index
        module = Normed(stage) if own == stage else build(SHAPES, own)
        runner = PipelineRunner(comm, module, loss=cross_entropy, optimizer=sgd(module))
        with pytest.raises(StagelinkError) as caught, comm:
            runner.train(make_batches([4, 3]) if own == 0 else None)
        return str(caught.value)

    for found in run(case, (1, 1), schedule=schedule, microbatches=2):
        assert "Expected more than 1 value per channel" in found
        assert text in found


class Raising(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        raise ValueError(f"not with {len(x)}")


def test_another_error_of_one_item_is_left_alone(run: Callable[..., Any]) -> None:
    def case(comm: Handler) -> str:
        own = comm.stage.index
        runner = PipelineRunner(comm, build(SHAPES, 1) if own else Raising(), loss=cross_entropy)
        with pytest.raises((ValueError, StagelinkError)) as caught, comm:
            runner.evaluate(make_batches([1]) if own == 0 else None)
        return f"{type(caught.value).__name__}: {caught.value}"

    assert run(case, (1, 1))[0] == "ValueError: not with 1"
