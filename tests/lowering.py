"""Helpers for tests of `lower`: compile graphs and compare their results with the interpreter."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from obelisk.base.errors import BuildFailed
from obelisk.build import Library, compile_many
from obelisk.ir import DType, Graph, Precision, random_inputs, run
from obelisk.lower.cpu import CpuOptions, lower_cpu
from obelisk.machine.host import host

RELATIVE = {DType.F64: 1e-12, DType.F32: 2e-5, DType.F16: 2e-3, DType.BF16: 2e-2, DType.F8E4M3: 0.2}
CANARY = 64  # elements on either side of an output that must not change


def strided(array: Any, strides: Sequence[int] | None) -> Any:
    """The same values with other element strides; the holes hold NaN or a large number."""
    if strides is None:
        return np.ascontiguousarray(array)
    need = 1 + sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True))
    room = np.full(need, np.nan if array.dtype.kind == "f" else 77).astype(array.dtype)
    steps = [s * array.itemsize for s in strides]
    view = np.lib.stride_tricks.as_strided(room, array.shape, steps)
    view[...] = array
    return view


def guarded(shape: tuple[int, ...], dtype: DType) -> tuple[Any, Any]:
    """An output inside a larger array of a known value, and that array."""
    n = int(np.prod(shape, dtype=np.int64))
    room = np.full(n + 2 * CANARY, 77).astype(dtype.numpy)
    return room[CANARY : CANARY + n].reshape(shape), room


def largest_error(got: Any, expected: Any) -> float:
    """max |got - expected| / (1 + |expected|); equal infinities and NaN in both places are no
    error.
    """
    a, b = np.asarray(got).astype(np.float64), np.asarray(expected).astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(all="ignore"):
        error = np.abs(a - b) / (1 + np.abs(b))
    return float(np.where(same, 0.0, np.where(np.isnan(error), np.inf, error)).max(initial=0.0))


def compiled(
    graphs: Sequence[Graph], options: CpuOptions | None = None, vector_bytes: int = 0
) -> list[tuple[Graph, Library]]:
    """Every graph as a loaded library; a graph that does not compile fails the test.

    `vector_bytes` stands in for the machine's own register width.
    """
    machine = replace(host(), vector_bytes=vector_bytes) if vector_bytes else host()
    modules = [lower_cpu(g, machine, options or CpuOptions()) for g in graphs]
    out = []
    built = compile_many([m.source for m in modules])
    for graph, module, answer in zip(graphs, modules, built, strict=True):
        assert not isinstance(answer, BuildFailed), (graph.name, answer, answer.log)
        out.append((graph, Library(answer.path, module.scratch_bytes)))
    return out


def call(library: Library, graph: Graph, arrays: Sequence[Any], threads: int = 2) -> list[Any]:
    """Run on arrays laid out as the graph declares; checks that nothing outside the outputs
    changed.
    """
    inputs = [strided(a, n.attrs.strides) for a, n in zip(arrays, graph.inputs, strict=True)]
    pairs = [guarded(o.shape, o.dtype) for o in graph.outputs]
    library.run(inputs, [p[0] for p in pairs], threads)
    for (_, room), node in zip(pairs, graph.outputs, strict=True):
        edge = np.full(CANARY, 77).astype(node.dtype.numpy)
        assert (room[:CANARY] == edge).all(), f"{graph.name}: wrote before an output"
        assert (room[-CANARY:] == edge).all(), f"{graph.name}: wrote past an output"
    return [p[0] for p in pairs]


def call_overhead(call: Callable[[], Any]) -> float:
    """Seconds that a call takes without its kernel, the least of nine."""
    times = []
    with pytest.MonkeyPatch.context() as still:
        still.setattr(Library, "call", lambda *_: 0)
        for _ in range(9):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    return min(times)


def check(
    graphs: Sequence[Graph],
    *,
    options: CpuOptions | None = None,
    inputs: Sequence[Sequence[Any]] | None = None,
    threads: int = 2,
    seed: int = 0,
    relative: float | None = None,
    vector_bytes: int = 0,
) -> None:
    """Compile all graphs and compare each with the interpreter: f32 against float64, narrower types
    against the interpreter's working precision.
    """
    for i, (graph, library) in enumerate(compiled(graphs, options, vector_bytes)):
        arrays = inputs[i] if inputs is not None else random_inputs(graph, seed)
        # Where strides let elements share memory, the values are what memory then holds.
        arrays = [
            np.array(strided(a, n.attrs.strides)) for a, n in zip(arrays, graph.inputs, strict=True)
        ]
        got = call(library, graph, arrays, threads)
        narrow = any(n.dtype in (DType.F16, DType.BF16, DType.F8E4M3) for n in graph.nodes)
        precision = Precision.WORKING if narrow else Precision.EXACT
        for j, (have, want) in enumerate(zip(got, run(graph, arrays, precision), strict=True)):
            limit = relative or RELATIVE.get(graph.outputs[j].dtype, 0.0)
            if narrow:
                limit = max(limit, RELATIVE[DType.F16])
            with np.errstate(over="ignore"):  # what overflows f32 must come out infinite
                want = want.astype(graph.outputs[j].dtype.numpy)
            error = largest_error(have, want)
            assert error <= limit, f"{graph.name}, output {j}: error {error:.3g} above {limit:.3g}"
