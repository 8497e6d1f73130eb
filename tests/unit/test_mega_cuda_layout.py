"""The CUDA kernel's weights: packed, then read as a warp's lanes read them, in numpy.

The fragments of `mma` are written out here from the PTX manual: which row and column of A, B and C
each register of each lane holds. The kernel's own address formulas are repeated beside
them, so that the packing, the formulas and the instruction must agree.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.mega_models import config, random_tensors

from obelisk.mega.cuda import cuda_layout
from obelisk.plan.layout import MatrixLayout
from obelisk.runtime.packing import pack, stored
from obelisk.tasks import ModelConfig, WeightFormat, Workload, parse_config

Array = Any
BLOCK = 1024  # bytes of 16 rows by 32 columns


BF16, FP32 = Workload(1, 64, WeightFormat.BF16), Workload(1, 64, WeightFormat.FP32)


def model_of(
    work: Workload = BF16, **changes: Any
) -> tuple[ModelConfig, dict[str, Array], Any, Array]:
    """A model, its tensors (exact in bf16; for other formats as stored), its layout and its
    arena.
    """
    c = config("qwen2", **changes)
    tensors = {k: v.astype(ml_dtypes.bfloat16).astype(np.float32)
               for k, v in random_tensors(c, 2).items()}  # fmt: skip
    model = parse_config(c)
    layout = cuda_layout(model, work)
    arena = pack(layout, tensors.__getitem__)
    if work.weights is not WeightFormat.BF16:
        source = stored(layout, tensors.__getitem__)
        tensors = {k: source(k) for k in tensors}
    return model, tensors, layout, arena


def numbers(raw: Array) -> Array:
    """bf16 bytes as float64."""
    return raw.view(ml_dtypes.bfloat16).astype(np.float64)


def mma(a: Array, b: Array) -> Array:
    """One m16n8k16 or m16n8k32: a (32 lanes, 4 registers, n), b (32, 2, n) with n 2 or 4 numbers to
    a register; gives C (16, 8).
    """
    n = a.shape[2]
    full_a, full_b = np.zeros((16, 8 * n)), np.zeros((8 * n, 8))
    for lane in range(32):
        row, quad = divmod(lane, 4)
        for register in range(4):
            for e in range(n):
                at = (row + 8 * (register % 2), n * quad + e + 4 * n * (register // 2))
                full_a[at] = a[lane, register, e]
        for register in range(2):
            for e in range(n):
                full_b[n * quad + e + 4 * n * register, row] = b[lane, register, e]
    return full_a @ full_b


def inputs(rows: Array, block: int, step: int) -> Array:
    """B of a step of a block of 32 columns: what each lane reads of the inputs (8 slots, cols)."""
    b = np.zeros((32, 2, 2))
    for lane in range(32):
        slot, quad = divmod(lane, 4)
        cols = 32 * block + 8 * quad + 4 * step
        b[lane] = rows[slot, cols : cols + 4].reshape(2, 2)
    return b


def both(rows: Array, block: int) -> Array:
    """B of a block of 32 columns for m16n8k32: a lane's 8 columns, four to a register."""
    return np.stack([inputs(rows, block, step).reshape(32, 4) for step in range(2)], 1)


def sixteen(slab: Array, rows: Array, at: int, m: MatrixLayout) -> Array:
    """om_format<16>: a lane's 16 bytes are four registers of two."""
    a = numbers(slab).reshape(2, 32, 4, 2)
    return sum(mma(a[step], inputs(rows, at, step)) for step in range(2))


def thirty_two(slab: Array, rows: Array, at: int, m: MatrixLayout) -> Array:
    """om_format<32>: a lane's four loads are 4 columns of 4 rows; no tensor cores."""
    a = slab.view(np.float32).astype(np.float64).reshape(4, 32, 4)  # load, lane, column
    c = np.zeros((16, 8))
    for lane in range(32):
        x = rows[:, 32 * at + lane % 8 * 4 :][:, :4]
        for i in range(4):
            c[2 * (lane // 8) + i % 2 + i // 2 * 8] += x @ a[i, lane]
    return c


def eight(slab: Array, rows: Array, at: int, m: MatrixLayout) -> Array:
    """om_format<8>, a block of 32 columns of a slab: a lane's 16 bytes are four registers."""
    return mma(slab.view(np.int8).astype(np.float64).reshape(32, 4, 4), both(rows, at))


def four(slab: Array, rows: Array, at: int, m: MatrixLayout) -> Array:
    """om_format<4>: by groups, levels less 8, less what zeros are more than 8 times inputs."""
    w = slab[:1024].view(np.uint32).reshape(2, 32, 2, 2)  # half slab, lane, block, step
    each = m.group // 32
    c = np.zeros((16, 8))
    for group in range(4 // each):
        level, total = np.zeros((16, 8)), np.zeros((1, 8))
        for block in range(group * each, (group + 1) * each):
            x, high = w[block // 2, :, block % 2], np.uint32(0xF0F0F0F0)
            a = np.stack([x << np.uint32(4) & high, x & high], 2).reshape(32, 4) ^ np.uint32(
                0x80808080
            )
            numbers = np.ascontiguousarray(a).view(np.int8).astype(np.float64).reshape(32, 4, 4)
            level += mma(numbers, both(rows, at * 4 + block)) / 16
            cols = slice(32 * (at * 4 + block), 32 * (at * 4 + block + 1))
            total += rows[:, cols].sum(1)
        where = np.arange(8)[:, None] * (8 // each) + 2 * group + np.arange(2)  # row, half
        scale = slab[m.scale_offset :].view(np.uint8)[: 128 // each].view(np.float16)[where]
        zero = np.zeros((8, 2))
        if m.zero_offset >= 0:
            zero = slab[m.zero_offset :][where].astype(np.float64) - 8
        s, z = (v.astype(np.float64).T.reshape(16, 1) for v in (scale, zero))
        c += s * (level - z * total)
    return c


def product(arena: Array, base: int, m: MatrixLayout, x: Array) -> Array:
    """All rows of a matrix times inputs (8 slots, cols), as om_product walks them."""
    rows = np.zeros((8, m.cols_padded))
    rows[:, : x.shape[1]] = x
    slab_of = {"fp32": thirty_two, "bf16": sixteen, "int8": eight, "w4a16": four}[m.format]
    slabs = arena[base + m.offset :][: m.nbytes].reshape(m.rows // 16, m.cols_padded // m.lanes, -1)
    out = np.zeros((8, m.rows))
    for tile in range(m.rows // 16):
        c = sum(slab_of(slabs[tile, j], rows, j, m) for j in range(slabs.shape[1]))
        out[:, 16 * tile : 16 * tile + 16] = c.T
    if m.format == "int8":
        out *= arena[base + m.scale_offset :][: 4 * m.rows].view(np.float32)
    return out


@pytest.mark.parametrize(
    "work",
    [BF16, FP32, Workload(1, 64, WeightFormat.INT8),
     *(Workload(1, 64, WeightFormat.W4A16, group, zeros)
       for group, zeros in ((128, False), (64, True), (32, True)))],
    ids=lambda w: f"{w.weights} {w.group} {w.zeros}",
)  # fmt: skip
def test_products_of_fragments_are_the_products(work: Workload) -> None:
    """Every matrix of a layer, of sizes that are multiples of nothing."""
    _, w, layout, arena = model_of(
        work, hidden_size=100, num_attention_heads=2, num_key_value_heads=1, head_dim=40,
        intermediate_size=90,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    p = "model.layers.1."
    gate, up = w[p + "mlp.gate_proj.weight"], w[p + "mlp.up_proj.weight"]
    pairs = np.zeros((192, 100))
    for i in range(96):  # eight gates, eight of up, and so on
        at = i // 8 * 16 + i % 8
        if i < 90:
            pairs[at], pairs[at + 8] = gate[i], up[i]
    heads = [w[p + f"self_attn.{n}_proj.weight"] for n in "qkv"]
    want = {
        "qkv": np.concatenate(heads), "o": w[p + "self_attn.o_proj.weight"], "up": pairs,
        "down": w[p + "mlp.down_proj.weight"],
    }  # fmt: skip
    base = layout.layer_offset + layout.layer_bytes
    for m in layout.layer_matrices:
        x = rng.standard_normal((8, m.cols))
        got = product(arena, base, m, x)
        rows = want[m.name].shape[0]
        near = 1e-6 if work.weights is WeightFormat.INT8 else 1e-12  # stored: rounded to fp32
        np.testing.assert_allclose(got[:, :rows], x @ want[m.name].T, rtol=near, atol=near)
        assert not got[:, rows:].any()  # padding


def test_the_embedding_is_found_where_the_kernel_looks() -> None:
    """om_embedding's address of every element, four columns at a time."""
    _, w, layout, arena = model_of(hidden_size=72, num_attention_heads=4, vocab_size=37)
    embed = layout.matrices[0]
    for token in range(37):
        for col in range(0, 72, 4):
            i = col % 32
            at = embed.offset + ((token // 16) * (embed.cols_padded // 32) + col // 32) * BLOCK
            at += i // 4 % 2 * 512 + (token % 8 * 4 + i // 8) * 16 + token % 16 // 8 * 4
            got = [*numbers(arena[at : at + 4]), *numbers(arena[at + 8 : at + 12])]
            assert got == w["model.embed_tokens.weight"][token, col : col + 4].tolist()


def test_the_embedding_in_fp32_is_found_where_the_kernel_looks() -> None:
    """The same, of four columns in 16 bytes."""
    _, w, layout, arena = model_of(FP32, hidden_size=72, num_attention_heads=4, vocab_size=37)
    embed = layout.matrices[0]
    for token in range(37):
        for col in range(0, 72, 4):
            row, i = token % 16, col % 32
            at = embed.offset + ((token // 16) * (embed.cols_padded // 32) + col // 32) * 2 * BLOCK
            at += ((row // 8 * 2 + row % 2) * 32 + row % 8 // 2 * 8 + i // 4) * 16
            got = arena[at : at + 16].view(np.float32)
            assert got.tolist() == w["model.embed_tokens.weight"][token, col : col + 4].tolist()


def test_vectors_follow_the_order_of_rows_and_are_padded_to_tiles() -> None:
    """A lane reads its two rows' biases, and four gains at a time, without a look at the sizes."""
    model, w, layout, arena = model_of(
        hidden_size=100, num_attention_heads=2, num_key_value_heads=1, head_dim=40
    )
    by_name = {v.name: v for v in layout.layer_vectors}
    bias = by_name["qkv_bias"]
    at = layout.layer_offset + bias.offset
    got = arena[at : at + 4 * bias.size].view(np.float32)
    want = np.concatenate([w[f"model.layers.0.self_attn.{n}_proj.bias"] for n in "qkv"])
    assert bias.size % 16 == 0
    assert np.array_equal(got[: len(want)], want)
    assert not got[len(want) :].any()
    assert by_name["norm_in"].size == 112  # 100 in whole tiles
    first = layout.layer_vectors[0].offset
    assert first >= max(m.offset + m.nbytes for m in layout.layer_matrices)
    assert model.qkv_bias


def test_every_format_has_a_layout() -> None:
    """Nothing is rounded in silence: matrices are stored as asked, 4-bit models' heads in fp16."""
    model = parse_config(config())
    for form in WeightFormat:
        outer = "fp16" if form is WeightFormat.W4A16 else form
        layout = cuda_layout(model, Workload(1, 64, WeightFormat(form)))
        assert layout.matrices[0].format == outer
        assert layout.layer_matrices[0].format == form
