"""Tensors that transports have stumbled over, and how to compare them bit by bit."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from stagelink.plan.dtypes import DTYPES

_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (3, 5), (2, 1, 3, 4), (0,), (3, 0, 2))


def awkward_tensors() -> Iterator[torch.Tensor]:
    """Every dtype in several shapes, 0-d and empty ones included, and views of every kind."""
    generator = torch.Generator().manual_seed(7)
    for dtype in DTYPES:
        kind = getattr(torch, dtype.name)
        for shape in _SHAPES:
            raw_shape = (*shape, dtype.itemsize)
            raw = torch.randint(
                0, 2 if dtype.name == "bool" else 256, raw_shape, generator=generator
            )
            yield raw.to(torch.uint8).view(kind).reshape(shape)
    grid = torch.arange(24.0).view(2, 3, 4)
    yield grid.transpose(0, 2)
    yield grid[:, 1]
    yield grid[..., ::2]
    yield torch.chunk(grid, 2, dim=2)[1]
    yield torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    yield torch.arange(3.0).expand(4, 3)
    yield torch.complex(grid, -grid).conj()
    yield torch.complex(grid, -grid).conj().imag
    yield torch.arange(4096.0)[1000:1256]


def tensors_of_sizes(sizes_bytes: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """A flat uint8 tensor of each size, no two alike."""
    for number, size_bytes in enumerate(sizes_bytes):
        period = ((torch.arange(251) * 31 + number) % 251).to(torch.uint8)
        yield period.repeat(size_bytes // 251 + 1)[:size_bytes]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bits, NaN included."""
    return difference(one, other) == ""


def difference(got: torch.Tensor, sent: torch.Tensor) -> str:
    """Difference between a tensor and the one that was sent, in words; empty if none."""
    if got.dtype != sent.dtype:
        return f"its dtype is {got.dtype}, not {sent.dtype}"
    if got.shape != sent.shape:
        return f"its shape is {tuple(got.shape)}, not {tuple(sent.shape)}"
    here, there = _bits(got), _bits(sent)
    if torch.equal(here, there):
        return ""
    differing = torch.nonzero(here != there)
    return (
        f"{len(differing)} of {here.numel()} bytes differ, from byte {int(differing[0])} "
        f"to byte {int(differing[-1])}"
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)
