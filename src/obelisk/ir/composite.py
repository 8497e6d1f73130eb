"""Composite operators: graphs of primitives, so that no judge, rule or emitter needs to know them.

Formulas follow PyTorch: softmax subtracts the row maximum; gelu is the exact erf form unless
`approximate="tanh"`; rms_norm and layer_norm put eps inside the square root; rope rotates halves
(or interleaved pairs).
"""

from __future__ import annotations

from math import inf, pi, sqrt

from obelisk.base.errors import ShapeError, UnknownName
from obelisk.ir import build as b
from obelisk.ir.node import Node


def mean(x: Node, axis: int = -1) -> Node:
    """Mean along an axis, which is kept with extent 1."""
    return b.div(b.sum(x, axis), b.size(x, axis))


def softmax(x: Node, axis: int = -1) -> Node:
    """exp(x - max) / sum(exp(x - max)) along `axis`: finite for every finite x."""
    e = b.exp(b.sub(x, b.reduce_max(x, axis)))
    return b.div(e, b.sum(e, axis))


def rms_norm(x: Node, gain: Node | None = None, eps: float = 0.0, axis: int = -1) -> Node:
    """x / sqrt(mean(x^2) + eps), times `gain` (broadcast) if given."""
    power = mean(b.square(x), axis)
    y = b.div(x, b.sqrt(b.add(power, eps) if eps else power))
    return y if gain is None else b.mul(y, gain)


def layer_norm(
    x: Node, gain: Node | None = None, bias: Node | None = None, eps: float = 1e-5
) -> Node:
    """(x - mean) / sqrt(var + eps) over the last axis, then gain and bias if given."""
    centred = b.sub(x, mean(x))
    y = b.div(centred, b.sqrt(b.add(mean(b.square(centred)), eps)))
    if gain is not None:
        y = b.mul(y, gain)
    return y if bias is None else b.add(y, bias)


def silu(x: Node) -> Node:
    """x * sigmoid(x)."""
    return b.mul(x, b.sigmoid(x))


def gelu(x: Node, approximate: str = "none") -> Node:
    """Gaussian error linear unit; `approximate` is "none" (erf) or "tanh"."""
    if approximate == "none":
        return b.mul(b.mul(x, 0.5), b.add(b.erf(b.mul(x, 1 / sqrt(2))), 1.0))
    if approximate == "tanh":
        inner = b.mul(b.add(x, b.mul(b.mul(b.square(x), x), 0.044715)), sqrt(2 / pi))
        return b.mul(b.mul(x, 0.5), b.add(b.tanh(inner), 1.0))
    raise UnknownName(f"gelu: approximate={approximate!r}; known are 'none' and 'tanh'")


def relu(x: Node) -> Node:
    """max(x, 0)."""
    return b.maximum(x, 0.0)


def absolute(x: Node) -> Node:
    """|x|."""
    return b.maximum(x, b.neg(x))


def clamp(x: Node, low: float, high: float) -> Node:
    """x limited to [low, high]."""
    if low > high:
        raise ShapeError(f"clamp: low {low} is above high {high}")
    return b.minimum(b.maximum(x, low), high)


def rope(x: Node, cos: Node, sin: Node, interleaved: bool = False) -> Node:
    """Rotary position embedding of the last dim d: x * cos + rotate(x) * sin.

    `cos` and `sin` broadcast to x. `interleaved` False rotates halves (Hugging Face), True rotates
    neighbours (GPT-J).
    """
    d = x.shape[-1]
    if d % 2:
        raise ShapeError(f"rope needs an even last dim, got {x.shape}")
    if interleaved:
        pairs = b.reshape(x, (*x.shape[:-1], d // 2, 2))
        turned = b.concat([b.neg(b.slice(pairs, -1, 1, 2)), b.slice(pairs, -1, 0, 1)], -1)
        rotated = b.reshape(turned, x.shape)
    else:
        rotated = b.concat([b.neg(b.slice(x, -1, d // 2, d)), b.slice(x, -1, 0, d // 2)], -1)
    return b.add(b.mul(x, cos), b.mul(rotated, sin))


def causal_mask(rows: int, cols: int) -> Node:
    """bool (rows, cols): True where row r may see column c, the last row seeing all (r - rows >= c
    - cols).
    """
    return b.less(b.iota((1, cols), 1), b.add(b.iota((rows, 1), 0), float(cols - rows + 1)))


def attention(q: Node, k: Node, v: Node, scale: float | None = None, causal: bool = False) -> Node:
    """softmax(scale * q @ k^T [+ causal mask]) @ v.

    q is (..., heads, m, d), k and v are (..., kv_heads, n, d) and (..., kv_heads, n, e); heads must
    be a multiple of kv_heads (grouped heads). `scale` defaults to 1 / sqrt(d). Raises `ShapeError`
    when the groups do not divide.
    """
    if q.rank != k.rank or k.rank != v.rank or q.rank < 2:
        raise ShapeError(
            f"attention: ranks of q {q.shape}, k {k.shape} and v {v.shape} differ or are below 2"
        )
    shape = q.shape
    if q.rank > 2 and q.shape[-3] != k.shape[-3]:
        heads, groups = q.shape[-3], k.shape[-3]
        if heads % groups:
            raise ShapeError(f"attention: {heads} heads are no multiple of {groups} kv heads")
        q = b.reshape(q, (*q.shape[:-3], groups, heads // groups, *q.shape[-2:]))
        k = b.reshape(k, (*k.shape[:-2], 1, *k.shape[-2:]))
        v = b.reshape(v, (*v.shape[:-2], 1, *v.shape[-2:]))
    scores = b.mul(b.matmul(q, b.transpose(k)), 1 / sqrt(shape[-1]) if scale is None else scale)
    if causal:
        scores = b.where(causal_mask(scores.shape[-2], scores.shape[-1]), scores, -inf)
    out = b.matmul(softmax(scores), v)
    return b.reshape(out, (*shape[:-1], out.shape[-1]))
