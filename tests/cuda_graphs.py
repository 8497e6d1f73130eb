"""Fused block graphs that the CUDA tests share: the structures a search finds, at any size.

Takes extents; gives kernel graphs built by hand with the block builder.
"""

from __future__ import annotations

from obelisk.ir import DType, Graph, Node, build, make_graph
from obelisk.ir.build import BlockBuilder, input_node
from obelisk.ir.op import SizeScope


def attention(
    heads: int,
    rows: int,
    keys: int,
    dim: int,
    *,
    row_tile: int,
    split: int,
    key_tile: int,
    dtype: DType = DType.F16,
    norm: bool = False,
    transposed: bool = False,
) -> Graph:
    """softmax(q k) v with a running maximum, the keys split over blocks and combined by a second
    kernel (`split` 1: one kernel). `norm` divides q and v by their root mean square first;
    `transposed` holds k as (heads, keys, dim).
    """
    q = input_node(0, (heads, rows, dim), dtype)
    k = input_node(1, (heads, keys, dim) if transposed else (heads, dim, keys), dtype)
    v = input_node(2, (heads, keys, dim), dtype)
    parts = -(-rows // row_tile)
    loop = -(-keys // (split * key_tile))
    b = BlockBuilder((heads, parts, split), loop)
    fmap = (lambda d: d) if loop > 1 else (lambda d: None)
    tq = b.load(q, (0, 1, None))
    if transposed:
        tk = build.transpose(b.load(k, (0, None, 1), fmap(1)))
    else:
        tk = b.load(k, (0, None, 2), fmap(2))
    tv = b.load(v, (0, None, 1), fmap(1))

    def rms(x: Node) -> Node:
        n = build.size(x, 2, SizeScope.TILE)
        return build.div(x, build.sqrt(build.div(build.sum(build.square(x), 2), n)))

    if norm:
        tq, tv = rms(tq), rms(tv)
    s = build.matmul(tq, tk)
    top = build.reduce_max(s, 2)
    peak = build.running_max(top) if loop > 1 else top
    p = build.exp(build.sub(s, peak))
    o, total = build.matmul(p, tv), build.sum(p, 2)
    if loop > 1:
        o, total = build.accum_rescale(o, peak), build.accum_rescale(total, peak)
        top = build.accum_max(top)
    if split == 1:
        b.store(build.div(o, total), (0, 1, 2) if False else (0, 1, None), dtype=dtype)
        return make_graph((q, k, v), b.launch(), name="attention")
    for x in (o, top, total):
        b.store(build.reshape(x, (1, *x.shape)), (1, 2, 0), dtype=DType.F32)
    parts_o, parts_top, parts_total = b.launch()
    c = BlockBuilder((heads, parts))
    co, ct, cs = (c.load(x, (1, 2)) for x in (parts_o, parts_top, parts_total))
    w = build.exp(build.sub(ct, build.reduce_max(ct, 0)))
    y = build.div(build.sum(build.mul(co, w), 0), build.sum(build.mul(cs, w), 0))
    c.store(build.reshape(y, y.shape[1:]), (0, 1), dtype=dtype)
    return make_graph((q, k, v), c.launch(), name="attention")


def norm_matmul(rows: int, depth: int, columns: int, *, parts: int, split: int, tile: int) -> Graph:
    """x w / rms(x) with the division behind the product, split along the depth (`split` 1: one
    kernel).
    """
    x = input_node(0, (rows, depth), DType.F16)
    w = input_node(1, (depth, columns), DType.F16)
    b = BlockBuilder((parts, split), -(-depth // (split * tile)))
    tx, tw = b.load(x, (None, 1), 1), b.load(w, (1, 0), 0)
    y = build.accum_sum(build.matmul(tx, tw))
    squares = build.accum_sum(build.sum(build.square(tx), 1))
    n = build.const(float(depth))
    if split == 1:
        b.store(build.div(y, build.sqrt(build.div(squares, n))), (1, None), dtype=DType.F16)
        return make_graph((x, w), b.launch(), name="norm_matmul")
    b.store(build.reshape(y, (1, *y.shape)), (2, 0), dtype=DType.F32)
    b.store(build.reshape(squares, (1, rows, 1)), (2, 0), dtype=DType.F32)
    p, q = b.launch()
    c = BlockBuilder((parts,))
    cp, cq = c.load(p, (2,)), c.load(q, (2,))
    z = build.div(build.sum(cp, 0), build.sqrt(build.div(build.sum(cq, 0), n)))
    c.store(build.reshape(z, z.shape[1:]), (1,), dtype=DType.F16)
    return make_graph((x, w), c.launch(), name="norm_matmul")


def gated(rows: int, depth: int, columns: int, *, parts: int, loop: int, split: int = 1) -> Graph:
    """silu(x a) * (x b) with two accumulators, the depth split over blocks and combined by a second
    kernel (`split` 1: one kernel).
    """
    x = input_node(0, (rows, depth), DType.F16)
    a, c = (input_node(i, (depth, columns), DType.F16) for i in (1, 2))
    b = BlockBuilder((parts,) if split == 1 else (parts, split), loop)
    deep = () if split == 1 else (1,)
    tx = b.load(x, (None, *deep), 1)
    weights = [b.load(w, (1,) if split == 1 else (1, 0), 0) for w in (a, c)]
    sums = [build.accum_sum(build.matmul(tx, w)) for w in weights]

    def gate(u: Node, v: Node) -> Node:
        return build.mul(build.mul(u, build.sigmoid(u)), v)

    if split == 1:
        b.store(gate(*sums), (1,), dtype=DType.F16)
        return make_graph((x, a, c), b.launch(), name="gated")
    for s in sums:
        b.store(build.reshape(s, (1, *s.shape)), (2, 0), dtype=DType.F32)
    stored = b.launch()
    d = BlockBuilder((parts,))
    y = gate(*(build.sum(d.load(p, (2,)), 0) for p in stored))
    d.store(build.reshape(y, y.shape[1:]), (1,), dtype=DType.F16)
    return make_graph((x, a, c), d.launch(), name="gated")


def experts(count: int, rows: int, width: int, *, parts: int, tile: int) -> Graph:
    """exp(x a) b for each expert, a kernel a product."""
    x = input_node(0, (count, rows, width), DType.F16)
    a, c = (input_node(i, (count, width, width), DType.F16) for i in (1, 2))

    def product(x: Node, w: Node, end: bool) -> Node:
        b = BlockBuilder((count, parts), width // tile)
        y = build.accum_sum(build.matmul(b.load(x, (0, None), 2), b.load(w, (0, 2), 1)))
        b.store(y if end else build.exp(y), (0, 2), dtype=DType.F16)
        return b.launch()[0]

    return make_graph((x, a, c), [product(product(x, a, False), c, True)], name="experts")


def low_rank(rows: int, depth: int, rank: int, columns: int, *, parts: int, loop: int = 1) -> Graph:
    """x w + (x a) b in one kernel, the depth of x in `loop` iterations."""
    x = input_node(0, (rows, depth), DType.F16)
    w = input_node(1, (depth, columns), DType.F16)
    a = input_node(2, (depth, rank), DType.F16)
    r = input_node(3, (rank, columns), DType.F16)
    b = BlockBuilder((parts,), loop)
    along, down = (1, 0) if loop > 1 else (None, None)
    tx, tr = b.load(x, (None,), along), b.load(r, (1,))
    low = build.matmul(tx, b.load(a, (None,), down))
    y = build.matmul(tx, b.load(w, (1,), down))
    if loop > 1:
        low, y = build.accum_sum(low), build.accum_sum(y)
    b.store(build.add(build.matmul(low, tr), y), (1,), dtype=DType.F16)
    return make_graph((x, w, a, r), b.launch(), name="low_rank")


def beside(rows: int, depth: int, columns: int, *, parts: int, loop: int) -> Graph:
    """log(x * x + 1/2) beside x w, whose columns the loop takes in turns: a tile that is an operand
    and, after the loop, a result's argument.
    """
    x = input_node(0, (rows, depth), DType.F16)
    w = input_node(1, (depth, columns), DType.F16)
    b = BlockBuilder((parts,), loop)
    tx, tw = b.load(x, (0,)), b.load(w, (None,), 1)
    b.store(build.log(build.add(build.square(tx), build.const(0.5))), (0,), dtype=DType.F16)
    b.store(build.matmul(tx, tw), (0,), 1, dtype=DType.F16)
    return make_graph((x, w), b.launch(), name="beside")


def fused() -> dict[str, Graph]:
    """One of each, with extents that need padding and masks among them."""
    return {
        "attention split": attention(2, 64, 512, 64, row_tile=32, split=4, key_tile=64),
        "attention whole": attention(2, 64, 256, 64, row_tile=64, split=1, key_tile=64),
        "attention short": attention(1, 17, 100, 40, row_tile=17, split=1, key_tile=100),
        "attention long rows": attention(1, 128, 256, 64, row_tile=128, split=2, key_tile=64),
        "attention keys first": attention(
            2, 16, 256, 64, row_tile=16, split=2, key_tile=64, transposed=True
        ),
        "attention bf16": attention(
            2, 32, 256, 64, row_tile=32, split=2, key_tile=64, dtype=DType.BF16
        ),
        "attention norm": attention(2, 64, 512, 64, row_tile=32, split=4, key_tile=64, norm=True),
        "attention many keys": attention(2, 64, 1024, 64, row_tile=64, split=2, key_tile=64),
        "attention many keys norm": attention(
            2, 64, 1024, 64, row_tile=64, split=2, key_tile=64, norm=True
        ),
        "attention many keys short": attention(
            1, 16, 1000, 64, row_tile=16, split=1, key_tile=64, transposed=True
        ),
        "norm matmul": norm_matmul(2, 512, 384, parts=8, split=1, tile=64),
        "norm matmul split": norm_matmul(8, 1024, 256, parts=4, split=2, tile=64),
        "gated": gated(8, 512, 256, parts=8, loop=8),
        "gated odd": gated(5, 96, 120, parts=3, loop=2),
        "gated split": gated(8, 1024, 256, parts=4, loop=4, split=4),
        "low rank": low_rank(16, 256, 16, 512, parts=16),
        "low rank looped": low_rank(16, 256, 16, 512, parts=8, loop=4),
        "beside": beside(16, 128, 256, parts=1, loop=4),
        "beside odd": beside(6, 24, 28, parts=2, loop=2),
        "low rank odd": low_rank(3, 100, 12, 88, parts=2),
    }
