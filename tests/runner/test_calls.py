"""How a stage's module is called: by position, through wrappers, on tensors it may write to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tqdm import tqdm

from stagelink import PipelineRunner, Plan, Session
from tests.runner.models import CLASSES, WIDTH, fill, largest_difference, quick_sgd, weights
from tests.support.pipelines import GLOO, INLINE, LOOPBACK, SHM, WIRES, Document, Ranks, tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stagelink import Handler
    from stagelink.testing import RankPool

Build = "Callable[[int], torch.nn.Module]"
MICROBATCHES = 4


def batches(count: int = 2, **more: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "x": torch.randn(8, WIDTH, generator=generator, dtype=torch.float64),
            "target": torch.randint(CLASSES, (8,), generator=generator),
            **{name: value.clone() for name, value in more.items()},
        }
        for _ in range(count)
    ]


@dataclass
class Found:
    """What a rank has after two batches and an evaluation."""

    stage: int
    weights: dict[str, torch.Tensor]
    loss: float
    evaluated: dict[str, float]
    noted: list[Any] = field(default_factory=list)


def train(
    comm: Handler, build: Callable[[int], torch.nn.Module], data: list[dict[str, torch.Tensor]]
) -> Found:
    module = build(comm.stage.index)
    runner = PipelineRunner(
        comm,
        module,
        loss=torch.nn.functional.cross_entropy,
        optimizer=quick_sgd(module),
    )
    mine = data if comm.stage.index == 0 else None
    loss = runner.train(mine).loss
    evaluated = runner.evaluate(mine)
    return Found(comm.stage.index, weights(module), loss, evaluated, getattr(module, "noted", []))


def linear(width: int, seed: int) -> torch.nn.Linear:
    made = torch.nn.Linear(WIDTH, width, dtype=torch.float64)
    fill(made, seed)
    return made


def alone(
    modules: Sequence[torch.nn.Module],
    forward: Callable[[dict[str, torch.Tensor]], torch.Tensor],
    data: list[dict[str, torch.Tensor]],
) -> tuple[float, float]:
    """One process's two batches, and the loss before each step and after the last."""
    optimizers = [quick_sgd(module) for module in modules]
    losses = []
    for batch in data:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        value = torch.nn.functional.cross_entropy(forward(batch), batch["target"])
        value.backward()
        losses.append(value.item())
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        after = [torch.nn.functional.cross_entropy(forward(b), b["target"]).item() for b in data]
    return sum(losses) / len(losses), sum(after) / len(after)


def check(
    ranks: list[Found], modules: Sequence[torch.nn.Module], losses: tuple[float, float]
) -> None:
    for found in ranks:
        want = weights(modules[found.stage])
        plain = {name.removeprefix("_orig_mod."): value for name, value in found.weights.items()}
        assert largest_difference(plain, want) < 1e-12
        assert found.loss == pytest.approx(losses[0], rel=1e-9)
        assert found.evaluated["loss"] == pytest.approx(losses[1], rel=1e-9)


# -- three stages of one tensor each, whatever it is called

SEQUENTIAL = [tensor("hidden", 0, 1), tensor("deep", 1, 2), tensor("target", 0, 2)]


def sequential(stage: int) -> torch.nn.Module:
    width = CLASSES if stage == 2 else WIDTH
    return torch.nn.Sequential(linear(width, stage), torch.nn.Tanh())


def through(modules: Sequence[torch.nn.Module], value: torch.Tensor) -> torch.Tensor:
    for module in modules:
        value = module(value)
    return value


def microbatched(
    modules: Sequence[torch.nn.Module],
) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    """One process's forward, which sees the microbatches one by one."""

    def forward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = batch["x"].tensor_split(MICROBATCHES)
        return torch.cat([through(modules, part) for part in parts])

    return forward


def check_line(ranks: list[Found], modules: Sequence[torch.nn.Module]) -> None:
    check(ranks, modules, alone(modules, microbatched(modules), batches()))


def test_stages_that_are_sequential(rank_pool: RankPool) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((2, 1, 1), SEQUENTIAL, microbatches=MICROBATCHES)
    check_line(ranks.run(plan, train, sequential, batches()), [*map(sequential, range(3))])


# -- a compiled stage that takes a mask and passes it on

MASKED = [tensor("h", 0, 1), tensor("mask", 0, 1, grad=False), tensor("target", 0, 1)]


class Masked(torch.nn.Module):
    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        self.map = linear(width, seed)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, self.map(hidden).tanh(), 0.1)


def masked(stage: int) -> torch.nn.Module:
    return Masked(CLASSES if stage else WIDTH, stage)


def compiled_masked(stage: int) -> Any:
    return torch.compile(masked(stage), backend=["eager", "aot_eager"][stage])


# Asked of a tensor with a graph behind it, as inside one process, dynamo hides this by a filter
# of its own, which that of the tests precedes.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_compiled_stages_that_take_a_mask_and_pass_it_on(
    schedule: str, rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # dynamo's bar would leave a thread behind
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((1, 1), MASKED, microbatches=MICROBATCHES, schedule=schedule)
    plan["stages"][0]["arguments"] = {"x": "hidden"}
    plan["stages"][1]["arguments"] = {"h": "hidden"}
    data = batches(mask=torch.arange(8)[:, None] % 3 != 1)
    found = ranks.run(plan, train, compiled_masked, data)
    if schedule == "1f1b":
        modules = [masked(stage) for stage in range(2)]

        def forward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            first, second = modules
            return second(first(batch["x"], batch["mask"]), batch["mask"])  # type: ignore[no-any-return]

        check(found, modules, alone(modules, forward, data))
    for one, plain in zip(found, ranks.run(plan, train, masked, data), strict=True):
        named = {name.removeprefix("_orig_mod."): value for name, value in one.weights.items()}
        assert largest_difference(named, plain.weights) < 1e-12
        assert one.evaluated == pytest.approx(plain.evaluated, rel=1e-9)


# -- stages that begin in place


class Begins(torch.nn.Module):
    """Begins by changing what it is given, or by the same without."""

    def __init__(self, how: str, stage: int, *, inplace: bool) -> None:
        super().__init__()
        self.how = how
        self.inplace = inplace
        self.map = linear(CLASSES if stage == 2 else WIDTH, stage)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.inplace:
            input = input.clone()
        if self.how == "relu":
            input = torch.nn.functional.leaky_relu(input, 0.3, inplace=True)
        elif self.how == "add":
            input += 0.5
            input[0].mul_(2)
        elif self.how == "dropout":  # its choice is a function of the values
            input.mul_(input.detach() < 0.7)
        result: torch.Tensor = self.map(input).tanh()
        return result


def begins(how: str, stage: int) -> torch.nn.Module:
    # The first stage would change the batches themselves, as it would in one process.
    return Begins(how, stage, inplace=stage > 0)


def begins_plainly(how: str, stage: int) -> torch.nn.Module:
    return Begins(how, stage, inplace=False)


def train_all(comm: Handler, build: Callable[[str, int], torch.nn.Module]) -> list[Found]:
    return [
        train(comm, lambda stage, how=how: build(how, stage), batches())  # type: ignore[misc]
        for how in ("relu", "add", "dropout")
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "pipedream", "pipedream_2bw"])
@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1, 2)], ids=str)
def test_a_stage_may_begin_in_place(
    schedule: str, replicas: tuple[int, ...], rank_pool: RankPool
) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan(replicas, SEQUENTIAL, microbatches=MICROBATCHES, schedule=schedule)
    found, plain = (ranks.run(plan, train_all, build) for build in (begins, begins_plainly))
    for one, other in zip(found, plain, strict=True):
        for here, there in zip(one, other, strict=True):
            assert largest_difference(here.weights, there.weights) == 0.0
            assert here.evaluated == there.evaluated
            assert largest_difference(here.weights, weights(begins("add", here.stage))) > 1e-3


@pytest.mark.parametrize("wire", [SHM, GLOO], ids=str)
def test_both_on_processes(wire: Any, rank_pool: RankPool) -> None:
    ranks = Ranks(wire, rank_pool)
    plan = ranks.plan((1, 1, 1), SEQUENTIAL, microbatches=MICROBATCHES)
    found = ranks.run(plan, train_both)
    check_line([one for one, _ in found], [*map(sequential, range(3))])
    check_line([two for _, two in found], [begins_plainly("add", stage) for stage in range(3)])


def train_both(comm: Handler) -> tuple[Found, Found]:
    in_place = train(comm, lambda stage: begins("add", stage), batches())
    return train(comm, sequential, batches()), in_place


# -- scripted and traced stages


def scripted(stage: int) -> Any:
    module = sequential(stage)
    if stage == 1:
        return torch.jit.trace(module, torch.ones(2, WIDTH, dtype=torch.float64))
    return torch.jit.script(module)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_stages_that_are_scripted_or_traced(rank_pool: RankPool) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((1, 1, 1), SEQUENTIAL, microbatches=MICROBATCHES)
    check_line(ranks.run(plan, train, scripted, batches()), [*map(sequential, range(3))])
    plan["pipeline"]["schedule"] = "pipedream"
    ends = ranks.run_to_ends(plan, train, scripted, batches())
    assert "UsageError" in [end.kind for end in ends]
    for end in ends:
        assert "which a scripted or traced module cannot be given" in end.text


# -- one tensor for two stages, each of which changes it

TWICE = [
    tensor("hidden", 0, 1, 2),
    tensor("deep", 1, 2),
    tensor("target", 0, 2),
]


class Changes(torch.nn.Module):
    """Adds to what it is given, in place where that is asked for."""

    def __init__(self, stage: int, *, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace and stage > 0
        self.stage = stage
        self.map = linear(CLASSES if stage == 2 else WIDTH, stage)

    def forward(self, hidden: torch.Tensor, deep: torch.Tensor | None = None) -> torch.Tensor:
        if not self.inplace:
            hidden, deep = hidden.clone(), None if deep is None else deep.clone()
        hidden += self.stage
        if deep is not None:
            hidden *= deep.sigmoid_()
        result: torch.Tensor = self.map(hidden).tanh()
        return result


def changes(stage: int) -> torch.nn.Module:
    return Changes(stage, inplace=True)


def changes_nothing(stage: int) -> torch.nn.Module:
    return Changes(stage, inplace=False)


def train_changing(comm: Handler) -> tuple[Found, Found]:
    return train(comm, changes, batches()), train(comm, changes_nothing, batches())


@pytest.mark.parametrize("wire", [*WIRES, *INLINE], ids=str)
def test_two_stages_may_change_one_tensor(wire: Any, rank_pool: RankPool) -> None:
    ranks = Ranks(wire, rank_pool)
    plan = ranks.plan((1, 1, 2), TWICE, microbatches=MICROBATCHES)
    plan["stages"][0]["arguments"] = {"x": "hidden"}
    for here, there in ranks.run(plan, train_changing):
        assert largest_difference(here.weights, there.weights) == 0.0
        assert here.evaluated == there.evaluated


# -- stages without anything of their own


def idle(stage: int) -> torch.nn.Module:
    return torch.nn.Identity() if stage == 1 else sequential(stage)


def relu(stage: int) -> torch.nn.Module:
    return torch.nn.ReLU() if stage == 1 else sequential(stage)


def relu_in_place(stage: int) -> torch.nn.Module:
    return torch.nn.ReLU(inplace=True) if stage == 1 else sequential(stage)


def train_each(comm: Handler) -> list[Found]:
    return [train(comm, build, batches()) for build in (idle, relu, relu_in_place)]


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_stage_may_give_back_what_it_was_given(schedule: str, rank_pool: RankPool) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((2, 1, 1), SEQUENTIAL, microbatches=MICROBATCHES, schedule=schedule)
    same, plain, in_place = zip(*ranks.run(plan, train_each), strict=True)
    for here, there in zip(in_place, plain, strict=True):
        assert largest_difference(here.weights, there.weights) == 0.0
        assert here.evaluated == there.evaluated
    if schedule == "1f1b":
        check_line([*same], [*map(idle, range(3))])
        check_line([*plain], [*map(relu, range(3))])


# -- a gradient that autograd gives to two


class Shares(torch.nn.Module):
    """Both the received tensor and a parameter come behind a view: autograd makes one gradient.

    The next microbatch's is then added to the parameter's in place.
    """

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2, WIDTH), 0.1, dtype=torch.float64))
        self.map = linear(CLASSES if stage == 2 else WIDTH, stage)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        moved = input.view(-1) + self.weight.view(-1)
        result: torch.Tensor = self.map(moved.view(-1, WIDTH).tanh())
        return result


def test_a_gradient_under_way_is_not_added_to(
    rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = set()

    class Watched(Session):
        def send_grad(self, *args: Any, copy: bool = True) -> Any:
            copied.add(copy)
            return super().send_grad(*args, copy=copy)

    monkeypatch.setattr("stagelink.exchange.handler.session_class", lambda: Watched)
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((1, 1, 1), SEQUENTIAL, microbatches=MICROBATCHES, schedule="gpipe")
    for build, copies in ((Shares, True), (sequential, False)):
        check_line(ranks.run(plan, train, build, batches()), [build(stage) for stage in range(3)])
        assert (True in copied) is copies
        copied.clear()


# -- hooks


class Hooked(torch.nn.Module):
    """Notes what its hooks are given."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.map = linear(CLASSES if stage else WIDTH, stage)
        self.noted: list[Any] = []
        self.register_forward_pre_hook(self._before)
        if stage:  # torch warns where no input requires a gradient
            self.register_full_backward_hook(self._after)

    def _before(self, module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        del module
        self.noted.append(("args", len(args)))
        return (args[0] * 2, *args[1:])

    def _after(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        del module, outputs
        self.noted.append(("gradients", [one is not None and tuple(one.shape) for one in inputs]))

    def forward(self, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, self.map(h), 0.1)


def test_hooks_get_the_arguments_that_they_are_used_to(rank_pool: RankPool) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((1, 1), MASKED, microbatches=1)
    plan["stages"][0]["arguments"] = {"x": "h"}
    data = batches(1, mask=torch.ones(8, 1, dtype=torch.bool))
    found = ranks.run(plan, train, Hooked, data)
    modules = [Hooked(stage) for stage in range(2)]

    def forward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return modules[1](modules[0](batch["x"], batch["mask"]), batch["mask"])  # type: ignore[no-any-return]

    check(found, modules, alone(modules, forward, data))
    assert found[1].noted == modules[1].noted
    assert ("gradients", (8, WIDTH)) in [
        (what, of and of[0]) for what, of in found[1].noted if what != "args"
    ]


# -- inference


def streamed(comm: Handler, build: Callable[[int], torch.nn.Module]) -> list[torch.Tensor]:
    runner = PipelineRunner(comm, build(comm.stage.index))
    mine = [{"x": b["x"]} for b in batches()] if comm.stage.index == 0 else None
    return [output.value for output in runner.stream(mine)]


def test_a_stream_calls_them_alike(rank_pool: RankPool) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    plan: Document = ranks.plan((1, 1, 1), SEQUENTIAL, microbatches=2)
    assert Plan.from_dict(plan).stages[0].arguments == {}
    *_, last = ranks.run(plan, streamed, sequential)
    modules = [sequential(stage) for stage in range(3)]
    want = torch.cat([through(modules, batch["x"]) for batch in batches()])
    assert torch.equal(torch.cat(last), want.detach())
