"""A small model that is trained here, from text, so that its tokens mean something; and the command
line from the model's directory to text.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.mega_models import Reference

from obelisk.__main__ import main
from obelisk.engine import Engine, Tokenizer

ROOT = Path(__file__).parents[2]


def example() -> ModuleType:
    """`examples/tiny_model.py` as a module."""
    spec = importlib.util.spec_from_file_location("tiny", ROOT / "examples" / "tiny_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """The model's directory, and the losses of its training."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    return folder, example().main(folder, steps=120)


@pytest.fixture(scope="module")
def plan(trained: tuple[Path, list[float]], compiler: str) -> Path:
    """The model's plan, made by the command."""
    folder, _ = trained
    path = folder.parent / "tiny.plan"
    command = ["synth", str(folder), "--context", "300", "--profile", "1", "-o", str(path)]
    assert main(command) == 0
    return path


def test_the_gradients_are_the_loss_s_derivatives() -> None:
    """Every tensor, in float64, against central differences."""
    tiny: Any = example()
    rng = np.random.default_rng(1)
    trainer = tiny.Trainer({k: v.astype(np.float64) for k, v in tiny.initial(rng).items()})
    ids = rng.integers(0, tiny.VOCAB, (2, 6))
    trainer.loss(ids[:, :-1], ids[:, 1:])
    grads = {k: g.copy() for k, g in trainer.grads.items()}
    assert set(grads) == set(trainer.w)
    for name, w in trainer.w.items():
        direction = rng.standard_normal(w.shape)
        direction *= 1e-4 / np.abs(direction).max()
        losses = []
        for sign in (1, -1):
            w += sign * direction
            losses.append(trainer.loss(ids[:, :-1], ids[:, 1:]))
            w -= sign * direction
        want = float((grads[name] * direction).sum())
        assert (losses[0] - losses[1]) / 2 == pytest.approx(want, rel=1e-4, abs=1e-10), name


def test_the_model_learns_and_its_plan_says_what_it_learnt(
    trained: tuple[Path, list[float]], plan: Path
) -> None:
    """The loss falls by a nat and more; 256 greedy tokens equal the float64 reference outside
    near-ties.
    """
    folder, losses = trained
    assert np.mean(losses[-10:]) < losses[0] - 1.0
    config = json.loads((folder / "config.json").read_text())
    prompt = Tokenizer(folder).encode("The search keeps")
    want, gaps = Reference(config, load_file(folder / "model.safetensors")).generate(prompt, 256)
    ties = [i for i, g in enumerate(gaps) if g < 1e-3]
    assert len(ties) < 32  # the model depends on this repository's texts
    engine, start = Engine.load(plan), 0
    for stop in (*ties, 256):  # after a near-tie, on from what the reference chose
        if start < stop:
            got = engine.generate([[*prompt, *want[:start]]], stop - start)[0]
            assert list(got.tokens) == want[start:stop]
        start = stop + 1


def test_text_goes_in_and_comes_out(
    trained: tuple[Path, list[float]], plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`generate --prompt` prints the text of the tokens that `--prompt-ids --ids` prints."""
    folder, _ = trained
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode("A plan ")
    assert tokenizer.decode(ids) == "A plan "
    base = ["generate", str(plan), "--greedy", "--max-tokens", "12"]
    assert main([*base, "--prompt", "A plan "]) == 0
    text = capsys.readouterr().out
    said = folder.parent / "said.json"
    command = [*base, "--prompt-ids", ",".join(map(str, ids)), "--ids", "--json", str(said)]
    assert main(command) == 0
    printed = capsys.readouterr()
    last = printed.out.strip().splitlines()[-1]
    assert re.search(r"loaded: plan [\d.]+ s, weights [\d.]+ s, kernel and memory", printed.err)
    assert set(json.loads(said.read_text())["loaded"]) == {"plan", "weights", "rest"}
    tokens = [int(t) for t in last.split(",")]
    assert len(tokens) == 12
    assert tokenizer.decode(tokens) + "\n" == text


def test_commands_refuse_with_exit_code_2_and_one_line(
    trained: tuple[Path, list[float]], plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong and the way out, no traceback."""
    folder, _ = trained
    cases = (
        (["synth", str(folder)], "-o PLAN"),
        (["synth", str(folder / "nowhere"), "-o", "x"], "no model directory"),
        (["synth", str(folder), "-o", "x", "--batch", "9"], "1 to 8"),
        (["synth", str(folder), "-o", "x", "--context", "513"], "1 to 512"),
        (["synth", str(folder), "-o", "x", "--weights", "w3"], "fp32, bf16, fp16, int8, w4a16"),
        (
            ["synth", str(folder), "-o", "x", "--head", "int8"],
            "only w4a16 has a choice of the head",
        ),
        (["synth", str(folder), "-o", "x", "--weights", "w4a16", "--head", "int4"], "16 (fp16"),
        (["generate", str(plan)], "--prompt TEXT or --prompt-ids"),
        (["generate", str(plan), "--prompt-ids", "1,x"], "expected integers"),
        (["generate", str(plan), "--prompt-ids", "512"], "expected 0 to 511"),
        (["generate", str(folder / "no.plan"), "--prompt-ids", "1"], "obelisk synth"),
    )
    for words, expected in cases:
        assert main(list(words)) == 2, words
        err = capsys.readouterr().err
        assert expected in err, words
        assert err.count("\n") == 1, err
        assert "Traceback" not in err


def test_a_plan_shows_itself(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`plan show` names machine, model, workload, schedule and what was measured."""
    assert main(["plan", "show", str(plan)]) == 0
    out = capsys.readouterr().out
    for words in ("llama, 2 layers, hidden 64", "batch 1, context 300, fp32", "ms a step"):
        assert words in out
    assert main(["plan", "show", str(plan), "--source"]) == 0
    assert "obelisk_mega" in capsys.readouterr().out


def test_explain_says_what_fits(
    trained: tuple[Path, list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    """`synth --explain` builds nothing and names pages, limits and predictions."""
    folder, _ = trained
    assert main(["synth", str(folder), "--explain"]) == 0
    out = capsys.readouterr().out
    for words in ("read by a step at the full context", "pages shared", "pruned", "counter"):
        assert words in out
