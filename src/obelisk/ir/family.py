"""Family graphs: one program whose one dim is a symbol within a range.

A family is written as a function of the extent, or as a graph one of whose dims may vary; it is
kept as the text form of that graph in which integers may be linear expressions of the symbol
(`$batch`, `2*$batch+1`), found from the graphs at several extents and checked at others. `at` gives
the ordinary graph of one extent, in milliseconds. Text and JSON form read back to an equal family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from obelisk.base.digest import digest
from obelisk.base.errors import MalformedGraph, ParseError, ShapeError, UserError
from obelisk.ir.dims import dim_classes
from obelisk.ir.graph import Graph
from obelisk.ir.jsonform import from_json, to_json
from obelisk.ir.node import Shape
from obelisk.ir.resize import resize
from obelisk.ir.text import parse, to_text

SCHEMA = 1  # of the JSON form
_NUMBER = re.compile(r"(?<![\w.])(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)(?![\w.])")
_HEADER = re.compile(r"\s*(?:#[^\n]*\n\s*)*dim\s+([A-Za-z_]\w*)\s*=\s*(\d+)\s*\.\.\s*(\d+)[ \t]*\n")
_SYMBOL = re.compile(r"(?:(\d+)\*)?\$([A-Za-z_]\w*)(?:([+-])(\d+))?")
_WIDE = 13  # an extent that no usual dim has, for checks


@dataclass(frozen=True, slots=True)
class Dim:
    """A symbolic extent: its name, and the least and the greatest size it takes.

    >>> Dim.parse("batch=1..64")
    Dim(name='batch', low=1, high=64)
    """

    name: str
    low: int
    high: int

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z_]\w*", self.name):
            raise UserError(f"dim {self.name!r}: a name is letters, digits and _")
        if not 1 <= self.low < self.high:
            raise UserError(
                f"dim {self.name} = {self.low}..{self.high}: a range is LOW..HIGH with "
                "1 <= LOW < HIGH; a single size is an ordinary graph"
            )

    def __str__(self) -> str:
        return f"{self.name}={self.low}..{self.high}"

    @property
    def span(self) -> int:
        """How many sizes the range holds."""
        return self.high - self.low + 1

    def check(self, size: int, where: str) -> int:
        """`size` itself if the range holds it; else `ShapeError` with name, size and range."""
        if not self.low <= size <= self.high:
            raise ShapeError(
                f"{where}: {self.name} is {size}, the family holds {self.low} to {self.high}; "
                "make a family with a wider range"
            )
        return size

    @staticmethod
    def parse(text: str) -> Dim:
        """Read `batch=1..64`; raises `UserError` for anything else."""
        found = re.fullmatch(r"\s*([A-Za-z_][\w.]*)\s*=\s*(\d+)\s*\.\.\s*(\d+)\s*", text)
        if found is None:
            raise UserError(f"{text!r} is no symbolic dim: write NAME=LOW..HIGH, as batch=1..64")
        return Dim(found[1].replace(".", "_"), int(found[2]), int(found[3]))


@dataclass(frozen=True, slots=True)
class Linear:
    """The integer `factor * size + offset`."""

    factor: int
    offset: int

    def at(self, size: int) -> int:
        """Its value at a size."""
        return self.factor * size + self.offset

    def spell(self, name: str) -> str:
        """As it stands in the text form."""
        head = f"${name}" if self.factor == 1 else f"{self.factor}*${name}"
        return head if not self.offset else f"{head}{self.offset:+d}"


@dataclass(frozen=True, slots=True)
class FamilyGraph:
    """A program for every size of one dim.

    Attributes:
        dim: the symbol and its range.
        template: the text form of the graph, with expressions of the symbol for integers.
    """

    dim: Dim
    template: str

    @property
    def name(self) -> str:
        """The graphs' name."""
        return self.at(self.dim.high).name

    @property
    def digest(self) -> str:
        """Content digest of range and graphs; names play no part but the symbol's own."""
        ends = [self.at(n).digest for n in probes(self.dim)]
        return digest("family", str(self.dim), *ends)

    def at(self, size: int) -> Graph:
        """The graph of one size; raises `ShapeError` naming dim, size and range outside it."""
        return _at(self.template, self.dim, self.dim.check(size, "family graph"))

    def beyond(self, size: int) -> Graph:
        """The graph at a size that the range need not hold, to reason with, not to run."""
        return _at(self.template, self.dim, size)

    @property
    def extents(self) -> dict[tuple[int, int], Linear]:
        """(input, axis) of every input dim that varies, with its extent as a function of the
        size.
        """
        return _extents(self)

    def size_of(self, shapes: Sequence[Shape], where: str) -> int:
        """The size at which the inputs have these shapes.

        Raises `ShapeError` naming the input where shapes do not belong to one size of the family,
        and for a size outside the range.
        """
        program = self.at(self.dim.high)
        if len(shapes) != len(program.inputs):
            raise ShapeError(f"{where} takes {len(program.inputs)} inputs, got {len(shapes)}")
        for i, (shape, node) in enumerate(zip(shapes, program.inputs, strict=True)):
            if len(shape) != node.rank:
                raise ShapeError(
                    f"{where}: input {program.input_names[i]!r} has rank {node.rank}, got "
                    f"shape {tuple(shape)}"
                )
        (i, d), first = next(iter(self.extents.items()))
        size, rest = divmod(shapes[i][d] - first.offset, first.factor)
        if rest == 0:
            self.dim.check(size, where)
        for i, node in enumerate(program.inputs):
            for d, n in enumerate(node.shape):
                rule = self.extents.get((i, d))
                wanted = n if rule is None else rule.at(size)
                if shapes[i][d] != wanted or rest:
                    spelled = str(n) if rule is None else rule.spell(self.dim.name)
                    raise ShapeError(
                        f"{where}: axis {d} of input {program.input_names[i]!r} is {shapes[i][d]}, "
                        f"the family has {spelled} there"
                        + ("" if rest else f" ({wanted} at {self.dim.name} {size})")
                    )
        return size


@lru_cache(maxsize=512)
def _at(template: str, dim: Dim, size: int) -> Graph:
    return parse(_substitute(template, dim.name, size))


@lru_cache(maxsize=64)
def _extents(family: FamilyGraph) -> dict[tuple[int, int], Linear]:
    low, high = family.dim.low, family.dim.high
    small, large = family.at(low), family.at(high)
    out = {}
    for i, (a, b) in enumerate(zip(small.inputs, large.inputs, strict=True)):
        for d, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)):
            if m != n:
                factor = (n - m) // (high - low)
                out[(i, d)] = Linear(factor, m - factor * low)
    return out


def _substitute(template: str, name: str, size: int) -> str:
    def value(found: re.Match[str]) -> str:
        if found[2] != name:
            raise ParseError(f"the family's dim is ${name}, its graph has ${found[2]}")
        offset = int(found[4] or 0) * (-1 if found[3] == "-" else 1)
        return str(Linear(int(found[1] or 1), offset).at(size))

    return _SYMBOL.sub(value, template)


def probes(dim: Dim) -> tuple[int, ...]:
    """Sizes at which a family is looked at: both ends and their neighbours, small primes, powers of
    two and numbers beside them, and a few in the middle; ascending, the same every time.
    """
    wanted = {
        dim.low,
        dim.low + 1,
        dim.high - 1,
        dim.high,
        2,
        3,
        7,
        _WIDE,
        (dim.low + dim.high) // 2,
    }
    power = 16
    while power <= dim.high:
        wanted |= {power - 1, power, power + 1}
        power *= 2
    return tuple(sorted(n for n in wanted if dim.low <= n <= dim.high))


def trace(
    build: Callable[[int], Graph], dim: Dim, check: Sequence[int] | None = None
) -> FamilyGraph:
    """The family of the graphs that `build` makes, one for each size.

    Their integers must be linear in the size; that is checked at every size of `check` (by default
    `probes`). Raises `MalformedGraph` naming two sizes at which the graphs differ in more than
    that.
    """
    sizes = sorted({*(check or probes(dim)), dim.low, dim.high})
    texts = {n: to_text(build(n)) for n in sizes}
    if any("$" in text for text in texts.values()):
        raise MalformedGraph("names with '$' cannot stand in a family: it marks the symbol")
    base, other = sizes[-1], sizes[-2]
    template = _fit_text(texts[base], texts[other], base, other, dim)
    family = FamilyGraph(dim, template)
    for n in sizes:
        if to_text(family.at(n)) != texts[n]:
            raise MalformedGraph(
                f"the graphs at {dim.name} {n} and {base} differ in more than extents that are "
                f"linear in {dim.name}: leave {n} out of the range {dim}"
            )
    if not family.extents:
        raise MalformedGraph(f"no input has a dim that varies with {dim.name}")
    return family


def _fit_text(a: str, b: str, at_a: int, at_b: int, dim: Dim) -> str:
    """The text at one size with every number that differs at the other replaced."""
    left, right = _NUMBER.split(a), _NUMBER.split(b)
    if len(left) != len(right) or left[::2] != right[::2]:
        raise MalformedGraph(
            f"the graphs at {dim.name} {at_b} and {at_a} have other operators, not only other "
            "extents: a family is one structure"
        )
    out = []
    for x, y in zip(left, right, strict=True):
        out.append(x if x == y else _fit(_whole(x), _whole(y), at_a, at_b, dim))
    return "".join(out)


def _whole(token: str) -> int | None:
    text = token.removesuffix(".0")
    return int(text) if text.lstrip("-").isdigit() else None


def _fit(x: int | None, y: int | None, at_x: int, at_y: int, dim: Dim) -> str:
    if x is None or y is None or (x - y) % (at_x - at_y) or (x - y) // (at_x - at_y) < 1:
        raise MalformedGraph(
            f"a number changes from {y} to {x} between {dim.name} {at_y} and {at_x}, not in "
            "proportion: write constants that depend on the extent with size() or mean()"
        )
    factor = (x - y) // (at_x - at_y)
    return Linear(factor, x - factor * at_x).spell(dim.name)


def along(graph: Graph, name: str, axis: int, dim: Dim) -> FamilyGraph:
    """The family in which one dim of an input varies, and all dims that must be equal to it.

    Operators and constants stay as they are in `graph`. Raises `UserError` where there is no such
    dim, or where another attribute ties its extent (a reshape that splits it, a slice).
    """
    if name not in graph.input_names:
        raise UserError(
            f"{graph.name} has no input {name!r}: it has {', '.join(graph.input_names)}"
        )
    place = (graph.input_names.index(name), axis)
    node = graph.inputs[place[0]]
    if not 0 <= axis < node.rank:
        raise UserError(f"input {name!r} has axes 0 to {node.rank - 1}, got {axis}")
    (own,) = (c for c in dim_classes(graph) if place in c.members)
    if own.frozen or own.extent == 1:
        why = "is 1, so what it is tied to is not known" if own.extent == 1 else "is tied to others"
        raise UserError(f"axis {axis} of input {name!r} cannot vary: its extent {own.extent} {why}")

    def build(size: int) -> Graph:
        shapes = [
            tuple(size if (i, d) in own.members else n for d, n in enumerate(x.shape))
            for i, x in enumerate(graph.inputs)
        ]
        return resize(graph, shapes, sizes={own.extent: size} if own.named else None)

    return trace(build, dim)


# -- forms ----------------------------------------------------------------------------------------
def family_text(family: FamilyGraph) -> str:
    """The text form: a line `dim NAME = LOW..HIGH`, then the graph with `$NAME` in it."""
    d = family.dim
    return f"dim {d.name} = {d.low}..{d.high}\n\n{family.template}"


def is_family_text(text: str) -> bool:
    """Whether a text begins as a family's does."""
    return _HEADER.match(text) is not None


def parse_family(text: str) -> FamilyGraph:
    """Read the text form; raises `ParseError` where it is none, else what the graph raises."""
    found = _HEADER.match(text)
    if found is None:
        raise ParseError("not a family: expected a first line 'dim NAME = LOW..HIGH'")
    dim = Dim(found[1], int(found[2]), int(found[3]))
    body = "\n" * text.count("\n", 0, found.end()) + text[found.end() :]  # for line numbers
    if not _SYMBOL.search(body):
        raise ParseError(f"the graph does not use ${dim.name}")
    return trace(lambda n: parse(_substitute(body, dim.name, n)), dim)


def family_json(family: FamilyGraph) -> dict[str, Any]:
    """The JSON form: `schema`, `dim`, and `graph`, the graph's JSON form with expressions as
    strings.
    """
    high = family.dim.high
    a, b = (to_json(family.at(n)) for n in (high, high - 1))
    tree = _fit_tree(a, b, high, high - 1, family.dim)
    d = family.dim
    return {
        "schema": SCHEMA, "dim": {"name": d.name, "low": d.low, "high": d.high}, "graph": tree,
    }  # fmt: skip


def family_from_json(data: Any) -> FamilyGraph:
    """Read `family_json` back; raises `ParseError` for another form or schema."""
    try:
        if data["schema"] != SCHEMA:
            raise ParseError(f"family schema {data['schema']}, this version reads {SCHEMA}")
        d = data["dim"]
        dim, graph = Dim(d["name"], int(d["low"]), int(d["high"])), json.dumps(data["graph"])
    except (KeyError, TypeError, ValueError) as e:
        if isinstance(e, UserError):
            raise
        raise ParseError(f"not a family: {e!r}") from None

    def build(size: int) -> Graph:
        quoted = re.sub(rf'"({_SYMBOL.pattern})"', r"\1", graph)
        return from_json(json.loads(_substitute(quoted, dim.name, size)))

    return trace(build, dim)


def is_family_json(data: Any) -> bool:
    """Whether JSON data looks like a family."""
    return isinstance(data, Mapping) and {"schema", "dim", "graph"} <= set(data)


def _fit_tree(a: Any, b: Any, at_a: int, at_b: int, dim: Dim) -> Any:
    if isinstance(a, dict):
        return {k: _fit_tree(a[k], b[k], at_a, at_b, dim) for k in a}
    if isinstance(a, list):
        return [_fit_tree(x, y, at_a, at_b, dim) for x, y in zip(a, b, strict=True)]
    return a if a == b else _fit(_whole(str(a)), _whole(str(b)), at_a, at_b, dim)
