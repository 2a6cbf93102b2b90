"""The dtypes that travel: one table of wire code, name and size, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass

MAX_DIMS = 8
"""Most dimensions that a tensor on the wire can have."""


@dataclass(frozen=True, slots=True)
class DType:
    """One element type."""

    code: int  # its number on the wire; never reused, so old peers stay readable
    name: str  # torch's name without the ``torch.`` prefix, as written in a plan
    itemsize: int  # bytes per element
    differentiable: bool  # whether autograd can take gradients for it (floating and complex types)


DTYPES: tuple[DType, ...] = (
    DType(1, "bool", 1, False),
    DType(2, "uint8", 1, False),
    DType(3, "int8", 1, False),
    DType(4, "uint16", 2, False),
    DType(5, "int16", 2, False),
    DType(6, "uint32", 4, False),
    DType(7, "int32", 4, False),
    DType(8, "uint64", 8, False),
    DType(9, "int64", 8, False),
    DType(10, "float16", 2, True),
    DType(11, "bfloat16", 2, True),
    DType(12, "float32", 4, True),
    DType(13, "float64", 8, True),
    DType(14, "complex32", 4, True),
    DType(15, "complex64", 8, True),
    DType(16, "complex128", 16, True),
    DType(17, "float8_e4m3fn", 1, True),
    DType(18, "float8_e5m2", 1, True),
    DType(19, "float8_e4m3fnuz", 1, True),
    DType(20, "float8_e5m2fnuz", 1, True),
    DType(21, "float8_e8m0fnu", 1, True),
)
"""Every dtype with a CPU copy kernel in torch; sub-byte and quantised ones are refused."""

DTYPE_BY_CODE: dict[int, DType] = {dtype.code: dtype for dtype in DTYPES}
DTYPE_BY_NAME: dict[str, DType] = {dtype.name: dtype for dtype in DTYPES}
