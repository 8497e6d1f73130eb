"""Which tensors a model's checkpoint must hold, and the layout that a plan packs them into.

Takes a `StepShape`; gives `CheckpointTensor` rows (name and shape, by the naming of Hugging Face
checkpoints) and a `WeightLayout`. Tied heads share the embedding's one copy, unless the workload
gives the head a format of its own: then it is packed once more from the embedding's tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from obelisk.plan.layout import (
    BITS,
    WORD,
    MatrixLayout,
    RowBlock,
    VectorLayout,
    WeightLayout,
    align,
)
from obelisk.tasks.config import ModelConfig
from obelisk.tasks.shape import StepShape
from obelisk.tasks.workload import WeightFormat, Workload

EMBED, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
LAYER = "model.layers.{layer}."


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """A tensor that a checkpoint must hold; `{layer}` in its name stands for every layer."""

    name: str
    shape: tuple[int, ...]


def checkpoint_tensors(model: ModelConfig) -> tuple[CheckpointTensor, ...]:
    """Every tensor of a checkpoint of `model`, layers as one template."""
    h, f, q, kv = model.hidden, model.ffn, model.q_width, model.kv_width
    table = [(EMBED, (model.vocab, h)), (FINAL_NORM, (h,))]
    if not model.tied:
        table.append((HEAD, (model.vocab, h)))
    a, m = LAYER + "self_attn.", LAYER + "mlp."
    table += [
        (LAYER + "input_layernorm.weight", (h,)),
        (LAYER + "post_attention_layernorm.weight", (h,)),
        (a + "q_proj.weight", (q, h)), (a + "k_proj.weight", (kv, h)),
        (a + "v_proj.weight", (kv, h)), (a + "o_proj.weight", (h, q)),
        (m + "gate_proj.weight", (f, h)), (m + "up_proj.weight", (f, h)),
        (m + "down_proj.weight", (h, f)),
    ]  # fmt: skip
    if model.qkv_bias:
        table += [(a + "q_proj.bias", (q,)), (a + "k_proj.bias", (kv,)), (a + "v_proj.bias", (kv,))]
    if model.o_bias:
        table.append((a + "o_proj.bias", (h,)))
    if model.mlp_bias:
        table += [(m + "gate_proj.bias", (f,)), (m + "up_proj.bias", (f,))]
        table.append((m + "down_proj.bias", (h,)))
    if model.qk_norm:
        table += [(a + f"{x}_norm.weight", (model.head_dim,)) for x in "qk"]
    return tuple(CheckpointTensor(n, s) for n, s in table)


def head_tensor(model: ModelConfig, work: Workload) -> str:
    """The tensor that a plan's head means: the embedding's where they are one matrix, else
    `HEAD`, by which a source of stored weights also gives a tied head of a format of its own.
    """
    return EMBED if model.tied and not work.own_head else HEAD


def head_block(model: ModelConfig, work: Workload) -> RowBlock | None:
    """Where the rows of the head's matrix come from; None where it is the embedding's."""
    if model.tied and not work.own_head:
        return None
    return RowBlock((EMBED if model.tied else HEAD,), 0, model.vocab)


class _Part:
    """One part of the arena under construction: places tensors one after the other."""

    def __init__(self, shape: StepShape, outer: bool) -> None:
        self.shape, self.outer = shape, outer
        self.at = 0
        self.matrices: list[MatrixLayout] = []
        self.vectors: list[VectorLayout] = []

    def _take(self, nbytes: int) -> int:
        start = self.at
        self.at = align(start + nbytes)
        return start

    def matrix(
        self, name: str, cols: int, *blocks: RowBlock, form: WeightFormat | None = None
    ) -> None:
        """Place a matrix: of the plan's weight format in a layer, of its outer one elsewhere, or of
        `form`.
        """
        s, work = self.shape, self.shape.work
        form = form or (work.weights.outer if self.outer else work.weights)
        four = form is WeightFormat.W4A16
        panel, lanes = s.tiling.panel, s.lanes
        rows = align(sum(b.rows for b in blocks), panel)
        padded = align(cols, lanes * WORD if four else lanes)
        offset = self._take(rows * padded * BITS[form] // 8)
        scales = zeros = -1
        if form is WeightFormat.INT8:
            scales = self._take(rows * 4)
        elif four:
            groups = rows * -(-padded // work.group)
            scales = self._take(groups * 2)
            zeros = self._take(groups) if work.zeros else -1
        self.matrices.append(
            MatrixLayout(
                name, blocks, rows, cols, padded, panel, lanes, form.value, offset, scales,
                work.group if four else 0, zeros,
            )
        )  # fmt: skip

    def vector(self, name: str, *blocks: RowBlock) -> None:
        """Place an fp32 vector."""
        size = sum(b.rows for b in blocks)
        self.vectors.append(VectorLayout(name, blocks, size, self._take(size * 4)))


def _qkv_blocks(shape: StepShape, suffix: str) -> list[RowBlock]:
    """Rows of the q, k, v product by head group: its query heads, its key head, its value head."""
    model, a = shape.model, LAYER + "self_attn."
    d = model.head_dim
    blocks = []
    for g in range(model.kv_heads):
        wide = model.group * d
        blocks += [
            RowBlock((a + "q_proj." + suffix,), g * wide, wide),
            RowBlock((a + "k_proj." + suffix,), g * d, d),
            RowBlock((a + "v_proj." + suffix,), g * d, d, 0, shape.group_rows - wide - 2 * d),
        ]
    return blocks


def weight_layout(shape: StepShape) -> WeightLayout:
    """The arena that the kernel of `shape` reads: embedding, head and final gain, then layers."""
    model, panel = shape.model, shape.tiling.panel
    h, f = model.hidden, model.ffn
    a, m = LAYER + "self_attn.", LAYER + "mlp."
    whole = _Part(shape, True)
    whole.matrix("embed", h, RowBlock((EMBED,), 0, model.vocab))
    head = head_block(model, shape.work)
    if head is not None:
        whole.matrix("head", h, head, form=shape.work.head_form)
    whole.vector("norm_final", RowBlock((FINAL_NORM,), 0, h))
    layer = _Part(shape, False)
    layer.matrix("qkv", h, *_qkv_blocks(shape, "weight"))
    layer.matrix("o", model.q_width, RowBlock((a + "o_proj.weight",), 0, h))
    pair = (m + "gate_proj.weight", m + "up_proj.weight")
    layer.matrix("up", h, RowBlock(pair, 0, f, panel))
    layer.matrix("down", f, RowBlock((m + "down_proj.weight",), 0, h))
    layer.vector("norm_in", RowBlock((LAYER + "input_layernorm.weight",), 0, h))
    layer.vector("norm_mid", RowBlock((LAYER + "post_attention_layernorm.weight",), 0, h))
    if model.qkv_bias:
        layer.vector("qkv_bias", *_qkv_blocks(shape, "bias"))
    if model.o_bias:
        layer.vector("o_bias", RowBlock((a + "o_proj.bias",), 0, h, 0, shape.hidden_rows - h))
    if model.mlp_bias:
        layer.vector("up_bias", RowBlock((m + "gate_proj.bias", m + "up_proj.bias"), 0, f, panel))
        layer.vector("down_bias", RowBlock((m + "down_proj.bias",), 0, h, 0, shape.hidden_rows - h))
    if model.qk_norm:
        layer.vector("q_gain", RowBlock((a + "q_norm.weight",), 0, model.head_dim))
        layer.vector("k_gain", RowBlock((a + "k_norm.weight",), 0, model.head_dim))
    return WeightLayout(
        tuple(whole.matrices), tuple(whole.vectors), tuple(layer.matrices), tuple(layer.vectors),
        model.layers, whole.at, layer.at,
    )  # fmt: skip
