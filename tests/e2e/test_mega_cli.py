"""What `plan show` and `generate` promise on the command line, on a small plan for this CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from tests.mega_models import config, save_model

from obelisk.__main__ import main
from obelisk.plan import read_plan, write_plan

CONTEXT = 32


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory, compiler: str) -> Path:
    """A plan of two layers, by the command."""
    folder = tmp_path_factory.mktemp("cli")
    save_model(folder / "m", config("qwen3"))
    made = folder / "p"
    command = ["synth", str(folder / "m"), "--context", str(CONTEXT), "--batch", "2"]
    assert main([*command, "--cores", "2", "--profile", "1", "-o", str(made)]) == 0
    return made


def test_show_says_what_was_judged(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tolerance that was reached and what was compared, in words and in the manifest."""
    assert main(["plan", "show", str(plan), "--json", str(plan.with_name("j"))]) == 0
    out = capsys.readouterr().out
    assert "of the largest logit, against float64 (last 3 of 20 positions, slots 2)" in out
    data = json.loads(plan.with_name("j").read_text())
    assert data["judged"]["logits"] == data["tolerance"] < 1e-5
    assert 0 < data["judged"]["keys"] < 1e-5
    old = plan.with_name("old")
    write_plan(replace(read_plan(plan), judged={}), old)
    assert main(["plan", "show", str(old)]) == 0
    assert capsys.readouterr().out.rstrip().endswith("of the largest logit, against float64")


def test_show_writes_a_step_s_timeline(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every task of both cores, one after the other on each; weights that moved are named."""
    trace = plan.with_name("t.json")
    assert main(["plan", "show", str(plan), "--timeline", str(trace)]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    tasks = read_plan(plan).schedule["tasks_per_core"]
    for core, count in enumerate(tasks):
        mine = [e for e in events if e["tid"] == core]
        assert len(mine) == count
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(mine))
    moved = plan.with_name("moved")
    write_plan(replace(read_plan(plan), weights_path="/nowhere"), moved)
    capsys.readouterr()
    assert main(["plan", "show", str(moved), "--timeline", str(trace)]) == 2
    assert "--weights-dir" in capsys.readouterr().err
    folder = ["--weights-dir", str(plan.with_name("m"))]
    assert main(["plan", "show", str(moved), "--timeline", str(trace), *folder]) == 0
    capsys.readouterr()
    assert main(["plan", "show", str(moved), *folder]) == 2
    assert "for --timeline" in capsys.readouterr().err


def test_another_machine_is_refused_by_name(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its processor, and how many cores the plan needs."""
    whole = read_plan(plan)
    other = plan.with_name("other")
    for host, said in (
        (replace(whole.host, title="A64FX"), "A64FX"), (replace(whole.host, machine="ppc"), "ppc"),
    ):  # fmt: skip
        write_plan(replace(whole, host=host), other)
        assert main(["generate", str(other), "--prompt-ids", "1"]) == 2
        assert said in capsys.readouterr().err


def test_a_full_context_is_said(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reason `length` is either the limit that was asked for or the plan's."""
    command = ["generate", str(plan), "--prompt-ids", "1,2,3", "--greedy", "--ids"]
    assert main([*command, "--max-tokens", "4"]) == 0
    captured = capsys.readouterr()
    assert "4 tokens (length);" in captured.err
    assert len(captured.out.strip().splitlines()[-1].split(",")) == 4
    assert main([*command, "--max-tokens", "100"]) == 0
    assert f"29 tokens (length: the plan's context of {CONTEXT} is full)" in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--temperature", "0.5"), ("--top-k", "3"), ("--top-p", "0.5")])
def test_options_that_would_be_ignored_are_refused(
    plan: Path, option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Greedy, and how to draw."""
    assert main(["generate", str(plan), "--prompt-ids", "1", "--greedy", *option]) == 2
    assert "--greedy takes the likeliest" in capsys.readouterr().err
    assert main(["generate", str(plan), "--prompt-ids", "1", "--max-tokens", "2", *option]) == 0


def test_synth_refuses_before_it_works(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan that could not be written, and more SMs than the machine has."""
    model = str(plan.with_name("m"))
    assert main(["synth", model, "-o", "/nowhere/at/all"]) == 2
    assert "no directory /nowhere/at to write the plan in" in capsys.readouterr().err
    for rest in (["-o", str(plan.with_name("x"))], ["--explain"]):
        assert main(["synth", model, "--device", "sm_89", "--cores", "129", *rest]) == 2
        assert "129 SMs asked for, rtx4090 has 128" in capsys.readouterr().err


def test_explain_is_written_too(plan: Path) -> None:
    """`--explain --json` on a CPU: every schedule that fits, best first, and what was pruned."""
    out = plan.with_name("e.json")
    assert main(["synth", str(plan.with_name("m")), "--explain", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    seconds = [c["predicted_seconds"] for c in found["choices"]]
    assert seconds == sorted(seconds)
    assert len(seconds) + sum(found["pruned"].values()) == found["tried"]
    assert all(c["scratch_bytes"] > 0 and c["tiling"]["panel"] in (4, 8) for c in found["choices"])
