"""`synth --explain` for GPUs, by the command line: no weights, no device, no compiler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.gpu_schedules import GPU_SHAPES
from tests.mega_models import config
from typer.testing import CliRunner

from obelisk.app.cli import app
from obelisk.schedule.ir import parse_module, print_module

RUN = CliRunner(env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with nothing but its configuration."""
    family, hidden, layers, heads, kv, dim, ffn, vocab, tied = GPU_SHAPES["SmolLM2-135M"]
    out = tmp_path_factory.mktemp("model")
    data = config(
        family, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, head_dim=dim, intermediate_size=ffn, vocab_size=vocab,
        tie_word_embeddings=tied, max_position_embeddings=2048,
    )  # fmt: skip
    (out / "config.json").write_text(json.dumps(data))
    return out


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """The same of a tiny model."""
    (tmp_path / "config.json").write_text(json.dumps(config("qwen3")))
    return tmp_path


def test_explain_says_what_fits_and_which_limit_pruned(folder: Path, tmp_path: Path) -> None:
    """Bytes by use, registers by role, the table of stages, pages reused, counts by limit; a second
    run begins with the checkpoint of the first.
    """
    file, kept = tmp_path / "out.json", tmp_path / "search.json"
    args = ["synth", str(folder), "--explain", "--device", "sm_89", "--checkpoint", str(kept)]
    first = RUN.invoke(app, [*args, "--json", str(file)])
    assert first.exit_code == 0, first.output
    for words in (
        "of shared memory, of which inputs", "registers of a thread: consumers 2", "loader",
        "blocks resident at a time", "parts of K", "inputs.qkv, inputs.attend, inputs.o",
        "pruned: 4 by emitter", "by shared memory", "a block of rtx4090 has 101376",
    ):  # fmt: skip
        assert words in " ".join(first.output.split()), words
    data = json.loads(file.read_text())
    assert data["pruned"]["shared memory"] > 0
    assert all(c["shared_bytes"] <= 99 * 1024 for c in data["choices"])
    assert {r[0] for r in data["stages"]} == {"qkv", "o", "up", "down"}
    trace = tmp_path / "trace.json"
    again = RUN.invoke(
        app, [*args, "--resume", "--json", str(file), "--timeline", str(trace)]
    )  # fmt: skip
    assert again.exit_code == 0, again.output
    assert "of them before" in " ".join(again.output.split())
    assert json.loads(file.read_text()) == data
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["tid"] for e in events} == set(range(data["choices"][0]["tiling"]["blocks"]))
    assert {e["name"] for e in events} == {"wait", "qkv", "attend", "o", "up", "down", "head"}
    end = max(e["ts"] + e["dur"] for e in events) / 1e6
    assert end == pytest.approx(data["choices"][0]["predicted_seconds"], rel=0.03)


def test_the_ir_after_a_pass_reads_back(tiny: Path) -> None:
    """`--ir` prints a module and nothing else."""
    args = ["synth", str(tiny), "--explain", "--device", "h200", "--ir", "tile"]
    made = RUN.invoke(app, args)
    assert made.exit_code == 0, made.output
    assert print_module(parse_module(made.stdout)) == made.stdout
    assert 'phase = "up"' in made.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "h200", "--ir", "tile"], "it needs --explain"),
        (["--device", "h200", "--explain", "--ir", "magic"], "no pass 'magic'"),
        (["--device", "h200", "--explain", "--resume"], "needs --checkpoint FILE"),
        (["--device", "cpu", "--explain", "--checkpoint", "c"], "is for GPUs"),
        (["--device", "cpu", "--explain", "--ir", "tile"], "is for GPUs"),
        (["--device", "cpu", "--explain", "--timeline", "t"], "is for GPUs"),
        (["--device", "h200", "--timeline", "t"], "it needs --explain"),
        (["--device", "h200", "--explain", "--context", "99999"], "context is 99999"),
    ],
)
def test_options_that_cannot_be_served_are_refused(
    tiny: Path, options: list[str], words: str
) -> None:
    """By name, with the way out; nothing is ignored."""
    made = RUN.invoke(app, ["synth", str(tiny), *options])
    assert made.exit_code != 0
    said = " ".join((made.output + str(made.exception)).split())
    assert words in said, said
