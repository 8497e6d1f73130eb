"""Families end to end: one search and one verdict, then right results at every size, quickly."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.lowering import call_overhead

import obelisk as ob
from obelisk.__main__ import main
from obelisk.app import sized
from obelisk.app.cli_family import load_family
from obelisk.app.programs import find_program
from obelisk.app.sized import CompiledFamily
from obelisk.base.errors import CallError, MalformedGraph, ShapeError, UserError
from obelisk.ir import KernelGraph, Node, random_inputs, run
from obelisk.ir.family import Dim, FamilyGraph, family_text, parse_family
from obelisk.machine import estimate
from obelisk.verify import VerdictKind

pytestmark = pytest.mark.usefixtures("compiler")


def normed(g: KernelGraph, batch: int) -> Node:
    x, w = g.input((batch, 256), name="x"), g.input((256, 96), name="w")
    return g.matmul(g.rms_norm(x), w)


def gqa(g: KernelGraph, context: int) -> Node:
    q = g.input((2, 16, 32), name="q")
    k, v = g.input((2, 32, context), name="k"), g.input((2, context, 32), name="v")
    return g.matmul(g.softmax(g.matmul(q, k)), v)


def gated(g: KernelGraph, batch: int) -> Node:
    """R10: the gated MLP with its down projection."""
    x = g.input((batch, 96), name="x")
    w1, w2, w3 = (g.input(s, name=n) for n, s in (("w1", (96, 160)), ("w2", (96, 160)),
                                                  ("w3", (160, 96))))  # fmt: skip
    return g.matmul(g.mul(g.silu(g.matmul(x, w1)), g.matmul(x, w2)), w3)


def right(family: CompiledFamily, size: int) -> None:
    """At this size the family gives what float64 gives."""
    program = family.family.at(size)
    inputs = random_inputs(program, size, 0.5)
    np.testing.assert_allclose(family(*inputs), run(program, inputs)[0], rtol=2e-4, atol=2e-5)


def meant(family: CompiledFamily, size: int) -> None:
    """At this size what would run means what the program means."""
    chosen = family.at(size)
    inputs = random_inputs(chosen.program, size, 0.5)
    np.testing.assert_allclose(
        run(chosen.graph, inputs)[0], run(chosen.program, inputs)[0], rtol=1e-9, atol=1e-11
    )


@pytest.fixture(scope="module")
def rows(compiler: str) -> CompiledFamily:
    return ob.optimize_family(ob.family(normed, batch=(1, 17)), budget=60, cache=False)


@pytest.fixture(scope="module")
def keys(compiler: str) -> CompiledFamily:
    return ob.optimize_family(ob.family(gqa, context=(1, 32768)), budget=60, cache=False)


def test_every_size_of_a_batch_is_right_after_one_search_and_one_verdict(
    rows: CompiledFamily,
) -> None:
    """Sizes 1 to 17, eight of them compiled; nothing is searched or judged again, and no size
    needed a judge of its own.
    """
    before = rows.counts.searches, rows.counts.verifications
    for size in range(1, 18):
        meant(rows, size)
    for size in (1, 2, 3, 5, 8, 13, 16, 17):
        right(rows, size)
    assert (rows.counts.searches, rows.counts.verifications) == before
    assert before[0] == 1
    assert before[1] == len(rows.structures)
    assert (rows.counts.sizes, rows.counts.judged_alone) == (17, 0)
    assert rows.verdict.kind is VerdictKind.PROVED
    assert "for all sizes of batch=1..17" in rows.verdict.bound


def test_every_context_length_is_right(keys: CompiledFamily) -> None:
    """Both ends, overhanging tiles, and one key: attention that was searched once."""
    for context in (1, 77, 32768):
        right(keys, context)
    for context in (2, 3, 16, 17, 1000, 4096, 32767):
        meant(keys, context)
    assert keys.counts.judged_alone == 0
    assert keys.verdict.kind is VerdictKind.PROVED


def test_a_new_size_takes_under_a_tenth_of_a_second_to_the_text(
    rows: CompiledFamily, keys: CompiledFamily
) -> None:
    """Structure, sizes, coverage by the verdict, and C: no search, no compiler. The least of three,
    as a round of the garbage collector over all that the tests hold may fall into one.
    """
    rows.source(4), keys.source(300)  # imports are not what is measured
    for family, size in ((rows, 11), (rows, 5), (keys, 20000), (keys, 321)):
        spent = []
        for _ in range(3):
            family.forget()
            began = time.process_time()
            assert "obelisk_run" in family.source(size)
            spent.append(time.process_time() - began)
        assert min(spent) < 0.1, spent


def test_structures_are_used_where_they_pay(keys: CompiledFamily) -> None:
    """At long contexts one of the searched structures runs, and is predicted to be faster."""
    for size in (1000, 32768):
        chosen = keys.at(size)
        assert chosen.structure is not None
        assert chosen.predicted < estimate(chosen.program, keys.machine).seconds


@pytest.mark.parametrize("size", [0, 18, 1000])
def test_sizes_outside_the_range_are_refused(rows: CompiledFamily, size: int) -> None:
    """By dim, value and range; called or asked for."""
    with pytest.raises(ShapeError, match=f"batch is {size}, the family holds 1 to 17"):
        rows.at(size)
    x, w = np.zeros((size, 256), np.float32), np.zeros((256, 96), np.float32)
    with pytest.raises(ShapeError, match=f"batch is {size}, the family holds 1 to 17"):
        rows(x, w)


def test_tensors_that_fit_no_size_are_refused(rows: CompiledFamily) -> None:
    x, w = np.zeros((3, 256), np.float32), np.zeros((256, 96), np.float32)
    with pytest.raises(ShapeError, match="axis 1 of input 'x' is 255"):
        rows(np.zeros((3, 255), np.float32), w)
    with pytest.raises(ShapeError, match="takes 2 inputs, got 1"):
        rows(x)
    with pytest.raises(CallError, match="float64"):
        rows(x.astype(np.float64), w)


def test_a_size_that_the_verdict_does_not_reach_is_judged_before_it_runs(
    rows: CompiledFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the proved forms taken away every size is judged alone; refused ones run as they are."""
    bare = [
        sized.Structure(s.plan, s.note, sized.FamilyVerdict(s.verdict.verdict, frozenset(), ()))
        for s in rows.structures
    ]
    family = CompiledFamily(rows.family, bare, rows.machine, 1, {})
    right(family, 9)
    assert family.counts.judged_alone >= 1
    assert family.at(9).structure is not None

    class Never:
        def __init__(self, program: object) -> None: ...
        def verify(self, graph: object) -> Any:
            return type("No", (), {"accepted": False})

    monkeypatch.setattr(sized, "Verifier", Never)
    wary = CompiledFamily(rows.family, bare, rows.machine, 1, {})
    assert wary.at(9).structure is None
    assert wary.at(9).graph is wary.at(9).program
    assert wary.counts.judged_alone == len(bare)
    right(wary, 9)


def test_a_kernel_that_is_not_what_was_judged_never_answers(
    rows: CompiledFamily, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault of code generation at one size: found before the first call, which the program's own
    operators answer.
    """
    rows.forget()
    structure = next(n for n in (6, 7, 10, 14) if rows.at(n).structure is not None)
    lowered = sized.lower_cpu
    wrong = ob.family(lambda g, n: g.exp(normed(g, n)), batch=(1, 17)).at(structure)
    fused = rows.at(structure).graph

    def faulty(graph: Any, *rest: Any) -> Any:
        return lowered(wrong if graph is fused else graph, *rest)

    monkeypatch.setattr(sized, "lower_cpu", faulty)
    right(rows, structure)
    assert "not what was judged" in caplog.text
    assert rows.at(structure).structure is None
    rows.forget()


def test_a_wrong_structure_is_left_out_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no structure is accepted the program's own operators run, at every size."""
    family = ob.family(lambda g, n: g.softmax(g.input((n, 24))), rows=(1, 9))
    other = ob.family(lambda g, n: g.exp(g.input((n, 24))), rows=(1, 9))
    monkeypatch.setattr(sized, "instantiate", lambda plan, fam, size, machine: other.at(size))
    made = ob.optimize_family(family, budget=30, cache=False)
    assert made.structures == ()
    fallen = made.account["fallen"]
    assert any("refuted" in line for line in fallen)
    assert all("refuted" in line or "not proved" in line for line in fallen)
    assert made.verdict.kind is VerdictKind.PROVED  # of the program itself
    right(made, 5)


def test_a_gated_mlp_of_any_batch(compiler: str) -> None:
    """R10: one compiled object for the sweep of batch sizes, several kernels allowed."""
    made = ob.optimize_family(ob.family(gated, batch=(1, 33)), budget=60, cache=False)
    for size in (1, 9, 33):
        right(made, size)
    for size in (2, 3, 7, 8, 16):
        meant(made, size)
    assert made.counts.searches == 1
    assert made.counts.judged_alone == 0


def test_what_was_found_is_kept(fresh_cache: Path) -> None:
    """The second time nothing is searched or judged; structures, verdicts and results are equal."""
    family = ob.family(normed, batch=(1, 5))
    first = ob.optimize_family(family, budget=30)
    again = ob.optimize_family(parse_family(family_text(family)), budget=30)
    assert (first.cached, again.cached) == (False, True)
    assert again.structures
    assert [(s.plan, s.note, s.verdict.forms) for s in again.structures] == [
        (s.plan, s.note, s.verdict.forms) for s in first.structures
    ]
    assert again.verdict.bound == first.verdict.bound
    assert (again.counts.searches, again.counts.verifications) == (0, 0)
    assert again.source(4) == first.source(4)
    wider = sized._key_of(ob.family(normed, batch=(1, 6)), first.machine, 5, 30.0, 0)
    assert wider != sized._key_of(family, first.machine, 5, 30.0, 0)


def test_jit_with_a_symbolic_dim(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One search for all batches, calls of under 1 ms; what does not fit is refused."""
    batch = ob.Dim("batch", 1, 32)

    @ob.jit(dims={"x": {0: batch}}, budget=30)
    def block(g: KernelGraph, x: Node, w: Node) -> Node:
        return g.matmul(g.rms_norm(x), w)

    w = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    for n in (1, 5, 32):
        x = np.random.default_rng(n).standard_normal((n, 64)).astype(np.float32)
        wide = x.astype(np.float64)
        exact = wide / np.sqrt((wide**2).mean(1, keepdims=True)) @ w
        np.testing.assert_allclose(block(x, w), exact, rtol=2e-4, atol=1e-4)
    assert call_overhead(lambda: block(x, w)) < 1e-3
    assert len(block.families) == 1
    assert not block.compiled
    (family,) = block.families.values()
    assert (family.counts.searches, family.counts.sizes) == (1, 3)
    with pytest.raises(ShapeError, match=r"block\(\): batch is 33, the family holds 1 to 32"):
        block(np.zeros((33, 64), np.float32), w)
    with pytest.raises(CallError, match="has no axis 0"):
        block(np.zeros((), np.float32), w)


def test_jit_refuses_what_is_no_family() -> None:
    n = ob.Dim("n", 1, 32)

    def product(g: KernelGraph, x: Node, w: Node) -> Node:
        return g.matmul(x, w) if x.shape[0] != 5 else g.exp(g.matmul(x, w))

    with pytest.raises(UserError, match="no input 'y'"):
        ob.jit(product, dims={"y": {0: n}})
    with pytest.raises(UserError, match="2 symbolic dims"):
        ob.jit(product, dims={"x": {0: n, 1: ob.Dim("m", 1, 2)}})
    f = ob.jit(product, dims={"x": {0: n}}, budget=5, cache=False)
    w = np.zeros((8, 4), np.float32)
    with pytest.raises(MalformedGraph, match="another structure at n 5"):
        f(np.zeros((5, 8), np.float32), w)
    both = ob.jit(product, dims={"x": {1: n}, "w": {0: n}})
    with pytest.raises(CallError, match=r"n is not one number: x.1 8, w.0 7"):
        both(np.zeros((6, 8), np.float32), np.zeros((7, 4), np.float32))


def test_family_takes_one_range() -> None:
    with pytest.raises(UserError, match="one symbolic dim"):
        ob.family(normed)
    with pytest.raises(UserError, match="one symbolic dim"):
        ob.family(normed, batch=(1, 2), rows=(1, 3))
    with pytest.raises(UserError, match="1 <= LOW < HIGH"):
        ob.family(normed, batch=(3, 3))
    with pytest.raises(UserError, match="budget is 0"):
        ob.optimize_family(ob.family(normed, batch=(1, 2)), budget=0)


Call = Callable[[list[str]], int]


SMALL = """
def rows(g, batch=1):
    return g.softmax(g.input((3 * batch, 24), name="x"))
"""


@pytest.mark.parametrize(
    ("spec", "dim"), [("batch=1..6", ("batch", 1, 6)), ("x.1=2..9", ("x_1", 2, 9))]
)
def test_optimize_family_on_the_command_line(
    spec: str, dim: tuple[str, int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program's batch, or a dim of an input; the JSON form has the documented keys."""
    file, out = tmp_path / "small.py", tmp_path / "f.json"
    file.write_text(SMALL)
    words = ["optimize", str(file), "--family", spec, "--budget", "40s", "--json", str(out)]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert f"dim {dim[0]} = {dim[1]}..{dim[2]}" in said
    assert "searched once" in said
    data = json.loads(out.read_text())
    assert data["dim"] == dict(zip(("name", "low", "high"), dim, strict=True))
    assert data["verdict"] in ("proved", "tested")
    sizes = [r["size"] for r in data["sizes"]]
    assert sizes == sorted(sizes)
    assert {dim[1], dim[2]} <= set(sizes)
    assert set(data) == {
        "schema", "program", "digest", "dim", "verdict", "bound", "structures", "sizes", "cached",
        "searched_at", "search", "fallen", "seconds", "seed",
    }  # fmt: skip


def test_a_family_file_is_a_program_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.txt"
    family: FamilyGraph = ob.family(lambda g, n: g.exp(g.input((n, 8))), batch=(1, 4))
    file.write_text(family_text(family))
    assert main(["optimize", str(file), "--budget", "20s", "--no-cache"]) == 0
    assert "dim batch = 1..4" in capsys.readouterr().out
    assert main(["optimize", str(file), "--family", "batch=1..8"]) == 2
    assert "already" in capsys.readouterr().err


def test_named_programs_have_families() -> None:
    """Along their batch, or a dim of an input with all that are tied to it."""
    batch = load_family("gqa", "batch=1..8")
    assert batch.at(3).outputs == find_program("gqa").graph(3).outputs
    keys = load_family("gqa", "k.2=1..32768", dtype="f16")
    assert [x.shape for x in keys.at(77).inputs] == [(2, 256, 64), (2, 64, 77), (2, 77, 64)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rmsnorm", "--family", "rows=1..4"], "batch, or INPUT.AXIS"),
        (["rmsnorm", "--family", "batch=4..1"], "1 <= LOW < HIGH"),
        (["rmsnorm", "--family", "batch"], "NAME=LOW..HIGH"),
        (["rmsnorm", "--family", "y.0=1..4"], "no input 'y'"),
        (["rmsnorm", "--family", "batch=1..4", "--batch", "2"], "both say"),
        (["rmsnorm", "--family", "batch=1..4", "--save", "x"], "no --report and no --save"),
    ],
)
def test_wrong_families_are_refused_by_name(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["optimize", *words]) == 2
    assert said in capsys.readouterr().err


def test_dim_is_public() -> None:
    assert ob.Dim is Dim
    assert str(ob.Dim("batch", 1, 64)) == "batch=1..64"
