"""Gradients that are missing, frozen or not wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from stagelink import MessageError, PipelineRunner, StagelinkError
from stagelink.runner.gradients import Bucket
from stagelink.transport.payload import bytes_of
from tests.runner.models import CLASSES, WIDTH, fill, make_batches, quick_sgd
from tests.support import tensors
from tests.support.pipelines import LOOPBACK, Document, Ranks, tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stagelink import Handler
    from stagelink.testing import RankPool

LINE = [tensor("h", 0, 1), tensor("target", 0, 1)]
TWO_TENSORS = [tensor("h", 0, 1), tensor("side", 0, 1), tensor("target", 0, 1)]


class Named(torch.nn.Module):
    main: torch.nn.Linear
    spare: torch.nn.Linear

    def __init__(self, seed: int, **layers: torch.nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer.double())
        fill(self, seed)


class First(Named):
    def __init__(self) -> None:
        super().__init__(
            0, main=torch.nn.Linear(WIDTH, WIDTH), spare=torch.nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> Any:
        return self.main(x)


class Last(Named):
    def __init__(self) -> None:
        super().__init__(1, main=torch.nn.Linear(WIDTH, CLASSES))

    def forward(self, h: torch.Tensor, side: torch.Tensor | None = None) -> Any:
        del side
        return self.main(h)


class Pipeline:
    """Trains two stages and gives back each rank's gradients after the last step."""

    def __init__(self, pool: RankPool) -> None:
        self._ranks = Ranks(LOOPBACK, pool)

    def gradients(
        self,
        modules: Sequence[Any],
        tensors: Sequence[Document] = LINE,
        replicas: tuple[int, int] = (1, 1),
        sizes: Sequence[int] = (6,),
    ) -> list[dict[str, torch.Tensor | None]]:
        def case(comm: Handler) -> dict[str, torch.Tensor | None]:
            module = modules[comm.stage.index]()
            runner = PipelineRunner(
                comm, module, loss=torch.nn.functional.cross_entropy, optimizer=quick_sgd(module)
            )
            runner.train(make_batches(sizes) if comm.stage.index == 0 else None)
            return {name: value.grad for name, value in module.named_parameters()}

        return self._ranks.run(self._ranks.plan(replicas, tensors, microbatches=3), case)


@pytest.fixture
def pipeline(rank_pool: RankPool) -> Pipeline:
    return Pipeline(rank_pool)


def expected(first: Any, last: Any, size: int = 6) -> list[dict[str, torch.Tensor | None]]:
    (batch,) = make_batches([size])
    result = first(batch["x"])
    output = last(**(result if isinstance(result, dict) else {"h": result}))
    loss = torch.nn.functional.cross_entropy(output, batch["target"])
    if loss.requires_grad:
        loss.backward()
    return [{n: p.grad for n, p in module.named_parameters()} for module in (first, last)]


def check(
    found: list[dict[str, torch.Tensor | None]], want: list[dict[str, torch.Tensor | None]]
) -> None:
    for got, wanted in zip(found, want, strict=True):
        assert got.keys() == wanted.keys()
        for name, gradient in wanted.items():
            if gradient is None:
                assert got[name] is None
            else:
                torch.testing.assert_close(got[name], gradient, rtol=0, atol=1e-14)


def test_a_parameter_that_is_not_used_has_none(pipeline: Pipeline) -> None:
    want = expected(First(), Last())
    assert want[0]["spare.weight"] is None
    check(pipeline.gradients([First, Last]), want)


@pytest.mark.parametrize("sizes", [(6,), (1,)], ids=["all", "idle replicas"])
def test_none_on_every_replica_stays_none(sizes: tuple[int, ...], pipeline: Pipeline) -> None:
    first, last = expected(First(), Last(), sizes[0])
    found = pipeline.gradients([First, Last], replicas=(3, 2), sizes=sizes)
    check(found, [first] * 3 + [last] * 2)


class Alternating(First):
    """Uses ``spare`` only for microbatches that begin with a negative number."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.main(x) + self.spare(x) if x[0, 0] < 0 else self.main(x)


def test_none_on_some_replicas_is_zero(pipeline: Pipeline) -> None:
    sizes = (6, 6, 6, 6)
    first, last = Alternating(), Last()
    optimizers = [quick_sgd(first), quick_sgd(last)]
    used = []
    for batch in make_batches(sizes):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        parts = zip(batch["x"].tensor_split(3), batch["target"].tensor_split(3), strict=True)
        for x, target in parts:
            (torch.nn.functional.cross_entropy(last(first(x)), target) / 3).backward()
            used.append((x[0, 0] < 0).item())
        for optimizer in optimizers:
            optimizer.step()
    # In the last batch some replicas lack a gradient that there was before.
    assert any(used[:-3])
    assert {*used[-3:]} == {True, False}
    want = [{n: p.grad for n, p in module.named_parameters()} for module in (first, last)]
    found = pipeline.gradients([Alternating, Last], replicas=(3, 1), sizes=sizes)
    check(found, [want[0]] * 3 + [want[1]])


class Ignoring(Last):
    """Does not look at what it receives."""

    def forward(self, h: torch.Tensor, side: torch.Tensor | None = None) -> Any:
        del side
        return self.main(torch.ones_like(h))


def test_an_input_that_is_not_used_sends_none_back(pipeline: Pipeline) -> None:
    found = pipeline.gradients([First, Ignoring])
    assert all(gradient is None for gradient in found[0].values())
    assert all(gradient is not None for gradient in found[1].values())


class TwoOutputs(First):
    def forward(self, x: torch.Tensor) -> Any:
        return {"h": self.main(x), "side": self.spare(x)}


def test_one_of_two_inputs_is_not_used(pipeline: Pipeline) -> None:
    check(pipeline.gradients([TwoOutputs, Last], TWO_TENSORS), expected(TwoOutputs(), Last()))


class OutputWithoutGradient(First):
    def forward(self, x: torch.Tensor) -> Any:
        return {"h": self.main(x), "side": x.detach() > 0}


class Masking(Last):
    def forward(self, h: torch.Tensor, side: torch.Tensor | None = None) -> Any:
        assert side is not None
        assert not side.requires_grad
        return self.main(h * side)


def test_a_tensor_without_gradient_travels_beside(pipeline: Pipeline) -> None:
    check(
        pipeline.gradients([OutputWithoutGradient, Masking], TWO_TENSORS),
        expected(OutputWithoutGradient(), Masking()),
    )


class NothingBeside(First):
    def forward(self, x: torch.Tensor) -> Any:
        return {"h": self.main(x), "side": None}


def test_none_travels_beside(pipeline: Pipeline) -> None:
    check(
        pipeline.gradients([NothingBeside, Last], TWO_TENSORS), expected(NothingBeside(), Last())
    )


class SameTwice(First):
    def forward(self, x: torch.Tensor) -> Any:
        h = self.main(x)
        return {"h": h, "side": h}


class Adding(Last):
    def forward(self, h: torch.Tensor, side: torch.Tensor | None = None) -> Any:
        assert side is not None
        return self.main(h * side)


def test_one_tensor_under_two_names(pipeline: Pipeline) -> None:
    check(pipeline.gradients([SameTwice, Adding], TWO_TENSORS), expected(SameTwice(), Adding()))


def frozen(kind: Any) -> Any:
    class Frozen(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(requires_grad=False)

    return Frozen


@pytest.mark.parametrize("replicas", [(1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize(
    ("first", "last"),
    [(frozen(First), Last), (First, frozen(Last)), (frozen(First), frozen(Last))],
    ids=["first", "last", "both"],
)
def test_frozen_stages(
    first: Any, last: Any, replicas: tuple[int, int], pipeline: Pipeline
) -> None:
    want = expected(first(), last())
    found = pipeline.gradients([first, last], replicas=replicas)
    check(found, [want[0]] * replicas[0] + [want[1]] * replicas[1])


class LooksAtItsInput(Last):
    """Takes a gradient with respect to an input that needs none for the pipeline."""

    def forward(self, h: torch.Tensor, side: torch.Tensor | None = None) -> Any:
        assert side is not None
        with torch.enable_grad():
            side = side.double().requires_grad_()
            (side**2).sum().backward()
        assert side.grad is not None
        return self.main(h + side.grad)


class PlainBeside(First):
    def forward(self, x: torch.Tensor) -> Any:
        return {"h": self.main(x), "side": x.detach().clone()}


def test_a_gradient_of_an_input_for_ones_own_purposes_is_not_sent(pipeline: Pipeline) -> None:
    check(
        pipeline.gradients([PlainBeside, LooksAtItsInput], TWO_TENSORS),
        expected(PlainBeside(), LooksAtItsInput()),
    )


class Sparse(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(2, WIDTH, sparse=True, dtype=torch.float64)
        fill(self, 0)

    def forward(self, x: torch.Tensor) -> Any:
        return self.table((x[:, 0] > 0).long())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mean_of_halves_is_made_of_singles(dtype: torch.dtype) -> None:
    """Their sum may be too large for a half where their mean is not."""
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    parameter.grad = torch.full((3,), 40000.0, dtype=dtype)
    expected = parameter.grad.clone()
    bucket = Bucket([parameter])
    bucket.values.copy_(2 * bucket.take())  # as the other replica has the same
    bucket.hand_out([1], count=2)
    assert torch.equal(parameter.grad, expected)


def test_a_sparse_gradient_cannot_be_added_over_replicas(rank_pool: RankPool) -> None:
    def case(comm: Handler) -> str:
        module = Sparse() if comm.stage.index == 0 else Last()
        runner = PipelineRunner(
            comm, module, loss=torch.nn.functional.cross_entropy, optimizer=quick_sgd(module)
        )
        with pytest.raises(StagelinkError) as caught, comm:
            runner.train(make_batches([6]) if comm.stage.index == 0 else None)
        return str(caught.value)

    ranks = Ranks(LOOPBACK, rank_pool)
    for text in ranks.run(ranks.plan((2, 1), LINE), case):
        assert "add up dense gradients only: a tensor of layout torch.sparse_coo" in text


# -- tensors that are more than their memory


class Collects(First):
    """Its end is the result of an asynchronous collective, as of a tensor-parallel layer."""

    def forward(self, x: torch.Tensor) -> Any:
        return tensors.collected_from(self.main(x))


class CollectsBackward(Last):
    """So is its gradient."""

    def forward(self, h: torch.Tensor, side: torch.Tensor | None = None) -> Any:
        return super().forward(tensors.collected_backward(h), side)


def test_results_of_collectives_are_waited_for(pipeline: Pipeline) -> None:
    check(pipeline.gradients([Collects, CollectsBackward]), expected(First(), Last()))


class Wraps(First):
    def forward(self, x: torch.Tensor) -> Any:
        return tensors.Wrapper(self.main(x).detach())


def test_an_output_without_memory_is_named_on_every_rank(rank_pool: RankPool) -> None:
    def case(comm: Handler) -> str:
        module = Wraps() if comm.stage.index == 0 else Last()
        runner = PipelineRunner(
            comm, module, loss=torch.nn.functional.cross_entropy, optimizer=quick_sgd(module)
        )

        def train() -> None:
            comm.reduce([0.0])  # so that none fails while another still connects
            runner.train(make_batches([6]) if comm.stage.index == 0 else None)

        with pytest.raises(StagelinkError) as caught, comm:
            train()
        return str(caught.value)

    ranks = Ranks(LOOPBACK, rank_pool)
    for text in ranks.run(ranks.plan((1, 1), LINE), case):
        assert "microbatch 0 (forward, session 0) of edge 'h': " in text
        assert "tests.support.tensors.Wrapper has no strided memory of its own" in text


ADDED = {**tensors.DATA, **tensors.SHARED, "zeros": tensors.zeros}
ADDED.pop("overriding")  # cannot be written


@pytest.mark.parametrize("beside", [0, 1], ids=["alone", "in a buffer"])
@pytest.mark.parametrize("kind", ADDED)
def test_gradients_of_any_kind_are_added(kind: str, beside: int) -> None:
    """They need not be such that can be written, and may have a graph."""
    values = torch.arange(12.0)
    given = ADDED[kind](values)
    parameter = torch.nn.Parameter(torch.zeros(given.shape))
    parameter.grad = given
    want = bytes_of(given).view(torch.float32).clone()
    bucket = Bucket([parameter], beside=beside)
    bucket.values.copy_(2 * bucket.take())  # as the other replica has the same
    bucket.hand_out([1])
    assert parameter.grad is not None
    assert torch.equal(bytes_of(parameter.grad).view(torch.float32), 2 * want)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["wrapper", "coo", "masked"])
def test_gradients_without_memory_are_refused(kind: str) -> None:
    make, text = tensors.REFUSED[kind]
    given = make(torch.arange(12.0))
    parameter = torch.nn.Parameter(torch.zeros(given.shape))
    parameter.grad = given
    with pytest.raises(StagelinkError, match=f"add up dense gradients only: .*{text}"):
        Bucket([parameter]).take()


class Unlike(First):
    """Has a buffer of some kind."""

    def __init__(self, make: tensors.Make) -> None:
        super().__init__()
        self.register_buffer("kept", make(torch.arange(12.0)))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_replicas_refuse_buffers_that_they_cannot_keep_equal(rank_pool: RankPool) -> None:
    kinds = [
        tensors.REFUSED["wrapper"],
        tensors.REFUSED["meta"],
        tensors.REFUSED["quantised"],
        (tensors.SHARED["expanded"], "elements of the tensor share their memory"),
        (tensors.zeros, "a zero tensor of torch's has no memory"),
    ]

    def case(comm: Handler) -> None:
        for make, text in kinds:
            module = Unlike(make) if comm.stage.index == 0 else Last()
            runner = PipelineRunner(
                comm, module, loss=torch.nn.functional.cross_entropy, optimizer=quick_sgd(module)
            )
            if comm.stage.index == 0:
                said = f"a parameter or buffer of stage 's0' cannot be kept .*: .*{text}"
                with pytest.raises(MessageError, match=said):
                    runner.train(make_batches([6]))

    ranks = Ranks(LOOPBACK, rank_pool)
    ranks.run(ranks.plan((2, 1), LINE), case)


@pytest.mark.parametrize("kind", ["methods", "inference", "lazily copied"])
def test_replicas_keep_buffers_that_are_data(kind: str, rank_pool: RankPool) -> None:
    def case(comm: Handler) -> None:
        module = Unlike(tensors.DATA[kind]) if comm.stage.index == 0 else Last()
        runner = PipelineRunner(
            comm, module, loss=torch.nn.functional.cross_entropy, optimizer=quick_sgd(module)
        )
        runner.train(make_batches([6]) if comm.stage.index == 0 else None)
        for kept in module.buffers():
            assert kept.tolist() == [*range(12)]

    ranks = Ranks(LOOPBACK, rank_pool)
    ranks.run(ranks.plan((2, 1), LINE), case)
