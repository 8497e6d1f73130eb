"""Large programs for the tests of the search: llama-style decoder layers, built from composites."""

from __future__ import annotations

from dataclasses import dataclass

from obelisk.ir import DType, Graph, KernelGraph, Node


@dataclass(frozen=True)
class Shape:
    """Rows (tokens), model width, query and key heads, head width, width of the MLP, dtype."""

    rows: int = 32
    width: int = 256
    heads: int = 4
    key_heads: int = 2
    head: int = 64
    inner: int = 1024
    dtype: DType = DType.F32


def _attention_block(g: KernelGraph, x: Node, rope: tuple[Node, Node], s: Shape) -> Node:
    """x + attention(rope(q), rope(k), v) wo, causal, grouped heads, of the normed x."""
    wq = g.input((s.width, s.heads * s.head), s.dtype)
    wk, wv = (g.input((s.width, s.key_heads * s.head), s.dtype) for _ in range(2))
    wo = g.input((s.heads * s.head, s.width), s.dtype)
    gain = g.input((1, s.width), s.dtype)
    h = g.rms_norm(x, gain, 1e-6)

    def split(z: Node, heads: int) -> Node:
        return g.transpose(g.reshape(z, (s.rows, heads, s.head)), (1, 0, 2))

    q = g.rope(split(g.matmul(h, wq), s.heads), *rope)
    k = g.rope(split(g.matmul(h, wk), s.key_heads), *rope)
    v = split(g.matmul(h, wv), s.key_heads)
    o = g.transpose(g.attention(q, k, v, causal=True), (1, 0, 2))
    return g.add(x, g.matmul(g.reshape(o, (s.rows, s.heads * s.head)), wo))


def _mlp_block(g: KernelGraph, x: Node, s: Shape) -> Node:
    gate, up = (g.input((s.width, s.inner), s.dtype) for _ in range(2))
    down, gain = g.input((s.inner, s.width), s.dtype), g.input((1, s.width), s.dtype)
    h = g.rms_norm(x, gain, 1e-6)
    hidden = g.mul(g.silu(g.matmul(h, gate)), g.matmul(h, up))
    return g.add(x, g.matmul(hidden, down))


def decoder(layers: int, shape: Shape | None = None) -> Graph:
    """So many decoder layers, about 62 operators each."""
    s = shape or Shape()
    g = KernelGraph("decoder")
    x = g.input((s.rows, s.width), s.dtype)
    rope = (g.input((s.rows, s.head), s.dtype), g.input((s.rows, s.head), s.dtype))
    for _ in range(layers):
        x = _mlp_block(g, _attention_block(g, x, rope, s), s)
    g.output(x)
    return g.freeze()


def attention_block(shape: Shape | None = None) -> Graph:
    """The attention half of a layer, with rope and residual."""
    s = shape or Shape()
    g = KernelGraph("attention_block")
    x = g.input((s.rows, s.width), s.dtype)
    rope = (g.input((s.rows, s.head), s.dtype), g.input((s.rows, s.head), s.dtype))
    g.output(_attention_block(g, x, rope, s))
    return g.freeze()
