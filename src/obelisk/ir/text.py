"""The text form of graphs: SSA, one line per node, thread and block graphs as named sections.

`to_text` writes it and `parse` reads it back to the very same interned nodes and the same names.
Errors are `ParseError` with the line, the offending text and what was expected; a line that reads
but does not make sense (shapes that disagree, ...) raises the error of the operator table with the
line in front. docs/ir.md has the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

from obelisk.base.errors import MalformedGraph, ParseError, UnknownName, UserError
from obelisk.ir.block import BlockGraph, Reduce, Store, block_graph
from obelisk.ir.codec import Context, Plain, decode, encode, find_op
from obelisk.ir.dtype import DType, parse_dtype
from obelisk.ir.graph import Graph, make_graph
from obelisk.ir.node import Node, Shape, make
from obelisk.ir.op import Op
from obelisk.ir.thread import ThreadGraph, thread_graph

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


# --- writing --------------------------------------------------------------------------------


def to_text(graph: Graph) -> str:
    """The text form of a graph: deterministic, shared blocks written once, ends in a newline."""
    blocks, threads = sections_of(graph)
    out: list[str] = []
    for thread, name in threads.items():
        out += [f"thread {name} vector={thread.vector} {{"]
        ids = _number(thread.body, {})
        out += [_line(n, ids, blocks, threads) for n in thread.body]
        out += [f"  result {ids[r]}" for r in thread.results] + ["}", ""]
    for block, name in blocks.items():
        grid = _value(list(block.grid))
        out += [f"block {name} grid={grid} loop={block.loop} threads={block.threads} {{"]
        ids = _number(block.body, {})
        out += [_line(n, ids, blocks, threads) for n in block.body]
        out += [_store(s, ids) for s in block.stores] + ["}", ""]
    out += [f"graph {json.dumps(graph.name)} {{"]
    named: dict[Node, str] = {}
    for node, label in zip(graph.inputs, graph.input_names, strict=True):
        if _PLAIN_NAME.match(label) and f"%{label}" not in named.values():
            named[node] = f"%{label}"
    ids = _number(graph.nodes, named)
    for node in graph.nodes:
        extra = ""
        if node.op is Op.INPUT and node not in named:
            extra = f" name={json.dumps(graph.input_names[node.attrs.index])}"
        out.append(_line(node, ids, blocks, threads, extra))
    for node, label in zip(graph.outputs, graph.output_names, strict=True):
        out.append(f"  output {ids[node]} name={json.dumps(label)}")
    return "\n".join([*out, "}", ""])


def sections_of(graph: Graph) -> tuple[dict[BlockGraph, str], dict[ThreadGraph, str]]:
    """The block and thread graphs below a graph, each with a name, in order of first use."""
    blocks: dict[BlockGraph, str] = {}
    threads: dict[ThreadGraph, str] = {}
    for node in graph.nodes:
        if node.op is Op.BLOCK:
            blocks.setdefault(node.attrs.block, f"b{len(blocks)}")
    for body in [graph.nodes, *(list(b.body) for b in blocks)]:
        for node in body:
            if node.op is Op.THREAD:
                threads.setdefault(node.attrs.thread, f"t{len(threads)}")
    return blocks, threads


def _number(body: Sequence[Node], named: Mapping[Node, str]) -> dict[Node, str]:
    ids = dict(named)
    for node in body:
        ids.setdefault(node, f"%{len(ids) - len(named)}")
    return ids


def _line(
    node: Node,
    ids: Mapping[Node, str],
    blocks: Mapping[BlockGraph, str],
    threads: Mapping[ThreadGraph, str],
    extra: str = "",
) -> str:
    args = ", ".join(ids[i] for i in node.inputs)
    attrs = "".join(f" {k}={_value(v)}" for k, v in encode(node, blocks, threads).items())
    dims = ", ".join(map(str, node.shape))
    spaced = f" {args}" if args else ""
    return f"  {ids[node]} = {node.op.value}{spaced}{attrs}{extra} : {node.dtype}[{dims}]"


def _value(v: Plain) -> str:
    if v is None:
        return "none"
    if isinstance(v, list):
        return f"({', '.join(_value(x) for x in v)})"
    return repr(v) if isinstance(v, float) else str(v)


def _store(s: Store, ids: Mapping[Node, str]) -> str:
    text = f"  store {ids[s.value]} omap={_value(list(s.omap))}"
    if s.fmap is not None:
        text += f" fmap={s.fmap}"
    if s.reduce is not Reduce.NONE:
        text += f" reduce={s.reduce.value}"
    return f"{text} : {s.dtype}"


# --- reading -------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<ref>%[A-Za-z0-9_]+)
    | (?P<number>-?(?:inf\b|nan\b|[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?))
    | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<mark>[=,:(){}\[\]])
    )""",
    re.VERBOSE,
)


@dataclass(slots=True)
class _Line:
    """The tokens of one line and a place in them."""

    number: int
    text: str
    tokens: list[tuple[str, str]]
    at: int = 0

    def fail(self, expected: str) -> ParseError:
        got = self.tokens[self.at][1] if self.at < len(self.tokens) else "end of line"
        return ParseError(
            f"line {self.number}: expected {expected}, got {got!r} in {self.text.strip()!r}"
        )

    def peek(self, text: str) -> bool:
        return self.at < len(self.tokens) and self.tokens[self.at][1] == text

    def kind(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else "end"

    def take(self, kind: str, expected: str) -> str:
        if self.kind() != kind:
            raise self.fail(expected)
        self.at += 1
        return self.tokens[self.at - 1][1]

    def mark(self, text: str) -> None:
        if not self.peek(text):
            raise self.fail(repr(text))
        self.at += 1

    def skip(self, text: str) -> bool:
        if self.peek(text):
            self.at += 1
            return True
        return False

    def end(self) -> None:
        if self.at < len(self.tokens):
            raise self.fail("the end of the line")

    def string(self) -> str:
        try:
            return str(json.loads(self.take("string", 'a name in "quotes"')))
        except json.JSONDecodeError:
            self.at -= 1
            raise self.fail("a well-formed string") from None

    def value(self) -> Any:
        """An attribute's value: number, word, string or list."""
        match self.kind():
            case "number":
                text = self.take("number", "")
                if text.lstrip("-").isdigit():
                    return int(text)
                number = float(text)
                return "-inf" if number == -inf else number
            case "word":
                word = self.take("word", "")
                return None if word == "none" else word
            case "string":
                return self.string()
        self.mark("(")
        out = []
        while not self.peek(")"):
            out.append(self.value())
            if not self.skip(","):
                break
        self.mark(")")
        return out

    def attributes(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        while self.kind() == "word":
            key = self.take("word", "an attribute")
            if key in out:
                self.at -= 1
                raise self.fail("each attribute once")
            self.mark("=")
            out[key] = self.value()
        return out

    def dtype(self) -> DType:
        name = self.take("word", "a dtype")
        try:
            return parse_dtype(name)
        except UnknownName as e:
            raise ParseError(f"line {self.number}: {e} in {self.text.strip()!r}") from None

    def shape(self) -> Shape:
        self.mark("[")
        dims: list[int] = []
        while not self.peek("]"):
            text = self.take("number", "an extent")
            if not text.isdigit():
                self.at -= 1
                raise self.fail("a whole extent")
            dims.append(int(text))
            if not self.skip(","):
                break
        self.mark("]")
        return tuple(dims)


def _tokenize(text: str) -> list[_Line]:
    lines = []
    for number, raw in enumerate(text.splitlines(), 1):
        tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(raw):
            rest = raw[at:].lstrip()
            if not rest or rest.startswith("#"):
                break
            m = _TOKEN.match(raw, at)
            if m is None:
                raise ParseError(f"line {number}: unexpected character {rest[0]!r} in {raw!r}")
            kind = m.lastgroup or ""
            tokens.append((kind, m.group(kind)))
            at = m.end()
        if tokens:
            lines.append(_Line(number, raw, tokens))
    return lines


@dataclass(slots=True)
class _Section:
    """What a section collects: values by id, and the lines that are no values."""

    ids: dict[str, Node] = field(default_factory=dict)
    grid: tuple[int, ...] = ()
    loop: int = 1
    stores: list[Store] = field(default_factory=list)
    results: list[Node] = field(default_factory=list)
    inputs: list[tuple[int, Node, str]] = field(default_factory=list)
    outputs: list[tuple[Node, str]] = field(default_factory=list)


class _Parser:
    """Reads sections in order; `blocks` and `threads` hold those of the graph being read."""

    def __init__(self, text: str) -> None:
        self.lines = _tokenize(text)
        self.at = 0
        self.blocks: dict[str, BlockGraph] = {}
        self.threads: dict[str, ThreadGraph] = {}

    def graphs(self) -> list[Graph]:
        out = []
        pending: _Line | None = None
        while self.at < len(self.lines):
            head = self.lines[self.at]
            match head.tokens[0][1]:
                case "thread":
                    self.thread(head)
                    pending = head
                case "block":
                    self.block(head)
                    pending = head
                case "graph":
                    out.append(self.graph(head))
                    self.blocks, self.threads, pending = {}, {}, None
                case _:
                    raise head.fail("a section: thread, block or graph")
        if pending is not None:
            raise ParseError(f"line {pending.number}: the file ends before the graph that uses it")
        return out

    def name(self, head: _Line, known: Mapping[str, object]) -> str:
        head.at = 1
        name = head.take("word", "the section's name")
        if name in known:
            head.at = 1
            raise head.fail(f"a new name ({name} is defined above)")
        return name

    def head(self, head: _Line, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes of a section's first line; `fields` are defaults (None: required)."""
        written = head.attributes()
        head.mark("{")
        head.end()
        for key in written:
            if key not in fields:
                raise ParseError(
                    f"line {head.number}: unknown {key!r}; expected {', '.join(fields)}"
                )
        out = {**fields, **written}
        for key, value in out.items():
            ints = isinstance(value, list) and all(isinstance(v, int) for v in value)
            if not (ints if key == "grid" else isinstance(value, int)):
                what = "a list of integers" if key == "grid" else "an integer"
                raise ParseError(f"line {head.number}: {key} must be {what}, got {value!r}")
        return out

    def thread(self, head: _Line) -> None:
        name = self.name(head, self.threads)
        vector = self.head(head, {"vector": 1})["vector"]
        body = self.body(head, _Section(), {"result": self.result})
        self.threads[name] = self.located(head, lambda: thread_graph(tuple(body.results), vector))

    def block(self, head: _Line) -> None:
        name = self.name(head, self.blocks)
        at = self.head(head, {"grid": None, "loop": 1, "threads": 128})
        section = _Section(grid=tuple(at["grid"]), loop=at["loop"])
        body = self.body(head, section, {"store": self.store})
        self.blocks[name] = self.located(
            head,
            lambda: block_graph(body.grid, body.loop, at["threads"], tuple(body.stores)),
        )

    def graph(self, head: _Line) -> Graph:
        head.at = 1
        name = head.string()
        self.head(head, {})
        body = self.body(head, _Section(), {"output": self.output})
        body.inputs.sort(key=lambda item: item[0])
        nodes, names = [n for _, n, _ in body.inputs], [s for _, _, s in body.inputs]
        outputs, onames = [n for n, _ in body.outputs], [s for _, s in body.outputs]
        graph: Graph = self.located(head, lambda: make_graph(nodes, outputs, names, onames, name))
        return graph

    def located(self, line: _Line, fn: Callable[[], Any]) -> Any:
        """Run `fn`; a fault of the graph gets the line in front."""
        try:
            return fn()
        except UserError as e:
            if str(e).startswith("line "):
                raise
            raise type(e)(f"line {line.number}: {e} in {line.text.strip()!r}") from None

    def body(
        self, head: _Line, section: _Section, tails: Mapping[str, Callable[[_Line, _Section], None]]
    ) -> _Section:
        """The lines up to the closing brace."""
        self.at += 1
        while self.at < len(self.lines):
            line = self.lines[self.at]
            self.at += 1
            if line.peek("}"):
                line.at += 1
                line.end()
                return section
            if line.kind() == "word" and line.tokens[0][1] in tails:
                line.at += 1
                tails[line.tokens[0][1]](line, section)
            elif line.kind() == "ref":
                self.located(line, partial(self.assign, line, section))
            else:
                raise line.fail(f"%name = ..., {', '.join(tails)} or '}}'")
        raise ParseError(f"line {head.number}: the section is not closed: expected '}}'")

    def use(self, line: _Line, section: _Section) -> Node:
        name = line.take("ref", "a value such as %0")
        if name not in section.ids:
            line.at -= 1
            raise line.fail("a value defined above in this section")
        return section.ids[name]

    def assign(self, line: _Line, section: _Section) -> None:
        """%id = op operands attributes : type"""
        target = line.take("ref", "a value such as %0")
        if target in section.ids:
            line.at -= 1
            raise line.fail("a value that is not defined yet")
        line.mark("=")
        word = line.take("word", "an operator")
        try:
            op = find_op(word)
        except ParseError as e:
            raise ParseError(f"line {line.number}: {e} in {line.text.strip()!r}") from None
        args: list[Node] = []
        while line.kind() == "ref":
            args.append(self.use(line, section))
            if not line.skip(","):
                break
        written = line.attributes()
        dtype = shape = None
        if line.skip(":"):
            dtype = line.dtype()
            shape = line.shape()
        line.end()
        label = target[1:]
        if op is Op.INPUT and "name" in written:
            label = written.pop("name")
        context = Context(
            tuple(args), shape, dtype, section.grid, section.loop, self.blocks, self.threads
        )
        node = make(op, tuple(args), decode(op, written, context))
        if shape is not None and (node.shape != shape or node.dtype is not dtype):
            raise MalformedGraph(
                f"the line says {dtype}{list(shape)}, but {op.value} gives "
                f"{node.dtype}{list(node.shape)}"
            )
        section.ids[target] = node
        if op is Op.INPUT:
            section.inputs.append((node.attrs.index, node, str(label)))

    def result(self, line: _Line, section: _Section) -> None:
        section.results.append(self.use(line, section))
        line.end()

    def output(self, line: _Line, section: _Section) -> None:
        node = self.use(line, section)
        written = line.attributes()
        line.end()
        if set(written) - {"name"}:
            raise ParseError(f"line {line.number}: an output has only a name, got {written}")
        section.outputs.append((node, str(written.get("name", f"y{len(section.outputs)}"))))

    def store(self, line: _Line, section: _Section) -> None:
        """store %id omap=(...) [fmap=n] [reduce=sum] [: dtype]"""
        value = self.use(line, section)
        written = line.attributes()
        dtype = line.dtype() if line.skip(":") else value.dtype
        line.end()
        section.stores.append(self.located(line, lambda: store_of(value, written, dtype)))


def store_of(value: Node, written: Mapping[str, Any], dtype: DType) -> Store:
    """A store from its plain fields; raises `ParseError` naming the field."""
    extra = set(written) - {"omap", "fmap", "reduce"}
    if extra:
        raise ParseError(f"a store has omap, fmap and reduce, not {', '.join(sorted(extra))}")
    omap, fmap, reduce = written.get("omap"), written.get("fmap"), written.get("reduce", "none")
    if not isinstance(omap, list) or not all(m is None or isinstance(m, int) for m in omap):
        raise ParseError(f"store: omap must be a list of dims and nones, got {omap!r}")
    if fmap is not None and not isinstance(fmap, int):
        raise ParseError(f"store: fmap must be a dim, got {fmap!r}")
    kinds = {r.value: r for r in Reduce} | {None: Reduce.NONE}
    if reduce not in kinds:
        raise ParseError(f"store: reduce must be none, sum or max, got {reduce!r}")
    return Store(value, tuple(omap), fmap, kinds[reduce], dtype)


def parse_all(text: str) -> list[Graph]:
    """All graphs of a text; each may be preceded by the thread and block graphs that it uses."""
    return _Parser(text).graphs()


def parse(text: str) -> Graph:
    """The single graph of a text; raises `ParseError` when there is none or more than one."""
    graphs = parse_all(text)
    if len(graphs) != 1:
        raise ParseError(f"expected one graph, the text holds {len(graphs)}")
    return graphs[0]
