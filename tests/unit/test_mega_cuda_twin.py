"""The CUDA megakernel's text, executed on this CPU: the same checks as on a device.

Every thread of a few blocks is a fiber (tests/mega_cuda_twin.py). On the one model that was checked
on both, an H200 and the twin gave the same largest error to the last digit.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests import mega_cuda_twin as twin
from tests.cuda_text import preprocessed
from tests.mega_cuda_checks import CASES, changed, check_plan, plan_of, planned
from tests.mega_cuda_models import MODELS
from tests.mega_gptq import save_gptq
from tests.mega_models import Reference, config, random_tensors, save_model

from obelisk.app import synth_cuda
from obelisk.app.synth import workload_of
from obelisk.base.errors import CallError
from obelisk.engine import Engine
from obelisk.machine import Machine, find
from obelisk.mega.cuda import EmittedCuda, emit_cuda
from obelisk.plan import write_plan
from obelisk.runtime import CudaSession
from obelisk.runtime import cuda as runtime
from obelisk.runtime.packing import pack
from obelisk.schedule.gpu_default import default_tiling
from obelisk.tasks import WeightFormat, Workload, parse_config

if not twin.SUPPORTED or shutil.which("g++") is None:
    pytest.skip("needs g++ on x86-64, to run fibers", allow_module_level=True)

MACHINE = replace(find("h200"), cores=3)
QUICK = 5  # steps at a time


@pytest.fixture(autouse=True)
def _twin(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "twin"
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(synth_cuda, "build", lambda e, m: twin.build_twin(e.source, folder))
    monkeypatch.setattr(runtime, "Device", twin.TwinDevice)
    monkeypatch.setattr(runtime, "Kernel", twin.TwinKernel)


@pytest.mark.parametrize(
    ("arch", "case"),
    [("sm_90a", CASES[10]), ("sm_90a", CASES[8]),
     ("sm_89", ("llama, no groups, biases, odd sizes", 3, "fp16", "o_split=3")),
     ("sm_90a", ("llama, groups of 4", 1, "bf16", "staged=4+kv_pieces=1")),
     ("sm_90a", ("llama, groups of 4", 1, "bf16", "direct=0+staged=4+kv_pieces=1")),
     ("sm_89",
      ("llama, groups of 4", 1, "bf16",
       "private=0+ahead=0+loader_warps=1+stages=9+look_first=0+o_split=2+down_split=4+warps=4")),
     ("sm_89", ("llama, groups of 4", 1, "bf16", "")),
     ("sm_89", ("llama, groups of 4", 1, "bf16", "o_split=2+ahead=3+halved=1+kv_pieces=3")),
     ("sm_89", ("llama, no groups, biases, odd sizes", 1, "bf16", "ahead=1")),
     ("sm_80", ("llama, no groups, biases, odd sizes", 1, "bf16",
                "look_first=0+warps=4+chunk_cols=128+stages=6+in_flight=6+in_flight_waiting=6")),
     ("sm_120", ("qwen2, groups of 7, tied", 1, "bf16",
                 "down_split=2+barriers=qkv.attend.o.up.down.head")),
     ("sm_90a", ("llama, groups of 4", 2, "bf16", "held=1+mass_beside=1+kv_pieces=5")),
     ("sm_90a", ("llama, groups of 4", 3, "bf16", "kv_ring=1+kv_pieces=1+chunk_cols=128+stages=9")),
     ("sm_89", ("qwen3, 24", 1, "fp16", "kv_ring=1+cuts=2+fenced=0+kv_pieces=2")),
     ("sm_90a", ("llama, groups of 4", 1, "bf16", "direct=1+staged=0+kv_ring=1+kv_pieces=2")),
     ("sm_90a", ("llama, groups of 4", 1, "bf16", "direct=0+rounded=1+kv_ring=1")),
     ("sm_90a", ("llama, groups of 4", 4, "bf16", "rounded=1+o_split=2+down_split=4")),
     ("sm_89", ("qwen3, 24", 2, "bf16", "rounded=1+down_split=3")),
     ("sm_90a", ("qwen3, 24", 1, "fp16", "cuts=2+fenced=0+kept=1+chunk_cols=64")),
     ("sm_80", ("qwen3, 24", 2, "bf16", "cuts=4+chunk_cols=128")),
     ("sm_90a", ("qwen3, 24", 2, "w4a16:32:zeros", "")),
     ("sm_89", ("llama, no groups, biases, odd sizes", 1, "w4a16:64", "")),
     ("sm_90a", ("llama, no groups, biases, odd sizes", 2, "int8", "chunk_cols=128")),
     ("sm_90a", ("llama, groups of 4", 1, "w4a16", "direct=0+staged=0+spread=1+warps=2+stages=12")),
     ("sm_90a", ("llama, groups of 4", 1, "w4a16:32:zeros",
                 "direct=1+staged=1+warps=2+stages=12+kv_pieces=5")),
     ("sm_89", ("llama, no groups, biases, odd sizes", 1, "w4a16:64", "direct=1+look_first=0")),
     ("sm_89", ("llama, groups of 4", 2, "w4a16:32:zeros",
                "spread=1+warps=2+stages=12+o_split=2+chunk_cols=256")),
     ("sm_90a", ("llama, groups of 4", 4, "int8", "spread=1+warps=4+stages=12+chunk_cols=256")),
     ("sm_89", ("llama, groups of 4", 1, "w4a16:32:zeros",
                "direct=0+staged=0+spread=1+warps=2+stages=12+o_split=2+down_split=2+chunk_cols=256")),
     ("sm_90a", ("qwen3, 24", 1, "w4a16:32:zeros+head8", "direct=1+staged=1+kv_pieces=3")),
     ("sm_89", ("llama, no groups, biases, odd sizes", 3, "w4a16:64+head8", "")),
     ("sm_90a", ("llama, groups of 4", 1, "w4a16:zeros+head8",
                 "direct=0+staged=0+spread=1+warps=2+stages=12")),
     ("sm_89", ("llama, no groups, biases, odd sizes", 1, "w4a16+head8", "direct=1+look_first=0")),
     ("sm_90a", ("qwen3, 24", 2, "fp32", "")),
     ("sm_89", ("llama, no groups, biases, odd sizes", 5, "fp32", "o_split=3+kv_pieces=3")),
     ("sm_90a", ("llama, groups of 4", 1, "fp32", "cuts=2+fenced=0+mass_beside=1")),
     ("sm_80",
      ("qwen3, 24", 2, "bf16", "staged=1+barriers=qkv.attend.o.up.down.head+kv_pieces=3"))],
    ids=lambda c: c if isinstance(c, str) else f"{c[0]}, batch {c[1]}, {c[2]}, {c[3]}",
)  # fmt: skip
def test_small_models(
    arch: str, case: tuple[str, int, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits, tokens in one launch and step by step, draws, and a fault that is told; with the copy
    engine and without one.
    """
    machine = replace(find(arch), cores=3)
    monkeypatch.setattr(twin.TwinDevice, "capability", machine.capability)
    row = check_plan(case, plan_of(case, machine), QUICK)
    assert row["ok"], str(row)  # whole: a dict would be cut


@pytest.mark.parametrize(
    ("was", "made"),
    [('"n"(OM_STAGES - N)', '"n"(OM_STAGES - N + 1)'),
     ("i < count; i++) om_bring", "i <= count; i++) om_bring"),
     ("s.from += s.skip;", "s.from += OM_HIDDEN_K * 1024;")],
)  # fmt: skip
def test_copies_that_a_warp_does_not_count_right_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was: str, made: str
) -> None:
    """The twin lets a copy land as late as it may: a warp that waits for one group too few, asks
    for more slabs than it took, or for others of the next unit, multiplies other weights.
    """
    machine = replace(find("sm_89"), cores=3)
    monkeypatch.setattr(twin.TwinDevice, "capability", machine.capability)
    case = ("llama, no groups, biases, odd sizes", 1, "bf16", "warps=2+chunk_cols=64")

    def broken(emitted: EmittedCuda, machine: Machine) -> bytes:
        assert emitted.source.count(was) == 1
        return twin.build_twin(emitted.source.replace(was, made), tmp_path)

    monkeypatch.setattr(synth_cuda, "build", broken)
    with contextlib.suppress(CallError):  # a token beyond the vocabulary
        assert not check_plan(case, plan_of(case, machine), QUICK)["ok"]


def logits_of(c: dict[str, object], changes: str, prompt: int, launches: tuple[int, ...]) -> bytes:
    """All logits' bits after a prompt and so many greedy steps in each launch, without a copy
    engine.
    """
    model, work = parse_config(c), Workload(1, 220, WeightFormat.BF16)
    machine = replace(find("sm_89"), cores=3)
    plan = planned(model, work, changes, machine)
    session = CudaSession(plan, pack(plan.layout, random_tensors(c, 4).__getitem__))
    session.keep_logits = True
    session.launch([[i * 7 % 250 for i in range(prompt)]], [1])
    out = []
    for steps in launches:
        session.launch([[9]], [steps])
        out.append(session.logits()[0].astype(np.float32).tobytes())
    session.close()
    return b"".join(out)


@pytest.mark.parametrize(
    ("name", "sizes", "changes", "ahead"),
    [("llama, groups of 4", {}, "o_split=2", (1, 11)),
     ("llama, groups of 4", {},
      "o_split=4+hold=22+stages=6+in_flight=6+in_flight_waiting=6", (7,)),
     ("llama, groups of 4", {"num_hidden_layers": 1, "hidden_size": 32}, "o_split=1", (2,)),
     ("llama, no groups, biases, odd sizes", {}, "o_split=3+warps=2+chunk_cols=64", (2,)),
     ("qwen3, 24", {}, "barriers=qkv.attend.o.up.down.head+warps=4+chunk_cols=128", (1, 4))],
)  # fmt: skip
def test_weights_read_ahead_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, name: str, sizes: dict[str, int], changes: str,
    ahead: tuple[int, ...],
) -> None:  # fmt: skip
    """Gate and up read before attention's pieces: an output projection in several parts, blocks
    without units of it, odd sizes, several layers, every edge kept by a barrier too, whatever the
    launches.
    """
    monkeypatch.setattr(twin.TwinDevice, "capability", (8, 9))
    c = {**MODELS[name], **sizes}
    want = logits_of(c, changes, 4, (1, 3))
    for units in ahead:
        assert logits_of(c, f"{changes}+ahead={units}", 4, (1, 3)) == want


@pytest.mark.parametrize("name", ["llama, groups of 4", "qwen2, groups of 7, tied"])
def test_sums_of_attention_may_be_halved(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Pieces in which no, one and every warp of the upper half has a tile: the logits are those of
    all warps' sums beside each other, but for the order of sums.
    """
    monkeypatch.setattr(twin.TwinDevice, "capability", (8, 9))
    c = {**MODELS[name], "num_hidden_layers": 1}
    for prompt in (3, 66, 190):
        plain, halved = (
            np.frombuffer(logits_of(c, f"kv_pieces=1+halved={h}", prompt, (1, 2)), np.float32)
            for h in (0, 1)
        )
        assert np.abs(plain - halved).max() < 5e-3 * np.abs(plain).max()


@pytest.mark.parametrize("flight", [5, 6])
def test_a_later_copy_may_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flight: int
) -> None:
    """Eight warps, a ring of 13: with five copies on their way a warp that is eight chunks on never
    finds a slot that still waits for the copy before. With six it does, multiplies what is not
    there, and gives the slot back: so `most_in_flight` is five.
    """
    monkeypatch.setattr(twin.TwinKernel, "late", 600)
    monkeypatch.setattr(twin.TwinKernel, "rounds", 200000)
    case = ("llama, groups of 4", 1, "bf16",
            "direct=0+staged=0+kv_ring=0+chunk_cols=32+stages=13+in_flight=5")  # fmt: skip

    def made(emitted: EmittedCuda, machine: Machine) -> bytes:
        was, now = "#define OM_FLIGHT 5\n", f"#define OM_FLIGHT {flight}\n"
        assert emitted.source.count(was) == 1
        return twin.build_twin(emitted.source.replace(was, now), tmp_path)

    monkeypatch.setattr(synth_cuda, "build", made)
    plan = plan_of(case, MACHINE)
    assert plan.schedule["tiling"]["stages"] == 13
    if flight == 5:
        assert check_plan(case, plan, QUICK)["ok"]
        return
    with pytest.raises(AssertionError, match="wait for each other"):
        check_plan(case, plan, QUICK)


@pytest.mark.parametrize(
    ("group", "symmetric", "head", "tied"),
    [(128, True, None, False), (64, True, None, False), (32, False, None, False),
     (32, False, "int8", False), (64, True, "int8", True)],
)  # fmt: skip
def test_a_checkpoint_of_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int, symmetric: bool, head: str | None,
    tied: bool,
) -> None:  # fmt: skip
    """A GPTQ checkpoint, synthesised for a device at hand, written, loaded by its files: its logits
    are those of the float64 meanings, its tokens are greedy. A head in 8 bits is rounded from the
    checkpoint's in 16, a tied one from the embedding, which stays what it is.
    """
    c = config("qwen3", num_hidden_layers=1, tie_word_embeddings=tied)
    save_gptq(tmp_path / "model", c, random_tensors(c, 3), group=group, symmetric=symmetric)
    here = twin.TwinDevice().identity("sm_90a")
    monkeypatch.setattr(synth_cuda, "matching_device", lambda machine, blocks: here)
    monkeypatch.setattr(synth_cuda, "PROFILE_STEPS", 2)  # nothing is timed here
    work = workload_of(parse_config(c), 1, 48, "w4a16", tmp_path / "model", head)
    assert (work.group, work.zeros) == (group, not symmetric)
    made = synth_cuda.synthesise_cuda(tmp_path / "model", work, MACHINE, blocks=3, profile=1)
    assert made.plan.tolerance is not None
    assert made.plan.tolerance < 3e-3  # fp16 inputs of products
    outer = {m.name: m.format for m in made.plan.layout.matrices}
    assert outer == {"embed": "fp16", **({} if tied and not head else {"head": head or "fp16"})}
    write_plan(made.plan, tmp_path / "plan")
    session = CudaSession.load(tmp_path / "plan")
    session.keep_logits = True
    run = session.launch([[7, 8]], [1])[0]
    assert run.tokens == (int(session.logits()[0].argmax()),)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_fp32_checkpoints_keep_their_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    """Synthesised for a device at hand, judged, written, loaded: logits, keys and values within
    2e-6 of float64, and 12 greedy tokens of a prompt that are float64's, in two launches (marks
    count steps and a layer's buffer: an odd number of layers, and of steps, matters).
    """
    c = config("qwen3", num_hidden_layers=layers)
    tensors = save_model(tmp_path / "model", c)
    here = twin.TwinDevice().identity("sm_90a")
    monkeypatch.setattr(synth_cuda, "matching_device", lambda machine, blocks: here)
    work = workload_of(parse_config(c), 1, 48, "fp32", tmp_path / "model")
    made = synth_cuda.synthesise_cuda(tmp_path / "model", work, MACHINE, blocks=3, profile=1)
    assert max(made.plan.judged[x] for x in ("logits", "keys", "values")) < 2e-6
    write_plan(made.plan, tmp_path / "plan")
    session = CudaSession.load(tmp_path / "plan")
    prompt, got = [7, 8, 9], []
    for count in (5, 7):
        got += session.launch([[*prompt, *got][len(got) and -1 :]], [count])[0].tokens
    reference = Reference(c, tensors)
    logits, want = [reference.step(t) for t in prompt][-1], []
    for _ in got:
        want.append(int(logits.argmax()))
        logits = reference.step(want[-1])
    assert got == want


def session_of(name: str, batch: int, changes: str = "") -> CudaSession:
    """A session on the twin."""
    model = parse_config(MODELS[name])
    plan = planned(model, Workload(batch, 60, WeightFormat.BF16), changes, MACHINE)
    return CudaSession(plan, pack(plan.layout, random_tensors(MODELS[name], 4).__getitem__))


@pytest.mark.parametrize("changes", ["", "cuts=8+fenced=0", "kv_ring=1"])
def test_tokens_do_not_depend_on_who_runs_first(
    monkeypatch: pytest.MonkeyPatch, changes: str
) -> None:
    """Blocks and threads from the first, and from the last."""
    runs = []
    for order in (0, 1):
        monkeypatch.setattr(twin.TwinKernel, "order", order)
        session = session_of("qwen3, 24", 2, changes)
        session.keep_logits = True
        made = session.launch([[3, 4, 5], [7]], [6, 8])
        runs.append(([r.tokens for r in made], session.logits().tobytes()))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("changes", ["rounded=1", "rounded=1+kv_ring=1+down_split=2+o_split=2"])
def test_rounded_rows_do_not_depend_on_launches(changes: str) -> None:
    """Four layers, so that a row has the same mark in every step: one launch of several steps and
    single ones give the same logits to the bit, and so does the same again.
    """
    c = {**MODELS["llama, groups of 4"], "num_hidden_layers": 4}
    work = Workload(2, 60, WeightFormat.BF16)
    plan = planned(parse_config(c), work, "staged=0+" + changes, MACHINE)
    session = CudaSession(plan, pack(plan.layout, random_tensors(c, 4).__getitem__))
    session.keep_logits = True
    want = [run.tokens for run in session.launch([[3], [7]], [5, 5])]
    whole = session.logits().tobytes()
    for _ in range(2):
        session.position[:] = 0
        made: list[list[int]] = [[3], [7]]
        for _ in range(5):
            for tokens, run in zip(
                made, session.launch([t[-1:] for t in made], [1, 1]), strict=True
            ):
                tokens += run.tokens
        assert [tuple(t[1:]) for t in made] == want
        assert session.logits().tobytes() == whole


def test_the_engine_generates_on_a_cuda_plan() -> None:
    """Prompts of different lengths, a limit, A then B then A; a stop that comes early; a trace."""
    session = session_of("qwen3, 24", 2)
    engine = Engine(session)
    a = engine.generate([[1, 2, 3], list(range(20))], 6)
    engine.generate([[9]], 3)
    assert engine.generate([[1, 2, 3], list(range(20))], 6) == a
    alone = engine.generate([[1, 2, 3]], 6)[0]
    assert alone.tokens == a[0].tokens
    stopped = engine.generate([[1, 2, 3], list(range(20))], 6, stops=[alone.tokens[2]])
    assert stopped[0].tokens == alone.tokens[: alone.tokens.index(alone.tokens[2]) + 1]
    assert stopped[0].reason == "stop"
    session.trace_room = 64
    engine.generate([[1]], 2)
    kinds = {s.kind for s in session.spans}
    assert {"norm_in", "qkv", "attend", "combine", "o", "up", "act", "down", "head"} <= kinds
    assert {s.core for s in session.spans} == {0, 1, 2}
    assert all(s.end >= s.start >= 0 for s in session.spans)


def test_a_piece_may_be_longer_than_the_ring() -> None:
    """Twelve slots of positions through a ring of ten, step after step: the tokens are those of a
    kernel that reads the cache where it is.
    """
    c = {**MODELS["llama, groups of 4"], "num_hidden_layers": 1}
    work = Workload(1, 220, WeightFormat.BF16)
    runs = []
    for changes in ("kv_ring=0", "kv_ring=1+chunk_cols=128+stages=10"):
        plan = planned(parse_config(c), work, "staged=0+kv_pieces=1+" + changes, MACHINE)
        session = CudaSession(plan, pack(plan.layout, random_tensors(c, 4).__getitem__))
        runs.append(session.launch([[i * 7 % 500 for i in range(190)]], [8])[0].tokens)
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("changes", "loads"), [("kv_ring=1+staged=0", 0), ("staged=2+stages=14", 2), ("staged=0", 2)]
)
def test_a_tile_is_read_once(changes: str, loads: int) -> None:
    """From memory in two places, a warp's first tile and the next ones; where the cache goes
    through the ring, nowhere: a second read gives the same numbers, later.
    """
    model = parse_config(MODELS["llama, groups of 4"])
    tiling = changed(default_tiling(model, Workload(1, 160, WeightFormat.BF16), MACHINE), changes)
    text = preprocessed(
        emit_cuda(model, Workload(1, 160, WeightFormat.BF16), tiling, MACHINE).source
    )
    attend = text[text.index("void om_attend_item(") :]
    assert attend.count("t.load(") == loads


def test_a_missing_wait_shows(tmp_path: Path) -> None:
    """The twin can fail: with readers that take whatever mark they find, logits are wrong."""
    case = CASES[10]
    plan = plan_of(case, MACHINE)
    broken = plan.source.replace("if (!missing || wait.over", "if (true || !missing || wait.over")
    assert broken != plan.source
    row = check_plan(case, replace(plan, binary=twin.build_twin(broken, tmp_path)), 2)
    assert not row["ok"]
