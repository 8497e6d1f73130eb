"""Pairs of graphs for the tests of the verifier: 32 that are equal, 38 that are nearly equal.

Each function of `EQUAL` and `WRONG` gives a program and a candidate with one interface, at small
sizes. The wrong ones are the classic mistakes: another axis, a missing factor, an accumulator left
out, operands swapped, a function taken for another; several agree on special inputs (equal, zero,
symmetric, one-hot ones).
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from obelisk.ir import BlockBuilder, DType, Graph, Node, Reduce, make_graph, thread_graph
from obelisk.ir import build as b
from obelisk.ir import composite as c
from obelisk.ir.op import SizeScope

Pair = tuple[Graph, Graph]
EQUAL: dict[str, Callable[[], Pair]] = {}
WRONG: dict[str, Callable[[], Pair]] = {}


def inputs(*shapes: tuple[int, ...], dtype: DType = DType.F32) -> list[Node]:
    """Input nodes 0, 1, ..."""
    return [b.input_node(i, s, dtype) for i, s in enumerate(shapes)]


def pair(xs: list[Node], program: Node, candidate: Node) -> Pair:
    """Two single-output graphs over the same inputs."""
    return make_graph(xs, [program], name="program"), make_graph(xs, [candidate], name="candidate")


def equal(fn: Callable[[], Pair]) -> Callable[[], Pair]:
    EQUAL[fn.__name__] = fn
    return fn


def wrong(fn: Callable[[], Pair]) -> Callable[[], Pair]:
    WRONG[fn.__name__] = fn
    return fn


# Equal


@equal
def reassociated_sum() -> Pair:
    x, y, z = xs = inputs((4, 6), (4, 6), (4, 6))
    return pair(xs, (x + y) + z, x + (z + y))


@equal
def distributed_product() -> Pair:
    x, y, z = xs = inputs((4, 6), (4, 6), (1, 6))
    return pair(xs, (x + y) * z, x * z + y * z)


@equal
def distributed_matmul() -> Pair:
    x, y, w = xs = inputs((4, 6), (4, 6), (6, 5))
    return pair(xs, (x + y) @ w, x @ w + y @ w)


@equal
def division_behind_matmul() -> Pair:
    x, s, w = xs = inputs((4, 6), (4, 1), (6, 5))
    return pair(xs, (x / s) @ w, (x @ w) / s)


@equal
def column_scale_behind_matmul() -> Pair:
    x, g, w = xs = inputs((4, 6), (1, 6), (6, 5))
    return pair(xs, (x * g) @ w, x @ (b.transpose(g) * w))


@equal
def associated_matmul() -> Pair:
    x, y, z = xs = inputs((4, 6), (6, 3), (3, 5))
    return pair(xs, (x @ y) @ z, x @ (y @ z))


@equal
def summed_in_loop() -> Pair:
    (x,) = xs = inputs((4, 12))
    bb = BlockBuilder((2,), 3)
    bb.store(b.accum_sum(b.sum(bb.load(x, (0,), 1), 1)), (0,))
    return pair(xs, b.sum(x, 1), bb.launch()[0])


@equal
def accumulated_then_summed() -> Pair:
    (x,) = xs = inputs((4, 12))
    bb = BlockBuilder((2,), 3)
    bb.store(b.sum(b.accum_sum(bb.load(x, (0,), 1)), 1), (0,))
    return pair(xs, b.sum(x, 1), bb.launch()[0])


@equal
def summed_in_short_tiles() -> Pair:
    (x,) = xs = inputs((5, 11))
    bb = BlockBuilder((2,), 3)
    bb.store(b.accum_sum(b.sum(bb.load(x, (0,), 1), 1)), (0,))
    return pair(xs, b.sum(x, 1), bb.launch()[0])


@equal
def split_k_over_blocks() -> Pair:
    x, w = xs = inputs((4, 12), (12, 6))
    bb = BlockBuilder((2, 3))
    tx, tw = bb.load(x, (None, 1)), bb.load(w, (1, 0))
    bb.store(tx @ tw, (1, None), reduce=Reduce.SUM)
    return pair(xs, x @ w, bb.launch()[0])


@equal
def split_k_over_loop() -> Pair:
    x, w = xs = inputs((4, 12), (12, 6))
    bb = BlockBuilder((2, 3), 4)
    tx, tw = bb.load(x, (0, None), 1), bb.load(w, (None, 1), 0)
    bb.store(b.accum_sum(tx @ tw), (0, 1))
    return pair(xs, x @ w, bb.launch()[0])


@equal
def lora_concat() -> Pair:
    x, w, a, u = xs = inputs((4, 6), (6, 8), (6, 3), (3, 8))
    joined = b.concat([x, x @ a], 1) @ b.concat([w, u], 0)
    return pair(xs, x @ w + (x @ a) @ u, joined)


@equal
def norm_in_one_kernel() -> Pair:
    x, w = xs = inputs((3, 12), (12, 8))
    bb = BlockBuilder((2,), 3)
    tx, tw = bb.load(x, (None,), 1), bb.load(w, (1,), 0)
    power = b.accum_sum(b.sum(b.square(tx), 1)) / b.size(tx, 1, SizeScope.FULL)
    bb.store(b.accum_sum(tx @ tw) / b.sqrt(power + 1e-5), (1,))
    return pair(xs, c.rms_norm(x, eps=1e-5) @ w, bb.launch()[0])


@equal
def norm_by_rsqrt() -> Pair:
    (x,) = xs = inputs((3, 10))
    return pair(xs, c.rms_norm(x, eps=1e-5), x * b.rsqrt(c.mean(b.square(x)) + 1e-5))


@equal
def gated_in_one_kernel() -> Pair:
    x, w, u = xs = inputs((3, 12), (12, 8), (12, 8))
    bb = BlockBuilder((2,), 3)
    tx, tw, tu = bb.load(x, (None,), 1), bb.load(w, (1,), 0), bb.load(u, (1,), 0)
    bb.store(b.accum_sum(tx @ tu) * c.silu(b.accum_sum(tx @ tw)), (1,))
    return pair(xs, c.silu(x @ w) * (x @ u), bb.launch()[0])


@equal
def softmax_divides_last() -> Pair:
    q, k, v = xs = inputs((4, 3), (3, 9), (9, 5))
    e = b.exp(q @ k)
    return pair(xs, (e / b.sum(e, 1)) @ v, (e @ v) / b.sum(e, 1))


@equal
def attention_online() -> Pair:
    q, k, v = xs = inputs((4, 3), (3, 12), (12, 5))
    bb = BlockBuilder((2,), 3)
    tq, tk, tv = bb.load(q, (0,)), bb.load(k, (None,), 1), bb.load(v, (None,), 0)
    s = tq @ tk
    peak = b.running_max(b.reduce_max(s, 1))
    e = b.exp(s - peak)
    top, bottom = b.accum_rescale(e @ tv, peak), b.accum_rescale(b.sum(e, 1), peak)
    bb.store(top / bottom, (0,))
    return pair(xs, c.softmax(q @ k) @ v, bb.launch()[0])


def split_keys(xs: list[Node], safe: bool, rescaled: bool = True) -> Node:
    """Attention in two kernels: splits of the keys, then their combination."""
    q, k, v = xs
    e_dim = v.shape[1]
    bb = BlockBuilder((2, 3), 2)
    tq, tk, tv = bb.load(q, (0, None)), bb.load(k, (None, 1), 1), bb.load(v, (None, 0), 0)
    s = tq @ tk
    if safe:
        peak = b.running_max(b.reduce_max(s, 1))
        e = b.exp(s - peak)
        bb.store(b.accum_rescale(e @ tv, peak), (0, 1))
        bb.store(b.accum_rescale(b.sum(e, 1), peak), (0, 1))
        bb.store(b.accum_max(b.reduce_max(s, 1)), (0, 1))
        top, bottom, high = bb.launch()
        m = b.reduce_max(high, 1)
        factor = b.exp(high - m)
        rows, splits = high.shape
        wide = b.reshape(top, (rows, splits, e_dim)) * b.reshape(
            factor if rescaled else b.exp(high - high), (rows, splits, 1)
        )
        scaled = b.reshape(wide, (rows, splits * e_dim))
        return b.sum(scaled, 1, keep=e_dim) / b.sum(bottom * factor, 1)
    e = b.exp(s)
    bb.store(b.accum_sum(e @ tv), (0, 1))
    bb.store(b.accum_sum(b.sum(e, 1)), (0, 1))
    top, bottom = bb.launch()
    return b.sum(top, 1, keep=e_dim) / b.sum(bottom, 1)


@equal
def attention_split_keys() -> Pair:
    q, k, _ = xs = inputs((4, 3), (3, 12), (12, 5))
    e = b.exp(q @ k)
    return pair(xs, (e / b.sum(e, 1)) @ xs[2], split_keys(xs, safe=False))


@equal
def attention_split_keys_safe() -> Pair:
    q, k, v = xs = inputs((4, 3), (3, 12), (12, 5))
    return pair(xs, c.softmax(q @ k) @ v, split_keys(xs, safe=True))


@equal
def mean_by_factor() -> Pair:
    (x,) = xs = inputs((4, 8))
    return pair(xs, c.mean(x), b.sum(x, 1) * 0.125)


@equal
def quotient_by_negative_exponent() -> Pair:
    x, y = xs = inputs((4, 6), (4, 6))
    return pair(xs, x / b.exp(y), x * b.exp(-y))


@equal
def roots_of_squares() -> Pair:
    x, y = xs = inputs((4, 6), (4, 6))
    program = b.sqrt(b.square(x) * b.square(y))
    return pair(xs, program, b.sqrt(b.square(x)) * b.sqrt(b.square(y)))


@equal
def squared_root_of_square() -> Pair:
    (x,) = xs = inputs((4, 6))
    return pair(xs, b.square(b.sqrt(b.square(x))), x * x)


@equal
def transposed_product() -> Pair:
    x, w = xs = inputs((4, 6), (6, 5))
    return pair(xs, b.transpose(x @ w), b.transpose(w) @ b.transpose(x))


@equal
def sum_of_product() -> Pair:
    x, w = xs = inputs((4, 6), (6, 5))
    return pair(xs, b.sum(x @ w, 1), x @ b.sum(w, 1))


@equal
def maximum_in_loop() -> Pair:
    (x,) = xs = inputs((4, 12))
    bb = BlockBuilder((2,), 3)
    bb.store(b.accum_max(b.reduce_max(bb.load(x, (0,), 1), 1)), (0,))
    return pair(xs, b.reduce_max(x, 1), bb.launch()[0])


@equal
def quotients_joined() -> Pair:
    x, y, z = xs = inputs((4, 6), (4, 6), (4, 1))
    return pair(xs, x / (y * z), (x / y) / z)


@equal
def silu_spelled_out() -> Pair:
    (x,) = xs = inputs((4, 6))
    return pair(xs, c.silu(x), x / (b.exp(-x) + 1.0))


@equal
def masked_then_scaled() -> Pair:
    x, y, z = xs = inputs((4, 6), (4, 6), (4, 1))
    mask = c.causal_mask(4, 6)
    return pair(xs, b.where(mask, x, y) * z, b.where(mask, x * z, y * z))


@equal
def heads_by_reshape() -> Pair:
    x, w = xs = inputs((4, 6), (6, 8))
    heads = b.transpose(b.reshape(x @ w, (4, 2, 4)), (1, 0, 2))
    cut = b.reshape(w, (6, 2, 4))
    each = b.reshape(x, (1, 4, 6)) @ b.transpose(cut, (1, 0, 2))
    return pair(xs, heads, each)


@equal
def twice_by_sum() -> Pair:
    x, w = xs = inputs((4, 6), (6, 5))
    return pair(xs, (x @ w) * 2.0, x @ w + x @ w)


@equal
def chain_in_registers() -> Pair:
    x, y = xs = inputs((4, 8), (4, 8))
    bb = BlockBuilder((2,))
    tx, ty = bb.load(x, (0,)), bb.load(y, (0,))
    ex, ey = b.elem(0, tx), b.elem(1, ty)
    chain = thread_graph((b.sum(c.silu(ex) * ey, 1),), vector=4)
    bb.store(b.run_thread(chain, [tx, ty])[0], (0,))
    return pair(xs, b.sum(c.silu(x) * y, 1), bb.launch()[0])


# Nearly equal


@wrong
def sum_over_the_other_axis() -> Pair:
    (x,) = xs = inputs((5, 5))
    return pair(xs, x - b.sum(x, 1), x - b.sum(x, 0))


@wrong
def missing_count() -> Pair:
    (x,) = xs = inputs((4, 6))
    return pair(xs, x / b.sqrt(c.mean(b.square(x))), x / b.sqrt(b.sum(b.square(x), 1)))


@wrong
def missing_accumulator() -> Pair:
    x, w = xs = inputs((4, 12), (12, 6))
    short = b.slice(x, 1, 8, 12) @ b.slice(w, 0, 8, 12)
    return pair(xs, x @ w, short)


@wrong
def exponential_before_scale() -> Pair:
    (x,) = xs = inputs((4, 6))
    return pair(xs, b.exp(x * 0.5), b.exp(x) * 0.5)


@wrong
def swapped_difference() -> Pair:
    x, y = xs = inputs((4, 6), (4, 6))
    return pair(xs, x - y, y - x)


@wrong
def swapped_quotient() -> Pair:
    x, y = xs = inputs((4, 6), (4, 6))
    return pair(xs, x / y, y / x)


@wrong
def swapped_product() -> Pair:
    x, y = xs = inputs((5, 5), (5, 5))
    return pair(xs, x @ y, y @ x)


@wrong
def keys_and_values_swapped() -> Pair:
    q, k, v = xs = inputs((4, 5), (5, 5), (5, 5))
    return pair(xs, c.softmax(q @ k) @ v, c.softmax(q @ v) @ k)


@wrong
def square_of_mean() -> Pair:
    (x,) = xs = inputs((4, 6))
    return pair(xs, c.mean(b.square(x)), b.square(c.mean(x)))


@wrong
def silu_of_product() -> Pair:
    x, y = xs = inputs((4, 6), (4, 6))
    return pair(xs, c.silu(x) * y, c.silu(x * y))


@wrong
def divided_by_the_last_tile() -> Pair:
    q, k, v = xs = inputs((4, 3), (3, 12), (12, 5))
    e = b.exp(q @ k)
    part = b.sum(b.slice(e, 1, 8, 12), 1)
    return pair(xs, (e @ v) / b.sum(e, 1), (e @ v) / part)


@wrong
def one_column_short() -> Pair:
    x, w = xs = inputs((4, 12), (12, 6))
    return pair(xs, x @ w, b.slice(x, 1, 0, 11) @ b.slice(w, 0, 0, 11))


@wrong
def root_of_square_is_itself() -> Pair:
    (x,) = xs = inputs((4, 6))
    return pair(xs, b.sqrt(b.square(x)), x * 1.0)


@wrong
def eps_outside_the_root() -> Pair:
    (x,) = xs = inputs((4, 6))
    power = c.mean(b.square(x))
    return pair(xs, x / b.sqrt(power + 1e-5), x / (b.sqrt(power) + 1e-5))


@wrong
def eps_inside_the_mean() -> Pair:
    (x,) = xs = inputs((4, 6))
    program = x / b.sqrt(c.mean(b.square(x)) + 1e-5)
    return pair(xs, program, x / b.sqrt((b.sum(b.square(x), 1) + 1e-5) / b.size(x, 1)))


@wrong
def eps_left_out() -> Pair:
    (x,) = xs = inputs((4, 6))
    return pair(xs, c.rms_norm(x, eps=1e-6), c.rms_norm(x))


@wrong
def another_eps() -> Pair:
    (x,) = xs = inputs((4, 6))
    return pair(xs, c.layer_norm(x, eps=1e-5), c.layer_norm(x, eps=1e-6))


@wrong
def mean_not_subtracted() -> Pair:
    (x,) = xs = inputs((4, 6))
    return pair(xs, c.layer_norm(x), c.rms_norm(x, eps=1e-5))


@wrong
def maximum_for_sum() -> Pair:
    (x,) = xs = inputs((4, 6))
    return pair(xs, b.sum(x, 1), b.reduce_max(x, 1))


@wrong
def softmax_over_the_other_axis() -> Pair:
    (x,) = xs = inputs((5, 5))
    return pair(xs, c.softmax(x, 1), c.softmax(x, 0))


@wrong
def transposed_weight() -> Pair:
    x, w = xs = inputs((4, 5), (5, 5))
    return pair(xs, x @ w, x @ b.transpose(w))


@wrong
def splits_not_rescaled() -> Pair:
    q, k, v = xs = inputs((4, 3), (3, 12), (12, 5))
    return pair(xs, c.softmax(q @ k) @ v, split_keys(xs, safe=True, rescaled=False))


@wrong
def counted_by_every_block() -> Pair:
    (x,) = xs = inputs((4, 12))
    bb = BlockBuilder((2, 3))
    bb.store(b.sum(bb.load(x, (0, None)), 1), (0, None), reduce=Reduce.SUM)
    return pair(xs, b.sum(x, 1), bb.launch()[0])


@wrong
def accumulated_without_cutting() -> Pair:
    (x,) = xs = inputs((4, 12))
    bb = BlockBuilder((2,), 3)
    bb.store(b.accum_sum(b.sum(bb.load(x, (0,)), 1)), (0,))
    return pair(xs, b.sum(x, 1), bb.launch()[0])


@wrong
def maximum_over_blocks_for_sum() -> Pair:
    (x,) = xs = inputs((4, 12))
    bb = BlockBuilder((2, 3))
    bb.store(b.sum(bb.load(x, (0, 1)), 1), (0, None), reduce=Reduce.MAX)
    return pair(xs, b.sum(x, 1), bb.launch()[0])


@wrong
def product_for_sum() -> Pair:
    x, y = xs = inputs((4, 6), (4, 6))
    return pair(xs, x + y, x * y)


@wrong
def wrong_residual() -> Pair:
    x, y = xs = inputs((4, 6), (4, 6))
    return pair(xs, x + c.rms_norm(y), y + c.rms_norm(x))


@wrong
def gain_before_the_norm() -> Pair:
    x, g = xs = inputs((4, 6), (1, 6))
    return pair(xs, c.rms_norm(x, g), c.rms_norm(x * g))


@wrong
def mask_off_by_one() -> Pair:
    (x,) = xs = inputs((4, 5))
    program = c.softmax(b.where(c.causal_mask(4, 5), x, -inf))
    shifted = b.less(b.iota((1, 5), 1), b.iota((4, 1), 0) + 1.0)
    return pair(xs, program, c.softmax(b.where(shifted, x, -inf)))


@wrong
def magnitude_for_relu() -> Pair:
    (x,) = xs = inputs((4, 6))
    return pair(xs, c.relu(x), c.absolute(x))


@wrong
def minimum_for_maximum() -> Pair:
    x, y = xs = inputs((4, 6), (4, 6))
    return pair(xs, b.maximum(x, y), b.minimum(x, y))


@wrong
def sigmoid_for_tanh() -> Pair:
    (x,) = xs = inputs((4, 6))
    return pair(xs, b.tanh(x), b.sigmoid(x))


@wrong
def gelu_by_another_constant() -> Pair:
    (x,) = xs = inputs((4, 6))
    return pair(xs, c.gelu(x, "tanh"), x * b.sigmoid(x * 1.702))


@wrong
def concatenated_in_another_order() -> Pair:
    x, y = xs = inputs((4, 6), (4, 6))
    return pair(xs, b.concat([x, y], 1), b.concat([y, x], 1))


@wrong
def the_other_half() -> Pair:
    x, cos, sin = xs = inputs((4, 6), (4, 6), (4, 6))
    turned = b.concat([b.slice(x, 1, 3, 6), -b.slice(x, 1, 0, 3)], 1)
    return pair(xs, c.rope(x, cos, sin), x * cos + turned * sin)


@wrong
def columns_for_runs() -> Pair:
    (x,) = xs = inputs((4, 12))
    runs = b.reshape(b.sum(b.reshape(x, (4, 3, 4)), 2), (4, 3))
    return pair(xs, b.sum(x, 1, keep=3), runs)


@wrong
def broadcast_along_the_other_axis() -> Pair:
    x, y = xs = inputs((5, 5), (5, 1))
    return pair(xs, x * y, x * b.transpose(y))


@wrong
def scores_scaled_twice() -> Pair:
    q, k, v = xs = inputs((4, 4), (4, 8), (8, 5))
    return pair(
        xs, c.softmax((q @ k) * 0.5) @ v, c.softmax(((q * 0.5) @ k) * 0.5) @ v
    )  # fmt: skip
