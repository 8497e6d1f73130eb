"""GPU schedules: real shapes are accepted, unsafe mutations never; rings, copies, roles."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.gpu_schedules import (
    GPU_MUTATIONS,
    GPU_SHAPES,
    bf16,
    gpu_model,
    small_schedule,
)
from tests.mega_cuda_checks import CASES, fitted, work_of
from tests.mega_models import config

from obelisk.machine import find
from obelisk.schedule.gpu import (
    SUMS_ROOM,
    GpuTiling,
    products,
    refuse,
)
from obelisk.schedule.gpu_check import check_gpu, shallow
from obelisk.schedule.gpu_default import default_tiling
from obelisk.schedule.gpu_ring import judge_ring
from obelisk.schedule.gpu_tasks import GpuStep
from obelisk.schedule.gpu_types import LOADER, Compute, GpuItem, GpuSchedule, Meet, Poll
from obelisk.schedule.ir import Setting, run, schedule_of
from obelisk.schedule.ir.lower import make_ring
from obelisk.schedule.ir.passes import phases
from obelisk.tasks import WeightFormat, Workload, parse_config

H200 = find("h200")
SEEDS, UNSAFE = 4, 1300  # 5,200 in all


def scheduled(name: str, batch: int = 1, layers: int | None = None) -> GpuSchedule:
    """The default schedule of a real model on the H200."""
    model, work = gpu_model(name, layers), bf16(batch)
    step = GpuStep(model, work, default_tiling(model, work, H200))
    return schedule_of(Setting(step if layers else shallow(step)))


@pytest.mark.parametrize("name", GPU_SHAPES)
def test_real_shapes_are_accepted(name: str) -> None:
    """Ten models on 132 blocks, as deep as the argument of `gpu_check` needs: no fault."""
    schedule = scheduled(name)
    assert schedule.blocks == 132
    if name != "SmolLM2-360M":  # others: without steps of a prompt, for time
        schedule = replace(schedule, prompt=())
    assert check_gpu(schedule, H200) == []


@pytest.mark.parametrize(
    "work",
    [Workload(1, 512, WeightFormat.W4A16), Workload(2, 512, WeightFormat.W4A16, 32, True),
     Workload(8, 512, WeightFormat.INT8), Workload(2, 512, WeightFormat.FP32),
     Workload(1, 512, WeightFormat.W4A16, 64, True, WeightFormat.INT8)],
    ids=lambda w: f"{w.said}, {w.group}, batch {w.batch}",
)  # fmt: skip
def test_other_weights_are_accepted(work: Workload) -> None:
    """Whole slabs, wider chunks in layers, a head of another format; no fault."""
    model = gpu_model("Qwen3-0.6B")
    tiling = default_tiling(model, work, H200)
    step = shallow(GpuStep(model, work, tiling))
    assert tiling.chunk_cols % tiling.slab_cols == 0
    assert tiling.head_cols * tiling.head_bytes // tiling.head_slab <= tiling.chunk_bytes
    assert check_gpu(replace(schedule_of(Setting(step)), prompt=()), H200) == []


def test_a_chunk_holds_a_slab_of_the_head() -> None:
    """One in 8 bits takes two of 4-bit weights: smaller chunks are refused, not divided by zero."""
    model = gpu_model("Qwen3-0.6B")
    work = Workload(2, 512, WeightFormat.W4A16, head=WeightFormat.INT8)
    tiling = replace(default_tiling(model, work, H200), chunk_cols=128)
    why = refuse(model, work, tiling, H200)
    assert why is not None
    assert "1152 bytes holds no columns of the head, of which 128 take 2048 bytes: use wider" in why
    assert refuse(model, work, replace(tiling, chunk_cols=256), H200) is None


def test_what_is_checked_on_a_device_fits_it() -> None:
    """The small models that are run there: none of their tilings is refused on an H200."""
    refused = {}
    for case in CASES:
        model, work = work_of(case)
        why = refuse(model, work, fitted(model, work, case[3], H200), H200)
        if why:
            refused[case] = why
    assert not refused


def test_cuts_of_chunks_share_a_unit() -> None:
    """Pieces of whole slabs that make up the unit; never more than asked, whole by default."""
    rng = random.Random(0)
    for _ in range(60):
        name = rng.choice(list(GPU_SHAPES))
        form = rng.choice(list(WeightFormat))
        work = Workload(rng.choice((1, 2, 8)), 512, form)
        model = gpu_model(name)
        cuts, spread = rng.choice((1, 2, 4, 8)), rng.choice((False, True))
        tiling = replace(default_tiling(model, work, H200), cuts=cuts, spread=spread)
        for p in products(model, work.batch, tiling).values():
            assert 1 <= p.cuts <= tiling.cuts
            assert p.chunk % p.cuts == 0
            piece, whole = p.chunk // p.cuts, p.slabs // p.chunk
            last = p.slabs % p.chunk
            assert p.pieces == whole * p.cuts + -(-last // piece)
            assert p.chunks == whole + (last > 0)
            shares = min(p.pieces, tiling.warps)
            sums = 64 * work.batch * shares * (tiling.stages // p.chunks + 2)
            assert spread or not p.spread
            if p.spread:
                assert p.slabs % (piece * tiling.warps) == 0 == last % piece
                sums = 64 * work.batch * tiling.warps * -(-p.units // tiling.blocks)
                sums *= 3 if work.batch <= 2 else 1
            assert p.sums(work.batch, tiling) == sums
            assert p.cuts == 1 or sums <= SUMS_ROOM


@pytest.mark.parametrize(
    ("name", "batch", "card"),
    [("Qwen3-0.6B", 8, "h200"), ("Qwen2.5-0.5B", 2, "sm_89"), ("SmolLM2-135M", 8, "sm_80")],
)
def test_batches_and_other_cards_are_accepted(name: str, batch: int, card: str) -> None:
    """More slots, fewer SMs, 99 and 163 KB."""
    model, work, machine = gpu_model(name), bf16(batch), find(card)
    step = shallow(GpuStep(model, work, default_tiling(model, work, machine)))
    assert check_gpu(replace(schedule_of(Setting(step)), prompt=()), machine) == []


def test_steps_of_a_prompt_end_with_a_barrier_where_nothing_else_orders_them() -> None:
    """SmolLM2-135M has fewer tiles than blocks in three operators: without the barrier a block that
    is ahead overwrites what a slow one still reads. A task less, or the loader there, is refused.
    """
    schedule = scheduled("SmolLM2-135M")
    assert check_gpu(schedule, H200) == []

    def changed(change: Callable[[tuple[GpuItem, ...]], tuple[GpuItem, ...]]) -> set[str]:
        prompt = tuple(change(p) for p in schedule.prompt)
        return {f.rule for f in check_gpu(replace(schedule, prompt=prompt), H200)}

    assert changed(lambda p: p[:-1]) >= {"race"}
    assert changed(lambda p: (*p[:-2], p[-1])) == {"completeness"}
    assert changed(lambda p: (*p[:-1], Meet("step", LOADER))) == {"role"}
    short = replace(schedule, prompt=schedule.prompt[1:])
    assert {f.rule for f in check_gpu(short, H200)} == {"completeness"}


def test_the_whole_depth_of_a_real_model_is_accepted() -> None:
    """All 16 layers of Llama-3.2-1B, on a third of the SMs."""
    model = gpu_model("Llama-3.2-1B")
    step = GpuStep(model, bf16(), default_tiling(model, bf16(), H200, blocks=44))
    assert check_gpu(replace(schedule_of(Setting(step)), prompt=()), H200) == []


@pytest.mark.parametrize("seed", range(SEEDS))
def test_unsafe_mutations_are_never_accepted(seed: int) -> None:
    """Thousands of schedules that are unsafe by construction: the judge accepts none.

    The unmutated schedule is accepted each time, so the judge does not simply refuse everything.
    """
    rng = random.Random(seed)
    done: Counter[str] = Counter()
    while done.total() < UNSAFE:
        base = small_schedule(rng)
        assert check_gpu(base, H200) == []
        base = replace(base, prompt=())  # what follows spoils the other steps
        for _ in range(3):
            for mutate in GPU_MUTATIONS:
                bad = mutate(base, rng)
                if bad is not None and bad != base:
                    assert check_gpu(bad, H200, most=1), f"{mutate.__name__} was accepted"
                    done[mutate.__name__] += 1
    assert set(done) == {m.__name__ for m in GPU_MUTATIONS}


def test_neighbouring_layers_are_alike() -> None:
    """What `shallow` rests on: adding `rotate` to a block's number maps a layer onto the next."""
    schedule = scheduled("SmolLM2-360M", layers=4)
    turn, blocks = schedule.step.tiling.rotate, schedule.blocks

    def layer(block: int, n: int) -> list[object]:
        out: list[object] = []
        for item in schedule.programs[block]:
            match item:
                case Compute(task) if task.layer == n and task.core < 0:
                    out.append((task.kind, task.lo, task.hi))
                case Poll(region) if region.layer == n:
                    out.append((region.value, region.lo, region.hi))
        return out

    assert all(
        layer(block, 2) == layer((block + turn) % blocks, 1) and layer(block, 1)
        for block in range(blocks)
    )
    deep = GpuStep(gpu_model("SmolLM2-360M"), bf16(), schedule.step.tiling)
    assert shallow(deep).model.layers == 4
    odd = replace(deep, model=replace(deep.model, layers=31))
    assert shallow(odd).model.layers == 3


def test_all_blocks_must_be_resident_at_a_time() -> None:
    """A grid that waits for itself fits a machine with as many SMs, and not one with one less."""
    schedule = scheduled("Qwen3-0.6B", layers=2)
    assert check_gpu(schedule, H200) == []
    (fault,) = check_gpu(schedule, replace(H200, cores=131))
    assert fault.rule == "capacity"
    assert "132 blocks wait for each other, 131 are resident" in fault.text
    ada = check_gpu(schedule, find("sm_89"))
    assert any("shared memory, a block has 101376" in f.text for f in ada)


def test_words_are_reused_only_when_every_reader_is_known_to_be_done() -> None:
    """One copy of every value is enough where each block has a piece of what lies between. On more
    blocks than there are pieces, `down` is kept twice, and one copy is a fault.
    """
    assert all(p.copies == 1 for _, p in scheduled("Llama-3.2-1B", layers=3).pages.device)
    c = config(num_attention_heads=1, num_key_value_heads=1, head_dim=16, hidden_size=32,
               intermediate_size=64, vocab_size=50, num_hidden_layers=3)  # fmt: skip
    tiling = GpuTiling(8, chunk_cols=32, stages=2, in_flight=1, warps=2, kv_pieces=1, rotate=1,
                       down_split=2)  # fmt: skip
    schedule = schedule_of(Setting(GpuStep(parse_config(c), bf16(1, 16), tiling)))
    pages = schedule.pages.device
    assert [n for n, p in pages if p.copies > 1] == ["down"]
    assert check_gpu(schedule, H200) == []
    one = tuple((n, replace(p, copies=1)) for n, p in pages)
    faults = check_gpu(replace(schedule, pages=replace(schedule.pages, device=one)), H200)
    assert faults
    assert {f.rule for f in faults} <= {"race", "progress", "value", "visibility"}


def test_a_barrier_makes_polls_superfluous_and_its_absence_does_not() -> None:
    """Words behind a barrier need no poll; the same schedule without both is refused."""
    rng = random.Random(2)
    schedule = next(
        s for s in (small_schedule(rng) for _ in range(50)) if "o" in s.step.tiling.barriers
    )
    unpolled = tuple(
        tuple(i for i in p if not (isinstance(i, Poll) and i.region.value == "o"))
        for p in schedule.programs
    )
    assert check_gpu(replace(schedule, programs=unpolled), H200) == []
    bare = tuple(
        tuple(i for i in p if not (isinstance(i, Meet) and i.name.startswith("o@")))
        for p in unpolled
    )
    assert {f.rule for f in check_gpu(replace(schedule, programs=bare), H200)} >= {"race"}


def test_a_ring_of_any_depth_is_accepted_and_bounded() -> None:
    """Chunks that do not divide by slots, warps or what is in flight."""
    for stages, flight, warps in ((2, 1, 1), (3, 2, 2), (5, 5, 4), (24, 6, 8)):
        ring = make_ring(((3, 2), (0, 4), (5, 1)), stages, flight, warps)
        assert judge_ring(ring, stages, flight, warps) == []
        if flight > 1:
            assert judge_ring(ring, stages, flight - 1, warps)[0].rule == "flight"
        assert judge_ring(ring, stages, flight, warps + 1)[0].rule == "role"
        # Steps in a row are one longer ring: slots are counted on.
        on = make_ring(2 * ((3, 2), (0, 4), (5, 1)), stages, flight, warps)
        assert judge_ring(on, stages, flight, warps) == []


def test_copies_in_any_order_bound_what_is_in_flight() -> None:
    """A warp that goes on by eight chunks in a ring of 13 finds a slot whose last copy but one has
    not come, with six in flight, where copies may come in another order; with five never.
    """
    for stages, flight, warps, safe in ((13, 5, 8, True), (13, 6, 8, False), (24, 6, 8, True)):
        ring = make_ring(((9, 8), (2, 3)), stages, flight, warps)
        assert judge_ring(ring, stages, flight, warps) == []
        found = judge_ring(ring, stages, flight, warps, ordered=False)
        assert [f.rule for f in found] == ([] if safe else ["flight"])


def test_a_block_looks_for_a_mark_only_when_the_use_before_is_known() -> None:
    """Marks repeat: a block that never waited in layer 0 could take its words for those of layer
    1.
    """
    rng, rules = random.Random(6), set()
    for schedule in (small_schedule(rng) for _ in range(12)):
        hasty = tuple(
            tuple(i for i in p if not (isinstance(i, Poll) and i.region.layer == 0 and block == 1))
            for block, p in enumerate(schedule.programs)
        )
        rules |= {f.rule for f in check_gpu(replace(schedule, programs=hasty), H200)}
    assert "mark" in rules


@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Qwen3-0.6B", "SmolLM2-135M"])
def test_what_is_judged_is_what_is_emitted(name: str) -> None:
    """The kernel's table of shares, ring and shared memory are those of the schedule."""
    from obelisk.mega.cuda import emit_cuda
    from obelisk.mega.cuda.emit import KINDS, shares

    model = gpu_model(name)
    tiling = default_tiling(model, bf16(), H200)
    step = GpuStep(model, bf16(), tiling)
    table = shares(model, tiling)
    cut = {
        p.phase.data: p.bounds.get_values()
        for p, _ in phases(run(Setting(step), "tile")) if p.bounds is not None
    }  # fmt: skip
    assert {k: tuple(cut[k]) for k in KINDS} == {k: tuple(table[k]) for k in KINDS}
    schedule = schedule_of(Setting(shallow(step)))
    emitted = emit_cuda(model, bf16(), tiling, H200)
    assert schedule.pages.shared_bytes == emitted.shared.total
    assert emitted.tiling == tiling
    assert f"#define OM_ROTATE {tiling.rotate}" in emitted.source
