"""Schedules for tests: ten model shapes, and mutations that are unsafe by construction."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from obelisk.schedule import (
    Await,
    Barrier,
    Item,
    Page,
    PagePlan,
    Run,
    Schedule,
    Signal,
    Sync,
    place,
)
from obelisk.tasks import StepShape, TaskKind, Tiling, Workload, parse_config
from tests.mega_models import config

# hidden, heads, kv heads, head_dim, ffn, vocabulary, tied: the shapes of real models
SHAPES: dict[str, tuple[str, int, int, int, int, int, int, bool]] = {
    "Llama-3.2-1B": ("llama", 2048, 32, 8, 64, 8192, 128256, True),
    "Llama-3.1-8B": ("llama", 4096, 32, 8, 128, 14336, 128256, False),
    "Qwen2.5-0.5B": ("qwen2", 896, 14, 2, 64, 4864, 151936, True),
    "Qwen2.5-1.5B": ("qwen2", 1536, 12, 2, 128, 8960, 151936, True),
    "Qwen2.5-3B": ("qwen2", 2048, 16, 2, 128, 11008, 151936, True),
    "Qwen3-0.6B": ("qwen3", 1024, 16, 8, 128, 3072, 151936, True),
    "Qwen3-4B": ("qwen3", 2560, 32, 8, 128, 9728, 151936, True),
    "Qwen3-14B": ("qwen3", 5120, 40, 8, 128, 17408, 151936, False),
    "SmolLM2-135M": ("llama", 576, 9, 3, 64, 1536, 49152, True),
    "Mistral-7B": ("mistral", 4096, 32, 8, 128, 14336, 32768, False),
}


def real_shape(name: str, layers: int, **tiling: Any) -> StepShape:
    """A step of a real model's shape."""
    family, hidden, heads, kv, dim, ffn, vocab, tied = SHAPES[name]
    batch = tiling.pop("batch", 1)
    c = config(
        family, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv,
        head_dim=dim, intermediate_size=ffn, vocab_size=vocab, tie_word_embeddings=tied,
        num_hidden_layers=layers, max_position_embeddings=32768,
    )  # fmt: skip
    return StepShape(parse_config(c), Workload(batch, 1024), Tiling(**tiling))


def small_schedule(rng: random.Random) -> Schedule:
    """A random schedule of a small model on two or three cores."""
    kv = rng.choice((1, 2, 3))
    c = config(
        rng.choice(("llama", "qwen2", "qwen3")), num_hidden_layers=2, num_attention_heads=kv * 2,
        num_key_value_heads=kv, head_dim=16, intermediate_size=rng.choice((64, 90)), vocab_size=130,
    )  # fmt: skip
    tiling = Tiling(
        panel=rng.choice((4, 8)), fuse_rope=rng.random() < 0.5,
        replicate_norm=rng.random() < 0.5, kv_splits=rng.choice((1, 2)), cores=rng.choice((2, 3)),
    )  # fmt: skip
    shape = StepShape(parse_config(c), Workload(rng.choice((1, 2)), 16), tiling)
    return place(shape, rng.choice(tuple(Sync)))


def with_program(s: Schedule, core: int, items: list[Item]) -> Schedule:
    """The schedule with one core's program replaced."""
    programs = list(s.programs)
    programs[core] = tuple(items)
    return replace(s, programs=tuple(programs))


def _where(s: Schedule, test: Callable[[list[Item], int], bool]) -> list[tuple[int, int]]:
    return [
        (c, i) for c, p in enumerate(s.programs) for i in range(len(p)) if test(list(p), i)
    ]  # fmt: skip


def _edit(
    s: Schedule, rng: random.Random, test: Callable[[list[Item], int], bool],
    change: Callable[[list[Item], int], None],
) -> Schedule | None:  # fmt: skip
    places = _where(s, test)
    if not places:
        return None
    core, i = rng.choice(places)
    items = list(s.programs[core])
    change(items, i)
    return with_program(s, core, items)


def _is(*kinds: type) -> Callable[[list[Item], int], bool]:
    return lambda p, i: isinstance(p[i], kinds)


def _reads_all(s: Schedule, counter: str) -> bool:
    """Whether whoever waits for this counter reads what every producer made.

    Not so by rows before a rotation and pieces before they are combined: a core may need its own
    alone.
    """
    base, _, rest = counter.partition("@")
    if "." in rest:
        return True
    if base in ("attend", "combine") and s.shape.model.kv_heads * s.shape.batch < s.cores:
        return False  # all of attention may lie on the core that waits
    return base != "qkv_rows" and (base != "attend" or s.shape.tiling.kv_splits == 1)


def _needed(s: Schedule) -> Callable[[list[Item], int], bool]:
    """Waits without which a core reads what another has not finished."""

    def needed(p: list[Item], i: int) -> bool:
        item = p[i]
        return isinstance(item, Await) and _reads_all(s, item.counter)

    return needed


def _swap(p: list[Item], i: int) -> None:
    p[i], p[i + 1] = p[i + 1], p[i]


def drop_signal(s: Schedule, rng: random.Random) -> Schedule | None:
    """A waiter waits for more signals than there are."""
    return _edit(s, rng, _is(Signal), lambda p, i: p.pop(i) and None)


def drop_wait(s: Schedule, rng: random.Random) -> Schedule | None:
    """A core reads what another has not finished. (Barriers: this core alone skips it.)"""

    def test(p: list[Item], i: int) -> bool:
        return isinstance(p[i], Barrier) or _needed(s)(p, i)

    return _edit(s, rng, test, lambda p, i: p.pop(i) and None)


def drop_run(s: Schedule, rng: random.Random) -> Schedule | None:
    """A tile is never computed."""
    return _edit(s, rng, _is(Run), lambda p, i: p.pop(i) and None)


def repeat_run(s: Schedule, rng: random.Random) -> Schedule | None:
    """A tile is computed twice: a residual would be added twice."""
    return _edit(s, rng, _is(Run), lambda p, i: p.insert(i, p[i]))


def raise_count(s: Schedule, rng: random.Random) -> Schedule | None:
    """A wait that can never end."""

    def change(p: list[Item], i: int) -> None:
        item = p[i]
        assert isinstance(item, Await)
        p[i] = Await(item.counter, item.count + 1)

    return _edit(s, rng, _is(Await), change)


def lower_count(s: Schedule, rng: random.Random) -> Schedule | None:
    """A wait that ends when only some producers have finished."""

    def change(p: list[Item], i: int) -> None:
        item = p[i]
        assert isinstance(item, Await)
        p[i] = Await(item.counter, item.count - 1)

    return _edit(s, rng, _needed(s), change)


def run_before_wait(s: Schedule, rng: random.Random) -> Schedule | None:
    """A task is moved in front of the wait that it needs."""

    def test(p: list[Item], i: int) -> bool:
        if i + 1 == len(p) or not _needed(s)(p, i):
            return False
        nxt = p[i + 1]
        return isinstance(nxt, Run) and nxt.task.kind is not TaskKind.ATTEND

    return _edit(s, rng, test, _swap)


def signal_before_run(s: Schedule, rng: random.Random) -> Schedule | None:
    """A result is announced before it is there."""

    def test(p: list[Item], i: int) -> bool:
        if i + 1 == len(p):
            return False
        run, signal = p[i], p[i + 1]
        if not isinstance(run, Run) or not isinstance(signal, Signal):
            return False
        base, _, rest = signal.counter.partition("@")
        group = rest.partition(".")[2]
        task = run.task
        mine = base == task.kind and (not group or task.lo <= int(group) < task.hi)
        others = [q for q in s.programs if list(q) != p]
        awaited = any(
            isinstance(x, Await) and x.counter == signal.counter for q in others for x in q
        )
        return mine and awaited and _reads_all(s, signal.counter)

    return _edit(s, rng, test, _swap)


def wait_before_signal(s: Schedule, rng: random.Random) -> Schedule | None:
    """A core waits for a signal that it would give itself, afterwards."""

    def test(p: list[Item], i: int) -> bool:
        if i + 1 == len(p):
            return False
        a, b = p[i], p[i + 1]
        return isinstance(a, Signal) and isinstance(b, Await) and a.counter == b.counter

    return _edit(s, rng, test, _swap)


def swap_dependent(s: Schedule, rng: random.Random) -> Schedule | None:
    """On one core, a product runs before the norm whose copy it reads."""

    def test(p: list[Item], i: int) -> bool:
        if i + 1 == len(p):
            return False
        a, b = p[i], p[i + 1]
        return isinstance(a, Run) and isinstance(b, Run) and a.task.core >= 0 > b.task.core

    return _edit(s, rng, test, _swap)


def drop_barrier(s: Schedule, rng: random.Random) -> Schedule | None:
    """No core meets the others before an operator that reads what all of them made."""
    names = sorted(
        {i.name for p in s.programs for i in p if isinstance(i, Barrier)}
        - {f"{k}@{n}" for k in ("attend", "combine", "rope", "qkv") for n in range(2)}
        - {"norm_in@0"}
    )  # all of these may find on one core what they read
    if not names:
        return None
    gone = rng.choice(names)
    programs = tuple(
        tuple(i for i in p if not (isinstance(i, Barrier) and i.name == gone)) for p in s.programs
    )
    return replace(s, programs=programs)


def _with_page(s: Schedule, value: str, page: Page) -> Schedule:
    pages = tuple((v, page if v == value else p) for v, p in s.pages.pages)
    end = max(p.offset + p.stride * s.shape.batch for _, p in pages)
    return replace(s, pages=PagePlan(pages, max(end, s.pages.elements)))


def overlap_pages(s: Schedule, rng: random.Random) -> Schedule | None:
    """Two values that are alive together share memory."""
    h = "h0" if s.shape.tiling.replicate_norm else "h"
    pairs = [("x", h), (h, "x"), (h, "act"), ("act", "x"), ("q", "attn"), ("q", "x"),
             ("logits", "best"), (h, "logits"), ("attn", "x")]  # fmt: skip
    if s.shape.tiling.replicate_norm:
        pairs.append(("h0", "h1"))
    if s.shape.tiling.kv_splits > 1:
        pairs = [p for p in pairs if p != ("q", "attn")] + [("q", "part"), ("part", "x")]
    moved, onto = rng.choice(pairs)
    return _with_page(
        s, moved, replace(s.pages.page(moved), offset=s.pages.page(onto).offset)
    )  # fmt: skip


def shrink_page(s: Schedule, rng: random.Random) -> Schedule | None:
    """A page is too narrow for its value."""
    value = rng.choice([v for v, _ in s.pages.pages])
    p = s.pages.page(value)
    return _with_page(s, value, replace(p, width=p.width - 16, stride=p.stride - 16))


def page_outside(s: Schedule, rng: random.Random) -> Schedule | None:
    """A page ends behind the scratch memory."""
    value = rng.choice([v for v, _ in s.pages.pages])
    p = s.pages.page(value)
    pages = tuple(
        (v, replace(p, offset=s.pages.elements - 16) if v == value else q) for v, q in s.pages.pages
    )
    short = s.shape.batch == 1 and p.width == 16
    return None if short else replace(s, pages=PagePlan(pages, s.pages.elements))


def page_across_lines(s: Schedule, rng: random.Random) -> Schedule | None:
    """A page begins within a cache line."""
    value = rng.choice([v for v, _ in s.pages.pages])
    p = s.pages.page(value)
    return _with_page(s, value, replace(p, offset=p.offset + rng.randrange(1, 16)))


def foreign_norm(s: Schedule, rng: random.Random) -> Schedule | None:
    """A core runs another core's copy of a norm."""

    def own(p: list[Item], i: int) -> bool:
        item = p[i]
        return isinstance(item, Run) and item.task.core >= 0

    places = _where(s, own)
    if not places:
        return None
    core, i = rng.choice(places)
    item = s.programs[core][i]
    other = (core + 1) % s.cores
    moved = with_program(s, core, [x for j, x in enumerate(s.programs[core]) if j != i])
    items = list(moved.programs[other])
    items.insert(rng.randrange(len(items) + 1), item)
    return with_program(moved, other, items)


MUTATIONS: tuple[Callable[[Schedule, random.Random], Schedule | None], ...] = (
    drop_signal, drop_wait, drop_run, repeat_run, raise_count, lower_count, run_before_wait,
    signal_before_run, wait_before_signal, swap_dependent, drop_barrier, overlap_pages,
    shrink_page, page_outside, page_across_lines, foreign_norm,
)  # fmt: skip
