"""One function, many shapes: a compiled program per signature, made on first use.

Takes a function that adds operators to a `KernelGraph`; gives a callable of tensors. It promises
one optimization per combination of shapes, dtypes and strides (and none for one that the cache
knows), and that later calls of a known combination only look it up: microseconds, not a search.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from threading import Lock
from typing import Any, overload

import numpy as np

from obelisk.app.calls import TORCH_NAMES, Tensor
from obelisk.app.compiled import Compiled
from obelisk.app.loading import as_graph
from obelisk.app.pipeline import optimize
from obelisk.base.errors import CallError, UserError
from obelisk.ir import DType, Graph, KernelGraph

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

    def __init__(self, builder: Callable[..., Any], options: dict[str, Any]) -> None:
        parameters = list(inspect.signature(builder).parameters)
        if not parameters:
            raise UserError(
                f"{builder.__name__}() takes nothing: its first parameter is the KernelGraph, "
                "each further one an input"
            )
        self.builder, self.options = builder, options
        self.names = parameters[1:]
        self.compiled: dict[Key, Compiled] = {}
        self._lock = Lock()
        self.__name__, self.__doc__ = builder.__name__, builder.__doc__

    def __call__(self, *tensors: Tensor, out: Tensor | None = None) -> Any:
        """Run on these tensors, optimizing first when their combination of shapes is new."""
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

    def graph(self, *tensors: Tensor) -> Graph:
        """The program for tensors like these."""
        if len(tensors) != len(self.names):
            raise CallError(
                f"{self.__name__}({', '.join(self.names)}) takes {len(self.names)} tensors, "
                f"got {len(tensors)}"
            )
        g = KernelGraph(self.__name__)
        nodes = []
        for name, (shape, dtype, strides) in zip(self.names, key_of(tensors), strict=True):
            if dtype not in _BY_NAME:
                raise CallError(f"input {name!r} has dtype {dtype}, which Obelisk does not know")
            nodes.append(g.input(shape, _BY_NAME[dtype], name, strides))
        return as_graph(self.builder(g, *nodes), g, f"{self.__name__}()")


@overload
def jit(builder: Callable[..., Any], **options: Any) -> Family: ...
@overload
def jit(builder: None = None, **options: Any) -> Callable[[Callable[..., Any]], Family]: ...
def jit(builder: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Make a `Family` of a function `f(g, x, y, ...)` that returns its results.

    `options` are those of `optimize`. Use it as `@jit` or `@jit(budget=30)`.
    """
    if builder is None:
        return lambda f: Family(f, options)
    return Family(builder, options)


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
