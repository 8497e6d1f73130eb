"""Family graphs: one symbolic dim, forms that read back, and refusals that say why."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from obelisk.base.errors import MalformedGraph, ParseError, ShapeError, UserError
from obelisk.ir import Graph, KernelGraph
from obelisk.ir.family import (
    Dim,
    FamilyGraph,
    along,
    family_from_json,
    family_json,
    family_text,
    is_family_json,
    is_family_text,
    parse_family,
    probes,
    trace,
)
from obelisk.ir.text import to_text

BATCH = Dim("batch", 1, 64)


def normed(rows: int, width: int = 48) -> Graph:
    g = KernelGraph("normed")
    x, w = g.input((rows, width), "f16", name="x"), g.input((width, 32), "f16", name="w")
    g.output(g.matmul(g.rms_norm(x), w), name="y")
    return g.freeze()


def heads(keys: int) -> Graph:
    """Causal attention with a reshape and an iota: extents stand in many attributes."""
    g = KernelGraph("heads")
    q = g.input((keys, 4 * 16), name="q")
    kv = g.input((4, keys, 16), name="kv")
    split = g.transpose(g.reshape(q, (keys, 4, 16)), (1, 0, 2))
    out = g.attention(split, kv, kv, causal=True)
    g.output(g.reshape(g.transpose(out, (1, 0, 2)), (keys * 64,)))
    return g.freeze()


@pytest.mark.parametrize(
    ("build", "dim"), [(normed, BATCH), (heads, Dim("context", 1, 40)), (heads, Dim("n", 3, 4))]
)
def test_every_size_of_a_family_is_the_graph_that_the_function_builds(
    build: Callable[[int], Graph], dim: Dim
) -> None:
    """Also at sizes that nobody looked at while the family was made; the very same nodes."""
    family = trace(build, dim)
    for size in range(dim.low, dim.high + 1):
        assert family.at(size).outputs == build(size).outputs
        assert to_text(family.at(size)) == to_text(build(size))


@pytest.mark.parametrize("build", [normed, heads])
def test_text_and_json_read_back(build: Callable[[int], Graph]) -> None:
    """To an equal family; what is written shows the symbol."""
    family = trace(build, Dim("n", 1, 40))
    text = family_text(family)
    assert text.startswith("dim n = 1..40\n")
    assert is_family_text(text)
    assert parse_family(text) == family
    data = json.loads(json.dumps(family_json(family)))
    assert is_family_json(data)
    assert family_from_json(data) == family
    assert "$n" in text
    assert "$n" in json.dumps(data)


def test_the_text_form_is_the_documented_one() -> None:
    """Expressions stand where integers stand; a hand-written family reads, with comments."""
    written = """
        # rows of any number
        dim rows = 2..9
        graph "twice" {
          %x = input index=0 : f32[2*$rows+1, 8]
          %y = reshape %x : f32[16*$rows+8]
          output %y name="y"
        }
    """
    family = parse_family(written)
    assert family.at(3).inputs[0].shape == (7, 8)
    assert family.at(3).outputs[0].shape == (56,)
    assert family_text(family).startswith("dim rows = 2..9\n\ngraph")
    assert family.size_of([(19, 8)], "twice") == 9


def test_a_family_is_no_other_family() -> None:
    """The digest knows the range, the symbol and the graphs, not the names."""
    one = trace(normed, BATCH)
    assert one.digest == trace(normed, BATCH).digest
    others = [
        trace(normed, Dim("batch", 1, 65)),
        trace(normed, Dim("rows", 1, 64)),
        trace(lambda n: normed(n, 64), BATCH),
    ]
    assert len({f.digest for f in others} | {one.digest}) == 4


def test_sizes_outside_the_range_are_refused_with_name_value_and_range() -> None:
    family = trace(normed, BATCH)
    for size in (0, -1, 65, 1000):
        with pytest.raises(ShapeError, match=rf"batch is {size}, the family holds 1 to 64"):
            family.at(size)
    with pytest.raises(ShapeError, match="batch is 65, the family holds 1 to 64"):
        family.size_of([(65, 48), (48, 32)], "normed")


def test_shapes_that_are_no_size_are_refused() -> None:
    """Which axis of which input, and what the family has there."""
    family = trace(heads, Dim("keys", 1, 40))
    assert family.size_of([(7, 64), (4, 7, 16)], "heads") == 7
    with pytest.raises(ShapeError, match=r"axis 1 of input 'kv' is 8.*\$keys there \(7 at keys 7"):
        family.size_of([(7, 64), (4, 8, 16)], "heads")
    with pytest.raises(ShapeError, match="axis 1 of input 'q' is 63"):
        family.size_of([(7, 63), (4, 7, 16)], "heads")
    with pytest.raises(ShapeError, match="rank"):
        family.size_of([(7, 64), (4, 7)], "heads")
    with pytest.raises(ShapeError, match="takes 2 inputs"):
        family.size_of([(7, 64)], "heads")


@pytest.mark.parametrize(
    "text", ["batch=1..", "batch=4..4", "batch=0..4", "batch=9..2", "1..64", "=1..2", "batch=a..b"]
)
def test_wrong_ranges_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"LOW\.\.HIGH|1\.\.64"):
        Dim.parse(text)


def test_graphs_that_differ_in_more_than_extents_are_no_family() -> None:
    """Another structure, a constant that is no multiple, and an input that never varies."""

    def other(n: int) -> Graph:
        g = KernelGraph("other")
        x = g.input((n, 8))
        g.output(g.exp(x) if n < 20 else g.sqrt(x))
        return g.freeze()

    def scaled(n: int) -> Graph:
        g = KernelGraph("scaled")
        x = g.input((n, 8))
        g.output(g.mul(g.sum(x, 0), 1 / n))
        return g.freeze()

    with pytest.raises(MalformedGraph, match=r"at batch .* differ|other operators"):
        trace(other, BATCH)
    with pytest.raises(MalformedGraph, match=r"size\(\) or mean\(\)"):
        trace(scaled, BATCH)
    with pytest.raises(MalformedGraph, match="no input has a dim"):
        trace(lambda n: normed(8), BATCH)


def test_a_dim_of_a_stored_graph_varies_with_all_that_are_tied_to_it() -> None:
    """By the rules of `dim_classes`; what attributes tie is refused."""
    family = along(normed(8), "w", 0, Dim("width", 2, 100))
    assert set(family.extents) == {(0, 1), (1, 0)}
    assert family.at(50).outputs == normed(8, 50).outputs
    with pytest.raises(UserError, match="no input 'v'"):
        along(normed(8), "v", 0, BATCH)
    with pytest.raises(UserError, match="axes 0 to 1"):
        along(normed(8), "w", 2, BATCH)
    with pytest.raises(UserError, match="cannot vary"):
        along(normed(1), "x", 0, BATCH)
    with pytest.raises(UserError, match="cannot vary"):
        along(heads(8), "q", 1, BATCH)


def test_probes_hold_ends_neighbours_and_odd_sizes() -> None:
    assert probes(Dim("n", 1, 64)) == (1, 2, 3, 7, 13, 15, 16, 17, 31, 32, 33, 63, 64)
    assert {5, 6, 7, 13, 99, 100} <= set(probes(Dim("n", 5, 100)))


@pytest.mark.parametrize(
    "wrong",
    [
        "graph {}",
        'dim n = 1..4\ngraph "g" {\n  %x = input index=0 : f32[3]\n  output %x\n}',
        'dim n = 1..4\ngraph "g" {\n  %x = input index=0 : f32[$m]\n  output %x\n}',
    ],
)
def test_texts_that_are_no_family_are_refused(wrong: str) -> None:
    with pytest.raises(ParseError):
        parse_family(wrong)


@pytest.mark.parametrize("wrong", [None, {}, {"schema": 9, "dim": {}, "graph": {}}, {"schema": 1}])
def test_json_that_is_no_family_is_refused(wrong: object) -> None:
    assert not isinstance(wrong, FamilyGraph)
    with pytest.raises(ParseError):
        family_from_json(wrong)
