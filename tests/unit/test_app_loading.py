"""Programs from files: every form reads, and what is wrong is named with its file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from obelisk.app.loading import graph_of, load_entries, load_program
from obelisk.app.programs import PROGRAMS
from obelisk.base.errors import (
    MalformedGraph,
    ObeliskError,
    ParseError,
    ShapeError,
    UnknownName,
    UserError,
)
from obelisk.ir import DType, KernelGraph
from obelisk.ir.files import write_graphs

FORMS = {
    "takes the graph, returns nothing": "def f(g):\n    g.output(g.exp(g.input((2, 3))))\n",
    "takes the graph, returns a value": "def f(g):\n    return g.exp(g.input((2, 3)))\n",
    "returns a builder": (
        "import obelisk as ob\ndef f():\n    g = ob.KernelGraph()\n"
        "    g.output(g.exp(g.input((2, 3))))\n    return g\n"
    ),
    "returns a frozen graph": (
        "import obelisk as ob\ndef f():\n    g = ob.KernelGraph()\n"
        "    g.output(g.exp(g.input((2, 3))))\n    return g.freeze()\n"
    ),
    "is one of several": (
        "def helper(g, x):\n    return g.exp(x)\n"
        "def program(g):\n    return helper(g, g.input((2, 3)))\n"
    ),
}


def expected() -> str:
    """The digest of exp of a (2, 3) input."""
    g = KernelGraph()
    g.output(g.exp(g.input((2, 3))))
    return g.freeze().digest


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_python_files(form: str, tmp_path: Path) -> None:
    """A function may take a graph, return one, or return values; all give the same program."""
    path = tmp_path / "model.py"
    path.write_text(FORMS[form])
    assert load_program(str(path)).digest == expected()


def test_function_by_name_with_batch_and_dtype(tmp_path: Path) -> None:
    """`file.py:function` chooses; batch and dtype reach the parameters of these names."""
    path = tmp_path / "model.py"
    path.write_text(
        "def a(g, batch=1, dtype='f32'):\n    return g.exp(g.input((2 * batch, 3), dtype))\n"
        "def b(g):\n    return g.neg(g.input((2, 3)))\n"
    )
    graph = load_program(f"{path}:a", batch=4, dtype="f16")
    assert graph.inputs[0].shape == (8, 3)
    assert graph.inputs[0].dtype is DType.F16
    with pytest.raises(UserError, match=r"b\(\) has no parameter batch"):
        load_program(f"{path}:b", batch=4)
    with pytest.raises(UserError, match=r"b\(\) has no parameter dtype"):
        load_program(f"{path}:b", dtype="f16")
    with pytest.raises(UnknownName, match="has no function 'c': it has a, b"):
        load_program(f"{path}:c")
    with pytest.raises(UnknownName, match=r"2 functions \(a, b\)"):
        load_program(str(path))


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("def f(:\n", ParseError, r"model.py:1: "),
        ("1 / 0\n", UserError, r"model.py:1: ZeroDivisionError"),
        ("def f(g):\n    x = g.input((2, 3))\n    return g.matmul(x, x)\n", ShapeError, r"py:3: "),
        ("def f(g):\n    return {}['k']\n", UserError, r"model.py:2: KeyError"),
        ("def f(g):\n    return 3\n", MalformedGraph, r"returned int: expected a graph"),
        ("def f(g):\n    g.input((2, 3))\n", MalformedGraph, r"no output"),
        ("def f(g, x):\n    return x\n", UserError, r"wants 'x'"),
        ("x = 1\n", UnknownName, r"0 functions \(none\)"),
    ],
)
def test_faults_in_python_files(
    text: str, kind: type[ObeliskError], message: str, tmp_path: Path
) -> None:
    """A fault in the user's file is one of our errors and names the line."""
    path = tmp_path / "model.py"
    path.write_text(text)
    with pytest.raises(kind, match=message):
        load_program(str(path))


@pytest.mark.parametrize("name", ["g.txt", "g.json"])
def test_stored_graphs_read_back(name: str, tmp_path: Path) -> None:
    """Text and JSON files are programs; batch and dtype do not apply to them."""
    graph = PROGRAMS["lora"].graph()
    path = tmp_path / name
    write_graphs(path, [graph])
    assert load_program(str(path)).digest == graph.digest
    with pytest.raises(UserError, match="--batch and --dtype do not apply"):
        load_program(str(path), batch=2)


def test_files_of_many_graphs(mugraphs: Path) -> None:
    """A checkpoint list has entries; one is chosen with #N, and a wrong N names the range."""
    path = mugraphs / "gqa_bs1.json"
    entries = load_entries(str(path))
    assert len(entries) == 28
    one = load_entries(f"{path}#3")
    assert [graph_of(e).digest for e in one] == [graph_of(entries[3]).digest]
    with pytest.raises(UserError, match=r"graphs 0 to 27, got #28"):
        load_entries(f"{path}#28")
    with pytest.raises(UserError, match=r"holds 28 graphs.*#INDEX"):
        load_program(str(path))


def test_named_programs_follow_what_they_are_compared_with(mugraphs: Path) -> None:
    """Against a stored f16 graph, the named program takes its dtype and batch."""
    like = graph_of(load_entries(str(mugraphs / "ntrans_bs1.json#0"))[0])
    program = load_program("ntrans", like=like)
    assert [(i.shape, i.dtype) for i in program.inputs] == [(i.shape, i.dtype) for i in like.inputs]
    assert program.inputs[0].dtype is DType.F16


@pytest.mark.parametrize(
    ("spec", "message"),
    [("nothing.py", "no such file"), ("nothing.json", "no such file"), ("a/b", "no such file")],
)
def test_missing_files_are_named(spec: str, message: str) -> None:
    """What looks like a file and is none is said to be missing, not taken for a name."""
    with pytest.raises(UserError, match=message):
        load_program(spec)
