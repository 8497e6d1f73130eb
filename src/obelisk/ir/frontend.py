"""`KernelGraph`: the builder that users write programs with. It collects inputs and outputs and
freezes to a `Graph`.
"""

from __future__ import annotations

from collections.abc import Sequence

from obelisk.base.errors import MalformedGraph
from obelisk.ir import build, composite
from obelisk.ir.dtype import DType, parse_dtype
from obelisk.ir.graph import Graph, make_graph
from obelisk.ir.node import Node


class KernelGraph:
    """A tensor program under construction.

    >>> g = KernelGraph("double")
    >>> x = g.input((2, 3), "f32", name="x")
    >>> g.output(g.add(x, x))
    >>> g.freeze().outputs[0].shape
    (2, 3)
    """

    # One line per operator: the functions of `build` and `composite` are the methods of a graph.
    add, sub, mul, div = (staticmethod(f) for f in (build.add, build.sub, build.mul, build.div))
    maximum, minimum, less = (staticmethod(f) for f in (build.maximum, build.minimum, build.less))
    where, cast, const, iota = (
        staticmethod(f) for f in (build.where, build.cast, build.const, build.iota)
    )
    neg, exp, log, sqrt = (staticmethod(f) for f in (build.neg, build.exp, build.log, build.sqrt))
    rsqrt, square, tanh = (staticmethod(f) for f in (build.rsqrt, build.square, build.tanh))
    sigmoid, erf = (staticmethod(f) for f in (build.sigmoid, build.erf))
    sum, reduce_max, matmul = (staticmethod(f) for f in (build.sum, build.reduce_max, build.matmul))
    reshape, transpose = (staticmethod(f) for f in (build.reshape, build.transpose))
    broadcast, slice, concat = (
        staticmethod(f) for f in (build.broadcast, build.slice, build.concat)
    )
    mean, softmax = (staticmethod(f) for f in (composite.mean, composite.softmax))
    rms_norm, layer_norm = (staticmethod(f) for f in (composite.rms_norm, composite.layer_norm))
    silu, gelu, relu = (staticmethod(f) for f in (composite.silu, composite.gelu, composite.relu))
    abs, clamp = (staticmethod(f) for f in (composite.absolute, composite.clamp))
    rope, attention = (staticmethod(f) for f in (composite.rope, composite.attention))

    def __init__(self, name: str = "graph") -> None:
        self.name = name
        self._inputs: list[Node] = []
        self._names: list[str] = []
        self._outputs: list[Node] = []
        self._output_names: list[str] = []

    def input(
        self,
        shape: Sequence[int],
        dtype: str | DType = DType.F32,
        name: str | None = None,
        strides: Sequence[int] | None = None,
    ) -> Node:
        """Declare the next input. `strides` are in elements; by default the tensor is dense and
        row-major.
        """
        label = name or f"x{len(self._inputs)}"
        if label in self._names:
            raise MalformedGraph(f"graph {self.name!r} has two inputs called {label!r}")
        node = build.input_node(
            len(self._inputs),
            tuple(shape),
            parse_dtype(dtype),
            tuple(strides) if strides is not None else None,
        )
        self._inputs.append(node)
        self._names.append(label)
        return node

    def output(self, *values: Node, name: str | None = None) -> None:
        """Mark results, in order."""
        for value in values:
            self._outputs.append(value)
            self._output_names.append(
                name if name and len(values) == 1 else f"y{len(self._output_names)}"
            )

    def freeze(self) -> Graph:
        """The frozen graph; raises `MalformedGraph` when there is no output."""
        return make_graph(self._inputs, self._outputs, self._names, self._output_names, self.name)
