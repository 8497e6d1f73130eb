"""What each kind of task computes, as an ir graph of primitive operators.

Takes a `StepShape` and a tile's extents; gives a `Graph` whose inputs are the task's reads, then
its weights, in the order that each function's text names. `ir.numeric.run` makes it a float64
reference for the virtual machine and for the bodies in C.
"""

from __future__ import annotations

from math import sqrt

from obelisk.ir import DType, Graph, KernelGraph, Node
from obelisk.tasks.shape import StepShape


def embed(s: StepShape) -> Graph:
    """token i32 (batch, 1), table (vocab, hidden) -> x (batch, hidden)."""
    g = KernelGraph("embed")
    token = g.input((s.batch, 1), DType.I32, "token")
    table = g.input((s.model.vocab, s.model.hidden), DType.F32, "table")
    ids = g.iota((1, s.model.vocab), 1)
    one = g.cast(g.less(ids, g.add(token, 1)), DType.F32)
    hot = g.sub(one, g.cast(g.less(ids, token), DType.F32))
    g.output(g.matmul(hot, table), name="x")
    return g.freeze()


def norm(s: StepShape) -> Graph:
    """x (batch, hidden), gain (hidden,) -> h."""
    g = KernelGraph("norm")
    x = g.input((s.batch, s.model.hidden), DType.F32, "x")
    gain = g.input((s.model.hidden,), DType.F32, "gain")
    g.output(g.rms_norm(x, gain, s.model.eps), name="h")
    return g.freeze()


def _product(g: KernelGraph, x: Node, rows: int, cols: int, bias: bool, name: str = "w") -> Node:
    """x @ w^T [+ bias], declaring the inputs w (rows, cols) and, with `bias`, (rows,)."""
    y = g.matmul(x, g.transpose(g.input((rows, cols), DType.F32, name)))
    return g.add(y, g.input((rows,), DType.F32, name + "_bias")) if bias else y


def rows(s: StepShape, count: int, cols: int, bias: bool) -> Graph:
    """h (batch, cols), w (count, cols)[, bias (count,)] -> (batch, count)."""
    g = KernelGraph("rows")
    x = g.input((s.batch, cols), DType.F32, "h")
    g.output(_product(g, x, count, cols, bias), name="raw")
    return g.freeze()


def _turn(g: KernelGraph, s: StepShape, raw: Node, groups: int) -> None:
    """Head norms, rotation, and the outputs q, k, v of `raw` (batch, groups * group_rows).

    Declares the inputs q_gain (head_dim,) and k_gain where heads are normalised, then cos and sin
    (batch, head_dim / 2).
    """
    m, b = s.model, s.batch
    d = m.head_dim
    gains = [g.input((d,), DType.F32, f"{x}_gain") for x in "qk"] if m.qk_norm else []
    half = [g.input((b, d // 2), DType.F32, x) for x in ("cos", "sin")]
    cos, sin = (g.reshape(g.concat([x, x], 1), (b, 1, 1, d)) for x in half)
    packed = g.reshape(raw, (b, groups, s.group_rows))
    wide = m.group * d
    parts = []
    for i, (start, heads) in enumerate(((0, m.group), (wide, 1))):
        x = g.reshape(g.slice(packed, 2, start, start + heads * d), (b, groups, heads, d))
        if gains:
            x = g.rms_norm(x, gains[i], m.eps)
        parts.append(g.reshape(g.rope(x, cos, sin), (b, groups * heads * d)))
    v = g.slice(packed, 2, wide + d, wide + 2 * d)
    g.output(parts[0], name="q")
    g.output(parts[1], name="k")
    g.output(g.reshape(v, (b, groups * d)), name="v")


def rotate(s: StepShape, groups: int) -> Graph:
    """raw (batch, groups * group_rows)[, q_gain, k_gain], cos, sin -> q, k, v (batch, ...)."""
    g = KernelGraph("rotate")
    raw = g.input((s.batch, groups * s.group_rows), DType.F32, "raw")
    _turn(g, s, raw, groups)
    return g.freeze()


def qkv(s: StepShape, groups: int) -> Graph:
    """h (batch, hidden), w (groups * group_rows, hidden)[, bias][, q_gain, k_gain], cos, sin -> q,
    k, v.
    """
    g = KernelGraph("qkv")
    x = g.input((s.batch, s.model.hidden), DType.F32, "h")
    raw = _product(g, x, groups * s.group_rows, s.model.hidden, s.model.qkv_bias)
    _turn(g, s, raw, groups)
    return g.freeze()


def attend(s: StepShape, n: int, whole: bool) -> Graph:
    """q (group, head_dim), k and v (n, head_dim) -> attention (`whole`), or one piece of it.

    A piece is (sums of weighted values (group, head_dim), maxima (group, 1), sums of weights
    (group, 1)).
    """
    m = s.model
    g = KernelGraph("attend")
    q = g.input((m.group, m.head_dim), DType.F32, "q")
    k = g.input((n, m.head_dim), DType.F32, "k")
    v = g.input((n, m.head_dim), DType.F32, "v")
    if whole:
        g.output(g.attention(q, k, v), name="attn")
        return g.freeze()
    scores = g.mul(g.matmul(q, g.transpose(k)), 1 / sqrt(m.head_dim))
    peak = g.reduce_max(scores, 1)
    e = g.exp(g.sub(scores, peak))
    g.output(g.matmul(e, v), name="sums")
    g.output(peak, name="peak")
    g.output(g.sum(e, 1), name="mass")
    return g.freeze()


def combine(s: StepShape) -> Graph:
    """sums (pieces, group, head_dim), peaks and masses (pieces, group, 1) -> (group, head_dim)."""
    m, pieces = s.model, s.tiling.kv_splits
    g = KernelGraph("combine")
    sums = g.input((pieces, m.group, m.head_dim), DType.F32, "sums")
    peaks = g.input((pieces, m.group, 1), DType.F32, "peaks")
    masses = g.input((pieces, m.group, 1), DType.F32, "masses")
    scale = g.exp(g.sub(peaks, g.reduce_max(peaks, 0)))
    total = g.sum(g.mul(masses, scale), 0)
    out = g.div(g.sum(g.mul(sums, scale), 0), total)
    g.output(g.reshape(out, (m.group, m.head_dim)), name="attn")
    return g.freeze()


def residual(s: StepShape, lo: int, hi: int, cols: int, bias: bool) -> Graph:
    """input (batch, cols), x (batch, hi - lo), w (hi - lo, cols)[, bias] -> x + input @ w^T."""
    count = min(hi, s.model.hidden) - lo
    g = KernelGraph("residual")
    y = g.input((s.batch, cols), DType.F32, "input")
    x = g.input((s.batch, count), DType.F32, "x")
    g.output(g.add(x, _product(g, y, count, cols, bias)), name="x")
    return g.freeze()


def gated(s: StepShape, count: int) -> Graph:
    """h (batch, hidden), gate (count, hidden)[, its bias], up[, its bias] -> silu(gate) * up."""
    g = KernelGraph("gated")
    x = g.input((s.batch, s.model.hidden), DType.F32, "h")
    gate, up = (
        _product(g, x, count, s.model.hidden, s.model.mlp_bias, name) for name in ("gate", "up")
    )
    g.output(g.mul(g.silu(gate), up), name="act")
    return g.freeze()


def head(s: StepShape, lo: int, hi: int) -> Graph:
    """h (batch, hidden), w (hi - lo, hidden) -> logits, their maximum, and its first index."""
    count = hi - lo
    g = KernelGraph("head")
    x = g.input((s.batch, s.model.hidden), DType.F32, "h")
    logits = _product(g, x, count, s.model.hidden, False)
    best = g.reduce_max(logits, 1)
    ids = g.cast(g.iota((1, count), 1), DType.F32)
    first = g.neg(g.reduce_max(g.where(g.less(logits, best), float(-(1 << 24)), g.neg(ids)), 1))
    g.output(logits, name="logits")
    g.output(best, name="best")
    g.output(g.add(first, float(lo)), name="id")
    return g.freeze()
