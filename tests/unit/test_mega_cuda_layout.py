"""The CUDA kernel's weights: packed, then read as a warp of tensor cores reads them, in numpy.

The fragments of `mma.m16n8k16` are written out here from the PTX manual: which row and column of A,
B and C each register of each lane holds. The kernel's own address formulas are repeated beside
them, so that the packing, the formulas and the instruction must agree.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.mega_models import config, random_tensors

from obelisk.base.errors import Infeasible
from obelisk.mega.cuda import cuda_layout
from obelisk.plan.layout import MatrixLayout
from obelisk.runtime.packing import pack
from obelisk.tasks import ModelConfig, WeightFormat, parse_config

Array = Any
BLOCK = 1024  # bytes of 16 rows by 32 columns


def model_of(**changes: Any) -> tuple[ModelConfig, dict[str, Array], Any, Array]:
    """A model, its tensors (exact in bf16), its layout and its arena."""
    c = config("qwen2", **changes)
    tensors = {k: v.astype(ml_dtypes.bfloat16).astype(np.float32)
               for k, v in random_tensors(c, 2).items()}  # fmt: skip
    model = parse_config(c)
    layout = cuda_layout(model, WeightFormat.BF16)
    return model, tensors, layout, pack(layout, tensors.__getitem__)


def numbers(raw: Array) -> Array:
    """bf16 bytes as float64."""
    return raw.view(ml_dtypes.bfloat16).astype(np.float64)


def mma(a: Array, b: Array) -> Array:
    """One m16n8k16: a (32 lanes, 4 registers, 2), b (32, 2, 2); gives C (16, 8)."""
    full_a, full_b = np.zeros((16, 16)), np.zeros((16, 8))
    for lane in range(32):
        row, quad = divmod(lane, 4)
        for register in range(4):
            for e in range(2):
                at = (row + 8 * (register % 2), 2 * quad + e + 8 * (register // 2))
                full_a[at] = a[lane, register, e]
        for register in range(2):
            for e in range(2):
                full_b[2 * quad + e + 8 * register, row] = b[lane, register, e]
    return full_a @ full_b


def product(arena: Array, base: int, m: MatrixLayout, x: Array) -> Array:
    """All rows of a matrix times inputs (8 slots, cols), as om_product walks them."""
    blocks = m.cols_padded // 32
    rows = np.zeros((8, m.cols_padded))
    rows[:, : x.shape[1]] = x
    out = np.zeros((8, m.rows))
    for tile in range(m.rows // 16):
        c = np.zeros((16, 8))
        for j in range(blocks):
            at = base + m.offset + (tile * blocks + j) * BLOCK
            for step in range(2):
                raw = arena[at + 512 * step : at + 512 * (step + 1)]
                a = numbers(raw).reshape(32, 4, 2)  # a lane's 16 bytes: four registers of two
                b = np.zeros((32, 2, 2))
                for lane in range(32):
                    slot, quad = divmod(lane, 4)
                    cols = 32 * j + 8 * quad + 4 * step
                    b[lane] = rows[slot, cols : cols + 4].reshape(2, 2)
                c += mma(a, b)
        out[:, 16 * tile : 16 * tile + 16] = c.T
    return out


def test_products_of_fragments_are_the_products() -> None:
    """Every matrix of a layer, of sizes that are multiples of nothing."""
    _, w, layout, arena = model_of(
        hidden_size=100, num_attention_heads=2, num_key_value_heads=1, head_dim=40,
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
        np.testing.assert_allclose(got[:, :rows], x @ want[m.name].T, rtol=1e-12, atol=1e-12)
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


def test_other_formats_are_refused_by_name() -> None:
    """Nothing is rounded in silence."""
    model = parse_config(config())
    for form in (WeightFormat.FP32, WeightFormat.INT8, WeightFormat.W4A16):
        with pytest.raises(Infeasible, match=f"not {form}: use --weights bf16"):
            cuda_layout(model, form)
    assert cuda_layout(model, WeightFormat.FP16).matrices[0].format == "fp16"
