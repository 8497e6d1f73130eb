"""Public reports about decode kernels, as tests on the CPU twin. Each names its record.

Others are beside what they test: R14, R15, R22, R25, R26, R27 in test_mega_limits, R17 and R18 in
test_mega_generate, R28 in test_mega_config, R33 in test_mega_compare, R47 in test_mega_bench, R49
in test_mega_schedule.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.mega_models import Reference, config, random_tensors
from tests.mega_schedules import SHAPES, real_shape
from tests.mega_sessions import plan_of, session_of

from obelisk.app.compare import compare, first_beyond, schedule_of
from obelisk.base.errors import CallError, Infeasible
from obelisk.engine import Engine
from obelisk.machine import Machine, host
from obelisk.runtime import CpuSession
from obelisk.runtime.packing import pack, stored
from obelisk.schedule import Sync, resources, search_schedules
from obelisk.schedule.vm import VirtualMachine
from obelisk.tasks import Workload, parse_config

SMALL = config("qwen3", vocab_size=131, hidden_size=48, intermediate_size=80)
TENSORS = random_tensors(SMALL, 3)


def prompts_of(lengths: list[int], vocab: int = 131, seed: int = 0) -> list[list[int]]:
    """Random prompts."""
    rng = np.random.default_rng(seed)
    return [[int(t) for t in rng.integers(0, vocab, n)] for n in lengths]


@pytest.mark.parametrize(("hidden", "heads", "ffn"), [(5120, 64, 800), (2560, 40, 304)])
def test_widths_of_large_models(hidden: int, heads: int, ffn: int, compiler: str) -> None:
    """Record R17: hidden, groups of 5 and 8 and ffn (a 32nd) of 14B and 32B: every result of two
    layers and the cache against float64, then 32 greedy tokens.
    """
    c = config(
        "qwen3", hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=8, head_dim=8,
        intermediate_size=ffn, vocab_size=131,
    )  # fmt: skip
    tensors = random_tensors(c, hidden)
    session = session_of(c, tensors, Workload(1, 40))
    means = stored(session.plan.layout, tensors.__getitem__)
    assert first_beyond(compare(session, means), 3e-5) is None
    (prompt,) = prompts_of([4])
    want, gaps = Reference(c, tensors).generate(prompt, 32)
    tie = next((i for i, g in enumerate(gaps) if g < 1e-3), 32)
    assert tie > 4
    assert list(Engine(session).generate([prompt], 32)[0].tokens)[:tie] == want[:tie]


@pytest.mark.parametrize(
    ("hidden", "batch"),
    [(64, 1), (77, 5), (576, 2), (1000, 1), (2304, 5), (2880, 2), (3584, 1), (7168, 2), (12288, 1)],
)
def test_any_hidden_size(hidden: int, batch: int, compiler: str) -> None:
    """Record R20: norm, and norm with its product, of hidden sizes that no power of two divides."""
    c = config(
        "qwen3", hidden_size=hidden, head_dim=8, intermediate_size=24, vocab_size=40,
        num_hidden_layers=1,
    )  # fmt: skip
    tensors = random_tensors(c, hidden)
    session = session_of(c, tensors, Workload(batch, 16))
    found = compare(session, stored(session.plan.layout, tensors.__getitem__))
    assert {d.kind.value for d in found} >= {"norm_in", "norm_mid", "norm_final", "qkv", "up"}
    assert first_beyond(found, 3e-5) is None


def test_batches_of_one_to_eight(compiler: str) -> None:
    """Record R22: eight slots of lengths from 1 to 100, any number in use, an idle one between:
    each gives the tokens of its own run.
    """
    lengths = [1, 5, 17, 100, 2, 33, 64, 65]
    prompts = prompts_of(lengths)
    work = Workload(1, 160)
    single = Engine(session_of(SMALL, TENSORS, work), None)
    alone = [single.generate([p], 24)[0] for p in prompts]
    session = session_of(SMALL, TENSORS, replace(work, batch=8), Sync.BARRIER, panel=8)
    kernel, usual = Engine(session, None), Engine(session)
    for count in range(1, 9):
        assert kernel.generate(prompts[:count], 24) == alone[:count]
    assert usual.generate(prompts, 24) == alone
    session.reset()
    session.keys[:], session.values[:] = np.nan, np.nan
    runs = session.launch([prompts[0], [], prompts[2]], [24, 0, 24])
    assert [r.tokens for r in runs] == [alone[0].tokens, (), alone[2].tokens]
    assert np.isnan(session.keys[:, 1]).all()
    with pytest.raises(CallError, match=r"9 sequences, .* batch is 8"):
        usual.generate(prompts_of([1] * 9), 4)


def test_nothing_is_written_behind_a_buffer(compiler: str) -> None:
    """Record R15: at the very limits of batch and context, canaries behind cache, scratch and
    positions stay as they were.
    """
    session = session_of(SMALL, TENSORS, Workload(8, 24), panel=8)
    rooms: dict[str, Any] = {}
    for name in ("keys", "values", "scratch", "position"):
        old = getattr(session, name)
        extra = 1024 // old.itemsize
        raw = np.zeros(old.size + extra + 64, old.dtype)
        skip = -raw.ctypes.data % 64 // old.itemsize
        raw[skip + old.size :] = 77
        setattr(session, name, raw[skip : skip + old.size].reshape(old.shape))
        rooms[name] = raw[skip + old.size :]
    prompts = prompts_of([23, 24, 1, 12, 23, 7, 20, 2])
    got = Engine(session, None).generate(prompts, 100)
    assert [len(c.tokens) for c in got] == [1, 0, 23, 12, 1, 17, 4, 22]
    assert all((room == 77).all() for room in rooms.values())


@pytest.mark.parametrize("vocab", [1000, 32003, 128256, 151936])
def test_the_largest_logit_wherever_it_is(vocab: int, compiler: str) -> None:
    """Record R23: vocabularies that nothing divides, in 132 tiles on two cores: the last element,
    the first, and the first of equals.
    """
    c = config(
        "llama", hidden_size=16, num_attention_heads=2, num_key_value_heads=1, vocab_size=vocab,
        intermediate_size=16, num_hidden_layers=1,
    )  # fmt: skip
    tensors = random_tensors(c, 1)
    rows = tensors["lm_head.weight"]
    tensors["model.embed_tokens.weight"][:] = 50.0  # every token gives one hidden state
    plan = plan_of(c, Workload(1, 8), head=132)
    for chosen in ((vocab - 1,), (0,), (vocab // 2, vocab - 1), (7, 8)):
        rows[:] = -1.0
        rows[list(chosen)] = -0.5
        tensors["model.norm.weight"][:] = 1.0
        for name in ("o_proj", "down_proj"):
            part = "self_attn" if name == "o_proj" else "mlp"
            tensors[f"model.layers.0.{part}.{name}.weight"][:] = 0.0
        session = session_of_plan(plan, tensors)
        assert session.launch([[3]], [1])[0].tokens == (chosen[0],)


def session_of_plan(plan: Any, tensors: dict[str, Any]) -> Any:
    """The plan with these weights."""
    return CpuSession(plan, pack(plan.layout, tensors.__getitem__))


def test_more_cores_than_there_are_is_refused() -> None:
    """Record R23: one core too many names both figures; every number up to all of them works."""
    machine = host()
    model = parse_config(SMALL)
    for cores in range(1, machine.cores + 1):
        assert search_schedules(model, Workload(1, 16), machine, cores=cores, keep=1)[0]
    with pytest.raises(Infeasible, match=f"{machine.cores + 1} cores asked for"):
        search_schedules(model, Workload(1, 16), machine, cores=machine.cores + 1)


@pytest.mark.parametrize("length", [16, 512, 4096])
def test_capacity_is_exact(length: int, compiler: str) -> None:
    """Record R26: prompts of L - 1, L, L + 1, 0 and 1 tokens; as many tokens as fit, then "length";
    a second prompt is as in a fresh session.
    """
    session = session_of(SMALL, TENSORS, Workload(1, length))
    engine = Engine(session)
    full, short = prompts_of([length, length - 12])
    for prompt, asked, made in (
        (full[:-1], 5, 1), (full, 5, 0), (short, 100, 12), (full[:1], 4, min(4, length - 1)),
    ):  # fmt: skip
        got = engine.generate([prompt], asked)[0]
        assert (len(got.tokens), got.reason) == (made, "length")
    for prompt, words in (([], "empty"), ([*full, 1], f"context is {length}")):
        with pytest.raises(CallError, match=words):
            engine.generate([prompt], 1)
    first = engine.generate([short[:9]], 5)
    engine.generate([full[: length // 2]], 5)
    assert engine.generate([short[:9]], 5) == first
    assert Engine(session_of(SMALL, TENSORS, Workload(1, length))).generate([short[:9]], 5) == first


LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.fixture(scope="module")
def long_session(compiler: str) -> tuple[Any, dict[str, Any]]:
    """One layer of llama3's rotary scaling, context 32768, in pieces."""
    c = config(
        "llama", hidden_size=32, num_attention_heads=4, num_key_value_heads=1, vocab_size=131,
        intermediate_size=48, num_hidden_layers=1, rope_theta=500000.0, rope_scaling=LLAMA3,
        max_position_embeddings=131072, head_dim=16,
    )  # fmt: skip
    tensors = random_tensors(c, 9)
    return session_of(c, tensors, Workload(1, 32768), kv_splits=2), tensors


@pytest.mark.parametrize("position", [62, 63, 64, 127, 4095, 4096, 8191, 16384, 32766, 32767])
def test_long_contexts(position: int, long_session: tuple[Any, dict[str, Any]]) -> None:
    """Records R28 and R26: a cache that something else filled up to `position`, then one step:
    logits, the new key and value against float64; behind the last position nothing is taken.
    """
    session, tensors = long_session
    rng = np.random.default_rng(position)
    session.reset()
    session.keys[:], session.values[:] = np.nan, np.nan
    machine = VirtualMachine(schedule_of(session.plan), tensors.__getitem__)
    for mine, theirs in ((session.keys, machine.keys), (session.values, machine.values)):
        mine[:, :, :, :position] = rng.standard_normal(mine[:, :, :, :position].shape)
        theirs[:] = mine
    session.position[:], machine.position[:] = position, position
    logits = machine.step([5])
    session.start_recording()
    assert session.launch([[5]], [1])[0].tokens == (int(logits[0].argmax()),)
    got = session.recorded("head", "logits")[:, :131]
    assert np.abs(got - logits).max() <= 2e-5 * np.abs(logits).max()
    for mine, theirs in ((session.keys, machine.keys), (session.values, machine.values)):
        new = mine[:, :, :, position]
        assert np.abs(new - theirs[:, :, :, position]).max() <= 1e-5 * np.abs(new).max()
    if position == 32767:
        with pytest.raises(CallError, match="0 of the plan's context of 32768 are left"):
            session.launch([[1]], [1])


def mock(level2: int) -> Machine:
    """This machine with other second caches, and no third."""
    machine = host()
    kept = [c for c in machine.caches if c.level < 3]
    return replace(
        machine, caches=tuple(replace(c, size=level2) if c.level == 2 else c for c in kept)
    )


def test_estimates_are_what_is_taken_and_limits_are_the_machine_s() -> None:
    """Record R35: bytes of weights and cache equal the allocations; no accepted schedule wants more
    than a core's cache, and the limit is named where none is left.
    """
    for name in SHAPES:
        s = real_shape(name, 1)
        need = resources(s, host(), memory=1 << 50)
        assert need.cache_bytes == 2 * 4 * s.batch * 1024 * s.model.kv_width
    session = session_of(SMALL, TENSORS, Workload(3, 40))
    need = resources(schedule_of(session.plan).shape, host())
    assert need.weight_bytes == session.arena.nbytes
    assert need.cache_bytes == session.keys.nbytes + session.values.nbytes
    model = real_shape("Qwen3-0.6B", 2).model
    for kib in (48, 64, 99, 163, 227, 1024):
        machine = mock(kib * 1024)
        if kib < 100:
            with pytest.raises(Infeasible, match=f"has {kib * 1024}"):
                search_schedules(model, Workload(), machine, keep=99)
            continue
        choices, account = search_schedules(model, Workload(), machine, keep=99)
        assert all(c.resources.footprint <= kib * 1024 for c in choices)
        assert account.tried == len(choices) + sum(n for _, n in account.pruned)
        panels = {c.schedule.shape.tiling.panel for c in choices}
        assert panels == ({4} if kib == 163 else {4, 8})
