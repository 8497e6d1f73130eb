"""Batches, limits, sampling, faults: one small model, a few plans, many calls."""

from __future__ import annotations

import dataclasses
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.mega_models import Reference, config, random_tensors, save_model

from obelisk.app.synth import make_plan, synthesise
from obelisk.base.errors import CallError, KernelFault, UserError
from obelisk.engine import Engine, Sampling
from obelisk.machine import host
from obelisk.plan import Plan, read_plan, write_plan
from obelisk.runtime import CpuSession, trace_events
from obelisk.runtime.packing import pack, stored
from obelisk.schedule import (
    Choice,
    Run,
    Schedule,
    Signal,
    Sync,
    place,
    resources,
    simulate,
)
from obelisk.tasks import StepShape, TaskKind, Tiling, WeightFormat, Workload, parse_config
from obelisk.tasks.sampling import choose

CONTEXT = 64
CONFIG = config("qwen3", vocab_size=131, hidden_size=48, intermediate_size=80)
TENSORS = random_tensors(CONFIG, 3)


def plan_of(
    batch: int = 1,
    sync: Sync = Sync.COUNTER,
    weights: WeightFormat = WeightFormat.FP32,
    change: Any = None,
    **tiling: Any,
) -> Plan:
    """A plan without a search; `change` may damage the schedule before it is emitted."""
    tiling = {"cores": 2, **tiling}
    shape = StepShape(
        parse_config(CONFIG), Workload(batch, CONTEXT, weights), Tiling(**tiling), host().lanes
    )
    schedule = place(shape, sync)
    if change is not None:
        schedule = change(schedule)
    machine = host()
    return make_plan(Choice(schedule, simulate(schedule, machine), resources(shape, machine)))


def session_of(plan: Plan, tensors: Any = None, **options: Any) -> CpuSession:
    """The plan with the test's weights."""
    source = TENSORS if tensors is None else tensors
    return CpuSession(plan, pack(plan.layout, source.__getitem__), **options)


@pytest.fixture(scope="module")
def single(compiler: str) -> Engine:
    """Batch 1."""
    return Engine(session_of(plan_of()))


@pytest.fixture(scope="module")
def batched(compiler: str) -> Engine:
    """Batch 5, pieces of the context, unfused, barriers."""
    plan = plan_of(5, Sync.BARRIER, kv_splits=2, fuse_rope=False, replicate_norm=False, panel=8)
    return Engine(session_of(plan))


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random prompts."""
    rng = np.random.default_rng(seed)
    return [[int(t) for t in rng.integers(0, 131, n)] for n in lengths]


def test_every_slot_gives_the_tokens_of_its_own_run(single: Engine, batched: Engine) -> None:
    """Record R22: different lengths together equal each alone, whatever the other slots hold."""
    prompts = prompts_of([1, 5, 17, 40, 2])
    alone = [single.generate([p], 20)[0] for p in prompts]
    for count in (1, 2, 3, 4, 5):
        assert batched.generate(prompts[:count], 20) == alone[:count]
    with pytest.raises(CallError, match=r"6 sequences, .* batch is 5"):
        batched.generate(prompts_of([1] * 6), 4)


def test_a_slot_that_ends_early_changes_no_other(single: Engine, batched: Engine) -> None:
    """A stop token ends one slot with reason "stop"; the others go on."""
    prompts = prompts_of([3, 9, 4])
    free = single.generate([prompts[1]], 12)[0]
    stop = free.tokens[4]
    got = batched.generate(prompts, 12, stops=[stop])
    want = [single.generate([p], 12, stops=[stop])[0] for p in prompts]
    assert got == want
    first = free.tokens.index(stop)
    assert (got[1].tokens, got[1].reason) == (free.tokens[: first + 1], "stop")


@pytest.mark.parametrize(
    ("prompt", "asked", "made"),
    [(CONTEXT - 12, 100, 12), (CONTEXT - 1, 5, 1), (CONTEXT, 5, 0), (1, 200, CONTEXT - 1)],
)
def test_the_context_is_a_limit_and_a_reason(
    single: Engine, prompt: int, asked: int, made: int
) -> None:
    """Record R26: as many as fit, then "length"; equal to the reference at the very edge."""
    (tokens,) = prompts_of([prompt], prompt)
    got = single.generate([tokens], asked)[0]
    assert (len(got.tokens), got.reason) == (made, "length")
    want, gaps = Reference(CONFIG, TENSORS).generate(tokens, max(made, 1))
    tie = next((i for i, g in enumerate(gaps) if g < 1e-3), made)
    assert list(got.tokens)[:tie] == want[:made][:tie]


def test_what_exceeds_a_limit_is_refused_before_anything_runs(single: Engine) -> None:
    """Record R15: limit plus one names the limit; nothing in the cache or the canaries changed."""
    vocab = 131
    cases: list[tuple[Any, str]] = [
        (lambda: single.generate([[1] * (CONTEXT + 1)], 1), "context is 64"),
        (lambda: single.generate([[]], 1), "empty"),
        (lambda: single.generate([], 1), "at least one prompt"),
        (lambda: single.generate([[vocab]], 1), f"expected 0 to {vocab - 1}"),
        (lambda: single.generate([[-1]], 1), "expected 0"),
        (lambda: single.generate([[1]], 0), "max_tokens"),
        (lambda: single.generate([[1]], 1, sampling=Sampling(-1.0)), "temperature"),
        (lambda: single.generate([[1]], 1, sampling=Sampling(1.0, top_p=0.0)), "top_p"),
        (lambda: single.session.launch([[1]], [CONTEXT + 1]), "positions"),
        (lambda: single.session.launch([[1]], [1], stops=range(9)), "stop tokens"),
    ]
    single.session.reset()
    before = single.session.keys.copy()
    for call, words in cases:
        with pytest.raises((CallError, UserError), match=words):
            call()
    assert np.array_equal(before, single.session.keys)
    assert single.generate([[vocab - 1]], 1)[0].reason == "length"


def test_nothing_is_left_from_an_earlier_prompt(single: Engine) -> None:
    """Prompts A, B, A: both runs of A are equal, and equal to a fresh session's."""
    a, b = prompts_of([7, 30])
    first = single.generate([a], 25)
    single.generate([b], 25)
    assert single.generate([a], 25) == first
    fresh = Engine(session_of(single.session.plan))
    fresh.session.keys[:], fresh.session.values[:] = np.nan, np.nan
    fresh.session.scratch[:] = 0xFF  # NaN
    assert fresh.generate([a], 25) == first


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 1000])
def test_tokens_do_not_depend_on_the_steps_of_a_launch(single: Engine, steps: int) -> None:
    """Record R14: launches of any number of steps continue one another."""
    (prompt,) = prompts_of([9])
    want = single.generate([prompt], 30)
    assert single.generate([prompt], 30, steps=steps) == want


def test_hundreds_of_runs_neither_hang_nor_differ(single: Engine) -> None:
    """Record R25: with and without debugging, each prompt gives the same tokens every time."""
    prompts = [prompts_of([n], n)[0] for n in (1, 2, 13, 31)]
    want = [single.generate([p], 16)[0] for p in prompts]
    for i in range(240):
        single.session.debug = i % 2 == 1
        assert single.generate([prompts[i % 4]], 16)[0] == want[i % 4]
    single.session.debug = False


def test_a_timeline_changes_no_token_and_shows_every_task(single: Engine) -> None:
    """Record R25: the same tokens while recording; each core's tasks follow one another."""
    session = single.session
    session.reset()
    want = session.launch([[3, 4]], [6])
    session.reset()
    session.trace_room = 4096
    assert session.launch([[3, 4]], [6]) == want
    spans, steps = session.spans, session.steps_done
    session.trace_room = 0
    tasks = session.plan.schedule["tasks_per_core"]
    for core, count in enumerate(tasks):
        mine = [s for s in spans if s.core == core]
        assert len(mine) == count * steps
        assert all(a.end <= b.start for a, b in pairwise(mine))
    assert {s.kind for s in spans} >= {"embed", "qkv", "attend", "o", "up", "down", "head"}
    assert {s.layer for s in spans if s.kind == "up"} == {0, 1}
    events = trace_events(spans)["traceEvents"]
    assert len(events) == len(spans)
    assert all(e["dur"] >= 0 and e["ph"] == "X" for e in events)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7, seed=1), Sampling(1.5, top_k=5, seed=2), Sampling(1.0, top_p=0.6, seed=3),
        Sampling(0.9, 40, 0.9, seed=(1 << 64) - 1), Sampling(2.0, top_k=1, seed=5),
    ],
)  # fmt: skip
def test_sampled_tokens_follow_their_definition(single: Engine, sampling: Sampling) -> None:
    """Each token is the one that the numpy definition picks from the same logits."""
    session = single.session
    session.reset()
    page = session.plan.schedule["pages"]["logits"]
    logits = session.scratch.view(np.float32)[page[0] : page[0] + 131]
    token, seen = 5, set()
    for position in range(40):
        token_next = session.launch([[token]], [1], [sampling])[0].tokens[0]
        assert token_next == choose(
            logits, position, sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed
        )
        seen.add(token_next)
        token = token_next
    assert len(seen) > 5


def test_sampling_is_seeded_by_slot_and_shares_nothing(batched: Engine) -> None:
    """Equal seeds give equal tokens in any slot; different seeds differ."""
    (p,) = prompts_of([4])
    s = [Sampling(1.0, seed=7), Sampling(1.0, seed=8), Sampling(1.0, seed=7), Sampling()]
    got = batched.generate([p] * 4, 20, sampling=s)
    assert got[0] == got[2] != got[1]
    assert got[3] != got[0]


@pytest.mark.parametrize("form", [f for f in WeightFormat if f is not WeightFormat.FP32])
def test_narrow_weights_compute_with_what_they_store(form: WeightFormat, compiler: str) -> None:
    """Logits equal the float64 reference of the rounded weights: rounding is all that is lost."""
    plan = plan_of(weights=form, panel=8)
    means = stored(plan.layout, TENSORS.__getitem__)
    tensors = {k: means(k) for k in TENSORS}
    engine = Engine(session_of(plan))
    prompt = [3, 99, 20]
    want, gaps = Reference(CONFIG, tensors).generate(prompt, 40)
    tie = next((i for i, g in enumerate(gaps) if g < 1e-3), 40)
    assert tie > 8
    assert list(engine.generate([prompt], 40)[0].tokens)[:tie] == want[:tie]
    full, _ = Reference(CONFIG, TENSORS).generate(prompt, 40)
    assert full != want or form in (WeightFormat.BF16, WeightFormat.FP16)


def _without_signal(schedule: Schedule) -> Schedule:
    """Core 1 never reports its rows of the MLP."""
    programs = list(schedule.programs)
    programs[1] = tuple(
        i for i in programs[1] if not (isinstance(i, Signal) and i.counter.startswith("up@"))
    )
    return dataclasses.replace(schedule, programs=tuple(programs))


def test_a_hang_is_reported_with_who_waited_for_what(compiler: str) -> None:
    """A schedule that lacks a signal ends with the core, step, layer and counts in words."""
    plan = plan_of(change=_without_signal)
    # The emitter counts what is signalled; the waiter still expects two.
    session = session_of(plan, spin_seconds=0.3)
    done: list[str] = []

    def run() -> None:
        try:
            session.launch([[1]], [2])
        except KernelFault as fault:
            done.append(str(fault))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert len(done) == 1
    assert "waited 0.3 s in step 0 for up of layer 0" in done[0]
    assert "expected 2 arrivals, saw 1" in done[0]
    assert session.position[0] == 0


def test_the_first_number_that_is_not_finite_is_named(compiler: str) -> None:
    """Record R15: debugging names layer and operator; without it, the run ends."""
    tensors = dict(TENSORS)
    name = "model.layers.1.post_attention_layernorm.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][3] = np.inf
    session = session_of(plan_of(), tensors)
    session.debug = True
    with pytest.raises(KernelFault, match=r"norm_mid of layer 1 .*not finite, in step 0"):
        session.launch([[1]], [2])


@pytest.mark.parametrize("cores", [1, 2])
def test_any_number_of_threads_gives_the_same_tokens(
    single: Engine, cores: int, compiler: str
) -> None:
    """Record R23: one thread, as many as there are; the vocabulary need not divide."""
    engine = Engine(session_of(plan_of(cores=cores, head=3)))
    (p,) = prompts_of([6])
    assert engine.generate([p], 30) == single.generate([p], 30)


def test_the_largest_logit_wins_wherever_it_lies(compiler: str) -> None:
    """Also in the last row of the vocabulary, and when all logits are negative."""
    tensors = dict(TENSORS)
    head = np.abs(tensors["lm_head.weight"]) * 0 - 1e-3
    tensors["model.norm.weight"] = np.abs(tensors["model.norm.weight"])
    for row in (0, 64, 130):
        chosen = head.copy()
        chosen[:, :] = -1.0
        tensors["lm_head.weight"] = chosen
        # Every embedding is positive, so every logit is negative; the chosen row is the least so.
        tensors["model.embed_tokens.weight"] = np.abs(TENSORS["model.embed_tokens.weight"]) + 50
        chosen[row] = -0.5
        engine = Engine(session_of(plan_of(head=3), tensors))
        page = engine.session.plan.schedule["pages"]["logits"]
        got = engine.generate([[5]], 2)[0].tokens
        logits = engine.session.scratch.view(np.float32)[page[0] : page[0] + 131]
        assert (logits < 0).all()
        assert got == (row, row)


def test_a_plan_refuses_another_machine_model_and_weights(tmp_path: Path, compiler: str) -> None:
    """Each by name; the right directory elsewhere works, and no compiler is needed to load."""
    save_model(tmp_path / "model", CONFIG, TENSORS)
    made = synthesise(tmp_path / "model", context=32, cores=1, profile=1)
    write_plan(made.plan, tmp_path / "a.plan")
    plan = read_plan(tmp_path / "a.plan")
    assert plan == made.plan
    want = Engine.load(tmp_path / "a.plan").generate([[1, 2]], 5)
    (tmp_path / "model").rename(tmp_path / "moved")
    with pytest.raises(UserError, match="weights-dir"):
        Engine.load(tmp_path / "a.plan")
    assert Engine.load(tmp_path / "a.plan", tmp_path / "moved").generate([[1, 2]], 5) == want
    save_model(tmp_path / "other", CONFIG, seed=9)
    with pytest.raises(UserError, match=r"model\.safetensors has other content"):
        Engine.load(tmp_path / "a.plan", tmp_path / "other")
    for change, words in (
        ({"title": "Other CPU"}, "Other CPU"),
        ({"machine": "riscv64"}, "riscv64"),
        ({"flags": (*plan.host.flags, "avx1024")}, "avx1024"),
    ):
        foreign = dataclasses.replace(plan, host=dataclasses.replace(plan.host, **change))
        with pytest.raises(UserError, match=words):
            CpuSession.load(foreign, tmp_path / "moved")
    crowded = dataclasses.replace(plan, cores=4096)
    with pytest.raises(UserError, match="needs 4096 cores"):
        CpuSession.load(crowded, tmp_path / "moved")


@pytest.mark.parametrize(
    ("tied", "present"), [(True, False), (True, True), (False, True), (False, False)]
)
def test_the_tie_flag_decides(tied: bool, present: bool, tmp_path: Path, compiler: str) -> None:
    """Record R27: tied and absent, tied and present (the embedding wins), separate, missing."""
    c = {**CONFIG, "tie_word_embeddings": tied, "num_hidden_layers": 1}
    tensors = random_tensors({**c, "tie_word_embeddings": not present}, 4)
    tensors["model.embed_tokens.weight"] *= 0.3
    save_model(tmp_path, c, tensors)
    if not tied and not present:
        with pytest.raises(UserError, match=r"no tensor lm_head\.weight .*not tied"):
            synthesise(tmp_path, context=32, cores=1, profile=1)
        return
    made = synthesise(tmp_path, context=32, cores=1, profile=1)
    got = Engine(CpuSession.load(made.plan)).generate([[7, 8]], 12)[0]
    want, gaps = Reference(c, tensors).generate([7, 8], 12)
    tie = next((i for i, g in enumerate(gaps) if g < 1e-3), 12)
    assert list(got.tokens)[:tie] == want[:tie]


def test_the_sampler_runs_on_one_core_and_every_task_is_placed() -> None:
    """The schedule that the other tests run: all tasks, one sampler."""
    shape = StepShape(parse_config(CONFIG), Workload(1, CONTEXT), Tiling(cores=2))
    runs = [i.task for p in place(shape, Sync.COUNTER).programs for i in p if isinstance(i, Run)]
    assert sum(t.kind is TaskKind.SAMPLE for t in runs) == 1
    assert len(set(runs)) == len(runs)
