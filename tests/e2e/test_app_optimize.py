"""`optimize` from end to end on a CPU: right answers, limits kept, and no bad candidate ends a run.

The search is replaced by a list of hand-made candidates where a test is about what follows it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.lowering import call_overhead

import obelisk as ob
from obelisk.app import backend_cpu, pipeline
from obelisk.app.report import Report, render_html
from obelisk.base.errors import BuildFailed, CallError, Infeasible, UnknownName, UserError
from obelisk.ir import BlockBuilder, Graph, KernelGraph, Node, make_graph, random_inputs, run
from obelisk.ir.build import accum_sum, matmul, mul, square, tanh
from obelisk.lower.cpu import lower_cpu
from obelisk.machine import estimate, host
from obelisk.search import Candidate, SearchResult, SearchStats
from obelisk.tune import Status
from obelisk.verify import VerdictKind

pytestmark = pytest.mark.usefixtures("compiler", "fresh_cache")
BUDGET = 4.0
ROWS, DEPTH, COLUMNS = 24, 64, 48


def program() -> Graph:
    """tanh(0.1 x w) squared: four kernels operator by operator."""
    g = KernelGraph("block")
    x, w = g.input((ROWS, DEPTH), name="x"), g.input((DEPTH, COLUMNS), name="w")
    g.output(g.square(g.tanh(g.mul(g.matmul(x, w), 0.1))), name="out")
    return g.freeze()


def fused(
    grid: int, loop: int, wrong: Callable[[Node], Node] = lambda y: y, scale: float = 0.1
) -> Graph:
    """The program as one kernel: `grid` blocks of columns, `loop` steps over the depth."""
    base = program()
    x, w = base.inputs
    b = BlockBuilder((grid,), loop)
    product = accum_sum(matmul(b.load(x, (None,), 1), b.load(w, (1,), 0)))
    b.store(wrong(square(tanh(mul(product, scale)))), (1,))
    return make_graph(
        base.inputs, b.launch(), base.input_names, base.output_names, f"f{grid}x{loop}"
    )


def found(graphs: Sequence[Graph]) -> Callable[..., SearchResult]:
    """A search that finds exactly these graphs."""

    def search(graph: Graph, machine: Any, **_: Any) -> SearchResult:
        all_graphs = [graph, *graphs]
        notes = ["the input", *(g.name for g in graphs)]
        return SearchResult(
            tuple(
                Candidate(g, estimate(g, machine), n)
                for g, n in zip(all_graphs, notes, strict=True)
            ),
            SearchStats(0.1, 7, {"by hand": 2}),
        )

    return search


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory, compiler: str) -> Iterator[ob.Compiled]:
    """One compiled program with a good and a refuted candidate, for tests that only use it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OBELISK_CACHE", str(tmp_path_factory.mktemp("ready")))
        patch.setattr(pipeline, "search", found([fused(2, 1), fused(2, 2, scale=0.3)]))
        yield ob.optimize(program(), budget=BUDGET)


def check(best: ob.Compiled, seed: int = 5) -> None:
    """The compiled program agrees with its float64 meaning."""
    arrays = random_inputs(best.program, seed)
    (right,) = run(best.program, arrays)
    np.testing.assert_allclose(best(*arrays), right, rtol=1e-4, atol=1e-5)


def test_real_search_gives_a_right_answer() -> None:
    """Nothing replaced: the whole pipeline on a small program, with every part of the report."""
    best = ob.optimize(program(), budget=8.0, seed=1)
    check(best)
    report = best.report
    assert report.candidates[0].index == 0
    assert sum(c.chosen for c in report.candidates) == 1
    assert best.verdict.accepted
    assert report.op_by_op_us is not None
    assert best.baselines["numpy"] is not None
    assert report.search.states > 0
    assert {"search", "verify", "build", "tune"} <= set(report.stages)
    if report.chosen.index:
        assert report.chosen.time_us is not None
        assert report.chosen.time_us <= report.op_by_op_us
    else:
        assert "the program is the answer" in report.sentence()


def test_a_better_candidate_is_chosen_and_the_bad_ones_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R34, R02: wrong mathematics, an infeasible one, faults in the emitter and the compiler, a
    wrong answer, a crash, a hang: each is counted under its own name and the good one still wins.
    """
    cases: dict[str, Graph] = {
        "refuted": fused(2, 2, lambda y: mul(y, 1.001)),
        "good": fused(2, 1),
        "infeasible": fused(4, 1),
        "code generation failed": fused(8, 1),
        "build failed": fused(3, 1),
        "wrong": fused(6, 1),
        "crash": fused(12, 1),
        "hang": fused(16, 1),
        "incomplete": fused(24, 1),
    }
    entry = "int obelisk_run(void *const *in, void *const *out, void *s, int t)"
    body = {
        "build failed": "this is no C",
        "wrong": f"{entry} {{ float *y = out[0];"
        f" for (int i = 0; i < {ROWS * COLUMNS}; i++) y[i] = 1; return 0; }}",
        "crash": f"{entry} {{ *(volatile int *)8 = 1; return 0; }}",
        "hang": f"{entry} {{ for (volatile int i = 0;; i = 0) {{}} return 0; }}",
        "incomplete": f"{entry} {{ return 0; }}",
    }
    head = '__attribute__((visibility("default"))) '
    kinds = {g.digest: kind for kind, g in cases.items()}

    def lower(graph: Graph, machine: Any, options: Any) -> Any:
        module = lower_cpu(graph, machine, options)
        kind = kinds.get(graph.digest, "")
        if kind == "infeasible":
            raise Infeasible("tiles take 9 GB, the limit is 1 GB")
        if kind == "code generation failed":
            raise ZeroDivisionError("in the emitter")
        if kind in body:
            source = body[kind].replace(entry, head + entry)
            return replace(module, source=source, digest=kind)
        return module

    monkeypatch.setattr(pipeline, "search", found(list(cases.values())))
    monkeypatch.setattr(backend_cpu, "lower_cpu", lower)
    best = ob.optimize(program(), budget=90.0, seed=2, baselines=())
    check(best)
    rows = {c.note: c for c in best.report.candidates}
    for kind, graph in cases.items():
        if kind != "good":
            assert rows[graph.name].status == kind, rows[graph.name]
            assert rows[graph.name].reason
            assert not rows[graph.name].chosen
            assert best.report.failures[kind] >= 1
    for kind in body.keys() & {s.value for s in Status}:
        assert any(n.startswith(f"the first {kind}: ") for n in best.report.notes), kind
    assert rows[cases["good"].name].status == "ok"
    assert best.report.chosen.note in (cases["good"].name, "the program itself")
    assert rows[cases["refuted"].name].verdict == "refuted"
    assert "limit is 1 GB" in rows[cases["infeasible"].name].reason


def test_when_nothing_beats_the_program_it_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """All candidates are wrong: the program's own kernels are returned and the report says so."""
    monkeypatch.setattr(pipeline, "search", found([fused(2, 1, scale=0.2), fused(4, 1, scale=0.3)]))
    best = ob.optimize(program(), budget=BUDGET)
    check(best)
    assert best.report.chosen.index == 0
    assert best.graph is best.program
    assert "Nothing that was found" in best.report.sentence()
    assert best.report.failures["refuted"] == 2


def test_a_judge_that_fails_costs_one_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in a judge is counted; later candidates are judged all the same."""
    graphs = [fused(2, 1), fused(4, 1)]
    real = pipeline.Verifier.verify

    def verify(self: Any, candidate: Graph) -> Any:
        if candidate is graphs[0]:
            raise RuntimeError("out of patience")
        return real(self, candidate)

    monkeypatch.setattr(pipeline, "search", found(graphs))
    monkeypatch.setattr(pipeline.Verifier, "verify", verify)
    best = ob.optimize(program(), budget=BUDGET)
    check(best)
    rows = {c.note: c for c in best.report.candidates}
    assert rows["f2x1"].status == "judge failed"
    assert "out of patience" in rows["f2x1"].reason
    assert rows["f4x1"].verdict in ("proved", "tested")


def test_a_sibling_that_is_not_equal_costs_its_candidate_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fastest is a sibling that its judge refutes: a note says so, and the candidate it was
    made of, whose own sizes are proved, may be the answer with the verdict that it had.
    """
    first, sibling = fused(2, 1), fused(4, 1)
    real, ranked = pipeline.Verifier.verify, pipeline._Run._ranked

    def verify(self: Any, candidate: Graph) -> Any:
        verdict = real(self, candidate)
        if candidate is not sibling:
            return verdict
        return replace(verdict, kind=VerdictKind.REFUTED, witness="two heads were added up")

    def sibling_first(self: Any, tuned: Any) -> list[Any]:
        pairs = [p for p in ranked(self, tuned) if p[0].candidate == 1]
        item, built = pairs[0]
        return [(replace(item, made=replace(item.made, graph=sibling)), built), *pairs]

    monkeypatch.setattr(pipeline, "search", found([first]))
    monkeypatch.setattr(pipeline.Verifier, "verify", verify)
    monkeypatch.setattr(pipeline._Run, "_ranked", sibling_first)
    best = ob.optimize(program(), budget=BUDGET)
    check(best)
    assert best.graph is first
    assert best.report.chosen.verdict in ("proved", "tested")
    assert best.report.failures["refuted"] == 1
    assert any("refuted: two heads were added up" in note for note in best.report.notes)


def test_a_search_that_fails_leaves_the_program(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """R36: a fault in the search is logged with its traceback; the program's kernels come back."""

    def search(*_: Any, **__: Any) -> SearchResult:
        raise AssertionError("a broken invariant")

    monkeypatch.setattr(pipeline, "search", search)
    best = ob.optimize(program(), budget=BUDGET)
    check(best)
    assert best.report.failures["search failed"] == 1
    assert any("a broken invariant" in note for note in best.report.notes)
    assert "Traceback" in caplog.text


def test_own_kernels_that_cannot_be_made_are_a_clean_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where not even the program's own kernels can be made, the error says why."""

    def refuse(*_: Any) -> Any:
        raise Infeasible("f8e4m3 is not emitted")

    monkeypatch.setattr(pipeline, "search", found([]))
    monkeypatch.setattr(backend_cpu, "lower_cpu", refuse)
    with pytest.raises(Infeasible, match="block cannot be compiled here: infeasible: f8e4m3"):
        ob.optimize(program(), budget=BUDGET)


@pytest.mark.parametrize("limit", [4.0, 10.0])
def test_time_limit(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """R09: a search that always uses all of its time, and many candidates: T + 10% at most."""

    def slow(graph: Graph, machine: Any, *, budget: Any, **_: Any) -> SearchResult:
        time.sleep(budget.seconds)
        sizes = [(a, b) for a in (1, 2, 3, 4, 6, 8, 12, 24) for b in (1, 2, 4)]
        return found([fused(*s) for s in sizes])(graph, machine)

    monkeypatch.setattr(pipeline, "search", slow)
    begin = time.monotonic()
    best = ob.optimize(program(), budget=limit, baselines=())
    taken = time.monotonic() - begin
    late = 2.0 * (pipeline.crowding() - 1.0)  # others are using this machine, too
    assert taken <= 1.1 * limit + late, best.report.stages
    check(best)


def test_interrupt_gives_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """R34: Ctrl-C in the middle of judging: what was judged is built, measured and returned."""
    graphs = [fused(2, 1), fused(4, 1), fused(6, 1)]
    real = pipeline.Verifier.verify

    def verify(self: Any, candidate: Graph) -> Any:
        if candidate is graphs[1]:
            raise KeyboardInterrupt
        return real(self, candidate)

    monkeypatch.setattr(pipeline, "search", found(graphs))
    monkeypatch.setattr(pipeline.Verifier, "verify", verify)
    begin = time.monotonic()
    best = ob.optimize(program(), budget=300.0)
    assert time.monotonic() - begin < 40
    check(best)
    assert best.report.interrupted
    assert best.report.candidates[1].status == "ok"
    assert best.report.candidates[2].status == "not tried"


def test_interrupt_during_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before anything was found still returns the program's own kernels."""

    def search(*_: Any, **__: Any) -> SearchResult:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "search", search)
    best = ob.optimize(program(), budget=300.0)
    check(best)
    assert best.report.interrupted
    assert best.report.chosen.index == 0


def test_second_time_is_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second answer takes under 2 s, is the same, and is not used for another request."""
    monkeypatch.setattr(pipeline, "search", found([fused(2, 1)]))
    first = ob.optimize(program(), budget=BUDGET)
    calls = Counter[str]()

    def counted(graph: Graph, machine: Any, **_: Any) -> SearchResult:
        calls["search"] += 1
        return found([fused(2, 1)])(graph, machine)

    monkeypatch.setattr(pipeline, "search", counted)
    begin = time.monotonic()
    again = ob.optimize(program(), budget=BUDGET)
    assert time.monotonic() - begin < 2.0
    assert calls["search"] == 0
    assert again.report.cached
    assert not first.report.cached
    assert again.graph == first.graph
    assert again.verdict.kind is first.verdict.kind
    arrays = random_inputs(first.program, 8)
    np.testing.assert_array_equal(first(*arrays), again(*arrays))
    ob.optimize(program(), budget=BUDGET, seed=9)
    assert calls["search"] == 1
    ob.optimize(program(), budget=BUDGET, cache=False)
    assert calls["search"] == 2


def test_layers_that_are_alike_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """R38: twenty-eight layers of one shape, named apart: one search, and each is right."""
    searches = []
    real = found([])

    def search(graph: Graph, machine: Any, **options: Any) -> SearchResult:
        searches.append(graph.name)
        return real(graph, machine, **options)

    monkeypatch.setattr(pipeline, "search", search)
    for layer in range(28):
        g = KernelGraph(f"layer {layer}")
        x, w = g.input((ROWS, 24), name=f"x{layer}"), g.input((24, 24), name=f"w{layer}")
        g.output(g.relu(g.matmul(x, w)), name=f"y{layer}")
        best = ob.optimize(g, budget=2.0, baselines=())
        check(best, layer)
        assert best.report.cached == (layer > 0)
    assert searches == ["layer 0"]


@pytest.mark.parametrize("layers", [1, 2])
def test_a_whole_mlp_of_awkward_extents(layers: int) -> None:
    """R10, R06: gate, up and down of one layer and of two, extents that nothing divides: a right
    answer from the whole pipeline, in several kernels or few.
    """
    g = KernelGraph("mlp")
    x = g.input((5, 77))
    for _ in range(layers):
        gate, up, down = (g.input(s) for s in ((77, 129), (77, 129), (129, 77)))
        x = g.mul(g.matmul(g.mul(g.silu(g.matmul(x, gate)), g.matmul(x, up)), down), 1 / 77)
    g.output(x)
    best = ob.optimize(g, budget=8.0, baselines=())
    assert best.verdict.accepted
    check(best)


def test_a_program_that_overflows_at_normal_inputs_is_said_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R11: exp without the maximum in f16: where the program's own kernels overflow, the report
    says so; a kernel that keeps scores in f32 is finite at scores above 20.
    """
    g = KernelGraph("unsafe")
    q, k, v = (g.input(s, "f16") for s in ((1, 16, 64), (1, 64, 128), (1, 128, 64)))
    e = g.exp(g.matmul(q, k))
    g.output(g.matmul(g.div(e, g.sum(e, 2)), v))
    best = ob.optimize(g, budget=8.0, baselines=())
    assert any("overflows in its own dtypes" in note for note in best.report.notes)
    if best.report.chosen.index:
        arrays = random_inputs(best.program, 5)
        scores = arrays[0].astype(np.float64) @ arrays[1].astype(np.float64)
        assert scores.max() > 20
        got = best(*arrays).astype(np.float64)
        np.testing.assert_allclose(got, run(best.program, arrays)[0], rtol=2e-2, atol=2e-2)


def test_cache_hit_keeps_the_callers_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are not part of the key; errors of a hit speak of the caller's own inputs."""
    monkeypatch.setattr(pipeline, "search", found([]))
    ob.optimize(program(), budget=BUDGET)
    g = KernelGraph("mine")
    a, b = g.input((ROWS, DEPTH), name="left"), g.input((DEPTH, COLUMNS), name="right")
    g.output(g.square(g.tanh(g.mul(g.matmul(a, b), 0.1))))
    hit = ob.optimize(g, budget=BUDGET)
    assert hit.report.cached
    assert hit.report.program == "mine"
    with pytest.raises(CallError, match="'left'"):
        hit(np.zeros((1, 1), np.float32), np.zeros((DEPTH, COLUMNS), np.float32))


def test_damaged_cache_is_made_again(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """R38: stored libraries that were cut to half are a miss, and the answer is right."""
    monkeypatch.setattr(pipeline, "search", found([]))
    ob.optimize(program(), budget=BUDGET)
    damaged = 0
    for path in fresh_cache.rglob("*.so"):
        if "build" not in path.parts:
            half = path.read_bytes()[: path.stat().st_size // 2]
            path.unlink()  # this process has the old file mapped: it must stay whole
            path.write_bytes(half)
            damaged += 1
    assert damaged
    best = ob.optimize(program(), budget=BUDGET)
    assert not best.report.cached
    check(best)


def test_export_gives_the_same_bits_in_another_process(ready: ob.Compiled, tmp_path: Path) -> None:
    """R38: `save`, then `load` in a new process: equal to the last bit; damage is named."""
    saved = ready.save(tmp_path / "block.obelisk")
    arrays = random_inputs(ready.program, 4)
    np.savez(tmp_path / "in.npz", *arrays)
    script = (
        "import sys, numpy as np, obelisk as ob\n"
        "ready = ob.load(sys.argv[1]); data = np.load(sys.argv[2])\n"
        "np.save(sys.argv[3], ready(*(data[k] for k in data.files)))\n"
    )
    out = tmp_path / "out.npy"
    words = [sys.executable, "-c", script, str(saved), str(tmp_path / "in.npz"), str(out)]
    subprocess.run(words, check=True, timeout=120)
    np.testing.assert_array_equal(np.load(out), ready(*arrays))
    data = bytearray(saved.read_bytes())
    data[len(data) // 2] ^= 0xFF
    (tmp_path / "bad.obelisk").write_bytes(bytes(data))
    with pytest.raises(ob.ParseError, match=r"bad\.obelisk"):
        ob.load(tmp_path / "bad.obelisk")
    with pytest.raises(ob.ParseError, match=r"none\.obelisk"):
        ob.load(tmp_path / "none.obelisk")


def test_torch_tensors_in_torch_tensors_out(ready: ob.Compiled) -> None:
    """torch tensors give torch tensors with the same numbers as numpy arrays, also into `out`."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    arrays = random_inputs(ready.program, 6)
    tensors = [torch.from_numpy(a) for a in arrays]
    got = ready(*tensors)
    assert isinstance(got, torch.Tensor)
    np.testing.assert_array_equal(got.numpy(), ready(*arrays))
    out = torch.full((ROWS, COLUMNS), float("nan"))
    assert ready(*tensors, out=out) is out
    np.testing.assert_array_equal(out.numpy(), got.numpy())


def test_calls_from_several_threads(ready: ob.Compiled) -> None:
    """Calls that overlap do not share scratch memory: every answer is right."""
    from concurrent.futures import ThreadPoolExecutor

    inputs = [random_inputs(ready.program, seed) for seed in range(8)]
    right = [ready(*arrays) for arrays in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            for got, want in zip(pool.map(lambda a: ready(*a), inputs), right, strict=True):
                np.testing.assert_array_equal(got, want)


def test_swapped_weights_do_not_share_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """R37: programs that differ only in which weight comes first give different results."""
    monkeypatch.setattr(pipeline, "search", found([]))

    def two(first: str) -> Graph:
        g = KernelGraph("two")
        x = g.input((4, 32), name="x")
        a, b = g.input((32, 32), name="a"), g.input((32, 32), name="b")
        one, other = (a, b) if first == "a" else (b, a)
        g.output(g.matmul(g.relu(g.matmul(x, one)), other))
        return g.freeze()

    for graph in (two("a"), two("b")):
        best = ob.optimize(graph, budget=2.0)
        assert not best.report.cached
        arrays = random_inputs(graph, 3)
        np.testing.assert_allclose(best(*arrays), run(graph, arrays)[0], rtol=1e-4, atol=1e-4)


def test_batch_sweep_with_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    """R10: every batch size is right, and the second call of each costs under 1 ms."""
    monkeypatch.setattr(pipeline, "search", found([]))

    @ob.jit(budget=1.5, baselines=())
    def block(g: KernelGraph, x: Node, w: Node) -> Node:
        return g.matmul(g.rms_norm(x), w)

    w = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    for batch in (1, 2, 3, 7, 8, 9, 16, 33):
        x = np.random.default_rng(batch).standard_normal((batch, 64)).astype(np.float32)
        got = block(x, w)
        wide = x.astype(np.float64)
        right = wide / np.sqrt((wide**2).mean(1, keepdims=True)) @ w
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(block(x, w), got)
        assert call_overhead(partial(block, x, w)) < 1e-3
    assert len(block.compiled) == 8


def test_jit_refuses_what_it_cannot_serve() -> None:
    """Too few tensors, lists, a builder without parameters: named before a search begins."""

    @ob.jit
    def block(g: KernelGraph, x: Node, w: Node) -> Node:
        return g.matmul(x, w)

    with pytest.raises(CallError, match=r"block\(x, w\) takes 2 tensors, got 1"):
        block(np.zeros((2, 2), np.float32))
    with pytest.raises(CallError, match="is a list"):
        block([1.0], [2.0])
    with pytest.raises(UserError, match="takes nothing"):
        ob.jit(lambda: None)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"device": "gpu9"}, UnknownName, "gpu9"),
        ({"device": "h200"}, UnknownName, "code is emitted for cpu"),
        ({"budget": 0.0}, UserError, "budget is 0.0"),
        ({"verify_level": "none"}, UnknownName, "known are full, quick"),
        ({"threads": 0}, UserError, "threads is 0"),
    ],
)
def test_wrong_options(options: dict[str, Any], kind: type[UserError], message: str) -> None:
    """Each wrong option is named with what is allowed."""
    with pytest.raises(kind, match=message):
        ob.optimize(program(), **options)


def test_no_compiler_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler the error says which command was tried and what to do."""
    monkeypatch.setenv("OBELISK_CC", "no-such-compiler")
    with pytest.raises(ob.MissingDependency, match=r"no-such-compiler.*OBELISK_CC"):
        ob.optimize(program())


def test_cache_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R38, R50: the cache's place is a file: refused with the way out, never a crash."""
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("OBELISK_CACHE", str(blocker))
    monkeypatch.setattr(pipeline, "search", found([]))
    with pytest.raises(BuildFailed, match="OBELISK_CACHE"):
        ob.optimize(program(), budget=BUDGET)


def test_report_reads_back_and_its_page_stands_alone(ready: ob.Compiled) -> None:
    """The JSON form is lossless; the page fetches nothing and shows every candidate."""
    assert Report.from_json(ready.report.to_json()) == ready.report
    page = ready.html()
    assert page == render_html(ready.report, *page_parts(ready))
    assert "<svg" in page
    assert "f2x2" in page
    assert "refuted" in page
    for fetched in ("<script", "src=", "@import", "<link", "url("):
        assert fetched not in page.replace("url(#", "(#"), fetched


def page_parts(best: ob.Compiled) -> tuple[str, str]:
    """Picture and text of the chosen graph."""
    from obelisk.ir.svg import to_svg
    from obelisk.ir.text import to_text

    return to_svg(best.graph).partition("?>")[2], to_text(best.graph)


def test_host_is_this_machine() -> None:
    """ "host" and "cpu" are one device."""
    assert ob.optimize(program(), device="host", budget=1.0).report.device == host().name
