"""Every operator of a CUDA plan against float64, on the twin; and the one at fault by name."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import mega_cuda_twin as twin
from tests.mega_cuda_checks import planned
from tests.mega_cuda_models import HEAD8, MODELS
from tests.mega_models import config, random_tensors, save_model

from obelisk.__main__ import main
from obelisk.app import compare_cuda, synth_cuda
from obelisk.app.compare import Difference, first_beyond
from obelisk.app.compare_cuda import TOLERANCE, recording_plan
from obelisk.app.compare_cuda import compare_cuda as compare
from obelisk.base.errors import UserError
from obelisk.machine import find
from obelisk.plan import Plan, write_plan
from obelisk.runtime import CudaSession, Sampling, file_digests
from obelisk.runtime import cuda as runtime
from obelisk.runtime.packing import pack, stored
from obelisk.tasks import (
    TaskKind,
    WeightFormat,
    Workload,
    parse_config,
    parse_head,
    parse_weights,
)

if not twin.SUPPORTED or shutil.which("g++") is None:
    pytest.skip("needs g++ on x86-64, to run fibers", allow_module_level=True)

MACHINE = replace(find("h200"), cores=3)
BF16 = Workload(1, 40, WeightFormat.BF16)
# Nine layers, so that marks (three bits of a layer's number) come round.
DEEP = config(
    "qwen3", num_hidden_layers=9, hidden_size=96, vocab_size=131, head_dim=32, intermediate_size=128
)
SMALL = config("qwen3", num_hidden_layers=2)


@pytest.fixture(autouse=True)
def builder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The twin's compiler, in place of the GPU's."""
    folder = tmp_path_factory.getbasetemp() / "twin"
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(synth_cuda, "build", lambda e, m: b"")
    monkeypatch.setattr(runtime, "Device", twin.TwinDevice)
    monkeypatch.setattr(runtime, "Kernel", twin.TwinKernel)

    def build(source: str, arch: str) -> bytes:
        return twin.build_twin(source, folder)

    monkeypatch.setattr(compare_cuda, "compile_recording", build)
    return build


def differences(c: dict[str, Any], plan: Plan, build: Any, steps: int = 2) -> list[Difference]:
    """What `compare_cuda` finds with random weights."""
    tensors = random_tensors(c, 8)
    session = CudaSession(recording_plan(plan, build), pack(plan.layout, tensors.__getitem__))
    return compare(session, stored(plan.layout, tensors.__getitem__), steps)


@pytest.mark.parametrize(
    ("c", "batch", "weights", "changes"),
    [(DEEP, 2, "bf16", "kv_pieces=3+o_split=2"), (DEEP, 1, "fp16", "down_split=2+barriers=o"),
     (MODELS["llama, groups of 4"], 2, "bf16", "rounded=1+down_split=2+kv_ring=1+staged=0"),
     (SMALL, 1, "int8", ""), (SMALL, 2, "w4a16:64", ""), (SMALL, 1, f"w4a16{HEAD8}", ""),
     (DEEP, 2, "fp32", "kv_pieces=3"),
     (MODELS["llama, no groups, biases, odd sizes"], 1, "bf16", "bulk=0"),
     (MODELS["qwen2, groups of 7, tied"], 1, "fp16", "")],
    ids=lambda x: str(x) if isinstance(x, str | int) else f"{x['model_type']}",
)  # fmt: skip
def test_every_operator_of_every_layer_agrees_with_its_meaning(
    c: dict[str, Any], batch: int, weights: str, changes: str, builder: Any
) -> None:
    """Record R33: results of all operators that leave a block, of all layers, on their own inputs;
    the deepest layer is no further off than the first.
    """
    form, group = parse_weights(weights.removesuffix(HEAD8))
    head = parse_head("int8" if weights.endswith(HEAD8) else None, form)
    work = Workload(batch, 40, form, group or 128, head=head)
    plan = planned(parse_config(c), work, changes, MACHINE)
    found = differences(c, plan, builder, 3)
    kinds = [TaskKind.QKV_ROWS, TaskKind.ROPE, TaskKind.ROPE, TaskKind.ATTEND, TaskKind.O,
             TaskKind.UP, TaskKind.DOWN]  # fmt: skip
    layers = c["num_hidden_layers"]
    assert [(d.kind, d.layer) for d in found] == [
        *((k, layer) for layer in range(layers) for k in kinds), (TaskKind.HEAD, -1)
    ]  # fmt: skip
    assert first_beyond(found, TOLERANCE[plan.cache.format]) is None, max(
        found, key=lambda d: d.error
    )
    for kind in (TaskKind.O, TaskKind.UP):
        errors = [d.error for d in found if d.kind is kind]
        assert 0 < max(errors) < 6 * min(errors)


@pytest.mark.parametrize(
    ("changes", "old", "new", "kind"),
    [
        ("direct=0", "om_put_single(to, v[j] * r + b.x, mark);",
         "om_put_single(to, v[j] * r * 1.1f, mark);", "qkv_rows"),
        ("direct=1", "at < OM_QKV_ROWS)) om_put_single(values + at * 4, v, mark);",
         "at < OM_QKV_ROWS)) om_put_single(values + at * 4, 1.1f * v, mark);", "qkv_rows"),
        ("", "x[i] = mine * c[i] +", "x[i] = mine * c[i] * 1.1f +", "rope"),
        ("", "sum[2] += f * a.y,", "sum[2] += 1.1f * f * a.y,", "attend"),
        ("direct=0", "lo += x[0], hi += x[8];", "lo += x[0], hi += 1.1f * x[8];", "o"),
        ("direct=1", "v += residual[at - kept];", "v += 1.1f * residual[at - kept];", "o"),
        ("", "om_exp2(-1.4426950408889634f * g)", "om_exp2(-1.3f * g)", "up"),
        ("", "lo = v[j] * r, hi = v[2 + j] * r;", "lo = v[j] * r, hi = v[2 + j] * r * 1.1f;",
         "head"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found_by_name(
    changes: str, old: str, new: str, kind: str, builder: Any
) -> None:
    """Record R33: a wrong constant in one operator's text gives that operator, and no other but one
    of the same text: both products that end in the residual stream; rotated keys and, in a block of
    attention, rotated queries.
    """
    plan = planned(parse_config(SMALL), BF16, changes, MACHINE)
    assert old in plan.source
    found = differences(SMALL, replace(plan, source=plan.source.replace(old, new)), builder)
    first = first_beyond(found, TOLERANCE["bf16"])
    assert first is not None
    assert first.kind == kind
    others = {d.kind for d in found if d.error > TOLERANCE["bf16"]}
    assert others == {kind, {"o": "down", "rope": "attend"}.get(kind, kind)}


@pytest.mark.parametrize("changes", ["direct=0", "direct=1"])
def test_a_fault_of_one_layer_is_told_with_its_layer(changes: str, builder: Any) -> None:
    """Layer 5 of nine alone reads another layer's gain."""
    plan = planned(parse_config(DEEP), BF16, changes, MACHINE)
    gain = r"(om_vector\((?:s\.)?p, (?:om_anew\()?)s\.layer(\)?, OM_AT_NORM_MID\))"
    wrong, found_in = re.subn(gain, r"\1s.layer == 5 ? 4 : s.layer\2", plan.source)
    assert found_in == 3  # one in each text of a layer, and what rounds rows
    found = differences(DEEP, replace(plan, source=wrong), builder)
    beyond = [d for d in found if d.error > TOLERANCE["bf16"]]
    assert [(d.kind, d.layer) for d in beyond] == [(TaskKind.UP, 5)]


def test_recording_changes_nothing_else(builder: Any) -> None:
    """Logits and tokens are the kernel's own to the last bit; several steps a launch are refused,
    and so is a text that does not say where values lie.
    """
    model = parse_config(DEEP)
    plan = planned(model, BF16, "kv_pieces=2", MACHINE)
    arena = pack(plan.layout, random_tensors(DEEP, 8).__getitem__)
    plain = CudaSession(replace(plan, binary=builder(plan.source, "")), arena)
    recorded = CudaSession(recording_plan(plan, builder), arena)
    for session in (plain, recorded):
        session.keep_logits = True
    for token in (3, 100, 7):
        plain._forget()  # as a recording session does: the marks are the same
        runs = [s.launch([[token]], [1], [Sampling(0.9, 0, 1.0, 5)]) for s in (plain, recorded)]
        assert runs[0] == runs[1]
        assert np.array_equal(plain.logits(), recorded.logits())
    with pytest.raises(UserError, match="one step a launch"):
        recorded.launch([[1, 2]], [1])
    old = replace(plan, source=plan.source.replace("#define OM_APART 0\n", ""))
    with pytest.raises(UserError, match="another version of Obelisk"):
        recording_plan(old, builder)


def test_the_command_lists_and_judges(
    tmp_path: Path, builder: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """`plan compare`: 0 within the tolerance of the plan's formats; beyond it 1, and the name."""
    save_model(tmp_path / "m", SMALL, random_tensors(SMALL, 1))
    plan = planned(parse_config(SMALL), BF16, "", MACHINE)
    plan = replace(
        plan, weights_path=str(tmp_path / "m"), weights_digests=file_digests(tmp_path / "m")
    )
    write_plan(plan, tmp_path / "a.plan")
    assert main(["plan", "compare", str(tmp_path / "a.plan")]) == 0
    out = capsys.readouterr().out
    assert "15 results within 2.0e-02" in out
    assert all(kind in out for kind in ("qkv_rows", "rope", "attend", "up", "head"))
    old = "lo = v[j] * r, hi = v[2 + j] * r;"
    write_plan(replace(plan, source=plan.source.replace(old, old.replace("r;", "r * 2;"))),
               tmp_path / "b.plan")  # fmt: skip
    assert main(["plan", "compare", str(tmp_path / "b.plan")]) == 1
    assert "head" in capsys.readouterr().out.split("first beyond")[1]
    assert main(["plan", "compare", str(tmp_path / "a.plan"), "--tolerance", "1e-9"]) == 1
