"""Writing graphs as a Mirage checkpoint.

Takes frozen graphs; gives the decoded JSON (a list of operator lists) that `load_mirage` reads. An
operator that Mirage has no word for is an error that names it, and so are tiles that do not divide,
results without a map for every grid axis, and stores of the loop's iterations. What Mirage's own
files leave out (clamp's bounds, a scalar factor) is written in fields `min_val`, `max_val` and
`scalar`, which `load_mirage` reads back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from obelisk.base.errors import MalformedGraph
from obelisk.ir import build as b
from obelisk.ir import composite as c
from obelisk.ir.block import BlockGraph, Phase, Reduce, Store
from obelisk.ir.graph import Graph
from obelisk.ir.mirage import (
    ACCUMULATORS,
    AXES,
    BINARY,
    DEFAULT_DIMX,
    DTYPE_TO_NUMBER,
    MAX_DIMS,
)
from obelisk.ir.node import Node
from obelisk.ir.op import LoadAttrs, Op

Json = Any
FIRST_KERNEL_GUID = 10_000_000
FIRST_BLOCK_GUID = 20_000_000

# Words with one operand that are composites here, tried in this order; the primitives follow by
# name.
_COMPOSITES: tuple[tuple[str, Callable[[Node], Node]], ...] = (
    ("rms_norm", c.rms_norm), ("silu", c.silu), ("gelu", c.gelu), ("relu", c.relu),
)  # fmt: skip
_UNARY = {
    Op.EXP: "exp", Op.SQUARE: "square", Op.SQRT: "sqrt", Op.LOG: "log", Op.SIGMOID: "sigmoid",
}  # fmt: skip
_BINARY = {Op.ADD: "add", Op.SUB: "sub", Op.MUL: "mul", Op.DIV: "div", Op.MATMUL: "matmul"}


@dataclass(frozen=True)
class _Word:
    """One Mirage operator that computes a node: its name, operands and extra fields."""

    name: str
    operands: tuple[Node, ...]
    extra: dict[str, Json] = field(default_factory=dict)


def save_mirage(graphs: Sequence[Graph], path: str | Path | None = None) -> list[Json]:
    """The graphs as decoded Mirage JSON, also written to `path` if given. Deterministic: guids
    count up from fixed starts. Raises `MalformedGraph` naming the graph and the operator that has
    no Mirage form.
    """
    data = []
    for graph in graphs:
        try:
            data.append(_Writer(graph).write())
        except MalformedGraph as e:
            raise MalformedGraph(f"graph {graph.name!r} has no Mirage form: {e}") from None
    if path is not None:
        Path(path).write_text(json.dumps(data), encoding="utf-8")
    return data


def _tensor(node: Node, guid: int, **more: Json) -> dict[str, Json]:
    if node.rank > MAX_DIMS:
        raise MalformedGraph(f"{node!r} has more than {MAX_DIMS} dims")
    if node.dtype not in DTYPE_TO_NUMBER:
        raise MalformedGraph(f"dtype {node.dtype} of {node!r} has no Mirage number")
    return {
        "data_type": DTYPE_TO_NUMBER[node.dtype],
        "dim": [*node.shape, *[0] * (MAX_DIMS - node.rank)],
        "guid": guid,
        "num_dims": node.rank,
        **more,
    }


def _maps(values: Sequence[int | None]) -> dict[str, int]:
    padded = [*values, *[None] * (len(AXES) - len(values))]
    return {a: -1 if v is None else v for a, v in zip(AXES, padded, strict=True)}


def _sizes(values: Sequence[int]) -> dict[str, int]:
    return dict(zip(AXES, [*values, *[1] * (len(AXES) - len(values))], strict=True))


def _scalar(node: Node) -> float | None:
    return node.attrs.value if node.op is Op.CONST else None


def _composite_word(node: Node) -> _Word | None:
    """The composite or scalar word for a node, found by rebuilding it from its candidate
    operand.
    """
    args = node.inputs
    if node.op is Op.MIN and args[0].op is Op.MAX:
        high, low = _scalar(args[1]), _scalar(args[0].inputs[1])
        if low is not None and high is not None and low <= high:
            return _Word("clamp", (args[0].inputs[0],), {"min_val": low, "max_val": high})
    x: Node | None = args[0] if args else None
    if node.op is Op.MUL and x is not None and x.op is Op.MUL:
        inner = x.inputs[0]
        if c.gelu(inner) is node if inner.dtype.is_float else False:
            return _Word("gelu", (inner,))
    if x is not None and node.op in (Op.MUL, Op.DIV, Op.MAX) and x.dtype.is_float and x.rank:
        for name, build in _COMPOSITES:
            if build(x) is node:
                return _Word(name, (x,))
    if node.op is Op.NEG:
        return _Word("mul_scalar", args, {"scalar": -1.0})
    if node.op in (Op.MUL, Op.DIV):
        factor = _scalar(args[1])
        if factor is not None:
            value = factor if node.op is Op.MUL else 1 / factor if factor else None
            if value is None:
                raise MalformedGraph("division by the constant 0")
            return _Word("mul_scalar", (args[0],), {"scalar": value})
        if node.op is Op.MUL and _scalar(args[0]) is not None:
            return _Word("mul_scalar", (args[1],), {"scalar": _scalar(args[0])})
    return None


def _plain_word(node: Node, level: str) -> _Word:
    """The word for a primitive; raises `MalformedGraph` naming the operator when there is none."""
    args = node.inputs
    if node.op in _UNARY:
        return _Word(_UNARY[node.op], args)
    if node.op in _BINARY:
        for other in args:
            if other.op in (Op.CONST, Op.SIZE):
                raise MalformedGraph(f"{node.op.value} with a {other.op.value} has no Mirage word")
        if node.op is Op.SUB and level == "kn":
            raise MalformedGraph("sub exists only inside Mirage's block graphs")
        if any(i.rank != node.rank for i in args):
            raise MalformedGraph(f"{node.op.value} of different ranks: Mirage aligns equal ranks")
        if BINARY[_BINARY[node.op]](*args) is not node:
            raise MalformedGraph(f"{node.op.value} accumulating in {node.attrs.accum}")
        return _Word(_BINARY[node.op], args)
    if node.op is Op.CONCAT and len(args) == 2:
        return _Word(f"concat_{node.attrs.axis}", args)
    if node.op is Op.SUM:
        axis, keep = node.attrs.axis, node.attrs.keep
        if level == "kn" or keep == 1:
            return _Word(f"reduction_{axis}", args)
        return _Word(f"reduction_{axis}_to_dimx", args)
    raise MalformedGraph(f"operator {node.op.value} has no Mirage word at this level")


class _Writer:
    """Writes one graph, each value once and operands first."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.guids: dict[Node, int] = {}
        self.ops: list[Json] = []
        self.next_block_guid = FIRST_BLOCK_GUID

    def dtensor(self, node: Node) -> Json:
        return _tensor(node, self.guids[node], layout="DmemRowMajor")

    def define(self, node: Node) -> Json:
        self.guids[node] = FIRST_KERNEL_GUID + len(self.guids)
        return self.dtensor(node)

    def write(self) -> list[Json]:
        none = _maps(())
        for node in self.graph.inputs:
            self.ops.append({
                "op_type": "kn_input_op", "input_map": none, "input_tensors": [],
                "input_strides": list(node.attrs.strides or b.row_major(node.shape)),
                "output_tensors": [self.define(node)],
            })  # fmt: skip
        for node in self.graph.outputs:
            self.emit(node)
        for node in self.graph.outputs:
            self.ops.append({
                "op_type": "kn_output_op", "output_map": none,
                "output_strides": list(b.row_major(node.shape)),
                "input_tensors": [self.dtensor(node)], "output_tensors": [],
            })  # fmt: skip
        return self.ops

    def emit(self, root: Node) -> None:
        """Write what `root` needs, then `root`. A stack, so that deep graphs do not recurse."""
        stack = [root]
        while stack:
            node = stack[-1]
            if node in self.guids:
                stack.pop()
                continue
            if node.op is Op.INPUT:
                raise MalformedGraph(f"input {node.attrs.index} is not declared")
            word = None
            if node.op is not Op.BLOCK:
                word = _composite_word(node) or _plain_word(node, "kn")
            needs = word.operands if word else node.inputs
            missing = [n for n in needs if n not in self.guids]
            if missing:
                stack += reversed(missing)
                continue
            stack.pop()
            if word is None:
                self.customized(node)
            else:
                self.ops.append({
                    "op_type": f"kn_{word.name}_op",
                    "input_tensors": [self.dtensor(n) for n in word.operands],
                    "output_tensors": [self.define(node)], **word.extra,
                })  # fmt: skip

    def customized(self, node: Node) -> None:
        """Write a launch; all results of its block are defined together."""
        block: BlockGraph = node.attrs.block
        inputs = node.inputs
        results = b.run_block(block, inputs)
        outputs = [self.define(r) for r in results]
        body = _BlockWriter(self, block, inputs, results)
        self.ops.append({
            "op_type": "kn_customized_op", "bgraph": body.write(),
            "input_tensors": [self.dtensor(i) for i in inputs], "output_tensors": outputs,
        })  # fmt: skip


class _BlockWriter:
    """Writes one block graph."""

    def __init__(
        self, outer: _Writer, block: BlockGraph, inputs: Sequence[Node], results: Sequence[Node]
    ) -> None:
        self.outer, self.block, self.inputs, self.results = outer, block, inputs, results
        self.tensors: dict[tuple[Node, bool], Json] = {}  # (value, closed by a plain accumulator)
        self.ops: list[Json] = []
        self.offset = 0
        self.dimx: int | None = None

    def define(self, key: tuple[Node, bool], after: bool) -> Json:
        node = key[0]
        tensor = _tensor(
            node, self.outer.next_block_guid, layout="SmemRowMajor", smem_offset=self.offset,
            after_accum=after,
        )  # fmt: skip
        self.outer.next_block_guid += 1
        self.offset += node.nbytes
        self.tensors[key] = tensor
        return tensor

    def write(self) -> Json:
        block = self.block
        if block.info.ragged:
            raise MalformedGraph(f"{block!r} has tiles that do not divide")
        for load in sorted(block.loads, key=lambda n: (n.attrs.index, str(n.attrs))):
            self.load(load)
        for store, result in zip(block.stores, self.results, strict=True):
            self.store(store, result)
        return {
            "graph_level": "thread_block_graph",
            "grid_dim": _sizes(block.grid),
            "block_dim": _sizes((block.threads,)),
            "forloop_range": block.loop,
            "reduction_dimx": self.dimx or DEFAULT_DIMX,
            "smem_offset": self.offset,
            "operators": self.ops,
        }

    def load(self, node: Node) -> None:
        at: LoadAttrs = node.attrs
        self.ops.append({
            "op_type": "tb_input_op", "dtensor": self.outer.dtensor(self.inputs[at.index]),
            "forloop_dim": -1 if at.fmap is None else at.fmap, "input_map": _maps(at.imap),
            "input_tensors": [], "output_tensors": [self.define((node, False), False)],
        })  # fmt: skip

    def store(self, store: Store, result: Node) -> None:
        if store.reduce is not Reduce.NONE:
            raise MalformedGraph("a store that reduces across blocks has no Mirage word")
        if store.fmap is not None and self.block.loop > 1:
            raise MalformedGraph("a store of the loop's iterations has no Mirage word")
        if store.dtype is not store.value.dtype:
            raise MalformedGraph(f"a store of {store.value.dtype} as {store.dtype}")
        key = self.after(store.value)
        self.emit(key)
        self.ops.append({
            "op_type": "tb_output_op", "dtensor": self.outer.dtensor(result),
            "output_map": _maps(store.omap), "input_tensors": [self.tensors[key]],
            "output_tensors": [],
        })  # fmt: skip

    def after(self, node: Node) -> tuple[Node, bool]:
        """The key of a value as it is after the loop; a value from before is closed by an
        accumulator.
        """
        if self.block.info.phase[node] is Phase.POST:
            return node, False
        if self.block.loop > 1:
            raise MalformedGraph(
                f"{node!r} is not of the loop but is used after it: Mirage wants an accumulator"
            )
        return node, True

    def word(self, node: Node) -> _Word:
        """The word for a block-level value; accumulators that also reduce are tried first."""
        loop = self.block.loop
        total = node
        while total.op in (Op.SQRT, Op.DIV):
            total = total.inputs[0]
        if total.op is Op.ACCUM_SUM:
            folded = total.inputs[0]
            if folded.op is Op.SUM and folded.attrs.axis == folded.rank - 1:
                x, keep = folded.inputs[0], folded.attrs.keep
                operands = [x, x.inputs[0]] if x.op is Op.SQUARE else [x]
                for name in (n for n in ACCUMULATORS if n != "accum_nored"):
                    for y in operands:
                        dimx = self.dimx or (keep if keep > 1 else DEFAULT_DIMX)
                        if y.shape[-1] % dimx and "tox" in name:
                            continue
                        if y.dtype.is_float and ACCUMULATORS[name](y, dimx, loop) is node:
                            if "tox" in name:
                                self.dimx = dimx
                            return _Word(name, (y,))
            if node is total:
                return _Word("accum_nored", (folded,))
        found = _composite_word(node) or _plain_word(node, "tb")
        if found.name.endswith("_to_dimx"):
            keep = node.attrs.keep
            if self.dimx not in (None, keep):
                raise MalformedGraph(f"sums that keep {self.dimx} and {keep} columns in one block")
            self.dimx = keep
        return found

    def emit(self, root: tuple[Node, bool]) -> None:
        """Write a value and what it needs."""
        phase = self.block.info.phase
        stack = [root]
        while stack:
            key = stack[-1]
            node, closed = key
            if key in self.tensors:
                stack.pop()
                continue
            if node.op is Op.LOAD and not closed:
                raise MalformedGraph(f"{node!r} is no load of this block")
            word = _Word("accum_nored", (node,)) if closed else self.word(node)
            late = phase[node] is Phase.POST and not word.name.startswith("accum")
            keys = [self.after(n) if late else (n, False) for n in word.operands]
            missing = [k for k in keys if k not in self.tensors]
            if missing:
                stack += reversed(missing)
                continue
            stack.pop()
            self.ops.append({
                "op_type": f"tb_{word.name}_op", "input_tensors": [self.tensors[k] for k in keys],
                "output_tensors": [self.define(key, closed or phase[node] is Phase.POST)],
                **word.extra,
            })  # fmt: skip
