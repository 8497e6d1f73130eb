"""One function, many shapes: a compiled program per signature, made on first use.

Takes a function that adds operators to a `KernelGraph`; gives a callable of tensors. It promises
one optimization per combination of shapes, dtypes and strides (and none for one that the cache
knows), and that later calls of a known combination only look it up: microseconds, not a search.
Where a dim is declared symbolic (`dims`), one search and one verdict serve all its sizes.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, overload

import numpy as np

from obelisk.app.calls import TORCH_NAMES, Tensor
from obelisk.app.compiled import Compiled
from obelisk.app.loading import as_graph
from obelisk.app.pipeline import optimize
from obelisk.app.sized import CompiledFamily, optimize_family
from obelisk.base.errors import CallError, MalformedGraph, UserError
from obelisk.ir import DType, Graph, KernelGraph
from obelisk.ir.build import row_major
from obelisk.ir.family import Dim, FamilyGraph, trace

Key = tuple[tuple[tuple[int, ...], str, tuple[int, ...]], ...]  # shape, dtype, strides in elements
_BY_NAME = {
    **{d.numpy.name: d for d in DType},
    **{f"torch.{name}": d for d, name in TORCH_NAMES.items()},
}


class Family:
    """A program for every shape it is called with; make one with `jit`.

    >>> @jit(budget=30)                             # doctest: +SKIP
    ... def block(g, x, w):
    ...     return g.matmul(g.rms_norm(x), w)
    >>> y = block(x, w)         # optimizes for these shapes  # doctest: +SKIP
    >>> y = block(x, w)         # runs                        # doctest: +SKIP
    """

    def __init__(
        self,
        builder: Callable[..., Any],
        options: dict[str, Any],
        dims: Mapping[str, Mapping[int, Dim]] | None = None,
    ) -> None:
        parameters = list(inspect.signature(builder).parameters)
        if not parameters:
            raise UserError(
                f"{builder.__name__}() takes nothing: its first parameter is the KernelGraph, "
                "each further one an input"
            )
        self.builder, self.options = builder, options
        self.names = parameters[1:]
        self.dim, self.places = _places(builder.__name__, self.names, dims or {})
        self.compiled: dict[Key, Compiled] = {}
        self.families: dict[Key, CompiledFamily] = {}
        self._checked: set[Key] = set()  # signatures that were seen to belong to their family
        self._lock = Lock()
        self.__name__, self.__doc__ = builder.__name__, builder.__doc__

    def __call__(self, *tensors: Tensor, out: Tensor | None = None) -> Any:
        """Run on these tensors, optimizing first when their combination of shapes is new.

        Raises `ShapeError` for a size outside the range of a symbolic dim.
        """
        if self.dim is not None:
            return self.prepare_family(*tensors)(*tensors, out=out)
        found = self.compiled.get(key_of(tensors))
        if found is None:
            found = self.prepare(*tensors)
        return found(*tensors, out=out)

    def prepare(self, *tensors: Tensor) -> Compiled:
        """The compiled program for tensors like these; only shape, dtype and strides are read."""
        key = key_of(tensors)
        with self._lock:
            if key not in self.compiled:
                self.compiled[key] = optimize(self.graph(*tensors), **self.options)
            return self.compiled[key]

    def prepare_family(self, *tensors: Tensor) -> CompiledFamily:
        """The family for tensors like these, of any size of the symbolic dim.

        Raises `ShapeError` naming dim, size and range for a size outside it, `CallError` where
        tensors disagree about the size, and `MalformedGraph` where the function builds another
        structure at this size than at others.
        """
        key = self._key(tensors)
        if self.dim is None:
            raise UserError(f"{self.__name__}() has no symbolic dim: declare it with dims=")
        sizes = {key[i][0][d] for i, d in self.places}
        if len(sizes) > 1:
            where = ", ".join(f"{self.names[i]}.{d} {key[i][0][d]}" for i, d in self.places)
            raise CallError(f"{self.__name__}(): {self.dim.name} is not one number: {where}")
        size = self.dim.check(sizes.pop(), f"{self.__name__}()")
        open_key = self._resized(key, 0)
        with self._lock:
            if open_key not in self.families:
                made: FamilyGraph = trace(lambda n: self._graph(self._resized(key, n)), self.dim)
                self.families[open_key] = optimize_family(made, **self.options)
            found = self.families[open_key]
            if key not in self._checked:
                graph = self._graph(self._resized(key, size))
                if graph.digest != found.family.at(size).digest:
                    raise MalformedGraph(
                        f"{self.__name__}() builds another structure at {self.dim.name} {size} "
                        "than at other sizes: leave it out of the range, or use no symbolic dim"
                    )
                self._checked.add(key)
        return found

    def _resized(self, key: Key, size: int) -> Key:
        """The signature at another size, dense."""
        out = []
        for i, (shape, dtype, _) in enumerate(key):
            new = tuple(size if (i, d) in self.places else n for d, n in enumerate(shape))
            out.append((new, dtype, row_major(new)))
        return tuple(out)

    def graph(self, *tensors: Tensor) -> Graph:
        """The program for tensors like these."""
        return self._graph(self._key(tensors))

    def _key(self, tensors: tuple[Tensor, ...]) -> Key:
        if len(tensors) != len(self.names):
            raise CallError(
                f"{self.__name__}({', '.join(self.names)}) takes {len(self.names)} tensors, "
                f"got {len(tensors)}"
            )
        key = key_of(tensors)
        for i, d in self.places:
            if d >= len(key[i][0]):
                raise CallError(
                    f"input {self.names[i]!r} has shape {key[i][0]}: it has no axis {d}, which "
                    f"should be {self.dim.name if self.dim else ''}"
                )
        return key

    def _graph(self, key: Key) -> Graph:
        g = KernelGraph(self.__name__)
        nodes = []
        for name, (shape, dtype, strides) in zip(self.names, key, strict=True):
            if dtype not in _BY_NAME:
                raise CallError(f"input {name!r} has dtype {dtype}, which Obelisk does not know")
            nodes.append(g.input(shape, _BY_NAME[dtype], name, strides))
        return as_graph(self.builder(g, *nodes), g, f"{self.__name__}()")


@overload
def jit(builder: Callable[..., Any], **options: Any) -> Family: ...
@overload
def jit(builder: None = None, **options: Any) -> Callable[[Callable[..., Any]], Family]: ...
def jit(
    builder: Callable[..., Any] | None = None,
    *,
    dims: Mapping[str, Mapping[int, Dim]] | None = None,
    **options: Any,
) -> Any:
    """Make a `Family` of a function `f(g, x, y, ...)` that returns its results.

    `options` are those of `optimize`. Use it as `@jit` or `@jit(budget=30)`. `dims` names the axes
    that are one symbolic dim, as `dims={"x": {0: Dim("batch", 1, 64)}}`: then one search and one
    verdict serve all its sizes, and `options` are those of `optimize_family`.
    """
    if builder is None:
        return lambda f: Family(f, options, dims)
    return Family(builder, options, dims)


def family(build: Callable[..., Any], **dim: tuple[int, int]) -> FamilyGraph:
    """The family graph of a function `f(g, n)` that returns its results for every size `n`.

    >>> def rows(g, n):
    ...     return g.softmax(g.input((n, 64)))
    >>> family(rows, batch=(1, 32)).dim
    Dim(name='batch', low=1, high=32)
    """
    if len(dim) != 1:
        raise UserError(
            f"family() takes one symbolic dim as NAME=(LOW, HIGH), got {', '.join(dim) or 'none'}"
        )
    ((name, ends),) = dim.items()
    if len(ends) != 2:
        raise UserError(f"{name} is {ends}, expected (LOW, HIGH)")
    label = getattr(build, "__name__", "program")

    def at(size: int) -> Graph:
        g = KernelGraph(label)
        return as_graph(build(g, size), g, f"{label}()")

    return trace(at, Dim(name, *ends))


def _places(
    function: str, names: list[str], dims: Mapping[str, Mapping[int, Dim]]
) -> tuple[Dim | None, tuple[tuple[int, int], ...]]:
    """The symbolic dim and the (input, axis) that it is the extent of."""
    found = {dim for axes in dims.values() for dim in axes.values()}
    unknown = [name for name in dims if name not in names]
    if unknown:
        raise UserError(f"{function}({', '.join(names)}) has no input {unknown[0]!r}")
    if dims and len(found) != 1:
        raise UserError(f"{function}(): dims names {len(found)} symbolic dims, a family has one")
    places = tuple((names.index(name), axis) for name, axes in dims.items() for axis in axes)
    if any(axis < 0 for _, axis in places):
        raise UserError(f"{function}(): axes in dims count from 0")
    return (found.pop() if found else None), places


def key_of(tensors: tuple[Tensor, ...]) -> Key:
    """Shapes, dtypes and strides of tensors; raises `CallError` for what is no tensor."""
    return tuple(_describe(i, t) for i, t in enumerate(tensors))


def _describe(index: int, x: Tensor) -> tuple[tuple[int, ...], str, tuple[int, ...]]:
    if isinstance(x, np.ndarray):
        size = x.dtype.itemsize
        if any(s % size for s in x.strides):
            raise CallError(f"input {index} has strides that are no multiple of its element size")
        return x.shape, x.dtype.name, tuple(s // size for s in x.strides)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return tuple(x.shape), str(x.dtype), tuple(x.stride())
    raise CallError(
        f"input {index} is a {type(x).__name__}, expected a numpy array or a torch tensor"
    )
