"""Small models in stages, and what one process makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from tests.support.pipelines import tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.support.pipelines import Document

WIDTH = 6
CLASSES = 3


@dataclass(frozen=True)
class Shape:
    """What a stage takes and gives, by name; ``stages`` of them make a model."""

    takes: tuple[str, ...]
    gives: tuple[str, ...]


def line(stages: int) -> list[Shape]:
    """Stage ``i`` gives ``h<i>`` to the next; the first takes ``x``, the last gives ``out``."""
    names = ["x", *(f"h{index}" for index in range(stages - 1)), "out"]
    return [Shape((names[i],), (names[i + 1],)) for i in range(stages)]


SKIP = [
    Shape(("x",), ("h", "skip")),
    Shape(("h",), ("deep",)),
    Shape(("deep", "skip"), ("out",)),
]
"""``skip`` goes past the middle, as its own tensor."""

SHARED = [Shape(("x",), ("h",)), Shape(("h",), ("deep",)), Shape(("deep", "h"), ("out",))]
"""``h`` itself goes to both other stages: their gradients are added."""


class Toy(torch.nn.Module):
    """A linear map for each pair of a tensor taken and one given, and a tanh."""

    def __init__(self, shape: Shape, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.maps = torch.nn.ModuleDict(
            {
                f"{taken}-{given}": torch.nn.Linear(
                    WIDTH, CLASSES if given == "out" else WIDTH, dtype=dtype
                )
                for taken in shape.takes
                for given in shape.gives
            }
        )
        fill(self, seed)

    def forward(self, **tensors: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        given = {name: self.one(name, tensors) for name in self.shape.gives}
        return given if len(given) > 1 else next(iter(given.values()))

    def one(self, name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = [self.maps[f"{taken}-{name}"](tensors[taken]) for taken in self.shape.takes]
        return torch.stack(parts).sum(dim=0).tanh()


def fill(module: torch.nn.Module, seed: int) -> None:
    """The same parameters for a seed on every thread and process."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.4 * values)


def build(shapes: Sequence[Shape], stage: int, dtype: torch.dtype = torch.float64) -> Toy:
    return Toy(shapes[stage], seed=stage, dtype=dtype)


def make_batches(
    sizes: Sequence[int], dtype: torch.dtype = torch.float64
) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        {
            "x": torch.randn(size, WIDTH, generator=generator, dtype=torch.float64).to(dtype),
            "target": torch.randint(CLASSES, (size,), generator=generator),
        }
        for size in sizes
    ]


def tensors_of(shapes: Sequence[Shape]) -> list[Document]:
    """The plan's tensors for a model; the target goes from the first stage to the last."""
    last = len(shapes) - 1
    found = [
        tensor(name, source, *(i for i, other in enumerate(shapes) if name in other.takes))
        for source, shape in enumerate(shapes[:-1])
        for name in shape.gives
    ]
    return [*found, tensor("target", 0, last)]


def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)


def quick_sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    """The same without torch's optimizers, whose first use costs a process seconds of imports."""
    return cast("torch.optim.Optimizer", _QuickSgd(module))


class _QuickSgd:
    def __init__(self, module: torch.nn.Module) -> None:
        self.param_groups = [{"params": list(module.parameters())}]
        self._momentum: dict[torch.Tensor, torch.Tensor] = {}

    def zero_grad(self, *, set_to_none: bool) -> None:
        assert set_to_none
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                old = self._momentum.get(parameter)
                new = parameter.grad.clone() if old is None else old * 0.9 + parameter.grad
                self._momentum[parameter] = new
                parameter.sub_(0.2 * new)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(dim=1) == target).double().mean()


def run_stages(modules: Sequence[torch.nn.Module], tensors: dict[str, torch.Tensor]) -> Any:
    """One process's forward through all stages."""
    found = dict(tensors)
    for module in modules:
        assert isinstance(module, Toy)
        result = module(**{name: found[name] for name in module.shape.takes})
        found |= result if isinstance(result, dict) else {module.shape.gives[0]: result}
    return found["out"]


def train_alone(
    modules: Sequence[torch.nn.Module],
    batches: Sequence[dict[str, torch.Tensor]],
    microbatches: int,
    optimizers: Sequence[Any] = (),
    *,
    loss: Callable[..., torch.Tensor] = torch.nn.functional.cross_entropy,
    steps: bool = True,
) -> float:
    """One process, one epoch, the same microbatches; returns the mean loss per item."""
    optimizers = optimizers or [quick_sgd(module) for module in modules]
    total = 0.0
    for batch in batches:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        size = len(batch["x"])
        parts = min(microbatches, size)
        for part in range(parts):
            piece = {name: value.tensor_split(parts)[part] for name, value in batch.items()}
            output = run_stages(modules, piece)
            value = loss(output, piece["target"])
            (value * (len(piece["x"]) / size)).backward()
            total += value.item() * len(piece["x"])
        for optimizer in optimizers if steps else ():
            optimizer.step()
    return total / sum(len(batch["x"]) for batch in batches)


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(((one[name] - other[name]).abs().max().item() for name in one), default=0.0)
