"""GPU schedules for tests: ten model shapes, and mutations that are unsafe by construction."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from obelisk.schedule.gpu import GpuTiling
from obelisk.schedule.gpu_tasks import TABLE, GpuKind, GpuStep, GpuTask
from obelisk.schedule.gpu_types import (
    LOADER,
    Compute,
    Copy,
    GpuItem,
    GpuSchedule,
    Join,
    Meet,
    Poll,
    Ring,
    Take,
)
from obelisk.schedule.ir import Setting, schedule_of
from obelisk.tasks import ModelConfig, WeightFormat, Workload, parse_config
from tests.mega_models import config

# family, hidden, layers, heads, kv heads, head_dim, ffn, vocabulary, tied
GPU_SHAPES: dict[str, tuple[str, int, int, int, int, int, int, int, bool]] = {
    "Llama-3.2-1B": ("llama", 2048, 16, 32, 8, 64, 8192, 128256, True),
    "Llama-3.2-3B": ("llama", 3072, 28, 24, 8, 128, 8192, 128256, True),
    "Qwen2.5-0.5B": ("qwen2", 896, 24, 14, 2, 64, 4864, 151936, True),
    "Qwen2.5-1.5B": ("qwen2", 1536, 28, 12, 2, 128, 8960, 151936, True),
    "Qwen3-0.6B": ("qwen3", 1024, 28, 16, 8, 128, 3072, 151936, True),
    "Qwen3-1.7B": ("qwen3", 2048, 28, 16, 8, 128, 6144, 151936, True),
    "Qwen3-8B": ("qwen3", 4096, 36, 32, 8, 128, 12288, 151936, False),
    "SmolLM2-135M": ("llama", 576, 30, 9, 3, 64, 1536, 49152, True),
    "SmolLM2-360M": ("llama", 960, 32, 15, 5, 64, 2560, 49152, True),
    "Mistral-7B": ("mistral", 4096, 32, 32, 8, 128, 14336, 32768, False),
}


def gpu_model(name: str, layers: int | None = None) -> ModelConfig:
    """The configuration of a real model."""
    family, hidden, depth, heads, kv, dim, ffn, vocab, tied = GPU_SHAPES[name]
    return parse_config(config(
        family, hidden_size=hidden, num_hidden_layers=layers or depth, num_attention_heads=heads,
        num_key_value_heads=kv, head_dim=dim, intermediate_size=ffn, vocab_size=vocab,
        tie_word_embeddings=tied, max_position_embeddings=32768,
    ))  # fmt: skip


def bf16(batch: int = 1, context: int = 512) -> Workload:
    """A workload with bf16 weights."""
    return Workload(batch, context, WeightFormat.BF16)


def small_step(rng: random.Random) -> GpuStep:
    """A random step of a small model on two to four blocks."""
    kv = rng.choice((1, 2, 3))
    group = rng.choice((1, 2))
    c = config(
        rng.choice(("llama", "qwen3")), num_hidden_layers=rng.choice((2, 2, 3)), head_dim=16,
        num_attention_heads=kv * group, num_key_value_heads=kv, hidden_size=rng.choice((32, 64)),
        intermediate_size=64, vocab_size=50,
    )  # fmt: skip
    blocks = rng.choice((2, 3, 4))
    warps = rng.choice((1, 2))
    stages = max(rng.choice((2, 3, 5)), warps + 1)
    tiling = GpuTiling(
        blocks=blocks, chunk_cols=32, stages=stages, warps=warps,
        in_flight=rng.randint(1, stages - warps), o_split=1, down_split=rng.choice((1, 2)),
        kv_pieces=rng.choice((1, 2)), rotate=rng.choice((0, 1)),
        barriers=tuple(e for e in ("qkv", "o", "down") if rng.random() < 0.3),
        kv_ring=rng.random() < 0.3,
    )  # fmt: skip
    return GpuStep(parse_config(c), bf16(rng.choice((1, 2)), 16), tiling)


def small_schedule(rng: random.Random) -> GpuSchedule:
    """Its schedule."""
    return schedule_of(Setting(small_step(rng)))


Mutation = Callable[[GpuSchedule, random.Random], GpuSchedule | None]


# ---- items ----
def _with_items(s: GpuSchedule, block: int, items: list[GpuItem]) -> GpuSchedule:
    programs = list(s.programs)
    programs[block] = tuple(items)
    return replace(s, programs=tuple(programs))


def _pick(
    s: GpuSchedule, rng: random.Random, test: Callable[[int, int], bool]
) -> tuple[int, int] | None:
    every = [(b, i) for b, p in enumerate(s.programs) for i in range(len(p))]
    rng.shuffle(every)
    return next((at for at in every if test(*at)), None)


def _writers(s: GpuSchedule, value: str, layer: int, lo: int, hi: int) -> set[int]:
    """Blocks that write any of these words."""
    return {
        b for b, p in enumerate(s.programs) for i in p if isinstance(i, Compute)
        for w in TABLE[i.task.kind].writes(s.step, i.task, b)
        if w.value == value and w.layer == layer and w.lo < hi and lo < w.hi
    }  # fmt: skip


def _needed(s: GpuSchedule, block: int, i: int) -> bool:
    """Whether a poll is all that lets a block read another one's words."""
    item = s.programs[block][i]
    if not isinstance(item, Poll):
        return False
    r = item.region
    again = [j for j in s.programs[block] if j == item]
    fenced = r.value in s.step.tiling.barriers
    others = _writers(s, r.value, r.layer, r.lo, r.hi) - {block}
    return len(again) == 1 and not fenced and bool(others)


def _edit(
    s: GpuSchedule, rng: random.Random, test: Callable[[int, int], bool],
    change: Callable[[list[GpuItem], int], None],
) -> GpuSchedule | None:  # fmt: skip
    at = _pick(s, rng, test)
    if at is None:
        return None
    items = list(s.programs[at[0]])
    change(items, at[1])
    return _with_items(s, at[0], items)


def drop_poll(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A block reads words that it has not waited for."""
    return _edit(s, rng, lambda b, i: _needed(s, b, i), lambda p, i: p.pop(i) and None)


def late_poll(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A block waits for words after it has read them."""

    def test(b: int, i: int) -> bool:
        p = s.programs[b]
        return i + 1 < len(p) and isinstance(p[i + 1], Compute) and _needed(s, b, i)

    def change(p: list[GpuItem], i: int) -> None:
        p[i], p[i + 1] = p[i + 1], p[i]

    return _edit(s, rng, test, change)


def short_poll(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A block waits for none of another one's words at the end of what it reads."""

    def test(b: int, i: int) -> bool:
        item = s.programs[b][i]
        if not isinstance(item, Poll) or not _needed(s, b, i) or item.region.value == "attend":
            return False
        r = item.region
        return bool(_writers(s, r.value, r.layer, r.hi - 1, r.hi) - {b})

    def change(p: list[GpuItem], i: int) -> None:
        item = p[i]
        assert isinstance(item, Poll)
        p[i] = Poll(replace(item.region, hi=item.region.hi - 1))

    return _edit(s, rng, test, change)


def other_layer(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A block waits for the words of another layer."""

    def test(b: int, i: int) -> bool:
        item = s.programs[b][i]
        return isinstance(item, Poll) and item.region.layer >= 0 and _needed(s, b, i)

    def change(p: list[GpuItem], i: int) -> None:
        item = p[i]
        assert isinstance(item, Poll)
        step = 1 if item.region.layer == 0 else -1
        p[i] = Poll(replace(item.region, layer=item.region.layer + step))

    return _edit(s, rng, test, change)


def skip_meet(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """One block does not come to a barrier."""
    return _edit(
        s, rng, lambda b, i: isinstance(s.programs[b][i], Meet), lambda p, i: p.pop(i) and None
    )


def loader_meets(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A barrier waits for a role that never comes."""

    def change(p: list[GpuItem], i: int) -> None:
        item = p[i]
        assert isinstance(item, Meet)
        p[i] = Meet(item.name, LOADER)

    return _edit(s, rng, lambda b, i: isinstance(s.programs[b][i], Meet), change)


def drop_task(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """Units are never computed."""
    return _edit(
        s, rng, lambda b, i: isinstance(s.programs[b][i], Compute), lambda p, i: p.pop(i) and None
    )


def repeat_task(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """Units are computed twice."""
    return _edit(
        s, rng, lambda b, i: isinstance(s.programs[b][i], Compute), lambda p, i: p.insert(i, p[i])
    )


def shift_units(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A block computes one unit less."""

    def change(p: list[GpuItem], i: int) -> None:
        item = p[i]
        assert isinstance(item, Compute)
        p[i] = Compute(replace(item.task, lo=item.task.lo + 1))

    def test(b: int, i: int) -> bool:
        item = s.programs[b][i]
        return isinstance(item, Compute) and item.task.core < 0

    return _edit(s, rng, test, change)


def foreign_join(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A block joins another one's residual stream."""

    def change(p: list[GpuItem], i: int) -> None:
        item = p[i]
        assert isinstance(item, Compute)
        p[i] = Compute(replace(item.task, core=(item.task.core + 1) % s.blocks))

    def test(b: int, i: int) -> bool:
        item = s.programs[b][i]
        return isinstance(item, Compute) and item.task.core >= 0

    return _edit(s, rng, test, change)


def join_late(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A product runs before the join that makes its inputs."""

    def test(b: int, i: int) -> bool:
        p = s.programs[b]
        if i + 1 >= len(p):
            return False
        one, two = p[i], p[i + 1]
        return (
            isinstance(one, Compute) and isinstance(two, Compute)
            and one.task.kind in (GpuKind.JOIN, GpuKind.EMBED) and two.task.core < 0
        )  # fmt: skip

    def change(p: list[GpuItem], i: int) -> None:
        p[i], p[i + 1] = p[i + 1], p[i]

    return _edit(s, rng, test, change)


def strange_task(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A task of a layer that the model does not have."""
    task = Compute(GpuTask(GpuKind.UP, s.step.model.layers, 0, 1))
    return _edit(s, rng, lambda b, i: True, lambda p, i: p.insert(i, task))


# ---- pages and blocks ----
def _device(s: GpuSchedule, value: str, **change: Any) -> GpuSchedule:
    pages = tuple((n, replace(p, **change) if n == value else p) for n, p in s.pages.device)
    return replace(s, pages=replace(s.pages, device=pages, words=s.pages.words + 4096))


def overlap_values(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """Two values that are needed together share words: a product over the input that it reads."""
    moved, onto = rng.choice((("o", "attend"), ("up", "o"), ("down", "up"), ("attend", "qkv"),
                              ("qkv", "down")))  # fmt: skip
    target = s.pages.device_page(onto)
    assert target is not None
    return _device(s, moved, offset=target.offset)


def narrow_page(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A page is narrower than its value."""
    value = rng.choice([n for n, _ in s.pages.device])
    return _device(s, value, width=s.step.widths[value] - 1)


def odd_page(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """Two words that are read at once lie across 16 bytes."""
    value = rng.choice([n for n, _ in s.pages.device])
    page = s.pages.device_page(value)
    assert page is not None
    return _device(s, value, offset=page.offset + 1)


def page_outside(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A page ends behind the words there are."""
    return replace(s, pages=replace(s.pages, words=s.pages.words - rng.randint(16, 64)))


def no_page(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A value has no page."""
    gone = rng.randrange(len(s.pages.device))
    pages = tuple(p for i, p in enumerate(s.pages.device) if i != gone)
    return replace(s, pages=replace(s.pages, device=pages))


def overlap_shared(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """Two buffers of a block that are held at once share bytes."""
    ring = next(p for n, p in s.pages.shared if n == "ring")
    moved = rng.choice([n for n, p in s.pages.shared if n != "ring" and p.size])
    pages = tuple(
        (n, replace(p, offset=ring.offset) if n == moved else p) for n, p in s.pages.shared
    )
    return replace(s, pages=replace(s.pages, shared=pages))


def short_ring(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """The ring's page holds fewer slots than the loader fills."""
    pages = tuple(
        (n, replace(p, size=p.size - s.step.tiling.chunk_bytes) if n == "ring" else p)
        for n, p in s.pages.shared
    )
    return replace(s, pages=replace(s.pages, shared=pages))


def too_much_shared(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A block asks for more than there is (record R35)."""
    more = 227 * 1024 + rng.randint(1, 9999)
    return replace(s, pages=replace(s.pages, shared_bytes=more))


def more_blocks(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """More programs than the grid has blocks."""
    return replace(s, programs=(*s.programs, s.programs[0]), rings=(*s.rings, s.rings[0]))


# ---- rings ----
def _with_ring(s: GpuSchedule, block: int, ring: Ring) -> GpuSchedule:
    rings = list(s.rings)
    rings[block] = ring
    return replace(s, rings=tuple(rings))


def _copy(
    s: GpuSchedule, rng: random.Random, test: Callable[[Copy, int], bool],
    change: Callable[[list[Any], int], None],
) -> GpuSchedule | None:  # fmt: skip
    block = rng.randrange(s.blocks)
    loader = list(s.rings[block].loader)
    found = [k for k, c in enumerate(loader) if isinstance(c, Copy) and test(c, k)]
    if not found:
        return None
    change(loader, rng.choice(found))
    return _with_ring(s, block, replace(s.rings[block], loader=tuple(loader)))


def copy_early(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A slot is overwritten before its reader has released it."""

    def change(p: list[Any], k: int) -> None:
        p[k] = replace(p[k], freed=p[k].freed - 1)

    return _copy(s, rng, lambda c, k: c.freed > 0, change)


def copy_never(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """The loader waits for a release that comes after the copy itself."""

    def change(p: list[Any], k: int) -> None:
        p[k] = replace(p[k], freed=p[k].freed + 1)

    return _copy(s, rng, lambda c, k: True, change)


def too_many_in_flight(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """One copy more is under way than may be."""

    def change(p: list[Any], k: int) -> None:
        p[k] = replace(p[k], landed=p[k].landed - 1)

    return _copy(s, rng, lambda c, k: c.landed > 0, change)


def lands_after_itself(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A copy waits for its own landing."""

    def change(p: list[Any], k: int) -> None:
        p[k] = replace(p[k], landed=k + 1)

    return _copy(s, rng, lambda c, k: True, change)


def wrong_slot(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A chunk is copied to a slot where nobody looks for it, or to none."""

    def change(p: list[Any], k: int) -> None:
        p[k] = replace(p[k], slot=rng.choice((p[k].slot + 1, s.step.tiling.stages, -1)))

    return _copy(s, rng, lambda c, k: True, change)


def drop_copy(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A chunk is never copied."""
    return _copy(s, rng, lambda c, k: True, lambda p, k: p.pop(k) and None)


def repeat_copy(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A chunk is copied twice."""
    return _copy(s, rng, lambda c, k: True, lambda p, k: p.insert(k, p[k]))


def swap_chunks(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """Two chunks lie in each other's slots."""

    def change(p: list[Any], k: int) -> None:
        p[k], p[k + 1] = replace(p[k], chunk=p[k + 1].chunk), replace(p[k + 1], chunk=p[k].chunk)

    block_end = min(len(r.loader) for r in s.rings) - 1
    return _copy(s, rng, lambda c, k: k < block_end, change)


def stop_loader(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """The loader stops at a barrier."""
    return _copy(s, rng, lambda c, k: True, lambda p, k: p.insert(k, Meet("qkv@0", LOADER)))


def _take(
    s: GpuSchedule, rng: random.Random, kind: type, change: Callable[[list[Any], int], None]
) -> GpuSchedule | None:
    block = rng.randrange(s.blocks)
    ring = s.rings[block]
    warp = rng.randrange(len(ring.warps))
    items = list(ring.warps[warp])
    found = [i for i, t in enumerate(items) if isinstance(t, kind)]
    if not found:
        return None
    change(items, rng.choice(found))
    warps = tuple(tuple(items) if w == warp else p for w, p in enumerate(ring.warps))
    return _with_ring(s, block, replace(ring, warps=warps))


def take_early(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A warp reads a slot before its chunk has landed."""

    def change(p: list[Any], i: int) -> None:
        p[i] = replace(p[i], filled=p[i].filled - 1)

    return _take(s, rng, Take, change)


def take_late(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A warp waits for the copy that would overwrite its chunk."""

    def change(p: list[Any], i: int) -> None:
        p[i] = replace(p[i], filled=p[i].filled + 1)

    return _take(s, rng, Take, change)


def no_release(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A slot never goes back to the loader."""

    def change(p: list[Any], i: int) -> None:
        p[i] = replace(p[i], releases=False)

    return _take(s, rng, Take, change)


def drop_take(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A chunk is never multiplied."""
    return _take(s, rng, Take, lambda p, i: p.pop(i) and None)


def repeat_take(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A chunk is multiplied twice."""
    return _take(s, rng, Take, lambda p, i: p.insert(i, p[i]))


def drop_join(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A warp runs on while the others still sum."""
    return _take(s, rng, Join, lambda p, i: p.pop(i) and None)


def take_after_join(s: GpuSchedule, rng: random.Random) -> GpuSchedule | None:
    """A warp takes a chunk after its task's sums were declared complete."""

    def change(p: list[Any], i: int) -> None:
        if i + 1 < len(p):
            p[i], p[i + 1] = p[i + 1], p[i]
        else:
            p.append(p[i])

    made = _take(s, rng, Take, change)
    if made is None:
        return None
    moved = [
        (a, b) for r, q in zip(made.rings, s.rings, strict=True) if r != q
        for u, v in zip(r.warps, q.warps, strict=True) if u != v
        for a, b in zip(u, v, strict=False) if a != b
    ]  # fmt: skip
    return made if moved and isinstance(moved[0][0], Join) else None


GPU_MUTATIONS: tuple[Mutation, ...] = (
    drop_poll, late_poll, short_poll, other_layer, skip_meet, loader_meets, drop_task, repeat_task,
    shift_units, foreign_join, join_late, strange_task, overlap_values, narrow_page, odd_page,
    page_outside, no_page, overlap_shared, short_ring, too_much_shared, more_blocks, copy_early,
    copy_never, too_many_in_flight, lands_after_itself, wrong_slot, drop_copy, repeat_copy,
    swap_chunks, stop_loader, take_early, take_late, no_release, drop_take, repeat_take, drop_join,
    take_after_join,
)  # fmt: skip
