"""Weights that a checkpoint stores as a plan does: moved as they are, equal to the long way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.mega_cuda_models import MODELS
from tests.mega_models import random_tensors

from obelisk.app.synth_cuda import make_cuda_plan
from obelisk.base.errors import UserError
from obelisk.machine import find
from obelisk.plan import Plan
from obelisk.runtime import Checkpoint, file_digests, packing
from obelisk.runtime.packing import pack
from obelisk.runtime.session import packed_weights
from obelisk.schedule.gpu_default import default_tiling
from obelisk.tasks import Workload, parse_config, parse_format

H200 = find("h200")
TYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}


def stored(folder: Path, name: str, kind: Any, damage: str = "") -> Checkpoint:
    """A checkpoint of a small model in one type; `damage` names a tensor that holds an infinity."""
    tensors = {k: v.astype(kind) for k, v in random_tensors(MODELS[name], 1).items()}
    if damage:
        tensors[damage].reshape(-1)[-1] = np.inf
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS[name]))
    save_file(tensors, str(folder / "model.safetensors"))
    return Checkpoint(folder)


def plan_of(name: str, form: str) -> Plan:
    """A plan without a kernel: its layout is what is asked for."""
    model, work, machine = parse_config(MODELS[name]), Workload(1, 32, parse_format(form)), H200
    return make_cuda_plan(model, work, default_tiling(model, work, machine), machine, binary=b"")


@pytest.mark.parametrize("form", list(TYPES))
@pytest.mark.parametrize("name", list(MODELS))
def test_equal_to_the_long_way(
    name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every matrix goes straight where the types agree, none where they differ; equal arenas."""
    layout = plan_of(name, form).layout
    went: list[bool] = []
    plain = packing.straight

    def seen(*args: Any) -> bool:
        answer = plain(*args)
        went.append(answer)
        return answer

    monkeypatch.setattr(packing, "straight", seen)
    other = np.float16 if form == "fp32" else np.float32
    for kind, same in ((TYPES[form], True), (other, False)):
        checkpoint = stored(tmp_path / str(same), name, kind)
        want = pack(layout, checkpoint.tensor)
        assert not any(went)
        went.clear()
        assert np.array_equal(pack(layout, checkpoint.tensor, raw=checkpoint.raw), want)
        assert went
        assert all(w == same for w in went)
        went.clear()


@pytest.mark.parametrize("form", list(TYPES))
def test_what_is_not_finite_is_named(tmp_path: Path, form: str) -> None:
    """The last element of a matrix, by its name."""
    name = "qwen3, 24"
    damage = "model.layers.1.mlp.down_proj.weight"
    checkpoint = stored(tmp_path / "m", name, TYPES[form], damage)
    with pytest.raises(UserError, match=f"weights of {damage} are not finite"):
        pack(plan_of(name, form).layout, checkpoint.tensor, raw=checkpoint.raw)


def test_views_are_the_tensors(tmp_path: Path) -> None:
    """Views of the file's pages: equal numbers, read-only, None for what is not there."""
    checkpoint = stored(tmp_path / "m", "qwen3, 24", np.float16)
    for key in random_tensors(MODELS["qwen3, 24"], 1):
        view = checkpoint.raw(key)
        assert view is not None
        assert np.array_equal(view.astype(np.float32), checkpoint.tensor(key))
        assert not view.flags.writeable
    assert checkpoint.raw("model.nothing") is None


def test_other_weights_are_refused_though_they_were_packed(tmp_path: Path) -> None:
    """Hashing runs beside packing; what was packed is not used where a digest differs, and the
    digest is what is told even where packing fails too.
    """
    name = "qwen3, 24"
    stored(tmp_path / "m", name, TYPES["bf16"])
    stored(tmp_path / "n", name, TYPES["bf16"], "model.layers.1.mlp.down_proj.weight")
    plan = replace(plan_of(name, "bf16"), weights_digests=file_digests(tmp_path / "m"))
    assert packed_weights(plan, tmp_path / "m").nbytes == plan.layout.total_bytes
    with pytest.raises(UserError, match=r"model.safetensors has other content"):
        packed_weights(plan, tmp_path / "n")
