"""On a GPU: public reports about decode kernels, as tests. Each names its record.

Others are beside what they test: R17 and R18 at real widths in test_mega_device_models, R22 with a
slot that stops early and the fault of R25 in test_mega_cuda_device, R47 in bench/mega_cuda.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.mega_cuda_checks import NEAR_TIE, TOLERANCE
from tests.mega_device import (
    MACHINE,
    cache_of,
    device_plan,
    device_session,
    logits_apart,
    prompts_of,
    reference,
    set_cache,
)
from tests.mega_models import Reference, config, random_tensors, save_model

from obelisk.app import synth_cuda
from obelisk.app.synth_cuda import synthesise_cuda
from obelisk.base.errors import CallError, Infeasible, InternalError, UserError
from obelisk.engine import Engine
from obelisk.plan import read_plan, write_plan
from obelisk.runtime import CudaSession, load_session
from obelisk.runtime.packing import pack
from obelisk.schedule import Sync, place
from obelisk.schedule.vm import VirtualMachine
from obelisk.tasks import StepShape, Tiling, WeightFormat, Workload, parse_config

pytestmark = pytest.mark.device

SMALL = config("qwen3", vocab_size=131, hidden_size=64, intermediate_size=96, head_dim=32)
TENSORS = random_tensors(SMALL, 3)
CANARY = 77


@pytest.fixture(scope="module")
def single() -> Engine:
    """Batch 1."""
    return Engine(device_session(SMALL, TENSORS, context=64), None)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 8, 1000])
def test_tokens_do_not_depend_on_the_steps_of_a_launch(single: Engine, steps: int) -> None:
    """Record R14: launches of any number of steps continue one another."""
    (prompt,) = prompts_of([9], 131)
    want = single.generate([prompt], 50)
    assert single.generate([prompt], 50, steps=steps) == want


def test_nothing_is_written_behind_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record R15: at the very limits of batch and context, canaries behind every piece of device
    memory stay as they were; prompts in the kernel and outside it.
    """
    rooms: list[int] = []
    plain = CudaSession._new

    def guarded(self: CudaSession, nbytes: int) -> int:
        wide = -(-max(16, nbytes) // 16) * 16
        address = plain(self, wide + 4096)
        self.device.upload(address + wide, np.full(4096, CANARY, np.uint8))
        rooms.append(address + wide)
        return address

    monkeypatch.setattr(CudaSession, "_new", guarded)
    session = device_session(SMALL, TENSORS, 8, 24)
    session.keep_logits = True
    prompts = prompts_of([23, 24, 1, 12, 23, 7, 20, 2], 131)
    for least in (None, 2):
        got = Engine(session, least).generate(prompts, 100)
        assert [len(c.tokens) for c in got] == [1, 0, 23, 12, 1, 17, 4, 22]
    assert len(rooms) == 7
    for at in rooms:
        assert (session.device.download(at, (4096,), np.uint8) == CANARY).all()


def test_what_exceeds_a_limit_is_refused_before_anything_runs(single: Engine) -> None:
    """Record R15: limit plus one names the limit; nothing in the cache changed."""
    single.session.reset()
    assert isinstance(single.session, CudaSession)
    before = cache_of(single.session)
    for call, words in (
        (lambda: single.generate([[1] * 65], 1), "context is 64"),
        (lambda: single.generate([[1], [2]], 1), "batch is 1"),
        (lambda: single.generate([[131]], 1), "expected 0 to 130"),
        (lambda: single.generate([[]], 1), "empty"),
        (lambda: single.session.launch([[1]], [65]), "positions"),
        (lambda: single.session.launch([[1]], [1], stops=range(9)), "stop tokens"),
    ):
        with pytest.raises(CallError, match=words):
            call()
    for now, then in zip(cache_of(single.session), before, strict=True):
        assert np.array_equal(now, then)
    for batch, context, words in ((9, 64, "1 to 8"), (1, 32769, "32768")):
        with pytest.raises((Infeasible, UserError), match=words):
            device_plan({**SMALL, "max_position_embeddings": 1 << 17}, batch, context)


@pytest.mark.parametrize(("heads", "dim", "hidden"), [(16, 128, 1024), (32, 64, 2048),
                                                      (4, 128, 640), (9, 64, 576)])  # fmt: skip
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_heads_need_not_fill_the_hidden_size(
    family: str, heads: int, dim: int, hidden: int
) -> None:
    """Record R18: q wider, as wide, narrower than hidden; with head norms, and with biases."""
    c = config(
        family, hidden_size=hidden, num_attention_heads=heads, head_dim=dim, num_hidden_layers=1,
        num_key_value_heads=heads if heads == 9 else heads // 2, intermediate_size=304,
    )  # fmt: skip
    tensors = random_tensors(c, hidden)
    session = device_session(c, tensors, context=32)
    (prompt,) = prompts_of([8], 259)
    assert logits_apart(session, reference(c, tensors, session.plan), prompt) < TOLERANCE
    session.close()


@pytest.mark.parametrize(
    ("hidden", "batch"),
    [(64, 1), (576, 2), (640, 5), (896, 1), (1000, 1), (1536, 2), (2304, 5), (2560, 1), (2880, 2),
     (3072, 1), (3584, 1), (4608, 5), (5120, 1), (7168, 2), (12288, 1)],
)  # fmt: skip
def test_any_hidden_size(hidden: int, batch: int) -> None:
    """Record R20: sizes that no power of two divides."""
    c = config(
        "qwen3", hidden_size=hidden, head_dim=8, intermediate_size=40, vocab_size=40,
        num_hidden_layers=1,
    )  # fmt: skip
    tensors = random_tensors(c, hidden)
    session = device_session(c, tensors, batch, 16)
    (prompt,) = prompts_of([4], 40)
    assert logits_apart(session, reference(c, tensors, session.plan), prompt) < TOLERANCE
    session.close()


def test_an_odd_hidden_size_is_refused() -> None:
    """Record R20: what the kernel does not have is named before anything is compiled."""
    with pytest.raises(Infeasible, match="hidden 77 is odd"):
        device_plan(config("qwen3", hidden_size=77, head_dim=8))


def test_batches_of_one_to_eight() -> None:
    """Record R22: eight slots of lengths from 1 to 100, any number in use, an idle one between:
    each gives the tokens of its own run, and those of a plan for one slot outside near-ties.
    """
    prompts = prompts_of([1, 5, 17, 100, 2, 33, 64, 65], 131)
    session = device_session(SMALL, TENSORS, 8, 160)
    kernel, usual = Engine(session, None), Engine(session)
    alone = [kernel.generate([p], 24)[0] for p in prompts]
    for count in range(1, 9):
        assert kernel.generate(prompts[:count], 24) == alone[:count]
    outside = usual.generate(prompts, 24)
    assert usual.timing.prefilled == 99 + 32 + 63 + 64
    assert [outside[i] for i in (0, 1, 2, 4)] == [alone[i] for i in (0, 1, 2, 4)]
    session.reset()
    keys, values = cache_of(session)
    keys[:, 1] = values[:, 1] = np.nan
    set_cache(session, keys, values)
    runs = session.launch([prompts[0], [], prompts[2]], [24, 0, 24])
    assert [r.tokens for r in runs] == [alone[0].tokens, (), alone[2].tokens]
    assert np.isnan(cache_of(session)[0][:, 1]).all()
    one = Engine(device_session(SMALL, TENSORS, 1, 160), None)
    ref = reference(SMALL, TENSORS, session.plan)
    for p, c in list(zip(prompts, alone, strict=True))[:3]:
        got = one.generate([p], 24)[0].tokens
        first = next((i for i in range(24) if got[i] != c.tokens[i]), None)
        if first is None:
            continue
        ref = reference(SMALL, TENSORS, session.plan)
        for t in [*p, *c.tokens[:first]]:
            logits = ref.step(t)
        gap = abs(float(logits[got[first]] - logits[c.tokens[first]]))
        assert gap < NEAR_TIE * float(np.abs(logits).max())


WIDE_FFN = config(
    "llama", hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    intermediate_size=8 * 300, vocab_size=1000, num_hidden_layers=1,
)  # fmt: skip


@pytest.mark.parametrize("less", [None, 2, MACHINE.cores - 1, MACHINE.cores])
def test_any_number_of_blocks(less: int | None) -> None:
    """Record R23: 1, 2, all but one and all SMs: right, and a hundred launches end."""
    blocks = less or 1
    tensors = random_tensors(WIDE_FFN, 2)
    session = device_session(WIDE_FFN, tensors, context=160, blocks=blocks)
    assert session.plan.cores == blocks
    (prompt,) = prompts_of([6], 1000)
    assert logits_apart(session, reference(WIDE_FFN, tensors, session.plan), prompt) < TOLERANCE
    session.reset()
    want = session.launch([prompt], [4])
    for _ in range(100):
        session.reset()
        assert session.launch([prompt], [4]) == want
    session.close()


@pytest.mark.parametrize("more", [1, MACHINE.cores])
def test_more_blocks_than_sms_are_refused(more: int) -> None:
    """Record R23: both figures are named."""
    with pytest.raises(Infeasible, match=f"{MACHINE.cores + more} blocks, .* {MACHINE.cores} SMs"):
        device_plan(WIDE_FFN, blocks=MACHINE.cores + more)


@pytest.mark.parametrize("vocab", [1000, 32003, 49152, 128256, 151936])
def test_the_largest_logit_wherever_it_is(vocab: int) -> None:
    """Record R23: vocabularies that the blocks do not divide: the last element, the first, and the
    first of equals.
    """
    c = {**WIDE_FFN, "vocab_size": vocab, "intermediate_size": 8 * 140}
    tensors = random_tensors(c, 1)
    rows = tensors["lm_head.weight"]
    tensors["model.embed_tokens.weight"][:] = 50.0  # every token gives one hidden state
    tensors["model.norm.weight"][:] = 1.0
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.0.{name}.weight"][:] = 0.0
    for blocks in (7, 108, MACHINE.cores):
        plan = device_plan(c, context=8, blocks=blocks)
        for chosen in ((vocab - 1,), (0,), (vocab // 2, vocab - 1), (7, 8)):
            rows[:] = -1.0
            rows[list(chosen)] = -0.5
            session = CudaSession(plan, pack(plan.layout, tensors.__getitem__))
            assert session.launch([[3]], [1])[0].tokens == (chosen[0],)
            session.close()


def test_five_hundred_runs_neither_hang_nor_differ(single: Engine) -> None:
    """Record R25: with and without time stamps, each prompt gives the same tokens every time."""
    prompts = [prompts_of([n], 131, n)[0] for n in (1, 2, 13, 32)]
    want = [single.generate([p], 32)[0] for p in prompts]
    for i in range(500):
        single.session.trace_room = 256 * (i % 2)
        assert single.generate([prompts[i % 4]], 32)[0] == want[i % 4]
    single.session.trace_room = 0


@pytest.mark.parametrize("changes", ["o_split=1+down_split=1", "o_split=2+down_split=3",
                                     "o_split=4+down_split=1"])  # fmt: skip
def test_products_split_along_k_end(changes: str) -> None:
    """Record R25: any split of the products behind attention and the MLP."""
    session = device_session(SMALL, TENSORS, changes=changes)
    (prompt,) = prompts_of([6], 131)
    assert logits_apart(session, reference(SMALL, TENSORS, session.plan), prompt) < TOLERANCE
    session.close()


@pytest.mark.parametrize("length", [16, 64, 512, 4096])
def test_capacity_is_exact(length: int) -> None:
    """Record R26: prompts of L - 1, L, L + 1, 0 and 1 tokens, in the kernel and outside it; a
    second prompt is as in a fresh session.
    """
    session = device_session(SMALL, TENSORS, context=length)
    full, short = prompts_of([length, length - 12], 131)
    for engine in (Engine(session, None), Engine(session)):
        for prompt, asked, made in (
            (full[:-1], 5, 1), (full, 5, 0), (short, 100, 12), (full[:1], 4, 4),
        ):  # fmt: skip
            got = engine.generate([prompt], asked)[0]
            assert (len(got.tokens), got.reason) == (made, "length")
        for prompt, words in (([], "empty"), ([*full, 1], f"context is {length}")):
            with pytest.raises(CallError, match=words):
                engine.generate([prompt], 1)
        first = engine.generate([short], 5)
        engine.generate([full[: length // 2]], 5)
        assert engine.generate([short], 5) == first
        fresh = Engine(CudaSession(session.plan, session.weights), engine.prefill_from)
        assert fresh.generate([short], 5) == first
        fresh.session.close()
    session.close()


@pytest.mark.parametrize(("tied", "present"), [(True, False), (True, True), (False, True)])
def test_a_head_is_tied_when_the_configuration_says_so(
    tied: bool, present: bool, tmp_path: Path
) -> None:
    """Record R27: the flag decides, whatever the checkpoint holds; a tied head is stored once."""
    c = config("llama", vocab_size=1003, tie_word_embeddings=tied)
    tensors = random_tensors(c, 5)
    if tied and present:
        tensors["lm_head.weight"] = random_tensors({**c, "tie_word_embeddings": False}, 6)[
            "lm_head.weight"
        ]
    save_model(tmp_path / "m", c, tensors)
    made = synthesise_cuda(tmp_path / "m", Workload(1, 40, WeightFormat.FP16), MACHINE, profile=1)
    write_plan(made.plan, tmp_path / "plan")
    tokens = list(Engine.load(tmp_path / "plan").generate([[3, 9]], 16)[0].tokens)
    want, gaps = Reference(c, tensors).generate([3, 9], 16)
    first = next((i for i in range(16) if tokens[i] != want[i]), 16)
    assert first == 16 or gaps[first] < 0.05
    assert first > 2
    heads = [m.name for m in made.plan.layout.matrices]
    assert heads == (["embed"] if tied else ["embed", "head"])


def test_a_head_that_is_missing_is_refused(tmp_path: Path) -> None:
    """Record R27: not tied, and no head."""
    c = config("llama", vocab_size=1003)
    tensors = random_tensors(c, 5)
    del tensors["lm_head.weight"]
    save_model(tmp_path / "m", c, tensors)
    with pytest.raises(UserError, match=r"lm_head.weight .*not tied"):
        synthesise_cuda(tmp_path / "m", Workload(1, 40, WeightFormat.BF16), MACHINE, profile=1)


LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LONG = config(
    "llama", hidden_size=64, num_attention_heads=4, num_key_value_heads=1, vocab_size=131,
    intermediate_size=96, num_hidden_layers=1, rope_theta=500000.0, rope_scaling=LLAMA3,
    max_position_embeddings=131072, head_dim=16,
)  # fmt: skip
POSITIONS = [0, 62, 63, 64, 127, 128, 129, 4095, 4096, 4097, 8191, 16384, 32766, 32767]


def test_long_contexts() -> None:
    """Records R28 and R26: llama3's rotary scaling; a cache that something else filled up to a
    position, then one step: logits, the new key and value against float64; behind the last position
    nothing is taken.
    """
    tensors = random_tensors(LONG, 9)
    session = device_session(LONG, tensors, context=32768)
    session.keep_logits = True
    model = parse_config(LONG)
    means = reference(LONG, tensors, session.plan).w
    shape = StepShape(model, Workload(1, 32768, WeightFormat.FP32), Tiling())
    machine = VirtualMachine(place(shape, Sync.COUNTER), means.__getitem__)
    rng = np.random.default_rng(1)
    filled = [rng.standard_normal(session.plan.cache.shape).astype(np.float32) for _ in range(2)]
    for position in POSITIONS:
        keys, values = (f.copy() for f in filled)
        keys[:, :, :, position:] = values[:, :, :, position:] = np.nan
        set_cache(session, keys, values)
        machine.keys[:], machine.values[:] = cache_of(session)
        session.position[:], machine.position[:] = position, position
        want = machine.step([5])[0]
        session.launch([[5]], [1])
        off = float(np.abs(session.logits()[0] - want).max() / np.abs(want).max())
        assert off < TOLERANCE, position
        for mine, theirs in zip(cache_of(session), (machine.keys, machine.values), strict=True):
            new = mine[:, :, :, position]
            assert np.abs(new - theirs[:, :, :, position]).max() <= 1e-2 * np.abs(new).max()
    with pytest.raises(CallError, match="0 of the plan's context of 32768 are left"):
        session.launch([[1]], [1])
    session.close()


def test_a_long_prompt_outside_the_kernel() -> None:
    """Record R28: 32767 tokens through torch, in blocks; the keys of a few of them, computed by the
    reference with nothing before them in the first layer, turn with the position.
    """
    tensors = random_tensors(LONG, 9)
    session = device_session(LONG, tensors, context=32768)
    prompt = prompts_of([4], 131)[0] * 8192
    session.prefill([prompt[:32767]])
    keys, values = cache_of(session)
    ref = reference(LONG, tensors, session.plan)
    for position in (0, 1, 4095, 4096, 8192, 29000, 32766):
        alone = reference(LONG, tensors, session.plan)
        alone.step(prompt[position])
        head = alone.values[0][0]
        assert np.abs(values[0, 0, :, position] - head).max() <= 1e-2 * np.abs(head).max()
        plain = ref._normed(
            "model.layers.0.self_attn.k_proj", ref.w["model.embed_tokens.weight"][prompt[position]],
            ref.w["model.layers.0.input_layernorm.weight"],
        ).reshape(1, 16)  # fmt: skip
        turned = ref._rotate(plain, position)
        assert np.abs(keys[0, 0, :, position] - turned).max() <= 1e-2 * np.abs(turned).max()
    assert len(Engine(session).generate([prompt[:32767]], 4)[0].tokens) == 1
    session.close()


def test_a_wrong_constant_in_the_kernel_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Record R33: verification ends with the compiled kernel on the device: a planted fault is
    found there, and no plan is written.
    """
    save_model(tmp_path / "m", SMALL, TENSORS)
    work = Workload(1, 40, WeightFormat.BF16)
    assert synthesise_cuda(tmp_path / "m", work, MACHINE, profile=1).plan.tolerance is not None
    plain = synth_cuda.emit_cuda

    def planted(*args: Any) -> Any:
        emitted = plain(*args)
        right = "root *= OM_SCALE"
        assert emitted.source.count(right) == 1
        wrong = emitted.source.replace(right, "root *= OM_SCALE * 0.2f")
        return replace(emitted, source=wrong)

    monkeypatch.setattr(synth_cuda, "emit_cuda", planted)
    with pytest.raises(InternalError, match="differs from its meaning"):
        synthesise_cuda(tmp_path / "m", work, MACHINE, profile=1)


def test_shared_memory_is_what_was_planned_and_the_limit_the_device_s(single: Engine) -> None:
    """Record R35: the loaded kernel's own figure is within the plan's; one byte more than the
    device has is refused by name.
    """
    session = single.session
    assert isinstance(session, CudaSession)
    cu, shared = session.device.cu, session.plan.schedule["shared"]
    what = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    error, static = cu.cuFuncGetAttribute(what, session.kernel.function)
    assert int(error) == 0
    assert 0 < static <= shared["misc"]
    room = session.device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
    assert sum(shared.values()) <= room == MACHINE.shared_bytes
    launch = {**session.plan.schedule["launch"], "shared": room + 1}
    greedy = replace(session.plan, schedule={**session.plan.schedule, "launch": launch})
    with pytest.raises(UserError, match=f"{room + 1} bytes of shared memory, not {room}"):
        CudaSession(greedy, session.weights)


def test_other_devices_models_and_weights_are_refused_by_name(
    single: Engine, tmp_path: Path
) -> None:
    """Record R49: another architecture, another product, more SMs; and a checkpoint that is not the
    plan's.
    """
    plan = single.session.plan
    title = single.session.device.identity("sm_90a").title
    for host, words in (
        (replace(plan.host, machine="sm_89"), f"made for sm_89, this is {title}"),
        (replace(plan.host, title="NVIDIA L20"), f"made for NVIDIA L20, this is {title}"),
        (replace(plan.host, title="", cores=10**4), f"needs 10000 SMs, {title} has"),
    ):
        write_plan(replace(plan, host=host), tmp_path / "other")
        with pytest.raises(UserError, match=words):
            load_session(tmp_path / "other")
    save_model(tmp_path / "m", SMALL, TENSORS)
    made = synthesise_cuda(tmp_path / "m", Workload(1, 40, WeightFormat.BF16), MACHINE, profile=1)
    write_plan(made.plan, tmp_path / "plan")
    save_model(tmp_path / "n", SMALL, seed=8)
    with pytest.raises(UserError, match=r"not hold the weights .* model.safetensors has other"):
        load_session(read_plan(tmp_path / "plan"), tmp_path / "n")
    with pytest.raises(UserError, match="--weights-dir"):
        load_session(read_plan(tmp_path / "plan"), tmp_path / "nowhere")
