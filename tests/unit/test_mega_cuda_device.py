"""On a GPU: the CUDA megakernel against float64, launches against single steps, draws, faults.

Skipped loudly where there is no device or no compiler.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.mega_cuda_checks import CASES, check_plan, plan_of, planned
from tests.mega_cuda_models import MODELS
from tests.mega_gptq import save_gptq
from tests.mega_models import random_tensors, save_model

from obelisk.app.synth import workload_of
from obelisk.app.synth_cuda import device_here, synthesise_cuda
from obelisk.base.errors import CallError, MissingDependency, UserError
from obelisk.engine import Engine
from obelisk.machine import Machine
from obelisk.plan import write_plan
from obelisk.runtime import CudaSession
from obelisk.runtime.packing import pack
from obelisk.tasks import WeightFormat, Workload, parse_config, parse_format

try:
    MACHINE: Machine = device_here()
except (MissingDependency, UserError) as missing:
    pytest.skip(f"no CUDA device here: {missing}", allow_module_level=True)

pytestmark = pytest.mark.device


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}, batch {c[1]}, {c[2]}, {c[3]}")
def test_small_models(case: tuple[str, int, str, str]) -> None:
    """Logits, tokens in one launch and step by step, draws, and a fault that is told."""
    row = check_plan(case, plan_of(case, MACHINE))
    assert row["ok"], str(row)  # whole: a dict would be cut


@pytest.mark.parametrize(("weights", "near"), [("bf16", 0.1), ("fp32", 3e-6)])
def test_a_plan_generates_the_same_again(tmp_path: Path, weights: str, near: float) -> None:
    """Synthesised, written, loaded: prompt A, B, then A again; the limit and the limit plus one."""
    name = "llama, groups of 4"
    save_model(tmp_path / "model", MODELS[name])
    work = Workload(1, 80, parse_format(weights))
    made = synthesise_cuda(tmp_path / "model", work, MACHINE, profile=2)
    assert made.plan.tolerance is not None
    assert made.plan.tolerance < near
    write_plan(made.plan, tmp_path / "plan")
    engine = Engine.load(tmp_path / "plan")
    a, b = [1, 2, 3], list(range(50))
    first = engine.generate([a], 40)[0].tokens
    engine.generate([b], 20)
    assert engine.generate([a], 40)[0].tokens == first
    assert engine.generate([list(range(80))], 5)[0].reason == "length"
    with pytest.raises(CallError, match="80"):
        engine.generate([list(range(81))], 5)


@pytest.mark.parametrize(
    ("weights", "group", "symmetric", "head"),
    [("w4a16", 128, True, None), ("w4a16", 64, False, None), ("int8", 64, True, None),
     ("w4a16", 32, False, "int8")],
)  # fmt: skip
def test_a_checkpoint_of_groups(
    tmp_path: Path, weights: str, group: int, symmetric: bool, head: str | None
) -> None:
    """A GPTQ checkpoint, synthesised, written and loaded: judged, and the same tokens again."""
    c = MODELS["llama, groups of 4"]
    save_gptq(tmp_path / "model", c, random_tensors(c, 5), group=group, symmetric=symmetric)
    work = workload_of(parse_config(c), 1, 80, weights, tmp_path / "model", head)
    made = synthesise_cuda(tmp_path / "model", work, MACHINE, profile=2)
    assert made.plan.tolerance is not None
    assert made.plan.tolerance < 3e-3
    write_plan(made.plan, tmp_path / "plan")
    engine = Engine.load(tmp_path / "plan")
    first = engine.generate([[1, 2, 3]], 40)[0].tokens
    engine.generate([list(range(20))], 10)
    assert engine.generate([[1, 2, 3]], 40)[0].tokens == first


def test_slots_do_not_change_each_other(tmp_path: Path) -> None:
    """A slot's tokens alone and beside others of other lengths, and beside one that stops early."""
    name = "qwen3, 128, groups of 2"
    model = parse_config(MODELS[name])
    tensors = save_model(tmp_path / "model", MODELS[name])
    plan = planned(model, Workload(3, 120, WeightFormat.BF16), "", MACHINE)
    session = CudaSession(plan, pack(plan.layout, tensors.__getitem__))
    alone = session.launch([[5, 6, 7]], [30])[0].tokens
    session.reset()
    rng = np.random.default_rng(0)
    other = [int(t) for t in rng.integers(0, model.vocab, 60)]
    together = session.launch([[5, 6, 7], other, [9]], [30, 20, 4])
    assert together[0].tokens == alone
    session.reset()
    stop = session.launch([[5, 6, 7], other, [9]], [30, 20, 4], stops=[alone[9]])
    assert stop[0].tokens == alone[: alone.index(alone[9]) + 1]
    assert stop[0].reason == "stop"
    assert session.position[0] == 3 + len(stop[0].tokens) - 1
