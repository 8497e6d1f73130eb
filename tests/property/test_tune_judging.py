"""The judge on random shapes, dtypes and faults: single faults are found, nothing right falls."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from obelisk.ir import DType, Graph, KernelGraph, Precision, run
from obelisk.tune.inputs import Inputs
from obelisk.tune.judge import fill, group_size, judge, reference
from obelisk.tune.types import Status

SHAPES = st.lists(st.sampled_from([1, 2, 3, 5, 7, 12, 24, 77]), min_size=1, max_size=3)
DTYPES = st.sampled_from([DType.F64, DType.F32, DType.F16, DType.BF16])


def program(shape: list[int], dtype: DType) -> Graph:
    """Two outputs: an elementwise one and a normalised one."""
    g = KernelGraph("random")
    x = g.input(shape, dtype, name="x")
    g.output(g.sigmoid(x), name="y")
    g.output(g.rms_norm(x, eps=1e-3), name="z")
    return g.freeze()


@settings(max_examples=40, deadline=None)
@given(shape=SHAPES, dtype=DTYPES, place=st.integers(0, 10**6), out=st.integers(0, 1))
def test_any_single_fault_is_found(shape: list[int], dtype: DType, place: int, out: int) -> None:
    """One element unwritten, NaN, or off by more than what is allowed: its status and its place."""
    graph = program(shape, dtype)
    inputs = Inputs(graph, place)
    right = reference(graph, inputs)
    results = run(graph, inputs.select(1), Precision.WORKING)
    at = np.unravel_index(place % results[out].size, results[out].shape)

    def judged(value: object) -> tuple[Status, str]:
        arrays = [r.copy() for r in results]
        if isinstance(value, bytes):
            arrays[out][at] = np.frombuffer(value, dtype.numpy)[0]
        elif value is not None:
            arrays[out][at] = value
        raw = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays]
        found = judge(raw, graph, right, 1, 1)
        return found.status, found.detail

    where = f"({', '.join(str(int(i)) for i in at)}{',' if len(at) == 1 else ''})"
    assert judged(None)[0] is Status.OK
    status, detail = judged(fill(dtype, 1).tobytes())
    assert status is Status.INCOMPLETE
    assert where in detail
    assert judged(np.inf)[0] is Status.WRONG
    status, detail = judged(float(results[out][at]) * 1.5 + 1.0)
    assert status is Status.WRONG
    assert where in detail
    assert "yz"[out] in detail


@given(shape=SHAPES)
def test_groups_are_whole_rows(shape: list[int]) -> None:
    """At least 64 elements, a multiple of the last axis, and less than one row too many."""
    size = group_size(shape)
    assert size >= 64
    assert size % shape[-1] == 0
    assert size - shape[-1] < 64
