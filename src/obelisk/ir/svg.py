"""A picture of a graph at all levels, as self-contained SVG text.

Kernels are boxes on layers by longest path from the inputs; every launch is expanded into its block
graph: what is read before the loop, the loop's body, the accumulators that leave it, and the stores
with their maps. Thread graphs are listed inside their box. The same graph gives the same bytes; no
font, script or file from outside is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

import rustworkx as rx

from obelisk.ir.block import BlockGraph, Phase, Reduce, Store
from obelisk.ir.graph import Graph, Launch
from obelisk.ir.node import Node
from obelisk.ir.op import Op, SizeScope

CHAR, LINE, PAD, GAP, LAYER = 6.7, 15.0, 8.0, 18.0, 34.0  # pixels; CHAR is a 11 px monospace glyph

_STYLE = """\
text { font: 11px monospace; fill: #1d2733; }
.title { font-weight: bold; }
.note { fill: #5a6875; }
.input { fill: #e6f0fa; stroke: #3d74ad; }
.output { fill: #e8f5e9; stroke: #2e7d32; }
.kernel { fill: #ffffff; stroke: #37474f; }
.block { fill: #fafbfc; stroke: #37474f; stroke-width: 1.5; }
.loop { fill: #fff8e6; stroke: #c98a00; stroke-dasharray: 5 3; }
.leaf { fill: #e6f0fa; stroke: #7a9cc0; }
.value { fill: #ffffff; stroke: #78909c; }
.accum { fill: #fde8e8; stroke: #c0392b; }
.store { fill: #e8f5e9; stroke: #2e7d32; }
.thread { fill: #f1eafa; stroke: #6a3fb5; }
.edge { fill: none; stroke: #90a4ae; }"""


@dataclass
class _Box:
    """A box with lines of text, or with an inner picture below them; `x` and `y` are its corner."""

    css: str
    lines: list[str]
    inner: _Picture | None = None
    x: float = 0.0
    y: float = 0.0

    @property
    def width(self) -> float:
        text = max((len(s) for s in self.lines), default=0) * CHAR + 2 * PAD
        return max(text, self.inner.width + 2 * PAD if self.inner else 0.0)

    @property
    def text_height(self) -> float:
        return len(self.lines) * LINE + PAD

    @property
    def height(self) -> float:
        return self.text_height + (self.inner.height + PAD if self.inner else 0.0)


@dataclass
class _Picture:
    """Boxes on layers and the edges between them."""

    boxes: list[_Box] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    width: float = 0.0
    height: float = 0.0

    def add(self, box: _Box) -> int:
        self.boxes.append(box)
        return len(self.boxes) - 1

    def lay_out(self) -> _Picture:
        """Layer by longest path, then order each layer by the mean place of what its boxes read."""
        layers = _layers(len(self.boxes), self.edges)
        reads: dict[int, list[int]] = {}
        for a, b in self.edges:
            reads.setdefault(b, []).append(a)
        place: dict[int, float] = {}
        y = 0.0
        rows: list[list[int]] = []
        for layer in layers:

            def weight(i: int) -> tuple[float, int]:
                above = [place[a] for a in reads.get(i, []) if a in place]
                return (sum(above) / len(above) if above else float(i), i)

            row = sorted(layer, key=weight)
            x = 0.0
            for i in row:
                self.boxes[i].x, self.boxes[i].y = x, y
                place[i] = x + self.boxes[i].width / 2
                x += self.boxes[i].width + GAP
            y += max(self.boxes[i].height for i in row) + LAYER
            self.width = max(self.width, x - GAP)
            rows.append(row)
        self.height = max(y - LAYER, 0.0)
        for row in rows:  # centre each layer
            last = self.boxes[row[-1]]
            shift = (self.width - (last.x + last.width)) / 2
            for i in row:
                self.boxes[i].x += shift
        return self

    def draw(self, dx: float, dy: float, out: list[str]) -> None:
        for a, b in self.edges:
            s, t = self.boxes[a], self.boxes[b]
            x0, y0 = dx + s.x + s.width / 2, dy + s.y + s.height
            x1, y1 = dx + t.x + t.width / 2, dy + t.y
            mid = (y0 + y1) / 2
            out.append(
                f'<path class="edge" marker-end="url(#tip)" d="M{_n(x0)} {_n(y0)}'
                f' C{_n(x0)} {_n(mid)} {_n(x1)} {_n(mid)} {_n(x1)} {_n(y1)}"/>'
            )
        for box in self.boxes:
            x, y = dx + box.x, dy + box.y
            out.append(
                f'<rect class="{box.css}" x="{_n(x)}" y="{_n(y)}" width="{_n(box.width)}" '
                f'height="{_n(box.height)}" rx="4"/>'
            )
            for k, line in enumerate(box.lines):
                css = "title" if k == 0 else "note"
                out.append(
                    f'<text class="{css}" x="{_n(x + PAD)}" y="{_n(y + (k + 1) * LINE)}">'
                    f"{escape(line)}</text>"
                )
            if box.inner is not None:
                left = (box.width - box.inner.width) / 2
                box.inner.draw(x + left, y + box.text_height, out)


def _n(value: float) -> str:
    """A number with at most one decimal, so that output is short and stable."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


def _layers(count: int, edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Indices by longest path from a source, in topological generations."""
    dag: rx.PyDiGraph[int, None] = rx.PyDiGraph()
    dag.add_nodes_from(list(range(count)))
    dag.add_edges_from_no_data(sorted(set(edges)))
    return [sorted(g) for g in rx.topological_generations(dag)]


def _type(node: Node) -> str:
    return f"{node.dtype}[{', '.join(map(str, node.shape))}]"


def _maps(imap: Sequence[int | None]) -> str:
    return " ".join(f"{'xyz'[a]}→{'·' if m is None else m}" for a, m in enumerate(imap))


def _details(node: Node) -> str:
    """The attributes that matter to a reader, short."""
    at = node.attrs
    match node.op:
        case Op.CONST:
            return f" {at.value:g}"
        case Op.SIZE:
            return f" dim {at.axis}" + ("" if at.scope is SizeScope.TILE else f" {at.scope.value}")
        case Op.SUM | Op.REDUCE_MAX:
            return f" dim {at.axis}" + (f" keep {at.keep}" if at.keep > 1 else "")
        case Op.SLICE:
            return f" dim {at.axis} {at.start}:{at.stop}"
        case Op.CONCAT | Op.IOTA:
            return f" dim {at.axis}"
        case Op.TRANSPOSE:
            return f" {at.perm}"
        case Op.CAST:
            return f" {at.dtype}"
    return ""


def _scalars(node: Node) -> str:
    """Constant operands, written into the box instead of being boxes."""
    shown = [
        f"{i.attrs.value:g}" if i.op is Op.CONST else f"size(dim {i.attrs.axis})"
        for i in node.inputs
        if i.op in (Op.CONST, Op.SIZE)
    ]
    return f" ({', '.join(shown)})" if shown else ""


def _value_box(node: Node) -> _Box:
    if node.op is Op.LOAD:
        at = node.attrs
        loop = "" if at.fmap is None else f" loop→{at.fmap}"
        return _Box("leaf", [f"load {at.index}", _type(node), _maps(at.imap) + loop])
    if node.op is Op.THREAD:
        graph = node.attrs.thread
        steps = [f"{n.op.value}{_details(n)}{_scalars(n)}" for n in graph.body if n.inputs]
        return _Box("thread", [f"threads x{graph.vector}", _type(node), *steps])
    css = "accum" if node.op in (Op.ACCUM_SUM, Op.ACCUM_MAX, Op.ACCUM_RESCALE) else "value"
    return _Box(css, [f"{node.op.value}{_details(node)}{_scalars(node)}", _type(node)])


def _visible(nodes: Sequence[Node]) -> list[Node]:
    return [n for n in nodes if n.op not in (Op.CONST, Op.SIZE)]


def _store_box(store: Store) -> _Box:
    fold = "" if store.reduce is Reduce.NONE else f" {store.reduce.value} over blocks"
    loop = "" if store.fmap is None else f" loop→{store.fmap}"
    return _Box("store", ["store", str(store.dtype), _maps(store.omap) + loop + fold])


def _block_picture(block: BlockGraph) -> _Picture:
    """The body of a block graph; what runs once per iteration stands in one loop box."""
    phase = block.info.phase
    looped = [n for n in _visible(block.body) if phase[n] is Phase.LOOP and block.loop > 1]
    inner, at = _Picture(), dict[Node, int]()
    for n in looped:
        at[n] = inner.add(_value_box(n))
        inner.edges += [(at[i], at[n]) for i in n.inputs if i in at]
    out, place = _Picture(), dict[Node, int]()
    early = [n for n in _visible(block.body) if phase[n] is Phase.INVARIANT]
    for n in early:
        place[n] = out.add(_value_box(n))
        out.edges += [(place[i], place[n]) for i in n.inputs if i in place]
    if looped:
        title = [f"for each of {block.loop} iterations"]
        box = out.add(_Box("loop", title, inner.lay_out()))
        for n in looped:
            out.edges += [(place[i], box) for i in n.inputs if i in place and i not in at]
        place.update(dict.fromkeys(looped, box))
    for n in _visible(block.body):
        if n not in place:
            place[n] = out.add(_value_box(n))
            out.edges += [(place[i], place[n]) for i in n.inputs if i in place]
    for store in block.stores:
        out.edges.append((place[store.value], out.add(_store_box(store))))
    return out.lay_out()


def _launch_box(launch: Launch, names: Mapping[Node, str]) -> _Box:
    """A kernel: its header, and for a block graph the expanded body."""
    results = ", ".join(_type(r) for r in launch.results)
    if launch.block is None:
        node = launch.node
        return _Box("kernel", [f"{node.op.value}{_details(node)}{_scalars(node)}", results])
    block = launch.block
    grid = "x".join(map(str, block.grid))
    reads = ", ".join(f"{k}={names.get(n, _type(n))}" for k, n in enumerate(launch.inputs))
    head = [f"block graph, grid {grid}, loop {block.loop}, {block.threads} threads"]
    return _Box("block", [*head, f"reads {reads}", f"gives {results}"], _block_picture(block))


def to_svg(graph: Graph) -> str:
    """The picture of a graph as an SVG document. Costs linear time and is deterministic."""
    picture, place = _Picture(), dict[Node, int]()
    names = dict(zip(graph.inputs, graph.input_names, strict=True))
    for node, name in names.items():
        place[node] = picture.add(_Box("input", [f"input {name}", _type(node)]))
    launches = {r: launch for launch in graph.launches() for r in launch.results}
    for node in _visible(graph.nodes):
        if node in place:
            continue
        launch = launches.get(node)
        if launch is None:  # a view, or an iota
            place[node] = picture.add(
                _Box("value", [f"{node.op.value}{_details(node)}", _type(node)])
            )
            results: Sequence[Node] = (node,)
        else:
            box = picture.add(_launch_box(launch, names))
            results = launch.results
            place.update(dict.fromkeys(results, box))
        picture.edges += [(place[i], place[node]) for i in node.inputs if i in place]
    for node, name in zip(graph.outputs, graph.output_names, strict=True):
        box = picture.add(_Box("output", [f"output {name}", _type(node)]))
        if node in place:
            picture.edges.append((place[node], box))
    picture.lay_out()
    width, height = picture.width + 2 * GAP, picture.height + 2 * GAP + LINE
    out = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(width)}" height="{_n(height)}" '
        f'viewBox="0 0 {_n(width)} {_n(height)}">',
        f"<title>{escape(graph.name)}</title>",
        f"<style>{_STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#90a4ae"/></marker></defs>',
        f'<text class="title" x="{_n(GAP)}" y="{_n(LINE)}">{escape(graph.name)}</text>',
    ]
    picture.draw(GAP, GAP + LINE, out)
    return "\n".join([*out, "</svg>", ""])
