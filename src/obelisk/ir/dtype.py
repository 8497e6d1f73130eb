"""Element types: their size, numpy form and the type they accumulate in.

Narrow floats and int4 come from `ml_dtypes`, the library that JAX and others share for them.
"""

from __future__ import annotations

import enum

import ml_dtypes
import numpy as np

from obelisk.base.errors import UnknownName


class DType(enum.Enum):
    """An element type. The value is its name in text forms, errors and the command line."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python call

    F64 = "f64"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    F8E4M3 = "f8e4m3"
    I32 = "i32"
    I8 = "i8"
    I4 = "i4"
    BOOL = "bool"

    @property
    def bits(self) -> int:
        """Bits of one element as stored in device memory."""
        return _BITS[self]

    @property
    def nbytes(self) -> float:
        """Bytes of one element (0.5 for `i4`)."""
        return _BITS[self] / 8

    @property
    def numpy(self) -> np.dtype:
        """The numpy dtype that holds it (from `ml_dtypes` where numpy has none)."""
        return _NUMPY[self]

    @property
    def is_float(self) -> bool:
        """True for the floating-point types."""
        return self in _FLOATS

    @property
    def accumulator(self) -> DType:
        """The type that sums and products of this type are kept in: f32 for narrow floats, i32 for
        integers.
        """
        if self is DType.F64:
            return DType.F64
        return DType.F32 if self.is_float else DType.I32

    def __str__(self) -> str:
        return self.value


_BITS = {
    DType.F64: 64, DType.F32: 32, DType.F16: 16, DType.BF16: 16, DType.F8E4M3: 8,
    DType.I32: 32, DType.I8: 8, DType.I4: 4, DType.BOOL: 8,
}  # fmt: skip
_FLOATS = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16, DType.F8E4M3})
_NUMPY: dict[DType, np.dtype] = {
    DType.F64: np.dtype(np.float64),
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.F8E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    DType.I32: np.dtype(np.int32),
    DType.I8: np.dtype(np.int8),
    DType.I4: np.dtype(ml_dtypes.int4),
    DType.BOOL: np.dtype(np.bool_),
}
_ALIASES = {
    "fp64": DType.F64, "float64": DType.F64, "fp32": DType.F32, "float32": DType.F32,
    "fp16": DType.F16, "float16": DType.F16, "half": DType.F16, "bfloat16": DType.BF16,
    "fp8": DType.F8E4M3, "float8_e4m3fn": DType.F8E4M3, "int32": DType.I32, "int8": DType.I8,
    "int4": DType.I4,
}  # fmt: skip


def parse_dtype(name: str | DType) -> DType:
    """The dtype called `name` (`f32`, `fp32` and `float32` are one); raises `UnknownName` with the
    known names.
    """
    if isinstance(name, DType):
        return name
    key = name.lower()
    if key in _ALIASES:
        return _ALIASES[key]
    try:
        return DType(key)
    except ValueError:
        known = ", ".join(d.value for d in DType)
        raise UnknownName(f"unknown dtype {name!r}: known are {known}") from None


def promote(a: DType, b: DType) -> DType | None:
    """The common type of two operands, or None where Obelisk asks for an explicit cast (f16 with
    bf16,
    say).

    Equal types stay; a wider float absorbs a narrower one; everything else must be cast on purpose.
    """
    if a is b:
        return a
    for wide in (DType.F64, DType.F32):
        if wide in (a, b) and a.is_float and b.is_float:
            return wide
    return None
