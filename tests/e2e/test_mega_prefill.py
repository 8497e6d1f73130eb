"""Prompts outside the kernel: the same keys, values and tokens as the kernel's own prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.mega_models import config, random_tensors

from obelisk.app.synth import make_plan
from obelisk.base.errors import CallError, KernelFault
from obelisk.engine import Engine
from obelisk.machine import host
from obelisk.runtime import CpuSession
from obelisk.runtime.packing import pack, stored
from obelisk.runtime.prefill import Prefill, Segment, blocks
from obelisk.runtime.unpacking import matrix, rows_of
from obelisk.schedule import Choice, Sync, place, resources, simulate
from obelisk.tasks import StepShape, Tiling, WeightFormat, Workload, parse_config

CONTEXT, TOLERANCE = 192, 1e-5
FAMILIES = {
    "qwen3": config("qwen3", hidden_size=50, intermediate_size=77, vocab_size=131),
    "qwen2": config("qwen2", num_attention_heads=6, num_key_value_heads=3, hidden_size=60),
    "llama": config(
        "llama", num_key_value_heads=1, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=True,
    ),
}  # fmt: skip


def session_of(
    name: str, batch: int = 1, form: WeightFormat = WeightFormat.FP32, panel: int = 8
) -> CpuSession:
    """A session of a small model, without a search."""
    c = FAMILIES[name]
    work = Workload(batch, CONTEXT, form, 32)
    shape = StepShape(parse_config(c), work, Tiling(cores=2, panel=panel), host().lanes)
    schedule, machine = place(shape, Sync.COUNTER), host()
    plan = make_plan(Choice(schedule, simulate(schedule, machine), resources(shape, machine)))
    return CpuSession(plan, pack(plan.layout, random_tensors(c, 3).__getitem__))


def prompts_of(lengths: list[int], vocab: int = 131) -> list[list[int]]:
    """Random prompts."""
    rng = np.random.default_rng(sum(lengths))
    return [[int(t) for t in rng.integers(0, vocab, n)] for n in lengths]


def through_the_kernel(session: CpuSession, feeds: list[list[int]]) -> tuple[Any, Any]:
    """Keys and values after the kernel ran the tokens."""
    session.reset()
    session.keys[:], session.values[:] = 0, 0
    session.launch(feeds, [1 if f else 0 for f in feeds])
    return session.keys.copy(), session.values.copy()


@pytest.mark.parametrize("form", list(WeightFormat))
@pytest.mark.parametrize("name", list(FAMILIES))
def test_keys_and_values_are_the_kernel_s(name: str, form: WeightFormat, compiler: str) -> None:
    """Every family and format: within 1e-5 of the largest; nothing else in the cache changes."""
    session = session_of(name, form=form, panel=4)
    feeds = prompts_of([75])
    want = through_the_kernel(session, feeds)
    session.reset()
    session.keys[:], session.values[:] = np.nan, np.nan
    session.prefill(feeds)
    assert list(session.position) == [75]
    for got, expected in zip((session.keys, session.values), want, strict=True):
        part = got[:, :, :, :75]
        assert np.abs(part - expected[:, :, :, :75]).max() <= TOLERANCE * np.abs(expected).max()
        assert np.isnan(got[:, :, :, 75:]).all()


def test_slots_of_different_lengths_and_pieces(compiler: str) -> None:
    """An idle slot stays as it was; a prompt in two pieces, and in blocks of any size, is one."""
    session = session_of("qwen3", 4)
    feeds = prompts_of([33, 5, 90])
    feeds.insert(1, [])
    want = through_the_kernel(session, feeds)
    for size in (7, 64, 512):
        session.reset()
        session.keys[:], session.values[:] = 0, 0
        session.prefill([f[:3] for f in feeds])
        tail = [Segment(i, min(3, len(f)), tuple(f[3:])) for i, f in enumerate(feeds) if f[3:]]
        parts = blocks(tail, size)
        assert all(sum(len(s.tokens) for s in b) <= size for b in parts)
        work = Prefill(session.plan, session.arena, session.keys, session.values,
                       session.cosines, session.sines)  # fmt: skip
        for part in parts:
            work.run(part)
        for got, expected in zip((session.keys, session.values), want, strict=True):
            assert np.abs(got - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("form", list(WeightFormat))
def test_tokens_are_the_same_either_way(form: WeightFormat, compiler: str) -> None:
    """Prompts through the kernel, or outside it from 2 tokens on: equal tokens and reasons."""
    session = session_of("qwen3", 3, form)
    prompts = prompts_of([1, 2, 150])
    never, always = Engine(session, None), Engine(session, 2)
    want = never.generate(prompts, 40)
    assert (never.timing.prefilled, never.timing.steps) == (0, 150 + 40 - 1)
    assert always.generate(prompts, 40) == want
    assert (always.timing.prefilled, always.timing.steps) == (1 + 149, 40)
    usual = Engine(session)
    assert usual.generate(prompts, 40) == want
    assert usual.timing.prefilled == 149


def test_limits_hold_and_debugging_stays_in_the_kernel(compiler: str) -> None:
    """Prompts at the limit and beyond; nothing runs when a later argument is wrong; a number that
    is not finite is named by the kernel.
    """
    session = session_of("qwen3")
    engine = Engine(session)
    (full,) = prompts_of([CONTEXT])
    assert engine.generate([full], 3)[0].tokens == ()
    assert len(engine.generate([full[:-1]], 3)[0].tokens) == 1
    session.reset()
    session.prefill([full])
    with pytest.raises(CallError, match="slot 0: 1 tokens, but 0 positions of the plan's context"):
        session.prefill([[1]])
    session.reset()
    before = session.keys.copy()
    for call, words in (
        (lambda: session.prefill([[131]]), "expected 0 to 130"),
        (lambda: session.prefill([[1], [2]]), "batch is 1"),
        (lambda: engine.generate([[*full[:40], 131]], 1), "expected 0 to 130"),
        (lambda: engine.generate([full[:40]], 1, stops=range(9)), "stop tokens"),
        (lambda: Engine(session, 1), "prefill_from is 1"),
    ):
        with pytest.raises(CallError, match=words):
            call()
    assert np.array_equal(before, session.keys)
    session.debug = True
    session.arena[session.plan.layout.layer_offset :][:4096] = 0xFF  # NaN
    with pytest.raises(KernelFault, match="layer 0"):
        engine.generate([full[:40]], 2)


@pytest.mark.parametrize("panel", [4, 8])
@pytest.mark.parametrize("form", list(WeightFormat))
def test_unpacking_is_the_inverse_of_packing(form: WeightFormat, panel: int, compiler: str) -> None:
    """Rows come back as `stored` means them, padding of rows aside."""
    session = session_of("llama", form=form, panel=panel)
    tensors = random_tensors(FAMILIES["llama"], 3)
    layout = session.plan.layout
    means = stored(layout, tensors.__getitem__)
    base = layout.layer_offset + layout.layer_bytes
    names = {"o": "self_attn.o_proj", "down": "mlp.down_proj"}
    for m in layout.layer_matrices:
        if m.name in names:
            want = means(f"model.layers.1.{names[m.name]}.weight")
            assert np.array_equal(matrix(session.arena, base, m)[: len(want)], want)
    table = means("model.embed_tokens.weight")
    which = np.array([0, 258, 7, 7, 100])
    assert np.array_equal(rows_of(session.arena, 0, layout.matrices[0], which), table[which])
