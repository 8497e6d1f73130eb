"""What a CUDA plan of a small model must do on a device: used by the device tests and by
bench/mega_cuda.py.

`check_plan` gives a row of findings; `TOLERANCE` bounds the largest error of a logit relative to
the largest. The reference rounds where the kernel rounds, but for the marks in 16-bit values (the
last bit of every eighth): simulated, those alone move these models' logits by 0.7 to 1.8e-2. With
fp32 weights nothing is rounded there, and `TOLERANCE_FP32` and `NEAR_TIE_FP32` hold.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from obelisk.app.synth_cuda import make_cuda_plan
from obelisk.base.errors import KernelFault
from obelisk.machine import Machine
from obelisk.plan import Plan
from obelisk.runtime import CudaSession, Sampling
from obelisk.runtime.gptq import Gptq, Grouped, unpack
from obelisk.runtime.packing import HEAD, GroupSource, dense_only, pack, stored
from obelisk.schedule.gpu import (
    GpuTiling,
    most_in_flight,
    shared_plan,
)
from obelisk.schedule.gpu_default import default_tiling
from obelisk.tasks import ModelConfig, Workload, parse_config, parse_head, parse_weights
from obelisk.tasks.sampling import choose
from tests.mega_cuda_models import HEAD8, MODELS, Rounded
from tests.mega_gptq import quantised
from tests.mega_models import random_tensors

TOLERANCE, NEAR_TIE = 2e-2, 2e-2  # two logits may each be off by half of what one may
TOLERANCE_FP32, NEAR_TIE_FP32 = 1e-5, 1e-5
CONTEXT, STEPS = 160, 24
DRAWS = (
    Sampling(0.9, 0, 1.0, 5), Sampling(1.5, 20, 1.0, 6), Sampling(1.0, 0, 0.7, 7),
    Sampling(2.0, 50, 0.5, 8),
)  # fmt: skip
OWN = "direct=1+private=1+bulk=0+loader_warps=0+staged=0+kv_ring=0"
# model, batch, weights (with :zeros, groups have their own; +head8: the head is int8), changes to
# the tiling
CASES = [
    ("llama, groups of 4", 1, "bf16", ""),
    ("llama, groups of 4", 1, "fp16", "o_split=2+down_split=4"),
    ("llama, groups of 4", 4, "bf16", "bulk=0+chunk_cols=128+stages=12"),
    ("qwen3, 128, groups of 2", 1, "bf16", "kv_pieces=5"),
    ("qwen3, 128, groups of 2", 2, "bf16", "barriers=qkv.attend.o.up.down.head"),
    ("qwen2, groups of 7, tied", 3, "bf16", "down_split=2"),
    ("llama, groups of 8, 128", 8, "bf16", ""),
    ("llama, groups of 8, 128", 1, "bf16", "kv_pieces=16+chunk_cols=256"),
    ("llama, no groups, biases, odd sizes", 1, "bf16", ""),
    ("llama, no groups, biases, odd sizes", 8, "bf16", "bulk=0+loader_warps=2"),
    ("qwen3, 24", 5, "bf16", ""),
    ("qwen2, groups of 7, tied", 3, "fp16", "cuts=8+fenced=0+kept=1+chunk_cols=128"),
    ("llama, groups of 4", 1, "w4a16", ""),
    ("llama, groups of 4", 4, "w4a16:32:zeros", "chunk_cols=128+o_split=2"),
    ("qwen3, 128, groups of 2", 2, "w4a16:64", "bulk=0+chunk_cols=512"),
    ("qwen2, groups of 7, tied", 3, "w4a16:64:zeros", "down_split=2"),
    ("llama, groups of 8, 128", 8, "w4a16:zeros", "chunk_cols=384"),
    ("llama, no groups, biases, odd sizes", 1, "w4a16", ""),
    ("llama, groups of 4", 1, "int8", ""),
    ("qwen2, groups of 7, tied", 2, "int8", "bulk=0+chunk_cols=256+down_split=2"),
    ("llama, no groups, biases, odd sizes", 8, "int8", "chunk_cols=128"),
    ("llama, groups of 4", 1, "w4a16", "direct=0+staged=0+spread=1+warps=2+stages=12"),
    ("llama, groups of 4", 1, "w4a16:zeros", "direct=1+down_split=2+staged=4"),
    ("qwen3, 128, groups of 2", 1, "w4a16:64:zeros", "direct=1+look_first=0+bulk=0"),
    ("qwen2, groups of 7, tied", 1, "w4a16:64:zeros", "direct=1+warps=4+o_split=7+blocks=5"),
    ("llama, no groups, biases, odd sizes", 1, "w4a16:32", "direct=1+staged=0+kv_ring=1"),
    ("llama, groups of 4", 2, "w4a16:32:zeros", "spread=1+warps=2+stages=12+chunk_cols=256"),
    ("llama, groups of 4", 4, "int8", "spread=1+warps=4+stages=12+chunk_cols=256"),
    ("llama, groups of 4", 1, "w4a16+head8", ""),
    ("qwen2, groups of 7, tied", 1, "w4a16:64:zeros+head8", "bulk=0+o_split=7"),
    ("qwen3, 128, groups of 2", 1, "w4a16:32:zeros+head8", "direct=0+chunk_cols=256"),
    ("qwen2, groups of 7, tied", 3, "w4a16:zeros+head8", "down_split=2"),
    ("llama, groups of 8, 128", 8, "w4a16+head8", "bulk=0+chunk_cols=384"),
    ("llama, groups of 4", 1, "fp32", ""),
    ("qwen3, 128, groups of 2", 2, "fp32", "bulk=0+barriers=qkv.attend.o.up.down.head"),
    ("qwen2, groups of 7, tied", 3, "fp32", "down_split=2+kv_pieces=5"),
    ("llama, groups of 8, 128", 8, "fp32", "cuts=4+fenced=0"),
    ("llama, no groups, biases, odd sizes", 1, "fp32", "chunk_cols=64+mass_beside=1"),
    ("qwen3, 24", 5, "fp32", "bulk=0+loader_warps=2+cuts=2"),
    ("llama, groups of 4", 1, "bf16", "direct=1"),
    ("qwen2, groups of 7, tied", 1, "bf16", "direct=1+down_split=2+blocks=5"),
    ("qwen3, 128, groups of 2", 1, "bf16", "direct=1+staged=4+kv_pieces=5"),
    ("llama, no groups, biases, odd sizes", 1, "bf16", "direct=1+bulk=0"),
    ("llama, groups of 4", 1, "bf16", f"{OWN}+stages=9+in_flight=9+in_flight_waiting=9"),
    ("qwen3, 128, groups of 2", 1, "bf16",
     f"{OWN}+stages=5+in_flight=5+in_flight_waiting=5+hold=4+warps=4+chunk_cols=128"),
    ("qwen2, groups of 7, tied", 1, "bf16",
     f"{OWN}+stages=7+in_flight=7+in_flight_waiting=7+o_split=4+ahead=1+halved=1+kv_pieces=3"),
    ("llama, groups of 4", 1, "bf16",
     f"{OWN}+stages=9+in_flight=9+in_flight_waiting=9+o_split=4+ahead=1+kv_pieces=1"),
]  # fmt: skip
WIDE = [c for c in CASES if c[2] == "fp32"]
FOUR = [c for c in CASES if c[2].startswith("w4a16")]
INT8 = [c for c in CASES if c[2] == "int8"]
Array = Any


def changed(t: GpuTiling, text: str) -> GpuTiling:
    """`stages=12+bulk=0` applied to a tiling; names of edges are joined by dots."""
    for item in filter(None, text.split("+")):
        name, _, value = item.partition("=")
        kind: Any = type(getattr(t, name))
        new = tuple(filter(None, value.split("."))) if kind is tuple else kind(int(value))
        t = replace(t, **{name: new})
    return t


def fitted(model: ModelConfig, work: Workload, changes: str, machine: Machine) -> GpuTiling:
    """The default tiling with changes, its ring cut to what shared memory holds, and what is in
    flight to what the ring allows.
    """
    tiling = changed(default_tiling(model, work, machine), changes)
    while shared_plan(model, work, tiling).total > machine.shared_bytes:
        tiling = replace(tiling, stages=tiling.stages - 1)
    return replace(tiling, in_flight=max(1, min(tiling.in_flight, most_in_flight(tiling))))


def planned(model: ModelConfig, work: Workload, changes: str, machine: Machine) -> Plan:
    """A plan under the default tiling with changes."""
    return make_cuda_plan(model, work, fitted(model, work, changes, machine), machine)


def work_of(case: tuple[str, int, str, str]) -> tuple[ModelConfig, Workload]:
    """The model and the workload of one of `CASES`."""
    name, batch, form, _ = case
    form, own, _ = form.partition(HEAD8)
    plain, zeros, _ = form.partition(":zeros")
    parsed, group = parse_weights(plain)
    head = parse_head("int8" if own else None, parsed)
    return parse_config(MODELS[name]), Workload(
        batch, CONTEXT, parsed, group or 128, bool(zeros), head
    )


def plan_of(case: tuple[str, int, str, str], machine: Machine) -> Plan:
    """The plan of one of `CASES`."""
    return planned(*work_of(case), case[3], machine)


def groups_of(tensors: dict[str, Array], form: str, group: int) -> GroupSource:
    """Groups with zeros of their own for a form that has them, as a GPTQ checkpoint stores them."""
    if not form.removesuffix(HEAD8).endswith(":zeros"):
        return dense_only
    rng = np.random.default_rng(7)
    known: dict[str, Grouped] = {}

    def read(name: str) -> Grouped | None:
        if not name.endswith("_proj.weight"):
            return None
        if name not in known:
            w = tensors[name]
            rows, cols = -(-w.shape[0] // 8) * 8, -(-w.shape[1] // 8) * 8
            wide = np.zeros((rows, cols), np.float32)  # whole words
            wide[: w.shape[0], : w.shape[1]] = w
            parts, _ = quantised(wide, group, False, 1, rng)
            g = unpack("x", lambda n: parts[n.removeprefix("x.")], Gptq(group, False), None)
            q = np.ascontiguousarray(g.q[: w.shape[0], : w.shape[1]])
            known[name] = Grouped(q, g.scale[: w.shape[0]], g.zero[: w.shape[0]], group)
        return known[name]

    return read


class _Check:
    """One session beside a reference for each slot."""

    def __init__(self, case: tuple[str, int, str, str], plan: Plan, steps: int) -> None:
        name, self.batch, form, changes = case
        self.steps = steps
        self.config = MODELS[name]
        tensors = random_tensors(self.config, 1)
        grouped = groups_of(tensors, form, plan.workload.get("group", 0))
        source = stored(plan.layout, tensors.__getitem__, grouped)
        weights = {k: source(k) for k in (*tensors, *([HEAD] if "head" in plan.workload else []))}
        arena = pack(plan.layout, tensors.__getitem__, grouped)
        self.session = CudaSession(plan, arena, spin_seconds=2.0)
        self.session.keep_logits = True
        pieces = plan.schedule["tiling"]["kv_pieces"]
        self.refs = [Rounded(self.config, weights, form, pieces) for _ in range(self.batch)]
        self.rng = np.random.default_rng(3)
        self.idle = self.batch - 1 if self.batch > 2 else -1  # one slot sits out
        self.row: dict[str, Any] = {
            "model": name, "batch": self.batch, "format": form, "changes": changes,
        }  # fmt: skip
        self.first: list[int] = []

    def tokens(self, count: int) -> list[int]:
        """Random token ids."""
        return [int(t) for t in self.rng.integers(0, self.config["vocab_size"], count)]

    def feed(self, tokens: list[int]) -> list[list[int]]:
        """One token for each slot but the idle one."""
        return [[] if b == self.idle else [t] for b, t in enumerate(tokens)]

    def prompts(self) -> None:
        """Prompts of different lengths, one of them possibly empty."""
        texts = [
            self.tokens(int(n)) for n in self.rng.integers(0, 40, self.batch) * self.steps // STEPS
        ]
        for ref, text in zip(self.refs, texts, strict=True):
            for t in text:
                ref.step(t)
        self.session.prefill(texts)
        self.began = self.session.position.copy()

    def greedy(self) -> None:
        """Single steps against the reference, then the same steps in one launch."""
        last = self.first = self.tokens(self.batch)
        made: list[list[int]] = [[] for _ in range(self.batch)]
        worst, gaps, wrong = 0.0, [], 0
        for _ in range(self.steps):
            runs = self.session.launch(self.feed(last), [1] * self.batch)
            got = self.session.logits()
            nxt = list(last)
            for b in range(self.batch):
                if b == self.idle:
                    continue
                want = self.refs[b].step(last[b])
                scale = float(np.abs(want).max())
                worst = max(worst, float(np.abs(got[b] - want).max()) / scale)
                nxt[b] = runs[b].tokens[0]
                made[b].append(nxt[b])
                wrong += nxt[b] != int(got[b].argmax())
                if nxt[b] != int(want.argmax()):
                    gaps.append(float(want.max() - want[nxt[b]]) / scale)
            last = nxt
        self.session.position[:] = self.began
        runs = self.session.launch(self.feed(self.first), [self.steps] * self.batch)
        same = [list(r.tokens) == m for b, (r, m) in enumerate(zip(runs, made, strict=True))
                if b != self.idle]  # fmt: skip
        self.row |= {
            "error": worst, "gaps": gaps, "launch": all(same), "argmax": wrong == 0,
        }  # fmt: skip

    def draws(self) -> None:
        """Drawn tokens against `choose` on the kernel's own logits."""
        self.session.position[:] = self.began
        last, right, count = self.first, 0, 0
        for s in DRAWS * (1 + self.steps // STEPS):
            at = self.session.position.copy()
            feeds = [[t] for t in last]
            runs = self.session.launch(feeds, [1] * self.batch, [s] * self.batch)
            got = self.session.logits()
            last = [r.tokens[0] for r in runs]
            for b, token in enumerate(last):
                count += 1
                right += token == choose(
                    got[b], int(at[b]), s.temperature, s.top_k, s.top_p, s.seed
                )
        self.row |= {"draws": f"{right}/{count}", "drawn": right == count}

    def fault(self) -> None:
        """A block that withholds its values: every block stops, and the error says who waited."""
        self.session.withhold, self.session.spin_seconds = self.session.plan.cores, 0.2
        try:
            self.session.launch([[1]] * self.batch, [2] * self.batch)
            self.row["fault"] = ""
        except KernelFault as error:
            self.row["fault"] = str(error)
        self.session.withhold = 0


def check_plan(case: tuple[str, int, str, str], plan: Plan, steps: int = STEPS) -> dict[str, Any]:
    """Findings on one plan, `steps` steps at a time; `ok` is whether all are as they must be."""
    check = _Check(case, plan, steps)
    check.prompts()
    check.greedy()
    check.draws()
    check.fault()
    check.session.close()
    row = check.row
    exact = case[2] == "fp32"
    most, near = (TOLERANCE_FP32, NEAR_TIE_FP32) if exact else (TOLERANCE, NEAR_TIE)
    row["ok"] = (
        row["error"] < most and row["launch"] and row["argmax"] and row["drawn"]
        and "waited" in row["fault"] and all(g < near for g in row["gaps"])
    )  # fmt: skip
    return row
