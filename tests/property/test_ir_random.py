"""Properties on random graphs: forms read back to the same object, blocks equal programs, numpy's
broadcasting.

Each draw is a seed of a generator in `tests/strategies.py`, so that a failure names a graph that
can be rebuilt.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import mutually_broadcastable_shapes
from tests.strategies import Pair, blocked_pairs, kernel_graph, kernel_graphs, seeds, zoo_graphs

from obelisk.ir import DType, Graph, Precision, make_graph, random_inputs, run
from obelisk.ir import build as b
from obelisk.ir.jsonform import dumps, loads
from obelisk.ir.resize import dim_classes, resize, shrink_shapes
from obelisk.ir.spec import check_graph
from obelisk.ir.svg import to_svg
from obelisk.ir.text import parse, to_text

quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def same(a: Graph, z: Graph) -> None:
    assert a == z
    assert all(p is q for p, q in zip(a.outputs, z.outputs, strict=True))


@quick
@given(st.one_of(kernel_graphs, zoo_graphs, blocked_pairs.map(lambda p: p.candidate)))
def test_every_form_reads_back_to_the_same_object(graph: Graph) -> None:
    same(parse(to_text(graph)), graph)
    same(loads(dumps(graph)), graph)
    same(resize(graph, [i.shape for i in graph.inputs]), graph)
    assert check_graph(graph) is graph
    ET.fromstring(to_svg(graph).encode())


@quick
@given(blocked_pairs, seeds)
def test_blocks_equal_their_program(pair: Pair, seed: int) -> None:
    """Ragged or not: the same values in float64, and close ones in the working precision."""
    arrays = random_inputs(pair.program, seed)
    (want,), (got,) = run(pair.program, arrays), run(pair.candidate, arrays)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-10, err_msg=pair.kind)
    (working,) = run(pair.candidate, arrays, Precision.WORKING)
    np.testing.assert_allclose(working, want, rtol=1e-4, atol=1e-4, err_msg=pair.kind)


@quick
@given(seeds, st.sampled_from([DType.F32, DType.F16]))
def test_working_precision_stays_near_float64(seed: int, dtype: DType) -> None:
    graph = kernel_graph(seed, dtype=dtype, limit=4000)
    arrays = random_inputs(graph, seed)
    tolerance = 1e-3 if dtype is DType.F32 else 0.1
    for want, got in zip(run(graph, arrays), run(graph, arrays, Precision.WORKING), strict=True):
        assert np.all(np.isfinite(want))
        scale = max(1.0, float(np.max(np.abs(want))))
        # A comparison may fall on the other side after rounding; it flips few elements.
        off = np.abs(got.astype(np.float64) - want) > tolerance * scale
        assert np.mean(off) < 0.02


@quick
@given(mutually_broadcastable_shapes(num_shapes=3, max_dims=4, max_side=4), seeds)
def test_broadcasting_follows_numpy(shapes, seed: int) -> None:
    x, y, z = (b.input_node(i, s) for i, s in enumerate(shapes.input_shapes))
    rng = np.random.default_rng(seed)
    ax, ay, az = (rng.standard_normal(s) for s in shapes.input_shapes)
    graph = make_graph(
        [x, y, z],
        [b.add(x, y), b.sub(y, z), b.maximum(b.mul(x, y), z), b.where(b.less(x, y), z, 1.0)],
    )
    with np.errstate(all="ignore"):
        want = [ax + ay, ay - az, np.maximum(ax * ay, az), np.where(ax < ay, az, 1.0)]
    for got, expected in zip(run(graph, [ax, ay, az]), want, strict=True):
        assert got.shape == expected.shape
        np.testing.assert_array_equal(got, expected)
    assert graph.outputs[3].shape == shapes.result_shape


@quick
@given(seeds)
def test_products_follow_numpy(seed: int) -> None:
    """Batched to any rank, batch dims broadcast."""
    rng = np.random.default_rng(seed)
    batch = [int(n) for n in rng.choice((1, 2, 3), size=rng.integers(0, 3))]
    m, k, n = (int(d) for d in rng.choice((1, 3, 5, 7), size=3))
    left = [1 if rng.random() < 0.3 else d for d in batch]
    right = [1 if rng.random() < 0.3 else d for d in batch][int(rng.integers(0, 2)) :]
    ax, ay = rng.standard_normal((*left, m, k)), rng.standard_normal((*right, k, n))
    x, y = b.input_node(0, ax.shape), b.input_node(1, ay.shape)
    (got,) = run(make_graph([x, y], [b.matmul(x, y)]), [ax, ay])
    np.testing.assert_allclose(got, ax @ ay, rtol=1e-12, atol=1e-12)


@quick
@given(kernel_graphs, seeds)
def test_shrunken_shapes_respect_the_classes(graph: Graph, seed: int) -> None:
    for shapes in shrink_shapes(graph, seed)[:3]:
        for group in dim_classes(graph):
            extents = {shapes[i][d] for i, d in group.members}
            assert len(extents) == 1
            if group.frozen:
                assert extents == {group.extent}
