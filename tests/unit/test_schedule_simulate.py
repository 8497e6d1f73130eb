"""The simulator of GPU schedules against what was measured, and what it charges for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.gpu_schedules import bf16, gpu_model

from obelisk.machine import find
from obelisk.schedule.gpu import EDGES, default_tiling
from obelisk.schedule.gpu_choice import Fusion
from obelisk.schedule.gpu_simulate import calibration_loop, costs_of, simulate_gpu
from obelisk.schedule.gpu_tasks import GpuStep

H200 = find("h200")


def loop_of(name: str) -> list[int]:
    """Bytes of a model's phases as the calibration loop had them: q, k, v; attention (none);
    output; gate and up; down; and the head.
    """
    m = gpu_model(name)
    h, f = 2 * m.hidden, m.ffn
    layer = [h * (m.q_width + 2 * m.kv_width), 0, h * m.q_width, 2 * h * f, h * f]
    return layer * m.layers + [h * m.vocab]


KB = 1024
# model, chunk KB, stages, in flight, wait, loader stops, measured microseconds (H200, 132 SMs, CUDA
# 13.0, 2026-11-30, median of 14 launches of a loop without arithmetic on activations)
MEASURED = (
    ("Llama-3.2-1B", 8, 24, 24, "", False, 550),
    ("Llama-3.2-1B", 8, 24, 24, "barrier", False, 662),
    ("Llama-3.2-1B", 8, 24, 12, "barrier", False, 656),
    ("Llama-3.2-1B", 8, 24, 8, "barrier", False, 634),
    ("Llama-3.2-1B", 8, 24, 6, "barrier", False, 615),
    ("Llama-3.2-1B", 8, 24, 5, "barrier", False, 615),
    ("Llama-3.2-1B", 8, 24, 4, "barrier", False, 627),
    ("Llama-3.2-1B", 16, 12, 3, "barrier", False, 612),
    ("Llama-3.2-1B", 16, 6, 6, "barrier", False, 663),
    ("Llama-3.2-1B", 16, 3, 3, "barrier", False, 681),
    ("Llama-3.2-1B", 8, 24, 24, "barrier", True, 719),
    ("Qwen3-0.6B", 8, 24, 24, "", False, 290),  # 271 to 309
    ("Qwen3-0.6B", 8, 24, 24, "barrier", False, 475),  # 470 to 481, whatever is in flight
    ("Qwen3-0.6B", 8, 24, 6, "barrier", False, 475),
    ("Qwen3-0.6B", 8, 24, 4, "barrier", False, 475),
)


@pytest.mark.parametrize("row", MEASURED)
def test_predictions_are_within_ten_percent(
    row: tuple[str, int, int, int, str, bool, int],
) -> None:
    """The measured table, row by row."""
    name, chunk, stages, flight, wait, stops, measured = row
    ring = (chunk * KB, stages, flight)
    seconds = calibration_loop(loop_of(name), 132, ring, costs_of(H200), wait, stops)
    assert seconds * 1e6 == pytest.approx(measured, rel=0.10)


def test_the_order_of_the_measured_rows_is_predicted() -> None:
    """What a search needs: a throttled queue beats a full one, both lose to no barrier at all, and
    a loader that stops is the worst.
    """
    loop, costs = loop_of("Llama-3.2-1B"), costs_of(H200)

    def us(flight: int, wait: str, stops: bool = False) -> float:
        return calibration_loop(loop, 132, (8 * KB, 24, flight), costs, wait, stops) * 1e6

    assert us(24, "") < us(6, "barrier") < us(8, "barrier") < us(12, "barrier")
    assert us(12, "barrier") <= us(24, "barrier") < us(24, "barrier", True)


def test_other_models_of_the_calibration_are_ranked_alike() -> None:
    """Qwen2.5-1.5B and Qwen3-8B were measured in another variant (no loader: every warp its own
    ring), so only the ratio with and without barriers is compared: 934/688 and 3578/3266.
    """
    for name, ratio in (("Qwen2.5-1.5B", 934 / 688), ("Qwen3-8B", 3578 / 3266)):
        loop, costs = loop_of(name), costs_of(H200)
        with_ = calibration_loop(loop, 132, (8 * KB, 24, 24), costs, "barrier")
        without = calibration_loop(loop, 132, (8 * KB, 24, 24), costs)
        assert with_ / without == pytest.approx(ratio, rel=0.15)


def test_a_step_costs_its_bytes_its_waits_and_its_context() -> None:
    """More context, a barrier on each edge, fewer stages, a slower machine: each costs."""
    model = gpu_model("Qwen3-0.6B")
    tiling = default_tiling(model, bf16(), H200)
    step = GpuStep(model, bf16(1, 8192), tiling)

    def us(at: GpuStep, position: int = 256, fusion: Fusion | None = None) -> float:
        return simulate_gpu(at, H200, position, fusion=fusion or Fusion()).seconds * 1e6

    base = us(step)
    floor = 1192e6 / 4.56e12 * 1e6
    assert floor < base < 3 * floor
    assert us(step, 8192) > base
    barriers = GpuStep(model, step.work, replace(tiling, barriers=EDGES))
    assert us(barriers) > base
    assert us(step, fusion=Fusion(rope_apart=True)) > base
    assert us(step, fusion=Fusion(down_behind_up=True)) < base
    slow = simulate_gpu(step, find("a100"), 256).seconds * 1e6
    assert slow > 1.2 * base


def test_skipping_settled_rounds_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long phases are advanced by whole rounds once consumers wait for the stream."""
    from obelisk.schedule import gpu_simulate

    loop, costs = loop_of("Llama-3.2-1B"), costs_of(H200)
    fast = calibration_loop(loop, 132, (8 * KB, 24, 6), costs, "barrier")
    monkeypatch.setattr(gpu_simulate._Blocks, "_caught_up", lambda self, land: False)
    slow = calibration_loop(loop, 132, (8 * KB, 24, 6), costs, "barrier")
    assert fast == pytest.approx(slow, rel=1e-9)
