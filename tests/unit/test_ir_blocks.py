"""Block graphs mean what the plain program means: tails, accumulators, online softmax, reducing
stores.

Proves R05 for loops and grids that do not divide, that evaluating all blocks at once and one by one
agree, that the accumulators of online softmax equal safe attention for any score, and that rules of
the level are enforced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.strategies import online_attention

from obelisk.base.errors import MalformedGraph
from obelisk.ir import (
    BlockBuilder,
    DType,
    Node,
    Phase,
    Precision,
    Reduce,
    interp,
    make_graph,
    random_inputs,
    run,
    thread_graph,
)
from obelisk.ir import build as b
from obelisk.ir.numeric import NumpyAlgebra
from obelisk.ir.op import SizeScope

EXTENTS = [1, 7, 8, 15, 17, 24, 40, 56, 77, 100, 1000, 4095]


@pytest.mark.parametrize("extent", EXTENTS)
@pytest.mark.parametrize("loop", [1, 4, 16])
@pytest.mark.parametrize("split", [1, 3])
def test_no_tail_is_lost(extent: int, loop: int, split: int) -> None:
    """R05: products and sums of ones equal the extent exactly, however loop and grid cut it."""
    for dtype in (DType.F32, DType.F16):
        x, w = b.input_node(0, (5, extent), dtype), b.input_node(1, (extent, 6), dtype)
        block = BlockBuilder((2, split), loop)
        tx, tw = block.load(x, (0, 1), 1), block.load(w, (None, 0), 0)
        block.store(b.accum_sum(b.matmul(tx, tw)), (0, None), reduce=Reduce.SUM)
        block.store(b.accum_sum(b.sum(tx, 1)), (0, None), reduce=Reduce.SUM)
        graph = make_graph([x, w], block.launch())
        ones = [np.ones(i.shape, dtype=i.dtype.numpy) for i in graph.inputs]
        for precision in Precision:
            product, total = run(graph, ones, precision)
            assert product.shape == (5, 6)
            assert np.all(product == np.asarray(extent, dtype=product.dtype))
            assert total.shape == (5, 1)
            assert np.all(total == np.asarray(extent, dtype=total.dtype))


@pytest.mark.parametrize(("m", "keys", "grid", "loop"), [
    (4, 16, 2, 4), (5, 17, 2, 4), (7, 100, 3, 7), (1, 1, 1, 3), (3, 9, 2, 5), (16, 1024, 4, 16),
])  # fmt: skip
@pytest.mark.parametrize("score", [1.0, 12.0, 100.0, 1000.0])
def test_online_softmax_equals_safe_attention(
    m: int, keys: int, grid: int, loop: int, score: float
) -> None:
    """R11: also where exp of a score overflows, in float64 and in the working precision."""
    pair = online_attention(2, m, keys, 8, grid, loop)
    program, candidate = pair.program, pair.candidate
    arrays = random_inputs(program, seed=m)
    peak = np.max(np.abs(arrays[0] @ arrays[1].swapaxes(-1, -2))) / np.sqrt(8)
    arrays[0] = arrays[0] * np.float32(score / peak)
    (want,), (got,) = run(program, arrays), run(candidate, arrays)
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)
    (working,) = run(candidate, arrays, Precision.WORKING)
    assert np.all(np.isfinite(working))
    np.testing.assert_allclose(working, want, rtol=1e-2, atol=1e-3)


def test_rescaled_sum_by_hand() -> None:
    """Three iterations whose maxima rise, fall and rise, against the formula."""
    x = b.input_node(0, (1, 3))
    block = BlockBuilder((1,), 3)
    tile = block.load(x, (None,), 1)
    peak = b.running_max(tile)
    block.store(b.accum_rescale(b.mul(b.exp(b.sub(tile, peak)), 2.0), peak), (None,))
    block.store(b.accum_max(tile), (None,))
    graph = make_graph([x], block.launch())
    total, top = run(graph, [np.array([[1.0, 0.5, 4.0]])])
    assert top[0, 0] == 4.0
    np.testing.assert_allclose(total[0, 0], 2 * (np.exp(-3.0) + np.exp(-3.5) + 1.0), rtol=1e-14)


def test_a_masked_first_tile_adds_nothing() -> None:
    """A maximum of -inf so far (all masked) must not turn the sum into NaN."""
    x = b.input_node(0, (1, 4))
    block = BlockBuilder((1,), 2)
    tile = block.load(x, (None,), 1)
    peak = b.running_max(b.reduce_max(tile, 1))
    safe = b.where(b.less(-1e30, tile), b.exp(b.sub(tile, peak)), 0.0)
    block.store(b.accum_rescale(b.sum(safe, 1), peak), (None,))
    graph = make_graph([x], block.launch())
    (got,) = run(graph, [np.array([[-np.inf, -np.inf, 1.0, 2.0]])])
    np.testing.assert_allclose(got[0, 0], 1 + np.exp(-1.0))


@pytest.mark.parametrize("reduce", [Reduce.SUM, Reduce.MAX])
@pytest.mark.parametrize(("m", "n"), [(8, 12), (5, 77)])
def test_stores_that_reduce(reduce: Reduce, m: int, n: int) -> None:
    """Blocks along two unmapped axes are folded into one result."""
    x = b.input_node(0, (m, n))
    block = BlockBuilder((2, 3, 2), 1)
    tile = block.load(x, (0, 1, None))
    fold = b.sum if reduce is Reduce.SUM else b.reduce_max
    block.store(fold(tile, 1), (0, None, None), reduce=reduce)
    graph = make_graph([x], block.launch())
    data = np.random.default_rng(1).standard_normal((m, n))
    want = data.sum(1, keepdims=True) * 2 if reduce is Reduce.SUM else data.max(1, keepdims=True)
    np.testing.assert_allclose(run(graph, [data])[0], want, rtol=1e-12)


def test_a_store_with_a_loop_map_keeps_every_iteration() -> None:
    x = b.input_node(0, (6, 10))
    block = BlockBuilder((2,), 3)
    tile = block.load(x, (0,), 1)
    block.store(b.mul(tile, 2.0), (0,), fmap=1)
    graph = make_graph([x], block.launch())
    data = np.arange(60.0).reshape(6, 10)
    np.testing.assert_array_equal(run(graph, [data])[0], 2 * data)


def test_sum_to_several_columns() -> None:
    """keep: column j sums elements j, j + keep, ..."""
    x = b.input_node(0, (2, 12))
    graph = make_graph([x], [b.sum(x, 1, 4), b.reduce_max(x, 1, 3)])
    data = np.random.default_rng(2).standard_normal((2, 12))
    total, top = run(graph, [data])
    np.testing.assert_allclose(total, data.reshape(2, 3, 4).sum(1))
    np.testing.assert_array_equal(top, data.reshape(2, 4, 3).max(1))


def test_sizes_are_known_everywhere() -> None:
    """An extent may be used before the value whose axis it names has been computed."""
    x = b.input_node(0, (4, 8))
    block = BlockBuilder((2,), 4)
    tile = block.load(x, (0,), 1)
    late = b.exp(tile)
    block.store(b.div(b.accum_sum(b.sum(late, 1)), b.size(late, 1, SizeScope.LOOP, 4)), (0,))
    block.store(b.div(b.accum_sum(b.sum(tile, 1)), b.size(tile, 1, SizeScope.FULL)), (0,))
    data = np.random.default_rng(3).standard_normal((4, 8))
    first, second = run(make_graph([x], block.launch()), [data])
    np.testing.assert_allclose(first, np.exp(data).mean(1, keepdims=True))
    np.testing.assert_allclose(second, data.mean(1, keepdims=True))


def _features(inputs: list[Node]) -> list[Node]:
    """A launch that uses loads in both orders, a thread graph, all accumulators and both maps."""
    x, y = inputs
    block = BlockBuilder((2, 3), 2)
    tx, ty = block.load(x, (0, None), 1), block.load(y, (None, 1), 0)
    product = b.accum_sum(b.matmul(tx, ty))
    chain = thread_graph((b.tanh(b.mul(b.elem(0, tx), 0.5)),), 4)
    (curved,) = b.run_thread(chain, [tx])
    block.store(b.sigmoid(product), (0, 1))
    block.store(b.accum_max(b.reduce_max(curved, 1)), (0, None), reduce=Reduce.MAX)
    block.store(curved, (0, None), fmap=1, reduce=Reduce.MAX)
    return block.launch()


def test_all_at_once_and_one_by_one_agree() -> None:
    """Where every tile is full the two ways to walk the grid give the same bits."""
    x, y = b.input_node(0, (4, 8)), b.input_node(1, (8, 6))
    results = _features([x, y])
    block = results[0].attrs.block
    assert not block.info.ragged
    arrays = [np.random.default_rng(i).standard_normal(n.shape) for i, n in enumerate((x, y))]
    algebra = NumpyAlgebra()
    together = interp._Batched(block, arrays, algebra).run()
    apart = interp._run_ragged(block, arrays, algebra)
    for a, z in zip(together, apart, strict=True):
        np.testing.assert_allclose(a, z, rtol=1e-14)


@pytest.mark.parametrize(("m", "k", "n"), [(4, 8, 6), (5, 7, 11), (3, 9, 4), (1, 1, 1), (2, 3, 7)])
def test_features_equal_the_formula(m: int, k: int, n: int) -> None:
    x, y = b.input_node(0, (m, k)), b.input_node(1, (k, n))
    graph = make_graph([x, y], _features([x, y]))
    ax, ay = (np.random.default_rng(i).standard_normal(s.shape) for i, s in enumerate((x, y)))
    first, top, curved = run(graph, [ax, ay])
    np.testing.assert_allclose(first, 1 / (1 + np.exp(-(ax @ ay))), rtol=1e-12)
    np.testing.assert_allclose(top, np.tanh(ax * 0.5).max(1, keepdims=True), rtol=1e-12)
    np.testing.assert_allclose(curved, np.tanh(ax * 0.5), rtol=1e-12)


def test_memory_rounds_but_the_inside_of_a_kernel_does_not() -> None:
    """f16: op by op the sum overflows in memory; in one kernel it stays in f32."""
    x = b.input_node(0, (1, 4), DType.F16)
    data = np.full((1, 4), 300.0, dtype=np.float16)
    plain = make_graph([x], [b.sqrt(b.sum(b.square(x), 1))])
    assert np.isinf(run(plain, [data], Precision.WORKING)[0][0, 0])
    block = BlockBuilder((1,), 2)
    tile = block.load(x, (0,), 1)
    block.store(b.sqrt(b.accum_sum(b.sum(b.square(tile), 1))), (0,))
    fused = make_graph([x], block.launch())
    assert run(fused, [data], Precision.WORKING)[0][0, 0] == 600.0


def test_phases() -> None:
    x, w = b.input_node(0, (4, 8)), b.input_node(1, (4, 8))
    block = BlockBuilder((2,), 2)
    tx, tw = block.load(x, (0,)), block.load(w, (0,), 1)
    total = b.accum_sum(b.sum(tw, 1))
    block.store(b.add(total, b.sum(tx, 1)), (0,))
    info = block.finish().info
    assert info.phase[tx] is Phase.INVARIANT
    assert info.phase[tw] is Phase.LOOP
    assert info.phase[total] is Phase.POST


Y = b.input_node(0, (4, 8))
Build = Callable[[BlockBuilder], Any]


def _stored(value: Callable[[BlockBuilder], Node], *args: Any, **kwargs: Any) -> Build:
    return lambda block: block.store(value(block), *args, **kwargs)


RULES: dict[str, tuple[tuple[int, ...], int, Build, str]] = {
    "overlap": ((2,), 1, _stored(lambda k: k.load(Y, (0,)), (None,)), "blocks overlap"),
    "iterations overlap": ((2,), 2, _stored(lambda k: k.load(Y, (0,), 1), (0,)),
                           "iterations overlap"),
    "two axes on one dim": ((2, 2), 1, _stored(lambda k: k.load(Y, (0, 1)), (0, 0)),
                            "two grid axes are laid along one dim"),
    "two axes split one dim": ((2, 2), 1, _stored(lambda k: k.load(Y, (0, 0)), (0, 1)),
                               "two grid axes split one dim"),
    "loop map after the loop": ((2,), 2,
                                _stored(lambda k: b.accum_sum(k.load(Y, (0,), 1)), (0,), fmap=1),
                                "loop map on a value that is not of the loop"),
    "loop meets after": ((2,), 2, _stored(
        lambda k: b.add(b.accum_sum(k.load(Y, (0,), 1)), k.load(Y, (0,), 1)), (0,)),
        "joins a value of the loop with one from after it"),
    "accumulator of a closed value": ((2,), 2, _stored(
        lambda k: b.accum_sum(b.accum_sum(k.load(Y, (0,), 1))), (0,)), "only after the loop"),
    "rescale by no running maximum": ((2,), 2, _stored(
        lambda k: b.accum_rescale(k.load(Y, (0,), 1), k.load(Y, (0,), 1)), (0,)),
        "must be a running_max"),
    "short tiles folded": ((3,), 3, _stored(lambda k: b.accum_sum(k.load(Y, (None,), 1)), (None,),
                                            reduce=Reduce.SUM), "different extents over the loop"),
    "a gap": ((3,), 1, _stored(lambda k: b.transpose(k.load(Y, (1,))), (1,)), "leave a gap"),
    "short tiles reshaped": ((3,), 1, _stored(lambda k: b.reshape(k.load(Y, (1,)), (-1,)), (0,)),
                             "not all full"),
    "map length": ((2,), 1, _stored(lambda k: k.load(Y, (0,)), (0, 1)), "omap .* 2 entries"),
    "input inside": ((2,), 1, _stored(lambda k: b.add(k.load(Y, (0,)), b.input_node(1, (2, 8))),
                                      (0,)), "input cannot occur inside"),
    "four axes": ((1, 1, 1, 1), 1, _stored(lambda k: k.load(Y, (0, None, None, None)),
                                           (0, None, None, None)), "1 to 3 axes"),
}  # fmt: skip


@pytest.mark.parametrize(("grid", "loop", "build", "text"), RULES.values(), ids=RULES.keys())
def test_rules_of_the_level(grid: tuple[int, ...], loop: int, build: Build, text: str) -> None:
    def attempt() -> None:
        block = BlockBuilder(grid, loop)
        build(block)
        block.finish()

    with pytest.raises(MalformedGraph, match=text):
        attempt()


EMPTY: dict[str, Callable[[BlockBuilder, Node, Node], Node]] = {
    "elementwise": lambda k, x, y: b.add(k.load(x, (0,)), k.load(y, (None,))),
    "broadcast": lambda k, x, y: b.broadcast(k.load(x, (0,)), (4, 5)),
    "contraction": lambda k, x, y: b.matmul(
        b.transpose(k.load(x, (0,))), b.sum(k.load(y, (None,)), 0)),
    "concat": lambda k, x, y: b.concat([k.load(x, (0,)), b.sum(k.load(y, (None,)), 0)], 1),
}  # fmt: skip


@pytest.mark.parametrize("build", EMPTY.values(), ids=EMPTY.keys())
def test_tiles_of_one_row_that_may_be_empty_do_not_broadcast(
    build: Callable[[BlockBuilder, Node, Node], Node],
) -> None:
    """Three rows over four blocks: the last block has none, where an extent of 1 would meet 4."""
    x, y = b.input_node(0, (3, 5)), b.input_node(1, (4, 5))
    block = BlockBuilder((4,))
    block.store(build(block, x, y), (None,), reduce=Reduce.SUM)
    with pytest.raises(MalformedGraph, match=r"broadcast to 4|cut differently|not all full"):
        block.finish()
    even = BlockBuilder((4,))
    wide = b.input_node(0, (4, 5))
    even.store(b.sum(build(even, wide, y), 0), (0,))
    even.finish()


def test_blocks_without_work_add_nothing() -> None:
    """More blocks and iterations than rows and columns, for floats and integers."""
    for dtype in (DType.F32, DType.I32, DType.I8):
        x = b.input_node(0, (3, 2), dtype)
        block = BlockBuilder((5,), 4)
        tile = block.load(x, (0,), 1)
        block.store(b.accum_sum(b.sum(tile, 1)), (0,))
        block.store(b.accum_max(b.reduce_max(tile, 1)), (0,))
        data = np.array([[-3, -4], [5, 6], [-1, 2]], dtype=dtype.numpy)
        total, top = run(make_graph([x], block.launch()), [data])
        assert total.tolist() == [[-7], [11], [1]]
        assert top.tolist() == [[-3], [6], [2]]


def test_constants_take_shapes_inside_blocks() -> None:
    """A scalar that is broadcast or reshaped keeps its place beside the batch axes."""
    x = b.input_node(0, (4, 6, 2))
    block = BlockBuilder((2, 3))
    tile = block.load(x, (0, 1))
    ones = b.concat([b.broadcast(b.const(1.0), (2, 1)), b.reshape(b.const(2.0), (1, 1))], 0)
    filled = b.broadcast(b.sum(ones, 0), (2, 2))
    block.store(b.add(tile, filled), (0, 1))
    data = np.random.default_rng(0).standard_normal((4, 6, 2))
    (got,) = run(make_graph([x], block.launch()), [data])
    np.testing.assert_allclose(got, data + 4.0)


def test_sizes_in_thread_graphs_know_their_loop() -> None:
    x = b.input_node(0, (4, 8))
    block = BlockBuilder((2,), 4)
    tile = block.load(x, (0,), 1)
    e = b.elem(0, tile)
    chain = thread_graph((b.mul(e, b.size(e, 1, SizeScope.LOOP, 2)),))
    block.store(b.accum_sum(b.run_thread(chain, [tile])[0]), (0,))
    with pytest.raises(MalformedGraph, match="size was taken for loop 2, but the block has loop 4"):
        block.finish()


def test_an_unused_load_is_refused() -> None:
    block = BlockBuilder((2,))
    block.load(b.input_node(1, (4, 8)), (0,))
    block.store(block.load(Y, (0,)), (0,))
    with pytest.raises(MalformedGraph, match=r"loads must number|never used"):
        block.finish()


def test_thread_graphs_hold_only_what_registers_can() -> None:
    e = b.elem(0, b.input_node(0, (4, 4)))
    with pytest.raises(MalformedGraph, match="matmul cannot occur inside a thread graph"):
        thread_graph((b.matmul(e, e),))
    with pytest.raises(MalformedGraph, match="results and a vector width"):
        thread_graph(())
