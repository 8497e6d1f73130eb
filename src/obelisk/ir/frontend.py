"""`KernelGraph`: the builder that users write programs with.

Takes shapes, dtypes and names; its methods are the functions of `build` and `composite`, on
interned nodes. Gives a frozen `Graph`. It holds only the list of inputs and outputs, so that two
builders may share values.
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

    # The functions of `build` and `composite` are the methods of a graph, each with its own type.
    add = staticmethod(build.add)
    sub = staticmethod(build.sub)
    mul = staticmethod(build.mul)
    div = staticmethod(build.div)
    maximum = staticmethod(build.maximum)
    minimum = staticmethod(build.minimum)
    less = staticmethod(build.less)
    where = staticmethod(build.where)
    cast = staticmethod(build.cast)
    const = staticmethod(build.const)
    iota = staticmethod(build.iota)
    neg = staticmethod(build.neg)
    exp = staticmethod(build.exp)
    log = staticmethod(build.log)
    sqrt = staticmethod(build.sqrt)
    rsqrt = staticmethod(build.rsqrt)
    square = staticmethod(build.square)
    tanh = staticmethod(build.tanh)
    sigmoid = staticmethod(build.sigmoid)
    erf = staticmethod(build.erf)
    sum = staticmethod(build.sum)
    reduce_max = staticmethod(build.reduce_max)
    matmul = staticmethod(build.matmul)
    reshape = staticmethod(build.reshape)
    transpose = staticmethod(build.transpose)
    broadcast = staticmethod(build.broadcast)
    slice = staticmethod(build.slice)
    concat = staticmethod(build.concat)
    mean = staticmethod(composite.mean)
    softmax = staticmethod(composite.softmax)
    rms_norm = staticmethod(composite.rms_norm)
    layer_norm = staticmethod(composite.layer_norm)
    silu = staticmethod(composite.silu)
    gelu = staticmethod(composite.gelu)
    relu = staticmethod(composite.relu)
    clamp = staticmethod(composite.clamp)
    rope = staticmethod(composite.rope)
    attention = staticmethod(composite.attention)
    abs = staticmethod(composite.absolute)

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
