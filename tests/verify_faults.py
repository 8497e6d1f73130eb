"""Subtle faults planted into correct candidates, for the tests of the verifier.

`CASES` maps a fault's name to (program, correct candidate, faulty candidate). The candidates are
block graphs of the named programs at sizes that the verifier shrinks; each fault is one change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from obelisk.base.errors import UserError
from obelisk.ir import BlockBuilder, DType, Graph, Node, Reduce, make_graph
from obelisk.ir import build as b
from obelisk.ir import composite as c
from obelisk.ir.op import SizeScope

Build = Callable[[str], Graph]
Case = tuple[Graph, Callable[[], Graph], Callable[[], Graph]]
CASES: dict[str, Case] = {}


def _inputs(*shapes: tuple[int, ...], dtype: DType = DType.F32) -> list[Node]:
    return [b.input_node(i, s, dtype) for i, s in enumerate(shapes)]


def _register(family: str, program: Graph, build: Build, faults: str) -> None:
    for fault in faults.split():
        CASES[f"{family}: {fault}"] = (program, partial(build, ""), partial(build, fault))


# One kernel: rms_norm with eps and gain, then a product, the division behind the product.

_NORM = _inputs((6, 96), (96, 80), (1, 96))


def _norm(fault: str) -> Graph:
    x, w, g = _NORM
    bb = BlockBuilder((5,), 4)
    wide = fault == "loop_cuts_the_wrong_dim_of_the_gain"
    tx, tw = bb.load(x, (None,), 1), bb.load(w, (1,), 0)
    tg = bb.load(g, (None,), 1)
    if wide:
        tg = b.slice(bb.load(g, (None,)), 1, 0, 24)
    square = b.square(tx)
    total = b.accum_sum(b.sum(square, 1))
    count = b.size(tx, 1, SizeScope.FULL)
    if fault == "count_of_one_tile":
        count = b.size(tx, 1)
    if fault == "sum_for_mean":
        count = b.const(1.0)
    if fault == "squares_not_accumulated":
        total = b.sum(b.square(b.slice(bb.load(x, (None,)), 1, 0, 24)), 1) * 1.0
    if fault == "square_of_the_sum":
        total = b.square(b.accum_sum(b.sum(tx, 1)))
    if fault == "mean_of_magnitudes":
        total = b.square(b.accum_sum(b.sum(b.sqrt(square), 1)))
    eps = 1e-5
    if fault == "eps_ten_times":
        eps = 1e-4
    power = total / count + eps
    if fault == "eps_before_the_mean":
        power = (total + eps) / count
    if fault == "eps_left_out":
        power = total / count
    root = b.sqrt(power)
    if fault == "eps_outside_the_root":
        root = b.sqrt(total / count) + eps
    if fault == "root_left_out":
        root = power
    scaled = tx * tg
    if fault == "gain_in_the_norm":
        root = b.sqrt(b.accum_sum(b.sum(b.square(scaled), 1)) / count + eps)
    if fault == "gain_left_out":
        scaled = tx * b.maximum(tg * 0.0, 1.0)
    out = b.accum_sum(scaled @ tw) / root
    if fault == "multiplied_by_the_root":
        out = b.accum_sum(scaled @ tw) * root
    if fault == "divided_twice":
        out = out / root
    bb.store(out, (1,))
    return make_graph(_NORM, bb.launch(), name="norm")


_register(
    "norm",
    make_graph(_NORM, [c.rms_norm(_NORM[0], _NORM[2], eps=1e-5) @ _NORM[1]], name="norm"),
    _norm,
    "count_of_one_tile sum_for_mean squares_not_accumulated square_of_the_sum mean_of_magnitudes "
    "eps_ten_times eps_before_the_mean eps_left_out eps_outside_the_root root_left_out "
    "gain_in_the_norm gain_left_out multiplied_by_the_root divided_twice "
    "loop_cuts_the_wrong_dim_of_the_gain",
)


# One kernel: safe attention, online softmax over tiles of the keys.

_ATTENTION = _inputs((2, 24, 16), (2, 16, 48), (2, 48, 16))


def _attention(fault: str) -> Graph:
    q, k, v = _ATTENTION
    bb = BlockBuilder((2, 3), 4)
    rows = None if fault == "every_block_the_first_rows" else 1
    tq = bb.load(q, (0, rows))
    if rows is None:
        tq = b.slice(tq, 1, 0, 8)
    tk, tv = bb.load(k, (0, None), 2), bb.load(v, (0, None), 1)
    if fault == "values_not_cut_by_the_loop":
        tv = b.slice(bb.load(v, (0, None)), 1, 0, 12)
    s = (tq @ tk) * (0.5 if fault == "scale_squared_root" else 0.25)
    peak = b.running_max(b.reduce_max(s, 2))
    if fault == "maximum_over_the_wrong_axis":
        peak = b.running_max(b.reduce_max(b.reduce_max(s, 1), 2))
    e = b.exp(s - peak)
    if fault == "maximum_not_subtracted":
        e = b.exp(s)
    if fault == "maximum_added":
        e = b.exp(s + peak)
    top, bottom = b.accum_rescale(e @ tv, peak), b.accum_rescale(b.sum(e, 2), peak)
    if fault == "numerator_not_rescaled":
        top = b.accum_sum(e @ tv)
    if fault == "denominator_not_rescaled":
        bottom = b.accum_sum(b.sum(e, 2))
    if fault == "nothing_rescaled":
        top, bottom = b.accum_sum(e @ tv), b.accum_sum(b.sum(e, 2))
    if fault == "own_maximum_of_each_tile":
        e = b.exp(s - b.reduce_max(s, 2))
        top, bottom = b.accum_sum(e @ tv), b.accum_sum(b.sum(e, 2))
    if fault == "denominator_is_a_maximum":
        bottom = b.accum_rescale(b.reduce_max(e, 2), peak)
    if fault == "unsafe_exponential":
        e = b.exp(s)
        top, bottom = b.accum_sum(e @ tv), b.accum_sum(b.sum(e, 2))
    if fault == "keys_for_values":
        top = b.accum_rescale(e @ (b.transpose(tk) + tv * 0.0), peak)
    bb.store(top / bottom, (0, 1))
    return make_graph(_ATTENTION, bb.launch(), name="attention")


_register(
    "attention",
    make_graph(
        _ATTENTION,
        [c.softmax((_ATTENTION[0] @ _ATTENTION[1]) * 0.25) @ _ATTENTION[2]],
        name="attention",
    ),
    _attention,
    "every_block_the_first_rows values_not_cut_by_the_loop scale_squared_root "
    "maximum_not_subtracted maximum_added numerator_not_rescaled denominator_not_rescaled "
    "nothing_rescaled own_maximum_of_each_tile denominator_is_a_maximum unsafe_exponential "
    "keys_for_values",
)


# Two kernels: unsafe attention, the keys split over blocks.


def _split(fault: str) -> Graph:
    q, k, v = _ATTENTION
    bb = BlockBuilder((2, 3, 4), 2)
    tq = bb.load(q, (0, 1, None))
    tk, tv = bb.load(k, (0, None, 2), 2), bb.load(v, (0, None, 1), 1)
    e = b.exp(tq @ tk)
    if fault == "exponential_of_the_sum":
        e = b.exp(b.sum(tq @ tk, 2)) * b.exp((tq @ tk) * 0.0)
    bb.store(b.accum_sum(e @ tv), (0, 1, 2))
    bb.store(b.accum_sum(b.sum(e, 2)), (0, 1, 2))
    top, bottom = bb.launch()
    end = BlockBuilder((2, 3))
    t, u = end.load(top, (0, 1)), end.load(bottom, (0, 1))
    num, den = b.sum(t, 2, keep=16), b.sum(u, 2)
    if fault == "one_split_short":
        num, den = b.sum(b.slice(t, 2, 0, 48), 2, keep=16), b.sum(b.slice(u, 2, 0, 3), 2)
    if fault == "one_split_short_below":
        den = b.sum(b.slice(u, 2, 0, 3), 2)
    if fault == "runs_for_columns":
        num = b.reshape(b.sum(b.reshape(t, (1, 8, 16, 4)), 3), (1, 8, 16))
    if fault == "maximum_over_splits":
        num = b.reduce_max(t, 2, keep=16)
    if fault == "mean_over_splits":
        den = den / b.size(u, 2)
    if fault == "quotients_summed":
        pieces = b.reshape(t, (1, 8, 4, 16)) / b.reshape(u, (1, 8, 4, 1))
        num, den = b.reshape(b.sum(pieces, 2), (1, 8, 16)), b.const(1.0)
    end.store(num / den, (0, 1))
    return make_graph(_ATTENTION, end.launch(), name="split")


_EXP = b.exp(_ATTENTION[0] @ _ATTENTION[1])
_register(
    "split",
    make_graph(_ATTENTION, [(_EXP / b.sum(_EXP, 2)) @ _ATTENTION[2]], name="split"),
    _split,
    "exponential_of_the_sum one_split_short one_split_short_below runs_for_columns "
    "maximum_over_splits mean_over_splits quotients_summed",
)


# One kernel: gated MLP with two accumulators.

_GATED = _inputs((6, 96), (96, 80), (96, 80))


def _gated(fault: str) -> Graph:
    x, w, u = _GATED
    bb = BlockBuilder((5,), 4)
    tx, tw = bb.load(x, (None,), 1), bb.load(w, (1,), 0)
    tu = bb.load(w if fault == "one_weight_twice" else u, (1,), 0)
    gate, up = b.accum_sum(tx @ tw), b.accum_sum(tx @ tu)
    if fault == "gate_and_up_swapped":
        gate, up = up, gate
    out = c.silu(gate) * up
    if fault == "silu_in_the_loop":
        out = b.accum_sum(c.silu(tx @ tw)) * up
    if fault == "sigmoid_for_silu":
        out = b.sigmoid(gate) * up
    if fault == "gelu_for_silu":
        out = c.gelu(gate) * up
    if fault == "relu_for_silu":
        out = c.relu(gate) * up
    if fault == "silu_of_the_product":
        out = c.silu(gate * up)
    if fault == "product_in_the_loop":
        out = b.accum_sum(c.silu(tx @ tw) * (tx @ tu))
    if fault == "sum_for_product":
        out = c.silu(gate) + up
    if fault == "overflowing_scale":
        out = c.silu(gate) * ((up * 1e30) * 1e-30)
    if fault == "vanishing_scale":
        out = c.silu(gate) * ((up * 1e-30) * 1e-15 * 1e30 * 1e15)
    bb.store(out, (1,))
    inputs = _GATED
    if fault == "one_weight_twice":
        return make_graph(inputs, b.run_block(bb.finish(), [x, w]), name="gated")
    return make_graph(inputs, bb.launch(), name="gated")


_register(
    "gated",
    make_graph(_GATED, [c.silu(_GATED[0] @ _GATED[1]) * (_GATED[0] @ _GATED[2])], name="gated"),
    _gated,
    "one_weight_twice gate_and_up_swapped silu_in_the_loop sigmoid_for_silu gelu_for_silu "
    "relu_for_silu silu_of_the_product product_in_the_loop sum_for_product overflowing_scale "
    "vanishing_scale",
)


# One kernel: a layer norm of rows, then a product whose K is split over blocks.

_SPLIT_K = _inputs((8, 96), (96, 80), (8, 80))


def _split_k(fault: str) -> Graph:
    x, w, y = _SPLIT_K
    bb = BlockBuilder((5, 4))
    tx, tw = bb.load(x, (None, 1)), bb.load(w, (1, 0))
    reduce = Reduce.MAX if fault == "blocks_fold_by_maximum" else Reduce.SUM
    part = tx @ tw
    if fault == "bias_in_every_block":
        part = part + bb.load(y, (1, None))
    if fault == "every_block_all_of_k":
        part = bb.load(x, (None, None)) @ bb.load(w, (1, None))
    bb.store(part, (1, None), reduce=reduce)
    order = [n for n in (x, w, y) if n in bb.inputs]
    (total,) = b.run_block(bb.finish(), bb.inputs) if order else ()
    out = total + y
    if fault == "bias_in_every_block":
        out = total
    if fault == "bias_twice":
        out = out + y
    if fault == "bias_subtracted":
        out = total - y
    if fault == "square_root_of_square":
        out = b.sqrt(b.square(out))
    if fault == "rounded_through_half_precision":
        out = b.cast(b.cast(out, "f16"), "f32")
    return make_graph(_SPLIT_K, [out], name="split_k")


_register(
    "split_k",
    make_graph(_SPLIT_K, [_SPLIT_K[0] @ _SPLIT_K[1] + _SPLIT_K[2]], name="split_k"),
    _split_k,
    "blocks_fold_by_maximum bias_in_every_block every_block_all_of_k bias_twice bias_subtracted "
    "square_root_of_square rounded_through_half_precision",
)


# Maps that cannot be: building the graph says why, and that is the refutation.


def _maps(fault: str) -> Graph:
    x, w, y = _SPLIT_K
    bb = BlockBuilder((5, 4), 2)
    tx, tw = bb.load(x, (None, 0), 1), bb.load(w, (1, None), 0)
    value: Node = b.accum_sum(tx @ tw)
    omap: tuple[int | None, ...] = (1, 0)
    if fault == "blocks_overlap":
        omap = (1, None)
    if fault == "iterations_overlap":
        value = tx @ tw
    if fault == "two_axes_on_one_dim":
        omap = (1, 1)
    if fault == "tiles_leave_a_gap":
        uneven = BlockBuilder((7, 4), 2)
        value = b.accum_sum(uneven.load(x, (None, 0), 1) @ uneven.load(w, (1, None), 0))
        uneven.inputs, bb = [x, w], uneven
        omap = (0, 1)
    bb.store(value, omap)
    return make_graph(_SPLIT_K, [b.run_block(bb.finish(), bb.inputs)[0] + y], name="maps")


_register(
    "maps",
    CASES["split_k: bias_twice"][0],
    _maps,
    "blocks_overlap iterations_overlap two_axes_on_one_dim tiles_leave_a_gap",
)


def built(make: Callable[[], Graph]) -> Graph | UserError:
    """The graph, or the error that building it raised."""
    try:
        return make()
    except UserError as e:
        return e
