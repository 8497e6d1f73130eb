"""The input sets that candidates are called with, laid out in memory that the caller lends.

Takes a program, a seed and one buffer per input; `select(k)` turns the buffers into set k. Small
inputs differ wholly between the sets, large ones in a window of a million elements, so that
changing the set costs little however large the weights are, and a candidate that kept anything from
an earlier call is still found out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from obelisk.ir.dtype import DType
from obelisk.ir.graph import Graph
from obelisk.ir.node import Shape

_HUGE = 1 << 28  # bytes of inputs beyond which two sets must do instead of three
_POOL = 1 << 22  # distinct normals; larger tensors are pieced together from windows of them
_PIECE = 1 << 16
_WINDOW = 1 << 20  # elements by which a large input differs from set to set


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor at the border of a program: shape, dtype, element strides (None: dense)."""

    shape: Shape
    dtype: DType
    strides: Shape | None = None

    @property
    def storage(self) -> int:
        """Elements from the first to the last one, gaps included."""
        if self.strides is None:
            return prod(self.shape)
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the storage as numpy holds it."""
        return self.storage * self.dtype.numpy.itemsize

    def flat(self, raw: np.ndarray) -> np.ndarray:
        """The storage as elements."""
        return raw[: self.nbytes].view(self.dtype.numpy)

    def view(self, raw: np.ndarray) -> np.ndarray:
        """The tensor inside its storage bytes."""
        if self.strides is None:
            return self.flat(raw).reshape(self.shape)
        step = self.dtype.numpy.itemsize
        strides = [s * step for s in self.strides]
        return np.lib.stride_tricks.as_strided(self.flat(raw), self.shape, strides)


def input_specs(graph: Graph) -> list[TensorSpec]:
    """One spec per input."""
    return [TensorSpec(n.shape, n.dtype, n.attrs.strides) for n in graph.inputs]


def output_specs(graph: Graph) -> list[TensorSpec]:
    """One spec per output: dense and row-major."""
    return [TensorSpec(n.shape, n.dtype) for n in graph.outputs]


@dataclass(frozen=True, slots=True)
class _Window:
    """A stretch of an input's storage, and what it holds in each set."""

    start: int
    values: tuple[np.ndarray, ...]


class Inputs:
    """The sets of one program; exactly one is in the buffers at a time.

    Attributes:
        arrays: views of the buffers in the inputs' shapes and strides, holding the selected set.
        sets: how many there are: 3, or 2 for inputs over 256 MB.
        scale: standard deviation of the floating-point inputs.
    """

    def __init__(self, program: Graph, seed: int, buffers: Sequence[np.ndarray] = ()) -> None:
        """Draw set 0 into the buffers (each of the spec's bytes; by default private ones).

        Floats are normal with deviation 1, integers uniform in [-4, 4], bools fair coins.
        """
        self.specs = input_specs(program)
        self._raw = [*buffers] or [np.empty(s.nbytes, dtype=np.uint8) for s in self.specs]
        self.arrays = [s.view(raw) for s, raw in zip(self.specs, self._raw, strict=True)]
        self.scale = 1.0
        self.sets = 3 if sum(s.nbytes for s in self.specs) <= _HUGE else 2
        self._windows: list[list[_Window]] = []
        for i, (spec, raw) in enumerate(zip(self.specs, self._raw, strict=True)):
            raw[:] = 0xFF  # the gaps of a strided tensor: NaN in every float type
            self._windows.append(self._draw(spec, raw, np.random.default_rng([seed, i])))
        self.selected = 0

    def _draw(self, spec: TensorSpec, raw: np.ndarray, rng: np.random.Generator) -> list[_Window]:
        flat, view = spec.flat(raw), spec.view(raw)
        whole = spec.strides is not None or flat.size <= 4 * _WINDOW
        if whole:
            view[...] = _values(spec.dtype, rng, view.size).reshape(spec.shape)
            images = [flat.copy()]
            for _ in range(1, self.sets):
                view[...] = _values(spec.dtype, rng, view.size).reshape(spec.shape)
                images.append(flat.copy())
            flat[:] = images[0]
            return [_Window(0, tuple(images))]
        flat[:] = _values(spec.dtype, rng, flat.size)
        windows: list[_Window] = []
        for k in range(1, self.sets):
            start = k * (flat.size - _WINDOW) // self.sets
            old = flat[start : start + _WINDOW].copy()
            new = _values(spec.dtype, rng, _WINDOW)
            windows.append(_Window(start, tuple(new if s == k else old for s in range(self.sets))))
        return windows

    def select(self, k: int) -> list[np.ndarray]:
        """Put set k into the buffers; gives `arrays`."""
        for raw, spec, windows in zip(self._raw, self.specs, self._windows, strict=True):
            flat = spec.flat(raw)
            for w in windows:
                if w.values[k] is not w.values[self.selected]:
                    flat[w.start : w.start + w.values[k].size] = w.values[k]
        self.selected = k
        return self.arrays

    def halve(self) -> None:
        """Halve every floating-point input of every set."""
        self.scale /= 2
        for raw, spec, windows in zip(self._raw, self.specs, self._windows, strict=True):
            if not spec.dtype.is_float:
                continue
            half = spec.dtype.numpy.type(0.5)
            done: set[int] = set()
            for values in (spec.flat(raw), *(v for w in windows for v in w.values)):
                if id(values) not in done:
                    values *= half
                    done.add(id(values))


def _values(dtype: DType, rng: np.random.Generator, count: int) -> np.ndarray:
    """Random elements of a type."""
    if dtype is DType.BOOL:
        return rng.integers(0, 2, count).astype(np.bool_)
    if not dtype.is_float:
        return rng.integers(-4, 5, count).astype(dtype.numpy)
    if count <= _POOL:
        return rng.standard_normal(count).astype(dtype.numpy)
    pool = rng.standard_normal(_POOL).astype(dtype.numpy)
    out = np.empty(count, dtype=dtype.numpy)
    for start in range(0, count, _PIECE):
        size = min(_PIECE, count - start)
        at = int(rng.integers(0, _POOL - size))
        out[start : start + size] = pool[at : at + size]
    return out
