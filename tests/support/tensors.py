"""Tensors that are more, or less, than the memory they lie in; for both ends of a message.

Each is made by a function of some values, flat and of float32, in whichever process needs it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Make: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"

VALUES = torch.arange(12.0)
FAKE = FakeTensorMode()


# -- subclasses


class Methods(torch.Tensor):
    """Only adds a method."""

    def doubled(self) -> torch.Tensor:
        return self * 2


class Overriding(torch.Tensor):
    """Has torch's functions pass by itself, and knows better about everything."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not str(getattr(func, "__module__", "")).startswith(
            "torch.distributed"
        ):  # its functions ask as well
            raise AssertionError(f"{func} was asked")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Disabled(torch.Tensor):
    """Has no dispatch of its own, and says so."""

    __torch_dispatch__: Any = torch._C._disabled_torch_dispatch_impl


def _by_inner(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    unwrapped = tree_map_only(Wrapper, lambda given: given.inner, (args, kwargs or {}))
    return func(*unwrapped[0], **unwrapped[1])


class Wrapper(torch.Tensor):
    """A shape in front of another tensor."""

    inner: Any

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made  # type: ignore[no-any-return]

    __torch_dispatch__: Any = classmethod(_by_inner)


class Logging(torch.Tensor):
    """Has memory, and an opinion of its own on what is in it."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Logging:
        return torch.Tensor._make_subclass(cls, data)

    __torch_dispatch__: Any = classmethod(_by_inner)


class _Collected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> Any:
        return AsyncCollectiveTensor(given.detach().clone())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient


class _CollectedBackward(_Collected):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> Any:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return AsyncCollectiveTensor(gradient.clone())


# -- what arrives as a tensor


def collected_from(given: torch.Tensor) -> torch.Tensor:
    """The result of a collective, with a graph."""
    apply: Any = _Collected.apply
    made: torch.Tensor = apply(given)
    return made


def collected_backward(given: torch.Tensor) -> torch.Tensor:
    """What has the result of a collective as its gradient."""
    apply: Any = _CollectedBackward.apply
    made: torch.Tensor = apply(given)
    return made


def in_inference(values: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return values.clone()


def part(values: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.ones(1), values, torch.ones(1)])[1:-1]


def steps(values: torch.Tensor) -> torch.Tensor:
    return values.repeat_interleave(2)[::2]


def conjugated(values: torch.Tensor) -> torch.Tensor:
    return torch.complex(values, -values).conj().imag


DATA: dict[str, Make] = {
    "parameter": lambda values: torch.nn.Parameter(values.clone()),
    "buffer": lambda values: torch.nn.Buffer(values.clone()),
    "methods": lambda values: values.clone().as_subclass(Methods),
    "methods, in steps": lambda values: steps(values).as_subclass(Methods),
    "methods, a parameter": lambda values: torch.nn.Parameter(values.clone().as_subclass(Methods)),
    "overriding": lambda values: values.clone().as_subclass(Overriding),
    "disabled": lambda values: values.clone().as_subclass(Disabled),
    "collective": lambda values: AsyncCollectiveTensor(values.clone()),
    "collective, a view": lambda values: AsyncCollectiveTensor(part(values)).view(-1),
    "collective, in steps": lambda values: AsyncCollectiveTensor(steps(values)),
    "collective of methods": lambda values: AsyncCollectiveTensor(
        values.clone().as_subclass(Methods)
    ),
    "collective with a graph": lambda values: collected_from(values.clone().requires_grad_()),
    "lazily copied": lambda values: values.clone()._lazy_clone(),
    "inference": in_inference,
    "part": part,
    "negated": conjugated,
    "negated, in order": lambda values: torch._neg_view(-values),
}
"""By name, how one is made that has these values and arrives as them; they are not changed."""


def zeros(values: torch.Tensor) -> torch.Tensor:
    return torch._efficientzerotensor(values.shape)


# -- what is refused


def resized(given: torch.Tensor, elements: int) -> torch.Tensor:
    given.untyped_storage().resize_(elements * given.itemsize)
    return given


def nested(values: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([values, values[1:]])


def jagged(values: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([values, values[1:]], layout=torch.jagged)


def by_channel(values: torch.Tensor) -> torch.Tensor:
    rows = values.view(4, -1)
    return torch.quantize_per_channel(
        rows, torch.ones(4), torch.zeros(4, dtype=torch.int64), 0, torch.qint8
    )


def escaped(values: torch.Tensor, transform: Callable[..., Any]) -> torch.Tensor:
    """What a function transformed by `torch.func` sees of its argument."""
    seen: list[torch.Tensor] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x.sum()

    transform(look)(values.view(4, -1))
    return seen[0]


REFUSED: dict[str, tuple[Make, str]] = {
    "wrapper": (Wrapper, r"tests\.support\.tensors\.Wrapper has no strided memory of its own"),
    "logging": (lambda v: Logging(v.clone()), "tensors.Logging has no strided memory"),
    "fake": (FAKE.from_tensor, r"torch\._subclasses\.fake_tensor\.FakeTensor has no strided"),
    "fake in a collective": (
        lambda values: AsyncCollectiveTensor(FAKE.from_tensor(values)),
        "FakeTensor has no strided memory of its own",
    ),
    "masked": (
        lambda values: torch.masked.masked_tensor(values.clone(), values > 1),
        r"MaskedTensor has no strided memory of its own: send its \.get_data",
    ),
    "nested": (nested, "a nested tensor has no strided memory of its own: "),
    "jagged": (jagged, r"NestedTensor has no strided memory of its own: send its \.values"),
    "functional": (torch._to_functional_tensor, "a functional tensor"),
    "vmap": (lambda v: escaped(v, torch.func.vmap), "inside a transform of torch.func"),
    "grad": (lambda v: escaped(v, torch.func.grad), "inside a transform of torch.func"),
    "coo": (lambda v: v.view(4, -1).to_sparse(), "layout torch.sparse_coo cannot be sent"),
    "csr": (lambda v: v.view(4, -1).to_sparse_csr(), "layout torch.sparse_csr cannot be"),
    "csc": (lambda v: v.view(4, -1).to_sparse_csc(), "layout torch.sparse_csc cannot be"),
    "bsr": (lambda v: v.view(4, -1).to_sparse_bsr((2, 3)), "layout torch.sparse_bsr cannot"),
    "bsc": (lambda v: v.view(4, -1).to_sparse_bsc((2, 3)), "layout torch.sparse_bsc cannot"),
    "mkldnn": (torch.Tensor.to_mkldnn, "layout torch._mkldnn cannot be sent"),
    "quantised": (
        lambda values: torch.quantize_per_tensor(values, 0.1, 0, torch.quint8),
        "tensors of torch.quint8 cannot be sent",
    ),
    "quantised by channel": (by_channel, "tensors of torch.qint8 cannot be sent"),
    "meta": (lambda v: v.to("meta"), "device 'meta' has no data to send"),
    "meta, empty": (lambda v: v[:0].to("meta"), "device 'meta' has no data to send"),
    "bits": (lambda v: v.view(torch.bits8), "tensors of torch.bits8 cannot be sent"),
    "lazy parameter": (
        lambda values: torch.nn.UninitializedParameter(),
        "UninitializedParameter has no data yet",
    ),
    "lazy buffer": (
        lambda values: torch.nn.UninitializedBuffer(),
        "UninitializedBuffer has no data yet",
    ),
    "freed": (lambda v: resized(v.clone(), 0), "its storage was freed or resized"),
    "freed, a part": (lambda v: resized(part(v), 0), "its storage was freed or resized"),
    "cut short": (lambda v: resized(v.clone(), 11), "its storage was freed or resized"),
    "cut short, a part": (lambda v: resized(part(v), 12), "its storage was freed or resized"),
    "cut short, in steps": (lambda v: resized(steps(v), 22), "its storage was freed or resized"),
}
"""By name, how one is made, and what the error says of it."""

SHARED: dict[str, Make] = {
    "expanded": lambda values: values[1].expand(values.shape),
    "overlapping": lambda values: values.clone().as_strided((len(values) - 1, 2), (1, 1)),
    "expanded, negated": lambda values: conjugated(values)[1].expand(values.shape),
}
"""They can be sent; elements that share memory cannot be received into."""


# -- modes around a call


class _Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was dispatched")


class _Refusing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in {"view", "detach", "frombuffer", "empty", "clone"}:
            raise AssertionError(f"{func} was called")
        return func(*args, **(kwargs or {}))


@contextmanager
def inside_grad() -> Iterator[None]:
    """As the body of a function that `torch.func.grad` calls."""
    from torch._functorch.eager_transforms import grad_increment_nesting  # noqa: PLC0415

    with grad_increment_nesting():
        yield


MODES: dict[str, Callable[[], Any]] = {
    "fake": FakeTensorMode,
    "dispatch": _Passing,
    "function": _Refusing,
    "inference": torch.inference_mode,
    "meta": lambda: torch.device("meta"),
    "grad": inside_grad,
    "no grad": torch.no_grad,
}
"""Under each of them messages are what they are without."""
