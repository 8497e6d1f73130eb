"""The named programs mean what their numpy and torch forms say, at the published shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from obelisk.app.programs import PROGRAMS, PUBLISHED, Program, find_program, program_of
from obelisk.app.translate import as_numpy, as_torch
from obelisk.base.errors import DTypeError, ShapeError, UnknownName
from obelisk.ir import DType, Graph, KernelGraph, random_inputs, run

SHAPES = {
    "gqa": [(2, 256, 64), (2, 64, 4096), (2, 4096, 64), (2, 256, 64)],
    "mha": [(32, 16, 64), (32, 64, 4096), (32, 4096, 64), (32, 16, 64)],
    "mqa": [(1, 1024, 64), (1, 64, 4096), (1, 4096, 64), (1, 1024, 64)],
    "qknorm": [(2, 256, 64), (2, 64, 4096), (2, 4096, 64), (2, 256, 64)],
    "rmsnorm": [(2, 4096), (4096, 6144), (2, 6144)],
    "lora": [(16, 256), (256, 4096), (256, 16), (16, 4096), (16, 4096)],
    "gated_mlp": [(8, 4096), (4096, 4096), (4096, 4096), (8, 4096)],
    "ntrans": [(8, 4096), (8, 4096), (8, 4096), (8, 4096)],
    "moe": [(8, 8, 4096), (8, 4096, 4096), (8, 4096, 4096), (8, 8, 4096)],
}


def small(program: Program) -> Graph:
    """The program with its large dims cut, so that the interpreter is quick."""
    cut = {4096: 96, 6144: 80, 1024: 12, 256: 24}
    g = KernelGraph(program.name)
    inputs = [
        g.input([cut.get(n, n) for n in shape], "f64", name=label)
        for label, shape in program.shapes.items()
    ]
    g.output(program.build(g, *inputs))
    return g.freeze()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes(name: str) -> None:
    """Each published program has exactly the benchmark's shapes at batch 1."""
    graph = PROGRAMS[name].graph()
    assert [i.shape for i in graph.inputs] + [graph.outputs[0].shape] == SHAPES[name]
    assert all(i.dtype is DType.F32 for i in graph.inputs)


@pytest.mark.parametrize("name", PROGRAMS)
def test_batch_multiplies_rows_and_nothing_else(name: str) -> None:
    """At batch 3 the output is three times as large and every weight is as it was."""
    program = PROGRAMS[name]
    one, three = program.graph(1, "f16"), program.graph(3, "f16")
    assert three.outputs[0].elements == 3 * one.outputs[0].elements
    grown = {label for label, _ in program.batched}
    for label, a, b in zip(one.input_names, one.inputs, three.inputs, strict=True):
        assert b.elements == (3 if label in grown else 1) * a.elements
        assert b.dtype is DType.F16


@pytest.mark.parametrize("name", PROGRAMS)
def test_idioms_agree_with_the_graph(name: str) -> None:
    """The graph, its numpy and torch idioms and its translations are one formula, in float64."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    program = PROGRAMS[name]
    graph = small(program)
    arrays = random_inputs(graph, seed=3, scale=0.3)
    tensors = [torch.from_numpy(a) for a in arrays]
    (right,) = run(graph, arrays)
    results: dict[str, Any] = {
        "numpy": program.numpy(np, *arrays),
        "torch": program.torch(torch, *tensors).numpy(),
        "numpy by operator": as_numpy(graph)(*arrays),
        "torch by operator": as_torch(graph, torch)(*tensors).numpy(),
    }
    if program.sdpa is not None:
        results["sdpa"] = program.sdpa(torch, *tensors).numpy()
    for what, got in results.items():
        np.testing.assert_allclose(got, right, rtol=1e-9, atol=1e-9, err_msg=what)


def test_translation_covers_every_operator() -> None:
    """Operators that the named programs lack: masks, slices, concat, casts, iota, kept columns."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    g = KernelGraph("rest")
    x, c = g.input((4, 8, 6), "f32", name="x"), g.input((6,), "f32", name="c")
    y = g.gelu(g.layer_norm(x, c, c))
    y = g.add(g.attention(y, y, y, causal=True), g.tanh(g.neg(y)))
    y = g.where(g.less(y, 0.1), g.rope(y, c, c), g.minimum(y, g.log(g.exp(c))))
    y = g.add(y, g.reduce_max(g.clamp(y, -1, 1), 0))
    y = g.add(y, g.cast(g.iota((1, 1, 6), 2), "f32"))
    wide = g.concat([g.silu(y), g.slice(y, 2, 0, 2)], 2)
    folded = g.sum(wide, 2, 4)
    g.output(g.mul(folded, g.rsqrt(g.square(g.broadcast(g.sigmoid(folded), (4, 8, 4))))))
    graph = g.freeze()
    arrays = [np.abs(a) + 0.1 for a in random_inputs(graph, 1)]
    (right,) = run(graph, arrays)
    got = as_numpy(graph)(*arrays)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, right, rtol=2e-4, atol=2e-4)
    other = as_torch(graph, torch)(*[torch.from_numpy(a) for a in arrays]).numpy()
    np.testing.assert_allclose(other, right, rtol=2e-4, atol=2e-4)


def test_program_of_knows_its_own_and_no_other() -> None:
    """A graph is a named program only if its content is, at whatever batch and dtype."""
    gqa = PROGRAMS["gqa"]
    assert program_of(gqa.graph(5, "bf16")) is gqa
    g = KernelGraph("gqa")  # its name, another formula
    q, k, v = (g.input(s, name=n) for n, s in gqa.shapes.items())
    g.output(g.matmul(g.softmax(g.matmul(q, k)), v))
    assert program_of(g.freeze()) is None


def test_wrong_requests_name_the_way_out() -> None:
    """An unknown name lists the known ones and the closest; a bad batch or dtype names itself."""
    with pytest.raises(UnknownName, match=r"'gqaa'.*did you mean gqa.*known are gqa, mha"):
        find_program("gqaa")
    assert find_program("Gated-MLP") is PROGRAMS["gated_mlp"]
    with pytest.raises(ShapeError, match="batch is 0"):
        PROGRAMS["gqa"].graph(0)
    with pytest.raises(DTypeError, match="i8 is no floating type"):
        PROGRAMS["gqa"].graph(1, "i8")
