"""Profiling ranked GPU schedules: the fastest wins, failures end nothing, times teach the
simulator.
"""

from __future__ import annotations

import pytest
from tests.gpu_schedules import bf16, gpu_model

from obelisk.base.errors import BuildFailed, Infeasible, InternalError, KernelFault
from obelisk.machine import find
from obelisk.mega.cuda import emit_cuda
from obelisk.schedule.gpu_profile import profile, refit
from obelisk.schedule.gpu_search import GpuChoice, micro_costs, search_gpu
from obelisk.schedule.gpu_simulate import simulate_gpu
from obelisk.schedule.gpu_tasks import GpuStep

H200 = find("h200")
MODEL, WORK = gpu_model("SmolLM2-135M"), bf16()


@pytest.fixture(scope="module")
def choices() -> list[GpuChoice]:
    """A few ranked choices."""
    return search_gpu(MODEL, WORK, H200, keep=4, judged=0, limit=30)[0]


def test_every_choice_can_be_emitted(choices: list[GpuChoice]) -> None:
    """What the search keeps the emitter takes, each as a text of its own; with 99 KB and without a
    copy engine, too.
    """
    ada = find("sm_89")
    others = search_gpu(MODEL, WORK, ada, keep=3, judged=0, limit=30)[0]
    texts = [emit_cuda(MODEL, WORK, c.tiling, H200).source for c in choices]
    texts += [emit_cuda(MODEL, WORK, c.tiling, ada).source for c in others]
    assert len(set(texts)) == len(choices) + len(others)


def test_the_fastest_measured_wins_not_the_best_predicted(choices: list[GpuChoice]) -> None:
    """Times decide; of equals, the better rank."""
    times = dict(zip(choices, (5e-4, 3e-4, 4e-4, 3e-4), strict=True))
    made = profile(choices, times.__getitem__)
    assert made.winner.rank == 1
    assert made.winner.choice is choices[1]
    assert [r.rank for r in made.rows] == [0, 1, 2, 3]
    worst = max(abs(c.timeline.seconds / t - 1) for c, t in times.items())
    assert made.error == pytest.approx(worst)


def test_what_cannot_be_built_or_fails_is_recorded(choices: list[GpuChoice]) -> None:
    """A compiler's refusal, a spill, a fault: three rows without a time; a bug of ours is
    raised.
    """
    why = {
        choices[0]: BuildFailed("no compiler"), choices[1]: Infeasible("spills 64 bytes"),
        choices[2]: KernelFault("block 3 waits"),
    }  # fmt: skip

    def measure(choice: GpuChoice) -> float:
        if choice in why:
            raise why[choice]
        return 1e-3

    made = profile(choices, measure)
    assert made.winner.rank == 3
    assert [r.seconds for r in made.rows[:3]] == [None] * 3
    assert "block 3 waits" in made.rows[2].reason
    with pytest.raises(Infeasible, match=r"no schedule could be profiled: .*no compiler.*spills"):
        profile(choices[:3], measure)

    def broken(choice: GpuChoice) -> float:
        raise InternalError("ours")

    with pytest.raises(InternalError, match="ours"):
        profile(choices, broken)


def test_refit_finds_the_hand_over_that_measurements_hold(choices: list[GpuChoice]) -> None:
    """Times simulated with another hand-over, 5% noise: it is found again, within a step or two."""
    noise = (1.05, 0.95, 1.0, 1.02)
    measured = []
    for choice, factor in zip(choices, noise, strict=True):
        step = GpuStep(MODEL, WORK, choice.tiling)
        micro = micro_costs(step, choice.fit.consumer_registers)
        line = simulate_gpu(step, H200, micro=micro, handover=2.2e-6)
        measured.append((choice, line.seconds * factor))
    costs, worst = refit(MODEL, WORK, H200, measured)
    assert costs.handover == pytest.approx(2.2e-6, rel=0.1)
    assert worst < 0.07
    with pytest.raises(Infeasible, match="nothing was measured"):
        refit(MODEL, WORK, H200, [])
