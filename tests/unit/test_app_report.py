"""Reports, tables and figures: what is shown is what was measured, and every gap has its reason."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from obelisk.app.account import (
    Tried,
    baseline_rows,
    candidate_rows,
    choice_text,
    fastest_form,
)
from obelisk.app.bench import BenchRow, bench_json, command, geomean, summarise
from obelisk.app.display import Display, print_report
from obelisk.app.programs import PROGRAMS
from obelisk.app.report import (
    BaselineRow,
    CandidateRow,
    Report,
    SearchRow,
    count_failures,
    render_html,
    show_bytes,
    show_us,
)
from obelisk.machine import estimate, host
from obelisk.search import Candidate
from obelisk.tune import Measured, Status
from obelisk.verify import Verdict, VerdictKind


def report(**changes: object) -> Report:
    """Two candidates, the second chosen, with one baseline that could not run."""
    base = Report(
        program="gqa",
        digest="d1",
        device="cpu",
        seed=3,
        budget_seconds=60.0,
        seconds=31.5,
        candidates=(
            CandidateRow(0, 4, 10_000_000, 900.0, 1000.0, 10.0, "proved", "itself", "ok"),
            CandidateRow(
                1, 1, 2_000_000, 300.0, 250.0, 5.0, "tested", "4 draws <at> 8x8", "ok", chosen=True,
                note="fused",
            ),
            CandidateRow(2, 1, 2_000_000, 310.0, verdict="refuted", status="refuted", reason="<x>"),
        ),
        baselines=(
            BaselineRow("op_by_op", 1000.0, 10.0),
            BaselineRow("numpy", 1500.0, 20.0, ratio=6.0, ratio_spread=0.1),
            BaselineRow("torch", None, None, "torch is not installed"),
        ),
        search=SearchRow(4.5, 12345, {"memory": 17}),
        stages={"search": 4.5},
        failures={"refuted": 1},
        environment={"machine": "a computer"},
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def test_json_keys_and_round_trip() -> None:
    """The documented keys hold the figures, and the form reads back to an equal report."""
    data = json.loads(json.dumps(report().to_json()))
    assert data["chosen"] == {
        "index": 1, "kernels": 1, "time_us": 250.0, "verdict": "tested",
        "bound": "4 draws <at> 8x8", "target": "",
    }  # fmt: skip
    assert data["baselines"] == {"op_by_op": 1000.0, "numpy": 1500.0, "torch": None}
    assert data["unavailable"] == {"torch": "torch is not installed"}
    assert data["search"] == {"seconds": 4.5, "states": 12345, "pruned": {"memory": 17}}
    assert Report.from_json(data) == report()
    with pytest.raises(ValueError, match="schema 99"):
        Report.from_json({**data, "schema": 99})


def test_sentences_name_their_baseline() -> None:
    """R02: a speed-up says over what; where nothing is better, or nothing was measured, that."""
    assert "4.00 times as fast as its own 4 kernels (1 ms)" in report().sentence()
    rows = report().candidates
    own = (replace(rows[0], chosen=True), replace(rows[1], chosen=False))
    assert "the program is the answer" in report(candidates=own).sentence()
    unmeasured = (rows[0], replace(rows[1], time_us=None))
    assert "not measured" in report(candidates=unmeasured).sentence()


def test_page_escapes_and_shows_every_candidate() -> None:
    """Reasons are text, not markup; all rows, rules and reasons are there; nothing is fetched."""
    page = render_html(report(), "<svg></svg>", "graph <text>")
    assert "&lt;x&gt;" in page
    assert "<x>" not in page
    assert "graph &lt;text&gt;" in page
    for part in ("<svg></svg>", "memory", "torch is not installed", "a computer", "12345 states"):
        assert part in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_terminal_account_has_every_part() -> None:
    """Graph, candidates with outcomes, times with ratios, search, failures, sentence."""
    out = io.StringIO()
    print_report(report(cached=True), 'graph "gqa" {}', Console(file=out, width=160))
    text = out.getvalue()
    for part in (
        'graph "gqa"', "refuted: <x>", "4.00 times as fast", "6.00 ± 0.10 times as fast",
        "torch is not installed", "12,345 states in 4.5 s; pruned 17 memory", "Left out: 1 refuted",
        "Answered from the cache",
    ):  # fmt: skip
        assert part in text, part


def test_progress_is_silent_where_nobody_looks() -> None:
    """No terminal: not one character. A terminal: one line, after a second."""
    out = io.StringIO()
    with Display(Console(file=out, force_terminal=False)) as quiet:
        quiet.begun -= 60
        quiet.update("search", {"states": 1})
    assert out.getvalue() == ""
    with Display(Console(file=out, force_terminal=True, width=80)) as shown:
        shown.update("search", {"states": 1})
        assert shown.status is None
        shown.begun -= 60
        shown.drawn -= 60
        shown.update("search", {"states": 1234, "pruned": 2.0})
    assert "states 1,234" in out.getvalue()


@pytest.mark.parametrize(
    ("us", "text"),
    [(None, "-"), (0.812, "812 ns"), (41.26, "41.3 us"), (7020.0, "7.02 ms"), (1.2e6, "1.2 s"),
     (999.7, "1000 us"), (5e9, "5000 s")],
)  # fmt: skip
def test_times_for_people(us: float | None, text: str) -> None:
    """Three digits and a unit, never an exponent."""
    assert show_us(us) == text


def test_sizes_for_people() -> None:
    """Powers of a thousand."""
    assert [show_bytes(n) for n in (512, 3200, 40_100_000, 1_070_000_000)] == [
        "512 B", "3.2 KB", "40.1 MB", "1.07 GB",
    ]  # fmt: skip
    assert count_failures({"a": 1, "c": 2, "b": 2}) == {"b": 2, "c": 2, "a": 1}


def test_rows_take_the_fastest_right_lowering() -> None:
    """Of several lowerings the fastest right one counts; a wrong one is the outcome only alone."""
    graph = PROGRAMS["lora"].graph()
    candidates = [Candidate(graph, estimate(graph, host()), n) for n in ("own", "a", "b", "c")]
    tested = Verdict(VerdictKind.TESTED, "some draws", 0.1, None)
    wrong = Measured("x", Status.WRONG, "element 3 is 1, expected 2", 1e-6)
    rows = candidate_rows(
        candidates,
        {0: tested, 1: tested, 2: tested},
        {2: ("wrong", "element 3"), 3: ("refuted", "witness")},
        {
            0: [Tried("slow", Measured("s", Status.OK, "", 2e-3, 1e-5))],
            1: [
                Tried("wrong", wrong),
                Tried("fast", Measured("f", Status.OK, "", 1e-3, 1e-5), 7),
                Tried("slow", Measured("s", Status.OK, "", 2e-3)),
            ],
            2: [Tried("wrong", wrong), Tried("never built", None)],
        },
        chosen=1,
    )
    assert [r.status for r in rows] == ["ok", "ok", "wrong", "refuted"]
    assert rows[1].variant == "fast"
    assert rows[1].kernels == 7
    assert rows[0].kernels == candidates[0].cost.launches
    assert rows[1].time_us == pytest.approx(1000)
    assert rows[2].reason == "element 3 is 1, expected 2"
    assert [r.variants for r in rows] == [1, 3, 2, 0]
    assert [r.chosen for r in rows] == [False, True, False, False]


def test_baselines_say_why_they_are_missing() -> None:
    """A hang, an absent library and own kernels that could not be built each carry a reason."""
    rows = baseline_rows(
        None,
        "infeasible: too large",
        [
            Measured("torch", Status.HANG, "no answer in 3 s"),
            Measured("numpy", Status.OK, "", 1e-3),
        ],
        {"torch.sdpa": "not an attention"},
    )
    assert [(r.name, r.time_us) for r in rows] == [
        ("op_by_op", None), ("torch", None), ("numpy", 1000.0), ("torch.sdpa", None),
    ]  # fmt: skip
    assert rows[0].reason == "infeasible: too large"
    assert rows[1].reason == "hang: no answer in 3 s"


def test_own_kernels_count_in_their_fastest_form() -> None:
    """mqa on an H200 was "26.81 times as fast as the program's own kernels", which in Triton took
    22.66 us, not 218: the slowest form is no yardstick.
    """
    slow = Measured("candidate 0, default", Status.OK, "", 218e-6, ratio=26.81)
    fast = Measured("candidate 0, Triton, default", Status.OK, "", 22.66e-6)
    broken = Measured("candidate 0, warps 8", Status.WRONG, "element 3", 1e-6)
    best = Measured("candidate 1, default", Status.OK, "", 8.13e-6)
    assert fastest_form([slow, broken, fast]) is fast
    assert fastest_form([slow, broken]) is slow
    assert fastest_form([broken]) is broken
    assert fastest_form([]) is None
    text = choice_text("26.81 times as fast as (candidate 0, default)", best, [slow, broken, fast])
    assert text.endswith(
        "; 2.79 times as fast as their fastest form (candidate 0, Triton, default)"
    )
    for forms, winner in (([slow, broken], best), ([slow, fast], fast), ([], best)):
        assert choice_text("why", winner, forms) == "why"
    (row,) = baseline_rows(fastest_form([slow, fast]), "", [], {})
    assert row.over(best.seconds * 1e6) == pytest.approx(22.66 / 8.13)


def test_bench_summary() -> None:
    """Ratios are against the best library that ran; failures are rows and do not count."""
    good = BenchRow("gqa", 1, "f32", report())
    fast = report(baselines=(BaselineRow("op_by_op", 500.0), BaselineRow("torch", 125.0)))
    slow = BenchRow("mlp", 1, "f32", fast)
    bad = BenchRow("moe", 1, "f32", None, "Infeasible: too large")
    assert good.best_other == ("numpy", 1500.0)
    assert good.ratio == pytest.approx(6.0)
    assert slow.ratio == pytest.approx(0.5)
    summary = summarise([good, slow, bad])
    assert summary["geomean_all"] == pytest.approx(3.0**0.5)
    assert summary["geomean_published"] == pytest.approx(6.0)
    assert summary["worst"] == pytest.approx(0.5)
    assert summary["geomean_over_op_by_op"] == pytest.approx((4.0 * 2.0) ** 0.5)
    assert geomean([]) is None
    close = report(
        baselines=(
            BaselineRow("op_by_op", 1000.0),
            BaselineRow("numpy", 1500.0, ratio=5.5, ratio_spread=0.2),
            BaselineRow("torch", 1490.0, ratio=5.7, ratio_spread=0.1),
        )
    )
    paired = BenchRow("gqa", 1, "f32", close)  # rounds in pairs, not medians, say who is fastest
    assert (paired.best_other, paired.ratio) == (("numpy", 1500.0), 5.5)
    assert paired.ratio_spread == 0.2
    words = ["bench", "gqa", "--json", "here.json", "--seed", "3"]
    assert command(words) == "obelisk bench gqa --seed 3"
    data = bench_json([good, slow, bad])
    assert [r["error"] for r in data["rows"]] == ["", "", "Infeasible: too large"]
    assert {"date", "command", "commit", "environment", "summary"} <= set(data)
