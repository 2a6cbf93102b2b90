"""Epochs from outside: what goes in, what comes out, and how they fail."""

from __future__ import annotations

import copy
import math
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stagelink import AbortedError, PipelineRunner, StagelinkError, UsageError
from tests.runner.models import (
    accuracy,
    build,
    largest_difference,
    line,
    make_batches,
    quick_sgd,
    run_stages,
    tensors_of,
    train_alone,
    weights,
)
from tests.support.pipelines import LOOPBACK, Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stagelink import Handler
    from stagelink.testing import RankPool

SHAPES = line(2)
cross_entropy = torch.nn.functional.cross_entropy

Batches = list[dict[str, torch.Tensor]]


@pytest.fixture
def pipeline(rank_pool: RankPool) -> Callable[..., list[Any]]:
    """Run a case on two replicas that feed one rank: ``pipeline(case, *args, key=value)``."""
    ranks = Ranks(LOOPBACK, rank_pool)

    def run(case: Any, *args: Any, **keys: Any) -> list[Any]:
        connected = threading.Barrier(3)

        def begin(comm: Handler) -> Any:
            connected.wait(20.0)  # or a rank that fails at once would fail another's connect
            return case(comm, *args)

        tables = {"microbatches": 4, **keys}
        return ranks.run(ranks.plan((2, 1), tensors_of(SHAPES), **tables), begin)

    return run


def runner_of(comm: Handler, module: torch.nn.Module | None = None, **more: Any) -> PipelineRunner:
    module = build(SHAPES, comm.stage.index) if module is None else module
    settings = {"loss": cross_entropy, "optimizer": quick_sgd(module), **more}
    return PipelineRunner(comm, module, **settings)


def own(comm: Handler, batches: Batches) -> Batches | None:
    return batches if comm.stage.index == 0 else None


# -- evaluation


def evaluate(comm: Handler, sizes: list[int], reduction: Any) -> dict[str, float]:
    loss = torch.nn.CrossEntropyLoss(reduction=reduction)
    runner = runner_of(comm, loss=loss, reduction=reduction, metrics={"accuracy": accuracy})
    return runner.evaluate(own(comm, make_batches(sizes)))


@pytest.mark.parametrize(
    ("reduction", "schedule"), [("mean", "1f1b"), ("sum", "gpipe"), ("mean", "forward")]
)
def test_evaluation_is_that_of_all_items_on_every_rank(
    reduction: str, schedule: str, pipeline: Callable[..., Any]
) -> None:
    sizes = [7, 3, 10]
    results = pipeline(evaluate, sizes, reduction, schedule=schedule)
    together = {
        name: torch.cat([batch[name] for batch in make_batches(sizes)]) for name in ("x", "target")
    }
    output = run_stages([build(SHAPES, stage) for stage in range(2)], together)
    target = together["target"]
    assert results[0] == pytest.approx(
        {
            "loss": cross_entropy(output, target, reduction=reduction).item(),
            "accuracy": accuracy(output, target).item(),
        }
    )
    assert results == results[:1] * 3


def test_no_batches_are_no_error(pipeline: Callable[..., Any]) -> None:
    def case(comm: Handler) -> tuple[Any, Any]:
        runner = runner_of(comm, metrics={"accuracy": accuracy})
        return runner.train(own(comm, [])), runner.evaluate(own(comm, []))

    for summary, results in pipeline(case):
        assert math.isnan(summary.loss)
        assert (summary.items, summary.batches) == (0, 0)
        assert set(results) == {"loss", "accuracy"}
        assert all(map(math.isnan, results.values()))


def test_modes_are_as_they_were_before(pipeline: Callable[..., Any]) -> None:
    class Watching(torch.nn.Module):
        def __init__(self, stage: int) -> None:
            super().__init__()
            self.toy = build(SHAPES, stage)
            self.frozen = torch.nn.Dropout().eval()
            self.seen: list[tuple[bool, bool]] = []

        def forward(self, **tensors: torch.Tensor) -> Any:
            self.seen.append((self.training or self.toy.training, torch.is_grad_enabled()))
            return self.toy(**tensors)

    def case(comm: Handler) -> Any:
        module = Watching(comm.stage.index)
        runner = runner_of(comm, module)
        runner.evaluate(own(comm, make_batches([4])))
        after = [part.training for part in (module, module.toy, module.frozen)]
        runner.train(own(comm, make_batches([4])))
        return module.seen, after

    for seen, after in pipeline(case):
        half = len(seen) // 2
        assert seen == [(False, False)] * half + [(True, True)] * half
        assert after == [True, True, False]


def test_training_and_evaluation_alternate_with_any_sizes(pipeline: Callable[..., Any]) -> None:
    rounds = [([8, 3], [2]), ([1], [9, 9]), ([5, 12, 2], [1])]

    def case(comm: Handler) -> Any:
        module = build(SHAPES, comm.stage.index)
        runner = runner_of(comm, module)
        results = []
        for train, held_out in rounds:
            runner.train(own(comm, make_batches(train)))
            results.append(runner.evaluate(own(comm, make_batches(held_out)))["loss"])
        return comm.stage.index, results, weights(module)

    alone = [build(SHAPES, stage) for stage in range(2)]
    optimizers = [quick_sgd(module) for module in alone]
    expected = []
    for train, held_out in rounds:
        train_alone(alone, make_batches(train), 4, optimizers=optimizers)
        expected.append(mean_loss(alone, make_batches(held_out)))
    for stage, results, found in pipeline(case):
        assert results == pytest.approx(expected)
        assert largest_difference(found, weights(alone[stage])) <= 1e-12


def mean_loss(modules: list[Any], batches: Batches) -> float:
    total = sum(
        cross_entropy(run_stages(modules, batch), batch["target"], reduction="sum").item()
        for batch in batches
    )
    return total / sum(len(batch["x"]) for batch in batches)


# -- training


def test_a_sum_is_not_scaled(pipeline: Callable[..., Any]) -> None:
    def case(comm: Handler) -> tuple[int, dict[str, torch.Tensor], float]:
        module = build(SHAPES, comm.stage.index)
        loss = torch.nn.CrossEntropyLoss(reduction="sum")
        summary = runner_of(comm, module, loss=loss, reduction="sum").train(
            own(comm, make_batches([7]))
        )
        return comm.stage.index, weights(module), summary.loss

    alone = [build(SHAPES, stage) for stage in range(2)]
    (batch,) = make_batches([7])
    loss = cross_entropy(run_stages(alone, batch), batch["target"], reduction="sum")
    loss.backward()
    for module in alone:
        quick_sgd(module).step()
    for stage, found, total in pipeline(case):
        assert largest_difference(found, weights(alone[stage])) <= 1e-12
        assert total == pytest.approx(loss.item())


def test_the_summary_says_where_the_time_went(pipeline: Callable[..., Any]) -> None:
    def case(comm: Handler) -> Any:
        return runner_of(comm).train(own(comm, make_batches([8, 8])))

    summaries = pipeline(case)
    assert summaries == summaries[:1] * 3
    summary = summaries[0]
    assert (summary.items, summary.batches) == (16, 2)
    assert list(summary.shares) == ["s0", "s1"]
    for share in summary.shares.values():
        parts = (share.computing, share.waiting, share.sending)
        assert all(part > 0 for part in parts)
        assert sum(parts) <= 1
    assert str(summary).splitlines()[0].startswith("loss ")
    assert str(summary).count("computing") == 2


def test_batches_on_later_stages_are_not_touched(pipeline: Callable[..., Any]) -> None:
    def case(comm: Handler) -> bool:
        source = iter(make_batches([4]))
        runner = runner_of(comm)
        runner.train(source)
        return next(source, None) is None

    assert pipeline(case) == [True, True, False]


def test_state_goes_round(pipeline: Callable[..., Any]) -> None:
    def case(comm: Handler) -> float:
        def fresh() -> tuple[torch.nn.Module, PipelineRunner]:
            module = build(SHAPES, comm.stage.index)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            return module, runner_of(comm, module, optimizer=optimizer)

        module, runner = fresh()
        runner.train(own(comm, make_batches([6, 6])))
        state = copy.deepcopy(runner.state_dict())
        other_module, other = fresh()
        other.load_state_dict(state)
        runner.train(own(comm, make_batches([5])))
        other.train(own(comm, make_batches([5])))
        return largest_difference(weights(module), weights(other_module))

    assert pipeline(case) == [0.0] * 3


def test_a_state_of_something_else_is_refused(pipeline: Callable[..., Any]) -> None:
    def case(comm: Handler) -> list[str]:
        module = build(SHAPES, comm.stage.index)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        full = runner_of(comm, module, optimizer=optimizer)
        bare = runner_of(comm, module, optimizer=None)
        foreign = full.state_dict() | {"stage": "s7"}
        texts = []
        for runner, state in [
            (full, foreign),
            (full, bare.state_dict()),
            (bare, full.state_dict()),
        ]:
            with pytest.raises(UsageError) as caught:
                runner.load_state_dict(state)
            texts.append(str(caught.value))
        return texts

    foreign, without, surplus = pipeline(case)[2]
    assert foreign == ("rank 2: this is the state of stage 's7'; the rank holds stage 's1'")
    assert without == "rank 2: the runner of stage 's1' has an optimizer, the state has none"
    assert surplus == "rank 2: the state of stage 's1' has an optimizer, the runner has none"


def test_a_bar_on_rank_0_and_nothing_else(
    pipeline: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    def case(comm: Handler) -> None:
        runner = runner_of(comm, progress=True)
        runner.train(own(comm, make_batches([4, 4, 4])))
        runner.evaluate(own(comm, make_batches([4])))

    pipeline(case)
    out, err = capfd.readouterr()
    assert out == ""
    assert "train: 100%" in err
    assert "3/3" in err
    assert "evaluate: 100%" in err
    assert err.count("train:   0%") == 1  # each bar begins once; it may be drawn again as it goes


def test_without_progress_nothing_is_printed(
    pipeline: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    def case(comm: Handler) -> None:
        runner_of(comm).train(own(comm, make_batches([4])))

    pipeline(case)
    assert capfd.readouterr() == ("", "")


# -- failures


def test_an_error_in_the_module_reaches_every_rank(pipeline: Callable[..., Any]) -> None:
    class Broken(torch.nn.Module):
        def forward(self, h0: torch.Tensor) -> torch.Tensor:
            del h0
            raise ArithmeticError("the user's own mistake")

    texts: dict[int, tuple[type, str]] = {}

    def case(comm: Handler) -> None:
        module = Broken() if comm.rank == 2 else None
        try:
            with comm:
                runner_of(comm, module).train(own(comm, make_batches([8, 8])))
        except Exception as error:
            texts[comm.rank] = (type(error), str(error))

    began = time.monotonic()
    pipeline(case)
    assert time.monotonic() - began < 10
    assert texts[2] == (ArithmeticError, "the user's own mistake")
    for rank in (0, 1):
        kind, text = texts[rank]
        assert kind is AbortedError
        assert "rank 2" in text
        assert "ArithmeticError: the user's own mistake" in text


def test_an_error_of_the_batches_reaches_every_rank(rank_pool: RankPool) -> None:
    def batches() -> Iterator[dict[str, torch.Tensor]]:
        yield from make_batches([8])
        raise OSError("the disk is gone")

    texts = {}

    def case(comm: Handler) -> None:
        source = batches() if comm.stage.index == 0 else None
        try:
            with comm:
                runner_of(comm).train(source)
        except (OSError, StagelinkError) as error:
            texts[comm.rank] = str(error)

    ranks = Ranks(LOOPBACK, rank_pool)
    ranks.run(ranks.plan((1, 1), tensors_of(SHAPES)), case)
    assert texts[0] == "the disk is gone"
    assert "OSError: the disk is gone" in texts[1]


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ([torch.ones(2, 6), torch.ones(2)], "got a list"),
        ({"x": torch.ones(2, 6).double()}, "must return a mapping for 'h0', 'target'"),
        ({"x": torch.ones(2, 6), "target": torch.ones(3)}, "'x' has 2, 'target' has 3"),
        ({"x": torch.ones(0, 6), "target": torch.ones(0)}, "a batch without items"),
        ({"x": torch.ones(2, 6), "target": torch.tensor(1)}, "'target' has no dimension"),
        ({"x": torch.ones(2, 6), "target": [0, 1]}, "'target' is a list, not a tensor"),
    ],
)
def test_a_batch_that_is_none(bad: Any, text: str, pipeline: Callable[..., Any]) -> None:
    def case(comm: Handler) -> str:
        with pytest.raises(StagelinkError) as caught, comm:
            runner_of(comm).train(own(comm, [bad]))
        return str(caught.value)

    for found in pipeline(case):
        assert text in found


def test_batches_are_needed_where_nothing_is_received(pipeline: Callable[..., Any]) -> None:
    def case(comm: Handler) -> str:
        with pytest.raises(StagelinkError) as caught, comm:
            runner_of(comm).train()
        return str(caught.value)

    texts = pipeline(case)
    assert all("stage 's0' receives nothing, so it needs batches" in text for text in texts)


def test_what_cannot_be_trained_says_so(pipeline: Callable[..., Any]) -> None:
    def case(comm: Handler) -> str:
        with pytest.raises(UsageError) as caught:
            runner_of(comm, optimizer=None).train(own(comm, make_batches([2])))
        return str(caught.value)

    assert "give the runner an optimizer" in pipeline(case)[0]
    assert "can only evaluate" in pipeline(case, schedule="forward")[0]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"reduction": "none"}, "reduction 'none': must be one of ('mean', 'sum')"),
        (
            {"loss": torch.nn.MSELoss(reduction="sum")},
            "the loss has reduction 'sum', the runner 'mean': give the runner reduction='sum', or "
            "let the loss make one number of its items by reduction='mean'",
        ),
        ({"metrics": {"loss": accuracy}}, "metric 'loss': the name is taken"),
    ],
)
def test_settings_that_do_not_fit(
    settings: dict[str, Any], text: str, pipeline: Callable[..., Any]
) -> None:
    def case(comm: Handler) -> str | None:
        if comm.rank != 2:
            return None
        with pytest.raises(UsageError) as caught:
            runner_of(comm, **settings)
        return str(caught.value)

    assert text in pipeline(case)[2]


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda output, target: cross_entropy(output, target, reduction="none"), "got shape (2,)"),
        (lambda output, target: 1.0, "got 1.0"),
    ],
    ids=["many", "float"],
)
def test_a_loss_that_is_not_one_number(loss: Any, text: str, pipeline: Callable[..., Any]) -> None:
    def case(comm: Handler) -> str:
        with pytest.raises(StagelinkError) as caught, comm:
            runner_of(comm, loss=loss).train(own(comm, make_batches([8])))
        return str(caught.value)

    for found in pipeline(case):
        assert "the loss must be a tensor with one element" in found
        assert text in found


def test_a_hand_driven_first_stage_must_say_the_items(pipeline: Callable[..., Any]) -> None:
    def by_hand(comm: Handler) -> None:
        with comm.train(microbatches=2) as session:
            for microbatch in session.mine:
                session.send("h0", torch.ones(1, 6, requires_grad=True), microbatch)
                session.recv_grad("h0", microbatch)

    def case(comm: Handler) -> str:
        with pytest.raises(StagelinkError) as caught, comm:
            runner_of(comm).train() if comm.stage.index else by_hand(comm)
        return str(caught.value)

    assert "nobody said how many items session 0 has" in pipeline(case)[2]


# -- between batches


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("loss", [cross_entropy, torch.nn.MSELoss()], ids=["counts", "mean"])
def test_a_first_stage_begins_a_batch_while_the_last_one_steps(
    loss: Any, clip_norm: float | None, pipeline: Callable[..., Any]
) -> None:
    """Between batches no rank waits for another but by what they reduce before they step."""
    began = [threading.Event(), threading.Event()]

    class Noting(torch.nn.Module):
        def __init__(self, replica: int) -> None:
            super().__init__()
            self.toy = build(SHAPES, 0)
            self.replica = replica
            self.forwards = 0

        def forward(self, **tensors: torch.Tensor) -> Any:
            self.forwards += 1
            if self.forwards > 2:  # a batch of four microbatches has two here
                began[self.replica].set()
            return self.toy(**tensors)

    class Waiting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            assert all(event.wait(20) for event in began), "the first stage waits for this step"
            return super().step(closure)

    def case(comm: Handler) -> int:
        last = comm.stage.index == 1
        module = build(SHAPES, 1) if last else Noting(comm.replica)
        optimizer = Waiting(module.parameters(), lr=0.1) if last else quick_sgd(module)
        batches = make_batches([8, 8])
        if loss is not cross_entropy:
            for batch in batches:
                batch["target"] = torch.zeros(8, 3, dtype=torch.float64)
        settings = {"loss": loss, "optimizer": optimizer, "clip_norm": clip_norm}
        return runner_of(comm, module, **settings).train(own(comm, batches)).batches

    assert pipeline(case) == [2, 2, 2]
