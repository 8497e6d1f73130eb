"""On a GPU: every operator of every layer against float64, the judge of a whole plan, and a planted
fault by its name.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.mega_device import device_plan
from tests.mega_models import config, random_tensors, save_model

from obelisk.__main__ import main
from obelisk.app.compare import first_beyond
from obelisk.app.compare_cuda import TOLERANCE, compare_cuda, recording_plan
from obelisk.app.plan_judge import judge_plan
from obelisk.plan import write_plan
from obelisk.runtime import CudaSession, file_digests
from obelisk.runtime.packing import pack, stored

pytestmark = pytest.mark.device
DEEP = config(
    "qwen3", num_hidden_layers=9, hidden_size=512, vocab_size=1003, head_dim=64,
    num_attention_heads=8, intermediate_size=1536,
)  # fmt: skip
TENSORS = random_tensors(DEEP, 8)


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_operators_and_the_whole(form: str) -> None:
    """Record R33: all within their tolerances; the kernel as built passes its judge."""
    plan = device_plan(DEEP, 2, 64, form)
    means = stored(plan.layout, TENSORS.__getitem__)
    arena = pack(plan.layout, TENSORS.__getitem__)
    session = CudaSession(plan, arena)
    judged = judge_plan(session, means, 5e-2)
    assert judged.logits > 0
    session.close()
    recorder = CudaSession(recording_plan(plan), arena)
    found = compare_cuda(recorder, means, 3)
    recorder.close()
    assert len(found) == 9 * 7 + 1
    assert first_beyond(found, TOLERANCE[plan.cache.format]) is None


def test_a_planted_fault_is_found_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Record R33: a wrong constant in one operator, told by `plan compare` with exit code 1."""
    save_model(tmp_path / "m", DEEP, TENSORS)
    plan = replace(
        device_plan(DEEP), weights_path=str(tmp_path / "m"),
        weights_digests=file_digests(tmp_path / "m"),
    )  # fmt: skip
    old = "om_exp2(-1.4426950408889634f * g)"
    assert old in plan.source
    write_plan(replace(plan, source=plan.source.replace(old, old.replace("1.44", "1.2"))),
               tmp_path / "p")  # fmt: skip
    assert main(["plan", "compare", str(tmp_path / "p")]) == 1
    assert "up of layer 0" in capsys.readouterr().out.split("first beyond")[1]
