"""R36: a search in its own process ends in time and memory, survives being killed, and returns the
best so far when interrupted; its account and its bench say what happened.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from obelisk.app import search_bench, search_stats
from obelisk.app.search_bench import LAYER, bar_lines, bars, decoder_layer, line_of
from obelisk.ir import KernelGraph, random_inputs, run
from obelisk.machine import find
from obelisk.search import Budget, Space, search
from obelisk.search import checkpoint as checkpoints
from obelisk.search.checkpoint import Checkpoint
from obelisk.search.threads import thread_counts
from obelisk.search.units import Outcome, context_of
from obelisk.verify import VerdictKind, verify

CPU = find("cpu")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "obelisk", "search", *words]


def answers(data: dict[str, Any]) -> list[tuple[float, str, object]]:
    return [(c["predicted_us"], c["note"], c["graph"]) for c in data["candidates"]]


def test_checkpoints_are_seconds_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished unit is on disk at most `EVERY_SECONDS` and one unit later; no unit writes twice
    within them.
    """
    now = 100.0
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now)
    g = KernelGraph("x")
    g.output(g.exp(g.input((4, 8))))
    file = tmp_path / "c.json"
    keeper = Checkpoint(context_of(g.freeze(), CPU, Space(), 0), file)
    written: list[float] = []
    for k in range(100):
        now = 100.0 + 0.1 * k
        before = file.read_text() if file.exists() else ""
        keeper.add(Outcome(f"u{k}"))
        if file.exists() and file.read_text() != before:
            written.append(now)
    gaps = np.diff([100.0, *written])
    assert checkpoints.EVERY_SECONDS <= 3.0
    assert len(written) >= 4
    assert (gaps > checkpoints.EVERY_SECONDS).all()
    assert (gaps < checkpoints.EVERY_SECONDS + 0.2).all()


def test_killed_and_resumed_by_the_command_line(tmp_path: Path) -> None:
    """SIGKILL in the middle; `--resume` repeats nothing that was on disk and ends as if never
    stopped.
    """
    file, out = tmp_path / "c.json", tmp_path / "out.json"
    slow = (
        "import sys; from obelisk.search import checkpoint; checkpoint.EVERY_SECONDS = 0.0\n"
        "from obelisk.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ["search", "qknorm", "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, "-c", slow, *words, "--checkpoint", str(file)],
        stdout=subprocess.DEVNULL,
    )
    ends = time.monotonic() + 60
    while not file.exists() and process.poll() is None and time.monotonic() < ends:
        time.sleep(0.005)
    process.kill()
    process.wait()
    kept = len(json.loads(file.read_text())["units"])
    assert kept > 0
    from obelisk.__main__ import main

    assert main([*words, "--resume", str(file), "--json", str(out)]) == 0
    resumed = json.loads(out.read_text())
    assert resumed["search"]["resumed"] == kept
    assert resumed["search"]["stopped"] == "exhausted"
    assert main([*words[:2], "--workers", "1", "--json", str(out)]) == 0
    assert answers(resumed) == answers(json.loads(out.read_text()))


def test_ctrl_c_prints_the_best_so_far(tmp_path: Path) -> None:
    """SIGINT to the process: exit 0, the program and what was found, and the reason."""
    out = tmp_path / "out.json"
    file = tmp_path / "layer.py"
    file.write_text(
        "from obelisk.app.search_bench import decoder_layer\n"
        "def program(g):\n    return decoder_layer()\n"
    )
    checkpoint = tmp_path / "c.json"
    process = subprocess.Popen(
        command(str(file), "--json", str(out), "--checkpoint", str(checkpoint)),
        stdout=subprocess.DEVNULL,
    )
    ends = time.monotonic() + 60
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < ends:
        time.sleep(0.05)
    workers = psutil.Process(process.pid).children(recursive=True)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert time.monotonic() - began < 20
    data = json.loads(out.read_text())
    assert data["search"]["stopped"] in ("interrupted", "exhausted")
    assert data["candidates"]
    assert psutil.wait_procs(workers, timeout=10)[1] == []


def test_memory_stays_under_its_bound(tmp_path: Path) -> None:
    """Sampled while it runs, workers included; the search says why it ended."""
    out = tmp_path / "out.json"
    script = (
        "import json; from obelisk.app.search_bench import decoder_layer\n"
        "from obelisk.machine import find; from obelisk.search import *\n"
        "from obelisk.search.units import resident\n"
        "program = decoder_layer(); bound = resident() + (7 << 20)\n"
        "r = search(program, find('cpu'), workers=2, budget=Budget(seconds=30, memory=bound))\n"
        f"open({str(out)!r}, 'w').write(json.dumps([bound, r.stats.stopped, r.stats.peak_memory,"
        " len(r.candidates)]))"
    )
    process = psutil.Popen([sys.executable, "-c", script])
    most = 0
    while process.poll() is None:
        for p in (process, *process.children()):
            try:
                most = max(most, p.memory_info().rss)
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.02)
    assert process.returncode == 0
    bound, stopped, peak, candidates = json.loads(out.read_text())
    assert stopped == "memory"
    assert most < bound + (10 << 20)  # a unit looks at its memory ten times a second
    assert peak < bound + (10 << 20)
    assert candidates >= 1


def test_a_decoder_layer_in_limited_time_is_right() -> None:
    """A program of 46 operators: its best candidate computes what the program does, and is proved
    as a whole.
    """
    program = decoder_layer()
    assert sum(1 for n in program.nodes if n.inputs) > 40
    began = time.monotonic()
    found = search(program, CPU, workers=1, budget=Budget(seconds=2.5))
    assert time.monotonic() - began < 20
    best = found.candidates[1]
    assert best.cost.seconds < found.candidates[0].cost.seconds
    inputs = random_inputs(program, 1, 0.2)
    np.testing.assert_allclose(
        run(best.graph, inputs)[0], run(program, inputs)[0], rtol=1e-8, atol=1e-10
    )
    verdict = verify(program, best.graph)
    assert verdict.kind is VerdictKind.PROVED, verdict


def test_the_account_has_every_level_and_the_verdicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--stats --json`: states, rules, bank hits, skeletons, instances, verified, seconds."""
    from obelisk.__main__ import main

    out = tmp_path / "s.json"
    assert main(["search", "gated_mlp", "--stats", "--json", str(out)]) == 0
    levels = json.loads(out.read_text())["search"]["levels"]
    assert list(levels) == ["program", "block", "thread", "sizes", "verdicts"]
    assert all("seconds" in levels[k] for k in ("program", "block", "sizes", "verdicts"))
    assert {"states", "bank hits", "skeletons"} <= set(levels["block"])
    assert any(k.startswith("pruned: ") for k in levels["block"])
    assert levels["sizes"]["instances"] > 0
    told = levels["verdicts"]
    kept = len(json.loads(out.read_text())["candidates"]) - 1
    assert told["verified"] == told["proved"] + told["tested"] > 0
    assert sum(told[k] for k in ("proved", "tested", "refuted", "unknown", "not judged")) == kept
    said = capsys.readouterr().out
    assert all(word in said for word in ("bank hits", "thread graphs", "verified"))


def test_the_thread_level_counts_what_is_there() -> None:
    """Chains that became thread graphs, and those that a thread's registers cannot hold."""
    machine = find("h200")
    g = KernelGraph("chain")
    x, w = g.input((4, 2048)), g.input((2048, 64))
    g.output(g.matmul(g.silu(g.exp(x)), w))
    program = g.freeze()
    found = search(program, machine, workers=1)
    level = search_stats.thread_level(found, machine)
    blocks = [
        launch.block
        for c in found.candidates[1:]
        for launch in c.graph.launches()
        if launch.block is not None
    ]
    counts = [thread_counts(b, machine) for b in blocks]
    assert level["thread graphs"] == sum(c.fused for c in counts) > 0
    assert 0 < level["most registers a thread"] <= machine.registers_per_thread
    assert level["pruned: registers"] == sum(c.apart for c in counts)
    assert level["values in register"] > 0
    plain = search(program, machine, workers=1, space=Space(thread_graphs=False))
    assert search_stats.thread_level(plain, machine)["thread graphs"] == 0
    assert "most registers a thread" not in search_stats.thread_level(found, CPU)


def test_judges_that_run_out_of_time_say_so() -> None:
    found = search(search_bench.find_program("lora").graph(), CPU, workers=1)
    told = search_stats.judged(found, 0, -1.0)
    assert told["not judged"] == len(found.candidates) - 1
    assert told["verified"] == 0


def row(**changes: Any) -> dict[str, Any]:
    base = {
        "program": "gqa", "seconds": 1.0, "found_seconds": 0.5, "structures": {"a": {"rank": 1}},
        "stopped": "exhausted", "block_ops": 40, "peak_memory": 1 << 28, "states": 10,
        "search_seconds": 1.0,
    }  # fmt: skip
    return {**base, **changes}


def scaled(one: float, ratio: float) -> dict[str, Any]:
    return {"1": {"search_seconds": one}, "2": {}, "ratio": ratio}


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"seconds": 10.5}, ["structures found"]),
        ({"structures": {"a": None}}, ["structures found"]),
        ({"structures": {}}, ["structures found"]),
        ({"peak_memory": 3 << 30}, ["peak memory"]),
        ({"scaling": scaled(2.5, 1.6)}, ["two workers"]),
        ({"scaling": scaled(2.5, 1.8)}, []),
        ({"scaling": scaled(1.5, 1.2)}, []),
        ({"program": "rmsnorm", "block_ops": 11, "found_seconds": 2.5}, ["best of 11"]),
        ({"program": "rmsnorm", "block_ops": 11, "stopped": "time"}, ["exhausted"]),
        ({"program": "mlp", "seconds": 50.0}, []),
    ],
)
def test_bars_are_met_or_missed_by_what_was_measured(
    changes: dict[str, Any], missed: list[str]
) -> None:
    found = bars([row(**changes)])
    wrong = [b["bar"] for b in found if not b["passed"]]
    assert len(wrong) == len(missed)
    assert all(part in bar for part, bar in zip(missed, wrong, strict=True))
    lines = bar_lines(found)
    assert [line.startswith("MISSED") for line in lines] == [True] * len(wrong) + [False] * (
        len(lines) - len(wrong)
    )


def test_the_bench_compares_one_worker_with_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both rates and their ratio in one row; a smaller space beside one of the programs."""
    monkeypatch.setattr(search_bench, "REPEATS", 1)
    monkeypatch.setattr(search_bench, "SMALL", "lora")
    seen: list[str] = []
    rows = search_bench.run_search_bench(
        ["lora"], budget=30, workers="2", each=lambda r: seen.append(line_of(r))
    )
    first, small = rows
    scaling = first["scaling"]
    assert set(scaling) == {"1", "2", "ratio"}
    assert scaling["ratio"] == (
        scaling["2"]["states_per_second"] / scaling["1"]["states_per_second"]
    )
    assert (first["workers"], first["block_ops"], small["block_ops"]) == (2, 40, 11)
    assert "scaling" not in small
    assert len(seen) == 2
    assert f"x{scaling['ratio']:.2f}" in seen[0]
    data = search_bench.search_json(rows)
    assert {b["program"] for b in data["bars"]} == {"lora", "lora/11"}
    assert json.loads(json.dumps(data)) == data
    assert LAYER in search_bench.ALL


def test_this_file_leaves_no_process() -> None:
    """Whatever was started above has ended."""
    me = psutil.Process(os.getpid())
    assert [p for p in me.children(recursive=True) if "search" in " ".join(p.cmdline())] == []
