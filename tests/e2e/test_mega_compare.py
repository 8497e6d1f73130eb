"""Every operator of a step against float64, and the one at fault by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.mega_models import config, random_tensors, save_model

from obelisk.__main__ import main
from obelisk.app.compare import compare, first_beyond, schedule_of
from obelisk.app.synth import make_plan, synthesise
from obelisk.base.errors import CallError, UserError
from obelisk.build import compile_c
from obelisk.machine import host
from obelisk.plan import Plan, write_plan
from obelisk.runtime import CpuSession
from obelisk.runtime.packing import RowSource, pack, stored
from obelisk.schedule import Choice, Sync, place, resources, simulate
from obelisk.tasks import StepShape, TaskKind, Tiling, WeightFormat, Workload, parse_config

# Qwen2.5-7B's blocks at a sixteenth: hidden 3584 / 16, ffn 18944 / 16, group 7, biases on q, k, v.
CONFIG = config(
    "qwen2", hidden_size=224, intermediate_size=1184, num_attention_heads=14,
    num_key_value_heads=2, vocab_size=200,
)  # fmt: skip
TENSORS = random_tensors(CONFIG, 8)


def plan_of(
    form: WeightFormat = WeightFormat.FP32, batch: int = 1, head: WeightFormat | None = None,
    **tiling: Any,
) -> Plan:  # fmt: skip
    """A plan without a search."""
    work = Workload(batch, 64, form, head=head)
    shape = StepShape(parse_config(CONFIG), work, Tiling(**{"cores": 2, **tiling}), host().lanes)
    schedule, machine = place(shape, Sync.COUNTER), host()
    return make_plan(Choice(schedule, simulate(schedule, machine), resources(shape, machine)))


def session_of(plan: Plan) -> CpuSession:
    """The plan with the test's weights."""
    return CpuSession(plan, pack(plan.layout, TENSORS.__getitem__))


def means_of(plan: Plan) -> RowSource:
    """The test's weights as the plan stores them."""
    return stored(plan.layout, TENSORS.__getitem__)


@pytest.mark.parametrize(
    ("form", "head"),
    [*((f, None) for f in WeightFormat), (WeightFormat.W4A16, WeightFormat.INT8)],
)
def test_every_operator_of_every_layer_agrees_with_its_meaning(
    form: WeightFormat, head: WeightFormat | None, compiler: str
) -> None:
    """Record R33: all results of all operators, fused and not, of three slots."""
    for tiling in (
        {}, {"fuse_rope": False, "replicate_norm": False, "kv_splits": 2, "panel": 8},
    ):  # fmt: skip
        plan = plan_of(form, 3, head, **tiling)
        assert schedule_of(plan).to_json().items() <= plan.schedule.items()
        found = compare(session_of(plan), means_of(plan), steps=3)
        names = {d.kind for d in found}
        assert names >= {TaskKind.EMBED, TaskKind.ATTEND, TaskKind.DOWN, TaskKind.HEAD}
        assert {d.layer for d in found} == {-1, 0, 1}
        assert {"keys", "values", "logits", "act", "x"} <= {d.value for d in found}
        assert first_beyond(found, 2e-5) is None, first_beyond(found, 2e-5)


@pytest.mark.parametrize(
    ("old", "new", "kind", "layer"),
    [
        ("to[j] = b * c[i] + a * sn[i]", "to[j] = b * c[i] + a * sn[i] * 1.01f", "qkv", 0),
        ("* OM_SCALE", "* OM_SCALE * 0.99f", "attend", 0),
        ("x[b * OM_X_STRIDE + p * OM_PANEL + r] +=", "x[b * OM_X_STRIDE + p * OM_PANEL + r] -=",
         "o", 0),
        ("y[r] * (u[b][r]", "y[r] * 1.001f * (u[b][r]", "up", 0),
        ("logits[b * OM_LOGITS_STRIDE + row] = y[b][r]",
         "logits[b * OM_LOGITS_STRIDE + row] = y[b][r] + 0.01f", "head", -1),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found_by_name(
    old: str, new: str, kind: str, layer: int, compiler: str
) -> None:
    """Record R33: a wrong constant in one operator's body gives that operator, and no earlier."""
    plan = plan_of()
    assert old in plan.source
    wrong = plan.source.replace(old, new)
    broken = replace(plan, source=wrong, binary=compile_c(wrong).path.read_bytes())
    first = first_beyond(compare(session_of(broken), means_of(plan)))
    assert first is not None
    assert (first.kind, first.layer) == (kind, layer)
    assert kind in str(first)


def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, compiler: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another target, and asking for what was not recorded."""
    session = session_of(plan_of())
    with pytest.raises(CallError, match=r"start_recording first; known are .*up:act"):
        session.recorded("up", "act")
    session.plan = replace(session.plan, target="cuda")
    with pytest.raises(UserError, match="for cuda"):
        compare(session, means_of(session.plan))
    save_model(tmp_path / "m", CONFIG, TENSORS)
    plan = replace(session.plan, target="cpu", weights_path=str(tmp_path / "gone"))
    write_plan(plan, tmp_path / "a.plan")
    assert main(["plan", "compare", str(tmp_path / "a.plan")]) == 2
    assert "name their directory with --weights-dir" in capsys.readouterr().err


def test_the_command_lists_and_judges(
    tmp_path: Path, compiler: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`plan compare`: 0 within the tolerance; beyond it 1, with the operator's name."""
    save_model(tmp_path / "m", CONFIG, TENSORS)
    made = synthesise(tmp_path / "m", context=32, cores=1, profile=1, weights="int8")
    write_plan(made.plan, tmp_path / "a.plan")
    assert main(["plan", "compare", str(tmp_path / "a.plan")]) == 0
    out = capsys.readouterr().out
    assert "within 1.0e-04" in out
    assert all(kind in out for kind in ("embed", "attend", "head"))
    old = "to[j] = b * c[i] + a * sn[i]"
    wrong = made.plan.source.replace(old, old.replace("*", "* 1.1f *", 1))
    broken = replace(made.plan, source=wrong, binary=compile_c(wrong).path.read_bytes())
    write_plan(broken, tmp_path / "b.plan")
    assert main(["plan", "compare", str(tmp_path / "b.plan")]) == 1
    assert "qkv" in capsys.readouterr().out.split("first beyond")[1]
