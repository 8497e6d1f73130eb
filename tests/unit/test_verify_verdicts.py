"""The verdict itself: interfaces, bounds, sizes, what is never claimed; nothing is raised."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests import machine_candidates as mc
from tests.verify_pairs import EQUAL, inputs

from obelisk.base.errors import MalformedGraph
from obelisk.ir import BlockBuilder, DType, Graph, Node, make_graph
from obelisk.ir import build as b
from obelisk.ir import composite as c
from obelisk.verify import VerdictKind, Verifier, refuted_malformed, verify, verify_many
from obelisk.verify.instances import instances
from obelisk.verify.judge import interface_mismatch, size_bound


def _two(dtype: DType = DType.F32) -> Graph:
    xs = inputs((4, 6), (4, 6), dtype=dtype)
    return make_graph(xs, [xs[0] + xs[1], xs[0] * xs[1]])


@pytest.mark.parametrize(
    ("candidate", "said"),
    [
        (lambda: make_graph(inputs((4, 6)), [inputs((4, 6))[0] * 1.0] * 2), "2 inputs"),
        (lambda: make_graph(_two().inputs, _two().outputs[:1]), "2 outputs"),
        (lambda: _two(DType.F16), "input 0 is f32[4, 6] in the program, f16[4, 6]"),
        (
            lambda: make_graph(_two().inputs, [_two().outputs[0], b.transpose(_two().outputs[1])]),
            "output 1 is f32[4, 6] in the program, f32[6, 4]",
        ),
        (
            lambda: make_graph(_two().inputs, [b.cast(o, "f16") for o in _two().outputs]),
            "output 0 is f32[4, 6] in the program, f16[4, 6]",
        ),
    ],
)
def test_interfaces_must_agree(candidate: Callable[[], Graph], said: str) -> None:
    verdict = verify(_two(), candidate())
    assert verdict.kind is VerdictKind.REFUTED
    assert said in (verdict.witness or "")
    assert interface_mismatch(_two(), _two()) is None


def test_outputs_are_compared_in_order() -> None:
    program = _two()
    swapped = make_graph(program.inputs, program.outputs[::-1])
    assert verify(program, swapped).kind is VerdictKind.REFUTED
    assert verify(program, program).kind is VerdictKind.PROVED


def test_malformed_candidates_are_refuted_and_say_so() -> None:
    error = MalformedGraph("grid axis 1 of 4 blocks is not mapped by the store: blocks overlap")
    verdict = refuted_malformed(error)
    assert verdict.kind is VerdictKind.REFUTED
    assert verdict.witness == f"malformed: {error}"
    seen: list[int] = []
    program = _two()
    verdicts = verify_many(
        program, [program, error, program], on_verdict=lambda i, v: seen.append(i)
    )
    assert [v.kind.value for v in verdicts] == ["proved", "refuted", "proved"]
    assert seen == [0, 1, 2]


def test_same_seed_same_verdict() -> None:
    program, candidate = EQUAL["attention_online"]()
    first, second = verify(program, candidate, seed=5), verify(program, candidate, seed=5)
    assert (first.kind, first.bound, first.witness) == (second.kind, second.bound, second.witness)


def test_bound_without_exponentials_is_schwartz_zippel_with_its_degree() -> None:
    verdict = verify(*EQUAL["associated_matmul"]())
    assert "2 field draws at full size" in verdict.bound
    assert "Schwartz-Zippel, degree 3" in verdict.bound
    assert "below 1e-17" in verdict.bound


def test_bound_with_few_exponentials_is_theorem_2() -> None:
    verdict = verify(*EQUAL["quotient_by_negative_exponent"]())
    assert "Theorem 2" in verdict.bound


def test_bound_with_many_exponentials_is_said_to_be_empty() -> None:
    verdict = verify(*EQUAL["softmax_divides_last"]())
    assert "textbook bound is empty" in verdict.bound


def test_functions_taken_as_arbitrary_are_named() -> None:
    assert "max taken as arbitrary" in verify(*EQUAL["maximum_in_loop"]()).bound


def test_a_second_exponential_is_never_guessed() -> None:
    (x,) = xs = inputs((4, 6))
    program = make_graph(xs, [c.softmax(c.softmax(x))])
    e = b.exp(c.softmax(x))
    verdict = verify(program, make_graph(xs, [e / b.sum(e, 1)]))
    assert verdict.kind in (VerdictKind.PROVED, VerdictKind.UNKNOWN)
    twice = b.exp(b.exp(x))
    wrong = verify(make_graph(xs, [twice]), make_graph(xs, [b.exp(b.exp(x) * 1.0001)]))
    assert wrong.kind is VerdictKind.REFUTED
    # max(x + c, y + c) = max(x, y) + c holds, but not for the order that the fields use.
    x, y, z = xs = inputs((4, 6), (4, 6), (4, 1))
    moved = verify(make_graph(xs, [b.maximum(x, y) + z]), make_graph(xs, [b.maximum(x + z, y + z)]))
    assert moved.kind is VerdictKind.PROVED  # by a rule; the bound owns that the fields could not
    assert "fields cannot say" in moved.bound
    # max(2 x, 2 y) = 2 max(x, y) holds as well, and no rule says so.
    xs = xs[:2]
    twice = make_graph(xs, [b.maximum(x, y) * 2.0])
    scaled = verify(twice, make_graph(xs, [b.maximum(x * 2.0, y * 2.0)]))
    assert scaled.kind is VerdictKind.UNKNOWN
    assert "max" in scaled.bound
    assert scaled.witness is None


def test_large_graphs_are_tested_small_and_the_sizes_are_named() -> None:
    program = mc.norm_linear_plain(2, 4096, 6144, DType.F16)
    candidate = mc.norm_linear_fused(2, 4096, 6144, 96, 16, DType.F16)
    verdict = verify(program, candidate)
    assert verdict.kind is VerdictKind.PROVED
    found = instances(program, candidate, 0)
    assert [i.ragged for i in found] == [False, False, True]
    for instance in found:
        assert instance.sizes in verdict.bound
        assert max(n for node in instance.program.inputs for n in node.shape) < 100
        assert not instance.full


def test_constants_that_fit_one_size_only_are_accepted_at_that_size_alone() -> None:
    """A mean over 512 spelled as a factor holds here and nowhere else; the bound says so."""
    x, w = xs = inputs((4, 512), (512, 96))
    program = make_graph(xs, [c.rms_norm(x) @ w])
    factor = b.sum(b.square(x), 1) * (1 / 512)
    good = make_graph(xs, [(x / b.sqrt(factor)) @ w])
    bad = make_graph(xs, [(x / b.sqrt(b.sum(b.square(x), 1) * (1 / 256))) @ w])
    assert size_bound(program, good)
    verdict = verify(program, good)
    assert verdict.kind is VerdictKind.TESTED
    assert "these sizes only" in verdict.bound
    assert verify(program, bad).kind is VerdictKind.REFUTED


@pytest.mark.parametrize(
    ("rows", "heads", "width"), [(16, 16, 128), (128, 16, 128), (32, 32, 32), (7, 16, 128)]
)
def test_a_reshape_may_take_apart_one_of_two_equal_extents(
    rows: int, heads: int, width: int
) -> None:
    """Rows as many as heads, or as a head is wide: judged at small sizes, not unknown; and a
    candidate that takes rows for heads, which such extents allow, is refuted.
    """
    inner = heads * width
    x, w, cos, out = xs = inputs((rows, 640), (640, inner), (rows, width), (inner, 640))

    def layer(product: Node, swapped: bool = False) -> Node:
        split = b.reshape(product, (rows, heads, width))
        if not swapped:
            split = b.transpose(split, (1, 0, 2))
        scores = c.softmax((split * cos) @ b.transpose(split))
        return b.reshape(b.transpose(scores @ split, (1, 0, 2)), (rows, inner)) @ out

    program = make_graph(xs, [layer(x @ w)])
    block = BlockBuilder((8,), 4)
    tx, tw = block.load(x, (None,), 1), block.load(w, (1,), 0)
    block.store(b.accum_sum(tx @ tw), (1,))
    (product,) = block.launch()
    verdict = verify(program, make_graph(xs, [layer(product)]))
    assert verdict.kind is VerdictKind.PROVED, str(verdict)
    assert "full size" not in verdict.bound.split("floats")[0]
    assert f"x0[{rows},640]" not in verdict.bound
    if rows == heads:
        wrong = make_graph(xs, [layer(product, swapped=True)])
        assert verify(program, wrong).kind is VerdictKind.REFUTED


def test_full_size_is_run_when_asked_for() -> None:
    program, candidate = mc.lora_plain(DType.F32), mc.lora_fused(DType.F32, 64)
    bound = verify(program, candidate, full_size=True).bound
    assert "x0[16,256]" in bound


def test_a_verifier_serves_many_candidates() -> None:
    program = mc.norm_linear_plain(2, 96, 80, DType.F32)
    verifier = Verifier(program)
    good = mc.norm_linear_fused(2, 96, 80, 5, 4, DType.F32)
    x, w = program.inputs
    bad = make_graph(program.inputs, [c.rms_norm(x, eps=1e-5) @ w])
    kinds = [verifier.verify(g).kind for g in (good, bad, good)]
    assert kinds == [VerdictKind.PROVED, VerdictKind.REFUTED, VerdictKind.PROVED]


def test_integer_graphs() -> None:
    x, y = xs = inputs((4, 6), (4, 6), dtype=DType.I32)
    program = make_graph(xs, [b.sum((x + y) * x, 1)])
    assert verify(program, make_graph(xs, [b.sum(x * x + y * x, 1)])).accepted
    assert verify(program, make_graph(xs, [b.sum(x * x - y * x, 1)])).kind is VerdictKind.REFUTED


def test_one_element_graphs() -> None:
    (x,) = xs = inputs((1, 1))
    program = make_graph(xs, [c.softmax(x)])
    assert verify(program, program).accepted
    bb = BlockBuilder((1,))
    bb.store(c.softmax(bb.load(x, (None,))), (None,))
    assert verify(program, make_graph(xs, bb.launch())).accepted


def _strided(strides: tuple[int, ...] | None, fused: bool, omap: int = 1) -> Graph:
    """x w, x lying by `strides`; fused, with blocks laid along dim `omap` of the result."""
    x, w = b.input_node(0, (8, 8), strides=strides), b.input_node(1, (8, 8))
    if not fused:
        return make_graph([x, w], [x @ w])
    bb = BlockBuilder((2,), loop=2)
    product = bb.load(x, (None,), fmap=1) @ bb.load(w, (1,), fmap=0)
    total = b.accum_sum(product)
    bb.store(total if omap == 1 else b.reshape(total, (4, 8)), (omap,))
    return make_graph([x, w], bb.launch())


def test_the_layout_of_inputs_is_part_of_the_interface() -> None:
    """A kernel made from the candidate reads memory by the candidate's strides: they must be the
    program's. Which strides these are changes nothing else; extents of 1 have none.
    """
    columns = (1, 8)
    assert verify(_strided(columns, False), _strided(columns, True)).kind is VerdictKind.PROVED
    for mine, theirs in ((columns, None), (None, columns), ((16, 1), (8, 1))):
        verdict = verify(_strided(mine, False), _strided(theirs, True))
        assert verdict.kind is VerdictKind.REFUTED
        assert "input 0 lies in memory with strides" in str(verdict.witness)
        assert "declare the same strides" in str(verdict.witness)
    one = [make_graph([x], [x * 2.0]) for x in
           (b.input_node(0, (1, 8), strides=s) for s in ((77, 1), None))]  # fmt: skip
    assert verify(*one).accepted


def test_where_blocks_lay_their_results_is_judged() -> None:
    """The same tiles along another dim are another tensor, whatever the strides of the inputs."""
    for strides in (None, (1, 8)):
        assert verify(_strided(strides, False), _strided(strides, True, 1)).accepted
        wrong = verify(_strided(strides, False), _strided(strides, True, 0))
        assert wrong.kind is VerdictKind.REFUTED


def test_aliasing_inputs_are_judged_for_all_tensors() -> None:
    """Rows that are one row in memory: using that is no rewrite; verdicts are about tensors."""
    x = b.input_node(0, (4, 6), strides=(0, 1))
    program = make_graph([x], [b.sum(x, 0)])
    only_first = make_graph([x], [b.slice(x, 0, 0, 1) * 4.0])
    assert verify(program, program).accepted
    assert verify(program, only_first).kind is VerdictKind.REFUTED
