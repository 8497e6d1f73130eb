"""Kernel graphs as frozen values, and the mutable builder that users write with.

`Graph` is what every stage takes and gives: input nodes by position, output nodes, and names, which
play no part in the digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from obelisk.base.digest import digest
from obelisk.base.errors import MalformedGraph
from obelisk.ir.block import BlockGraph
from obelisk.ir.node import Node, topological
from obelisk.ir.op import Op

_FREE = frozenset({Op.INPUT, Op.CONST, Op.SIZE, Op.IOTA})
VIEWS = frozenset({Op.RESHAPE, Op.TRANSPOSE, Op.BROADCAST, Op.SLICE})


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel: a block graph over tensors, or a single predefined operator (`block` None)."""

    node: Node
    block: BlockGraph | None
    inputs: tuple[Node, ...]
    results: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """A frozen kernel graph.

    Attributes:
        inputs: the input nodes; `inputs[i].attrs.index == i`.
        outputs: the results, in order.
        input_names, output_names: for people and errors only.
        name: for people and file names only.
    """

    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    name: str = "graph"

    @property
    def digest(self) -> str:
        """Content digest: structure, shapes, dtypes, strides, order of inputs and outputs; not
        names.
        """
        return digest(
            "graph", *(i.digest for i in self.inputs), "->", *(o.digest for o in self.outputs)
        )

    @property
    def nodes(self) -> list[Node]:
        """All kernel-level nodes, operands first."""
        return topological([*self.inputs, *self.outputs])

    def launches(self) -> list[Launch]:
        """The kernels in execution order. Views (reshape, transpose, broadcast, slice) and
        constants cost none.
        """
        out: list[Launch] = []
        seen: dict[object, int] = {}
        for node in self.nodes:
            if node.op in _FREE or node.op in VIEWS:
                continue
            block = node.attrs.block if node.op is Op.BLOCK else None
            key = (block, node.inputs) if block is not None else node
            if key in seen:
                at = seen[key]
                out[at] = Launch(out[at].node, block, node.inputs, (*out[at].results, node))
            else:
                seen[key] = len(out)
                out.append(Launch(node, block, node.inputs, (node,)))
        return out


def make_graph(
    inputs: Sequence[Node],
    outputs: Sequence[Node],
    input_names: Sequence[str] = (),
    output_names: Sequence[str] = (),
    name: str = "graph",
) -> Graph:
    """A checked graph; raises `MalformedGraph` when an output reads an input that is not listed or
    is at another place.
    """
    inputs, outputs = tuple(inputs), tuple(outputs)
    if not outputs:
        raise MalformedGraph(f"graph {name!r} has no output: mark one with output()")
    for i, node in enumerate(inputs):
        if node.op is not Op.INPUT or node.attrs.index != i:
            raise MalformedGraph(f"graph {name!r}: input {i} is {node!r}")
    known = set(inputs)
    for node in topological(outputs):
        if node.op is Op.INPUT and node not in known:
            raise MalformedGraph(
                f"graph {name!r} reads input {node.attrs.index}, which it does not declare"
            )
        if node.op in (
            Op.LOAD,
            Op.ELEM,
            Op.THREAD,
            Op.ACCUM_SUM,
            Op.ACCUM_MAX,
            Op.RUNNING_MAX,
            Op.ACCUM_RESCALE,
        ):
            raise MalformedGraph(f"graph {name!r}: {node.op.value} cannot occur at kernel level")
    names = tuple(input_names) or tuple(f"x{i}" for i in range(len(inputs)))
    onames = tuple(output_names) or tuple(f"y{i}" for i in range(len(outputs)))
    if len(names) != len(inputs) or len(onames) != len(outputs):
        raise MalformedGraph(f"graph {name!r}: as many names as inputs and outputs are needed")
    return Graph(inputs, outputs, names, onames, name)
