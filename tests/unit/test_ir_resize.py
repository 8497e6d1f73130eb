"""The same structure at other sizes still means the same, and tied extents are found.

Proves that programs and published candidates, shrunken to small and uneven extents, stay equal to
their formula, that attributes with extents follow, that the ambiguous is refused, and that dim
classes tie exactly what must be equal.
"""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from tests.strategies import MUGRAPHS, block_zoo, kernel_graph

from obelisk.base.errors import MalformedGraph, ShapeError, UserError
from obelisk.ir import BlockBuilder, Graph, Op, load_mirage, make_graph, random_inputs, run
from obelisk.ir import build as b
from obelisk.ir import composite as c
from obelisk.ir.dims import reshape_groups
from obelisk.ir.resize import blocks_of, dim_classes, resize, shrink_shapes, sizes_for


def graph_of(build, *shapes) -> Graph:
    inputs = [b.input_node(i, s) for i, s in enumerate(shapes)]
    return make_graph(inputs, [build(*inputs)])


def attention(q, k, v):
    e = b.exp(b.matmul(q, k))
    return b.matmul(b.div(e, b.sum(e, 2)), v)


def test_same_sizes_give_the_same_object() -> None:
    for seed in range(40):
        for graph in (kernel_graph(seed), block_zoo(seed)):
            assert resize(graph, [i.shape for i in graph.inputs]) == graph


def test_mean_follows_its_extent() -> None:
    graph = graph_of(c.rms_norm, (8, 4096))
    small = resize(graph, [(3, 5)])
    x = np.random.default_rng(0).standard_normal((3, 5))
    want = x / np.sqrt((x * x).mean(-1, keepdims=True))
    np.testing.assert_allclose(run(small, [x])[0], want, rtol=1e-14)


def test_extents_in_attributes_follow() -> None:
    merged = resize(graph_of(lambda x: b.reshape(x, (8, 96)), (8, 12, 8)), [(3, 5, 7)])
    assert merged.outputs[0].shape == (3, 35)
    split = graph_of(lambda x: b.reshape(x, (8, 12, 8)), (8, 96))
    assert resize(split, [(3, 35)], sizes={12: 5}).outputs[0].shape == (3, 5, 7)
    assert resize(split, [(3, 96)]).outputs[0].shape == (3, 12, 8)
    with pytest.raises(ShapeError, match="without more sizes"):
        resize(split, [(3, 35)])
    with pytest.raises(ShapeError, match="without more sizes"):
        resize(split, [(3, 35)], sizes={12: 4})
    wide = graph_of(lambda x: b.broadcast(x, (6, 8, 12)), (8, 1))
    assert resize(wide, [(3, 1)], sizes={6: 2, 12: 5}).outputs[0].shape == (2, 3, 5)
    half = graph_of(lambda x: b.slice(x, 1, 6, 12), (4, 12))
    assert resize(half, [(4, 20)]).outputs[0].attrs.start == 10
    with pytest.raises(ShapeError, match=r"slice 6:12 .* ambiguous"):
        resize(half, [(4, 7)])
    assert resize(half, [(4, 7)], sizes={6: 3}).outputs[0].shape == (4, 4)
    kept = graph_of(lambda x: b.sum(x, 1, 4), (4, 12))
    assert resize(kept, [(4, 9)], sizes={4: 3}).outputs[0].shape == (4, 3)
    with pytest.raises(ShapeError, match="must divide"):
        resize(kept, [(4, 9)])
    mask = graph_of(lambda x: b.where(c.causal_mask(8, 12), x, 0.0), (8, 12))
    assert resize(mask, [(3, 5)], sizes={8: 3, 12: 5}).outputs[0].shape == (3, 5)


def test_equal_extents_part_where_structure_tells_them_apart() -> None:
    """Rows and heads are both 8: what is tied to an input follows it, and what is not keeps its
    part of what was taken apart.
    """

    def heads(x, cos):
        split = b.transpose(b.reshape(x, (8, 8, 8)), (1, 0, 2))
        return b.reshape(b.transpose(split * cos, (1, 0, 2)), (8, 64))

    graph = graph_of(heads, (8, 64), (8, 8))
    for rows in (3, 8, 20):
        small = resize(graph, [(rows, 64), (rows, 8)], sizes={8: rows})
        assert small.outputs[0].shape == (rows, 64)
        x, cos = random_inputs(small)
        want = (x.reshape(rows, 8, 8) * cos[:, None]).reshape(rows, 64)
        np.testing.assert_allclose(run(small, [x, cos])[0], want, rtol=1e-6)
    narrow = resize(graph, [(3, 40), (3, 5)])
    assert narrow.nodes[2].op is Op.RESHAPE
    assert narrow.nodes[2].shape == (3, 8, 5)
    with pytest.raises(UserError):
        resize(graph, [(3, 42), (3, 5)])
    spread = graph_of(lambda x, y: b.broadcast(b.sum(x, 1), (8, 8)) + y, (8, 4), (8, 8))
    assert resize(spread, [(3, 4), (3, 5)]).outputs[0].shape == (3, 5)


def test_strides_keep_their_order() -> None:
    x = b.input_node(0, (4, 8), strides=(1, 6))
    y = b.input_node(1, (4, 8), strides=(0, 1))
    small = resize(make_graph([x, y], [b.add(x, y)]), [(3, 5), (3, 5)])
    assert small.inputs[0].attrs.strides == (1, 3)
    assert small.inputs[1].attrs.strides == (0, 1)


def test_wrong_requests_are_refused() -> None:
    graph = graph_of(b.matmul, (4, 8), (8, 6))
    with pytest.raises(ShapeError, match="contraction extents 5 and 8"):
        resize(graph, [(3, 5), (8, 6)])
    with pytest.raises(ShapeError, match="2 inputs, 1 shapes"):
        resize(graph, [(3, 5)])
    with pytest.raises(ShapeError, match="rank 2"):
        resize(graph, [(3, 5), (5,)])
    x = b.input_node(0, (4, 8))
    block = BlockBuilder((2,), 2)
    block.store(b.accum_sum(block.load(x, (0,), 1)), (0,))
    blocked = make_graph([x], block.launch())
    (old,) = blocks_of(blocked)
    with pytest.raises(MalformedGraph, match="different extents over the loop"):
        resize(blocked, [(4, 7)])
    with pytest.raises(MalformedGraph, match="1 grid axes"):
        resize(blocked, [(4, 8)], grids={old: (2, 2)})
    bigger = resize(blocked, [(9, 12)], grids={old: (3,)}, loops={old: 4})
    assert bigger.outputs[0].shape == (9, 3)


SHRUNKEN = {
    "gqa_bs1": [(2, 6, 3), (2, 3, 24), (2, 24, 3)],
    "mqa_bs1": [(1, 6, 3), (1, 3, 24), (1, 24, 3)],
    "rmsnorm_bs1": [(3, 35), (35, 9)],
    "gated_mlp": [(3, 35), (35, 9), (35, 9)],
    "lora": [(3, 35), (35, 9), (35, 5), (5, 9)],
    "ntrans_bs1": [(3, 35)] * 3,
}


def formula(name: str, a: list[np.ndarray]) -> np.ndarray:
    def rms(x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True))

    match name:
        case "gqa_bs1" | "mqa_bs1":
            e = np.exp(a[0] @ a[1])
            return (e / e.sum(-1, keepdims=True)) @ a[2]
        case "rmsnorm_bs1":
            return rms(a[0]) @ a[1]
        case "gated_mlp":
            gate = a[0] @ a[1]
            return gate / (1 + np.exp(-gate)) * (a[0] @ a[2])
        case "lora":
            return a[0] @ a[1] + (a[0] @ a[2]) @ a[3]
    return rms(a[0] * 0 + a[1] + a[2] * (rms(a[0]) + a[1]))


@pytest.mark.skipif(not MUGRAPHS.is_dir(), reason=f"NOT RUN: no checkpoints at {MUGRAPHS}")
@pytest.mark.parametrize("name", SHRUNKEN)
def test_published_candidates_shrink_and_stay_right(name: str) -> None:
    """Every graph of the file, at extents that its new grid and loop mostly do not divide."""
    shapes = SHRUNKEN[name]
    rng = np.random.default_rng(1)
    ragged = 0
    for entry in load_mirage(MUGRAPHS / f"{name}.json"):
        assert entry.graph is not None
        blocks = blocks_of(entry.graph)
        grids = {
            k: tuple(1 if n == 1 else m for n, m in zip(k.grid, (2, 2, 3), strict=False))
            for k in blocks
        }
        loops = {k: 1 if k.loop == 1 else 2 for k in blocks}
        small = resize(entry.graph, shapes, grids, loops, {64: 3})
        ragged += any(k.info.ragged for k in blocks_of(small))
        arrays = [rng.standard_normal(s) for s in shapes]
        (got,) = run(small, arrays)
        np.testing.assert_allclose(got, formula(name, arrays), rtol=1e-9, atol=1e-12)
    assert ragged or name in ("gqa_bs1", "mqa_bs1", "ntrans_bs1")


def classes(graph: Graph) -> dict[tuple[tuple[int, int], ...], tuple[bool, bool]]:
    return {k.members: (k.frozen, k.named) for k in dim_classes(graph)}


def test_classes_of_products_and_elementwise() -> None:
    free = (False, False)
    assert classes(graph_of(attention, (2, 256, 64), (2, 64, 4096), (2, 4096, 64))) == {
        ((0, 0), (1, 0), (2, 0)): free,
        ((0, 1),): free,
        ((0, 2), (1, 1)): free,
        ((1, 2), (2, 1)): free,
        ((2, 2),): free,
    }
    assert classes(graph_of(lambda x, y: b.add(b.transpose(x), y), (4, 8), (8, 1))) == {
        ((0, 0),): free, ((0, 1), (1, 0)): free, ((1, 1),): free,
    }  # fmt: skip


def test_classes_of_attributes() -> None:
    assert classes(graph_of(lambda x: b.slice(x, 1, 0, 3), (4, 8))) == {
        ((0, 0),): (False, False), ((0, 1),): (True, False),
    }  # fmt: skip
    assert classes(graph_of(lambda x: b.reshape(x, (4, 2, 4)), (4, 8))) == {
        ((0, 0),): (False, False), ((0, 1),): (True, False),
    }  # fmt: skip
    assert classes(graph_of(lambda x: b.reshape(x, (4, 1, 8)), (4, 8))) == {
        ((0, 0),): (False, False), ((0, 1),): (False, False),
    }  # fmt: skip
    masked = classes(graph_of(lambda x: b.where(c.causal_mask(4, 8), x, 0.0), (4, 8)))
    assert set(masked.values()) == {(False, True)}
    assert classes(graph_of(lambda x: b.sum(x, 1, 2), (4, 8)))[((0, 1),)] == (True, False)
    joined = classes(graph_of(lambda x, y: b.concat([x, y], 0), (4, 8), (5, 8)))
    assert joined[((0, 1), (1, 1))] == (False, False)
    assert joined[((0, 0),)] == (True, False)


def test_classes_reach_through_blocks() -> None:
    """A launch ties what its program ties: tiles that meet and were cut alike."""
    x, w = b.input_node(0, (4, 32)), b.input_node(1, (32, 8))
    block = BlockBuilder((2,), 4)
    tx, tw = block.load(x, (None,), 1), block.load(w, (1,), 0)
    block.store(b.accum_sum(b.matmul(tx, tw)), (1,))
    (y,) = block.launch()
    z = b.input_node(2, (4, 8))
    assert classes(make_graph([x, w, z], [b.add(y, z)])) == {
        ((0, 0), (2, 0)): (False, False),
        ((0, 1), (1, 0)): (False, False),
        ((1, 1), (2, 1)): (False, False),
    }


def test_shrunken_shapes_fit_and_differ() -> None:
    graph = graph_of(attention, (2, 256, 64), (2, 64, 4096), (2, 4096, 64))
    found = shrink_shapes(graph, seed=3)
    assert found == shrink_shapes(graph, seed=3)
    assert len(found) >= 8
    for shapes in found:
        small = resize(graph, shapes, sizes=sizes_for(graph, shapes))
        pairs = zip(small.inputs, graph.inputs, strict=True)
        assert all(prod(n.shape) < prod(o.shape) for n, o in pairs)
    (q, k, v) = found[0]
    assert len({q[1], q[2], k[2], v[2]}) == 4, "dims that may differ do differ"


def test_every_random_program_shrinks() -> None:
    """Shrunken shapes of any program are shapes that it accepts."""
    tried = 0
    refused: list[tuple[int, bool]] = []
    for seed in range(120):
        graph = kernel_graph(seed)
        for shapes in shrink_shapes(graph, seed)[:4]:
            try:
                small = resize(graph, shapes, sizes=sizes_for(graph, shapes))
            except UserError:
                held = {Op.RESHAPE, Op.BROADCAST, Op.SLICE}
                named = any(n.op in held for n in graph.nodes)
                refused.append((seed, named))
                continue
            run(small, random_inputs(small, seed))
            tried += 1
    assert all(named for _, named in refused), refused
    assert tried > 300


@pytest.mark.parametrize(
    ("old", "new", "want"),
    [
        ((2, 3, 4), (6, 4), [([0, 1], [0]), ([2], [1])]),
        ((6, 4), (2, 3, 4), [([0], [0, 1]), ([1], [2])]),
        ((4, 6), (6, 4), [([0, 1], [0, 1])]),
        ((5,), (5, 1), [([0], [0, 1])]),
        ((1, 5), (5,), [([0, 1], [0])]),
        ((), (1,), [([], [0])]),
        ((1, 1), (1,), [([0, 1], [0])]),
    ],
)
def test_reshape_groups(old, new, want) -> None:
    assert reshape_groups(old, new) == want


def parts_then_sum(split_at: int, after: bool = False) -> Graph:
    """Experts, one a block, whose depth is summed in two parts by a second kernel; the parts are
    laid along dim `split_at` (0 or 1) of what lies between, the experts along the other.
    """
    x, w = b.input_node(0, (4, 3, 8)), b.input_node(1, (4, 8, 6))
    first = BlockBuilder((4, 2, 2))
    product = first.load(x, (0, None, 2)) @ first.load(w, (0, 2, 1))
    tile = b.reshape(product, (1, 1, 3, 3))
    first.store(b.exp(tile) if after else tile, (1 - split_at, 3, split_at))
    (parts,) = first.launch()
    second = BlockBuilder((4, 2))
    part = b.sum(second.load(parts, (1 - split_at, 3)), split_at)
    second.store(b.reshape(part, (1, 3, 3)), (0, 2))
    return make_graph([x, w], second.launch())


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("split_at", [0, 1])
@pytest.mark.parametrize("experts", [1, 2, 4])
@pytest.mark.parametrize("splits", [1, 2])
def test_tiles_of_one_element_grow_where_the_store_lays_them(
    split_at: int, experts: int, splits: int, after: bool
) -> None:
    """A reshape (1, 3, 3) -> (1, 1, 3, 3) does not say which 1 is the experts': the store does. Two
    experts a block once were laid as two parts, and added up: a candidate for moe on a GPU.
    """
    graph = parts_then_sum(split_at, after)
    arrays = random_inputs(graph)
    first, second = blocks_of(graph)
    grids = {first: (experts, 2, splits), second: (experts, 2)}
    other = resize(graph, [i.shape for i in graph.inputs], grids)
    if not after or splits == 2:
        np.testing.assert_allclose(run(other, arrays)[0], run(graph, arrays)[0], rtol=1e-12)
    assert blocks_of(other)[0].grid == (experts, 2, splits)


def test_a_tile_that_grows_where_it_is_not_laid_is_refused() -> None:
    """The experts' tile becomes part of another dim: row-major order does not put it where the
    store lays it; and with nothing to say which dim it is, it is not guessed.
    """
    x = b.input_node(0, (6, 4))
    block = BlockBuilder((4,), 1)
    block.store(b.transpose(block.load(x, (1,)), (1, 0)), (1,))
    graph = make_graph([x], block.launch())
    (old,) = blocks_of(graph)
    shapes = [i.shape for i in graph.inputs]
    assert resize(graph, shapes, {old: (4,)}) == graph
    with pytest.raises(ShapeError, match=r"blocks along that axis are laid along dim 1"):
        resize(graph, shapes, {old: (2,)})
    wide = graph_of(lambda y: b.reshape(y, (1, 1, 8)), (1, 8))
    with pytest.raises(ShapeError, match=r"dim 0 is, now of 3, is ambiguous"):
        resize(wide, [(3, 8)])
    narrow = graph_of(lambda y: b.reshape(y, (1, 8)), (1, 1, 8))
    assert resize(narrow, [(3, 1, 5)]).outputs[0].shape == (3, 5)
    assert resize(narrow, [(3, 2, 5)]).outputs[0].shape == (6, 5)
