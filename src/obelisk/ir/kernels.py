"""numpy meanings of the operators, on arrays that carry `lead` batch axes in front of a value's own
dims.

The batch axes let the interpreter evaluate all blocks of a grid at once; a batch axis of extent 1
is broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from obelisk.ir.node import Node, common_ends
from obelisk.ir.op import Op

Array = Any  # numpy arrays; `Any` because ml_dtypes scalars defeat numpy's own annotations
Meaning = Callable[[Node, Sequence[Array], int], Array]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def rsqrt(x: Array) -> Array:
    """1 / sqrt(x)."""
    return 1 / np.sqrt(x)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow for any finite x."""
    z = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + z), z / (1 + z))


def erf(x: Array) -> Array:
    """The error function, elementwise."""
    return _erf(x).astype(x.dtype) if x.size else x


def max_or_neginf(x: Array, axis: int, keepdims: bool) -> Array:
    """Maximum; -inf over no elements."""
    if x.dtype.kind != "f":
        return np.max(x, axis=axis, keepdims=keepdims)
    return np.max(x, axis=axis, keepdims=keepdims, initial=-np.inf)


def align(x: Array, lead: int, own: int, rank: int) -> Array:
    """Insert axes of extent 1 after the batch axes, so that a value with `own` dims has `rank`."""
    if own == rank or x.ndim == 0:
        return x
    return x.reshape(x.shape[:lead] + (1,) * (rank - own) + x.shape[lead:])


def spread(x: Array, lead: int) -> Array:
    """A bare scalar (a constant) with batch axes of extent 1."""
    return x if x.ndim else x.reshape((1,) * lead)


def unary(fn: Callable[[Array], Array]) -> Meaning:
    """An elementwise operator of one operand."""
    return lambda node, args, lead: fn(args[0])


def binary(fn: Callable[[Array, Array], Array]) -> Meaning:
    """An elementwise operator of two operands, dims aligned at the right."""

    def run(node: Node, args: Sequence[Array], lead: int) -> Array:
        a, b = (align(x, lead, i.rank, node.rank) for x, i in zip(args, node.inputs, strict=True))
        return fn(a, b)

    return run


def where(node: Node, args: Sequence[Array], lead: int) -> Array:
    """where(cond, a, b)."""
    c, a, b = (align(x, lead, i.rank, node.rank) for x, i in zip(args, node.inputs, strict=True))
    return np.where(c, a, b)


def reduce(fn: Callable[..., Array]) -> Meaning:
    """A fold along one axis that is kept; `keep` columns remain."""

    def run(node: Node, args: Sequence[Array], lead: int) -> Array:
        (x,) = args
        axis, keep = node.attrs.axis - node.inputs[0].rank + x.ndim, node.attrs.keep
        if x.shape[axis] == 0 and node.op is Op.REDUCE_MAX and not node.dtype.is_float:
            empty = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
            return np.full(empty, -(1 << (node.dtype.bits - 1)), dtype=x.dtype)
        if keep == 1:
            return fn(x, axis=axis, keepdims=True)
        shape = (*x.shape[:axis], x.shape[axis] // keep, keep, *x.shape[axis + 1 :])
        return fn(x.reshape(shape), axis=axis, keepdims=False)

    return run


def matmul(node: Node, args: Sequence[Array], lead: int) -> Array:
    """Batched matrix product."""
    a, b = (align(x, lead, i.rank, node.rank) for x, i in zip(args, node.inputs, strict=True))
    return np.matmul(a, b)


def reshape(node: Node, args: Sequence[Array], lead: int) -> Array:
    """Row-major reshape of a value's own dims."""
    (x,) = (spread(a, lead) for a in args)
    if x.shape[lead:] == node.inputs[0].shape:
        return x.reshape(x.shape[:lead] + node.shape)
    return x.reshape(
        x.shape[:lead] + _short_reshape(x.shape[lead:], node.inputs[0].shape, node.shape)
    )


def _short_reshape(
    actual: tuple[int, ...], static: tuple[int, ...], target: tuple[int, ...]
) -> tuple[int, ...]:
    """The target shape when dims outside the reshaped middle are short (last tiles)."""
    front, back = common_ends(static, target)
    return actual[:front] + target[front : len(target) - back] + actual[len(actual) - back :]


def transpose(node: Node, args: Sequence[Array], lead: int) -> Array:
    """Permute a value's own dims."""
    return np.transpose(args[0], tuple(range(lead)) + tuple(lead + p for p in node.attrs.perm))


def broadcast(node: Node, args: Sequence[Array], lead: int) -> Array:
    """Broadcast to the node's shape (short tiles stay short)."""
    x = align(spread(args[0], lead), lead, node.inputs[0].rank, node.rank)
    own = node.inputs[0].shape
    pad = node.rank - len(own)
    target = tuple(
        n if d < pad or own[d - pad] != n else x.shape[lead + d] for d, n in enumerate(node.shape)
    )
    return np.broadcast_to(x, x.shape[:lead] + target)


def slice_(node: Node, args: Sequence[Array], lead: int) -> Array:
    """Elements start:stop of one axis."""
    (x,) = args
    at = node.attrs
    index = [slice(None)] * x.ndim
    if node.shape != node.inputs[0].shape:
        index[lead + at.axis] = slice(at.start, at.stop)
    return x[tuple(index)]


def concat(node: Node, args: Sequence[Array], lead: int) -> Array:
    """Join along an axis; batch axes are broadcast first."""
    front = np.broadcast_shapes(*(x.shape[:lead] for x in args))
    return np.concatenate(
        [np.broadcast_to(x, front + x.shape[lead:]) for x in args], axis=lead + node.attrs.axis
    )
