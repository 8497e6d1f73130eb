"""From a model directory to tokens: every family against a float64 reference of the tests' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.mega_models import Reference, config, save_model

from obelisk.app.synth import Synthesis, synthesise
from obelisk.engine import Engine
from obelisk.plan import write_plan

STEPS, EPSILON = 64, 1e-3
PROMPT = [5, 17, 200, 3, 258, 0]


def build(folder: Path, c: dict[str, Any], **options: Any) -> tuple[Engine, Reference, Synthesis]:
    """A model directory, its plan on two cores, an engine that loaded it, and the reference."""
    tensors = save_model(folder / "model", c)
    made = synthesise(folder / "model", **{"context": 96, "cores": 2, "profile": 1, **options})
    write_plan(made.plan, folder / "model.plan")
    return Engine.load(folder / "model.plan"), Reference(c, tensors), made


def same_until_near_tie(got: list[int], want: list[int], gaps: list[float]) -> bool:
    """Whether tokens agree up to the first step whose two best logits lie within EPSILON."""
    for a, b, gap in zip(got, want, gaps, strict=True):
        if gap < EPSILON:
            return True
        if a != b:
            return False
    return True


@pytest.mark.parametrize(
    "c",
    [
        config("llama"),
        config("llama", num_key_value_heads=1, attention_bias=True, mlp_bias=True),
        config("mistral", num_key_value_heads=4, sliding_window=None),
        config("qwen2", num_attention_heads=6, num_key_value_heads=3, hidden_size=60),
        config("qwen3", hidden_size=50, intermediate_size=77, vocab_size=301),
    ],
    ids=["llama", "llama-biases", "mistral", "qwen2-3-groups", "qwen3-odd-sizes"],
)
def test_greedy_tokens_equal_the_reference(
    c: dict[str, Any], tmp_path: Path, compiler: str
) -> None:
    engine, reference, made = build(tmp_path, c)
    assert made.plan.tolerance is not None
    assert made.plan.tolerance < 1e-5
    got = engine.generate([PROMPT], STEPS)[0]
    want, gaps = reference.generate(PROMPT, STEPS)
    assert same_until_near_tie(list(got.tokens), want, gaps)
    assert len(set(want)) > 4, "a model that repeats itself shows nothing"
    assert got.reason == "length"
    assert np.isfinite(gaps).all()


@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads", "dim"),
    [
        (1024, 16, 8, 128), (2048, 32, 8, 64), (640, 4, 1, 128), (576, 9, 3, 64),
        (5120, 40, 8, 32),
    ],
)  # fmt: skip
def test_query_width_need_not_equal_hidden(
    hidden: int, heads: int, kv_heads: int, dim: int, tmp_path: Path, compiler: str
) -> None:
    """Records R17 and R18: the widths of real layers, group 5 among them; one layer, every task
    against float64.
    """
    c = config(
        "qwen3", hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=dim, num_hidden_layers=1, intermediate_size=72, vocab_size=300,
    )  # fmt: skip
    engine, reference, made = build(tmp_path, c, context=24)
    assert made.plan.tolerance is not None
    assert made.plan.tolerance < 2e-5
    got = engine.generate([[3, 1, 4]], 12)[0]
    want, gaps = reference.generate([3, 1, 4], 12)
    assert same_until_near_tie(list(got.tokens), want, gaps)
