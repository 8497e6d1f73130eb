"""The JSON form of graphs, with a schema version.

`to_json` gives plain JSON values, `from_json` the very same interned nodes and names. A file of a
newer schema is refused, unknown operators list the known ones, and every error says where in the
document it is. docs/ir.md describes the schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from obelisk.base.errors import MalformedGraph, ParseError, UnknownName, UserError
from obelisk.ir.block import BlockGraph, Reduce, Store, block_graph
from obelisk.ir.codec import Context, decode, encode, find_op
from obelisk.ir.dtype import DType, parse_dtype
from obelisk.ir.graph import Graph, make_graph
from obelisk.ir.node import Node, Shape, make
from obelisk.ir.op import Op
from obelisk.ir.text import sections_of, store_of
from obelisk.ir.thread import ThreadGraph, thread_graph

SCHEMA = 1
Json = Any


# --- writing -------------------------------------------------------------------------------------


def to_json(graph: Graph) -> dict[str, Json]:
    """The graph as JSON values. Nodes stand in lists, operands are positions in them."""
    blocks, threads = sections_of(graph)
    ids = {n: i for i, n in enumerate(graph.nodes)}
    return {
        "schema": SCHEMA,
        "name": graph.name,
        "threads": {
            name: {
                "vector": t.vector,
                "nodes": _nodes(t.body, blocks, threads),
                "results": [t.body.index(r) for r in t.results],
            }
            for t, name in threads.items()
        },
        "blocks": {
            name: {
                "grid": list(b.grid), "loop": b.loop, "threads": b.threads,
                "nodes": _nodes(b.body, blocks, threads),
                "stores": [_store(s, b.body.index(s.value)) for s in b.stores],
            }
            for b, name in blocks.items()
        },
        "nodes": _nodes(graph.nodes, blocks, threads),
        "inputs": [
            {"node": ids[n], "name": s}
            for n, s in zip(graph.inputs, graph.input_names, strict=True)
        ],
        "outputs": [
            {"node": ids[n], "name": s}
            for n, s in zip(graph.outputs, graph.output_names, strict=True)
        ],
    }  # fmt: skip


def _nodes(
    body: Sequence[Node], blocks: Mapping[BlockGraph, str], threads: Mapping[ThreadGraph, str]
) -> list[Json]:
    ids = {n: i for i, n in enumerate(body)}
    return [
        {
            "op": n.op.value, "inputs": [ids[i] for i in n.inputs],
            "attrs": encode(n, blocks, threads), "dtype": n.dtype.value, "shape": list(n.shape),
        }
        for n in body
    ]  # fmt: skip


def _store(s: Store, at: int) -> Json:
    out: dict[str, Json] = {"node": at, "omap": list(s.omap), "dtype": s.dtype.value}
    if s.fmap is not None:
        out["fmap"] = s.fmap
    if s.reduce is not Reduce.NONE:
        out["reduce"] = s.reduce.value
    return out


def dumps(graph: Graph) -> str:
    """`to_json` as text: what fits a line stands on one, so each node has its own; byte-stable."""
    return _layout(to_json(graph), "") + "\n"


def _layout(value: Json, indent: str) -> str:
    flat = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(flat) <= 100 or not value or not isinstance(value, (dict, list)):
        return flat
    inner = indent + " "
    if isinstance(value, dict):
        items = [f"{json.dumps(k)}: {_layout(v, inner)}" for k, v in value.items()]
        opening, closing = "{", "}"
    else:
        items = [_layout(v, inner) for v in value]
        opening, closing = "[", "]"
    body = ",\n".join(inner + item for item in items)
    return f"{opening}\n{body}\n{indent}{closing}"


# --- reading -------------------------------------------------------------------------------------


def is_json_graph(data: Json) -> bool:
    """True when decoded JSON says that it is an Obelisk graph (of any schema)."""
    return isinstance(data, dict) and "schema" in data


def from_json(data: Json) -> Graph:
    """The graph that `to_json` wrote. Raises `ParseError` naming place and reason, or the error of
    the
    operator table with the place in front.
    """
    _check_schema(data)
    name = _field(data, "graph", "name", str)
    blocks: dict[str, BlockGraph] = {}
    threads: dict[str, ThreadGraph] = {}
    for key, t in _field(data, "graph", "threads", dict).items():
        place = f"threads.{key}"
        body = _read_nodes(_field(t, place, "nodes", list), place, (), 1, blocks, threads)
        results = [_pick(body, i, place) for i in _field(t, place, "results", list)]
        vector = _field(t, place, "vector", int)
        threads[key] = _located(place, lambda r=results, v=vector: thread_graph(tuple(r), v))
    for key, b in _field(data, "graph", "blocks", dict).items():
        place = f"blocks.{key}"
        grid, loop = _ints(_field(b, place, "grid", list), place), _field(b, place, "loop", int)
        body = _read_nodes(_field(b, place, "nodes", list), place, grid, loop, blocks, threads)
        stores = [
            _read_store(s, body, f"{place}.stores[{i}]")
            for i, s in enumerate(_field(b, place, "stores", list))
        ]
        count = _field(b, place, "threads", int)
        blocks[key] = _located(
            place, lambda g=grid, n=loop, c=count, s=stores: block_graph(g, n, c, tuple(s))
        )
    nodes = _read_nodes(_field(data, "graph", "nodes", list), "graph", (), 1, blocks, threads)
    inputs = _named(data, "inputs", nodes)
    outputs = _named(data, "outputs", nodes)
    return _located_graph(
        "graph",
        [n for n, _ in inputs],
        [n for n, _ in outputs],
        ([s for _, s in inputs], [s for _, s in outputs]),
        name,
    )


def _located_graph(
    place: str,
    inputs: list[Node],
    outputs: list[Node],
    names: tuple[list[str], list[str]],
    name: str,
) -> Graph:
    try:
        return make_graph(inputs, outputs, names[0], names[1], name)
    except UserError as e:
        raise type(e)(f"{place}: {e}") from None


def loads(text: str) -> Graph:
    """`from_json` of JSON text; raises `ParseError` with line and column when it is no JSON."""
    try:
        return from_json(json.loads(text))
    except json.JSONDecodeError as e:
        raise ParseError(f"not JSON: {e}") from None


def _check_schema(data: Json) -> None:
    if not is_json_graph(data):
        raise ParseError("not an Obelisk graph: an object with a 'schema' field is expected")
    version = data["schema"]
    if not isinstance(version, int) or version < 1:
        raise ParseError(f"schema must be a positive integer, got {version!r}")
    if version > SCHEMA:
        raise ParseError(
            f"this file has schema {version}, this Obelisk reads up to {SCHEMA}; "
            "update Obelisk or export the graph again with this version"
        )


def _field(data: Json, place: str, name: str, kind: type) -> Any:
    if not isinstance(data, dict):
        raise ParseError(f"{place}: expected an object, got {data!r}")
    if name not in data:
        raise ParseError(f"{place}: field {name!r} is missing")
    value = data[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ParseError(f"{place}: {name!r} must be a JSON {kind.__name__}, got {value!r}")
    return value


def _ints(values: Json, place: str) -> Shape:
    if not isinstance(values, list) or not all(
        isinstance(v, int) and not isinstance(v, bool) for v in values
    ):
        raise ParseError(f"{place}: expected a list of integers, got {values!r}")
    return tuple(values)


def _pick(nodes: Sequence[Node], at: Json, place: str) -> Node:
    if not isinstance(at, int) or isinstance(at, bool) or not 0 <= at < len(nodes):
        raise ParseError(
            f"{place}: {at!r} is no node before this one (there are {len(nodes)}, counted from 0)"
        )
    return nodes[at]


def _located(place: str, fn: Any) -> Any:
    try:
        return fn()
    except UserError as e:
        raise type(e)(f"{place}: {e}") from None


def _read_dtype(value: Json, place: str) -> DType:
    try:
        return parse_dtype(str(value))
    except UnknownName as e:
        raise ParseError(f"{place}: {e}") from None


def _read_nodes(
    items: list[Json],
    place: str,
    grid: Shape,
    loop: int,
    blocks: Mapping[str, BlockGraph],
    threads: Mapping[str, ThreadGraph],
) -> list[Node]:
    out: list[Node] = []
    for i, item in enumerate(items):
        here = f"{place}.nodes[{i}]"
        word = _field(item, here, "op", str)
        args = tuple(_pick(out, k, here) for k in _field(item, here, "inputs", list))
        shape = _ints(_field(item, here, "shape", list), here)
        dtype = _read_dtype(_field(item, here, "dtype", str), here)
        attrs = _field(item, here, "attrs", dict)
        context = Context(args, shape, dtype, grid, loop, blocks, threads)
        node = _located(here, lambda w=word, a=args, t=attrs, c=context: _make(w, a, t, c))
        if node.shape != shape or node.dtype is not dtype:
            raise MalformedGraph(
                f"{here}: recorded as {dtype}{list(shape)}, but {node.op.value} gives "
                f"{node.dtype}{list(node.shape)}"
            )
        out.append(node)
    return out


def _make(word: str, args: tuple[Node, ...], attrs: Mapping[str, Json], context: Context) -> Node:
    op: Op = find_op(word)
    return make(op, args, decode(op, attrs, context))


def _read_store(item: Json, body: Sequence[Node], place: str) -> Store:
    value = _pick(body, _field(item, place, "node", int), place)
    dtype = _read_dtype(_field(item, place, "dtype", str), place)
    written = {k: v for k, v in item.items() if k not in ("node", "dtype")}
    store: Store = _located(place, lambda: store_of(value, written, dtype))
    return store


def _named(data: Json, field: str, nodes: Sequence[Node]) -> list[tuple[Node, str]]:
    out = []
    for i, item in enumerate(_field(data, "graph", field, list)):
        place = f"{field}[{i}]"
        node = _pick(nodes, _field(item, place, "node", int), place)
        out.append((node, _field(item, place, "name", str)))
    return out
