"""The search over GPU schedules: resources and their limits, ranking, checkpoints, determinism."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.gpu_schedules import GPU_SHAPES, bf16, gpu_model

from obelisk.base.errors import Infeasible, UserError
from obelisk.machine import Machine, find
from obelisk.schedule.gpu import (
    EDGES,
    GpuTiling,
    shared_plan,
)
from obelisk.schedule.gpu_choice import Fusion
from obelisk.schedule.gpu_default import default_tiling
from obelisk.schedule.gpu_resources import (
    LIMITS,
    fit,
    register_shares,
    reuse_rows,
    stage_rows,
)
from obelisk.schedule.gpu_search import best_turn, bound, micro_costs, search_gpu
from obelisk.schedule.gpu_simulate import busiest, simulate_gpu
from obelisk.schedule.gpu_tasks import GpuStep
from obelisk.schedule.ir import Setting, schedule_of
from obelisk.tasks import WeightFormat, Workload

H200, ADA = find("h200"), find("sm_89")
CARDS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")


def step_of(name: str, machine: Machine = H200, **change: Any) -> GpuStep:
    """A real model's default step, its tiling changed."""
    model = gpu_model(name)
    return GpuStep(model, bf16(), replace(default_tiling(model, bf16(), machine), **change))


# ---- resources ----
@pytest.mark.parametrize("name", ["Qwen3-1.7B", "Llama-3.2-1B"])
def test_splitting_along_k_halves_the_peak_and_doubles_the_stages_under_99_kb(name: str) -> None:
    """Ada-MK's table: each halving along K halves a stage and the peak, and doubles how many fit; a
    whole tile leaves no pipeline at all (less than 2 stages), its quarter 4 and more.
    """
    rows = stage_rows(gpu_model(name), bf16(), ADA)
    by = {(r.matrix, r.split): r for r in rows}
    for matrix in ("qkv", "o", "up", "down"):
        for split in (1, 2):
            whole, half = by[matrix, split], by[matrix, 2 * split]
            assert half.stage * 2 == whole.stage
            assert half.peak * 2 == whole.peak
            assert half.stages >= 2 * whole.stages
    assert by["up", 1].stages < 2 <= by["up", 2].stages
    assert not by["up", 1].fits
    assert by["up", 2].fits
    assert by["up", 4].stages >= 4


def test_two_stages_become_four() -> None:
    """Ada-MK's own case, a Qwen2.5-1.5B under 99 KB: 2 stages of a whole tile, 4 of half of one."""
    rows = stage_rows(gpu_model("Qwen2.5-1.5B"), bf16(), ADA)
    up = {r.split: (r.stage, r.stages) for r in rows if r.matrix == "up"}
    assert up == {1: (49152, 2), 2: (24576, 4), 4: (12288, 8)}


def test_the_table_under_every_limit() -> None:
    """Stages of a (16 x 2048) tile of bf16 beside its part of the input, under 163, 99, 99, 227 and
    99 KB.
    """
    model = gpu_model("Qwen3-1.7B")
    table = {
        card: [r.stages for r in stage_rows(model, bf16(), find(card)) if r.matrix == "up"]
        for card in CARDS
    }
    assert table == {
        "sm_80": [2, 5, 10], "sm_86": [1, 3, 6], "sm_89": [1, 3, 6], "sm_90": [3, 7, 14],
        "sm_120": [1, 3, 6],
    }  # fmt: skip


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("name", GPU_SHAPES)
def test_every_model_fits_every_card_within_its_shared_memory(name: str, card: str) -> None:
    """Defaults of ten models on five architectures: at least 4 stages, all blocks resident."""
    machine = find(card)
    step = step_of(name, machine)
    need = fit(step, machine)
    assert need.refusal is None, need.refusal
    assert need.shared.total <= machine.shared_bytes
    assert step.tiling.stages >= 4
    assert need.resident >= step.tiling.blocks
    assert need.shared.ring == step.tiling.stages * step.tiling.chunk_bytes


def test_each_limit_is_named() -> None:
    """One change, one limit, in words with both numbers."""
    small = gpu_model("SmolLM2-135M")
    cases: list[tuple[str, str, GpuStep, Machine, Fusion]] = [
        ("shared memory", "a block of rtx4090 has 101376", step_of("Llama-3.2-1B"), ADA, Fusion()),
        ("blocks", "132 blocks, .* has 100 SMs", step_of("Llama-3.2-1B"),
         replace(H200, cores=100), Fusion()),
        ("parallelism", "200 blocks, but only 192", step_of("SmolLM2-135M", blocks=200),
         replace(H200, cores=400), Fusion()),
        ("ring", "stages for 16 warps", step_of("Qwen3-0.6B", stages=8, warps=16), H200, Fusion()),
        ("in flight", "in flight, the ring has", step_of("Qwen3-0.6B", in_flight=60), H200,
         Fusion()),
        ("in flight", "what has not come", step_of("Qwen3-0.6B", in_flight=14), H200, Fusion()),
        ("split", "cannot be split in 7", step_of("Qwen3-0.6B", down_split=7), H200, Fusion()),
        ("chunk", "a multiple of 32", step_of("Qwen3-0.6B", chunk_cols=40, stages=8), H200,
         Fusion()),
        ("copy engine", "no copy engine",
         GpuStep(small, bf16(), replace(default_tiling(small, bf16(), ADA), bulk=True)), ADA,
         Fusion()),
        ("threads", "1056 threads, a block has 1024",
         step_of("Qwen3-0.6B", warps=32, stages=40, chunk_cols=64), H200, Fusion()),
        ("registers", "registers for each of 1024 threads",
         step_of("Qwen3-0.6B", warps=31, stages=40, chunk_cols=64), H200, Fusion()),
        ("emitter", "no emitter for down behind up", step_of("Qwen3-0.6B"), H200,
         Fusion(down_behind_up=True)),
        ("target", "no CUDA device", step_of("Qwen3-0.6B"), find("x86-64-v3"), Fusion()),
    ]  # fmt: skip
    for limit, words, step, machine, fusion in cases:
        need = fit(step, machine, fusion)
        assert (need.limit, limit in LIMITS) == (limit, True), need.refusal
        with pytest.raises(Infeasible, match=words):
            raise Infeasible(str(need.refusal))
    eight = gpu_model("Qwen3-8B")
    work = bf16(2, 32768)
    long = fit(GpuStep(eight, work, default_tiling(eight, work, ADA)), ADA)
    assert long.limit == "memory"
    assert "24000000000" in str(long.refusal)


def test_register_shares_by_role() -> None:
    """With a copy engine the loader gives its registers to the consumers; else all have as many.
    The sums stay within an SM's 65536, in steps of 8.
    """
    for warps in (4, 8, 16):
        for machine in (H200, ADA):
            tiling = GpuTiling(1, warps=warps, bulk=machine is H200)
            consumer, loader = register_shares(tiling, machine)
            assert consumer % 8 == loader % 8 == 0
            loaders = tiling.threads - 32 * warps
            assert 32 * warps * consumer + loaders * loader <= 65536
            assert (consumer > loader) == (machine is H200)
            assert consumer <= 255
    assert register_shares(GpuTiling(1), H200) == (248, 40)
    assert register_shares(GpuTiling(1, bulk=False), ADA) == (224, 224)


def test_pages_are_reused_across_operators() -> None:
    """Which buffers of a block share bytes, and what that saves: on Ada the difference between
    fitting and not.
    """
    step = step_of("Qwen3-8B", ADA)
    pages = schedule_of(Setting(replace(step, model=replace(step.model, layers=2)))).pages.shared
    rows = reuse_rows(tuple((n, p.offset, p.size) for n, p in pages))
    users = {r.users: r for r in rows}
    inputs = users[tuple(f"inputs.{k}" for k in ("qkv", "attend", "o", "up", "down"))]
    assert inputs.apart == 5 * inputs.size
    assert ("residual.o", "residual.down") in users
    total = shared_plan(step.model, step.work, step.tiling).total
    saved = sum(r.apart - r.size for r in rows)
    assert total <= ADA.shared_bytes < total + saved


# ---- search ----
def test_turning_the_remainders_evens_the_stream() -> None:
    """Over a step each block streams nearly equal bytes; without turning the same ones get more."""
    for name in ("Llama-3.2-1B", "Qwen3-0.6B"):
        step = step_of(name)
        turned = replace(step, tiling=replace(step.tiling, rotate=best_turn(step)))
        still = replace(step, tiling=replace(step.tiling, rotate=0))
        assert busiest(turned) <= busiest(step) <= busiest(still)
        assert busiest(turned) < 1.03
        assert busiest(turned) < busiest(still) - 0.005


@pytest.mark.parametrize("name", ["Llama-3.2-1B", "SmolLM2-135M"])
def test_the_bound_is_below_what_is_simulated(name: str) -> None:
    """Pruning by the bound loses nothing: the simulator is never faster."""
    for change in ({}, {"barriers": EDGES}, {"kv_pieces": 1}, {"chunk_cols": 64}, {"rotate": 0}):
        step = step_of(name, **change)
        micro = micro_costs(step, 168)
        line = simulate_gpu(step, H200, micro=micro)
        assert bound(step, H200, busiest(step)) <= line.seconds


def test_search_ranks_judges_and_is_deterministic() -> None:
    """Fastest first, not slower than the default, each judged; the same again."""
    model = gpu_model("SmolLM2-135M")
    first, account = search_gpu(model, bf16(), ADA, keep=3, judged=1, limit=40)
    again, _ = search_gpu(model, bf16(), ADA, keep=3, judged=0, limit=40)
    assert [c.tiling for c in first] == [c.tiling for c in again]
    times = [c.timeline.seconds for c in first]
    assert times == sorted(times)
    default = default_tiling(model, bf16(), ADA)
    step = GpuStep(model, bf16(), default)
    need = fit(step, ADA)
    base = simulate_gpu(step, ADA, micro=micro_costs(step, need.consumer_registers)).seconds
    assert times[0] <= base
    assert all(fit(GpuStep(model, bf16(), c.tiling), ADA).refusal is None for c in first)
    pruned = dict(account.pruned)
    assert pruned["shared memory"] > 0
    assert pruned["emitter"] == 4
    assert account.tried == account.fitting + sum(pruned.values())
    assert {n for n, _ in account.unemitted} >= {"rope apart", "down behind up"}


class Stop(Exception):
    """Raised by a listener that has seen enough."""


def test_a_search_that_is_interrupted_resumes_to_the_same_end(tmp_path: Path) -> None:
    """Killed in the middle, resumed from its checkpoint: the choices of an uninterrupted run, and
    what was simulated before is not simulated again.
    """
    model = gpu_model("SmolLM2-135M")
    whole, full = search_gpu(model, bf16(), ADA, keep=3, judged=0, limit=48)
    path = tmp_path / "search.json"

    class Listener:
        def update(self, stage: str, counts: Any) -> None:
            if stage == "simulate" and counts["simulated"] >= 34:
                raise Stop

    with pytest.raises(Stop):
        search_gpu(model, bf16(), ADA, keep=3, judged=0, limit=48, checkpoint=path,
                   progress=Listener())  # fmt: skip
    kept = len(json.loads(path.read_text())["simulated"])
    assert 16 <= kept < full.simulated
    again, account = search_gpu(
        model, bf16(), ADA, keep=3, judged=0, limit=48, checkpoint=path, resume=True
    )
    assert [c.tiling for c in again] == [c.tiling for c in whole]
    assert [c.timeline for c in again] == [c.timeline for c in whole]
    assert account.resumed == kept
    assert account.simulated == full.simulated
    assert [p.name for p in tmp_path.iterdir()] == ["search.json"]


def test_checkpoints_of_other_searches_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    """By name, with the way out."""
    model, path = gpu_model("SmolLM2-135M"), tmp_path / "c.json"
    with pytest.raises(UserError, match="leave --resume out"):
        search_gpu(model, bf16(), ADA, checkpoint=path, resume=True)
    search_gpu(model, bf16(), ADA, keep=1, judged=0, limit=2, checkpoint=path)
    with pytest.raises(UserError, match="of another search"):
        search_gpu(model, bf16(1, 64), ADA, checkpoint=path, resume=True)
    path.write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        search_gpu(model, bf16(), ADA, checkpoint=path, resume=True)


def test_a_search_without_time_still_answers() -> None:
    """Anytime: the default is simulated first, and the account says that time ran out."""
    model = gpu_model("SmolLM2-135M")
    best, account = search_gpu(model, bf16(), ADA, keep=2, judged=0, seconds=0.0)
    assert best[0].tiling == default_tiling(model, bf16(), ADA)
    assert not account.finished


def test_fp32_weights_take_twice_the_bytes_and_time() -> None:
    """Slabs of 4 bytes, and a step that the stream decides: in 99 KB, too."""
    model = gpu_model("Llama-3.2-1B")
    for machine in (H200, ADA):
        us = []
        for form in (WeightFormat.BF16, WeightFormat.FP32):
            work = Workload(1, 512, form)
            best, _ = search_gpu(model, work, machine, keep=1, judged=1, limit=4)
            us.append(best[0].timeline.seconds)
            assert best[0].tiling.slab_bytes == 16 * 32 * work.weight_bytes
        assert 1.8 < us[1] / us[0] < 2.1


def test_more_context_is_cut_into_more_pieces() -> None:
    """The context decides the pieces of attention; more of it never costs less."""
    model = gpu_model("SmolLM2-135M")
    found = [
        search_gpu(model, bf16(1, context), H200, keep=1, judged=0, limit=50)[0][0]
        for context in (64, 4096, 32768)
    ]
    pieces = [c.tiling.kv_pieces for c in found]
    assert pieces == sorted(pieces)
    assert pieces[0] < pieces[-1]
    times = [c.timeline.seconds for c in found]
    assert times == sorted(times)


def test_where_the_default_does_not_fit_the_search_may_and_else_says_what_does_not() -> None:
    """Eight slots of an 8B model under 99 KB need chunks of 1 KB; with 80 KB nothing fits."""
    model, work = replace(gpu_model("Qwen3-8B", 2), vocab=2048), bf16(8, 64)
    card = find("sm_86")
    with pytest.raises(Infeasible, match="shared memory"):
        default_tiling(model, work, card)
    best, account = search_gpu(model, work, card, keep=1, judged=0, limit=3)
    assert best[0].fit.shared.total <= 99 * 1024
    assert dict(account.pruned)["shared memory"] > 0
    with pytest.raises(Infeasible, match=r"of \d+ cuts none fits: use a smaller batch"):
        search_gpu(model, work, replace(card, shared_bytes=80 * 1024))
