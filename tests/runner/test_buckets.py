"""Gradients of replicas are added in buckets while the last backward goes on."""

from __future__ import annotations

import os
import re
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from stagelink import BackwardDone, PipelineRunner, StagelinkError
from stagelink.runner import gradients, replicas
from stagelink.runner.replicas import ReplicaGroup
from tests.runner.models import CLASSES, WIDTH, fill, make_batches, quick_sgd
from tests.support.pipelines import GLOO, LOOPBACK, Document, Ranks, document, start_fresh

if TYPE_CHECKING:
    from collections.abc import Callable

    from stagelink import Handler
    from stagelink.testing import RankPool

TOGETHER_S = 10.0
"""Within this time what must happen has happened."""

REPLICAS = 2
MICROBATCHES = 4
SIZES = [8, 8, 8]
cross_entropy = torch.nn.functional.cross_entropy


def alone(replicas: int = REPLICAS, wire: Any = LOOPBACK) -> Document:
    """A plan of one stage."""
    plan = document(wire, (replicas,), microbatches=MICROBATCHES)
    return plan | {"tensors": [], "links": []}


@pytest.fixture
def run(rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Run a case on replicas, with a bucket for each parameter."""
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 1)
    ranks = Ranks(LOOPBACK, rank_pool)
    return lambda case, *args: ranks.run(alone(), case, *args)


class Net(torch.nn.Module):
    """Three layers, called in the order of their names."""

    NAMES = ("a", "b", "c")

    a: torch.nn.Linear
    b: torch.nn.Linear
    c: torch.nn.Linear

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            width = CLASSES if name == "c" else WIDTH
            self.add_module(name, torch.nn.Linear(WIDTH, width, dtype=torch.float64))
        fill(self, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in sorted(self.NAMES):
            x = self.get_submodule(name)(x).tanh()
        return x


class Swapped(Net):
    """The layers are registered in the order of the backward."""

    NAMES = ("c", "b", "a")


def train(comm: Handler, module: torch.nn.Module, **more: Any) -> list[torch.Tensor]:
    """Train on all batches; the weights."""
    optimizer = quick_sgd(module)
    runner = PipelineRunner(comm, module, loss=cross_entropy, optimizer=optimizer, **more)
    runner.train(make_batches(SIZES))
    return [parameter.detach().clone() for parameter in module.parameters()]


def expected(module: torch.nn.Module) -> list[torch.Tensor]:
    """The weights of one process."""
    optimizer = quick_sgd(module)
    for batch in make_batches(SIZES):
        optimizer.zero_grad(set_to_none=True)
        parts = [batch[name].tensor_split(MICROBATCHES) for name in ("x", "target")]
        for x, target in zip(*parts, strict=True):
            (cross_entropy(module(x), target) / MICROBATCHES).backward()
        optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]


def check(found: list[list[torch.Tensor]], module: torch.nn.Module) -> None:
    want = expected(module)
    for one in found:
        torch.testing.assert_close(one, want, rtol=0, atol=1e-12)
        assert all(map(torch.equal, one, found[0]))


# -- when


class Events:
    """What each replica does, in order, a letter for each.

    ``b`` and ``e``: a microbatch's backward begins, and has come to the first layer's weight;
    ``s``: a sum is started; ``w``: sums are waited for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._of: dict[int, list[str]] = {}
        for letter, name in {"s": "start_sum", "w": "finish_sums"}.items():
            monkeypatch.setattr(ReplicaGroup, name, self._noted(letter, name))

    def _noted(self, letter: str, name: str) -> Callable[..., None]:
        method = getattr(ReplicaGroup, name)

        def noted(*args: Any) -> None:
            self.note(letter)
            method(*args)

        return noted

    def note(self, letter: str) -> None:
        """Note something of the replica whose thread this is."""
        self._of.setdefault(threading.get_ident(), []).append(letter)

    def watch(self, module: torch.nn.Module) -> None:
        """Note the backwards of a replica's module."""

        def watch_output(_module: object, _given: object, output: torch.Tensor) -> None:
            output.register_hook(lambda _: self.note("b"))

        module.register_forward_hook(watch_output)
        module.get_parameter("a.weight").register_hook(lambda _: self.note("e"))

    def all(self) -> str:
        """What this thread's replica has done."""
        return "".join(self._of.pop(threading.get_ident()))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    return Events(monkeypatch)


def test_sums_start_in_the_last_backward_of_a_batch(
    run: Callable[..., Any], events: Events
) -> None:
    """The last layer's are on their way when the first layer's weight gets its gradient."""

    def case(comm: Handler) -> str:
        module = Net()
        events.watch(module)
        train(comm, module)
        return events.all()

    for found in run(case):
        # One microbatch before; then the second and third layer's, then what ends with the first.
        first, *others = found.replace("w", "w ").split()
        assert len(others) == len(SIZES) - 1
        for batch in (first, *others):
            assert re.fullmatch("bebs{4,5}es{1,2}w", batch), found


def test_sums_are_there_before_the_last_backward_has_ended(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the backward's is needed for them, on either replica."""
    there = threading.Semaphore(0)
    add = replicas._Sums.add

    def added(*args: Any) -> None:
        add(*args)
        there.release()

    monkeypatch.setattr(replicas._Sums, "add", added)

    def case(comm: Handler) -> bool:
        module = Net()
        backwards = iter(range(MICROBATCHES // REPLICAS))
        came: list[bool] = []

        def wait(_: torch.Tensor) -> None:
            if next(backwards) == MICROBATCHES // REPLICAS - 1:
                came.append(there.acquire(timeout=TOGETHER_S))

        hook = module.get_parameter("a.weight").register_hook(wait)
        runner = PipelineRunner(comm, module, loss=cross_entropy, optimizer=quick_sgd(module))
        runner.train(make_batches(SIZES[:1]))
        hook.remove()
        return came == [True]

    assert run(case) == [True, True]


def test_the_order_is_learnt_from_the_first_backward(
    run: Callable[..., Any], events: Events
) -> None:
    def case(comm: Handler) -> list[str]:
        module = Swapped()
        events.watch(module)
        train(comm, module)
        return events.all().split("w")

    for first, *others, end in run(case):
        early = [one[: one.rindex("e")].count("s") for one in (first, *others)]
        assert early[0] <= 1
        assert min(early[1:]) >= len(Net.NAMES) + 1
        assert not end


def test_each_backward_is_the_last_where_it_is_followed_by_a_step(
    events: Events, rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 1)

    def case(comm: Handler) -> str:
        module = Net()
        events.watch(module)
        train(comm, module)
        return events.all()

    plan = alone()
    plan["pipeline"]["schedule"] = "pipedream"
    for found in Ranks(LOOPBACK, rank_pool).run(plan, case):
        steps = found.replace("w", "w ").split()
        assert len(steps) == len(SIZES) * MICROBATCHES // REPLICAS
        assert all(re.fullmatch("bs{4,5}es{1,2}w", step) for step in steps), found


# -- what


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("count", [2, 3])
def test_weights_are_those_of_one_process(
    count: int,
    clip_norm: float | None,
    rank_pool: RankPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, whatever the buckets."""
    ranks = Ranks(LOOPBACK, rank_pool)
    found = []
    for bucket_bytes in (1, 100, gradients.BUCKET_BYTES):
        monkeypatch.setattr(gradients, "BUCKET_BYTES", bucket_bytes)
        found += ranks.run(alone(count), lambda comm: train(comm, Net(), clip_norm=clip_norm))
    for one in found[1:]:
        assert all(map(torch.equal, one, found[0]))
    if clip_norm is None:
        check(found, Net())


def test_a_default_device_is_the_user_s(run: Callable[..., Any]) -> None:
    """What replicas tell each other is on the CPU whatever new tensors are on."""

    def case(comm: Handler) -> list[torch.Tensor]:
        module, batches = Net(), make_batches(SIZES)
        runner = PipelineRunner(comm, module, loss=cross_entropy, optimizer=quick_sgd(module))
        with torch.device("meta"):
            runner.train(batches)
        return [parameter.detach().clone() for parameter in module.parameters()]

    check(run(case), Net())


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature:UserWarning")
def test_dtypes_have_buckets_of_their_own(run: Callable[..., Any]) -> None:
    class Mixed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.b.to(torch.complex128)
            fill(self, 0)
            self.c.to(torch.float32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wave = self.b(self.a(x).to(torch.complex128)).abs()
            result: torch.Tensor = self.c(wave.float()).double()
            return result

    found = run(lambda comm: train(comm, Mixed()))
    want = expected(Mixed())
    for one in found:
        torch.testing.assert_close(one, want)
        assert all(map(torch.equal, one, found[0]))


class Choosing(Net):
    """Calls its layers in an order, and leaves some out, as each microbatch's numbers say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = int(x.sum().abs() * 1000) % 3
        x = self.a(self.b(x)) if place else self.b(self.a(x))
        result: torch.Tensor = self.c(x) if place < 2 else x[:, :CLASSES].tanh()
        return result


def test_microbatches_that_use_other_parameters_in_another_order(
    run: Callable[..., Any],
) -> None:
    places = [
        int(part.sum().abs() * 1000) % 3
        for batch in make_batches(SIZES)
        for part in batch["x"].tensor_split(MICROBATCHES)
    ]
    last = [[places[at + 2], places[at + 3]] for at in range(0, len(places), MICROBATCHES)]
    assert any(one != other for one, other in last), "replicas alike in each last backward"
    assert {*places} == {0, 1, 2}
    check(run(lambda comm: train(comm, Choosing())), Choosing())


def test_a_replica_without_a_microbatch_takes_part(run: Callable[..., Any]) -> None:
    def case(comm: Handler) -> list[torch.Tensor]:
        module = Net()
        runner = PipelineRunner(comm, module, loss=cross_entropy, optimizer=quick_sgd(module))
        runner.train(make_batches([1]))
        return [parameter.detach() for parameter in module.parameters()]

    module = Net()
    (batch,) = make_batches([1])
    cross_entropy(module(batch["x"]), batch["target"]).backward()
    quick_sgd(module).step()
    for found in run(case):
        torch.testing.assert_close(found, [*module.parameters()], rtol=0, atol=1e-12)


class Shifted(Net):
    """A hook of its own changes a gradient; anew for each backward, so it comes behind others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = super().forward(x)
        if torch.is_grad_enabled():
            result.register_hook(self.shift_soon)
        return result

    def shift_soon(self, _: torch.Tensor) -> None:
        weight = self.get_parameter("c.weight")

        def shift(parameter: torch.Tensor) -> None:
            hook.remove()
            assert parameter.grad is not None
            parameter.grad.add_(0.01)

        hook = weight.register_post_accumulate_grad_hook(shift)


class Twice(Net):
    """A layer in two reentrant checkpoints, whose gradient comes twice in one backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for name in ("a", "a", "b"):
            x = checkpoint(self.get_submodule(name), x, use_reentrant=True)
        result: torch.Tensor = self.c(x)
        return result


@pytest.mark.parametrize("kind", [Shifted, Twice])
def test_a_gradient_that_changes_after_its_bucket_has_gone(
    kind: type[Net], run: Callable[..., Any], events: Events
) -> None:
    """It is sent again, and from then on waits for the end."""

    def case(comm: Handler) -> tuple[list[torch.Tensor], list[str]]:
        found = train(comm, kind())
        return found, events.all().split("w")

    results = run(case)
    check([found for found, _ in results], kind())
    for _, (first, again, *others) in results:
        assert len(first) == len([*Net().parameters()])
        assert 0 < len(again) < len(first)
        assert [len(one) for one in others] == [len(first)] * 2 + [0]


def test_a_loss_that_has_done_its_backward(run: Callable[..., Any]) -> None:
    def summed(output: torch.Tensor, target: torch.Tensor) -> BackwardDone:
        loss = cross_entropy(output, target, reduction="sum") / SIZES[0]
        loss.backward()
        return BackwardDone(loss.detach())

    def case(comm: Handler) -> list[torch.Tensor]:
        module = Net()
        runner = PipelineRunner(
            comm, module, loss=summed, optimizer=quick_sgd(module), reduction="sum"
        )
        runner.train(make_batches(SIZES))
        return [parameter.detach() for parameter in module.parameters()]

    check(run(case), Net())


def test_no_hook_is_left(run: Callable[..., Any]) -> None:
    def case(comm: Handler) -> bool:
        module = Net()
        train(comm, module)
        return any(p._post_accumulate_grad_hooks for p in module.parameters())

    assert run(case) == [False] * 2


# -- failures


def test_a_sparse_gradient_is_refused_in_the_backward(run: Callable[..., Any]) -> None:
    class Sparse(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(2, CLASSES, sparse=True, dtype=torch.float64)
            fill(self, 0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.table((x[:, 0] > 0).long())
            return super().forward(x) + found

    def case(comm: Handler) -> str:
        with pytest.raises(StagelinkError) as caught, comm:
            train(comm, Sparse())
        return str(caught.value)

    for text in run(case):
        assert "add up dense gradients only: a tensor of layout torch.sparse_coo" in text


def test_an_error_in_the_last_backward_is_every_replicas(run: Callable[..., Any]) -> None:
    def case(comm: Handler) -> str:
        module = Net()

        def fail(_: torch.Tensor) -> None:
            raise ValueError("enough")

        if comm.replica == 1:
            module.get_parameter("a.weight").register_hook(fail)
        with pytest.raises((StagelinkError, ValueError)) as caught, comm:
            train(comm, module)
        return str(caught.value)

    assert all("enough" in text for text in run(case))


def die_in_the_last_backward(comm: Handler) -> str:
    gradients.BUCKET_BYTES = 1
    module = Net()
    if comm.replica == 1:
        backwards = iter(range(MICROBATCHES // REPLICAS))

        def die(_: torch.Tensor) -> None:
            if next(backwards) == MICROBATCHES // REPLICAS - 1:
                os.kill(os.getpid(), signal.SIGKILL)

        module.get_parameter("a.weight").register_hook(die)
    try:
        train(comm, module)
    except StagelinkError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_replica_that_dies_in_the_last_backward_is_named() -> None:
    with start_fresh(alone(wire=GLOO), die_in_the_last_backward) as ranks:
        outcome, _ = ranks.outcomes(timeout_s=TOGETHER_S)
    assert outcome.ok, outcome
    assert "rank 1 died" in outcome.value


def test_the_thread_ends_with_the_handler(run: Callable[..., Any]) -> None:
    mine: list[threading.Thread] = []

    def case(comm: Handler) -> None:
        train(comm, Net())
        mine.extend(one for one in threading.enumerate() if one.name == "stagelink-replicas")
        comm.close()

    run(case)
    assert mine
    for thread in mine:
        thread.join(TOGETHER_S)
        assert not thread.is_alive()
