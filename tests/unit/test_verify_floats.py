"""The float judge: the yardstick of record R44, the ranges of record R11, and its inputs."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from tests.verify_pairs import attention_online, inputs

from obelisk.ir import DType, Graph, Node, make_graph
from obelisk.ir import build as b
from obelisk.ir import composite as c
from obelisk.ir.numeric import Precision, run
from obelisk.verify import VerdictKind, verify
from obelisk.verify.floats import DISTRIBUTIONS, FloatJudge, draw_inputs
from obelisk.verify.instances import full_instance


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
