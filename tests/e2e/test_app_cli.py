"""The command line: what it prints, the JSON keys that scripts rely on, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from obelisk.__main__ import main
from obelisk.app import cli
from obelisk.app.programs import PROGRAMS

ROOT = Path(__file__).parents[2]
SMALL = """
import obelisk as ob

def small(g, batch=1, dtype="f32"):
    x = g.input((4 * batch, 32), dtype, name="x")
    w = g.input((32, 48), dtype, name="w")
    return g.matmul(g.rms_norm(x), w)

def other(g):
    x, w = g.input((4, 32), name="x"), g.input((32, 48), name="w")
    return g.div(g.matmul(x, w), g.sqrt(g.mean(g.square(x))))

def wrong(g):
    x, w = g.input((4, 32), name="x"), g.input((32, 48), name="w")
    return g.div(g.matmul(x, w), g.mean(g.square(x)))
"""
CHOSEN = {"index", "kernels", "time_us", "verdict", "bound", "target"}
CANDIDATE = {
    "index", "kernels", "bytes", "predicted_us", "time_us", "spread_us", "verdict", "bound",
    "status", "reason", "target", "variant", "variants", "chosen", "note", "relative_error",
}  # fmt: skip
REPORT = {
    "choice", "notes", "schema", "program", "digest", "device", "chosen", "baselines",
    "candidates", "search",
    "cached", "interrupted", "floor_us", "seed", "budget_seconds", "seconds", "stages", "failures",
    "ratios", "spread_us", "unavailable", "environment",
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file with one program, an equal one and a wrong one."""
    path = tmp_path / "model.py"
    path.write_text(SMALL)
    return path


def read(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text())


@pytest.mark.usefixtures("compiler", "fresh_cache")
def test_optimize_prints_and_writes_everything(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Graph, candidates, baselines, sentence; JSON with the documented keys; a page; the cache."""
    data, page, saved = tmp_path / "o.json", tmp_path / "o.html", tmp_path / "o.obelisk"
    words = ["optimize", f"{model}:small", "--batch", "2", "--budget", "6s", "--json", str(data)]
    assert main([*words, "--report", str(page), "--save", str(saved)]) == 0
    shown = capsys.readouterr().out
    for part in ("Chosen graph of small", "Candidates", "op_by_op", "numpy", "states in"):
        assert part in shown
    report = read(data)
    assert set(report) == REPORT
    assert set(report["chosen"]) == CHOSEN
    assert all(set(c) == CANDIDATE for c in report["candidates"])
    assert set(report["search"]) == {"seconds", "states", "pruned"}
    assert report["program"] == "small"
    assert report["cached"] is False
    assert report["baselines"]["op_by_op"] > 0
    assert report["baselines"]["numpy"] > 0
    assert "</html>" in page.read_text()
    assert saved.stat().st_size > 1000
    begin = time.monotonic()
    assert main(words) == 0
    assert time.monotonic() - begin < 2.0
    assert read(data)["cached"] is True
    assert "Answered from the cache" in capsys.readouterr().out
    assert main(["cache", "ls", "--json", str(data)]) == 0
    (entry,) = read(data)
    assert entry["program"] == "small"
    assert main(["cache", "show", entry["digest"][:10]]) == 0
    assert f"program: {report['digest']}" in capsys.readouterr().out
    assert main(["cache", "verify"]) == 0
    assert main(["cache", "rm", entry["digest"][:10]]) == 0
    assert main(["cache", "ls", "--json", str(data)]) == 0
    assert read(data) == []


def test_verify_two_programs(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An equal pair exits 0; a wrong one exits 1, with a witness, in the documented JSON form."""
    data = tmp_path / "v.json"
    assert main(["verify", f"{model}:other", f"{model}:small", "--json", str(data)]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert re.fullmatch(r"1 graphs: \d proved, \d tested, 0 refuted, 0 unknown", last)
    assert (
        main(["verify", f"{model}:wrong", "--against", f"{model}:small", "--json", str(data)]) == 1
    )
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last == "1 graphs: 0 proved, 0 tested, 1 refuted, 0 unknown"
    judged = read(data)
    (graph,) = judged["graphs"]
    assert set(graph) == {"index", "verdict", "bound", "seconds", "witness"}
    assert graph["verdict"] == "refuted"
    assert graph["witness"]
    assert judged["summary"]["refuted"] == 1


def test_verify_a_checkpoint(
    mugraphs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every graph of a saved file is judged; one broken by hand is refuted as malformed."""
    data = tmp_path / "v.json"
    source = mugraphs / "lora.json"
    assert main(["verify", str(source), "--against", "lora", "--json", str(data)]) == 0
    assert read(data)["summary"]["graphs"] == 4
    graphs = read(source)
    graphs[1][-1]["input_tensors"][0]["dim"][0] += 1
    graphs[2] = graphs[2][:3] + graphs[2][4:]
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(graphs))
    assert main(["verify", str(broken), "--against", "lora", "--json", str(data)]) == 1
    judged = read(data)["graphs"]
    assert [g["index"] for g in judged] == [0, 1, 2, 3]
    assert judged[0]["verdict"] in ("proved", "tested")
    assert judged[2]["verdict"] == "refuted"
    assert "malformed" in judged[2]["witness"]
    assert "2 refuted" in capsys.readouterr().out or judged[1]["verdict"] != "refuted"


def test_show(
    model: Path, mugraphs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text, picture, JSON, one graph of many, and generated C."""
    svg, data = tmp_path / "g.svg", tmp_path / "g.json"
    assert main(["show", f"{model}:small", "--dtype", "f16"]) == 0
    assert "f16[4, 32]" in capsys.readouterr().out
    assert main(["show", f"{model}:small", "--svg", str(svg), "--json", str(data)]) == 0
    assert svg.read_text().startswith("<?xml")
    assert read(data)["graphs"][0]["graph"]["schema"]
    capsys.readouterr()
    assert main(["show", str(mugraphs / "lora.json"), "--index", "2"]) == 0
    assert capsys.readouterr().out.count("graph ") == 1
    assert main(["show", f"{model}:small", "--lowered"]) == 0
    shown = capsys.readouterr().out
    assert "tile program" in shown
    assert "obelisk_run" not in shown
    assert main(["show", f"{model}:small", "--code", "--no-unrolling"]) == 0
    assert "obelisk_run" in capsys.readouterr().out
    assert main(["show", "gqa", "--lowered", "--code", "--target", "sm_80", "--no-fusion"]) == 0
    shown = capsys.readouterr().out
    assert "CUDA module" in shown
    assert "__global__" in shown
    assert main(["show", str(mugraphs / "lora.json"), "--svg", str(svg)]) == 2
    assert "choose one with --index" in capsys.readouterr().err


def test_search_alone(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Candidates with predicted costs; the first is the program itself."""
    data = tmp_path / "s.json"
    assert main(["search", f"{model}:small", "--budget", "5s", "--json", str(data)]) == 0
    found = read(data)
    assert found["candidates"][0]["index"] == 0
    assert found["candidates"][0]["kernels"] >= 2
    assert found["search"]["states"] >= 0
    assert "states in" in capsys.readouterr().out


@pytest.mark.usefixtures("compiler")
def test_doctor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All needed things are here; without a compiler it exits 1 and says how to mend it."""
    data = tmp_path / "d.json"
    assert main(["doctor", "--json", str(data)]) == 0
    names = {f["name"]: f for f in read(data)["findings"]}
    assert names["C compiler"]["ok"]
    assert names["cache directory"]["ok"]
    assert {"torch", "triton", "GPU", "cores"} <= set(names)
    monkeypatch.setenv("OBELISK_CC", "no-such-compiler")
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "no-such-compiler" in shown
    assert "apt-get install gcc" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimize", "gqqa"], r"error: no program is called 'gqqa' \(did you mean gqa"),
        (["optimize", "gqa", "--dtype", "f99"], "unknown dtype 'f99'"),
        (["optimize", "gqa", "--device", "abacus"], "abacus"),
        (["optimize", "gqa", "--device", "cuda:0,1"], "device 'cuda:0,1': known are .*cuda:N"),
        (["verify", "gqa"], "needs one program to compare with"),
        (["show", "missing.json"], "no such file: missing.json"),
        (["cache", "rm"], "beginning of a digest, or --all"),
        (["cache", "show", "zz"], "no cache entry starts with 'zz'"),
    ],
)
def test_wrong_requests_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, one line on standard error that names the way out, and no traceback. Several
    devices are refused, too (R48).
    """
    assert main(words) == 2
    err = capsys.readouterr().err
    assert re.search(message, err)
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "words", [["optimize"], ["optimize", "gqa", "--budget", "soon"], ["frobnicate"], ["--wat"]]
)
def test_usage_errors(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 with the usage on standard error."""
    assert main(words) == 2
    assert "Usage" in capsys.readouterr().err


def test_faults_of_ours_ask_for_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 3, a traceback, and what to send."""

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("inside")

    monkeypatch.setattr(cli, "load_for", broken)
    assert main(["optimize", "gqa"]) == 3
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "ZeroDivisionError: inside" in err
    assert "Please report it" in err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60s", 60.0), ("90", 90.0), ("1.5m", 90.0), ("2h", 7200.0), ("500ms", 0.5), (" 3 s ", 3.0)],
)
def test_times(text: str, seconds: float) -> None:
    """Every spelling that the help promises."""
    assert cli.parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-3s", "0s", "3 weeks", "1e3"])
def test_no_times(text: str) -> None:
    """What is no time is said to be none."""
    with pytest.raises(typer.BadParameter, match="is no time"):
        cli.parse_seconds(text)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` names the program and its version."""
    assert main(["--version"]) == 0
    assert re.fullmatch(r"obelisk \d+\.\d+\S*\n", capsys.readouterr().out)


@pytest.mark.usefixtures("compiler")
def test_ctrl_c_in_a_process_of_its_own(model: Path, tmp_path: Path) -> None:
    """R34: SIGINT while it works: it still answers, in a few seconds, with exit code 0."""
    data = tmp_path / "o.json"
    words = [sys.executable, "-m", "obelisk", "optimize", "mlp", "--budget", "300s"]
    child = subprocess.Popen(
        [*words, "--json", str(data)],
        env={**os.environ, "OBELISK_CACHE": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(6.0)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    assert "Stopped by the user" in out
    report = read(data)
    assert report["interrupted"] is True
    assert report["chosen"]["verdict"] in ("proved", "tested")


def test_nothing_but_results_when_piped(model: Path) -> None:
    """Standard error stays empty where it is no terminal: no progress, no colour codes."""
    done = subprocess.run(
        [sys.executable, "-m", "obelisk", "show", f"{model}:small"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr == ""
    assert "\x1b" not in done.stdout


def test_every_name_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """`show` works for each named program at batch 2."""
    for name, program in PROGRAMS.items():
        assert main(["show", name, "--batch", "2"]) == 0
        shape = program.graph(2).inputs[0].shape
        assert str(list(shape)) in capsys.readouterr().out
    assert np.prod(shape) > 0
