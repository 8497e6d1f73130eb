"""Tasks: the table is complete and consistent, and every body in C equals its meaning in float64.

The bodies are compiled once per weight format with a few exported doors, and called on random
arrays; the meanings are the ir graphs of the table.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.mega_models import Reference, config, random_tensors

from obelisk.build import compile_c
from obelisk.ir import run
from obelisk.machine import host
from obelisk.mega.cpu.emit import emit_cpu
from obelisk.plan.layout import WORD, MatrixLayout, RowBlock, align
from obelisk.runtime.gptq import Grouped
from obelisk.runtime.packing import (
    aligned,
    by_panel,
    panels,
    quantise,
    quantise_groups,
    to_bf16,
    to_fp16,
    words,
)
from obelisk.schedule import Sync, place
from obelisk.schedule.vm import VirtualMachine
from obelisk.tasks import (
    TABLE,
    Region,
    StepShape,
    Task,
    TaskKind,
    Tiling,
    WeightFormat,
    Workload,
    edges,
    parse_config,
    rope_table,
    sequence,
    value_width,
    weight_layout,
)
from obelisk.tasks import meanings as meaning
from obelisk.tasks.sampling import choose

Array = Any
DOORS = (Path(__file__).parents[1] / "mega_doors.h").read_text()


def shape_of(
    form: WeightFormat = WeightFormat.FP32, group: int = 128, zeros: bool = False, lanes: int = 0
) -> StepShape:
    """Odd sizes everywhere: nothing is a multiple of a vector."""
    c = config(
        "qwen3", hidden_size=50, head_dim=12, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=77, vocab_size=131, mlp_bias=True,
    )  # fmt: skip
    tiling = Tiling(cores=2, kv_splits=2, fuse_rope=False)
    return StepShape(
        parse_config(c), Workload(3, 300, form, group, zeros), tiling, lanes or host().lanes
    )


class Bodies:
    """The compiled bodies of one weight format."""

    def __init__(self, form: WeightFormat, group: int, zeros: bool, lanes: int) -> None:
        self.s = shape_of(form, group, zeros, lanes)
        source = emit_cpu(place(self.s, Sync.COUNTER), weight_layout(self.s)).source + DOORS
        self.library = ctypes.CDLL(str(compile_c(source).path))
        self.rng = np.random.default_rng(0)

    def call(self, name: str, *args: Any) -> None:
        """Call a door; arrays by address."""
        made = [
            ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray)
            else ctypes.c_void_p(None) if a is None else ctypes.c_long(a)
            for a in args
        ]  # fmt: skip
        getattr(self.library, name)(*made)

    def normal(self, *shape: int) -> Array:
        """Random float32."""
        return self.rng.standard_normal(shape).astype(np.float32)

    def padded(self, x: Array, width: int) -> Array:
        """Rows as the kernel stores them, zeros behind."""
        out = aligned(4 * x.shape[0] * width).view(np.float32).reshape(x.shape[0], width)
        out[:, : x.shape[1]] = x
        return out

    def packed(self, w: Array) -> tuple[Array, Array | None, Array | None, Array]:
        """A matrix as its format stores it, scales, zeros, and what it means as float32."""
        s, work = self.s, self.s.work
        form, panel, four = work.weights, s.tiling.panel, work.weights is WeightFormat.W4A16
        chunk = s.lanes * (WORD if four else 1)
        rows, cols = align(w.shape[0], panel), align(w.shape[1], chunk)
        m = MatrixLayout("w", (RowBlock(("w",), 0, w.shape[0]),), rows, w.shape[1], cols, panel,
                         s.lanes, form.value, 0, -1, work.group if four else 0)  # fmt: skip
        if form is WeightFormat.FP32:
            return panels(w, m), None, None, w
        if form is WeightFormat.BF16:
            b = to_bf16(w)
            return panels(b, m), None, None, (b.astype(np.uint32) << 16).view(np.float32)
        if form is WeightFormat.FP16:
            h = to_fp16(w)
            return panels(h, m), None, None, h.astype(np.float32)
        if form is WeightFormat.INT8:
            q, scale = quantise(w)
            full = np.ones(rows, np.float32)
            full[: scale.size] = scale
            return panels(q, m), full, None, q.astype(np.float32) * scale[:, None]
        g = quantise_groups(w, work.group)
        if work.zeros:  # groups of a foreign checkpoint: any level, any zero
            q, zero = (self.rng.integers(0, 16, x.shape).astype(np.uint8) for x in (g.q, g.zero))
            padding = (w == 0).all(1, keepdims=True)
            g = Grouped(q, np.where(padding, np.float16(0), g.scale), zero, g.group)
        zeros = by_panel(g.zero, m, np.uint8) if work.zeros else None
        return words(g.q, m), by_panel(g.scale, m, np.float16), zeros, g.dense()


FORMS = [
    *((f, 128, False, 0) for f in WeightFormat), (WeightFormat.W4A16, 32, True, 0),
    (WeightFormat.W4A16, 128, True, 0), (WeightFormat.W4A16, 64, True, 8),
    (WeightFormat.INT8, 128, False, 8), (WeightFormat.BF16, 128, False, 4),
]  # fmt: skip


@pytest.fixture(scope="module", params=FORMS, ids=lambda x: "-".join(map(str, x)))
def bodies(request: pytest.FixtureRequest, compiler: str) -> Bodies:
    """Each weight format, groups that end within a vector of words or have zeros, and narrower
    vectors than this machine's.
    """
    return Bodies(*request.param)


def close(got: Array, want: Array) -> None:
    """fp32 sums against float64: 1e-5 of the largest element, element by element."""
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= 1e-5 * max(1.0, np.abs(want).max())


def test_norm(bodies: Bodies) -> None:
    """Every row, and zeros in the padding."""
    s, b = bodies.s, bodies
    x, gain = b.normal(3, 50) * 3, b.normal(50)
    out = np.full((3, s.hidden_padded), np.nan, np.float32)
    b.call("t_norm", b.padded(x, s.hidden_padded), gain, out)
    close(out[:, :50], run(meaning.norm(s), [x, gain])[0])
    assert (out[:, 50:] == 0).all()


@pytest.mark.parametrize("bias", [False, True])
def test_rows_and_residual(bodies: Bodies, bias: bool) -> None:
    """The product alone, and added to the residual stream; rows beyond the tile stay."""
    s, b = bodies.s, bodies
    x, w, c = b.normal(3, 50), b.normal(40, 50), b.normal(40) if bias else None
    packed, scale, zero, means = b.packed(w)
    chunks = -(-50 // (s.lanes * (WORD if s.work.weights is WeightFormat.W4A16 else 1)))
    h = b.padded(x, s.hidden_padded)
    out = np.full((3, 48), 7.0, np.float32)
    b.call("t_rows", packed, scale, zero, c, 8, 32, chunks, h, s.hidden_padded, out, 48)
    args = [x, means[8:32], *([c[8:32]] if c is not None else [])]
    close(out[:, 8:32], run(meaning.rows(s, 24, 50, bias), args)[0])
    assert (out[:, :8] == 7).all()
    assert (out[:, 32:] == 7).all()
    stream = b.padded(b.normal(3, 50), s.hidden_padded)
    before = stream.copy()
    b.call("t_residual", packed, scale, zero, c, 8, 32, chunks, h, s.hidden_padded, stream)
    args = [x, before[:, 8:32], means[8:32], *([c[8:32]] if c is not None else [])]
    close(stream[:, 8:32], run(meaning.residual(s, 8, 32, 50, bias), args)[0])
    assert np.array_equal(stream[:, 32:], before[:, 32:])


@pytest.mark.parametrize("case", ["wide", "zeros", "nan", "inf"])
def test_products_of_inputs_of_any_range(bodies: Bodies, case: str) -> None:
    """Magnitudes over 16 decades: the error is 2e-7 of the largest input times the row's weights;
    zeros give zeros; what is not finite does not vanish.
    """
    s, b = bodies.s, bodies
    x, w = b.normal(3, 50), b.normal(32, 50)
    x *= (10.0 ** b.rng.uniform(-8, 8, x.shape)).astype(np.float32)
    x[1] = x[1] * 0 if case == "zeros" else x[1]
    if case in ("nan", "inf"):
        x[1, 3] = float(case)
    packed, scale, zero, means = b.packed(w)
    chunks = -(-50 // (s.lanes * (WORD if s.work.weights is WeightFormat.W4A16 else 1)))
    out = np.zeros((3, 32), np.float32)
    h = b.padded(x, s.hidden_padded)
    b.call("t_rows", packed, scale, zero, None, 0, 32, chunks, h, s.hidden_padded, out, 32)
    if case in ("nan", "inf"):
        assert not np.isfinite(out[1]).any()
        x, out = x[[0, 2]], out[[0, 2]]
    want = x.astype(np.float64) @ means.astype(np.float64).T
    bound = np.abs(x).max(1, keepdims=True) * np.abs(means).sum(1)
    assert (np.abs(out - want) <= 2e-7 * bound).all()
    if case == "zeros":
        assert (out[1] == 0).all()


def test_gate_and_up(bodies: Bodies) -> None:
    """silu(gate) * up with biases, the last short panel, and zeros behind it."""
    s, b = bodies.s, bodies
    x = b.normal(3, 50)
    gate, up = b.normal(77, 50), b.normal(77, 50)
    biases = b.normal(77), b.normal(77)
    rows = s.ffn_rows
    w, c = np.zeros((2 * rows, 50), np.float32), np.zeros(2 * rows, np.float32)
    for i, (m, bias) in enumerate(zip((gate, up), biases, strict=True)):
        for r in range(77):
            at = r // s.tiling.panel * 2 * s.tiling.panel + i * s.tiling.panel + r % s.tiling.panel
            w[at], c[at] = m[r], bias[r]
    packed, scale, zero, means = b.packed(w)
    at = [r // s.tiling.panel * 2 * s.tiling.panel + r % s.tiling.panel for r in range(77)]
    out = np.full((3, s.ffn_padded), np.nan, np.float32)
    b.call("t_up", packed, scale, zero, c, 0, rows, b.padded(x, s.hidden_padded), out)
    second = [a + s.tiling.panel for a in at]
    want = run(meaning.gated(s, 77), [x, means[at], biases[0], means[second], biases[1]])[0]
    close(out[:, :77], want)
    assert (out[:, 77:] == 0).all()


@pytest.mark.parametrize("n", [1, 2, 3, 63, 64, 65, 127, 128, 129, 257])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_attention_pieces(bodies: Bodies, n: int, scale: float) -> None:
    """Record R26: lengths around the block's edges, small and large scores; two pieces joined."""
    s, b = bodies.s, bodies
    m = s.model
    q = b.normal(m.group, 12) * np.float32(scale)
    k, v = b.normal(n, 12), b.normal(n, 12)
    parts = np.zeros((2, s.part_width), np.float32)
    cut = n // 2
    for i, (lo, hi) in enumerate(((0, cut), (cut, n))):
        out, peak, mass = (np.zeros(x, np.float32) for x in ((m.group, 12), m.group, m.group))
        b.call("t_piece", q, k, v, lo, hi, out, peak, mass)
        if hi > lo:
            sums, top, total = run(meaning.attend(s, hi - lo, False), [q, k[lo:hi], v[lo:hi]])
            close(out / mass[:, None], sums / total)
            close(peak, top[:, 0])
            close(mass / total[:, 0], np.ones(m.group))
        else:
            assert (mass == 0).all()
        parts[i, : m.group * 12] = out.ravel()
        parts[i, m.group * 12 : m.group * 13], parts[i, m.group * 13 : m.group * 14] = peak, mass
    attn = np.zeros((3, s.q_padded), np.float32)
    pages = np.zeros((3, m.kv_heads * 2 * s.part_width), np.float32)
    pages[1, 2 * s.part_width :] = parts.ravel()  # slot 1, group 1
    b.call("t_combine", 1, 1, pages, attn)
    want = run(meaning.attend(s, n, True), [q, k, v])[0]
    close(attn[1, m.group * 12 : 2 * m.group * 12].reshape(m.group, 12), want)


@pytest.mark.parametrize("position", [0, 1, 299, 8191, 131071])
def test_head_norm_and_rotation(bodies: Bodies, position: int) -> None:
    """One group: two norms and the rotation, at any position."""
    s, b = bodies.s, bodies
    m = s.model
    one = StepShape(m, Workload(1, 300), s.tiling, s.lanes)
    raw, gains = b.normal(1, s.group_rows), [b.normal(12), b.normal(12)]
    cos, sin = rope_table(m.rope, 12, [position])
    q, k, v = run(meaning.rotate(one, 1), [raw, *gains, cos, sin])
    for i in range(m.group + 1):
        out = np.zeros(12, np.float32)
        gain = gains[0] if i < m.group else gains[1]
        part = np.ascontiguousarray(raw[0, i * 12 : i * 12 + 12])
        b.call("t_turn", part, gain, cos[0].copy(), sin[0].copy(), out)
        close(out, (q[0, i * 12 : i * 12 + 12] if i < m.group else k[0]))
    assert np.array_equal(v[0], raw[0, (m.group + 1) * 12 : (m.group + 2) * 12])


def shapes() -> list[StepShape]:
    """Fused and not, with pieces and without, one core and several."""
    out = []
    for fused, copied, pieces, cores in (
        (True, True, 1, 1), (True, False, 2, 2), (False, True, 3, 3), (False, False, 1, 2)
    ):  # fmt: skip
        tiling = Tiling(fuse_rope=fused, replicate_norm=copied, kv_splits=pieces, cores=cores)
        out.append(StepShape(shape_of().model, Workload(2, 20), tiling, 8))
    return out


def test_the_table_is_complete_and_its_regions_lie_within_their_values() -> None:
    """Every kind has a row; every region of every task is inside its value; micro-operations wait
    only for earlier ones.
    """
    assert set(TABLE) == set(TaskKind)
    for s in shapes():
        widths = value_width(s)
        for t in sequence(s):
            row = TABLE[t.kind]
            reader = Task(t.kind, t.layer, t.lo, t.hi, t.slot, t.split, t.core, t.index)
            regions = [*row.writes(s, reader)]
            regions += [r for r in row.reads(s, reader) if r.value != "h"]
            for r in regions:
                limit = s.model.kv_heads if r.value in ("keys", "values") else widths[r.value]
                assert 0 <= r.lo < r.hi <= limit, (t, r)
                assert -1 <= r.slot < s.batch
            micro = row.micro(s, t, 10)
            assert all(a < i for i, m in enumerate(micro) for a in m.after)
            assert all(m.amount >= 0 for m in micro)
            assert row.footprint(s, t) > 0
            assert (row.meaning is None) == (t.kind is TaskKind.SAMPLE)


def test_tiles_cover_each_value_once() -> None:
    """The writes of an operator's tiles are disjoint and leave no gap."""
    for s in shapes():
        for kind, value in ((TaskKind.O, "x"), (TaskKind.UP, "act"), (TaskKind.HEAD, "logits")):
            spans = sorted(
                (r.lo, r.hi) for t in sequence(s) if t.kind is kind and t.layer in (-1, 0)
                for r in TABLE[kind].writes(s, t) if r.value == value
            )  # fmt: skip
            assert spans[0][0] == 0
            assert spans[-1][1] == value_width(s)[value]
            assert all(a[1] == b[0] for a, b in pairwise(spans))


def test_edges_tie_readers_to_writers() -> None:
    """With shared norms: attention hangs on its own group's product alone; the sample on every
    tile of the head.
    """
    s = StepShape(shape_of().model, Workload(1, 20), Tiling(cores=2, replicate_norm=False), 8)
    tasks = sequence(s)
    ties = edges(s, tasks)
    into: Callable[[int], list[Task]] = lambda i: [tasks[a] for a, b in ties if b == i]  # noqa: E731
    for i, t in enumerate(tasks):
        if t.kind is TaskKind.ATTEND:
            assert [(p.kind, p.lo <= t.lo < p.hi) for p in into(i)] == [(TaskKind.QKV, True)]
        if t.kind is TaskKind.SAMPLE:
            assert {p.index for p in into(i)} == {0, 1}
    assert all(a < b for a, b in ties)
    assert Region("x", 0, 1) != Region("x", 0, 2)


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("sync", list(Sync))
def test_the_virtual_machine_runs_every_schedule_to_the_reference(index: int, sync: Sync) -> None:
    """The same schedule in numpy, cores interleaved at random on NaN-filled pages: float64 logits
    equal the reference's.
    """
    s = shapes()[index]
    c = config(
        "qwen3", hidden_size=50, head_dim=12, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=77, vocab_size=131,
    )  # fmt: skip
    s = StepShape(parse_config(c), s.work, s.tiling, s.lanes)
    tensors = random_tensors(c, 5)
    for seed in (0, 1):
        vm = VirtualMachine(place(s, sync), tensors.__getitem__, seed)
        models = [Reference(c, tensors) for _ in range(2)]
        for tokens in ((3, 7), (130, 0), (44, 44)):
            logits = vm.step(tokens)
            want = np.stack([m.step(t) for m, t in zip(models, tokens, strict=True)])
            assert np.abs(logits - want).max() < 1e-5  # rotary tables are fp32
            assert list(vm.tokens) == [choose(row, 0, 0.0) for row in logits]
