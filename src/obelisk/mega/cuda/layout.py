"""How the CUDA kernel wants its weights: the arena's layout, in the records of `plan.layout`.

Takes a model and a weight format; gives a `WeightLayout` whose matrices are stored in fragments of
`mma.m16n8k16` (`MatrixLayout.fragments`): 1024 bytes hold 16 rows by 32 columns, and a lane's A
registers of one step lie in 16 bytes of it. The order along K is free as long as inputs follow it,
so a lane's 8 columns of a block of 32 are neighbours, in the inputs too. Gate and up alternate 8 by
8 rows, so that one lane gets both halves of an element of the MLP.
"""

from __future__ import annotations

from dataclasses import replace

from obelisk.base.errors import Infeasible
from obelisk.plan.layout import MatrixLayout, RowBlock, VectorLayout, WeightLayout, align
from obelisk.schedule.gpu import K_BLOCK, TILE_ROWS
from obelisk.tasks import ModelConfig, WeightFormat
from obelisk.tasks.weights import EMBED, FINAL_NORM, HEAD, LAYER

HALF = TILE_ROWS // 2
FORMATS = (WeightFormat.BF16, WeightFormat.FP16)


class _Part:
    """One part of the arena: tensors one after the other, each on a cache line."""

    def __init__(self, form: WeightFormat) -> None:
        self.form, self.at = form, 0
        self.matrices: list[MatrixLayout] = []
        self.vectors: list[VectorLayout] = []

    def _take(self, nbytes: int) -> int:
        start = self.at
        self.at = align(start + nbytes)
        return start

    def matrix(self, name: str, cols: int, *blocks: RowBlock) -> None:
        rows, padded = align(sum(b.rows for b in blocks), TILE_ROWS), align(cols, K_BLOCK)
        offset = self._take(rows * padded * 2)
        self.matrices.append(
            MatrixLayout(
                name,
                blocks,
                rows,
                cols,
                padded,
                TILE_ROWS,
                K_BLOCK,
                self.form.value,
                offset,
                fragments=True,
            )
        )

    def vector(self, name: str, *blocks: RowBlock) -> None:
        size = sum(b.rows for b in blocks)
        self.vectors.append(VectorLayout(name, blocks, size, self._take(size * 4)))


def _qkv(model: ModelConfig, suffix: str) -> list[RowBlock]:
    """Rows by head group: its query heads, its key head, its value head."""
    d, a, out = model.head_dim, LAYER + "self_attn.", []
    for g in range(model.kv_heads):
        wide = model.group * d
        out += [
            RowBlock((a + "q_proj." + suffix,), g * wide, wide),
            RowBlock((a + "k_proj." + suffix,), g * d, d),
            RowBlock((a + "v_proj." + suffix,), g * d, d),
        ]
    return out


def cuda_layout(model: ModelConfig, form: WeightFormat) -> WeightLayout:
    """The arena: embedding, head unless tied, last gain; then a part for each layer, its vectors
    side by side at its end. Raises `Infeasible` for a weight format that the kernel does not read.
    """
    if form not in FORMATS:
        known = ", ".join(FORMATS)
        raise Infeasible(
            f"the CUDA megakernel reads weights as {known}, not {form}: use --weights bf16"
        )
    h, f = model.hidden, model.ffn
    a, m = LAYER + "self_attn.", LAYER + "mlp."
    whole, layer = _Part(form), _Part(form)
    whole.matrix("embed", h, RowBlock((EMBED,), 0, model.vocab))
    if not model.tied:
        whole.matrix("head", h, RowBlock((HEAD,), 0, model.vocab))
    tail = align(h, TILE_ROWS) - h
    whole.vector("norm_final", RowBlock((FINAL_NORM,), 0, h, 0, tail))
    layer.matrix("qkv", h, *_qkv(model, "weight"))
    layer.matrix("o", model.q_width, RowBlock((a + "o_proj.weight",), 0, h))
    layer.matrix("up", h, RowBlock((m + "gate_proj.weight", m + "up_proj.weight"), 0, f, HALF))
    layer.matrix("down", f, RowBlock((m + "down_proj.weight",), 0, h))
    layer.vector("norm_in", RowBlock((LAYER + "input_layernorm.weight",), 0, h, 0, tail))
    layer.vector("norm_mid", RowBlock((LAYER + "post_attention_layernorm.weight",), 0, h, 0, tail))
    if model.qkv_bias:
        rows = (model.heads + 2 * model.kv_heads) * model.head_dim
        *most, end = _qkv(model, "bias")
        layer.vector("qkv_bias", *most, replace(end, pad=align(rows, TILE_ROWS) - rows))
    if model.o_bias:
        layer.vector("o_bias", RowBlock((a + "o_proj.bias",), 0, h, 0, tail))
    if model.mlp_bias:
        pair = (m + "gate_proj.bias", m + "up_proj.bias")
        layer.vector("up_bias", RowBlock(pair, 0, f, HALF))
        layer.vector("down_bias", RowBlock((m + "down_proj.bias",), 0, h, 0, tail))
    if model.qk_norm:
        layer.vector("q_gain", RowBlock((a + "q_norm.weight",), 0, model.head_dim))
        layer.vector("k_gain", RowBlock((a + "k_norm.weight",), 0, model.head_dim))
    return WeightLayout(
        tuple(whole.matrices), tuple(whole.vectors), tuple(layer.matrices), tuple(layer.vectors),
        model.layers, whole.at, layer.at,
    )  # fmt: skip
