"""How the CUDA kernel wants its weights: the arena's layout, in the records of `plan.layout`.

Takes a model and a workload; gives a `WeightLayout` whose matrices are stored in fragments of
`mma` (`MatrixLayout.fragments`): a lane's A registers of one step of 16-bit weights (m16n8k16), of
one step of 8-bit (m16n8k32) and of two of 4-bit ones lie in 16 bytes. The order along K is free as
long as inputs follow it, so a lane's 8 columns of a block of 32 are neighbours, in the inputs too.
fp32, which no tensor core multiplies, has an order of its own: 4 columns of a row in a lane's 16
bytes.
Gate and up alternate 8 by 8 rows, so that one lane gets both halves of an element of the MLP.
"""

from __future__ import annotations

from dataclasses import replace

from obelisk.plan.layout import MatrixLayout, RowBlock, VectorLayout, WeightLayout, align
from obelisk.schedule.gpu import K_BLOCK, NARROW_COLS, TILE_ROWS, slab_of
from obelisk.tasks import ModelConfig, WeightFormat, Workload
from obelisk.tasks.weights import EMBED, FINAL_NORM, LAYER, head_block

HALF = TILE_ROWS // 2
SCALE_BYTES = 2  # of a group


class _Part:
    """One part of the arena: tensors one after the other, each on a cache line. `outer` is the part
    that holds embedding and head.
    """

    def __init__(self, work: Workload, outer: bool) -> None:
        self.form, self.work, self.at = work.weights.outer if outer else work.weights, work, 0
        self.cols = slab_of(work.weights, work.group, work.zeros)[0]  # what inputs' columns come in
        self.matrices: list[MatrixLayout] = []
        self.vectors: list[VectorLayout] = []

    def _take(self, nbytes: int) -> int:
        start = self.at
        self.at = align(start + nbytes)
        return start

    def matrix(
        self, name: str, cols: int, *blocks: RowBlock, form: WeightFormat | None = None
    ) -> None:
        """Place a matrix of the part's format, or of `form`."""
        rows, padded = align(sum(b.rows for b in blocks), TILE_ROWS), align(cols, self.cols)
        form, work = form or self.form, self.work
        four = form is WeightFormat.W4A16
        slab, size = slab_of(form, work.group, work.zeros)
        offset = self._take(rows // TILE_ROWS * (padded // slab) * size)
        scales = zeros = -1
        if four:
            scales = TILE_ROWS * NARROW_COLS // 2
            if work.zeros:
                zeros = scales + SCALE_BYTES * TILE_ROWS * (NARROW_COLS // work.group)
        self.matrices.append(
            MatrixLayout(
                name, blocks, rows, cols, padded, TILE_ROWS, slab if four else K_BLOCK,
                form.value, offset, scales, work.group if four else 0, zeros, fragments=True,
            )
        )  # fmt: skip

    def scales(self) -> None:
        """Place the scales of int8 rows, behind all matrices and beside the vectors, so that they
        are asked for together.
        """
        self.matrices = [
            replace(m, scale_offset=self._take(4 * m.rows)) if m.format == WeightFormat.INT8 else m
            for m in self.matrices
        ]

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


def cuda_layout(model: ModelConfig, work: Workload) -> WeightLayout:
    """The arena: embedding, head unless it is the embedding, last gain; then a part for each layer,
    its vectors side by side at its end.
    """
    h, f = model.hidden, model.ffn
    a, m = LAYER + "self_attn.", LAYER + "mlp."
    whole, layer = _Part(work, True), _Part(work, False)
    whole.matrix("embed", h, RowBlock((EMBED,), 0, model.vocab))
    head = head_block(model, work)
    if head is not None:
        whole.matrix("head", h, head, form=work.head_form)
    whole.scales()
    tail = align(h, TILE_ROWS) - h
    whole.vector("norm_final", RowBlock((FINAL_NORM,), 0, h, 0, tail))
    layer.matrix("qkv", h, *_qkv(model, "weight"))
    layer.matrix("o", model.q_width, RowBlock((a + "o_proj.weight",), 0, h))
    layer.matrix("up", h, RowBlock((m + "gate_proj.weight", m + "up_proj.weight"), 0, f, HALF))
    layer.matrix("down", f, RowBlock((m + "down_proj.weight",), 0, h))
    layer.scales()
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
