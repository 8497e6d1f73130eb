"""The text and JSON forms, files told apart by content, the picture, the door check, interning and
digests.

Proves that what is written reads back to the same objects, that every kind of bad input is refused
with its place and what was expected, and that digests do not depend on the process, on names or on
order of construction.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.strategies import MUGRAPHS, block_zoo

from obelisk.base.errors import MalformedGraph, ParseError, ShapeError, UserError
from obelisk.ir import BlockBuilder, DType, Graph, KernelGraph, Op, load_mirage, make_graph
from obelisk.ir import build as b
from obelisk.ir import composite as c
from obelisk.ir.files import read_graph, read_graphs, write_graphs
from obelisk.ir.jsonform import SCHEMA, dumps, from_json, loads, to_json
from obelisk.ir.mirage_out import save_mirage
from obelisk.ir.node import Node, make
from obelisk.ir.op import BlockAttrs
from obelisk.ir.resize import blocks_of
from obelisk.ir.spec import check_graph
from obelisk.ir.svg import to_svg
from obelisk.ir.text import parse, parse_all, to_text

EXAMPLE = """\
# a fused rms_norm and product
block b0 grid=(2) loop=4 threads=128 {
  %0 = load index=0 full=(4, 32) imap=(none) fmap=1 : f16[4, 8]
  %1 = load index=1 full=(32, 8) imap=(1) fmap=0 : f16[8, 4]
  %2 = matmul %0, %1 : f16[4, 4]
  %3 = accum_sum %2 : f16[4, 4]
  %4 = square %0 : f16[4, 8]
  %5 = sum %4 axis=1 : f16[4, 1]
  %6 = accum_sum %5 : f16[4, 1]
  %7 = size %0 axis=1 scope=full : f32[]
  %8 = div %6, %7 : f16[4, 1]
  %9 = sqrt %8 : f16[4, 1]
  %10 = div %3, %9 : f16[4, 4]
  store %10 omap=(1) : f16
}

graph "rmsnorm" {
  %x = input index=0 : f16[4, 32]
  %w = input index=1 : f16[32, 8]
  %0 = block %x, %w block=b0 : f16[4, 8]
  output %0 name="y"
}
"""


def test_example_reads_and_writes_back() -> None:
    graph = parse(EXAMPLE)
    assert graph.name == "rmsnorm"
    assert graph.input_names == ("x", "w")
    assert graph.output_names == ("y",)
    assert graph.outputs[0].shape == (4, 8)
    assert "# a fused rms_norm and product\n" + to_text(graph) == EXAMPLE


def test_several_graphs_in_one_text() -> None:
    """Each graph has its own section names."""
    first, second = parse(EXAMPLE), block_zoo(5)
    text = to_text(first) + to_text(second) + to_text(first)
    assert parse_all(text) == [first, second, first]
    with pytest.raises(ParseError, match="expected one graph, the text holds 3"):
        parse(text)


def edit(old: str, new: str) -> str:
    assert EXAMPLE.count(old) == 1, old
    return EXAMPLE.replace(old, new)


BAD_TEXT: dict[str, tuple[str, type[Exception], str]] = {
    "unknown operator": (edit("sqrt %8", "root %8"), ParseError,
                         r"line 12: unknown operator 'root'; known are .*rsqrt.*%9 = root"),
    "unknown value": (edit("sqrt %8", "sqrt %12"), ParseError,
                      r"line 12: expected a value defined above in this section, got '%12'"),
    "defined twice": (edit("%9 = sqrt", "%8 = sqrt"), ParseError, "line 12.*not defined yet"),
    "unknown attribute": (edit("%4 axis=1", "%4 axes=1"), ParseError,
                          "line 8: sum has no attribute 'axes'; it has axis, keep"),
    "missing attribute": (edit("sum %4 axis=1", "sum %4"), ParseError,
                          "line 8: sum: attribute 'axis' is missing"),
    "bad attribute": (edit("%4 axis=1", "%4 axis=(1, 2)"), ParseError,
                      r"line 8: sum: attribute 'axis' must be an integer, got \[1, 2\]"),
    "attribute twice": (edit("%4 axis=1", "%4 axis=1 axis=1"), ParseError,
                        "line 8: expected each attribute once"),
    "axis out of range": (edit("%4 axis=1", "%4 axis=7"), ShapeError, "line 8: reduction: axis 7"),
    "wrong type": (edit("sqrt %8 : f16[4, 1]", "sqrt %8 : f16[4, 2]"), MalformedGraph,
                   r"line 12: the line says f16\[4, 2\], but sqrt gives f16\[4, 1\]"),
    "unknown dtype": (edit("sqrt %8 : f16", "sqrt %8 : f17"), ParseError,
                      "line 12: unknown dtype 'f17': known are f64, f32"),
    "type missing": (edit("%x = input index=0 : f16[4, 32]", "%x = input index=0"), ParseError,
                     "line 18: the result's type is missing"),
    "unknown block": (edit("block=b0", "block=b1"), ParseError, "line 20.*defined above, got 'b1'"),
    "not closed": (EXAMPLE.rstrip().rstrip("}"), ParseError, "line 17: the section is not closed"),
    "no graph": (EXAMPLE[: EXAMPLE.index("graph")], ParseError, "line 2: the file ends before"),
    "bad character": (edit("sqrt %8", "sqrt @8"), ParseError, "line 12: unexpected character '@'"),
    "rest of line": (edit("sqrt %8 : f16[4, 1]", "sqrt %8 : f16[4, 1] 3"), ParseError,
                     "line 12: expected the end of the line, got '3'"),
    "not a section": ("node x {\n}\n", ParseError, "line 1: expected a section: thread, block or"),
    "bad header": (edit("loop=4", "loops=4"), ParseError, "line 2: unknown 'loops'; expected grid"),
    "no grid": (edit("grid=(2) ", ""), ParseError, "line 2: grid must be a list of integers"),
    "overlapping store": (edit("omap=(1)", "omap=(none)"), MalformedGraph,
                          "line 2: grid axis 0 of 2 blocks is not mapped"),
    "bad store": (edit("omap=(1)", "omap=1"), ParseError, "line 14: store: omap must be a list"),
    "bad fold": (edit("omap=(1)", "omap=(1) reduce=avg"), ParseError,
                 "line 14: store: reduce must be none, sum or max, got 'avg'"),
    "undeclared input": (edit("%x = input index=0", "%x = input index=2"), MalformedGraph,
                         "line 17: graph 'rmsnorm': input 0 is"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "error", "match"), BAD_TEXT.values(), ids=BAD_TEXT.keys())
def test_text_errors_name_the_line(text: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        parse(text)


Change = Callable[[dict[str, Any]], Any]
BAD_JSON: dict[str, tuple[Change, type[Exception], str]] = {
    "newer schema": (lambda d: d.update(schema=SCHEMA + 1), ParseError,
                     f"has schema {SCHEMA + 1}, this Obelisk reads up to {SCHEMA}"),
    "bad schema": (lambda d: d.update(schema="x"), ParseError, "positive integer, got 'x'"),
    "no schema": (lambda d: d.pop("schema"), ParseError, "'schema' field is expected"),
    "unknown operator": (lambda d: d["nodes"][2].update(op="blok"), ParseError,
                         r"graph.nodes\[2\]: unknown operator 'blok'; known are .*block"),
    "missing field": (lambda d: d["nodes"][2].pop("attrs"), ParseError,
                      r"graph.nodes\[2\]: field 'attrs' is missing"),
    "forward reference": (lambda d: d["nodes"][2].update(inputs=[0, 2]), ParseError,
                          "2 is no node before this one"),
    "recorded type": (lambda d: d["nodes"][2].update(dtype="f32"), MalformedGraph,
                      r"graph.nodes\[2\]: recorded as f32\[4, 8\], but block gives f16"),
    "bad attribute": (lambda d: d["blocks"]["b0"]["nodes"][0]["attrs"].update(imap=3), ParseError,
                      r"blocks.b0.nodes\[0\]: load: attribute 'imap' must be"),
    "bad grid": (lambda d: d["blocks"]["b0"].update(grid=["a"]), ParseError, "list of integers"),
    "overlap": (lambda d: d["blocks"]["b0"]["stores"][0].update(omap=[None]), MalformedGraph,
                "blocks.b0: grid axis 0"),
    "bad output": (lambda d: d["outputs"][0].update(node=9), ParseError, r"outputs\[0\]: 9 is no"),
    "wrong kind": (lambda d: d.update(nodes={}), ParseError, "'nodes' must be a JSON list"),
    "no output": (lambda d: d.update(outputs=[]), MalformedGraph, "has no output"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "error", "match"), BAD_JSON.values(), ids=BAD_JSON.keys())
def test_json_errors_name_the_place(change: Change, error: type[Exception], match: str) -> None:
    data = json.loads(dumps(parse(EXAMPLE)))
    change(data)
    with pytest.raises(error, match=match):
        from_json(data)


def test_json_is_stable_and_plain() -> None:
    graph = block_zoo(11)
    assert dumps(graph) == dumps(graph)
    assert json.loads(dumps(graph)) == to_json(graph)
    with pytest.raises(ParseError, match=r"not JSON: .*line 1 column 2"):
        loads("{")


# --- files ---------------------------------------------------------------------------------------


def test_files_are_told_apart_by_content(tmp_path: Path) -> None:
    graph = parse(EXAMPLE)
    for name in ("g.txt", "g.json", "g.mirage.json"):
        write_graphs(tmp_path / name, [graph])
    assert read_graph(tmp_path / "g.txt") == graph
    assert read_graph(tmp_path / "g.json") == graph
    mirage = read_graph(tmp_path / "g.mirage.json")
    assert mirage.outputs[0] is graph.outputs[0]
    write_graphs(tmp_path / "two.txt", [graph, block_zoo(3)])
    entries = read_graphs(tmp_path / "two.txt")
    assert [e.graph for e in entries] == [graph, block_zoo(3)]
    (tmp_path / "swapped.txt").write_text((tmp_path / "g.json").read_text())
    assert read_graph(tmp_path / "swapped.txt") == graph
    (tmp_path / "list.json").write_text(json.dumps([to_json(graph), to_json(graph)]))
    assert [e.graph for e in read_graphs(tmp_path / "list.json")] == [graph, graph]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "holds no graph"),
        (b"[1, 2]", "neither an Obelisk graph"),
        (b"{}", "neither an Obelisk graph"),
        (b'{"schema": 1', "not JSON"),
        (b"\xff\xfe\x00", "cannot be read as text"),
        (b"graph {\n}\n", "line 1: expected a name in"),
        (b"\x00\x01", "line 1"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: bytes, match: str) -> None:
    path = tmp_path / "bad.any"
    path.write_bytes(content)
    with pytest.raises(ParseError, match=match) as info:
        read_graphs(path)
    assert "bad.any" in str(info.value)


def test_several_graphs_where_one_is_wanted(tmp_path: Path) -> None:
    graph = parse(EXAMPLE)
    write_graphs(tmp_path / "two.txt", [graph, graph])
    with pytest.raises(ParseError, match="holds 2 graphs; one was expected"):
        read_graph(tmp_path / "two.txt")
    with pytest.raises(MalformedGraph, match="holds one graph, got 2"):
        write_graphs(tmp_path / "two.json", [graph, graph])
    bad = save_mirage([graph])
    bad[0][-1]["input_tensors"][0]["guid"] = 5
    (tmp_path / "bad.json").write_text(json.dumps(bad))
    with pytest.raises(MalformedGraph, match="defines guid 5"):
        read_graph(tmp_path / "bad.json")


# --- picture -------------------------------------------------------------------------------------


def test_picture_is_self_contained_xml_with_every_level() -> None:
    graph = next(g for g in map(block_zoo, range(20)) if any(k.loop > 1 for k in blocks_of(g)))
    text = to_svg(graph)
    assert to_svg(graph) == text
    root = ET.fromstring(text.encode())
    assert root.tag.endswith("svg")
    assert not re.search(r"href|@import|url\((?!#)|<script", text)
    shown = " ".join(t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}text"))
    for label in ("block graph, grid", "iterations", "accum_max", "threads x", "store", "output"):
        assert label in shown
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    boxes = list(root.iter("{http://www.w3.org/2000/svg}rect"))
    assert len(boxes) > 15
    for box in boxes:
        x, y, w, h = (float(box.attrib[k]) for k in ("x", "y", "width", "height"))
        assert x >= 0
        assert y >= 0
        assert x + w <= width
        assert y + h <= height


@pytest.mark.skipif(not MUGRAPHS.is_dir(), reason=f"NOT RUN: no checkpoints at {MUGRAPHS}")
@pytest.mark.parametrize("path", sorted(MUGRAPHS.glob("*.json")), ids=lambda p: p.stem)
def test_published_graphs_in_every_form(path: Path) -> None:
    for entry in load_mirage(path):
        graph = entry.graph
        assert graph is not None
        assert parse(to_text(graph)) == graph
        assert loads(dumps(graph)) == graph
        assert check_graph(graph) is graph
        ET.fromstring(to_svg(graph).encode())


# --- the door check ------------------------------------------------------------------------------


def _forged(node: Node, **fields: Any) -> Node:
    """A node outside the intern table whose fields lie, as only a fault in Obelisk could make."""
    fake = Node.__new__(Node)
    for name in ("op", "inputs", "attrs", "shape", "dtype", "_digest"):
        setattr(fake, name, fields.get(name, getattr(node, name)))
    return fake


def test_door_check_accepts_good_and_names_bad() -> None:
    x = b.input_node(0, (4, 8))
    y = b.exp(x)
    good = make_graph([x], [y], name="g")
    assert check_graph(good) is good
    cases: list[tuple[Graph, str]] = [
        (Graph((x,), (_forged(y, shape=(4, 9)),), ("x",), ("y",), "g"), r"should be f32\[4, 8\]"),
        (Graph((), (y,), (), ("y",), "g"), "input 0 is read, not declared"),
        (Graph((x,), (), ("x",), (), "g"), "needs an output"),
        (Graph((x,), (y,), (), ("y",), "g"), "as many names"),
        (Graph((y,), (y,), ("x",), ("y",), "g"), "not input node 0"),
        (Graph((x,), (b.accum_sum(x),), ("x",), ("y",), "g"),
         "accum_sum cannot occur at kernel level"),
    ]  # fmt: skip
    for graph, text in cases:
        with pytest.raises(MalformedGraph, match=text):
            check_graph(graph)


def test_door_check_looks_inside_blocks() -> None:
    x = b.input_node(0, (4, 8))
    block = BlockBuilder((2,))
    tile = block.load(x, (0,))
    block.store(b.exp(tile), (0,))
    inner = block.finish()
    broken = copy.copy(inner)
    broken.__dict__.pop("body", None)
    broken.loop = 2  # the loads were cut for one iteration
    node = _forged(b.run_block(inner, [x])[0], attrs=BlockAttrs(broken, 0))
    with pytest.raises(MalformedGraph, match="block 0: load 0 was cut for"):
        check_graph(Graph((x,), (node,), ("x",), ("y",), "g"))


# --- identity and digests ------------------------------------------------------------------------


def test_equal_structure_is_one_object() -> None:
    x = b.input_node(0, (2, 3))
    assert b.add(x, 1.0) is b.add(x, 1)
    assert c.softmax(x) is c.softmax(b.input_node(0, (2, 3)))
    assert b.input_node(0, (2, 3), strides=(3, 1)) is x
    assert b.input_node(0, (2, 3), strides=(1, 2)) is not x
    assert b.sum(x, -1) is b.sum(x, 1)
    assert b.add(x, x) is not b.mul(x, x)
    assert b.const(-0.0) is b.const(0.0)
    assert str(b.const(-0.0).attrs.value) == "0.0"
    assert make(Op.EXP, (x,)) is b.exp(x)
    assert parse(EXAMPLE).outputs[0].attrs.block is parse(EXAMPLE).outputs[0].attrs.block


def test_unused_nodes_are_freed() -> None:
    from obelisk.ir import node as module

    gc.collect()
    before = len(module._TABLE)
    value = b.exp(b.input_node(0, (9, 9, 9)))
    assert len(module._TABLE) == before + 2
    del value
    gc.collect()
    assert len(module._TABLE) == before


def test_digest_sees_structure_and_not_names() -> None:
    def build(name: str, label: str, dtype: str = "f32", strides: Any = None) -> Graph:
        g = KernelGraph(name)
        x = g.input((4, 8), dtype, name=label, strides=strides)
        g.output(g.softmax(x), name=label)
        return g.freeze()

    base = build("a", "x")
    assert build("b", "other").digest == base.digest
    assert build("a", "x", "f16").digest != base.digest
    assert build("a", "x", "f32", (1, 4)).digest != base.digest
    x = base.inputs[0]
    digests = {
        make_graph([x], outs).digest
        for outs in ([b.exp(x)], [b.exp(x), x], [x, b.exp(x)], [b.exp(b.exp(x))], [b.sum(x, 0)],
                     [b.sum(x, 1)], [b.sum(x, 1, 2)], [b.mul(x, 2.0)], [b.mul(x, 3.0)],
                     [b.sub(x, b.exp(x))], [b.sub(b.exp(x), x)])
    }  # fmt: skip
    assert len(digests) == 11


SCRIPT = """
from tests.strategies import block_zoo, kernel_graph
for seed in range(6):
    print(block_zoo(seed).digest, kernel_graph(seed).digest)
"""


def test_digests_and_text_are_the_same_in_every_process() -> None:
    """Other hash seeds, other memory addresses: the same digests."""
    root = Path(__file__).resolve().parents[2]
    seen = set()
    for seed in ("0", "1", "12345"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=env, cwd=root, capture_output=True, text=True,
            check=True, timeout=120,
        )  # fmt: skip
        assert len(done.stdout.split()) == 12
        seen.add(done.stdout)
    assert len(seen) == 1


def test_deep_graphs_do_not_recurse() -> None:
    x: Node = b.input_node(0, (2, 2))
    root = x
    for k in range(5_000):
        root = b.add(root, float(k))
    graph = make_graph([x], [root])
    assert len(graph.digest) == 24
    again = parse(to_text(graph))
    assert again.outputs[0] is root


def test_all_errors_are_user_errors() -> None:
    """One `except UserError` catches every complaint about a file."""
    for text, _, _ in BAD_TEXT.values():
        with pytest.raises(UserError):
            parse(text)
    assert issubclass(ParseError, ValueError)
    assert DType.F16.nbytes == 2
