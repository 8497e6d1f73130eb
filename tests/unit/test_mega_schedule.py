"""Schedules: real shapes are accepted, unsafe mutations never; the judge, the simulator, limits."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from tests.mega_models import config
from tests.mega_schedules import MUTATIONS, SHAPES, real_shape, small_schedule

from obelisk.base.errors import Infeasible
from obelisk.machine import find, host
from obelisk.schedule import Sync, check, gpu_stages, place, resources, search_schedules, simulate
from obelisk.tasks import StepShape, Tiling, WeightFormat, Workload, parse_config

SEEDS, UNSAFE = 8, 640  # 5,120 in all


@pytest.mark.parametrize("name", SHAPES)
def test_real_shapes_are_accepted(name: str) -> None:
    """Ten model shapes, both kinds of synchronisation, fused and not: no fault."""
    rng = random.Random(name)
    for sync in Sync:
        tiling = {
            "cores": rng.choice((2, 3, 4, 8)), "kv_splits": rng.choice((1, 2, 3)),
            "fuse_rope": rng.random() < 0.5, "replicate_norm": rng.random() < 0.5,
            "panel": rng.choice((4, 8)), "batch": rng.choice((1, 3)),
        }  # fmt: skip
        shape = real_shape(name, 3, **tiling)
        assert check(place(shape, sync), max_cores=8) == [], (sync, tiling)


def test_the_whole_depth_of_a_real_model_is_accepted() -> None:
    """All 28 layers of Qwen3-0.6B at once, two steps."""
    assert check(place(real_shape("Qwen3-0.6B", 28, cores=2), Sync.COUNTER), max_cores=2) == []


@pytest.mark.parametrize("seed", range(SEEDS))
def test_unsafe_mutations_are_never_accepted(seed: int) -> None:
    """Thousands of schedules that are unsafe by construction: the judge accepts none.

    The unmutated schedule is accepted each time, so the judge does not simply refuse everything.
    """
    rng = random.Random(seed)
    done: Counter[str] = Counter()
    while done.total() < UNSAFE:
        base = small_schedule(rng)
        assert check(base, max_cores=3) == []
        for _ in range(5):
            for mutate in MUTATIONS:
                bad = mutate(base, rng)
                if bad is not None and bad != base:
                    assert check(bad, max_cores=3), f"{mutate.__name__} was accepted"
                    done[mutate.__name__] += 1
    assert set(done) == {m.__name__ for m in MUTATIONS}


def test_more_cores_than_the_machine_has_are_refused() -> None:
    """Record R23: as many as there are work, one more is a fault with both numbers."""
    shape = real_shape("SmolLM2-135M", 1, cores=4)
    schedule = place(shape, Sync.BARRIER)
    assert check(schedule, max_cores=4) == []
    (fault,) = check(schedule, max_cores=3)
    assert (fault.rule, "4 cores" in fault.text, "3" in fault.text) == ("capacity", True, True)


def test_the_simulator_charges_for_bytes_waits_and_context() -> None:
    """Twice the weights cost about twice; a longer context costs more; a deadlock costs all."""
    machine = find("x86-64-v3")
    shape = real_shape("Llama-3.2-1B", 2, cores=2)
    schedule = place(shape, Sync.COUNTER)
    fp32 = simulate(schedule, machine, 1).seconds
    half = StepShape(shape.model, Workload(1, 1024, WeightFormat.BF16), shape.tiling, shape.lanes)
    bf16 = simulate(place(half, Sync.COUNTER), machine, 1).seconds
    assert 1.5 < fp32 / bf16 <= 2.01
    assert simulate(schedule, machine, 1024).seconds > fp32
    one = simulate(place(replace_cores(shape, 1), Sync.COUNTER), machine, 1).seconds
    assert one >= fp32 * 0.95
    stuck = replace(schedule, programs=(schedule.programs[0], ()))
    assert simulate(stuck, machine).seconds == float("inf")


def replace_cores(shape: StepShape, cores: int) -> StepShape:
    """The same step on another number of cores."""
    return replace(shape, tiling=replace(shape.tiling, cores=cores))


def test_search_ranks_and_explains_and_is_deterministic() -> None:
    """Fastest first by the simulator; equal arguments give equal choices."""
    model = parse_config(config("qwen3"))
    machine = host(2)
    first, account = search_schedules(model, Workload(1, 64), machine, cores=2, keep=6)
    again, _ = search_schedules(model, Workload(1, 64), machine, cores=2, keep=6)
    assert [c.schedule for c in first] == [c.schedule for c in again]
    times = [c.timeline.seconds for c in first]
    assert times == sorted(times)
    assert account.tried >= 16


def test_what_does_not_fit_is_refused_at_plan_time_with_its_limit() -> None:
    """Cores, cache and memory: the text names the limit and both numbers (record R49)."""
    machine = host(2)
    with pytest.raises(Infeasible, match=r"3 cores asked for, .* has 2"):
        search_schedules(parse_config(config()), Workload(), machine, cores=3)
    shape = real_shape("Llama-3.1-8B", 32, cores=2)
    poor = resources(shape, machine, memory=1 << 30)
    assert poor.limit == "memory"
    assert str(1 << 30) in str(poor.refusal)
    assert resources(shape, machine, memory=1 << 40).refusal is None
    tiny = replace(machine, caches=(replace(machine.caches[0], level=2, size=4096),))
    cramped = resources(shape, tiny, memory=1 << 40)
    assert cramped.limit == "cache"
    assert "4096" in str(cramped.refusal)


@pytest.mark.parametrize(
    ("name", "rows", "split", "stage", "count"),
    [
        # A tile of 16 rows of bf16 weights beside fp32 activations, in 99 KB.
        ("Qwen3-0.6B", 16, 1, 32768, 2),
        ("Qwen3-0.6B", 16, 2, 16384, 5),
        ("Qwen2.5-1.5B", 8, 1, 24576, 3),
        ("Qwen2.5-1.5B", 8, 2, 12288, 7),
        ("Llama-3.2-1B", 8, 1, 32768, 2),
        ("Llama-3.2-1B", 8, 2, 16384, 5),
    ],
)
def test_splitting_along_k_halves_a_stage_and_doubles_the_stages(
    name: str, rows: int, split: int, stage: int, count: int
) -> None:
    """The resource table of an Ada card (99 KB a block)."""
    shape = real_shape(name, 1)
    bf16 = StepShape(shape.model, Workload(1, 512, WeightFormat.BF16), Tiling(), shape.lanes)
    got = gpu_stages(bf16, find("sm_89"), rows, split)
    assert (got.stage_bytes, got.count) == (stage, count)
    assert got.peak_bytes == 4 * shape.hidden_padded + 2 * stage
    assert got.peak_bytes <= find("sm_89").shared_bytes == 99 * 1024


def test_pages_are_reused_across_operators() -> None:
    """The MLP's activation takes the page that attention left, and the check agrees."""
    schedule = place(real_shape("Qwen3-0.6B", 2, cores=2), Sync.COUNTER)
    act, attn = schedule.pages.page("act"), schedule.pages.page("attn")
    assert act.offset < attn.offset + attn.width
    assert attn.offset < act.offset + act.width
    apart = sum(p.stride for _, p in schedule.pages.pages) * schedule.shape.batch
    assert schedule.pages.elements < apart
