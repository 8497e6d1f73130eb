"""The simulator of GPU schedules against what was measured, and what it charges for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.gpu_schedules import bf16, gpu_model

from obelisk.machine import find
from obelisk.schedule.gpu import (
    EDGES,
    GpuTiling,
)
from obelisk.schedule.gpu_choice import Fusion
from obelisk.schedule.gpu_default import default_tiling
from obelisk.schedule.gpu_resources import fit
from obelisk.schedule.gpu_search import micro_costs
from obelisk.schedule.gpu_simulate import calibration_loop, costs_of, simulate_gpu
from obelisk.schedule.gpu_tasks import GpuStep
from obelisk.tasks import WeightFormat, Workload

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


# model, batch, context, stages, parts of o and of down, pieces, in flight while waiting, and the
# microseconds of a greedy step (H200, 132 blocks, chunks of 8 KB, 6 in flight, 8 warps; 128 steps
# from the context on; 2026-11-30, `bench/results/mega_h200.json`, before the cache was prefetched)
STEPS = (
    ("Llama-3.2-1B", 1, 512, 25, 1, 1, 8, 2, 645.4),
    ("Llama-3.2-1B", 1, 512, 25, 1, 1, 8, 6, 632.1),
    ("Llama-3.2-1B", 1, 512, 25, 1, 1, 8, 4, 637.2),
    ("Llama-3.2-1B", 1, 512, 25, 1, 1, 8, 3, 638.4),
    ("Llama-3.2-1B", 1, 512, 25, 1, 1, 4, 4, 630.9),
    ("Llama-3.2-1B", 1, 512, 25, 2, 1, 8, 4, 632.7),
    ("Llama-3.2-1B", 8, 512, 17, 1, 2, 2, 2, 903.9),
    ("Llama-3.2-1B", 8, 512, 17, 1, 2, 2, 6, 939.8),
    ("Llama-3.2-1B", 1, 4096, 25, 1, 1, 8, 4, 729.0),
    ("Qwen3-0.6B", 1, 512, 25, 2, 2, 8, 2, 520.0),
    ("Qwen3-0.6B", 1, 512, 25, 2, 2, 4, 2, 582.1),
    ("Qwen3-0.6B", 1, 512, 25, 2, 2, 16, 2, 524.9),
    ("Qwen3-0.6B", 1, 512, 25, 2, 2, 8, 3, 523.9),
    ("Qwen2.5-1.5B", 1, 512, 23, 4, 4, 8, 2, 908.0),
    ("Qwen2.5-1.5B", 1, 512, 23, 4, 4, 8, 4, 918.7),
    ("Qwen2.5-1.5B", 1, 512, 23, 4, 4, 16, 4, 915.7),
    ("Qwen3-8B", 1, 512, 24, 1, 1, 8, 6, 3565.9),
    ("Qwen3-8B", 1, 512, 24, 1, 1, 8, 3, 3645.8),
)


def whole_steps() -> list[tuple[tuple[str, int, int], float, float]]:
    """Model, batch and context, measured and predicted microseconds of every row."""
    out = []
    for name, batch, context, stages, o, down, pieces, waiting, us in STEPS:
        tiling = GpuTiling(
            132, chunk_cols=256, stages=stages, in_flight=6, in_flight_waiting=waiting, warps=8,
            o_split=o, down_split=down, kv_pieces=pieces, rotate=37,
        )  # fmt: skip
        step = GpuStep(gpu_model(name), bf16(batch, context + 128), tiling)
        micro = micro_costs(step, fit(step, H200).consumer_registers)
        seconds = simulate_gpu(step, H200, context + 64, micro).seconds
        out.append(((name, batch, context), us, seconds * 1e6))
    return out


def test_whole_steps_are_predicted_and_ranked() -> None:
    """The kernel on an H200: each step within 10%, half of them within 2%; of two cuts of a model
    whose times differ by 3% or more, the faster is predicted to be faster.
    """
    rows = whole_steps()
    assert len(rows) >= 15
    misses = sorted(abs(predicted / us - 1) for _, us, predicted in rows)
    assert misses[-1] < 0.10
    assert misses[len(misses) // 2] < 0.02
    pairs = [
        (a, b) for a in rows for b in rows if a[0] == b[0] and a[1] * 1.03 < b[1]
    ]  # fmt: skip
    assert len(pairs) >= 3
    assert all(a[2] < b[2] for a, b in pairs)


def test_narrow_weights_are_predicted() -> None:
    """4-bit and 8-bit weights under the default tiling, to which nothing was fitted, and 16-bit
    ones of the same run: within 10% of an H200 (`bench/results/mega_narrow_h200.json`).
    """
    for name, form, us in (
        ("Qwen3-1.7B", WeightFormat.BF16, 915.7), ("Qwen3-1.7B", WeightFormat.INT8, 619.5),
        ("Qwen3-1.7B", WeightFormat.W4A16, 638.7),
    ):  # fmt: skip
        model, work = gpu_model(name), Workload(1, 640, form)
        step = GpuStep(model, work, default_tiling(model, work, H200))
        micro = micro_costs(step, fit(step, H200).consumer_registers)
        seconds = simulate_gpu(step, H200, 576, micro).seconds
        assert seconds * 1e6 == pytest.approx(us, rel=0.10), f"{name} {form}"


@pytest.mark.parametrize(("batch", "us"), [(1, 1242.7), (8, 1852.2)])
def test_fp32_weights_are_predicted(batch: int, us: float) -> None:
    """Within 10% of an H200 (`bench/results/mega_fp32_h200.json`), with nothing fitted."""
    model, work = gpu_model("Llama-3.2-1B"), Workload(batch, 640, WeightFormat.FP32)
    step = GpuStep(model, work, default_tiling(model, work, H200))
    micro = micro_costs(step, fit(step, H200).consumer_registers)
    assert simulate_gpu(step, H200, 576, micro).seconds * 1e6 == pytest.approx(us, rel=0.10)


def test_small_chunks_cost_the_loader_more_than_the_stream() -> None:
    """A loader thread takes about 150 ns for a copy: with chunks of 4 KB (ring of 48, 10 in flight)
    Llama-3.2-1B took 853 us where chunks of 8 KB took 698, at a time when both were slower.
    """
    model = gpu_model("Llama-3.2-1B")
    large = GpuTiling(132, stages=24, in_flight=6, kv_pieces=8)
    small = replace(large, chunk_cols=128, stages=48, in_flight=10)
    us = [simulate_gpu(GpuStep(model, bf16(), t), H200, 576).seconds for t in (large, small)]
    assert us[1] / us[0] == pytest.approx(853 / 698, rel=0.07)


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
