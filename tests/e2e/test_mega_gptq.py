"""4-bit checkpoints in the GPTQ layout: repacked as they are, and refused by name where they are
something else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.mega_gptq import save_gptq
from tests.mega_models import Reference, config, random_tensors

from obelisk.app.synth import synthesise
from obelisk.base.errors import ObeliskError, UnknownName, UserError
from obelisk.engine import Engine
from obelisk.plan import read_plan, write_plan
from obelisk.runtime import Checkpoint, CpuSession
from obelisk.runtime.packing import quantise, quantise_groups
from obelisk.tasks.weights import EMBED, HEAD

# Rows of 192: a whole group of 128 and a half one; of 96, within one group, and of 264.
CONFIG = config(
    "qwen2", hidden_size=192, head_dim=24, intermediate_size=264, tie_word_embeddings=True
)
TENSORS = random_tensors(CONFIG, 11)
PROMPT = [5, 17, 200, 3]


def agree(engine: Engine, means: dict[str, Any], c: dict[str, Any] = CONFIG) -> None:
    """Greedy tokens equal the reference on the weights that the checkpoint means."""
    want, gaps = Reference(c, means).generate(PROMPT, 48)
    tie = next((i for i, g in enumerate(gaps) if g < 1e-3), 48)
    assert tie > 8
    assert list(engine.generate([PROMPT], 48)[0].tokens)[:tie] == want[:tie]


@pytest.mark.parametrize(
    ("group", "symmetric", "version"),
    [(128, True, 1), (128, False, 1), (64, False, 2), (32, True, 1), (64, True, 2)],
)
def test_a_checkpoint_in_groups_is_repacked_as_it_is(
    group: int, symmetric: bool, version: int, tmp_path: Path, compiler: str
) -> None:
    """Both versions, zeros of 0 and 15 among them; batch 1 and 3; the plan reads back."""
    means = save_gptq(tmp_path / "m", CONFIG, TENSORS, group, symmetric, version)
    options = {"context": 64, "cores": 2, "profile": 1, "weights": "w4a16"}
    made = synthesise(tmp_path / "m", **options)
    assert made.plan.tolerance is not None
    assert made.plan.tolerance < 2e-5
    assert made.plan.workload["group"] == group
    assert made.plan.workload["zeros"] is not symmetric
    assert {m.format for m in made.plan.layout.matrices} == {"fp16"}
    assert {m.format for m in made.plan.layout.layer_matrices} == {"w4a16"}
    write_plan(made.plan, tmp_path / "a.plan")
    assert read_plan(tmp_path / "a.plan") == made.plan
    engine = Engine.load(tmp_path / "a.plan")
    agree(engine, means)
    three = synthesise(tmp_path / "m", batch=3, **options)
    alone = engine.generate([PROMPT], 20)[0]
    assert Engine(CpuSession.load(three.plan)).generate([[7], PROMPT, [8, 9]], 20)[1] == alone


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_in_8_bits_is_rounded_from_the_checkpoints(
    tied: bool, tmp_path: Path, compiler: str
) -> None:
    """Asked for with `head`: a scale a row, of the head's tensor or of the embedding's, which stays
    in 16 bits; the plan says it, and reads back.
    """
    c, apart = {**CONFIG, "tie_word_embeddings": tied}, {**CONFIG, "tie_word_embeddings": False}
    means = save_gptq(tmp_path / "m", c, random_tensors(c, 11), 64, False)
    q, scale = quantise(means[EMBED if tied else HEAD])
    made = synthesise(tmp_path / "m", context=64, cores=2, profile=1, weights="w4a16", head="int8")
    assert made.plan.tolerance is not None
    assert made.plan.tolerance < 2e-5
    assert made.plan.workload["head"] == "int8"
    assert [m.format for m in made.plan.layout.matrices] == ["fp16", "int8"]
    write_plan(made.plan, tmp_path / "a.plan")
    assert read_plan(tmp_path / "a.plan") == made.plan
    engine = Engine.load(tmp_path / "a.plan")
    agree(engine, {**means, HEAD: q * scale[:, None]}, apart)


def test_any_other_format_takes_what_the_groups_mean(tmp_path: Path, compiler: str) -> None:
    """fp32 from a 4-bit checkpoint is exact; 4 bits from a dense one are rounded to the nearest."""
    means = save_gptq(tmp_path / "m", CONFIG, TENSORS, 64, False)
    found = Checkpoint(tmp_path / "m")
    for name, w in means.items():
        assert np.allclose(found.tensor(name), w, rtol=1e-6, atol=0), name
    made = synthesise(tmp_path / "m", context=64, cores=1, profile=1)
    agree(Engine(CpuSession.load(made.plan)), means)


@pytest.mark.parametrize(("name", "group"), [("w4a16", 128), ("w4a16:64", 64)])
def test_a_dense_checkpoint_is_rounded_in_groups(
    name: str, group: int, tmp_path: Path, compiler: str
) -> None:
    """The nearest of 16 levels, up to half a step beyond the largest; the head keeps 16 bits."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(TENSORS, str(tmp_path / "model.safetensors"))
    made = synthesise(tmp_path, context=64, cores=2, profile=1, weights=name)
    assert made.plan.workload["group"] == group
    means = {}
    for key, w in TENSORS.items():
        if key.endswith("_proj.weight"):
            g = quantise_groups(w, group)
            means[key] = g.dense()
            step = g.scale.astype(np.float32)[:, np.arange(w.shape[1]) // group]
            assert (np.abs(means[key] - w) <= 0.505 * step).all()
        else:
            means[key] = w.astype(np.float16).astype(np.float32) if w.ndim == 2 else w
    agree(Engine(CpuSession.load(made.plan)), means)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"quant_method": "awq"}, "awq.*known is gptq"),
        ({"bits": 8}, "8 bits.*known is 4"),
        ({"group_size": -1}, "group_size -1.*32, 64, 128"),
        ({"checkpoint_format": "marlin"}, "marlin.*gptq_v2"),
    ],
)
def test_another_quantisation_is_refused_by_name(
    section: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Method, width, group, format."""
    save_gptq(tmp_path, CONFIG, TENSORS, **section)
    for weights in ("w4a16", "fp32"):
        with pytest.raises(UnknownName, match=words):
            synthesise(tmp_path, context=32, cores=1, profile=1, weights=weights)


def test_what_a_checkpoint_holds_is_checked(tmp_path: Path) -> None:
    """Act-order, zeros against `sym`, biases of no use, shapes, groups asked for: each by name."""

    def refused(words: str, weights: str = "w4a16") -> None:
        with pytest.raises((UserError, ObeliskError), match=words):
            synthesise(tmp_path, context=32, cores=1, profile=1, weights=weights)

    path = tmp_path / "model.safetensors"
    save_gptq(tmp_path, CONFIG, TENSORS)
    refused("groups of 128, not of 64", "w4a16:64")
    good = load_file(path)
    base = "model.layers.1.mlp.up_proj"
    order = good[base + ".g_idx"][::-1].copy()
    for name, value, words in (
        (base + ".g_idx", order, r"layers\.1\.mlp\.up_proj orders its columns.*desc_act"),
        (base + ".qzeros", good[base + ".qzeros"] + 1, "sym"),
        (base + ".bias", np.ones(264, np.float16), r"up_proj\.bias.*not zero"),
        (base + ".scales", good[base + ".scales"][:, :8].copy(), r"scales.*shape \(2, 8\)"),
    ):
        save_file({**good, name: value}, str(path))
        refused(words)
    without = {k: v for k, v in good.items() if k != base + ".qzeros"}
    save_file(without, str(path))
    refused(r"no tensor model\.layers\.1\.mlp\.up_proj\.qzeros")
    save_file({**good, base + ".scales": good[base + ".scales"] * np.float16(np.inf)}, str(path))
    refused("not finite")


def test_fp16_refuses_what_it_cannot_hold(tmp_path: Path, compiler: str) -> None:
    """A weight of 70000 names its tensor and the way out."""
    big = {k: v.copy() for k, v in TENSORS.items()}
    big["model.layers.0.mlp.up_proj.weight"][3, 4] = 70000.0
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(big, str(tmp_path / "model.safetensors"))
    with pytest.raises(UserError, match=r"70000, beyond fp16.*bf16"):
        synthesise(tmp_path, context=32, cores=1, profile=1, weights="fp16")
