"""Mirage checkpoints: real files read, mean the right thing, survive export, and bad graphs are
named.

Proves on the published files that every graph imports, that the graphs of the nine good files equal
their program on random float64 inputs while those of qknorm do not, and that import, export, import
gives the same interned nodes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.strategies import MUGRAPHS

from obelisk.base.errors import MalformedGraph, ParseError
from obelisk.ir import BlockBuilder, DType, Op, Reduce, load_mirage, make_graph, run, save_mirage
from obelisk.ir import build as b
from obelisk.ir import composite as c
from obelisk.ir.op import SizeScope

Array = Any
needs_files = pytest.mark.skipif(
    not MUGRAPHS.is_dir(), reason=f"NOT RUN: the published checkpoints are not at {MUGRAPHS}"
)


def rms(x: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True))


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def attention(q: Array, k: Array, v: Array) -> Array:
    e = np.exp(q @ k)
    return (e / e.sum(-1, keepdims=True)) @ v


def gated(x: Array, w: Array, u: Array) -> Array:
    return silu(x @ w) * (x @ u)


def lora(x: Array, w: Array, down: Array, up: Array) -> Array:
    return x @ w + (x @ down) @ up


# file: number of graphs, formula, scale of the inputs (small where scores reach exp)
FILES: dict[str, tuple[int, Callable[..., Array], float]] = {
    "gated_mlp": (32, gated, 0.3),
    "gqa_bs1": (28, attention, 0.2),
    "lora": (4, lora, 1.0),
    "mha_bs1": (21, attention, 0.2),
    "mqa_bs1": (12, attention, 0.2),
    "ntrans_bs1": (9, lambda h, x, alpha: rms(x + alpha * (rms(h) + x)), 1.0),
    "rmsnorm_bs1": (18, lambda x, w: rms(x) @ w, 1.0),
    "single_gated_mlp": (1, gated, 0.3),
    "single_lora": (1, lora, 1.0),
    "qknorm_gqa_bs1": (190, lambda q, k, v: attention(rms(q), k, rms(v)), 0.2),
}
SAMPLES = 2  # graphs per file that are evaluated at full size


@needs_files
@pytest.mark.parametrize("name", FILES)
def test_every_graph_reads_and_survives_export(name: str) -> None:
    count = FILES[name][0]
    entries = load_mirage(MUGRAPHS / f"{name}.json")
    assert len(entries) == count
    assert [e.index for e in entries] == list(range(count))
    graphs = [e.graph for e in entries if e.graph is not None]
    assert len(graphs) == count, [str(e.error) for e in entries if e.error]
    text = json.dumps(save_mirage(graphs))
    assert json.dumps(save_mirage(graphs)) == text, "export is byte-stable"
    again = load_mirage(json.loads(text), name)
    for first, second in zip(entries, again, strict=True):
        assert second.graph is not None, second.error
        assert first.graph == second.graph
        assert all(a is z for a, z in zip(first.graph.outputs, second.graph.outputs, strict=True))


@needs_files
@pytest.mark.parametrize("name", FILES)
def test_graphs_equal_their_program(name: str) -> None:
    """All published graphs are right except qknorm's, of which every sampled one is far off."""
    count, formula, scale = FILES[name]
    entries = load_mirage(MUGRAPHS / f"{name}.json")
    rng = np.random.default_rng(7)
    step = max(1, count // SAMPLES)
    for entry in entries[::step][:SAMPLES]:
        assert entry.graph is not None
        arrays = [rng.standard_normal(i.shape) * scale for i in entry.graph.inputs]
        want = formula(*arrays)
        (got,) = run(entry.graph, arrays)
        error = np.max(np.abs(got - want)) / np.max(np.abs(want))
        if name == "qknorm_gqa_bs1":
            assert error > 0.1, f"graph {entry.index} should be refuted, error {error}"
        else:
            assert error < 1e-12, f"graph {entry.index}: error {error}"


def _small() -> list[Any]:
    """A small checkpoint of one graph: rms_norm as an accumulator, next to a product."""
    x, w = b.input_node(0, (4, 32), DType.F16), b.input_node(1, (32, 8), DType.F16)
    block = BlockBuilder((2,), 4)
    tx, tw = block.load(x, (None,), 1), block.load(w, (1,), 0)
    power = b.accum_sum(b.sum(b.square(tx), 1))
    norm = b.sqrt(b.div(power, b.size(tx, 1, SizeScope.FULL)))
    block.store(b.div(b.accum_sum(b.matmul(tx, tw)), norm), (1,))
    return save_mirage([make_graph([x, w], block.launch())])


def test_small_checkpoint_is_written_in_mirages_words() -> None:
    (graph,) = _small()
    (custom,) = [op for op in graph if op["op_type"] == "kn_customized_op"]
    kinds = [op["op_type"] for op in custom["bgraph"]["operators"]]
    assert sorted(kinds) == sorted([
        "tb_input_op", "tb_input_op", "tb_matmul_op", "tb_accum_nored_op",
        "tb_accum_red_ld_rms_op", "tb_div_op", "tb_output_op",
    ])  # fmt: skip
    assert custom["bgraph"]["grid_dim"] == {"x": 2, "y": 1, "z": 1}
    assert graph[0]["output_tensors"][0]["data_type"] == 921


Change = Callable[[list[Any]], None]


def _block(graph: list[Any]) -> Any:
    return next(op for op in graph if op["op_type"] == "kn_customized_op")["bgraph"]


def _op(graph: list[Any], kind: str) -> Any:
    return next(op for op in _block(graph)["operators"] if op["op_type"] == kind)


FAULTS: list[tuple[str, Change, type[Exception], str]] = [
    ("recorded kernel shape", lambda g: g[-1]["input_tensors"][0]["dim"].__setitem__(1, 9),
     MalformedGraph, r"read with shape \(4, 9\)"),
    ("recorded tile shape", lambda g: _op(g, "tb_matmul_op")["output_tensors"][0]["dim"]
     .__setitem__(0, 3), MalformedGraph, r"recorded shape \(3, 4\), but matmul gives \(4, 4\)"),
    ("blocks overlap", lambda g: _op(g, "tb_output_op")["output_map"].update(x=-1),
     MalformedGraph, "blocks overlap"),
    ("laid along the wrong dim", lambda g: _op(g, "tb_output_op")["output_map"].update(x=0),
     MalformedGraph, "recorded shape"),
    ("dim out of range", lambda g: _op(g, "tb_input_op")["input_map"].update(x=5),
     MalformedGraph, "mapped dim 5|axis 5|imap"),
    ("uneven tiles", lambda g: _block(g).update(forloop_range=5),
     MalformedGraph, "does not divide into 5 tiles"),
    ("no accumulator", lambda g: _op(g, "tb_accum_nored_op").update(op_type="tb_exp_op"),
     MalformedGraph, "joins a value of the loop with one from after it"),
    ("unknown operator", lambda g: _op(g, "tb_div_op").update(op_type="tb_pow_op"),
     ParseError, "unknown operator 'tb_pow_op'; known are .*tb_rms_norm_op"),
    ("missing field", lambda g: _block(g).pop("grid_dim"), ParseError, "'grid_dim' is missing"),
    ("undefined guid", lambda g: g[-1]["input_tensors"][0].update(guid=1),
     MalformedGraph, "defines guid 1"),
    ("guid twice", lambda g: g[1]["output_tensors"][0].update(
        guid=g[0]["output_tensors"][0]["guid"]), MalformedGraph, "defined twice"),
    ("unknown dtype", lambda g: g[0]["output_tensors"][0].update(data_type=930),
     ParseError, "unknown dtype number 930; Mirage renumbered"),
    ("not an object", lambda g: g.__setitem__(2, 7), ParseError, "expected an object, got 7"),
    ("zero grid", lambda g: _block(g)["grid_dim"].update(x=0), MalformedGraph, "must be positive"),
    ("clamp without bounds", lambda g: _op(g, "tb_accum_nored_op").update(op_type="tb_clamp_op"),
     ParseError, "'min_val' is missing"),
    ("strided result", lambda g: g[-1].update(output_strides=[1, 4]), MalformedGraph, "row-major"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "change", "error", "text"), FAULTS, ids=[f[0] for f in FAULTS])
def test_a_malformed_graph_is_named_and_stops_no_other(
    what: str, change: Change, error: type[Exception], text: str
) -> None:
    good = _small()[0]
    bad = copy.deepcopy(good)
    change(bad)
    first, second, third = load_mirage([good, bad, good], "file")
    assert first.graph is not None
    assert third.graph is not None
    assert second.graph is None
    assert isinstance(second.error, error), second.error
    import re

    assert re.search(text, str(second.error)), str(second.error)
    assert "file_1" in str(second.error) or isinstance(second.error, MalformedGraph)


def test_both_dtype_numberings_and_names_are_read() -> None:
    good = _small()
    (want,) = load_mirage(good)
    for number in (941, "fp16", "float16"):
        text = json.dumps(good).replace("921", json.dumps(number))
        (got,) = load_mirage(json.loads(text))
        assert got.graph == want.graph


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text('[{"op_type": ')
    with pytest.raises(ParseError, match=r"broken\.json: not a Mirage checkpoint"):
        load_mirage(path)
    with pytest.raises(ParseError, match="list of graphs, got a JSON dict"):
        load_mirage({"a": 1})  # type: ignore[arg-type]
    with pytest.raises(ParseError, match=r"missing\.json"):
        load_mirage(tmp_path / "missing.json")


X = b.input_node(0, (4, 8))
ROUND_TRIPS = {
    "unary": lambda x: b.exp(b.sqrt(b.square(b.log(x)))),
    "composites": lambda x: c.rms_norm(c.gelu(c.relu(c.silu(b.sigmoid(x))))),
    "scalars": lambda x: c.clamp(b.mul(x, 0.5), -1.0, 2.0),
    "reductions": lambda x: b.div(x, b.sum(x, 1)),
    "kept sum": lambda x: b.sum(x, 1, 4),
    "concat": lambda x: b.concat([x, b.exp(x)], 1),
}


@pytest.mark.parametrize("build", ROUND_TRIPS.values(), ids=ROUND_TRIPS.keys())
def test_kernel_words_round_trip(build: Callable[[Any], Any]) -> None:
    graph = make_graph([X], [build(X)], name="mirage_0")
    (entry,) = load_mirage(save_mirage([graph]))
    assert entry.error is None
    assert entry.graph is not None
    assert entry.graph.outputs[0] is graph.outputs[0]


def _in_block(build: Callable[[Any], Any], loop: int = 1) -> Any:
    block = BlockBuilder((2,), loop)
    block.store(build(block.load(X, (0,), 1 if loop > 1 else None)), (0,))
    return make_graph([X], block.launch())


NO_WORD = {
    "tanh": (lambda: make_graph([X], [b.tanh(X)]), "operator tanh"),
    "maximum of a row": (lambda: make_graph([X], [b.reduce_max(X, 1)]), "operator reduce_max"),
    "sub between kernels": (lambda: make_graph([X], [b.sub(X, b.exp(X))]), "sub exists only"),
    "slice": (lambda: make_graph([X], [b.slice(X, 0, 0, 2)]), "operator slice"),
    "added constant": (lambda: make_graph([X], [b.add(X, 1.0)]), "add with a const"),
    "accum_max": (lambda: _in_block(lambda t: b.accum_max(t)), "operator accum_max"),
    "mean": (lambda: make_graph([X], [c.mean(X)]), "div with a size"),
}


@pytest.mark.parametrize(("build", "text"), NO_WORD.values(), ids=NO_WORD.keys())
def test_operators_without_a_word_are_named(build: Callable[[], Any], text: str) -> None:
    with pytest.raises(MalformedGraph, match=f"no Mirage form: .*{text}"):
        save_mirage([build()])


def test_block_features_without_a_word_are_named() -> None:
    uneven = BlockBuilder((3,))
    uneven.store(uneven.load(X, (0,)), (0,))
    with pytest.raises(MalformedGraph, match="do not divide"):
        save_mirage([make_graph([X], uneven.launch())])
    split = BlockBuilder((2,))
    split.store(split.load(X, (0,)), (None,), reduce=Reduce.SUM)
    with pytest.raises(MalformedGraph, match="reduces across blocks"):
        save_mirage([make_graph([X], split.launch())])


def test_a_value_without_an_accumulator_exports_with_one() -> None:
    """Mirage wants an accumulator before every store; over one iteration it changes nothing."""
    graph = _in_block(lambda t: b.exp(t))
    (entry,) = load_mirage(save_mirage([graph]))
    assert entry.graph is not None
    block = entry.graph.outputs[0].attrs.block
    assert [n.op for n in block.body] == [Op.LOAD, Op.EXP, Op.ACCUM_SUM]
    array = np.random.default_rng(0).standard_normal((4, 8))
    np.testing.assert_array_equal(run(entry.graph, [array])[0], run(graph, [array])[0])
