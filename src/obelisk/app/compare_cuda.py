"""Every operator of a CUDA plan's kernel against float64, each on the inputs that it was given.

Takes a plan and its weights. The plan's own text is built once more so that no layer overwrites
what another one exchanged (`mega.cuda.emit.recording`); after a step all of it is read back. Each
operator's float64 meaning then starts from the kernel's values, so that an error is the operator's
own, whatever the depth of the model; weights are read when it is their turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from obelisk.app.compare import Difference
from obelisk.app.plan_judge import relative_error
from obelisk.app.synth_cuda import tiling_of
from obelisk.build.cuda import compile_cuda
from obelisk.mega.cuda.emit import recording, stream_bytes
from obelisk.plan import Plan
from obelisk.plan.layout import align
from obelisk.runtime import CudaSession
from obelisk.schedule.gpu import TILE_ROWS
from obelisk.schedule.meaning import Meaning, RowSource
from obelisk.tasks import ModelConfig, Operator, TaskKind, Workload

Array = Any
COMPILE_SECONDS = 300.0
# Of a result's largest element. Inputs of products and results of attention and the MLP have 16
# bits: 8 of them significant (bf16) or 11, and the last of every eighth is a mark; or 23 (fp32).
TOLERANCE = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 1e-5}
_FROM = {  # a meaning's value, and the kind of operator that it is told as, by the operator
    TaskKind.QKV_ROWS: "raw", TaskKind.ATTEND: "attn", TaskKind.O: "x", TaskKind.UP: "act",
    TaskKind.DOWN: "x", TaskKind.HEAD: "logits",
}  # fmt: skip


def compile_recording(source: str, arch: str) -> bytes:
    """The cubin of a recording kernel."""
    return compile_cuda(source, arch, timeout=COMPILE_SECONDS).path.read_bytes()


def recording_plan(plan: Plan, build: Callable[[str, str], bytes] | None = None) -> Plan:
    """The plan whose kernel records; `build` compiles a text for an architecture
    (`compile_recording`). Raises `UserError` for a plan of another version.
    """
    build = build or compile_recording
    source, launch = recording(plan.source, plan.schedule["launch"], plan.layout.layers)
    return replace(
        plan, source=source, binary=build(source, plan.host.machine),
        schedule={**plan.schedule, "launch": launch},
    )  # fmt: skip


class Recorded:
    """What one step's operators exchanged, decoded to float32: (slots, width) by value."""

    def __init__(self, session: CudaSession) -> None:
        self.session, self.plan = session, session.plan
        self.model = ModelConfig.from_json(self.plan.model)
        self.tiling = tiling_of(self.plan)
        form = self.plan.cache.format
        self.kind: Any = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}.get(form, np.uint32)
        self.bits = ~np.uint32(1 if form == "fp32" else 7)  # of a number, without its mark

    def _read(self, name: str, layer: int, shape: tuple[int, ...], kind: Any = np.uint32) -> Array:
        found = self.session.exchanged_values(name, layer, (self.plan.batch, *shape), kind)
        return (found & self.bits).view(np.float32) if kind is np.uint32 else found

    def _parts(self, name: str, layer: int, buffers: int = 1) -> Array:
        """The residual stream, from the parts that its readers add up; part 0 is their sum where
        rows are rounded.
        """
        split, rows = getattr(self.tiling, f"{name}_split"), align(self.model.hidden, TILE_ROWS)
        each = stream_bytes(self.plan.batch, self.tiling, rows, split) // 4
        found = self.session.exchanged_values(name, layer, (buffers, each), np.uint32)
        words = found[layer % buffers, : split * self.plan.batch * rows]
        words = words.reshape(split, self.plan.batch, rows)[: 1 if self.tiling.rounded else split]
        return (words & self.bits).view(np.float32).sum(0, np.float32)[:, : self.model.hidden]

    def _attention(self, layer: int) -> Array:
        """Pieces, joined by their masses (the logarithms to base 2 of sums of exponentials)."""
        m, pieces = self.model, self.tiling.kv_pieces
        shape = (m.heads, pieces, m.head_dim)
        part = self._read("part", layer, shape, self.kind).astype(np.float64)
        mass = self._read("mass", layer, (m.heads, align(pieces, 4)))[:, :, :pieces]
        share = np.exp2(mass - mass.max(2, keepdims=True, initial=-1e30))[..., None]
        return ((part * share).sum(2) / share.sum(2)).reshape(self.plan.batch, -1)

    def result(self, kind: TaskKind, layer: int) -> Array | None:
        """What an operator of that kind gave; None where it does not leave its block."""
        m = self.model
        match kind:
            case TaskKind.QKV_ROWS:
                return self._read("qkv", layer, (m.q_width + 2 * m.kv_width,))
            case TaskKind.ATTEND:
                return self._attention(layer)
            case TaskKind.O:
                return self._parts("o", layer)
            case TaskKind.UP:
                wide = self.tiling.padded(m.ffn)
                return self._read("act", layer, (wide,), self.kind)[:, : m.ffn].astype(np.float32)
            case TaskKind.DOWN:
                return self._parts("down", layer, 2)
            case TaskKind.HEAD:
                return self.session.logits()
            case _:
                return None


class _Comparison:
    """A meaning that goes on from the kernel's values behind each operator."""

    def __init__(self, session: CudaSession, means: Meaning, seen: list[dict[Any, Array]]) -> None:
        self.means, self.seen, self.found = means, seen, list[Difference]()
        self.keys, self.values = session.cached(means.steps)
        s, m = means.shape, means.shape.model
        self.widths = {"x": m.hidden, "attn": m.q_width, "act": m.ffn, "logits": m.vocab}
        self.groups = (s.batch, m.kv_heads, s.group_rows, (m.group + 2) * m.head_dim)

    def _page(self, value: str) -> Array:
        """A value without padding, as a view; `raw` by head groups."""
        page = self.means.page(value)
        if value != "raw":
            return page[:, : self.widths[value]]
        rows, groups, padded, used = self.groups
        return page[:, : groups * padded].reshape(rows, groups, padded)[:, :, :used]

    def after(self, op: Operator) -> None:
        """Note the errors of an operator's results, and put the kernel's in their place."""
        if op.kind is TaskKind.ROPE:
            for name in ("keys", "values"):
                mine, theirs = getattr(self.means, name)[op.layer], getattr(self, name)[op.layer]
                self.found.append(Difference(op.kind, op.layer, name, relative_error(theirs, mine)))
                mine[:] = theirs
            return
        value = _FROM.get(op.kind)
        if value is None:
            return
        steps = [s[op.kind, op.layer] for s in self.seen]  # each (slots, width)
        got = np.stack(steps, 1).reshape(self.means.shape.batch, -1)
        page = self._page(value)
        got = got.reshape(page.shape)
        self.found.append(Difference(op.kind, op.layer, value, relative_error(got, page)))
        page[:] = got


def compare_cuda(
    session: CudaSession, source: RowSource, steps: int = 2, seed: int = 0
) -> list[Difference]:
    """The errors of every operator's results over `steps` steps on random tokens, in step order.

    `session` is one of a `recording_plan`, `source` gives the weights as stored.
    """
    plan, recorded = session.plan, Recorded(session)
    model = recorded.model
    steps = min(steps, plan.context)
    tokens = np.random.default_rng(seed).integers(0, plan.vocab, (plan.batch, steps))
    head = Workload.from_json(plan.workload).head
    means = Meaning(model, plan.batch, steps, source, head=head)
    session.reset()
    session.keep_logits = True
    seen = []
    for t in range(steps):
        session.launch([[int(x)] for x in tokens[:, t]], [1] * plan.batch)
        seen.append({
            (op.kind, op.layer): recorded.result(op.kind, max(op.layer, 0))
            for op in means.operators if op.kind in _FROM
        })  # fmt: skip
    comparison = _Comparison(session, means, seen)
    means.forward(tokens, comparison.after)
    session.reset()
    return comparison.found
