"""The float judge: the yardstick of record R44, the ranges of record R11, its inputs, and what it
does where a program itself is inaccurate.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import inf

import numpy as np
import pytest
from tests.verify_pairs import attention_online, inputs

from obelisk.ir import BlockBuilder, DType, Graph, Node, make_graph
from obelisk.ir import build as b
from obelisk.ir import composite as c
from obelisk.ir.numeric import Precision, run
from obelisk.verify import VerdictKind, verify
from obelisk.verify.floats import DISTRIBUTIONS, Difference, FloatJudge, draw_inputs
from obelisk.verify.instances import full_instance
from obelisk.verify.rounding import Rounding


def _layer_norm(x: Node, eps: float, centred: bool = True) -> Node:
    d = x - c.mean(x) if centred else x
    return d / b.sqrt(c.mean(b.square(d)) + eps)


def _reciprocal(normed: Node, eps: float = 1e-6) -> Node:
    return 1.0 / (c.absolute(normed) + eps)


class TestIllConditioned:
    """R44: reciprocal(|layer_norm(x)| + 1e-6) on (64, 128) fp32."""

    def graphs(self, candidate: Node, x: Node) -> tuple[Graph, Graph]:
        return make_graph([x], [_reciprocal(_layer_norm(x, 1e-5))]), make_graph([x], [candidate])

    def test_a_fixed_tolerance_would_fail_here(self) -> None:
        """In fp32 the program is far from its own float64 value, relative to one."""
        (x,) = inputs((64, 128))
        program, _ = self.graphs(x * 1.0, x)
        arrays = draw_inputs(program.inputs, "normal", 0)
        exact, own = run(program, arrays)[0], run(program, arrays, Precision.WORKING)[0]
        assert np.abs(exact).max() > 1000
        assert np.abs(own - exact).max() > 1e-3

    def test_an_equal_rewrite_is_accepted(self) -> None:
        (x,) = inputs((64, 128))
        centred = x - b.sum(x, 1) * (1 / 128)
        scale = b.rsqrt(b.sum(b.square(centred), 1) / 128.0 + 1e-5)
        program, candidate = self.graphs(_reciprocal(centred * scale), x)
        for seed in range(3):
            verdict = verify(program, candidate, seed=seed)
            assert verdict.accepted, str(verdict)

    @pytest.mark.parametrize(
        "fault", ["eps of the reciprocal", "eps of the norm", "mean not subtracted", "sum for mean"]
    )
    def test_wrong_rewrites_are_refuted(self, fault: str) -> None:
        (x,) = inputs((64, 128))
        bad = {
            "eps of the reciprocal": _reciprocal(_layer_norm(x, 1e-5), 1e-5),
            "eps of the norm": _reciprocal(_layer_norm(x, 1e-6)),
            "mean not subtracted": _reciprocal(_layer_norm(x, 1e-5, centred=False)),
            "sum for mean": _reciprocal(
                (x - c.mean(x)) / b.sqrt(b.sum(b.square(x - c.mean(x)), 1) + 1e-5)
            ),
        }[fault]
        for seed in range(3):
            assert verify(*self.graphs(bad, x), seed=seed).kind is VerdictKind.REFUTED


def _attention(xs: list[Node], safe: bool, cast: bool = False) -> Node:
    q, k, v = xs
    s = q @ k
    if cast:
        s = b.cast(s, "f32")
    e = b.exp(s - b.reduce_max(s, 1)) if safe else b.exp(s)
    p = e / b.sum(e, 1)
    return b.cast(p, v.dtype) @ v


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32])
@pytest.mark.parametrize("keys", [1, 17, 256])
class TestRange:
    """R11: the exponential without the row maximum overflows where the safe softmax does not."""

    def graphs(self, dtype: DType, keys: int, safe: bool) -> tuple[Graph, Graph]:
        xs = inputs((6, 8), (8, keys), (keys, 8), dtype=dtype)
        return (
            make_graph(xs, [_attention(xs, safe=True)]),
            make_graph(xs, [_attention(xs, safe=safe)]),
        )

    def test_unsafe_candidates_of_safe_programs_are_refuted(self, dtype: DType, keys: int) -> None:
        verdict = verify(*self.graphs(dtype, keys, safe=False))
        assert verdict.kind is VerdictKind.REFUTED, str(verdict)
        assert "not finite where the program is finite" in (verdict.witness or "")

    def test_safe_candidates_are_accepted(self, dtype: DType, keys: int) -> None:
        assert verify(*self.graphs(dtype, keys, safe=True)).accepted

    def test_safe_candidates_of_unsafe_programs_are_accepted(self, dtype: DType, keys: int) -> None:
        safe, unsafe = self.graphs(dtype, keys, safe=False)
        assert verify(unsafe, safe).accepted


def test_online_softmax_is_as_safe_as_its_program() -> None:
    program, candidate = attention_online()
    judge = FloatJudge(program, 3)
    assert judge.small(full_instance(program, candidate)) is None


def test_overflow_of_an_intermediate_is_refuted_and_names_its_inputs() -> None:
    x, y = xs = inputs((4, 6), (4, 6))
    program = make_graph(xs, [x + y])
    candidate = make_graph(xs, [((x + y) * 1e30) / 1e30])
    verdict = verify(program, candidate)
    assert verdict.kind is VerdictKind.REFUTED
    assert "'near-overflow' x" in (verdict.witness or "")


def test_nan_at_zero_is_refuted() -> None:
    (x,) = xs = inputs((4, 6))
    program = make_graph(xs, [b.square(x) + 1.0])
    candidate = make_graph(xs, [(b.square(x) * x) / x + 1.0])
    verdict = verify(program, candidate)
    assert verdict.kind is VerdictKind.REFUTED
    assert "candidate nan" in (verdict.witness or "")


def test_a_candidate_that_rounds_where_the_program_does_not_is_refuted() -> None:
    (x,) = xs = inputs((8, 16))
    program = make_graph(xs, [b.sum(x, 1)])
    candidate = make_graph(xs, [b.sum(b.cast(b.cast(x, "bf16"), "f32"), 1)])
    verdict = verify(program, candidate)
    assert verdict.kind is VerdictKind.REFUTED
    assert "4x the program's" in (verdict.witness or "")


def test_a_candidate_that_is_better_than_its_program_is_accepted() -> None:
    """Half precision between kernels in the program, none in the candidate."""
    (x,) = xs = inputs((8, 16), dtype=DType.F16)
    program = make_graph(xs, [b.exp(b.sum(b.square(x), 1) * 0.01)])
    wide = b.cast(x, "f32")
    candidate = make_graph(xs, [b.cast(b.exp(b.sum(b.square(wide), 1) * 0.01), "f16")])
    assert verify(program, candidate).accepted


def test_inputs_are_reproducible_and_as_described() -> None:
    nodes = [b.input_node(0, (5, 7), DType.F16), b.input_node(1, (3,), DType.I32)]
    for name, _ in DISTRIBUTIONS:
        first, second = draw_inputs(nodes, name, 4), draw_inputs(nodes, name, 4)
        assert all((u == v).all() for u, v in zip(first, second, strict=True))
        assert first[0].dtype == np.float16
        assert first[1].dtype == np.int32
        assert abs(first[1]).max() <= 4
    assert (draw_inputs(nodes, "negative", 0)[0] <= 0).all()
    assert (draw_inputs(nodes, "one-hot", 0)[0].sum(-1) == 1).all()
    assert not draw_inputs(nodes, "zeros", 0)[0].any()
    assert np.isfinite(draw_inputs(nodes, "normal", 0, 1e9)[0]).all()


def test_masked_scores_do_not_count_as_overflow() -> None:
    q, k, v = xs = inputs((6, 4), (6, 4), (6, 4))
    program = make_graph(xs, [c.attention(q, k, v, causal=True)])
    again = b.where(c.causal_mask(6, 6), (q @ b.transpose(k)) * 0.5, -inf)
    e = b.exp(again - b.reduce_max(again, 1))
    assert verify(program, make_graph(xs, [(e @ v) / b.sum(e, 1)])).accepted


Rewrite = Callable[[list[Node]], Node]
_SIZES = [
    (h, r, d, n) for (h, r), d, n in product(((1, 1), (2, 2), (2, 5)), (1, 2, 4, 16), (1, 2, 4, 8))
]


def _unsafe(xs: list[Node]) -> Node:
    q, k, v = xs
    e = b.exp(q @ k)
    return (e / b.sum(e, 2)) @ v


def _behind(xs: list[Node]) -> Node:
    q, k, v = xs
    e = b.exp(q @ k)
    return (e @ v) / b.sum(e, 2)


def _reciprocals(xs: list[Node]) -> Node:
    q, k, v = xs
    e = b.exp(q @ k)
    return (e * (1.0 / b.sum(e, 2))) @ v


def _stable(xs: list[Node]) -> Node:
    q, k, v = xs
    e = b.exp(q @ k - b.reduce_max(q @ k, 2))
    return (e @ v) / b.sum(e, 2)


def _loop_over_keys(xs: list[Node]) -> Node:
    q, k, v = xs
    block = BlockBuilder((q.shape[0],), 2 if k.shape[2] > 1 else 1)
    tq, tk, tv = block.load(q, (0,)), block.load(k, (0,), 2), block.load(v, (0,), 1)
    e = b.exp(tq @ tk)
    block.store(b.accum_sum(e @ tv) / b.accum_sum(b.sum(e, 2)), (0,))
    return block.launch()[0]


def _loop_over_depth(xs: list[Node]) -> Node:
    q, k, v = xs
    block = BlockBuilder((q.shape[0],), 2 if q.shape[2] > 1 else 1)
    tq, tk, tv = block.load(q, (0,), 2), block.load(k, (0,), 1), block.load(v, (0,))
    e = b.exp(b.accum_sum(tq @ tk))
    block.store((e @ tv) / b.sum(e, 2), (0,))
    return block.launch()[0]


def _judge(
    size: tuple[int, int, int, int], dtype: DType, rewrite: Rewrite, seed: int
) -> Difference | None:
    h, r, d, n = size
    xs = inputs((h, r, d), (h, d, n), (h, n, d), dtype=dtype)
    program, candidate = make_graph(xs, [_unsafe(xs)]), make_graph(xs, [rewrite(xs)])
    return FloatJudge(program, seed).small(full_instance(program, candidate))


class TestTinyUnsafeSoftmax:
    """exp, sum, divide at a handful of elements: sums of exponentials are denormal there, scores of
    some hundreds lose digits, and a program's own error can be zero by luck.
    """

    @pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
    @pytest.mark.parametrize(
        "rewrite", [_behind, _reciprocals, _stable, _loop_over_keys, _loop_over_depth]
    )
    def test_right_rewrites_are_not_refuted(self, rewrite: Rewrite, dtype: DType) -> None:
        for size in _SIZES:
            for seed in (0, 1):
                found = _judge(size, dtype, rewrite, seed)
                assert found is None, f"{size}: {found}"

    @pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
    @pytest.mark.parametrize(
        "fault", ["a millionth more", "eps below", "values of the next row", "half the keys"]
    )
    def test_wrong_ones_are(self, fault: str, dtype: DType) -> None:
        def wrong(xs: list[Node]) -> Node:
            q, k, v = xs
            n = k.shape[2]
            if fault == "half the keys":
                k, v = b.slice(k, 2, 0, n // 2), b.slice(v, 1, 0, n // 2)
            if fault == "values of the next row":
                v = b.concat([b.slice(v, 1, 1, n), b.slice(v, 1, 0, 1)], 1)
            e = b.exp(q @ k)
            total = b.sum(e, 2) + (1e-6 if fault == "eps below" else 0.0)
            out = (e @ v) / total
            return out * (1 + 1e-6) if fault == "a millionth more" else out

        for size in _SIZES:
            for seed in (0, 1):
                if size[3] > 1:
                    assert _judge(size, dtype, wrong, seed) is not None, size

    @pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
    def test_a_loss_of_range_is_still_seen_where_the_program_has_none(self, dtype: DType) -> None:
        """The safe softmax at the same sizes (of some rows), against one without its maximum, and
        one whose exponentials are scaled down first.
        """
        for size in (s for s in _SIZES if s[0] > 1):
            h, r, d, n = size
            xs = q, k, v = inputs((h, r, d), (h, d, n), (h, n, d), dtype=dtype)
            program = make_graph(xs, [_stable(xs)])
            small = b.exp(q @ k - b.reduce_max(q @ k, 2)) * 1e-20 * 1e-20
            for candidate in (_unsafe(xs), (small @ v) / b.sum(small, 2)):
                graph = make_graph(xs, [candidate])
                assert FloatJudge(program, 0).small(full_instance(program, graph)), size


def _rounding(node: Node, arrays: list[np.ndarray]) -> Rounding:
    graph = make_graph([b.input_node(0, arrays[0].shape, DType.F32)], [node])
    return Rounding(graph, arrays, run(graph, arrays), 0)


class TestRounding:
    def test_moves_maxima_and_exact_zeros_do_not_stray(self) -> None:
        x = b.input_node(0, (3, 4), DType.F32)
        arrays = [np.array([[0, 0, 0, 0], [1e-40, 2, 3, 4], [-1, 0, 1e30, 7]], np.float32)]
        for node in (b.transpose(x), b.reduce_max(x, 1), b.where(b.less(x, 1.0), x, 2.0)):
            for precision in Precision:
                assert (_rounding(node, arrays).spread(precision, 0) == 0).all()
        zeros = _rounding(x * 3.0, arrays).spread(Precision.WORKING, 0)
        assert (zeros[0] == 0).all()
        assert (zeros[1] > 0).all()

    def test_a_sum_strays_by_some_units_of_its_terms(self) -> None:
        x = b.input_node(0, (2, 64), DType.F32)
        arrays = draw_inputs([x], "normal", 0)
        for precision, unit in ((Precision.WORKING, 2.0**-23), (Precision.EXACT, 2.0**-52)):
            off = _rounding(b.sum(x, 1), arrays).spread(precision, 0)
            assert (off > unit).all()
            assert (off < 64 * unit).all()

    def test_what_depends_on_the_smallest_numbers_does_not_stay_finite(self) -> None:
        x = b.input_node(0, (4, 2), DType.F32)
        arrays = [np.array([[-90, -91], [-120, -100], [-2, -3], [87, 80]], np.float32)]
        e = b.exp(x)
        unsafe = _rounding(e / b.sum(e, 1), arrays).stays_finite(Precision.WORKING, 0)
        assert unsafe[:, 0].tolist() == [False, False, True, False]
        s = b.exp(x - b.reduce_max(x, 1))
        safe = _rounding(s / b.sum(s, 1), arrays).stays_finite(Precision.WORKING, 0)
        assert safe.all()
        whole = _rounding(b.sigmoid(x), [arrays[0] * 1e6]).stays_finite(Precision.WORKING, 0)
        assert whole[2:, 0].any()
