"""From a model to the operators of one decode step: the first module of the pipeline.

Takes a `ModelConfig`, a `Workload` and whether attention is cut into pieces; gives a module of the
`step` dialect. The layers are one `step.repeat`; everything else stands before and behind it. The
order of the operators is the one that defines the step.
"""

from __future__ import annotations

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Region, SSAValue

from obelisk.schedule.ir.dialects import OperatorOp, RepeatOp, ValueType, YieldOp, value_type
from obelisk.tasks.config import ModelConfig


class _Writer:
    """Appends operators to a block."""

    def __init__(self, block: Block) -> None:
        self.block = block

    def put(
        self, kind: str, inputs: list[SSAValue], outputs: list[ValueType],
        matrix: str | None = None, rows: int = 0, cols: int = 0,
    ) -> tuple[SSAValue, ...]:  # fmt: skip
        """Append one operator; gives its results."""
        op = OperatorOp(kind, inputs, outputs, matrix, rows, cols)
        self.block.add_op(op)
        return tuple(op.outputs)


def qkv_rows(m: ModelConfig) -> int:
    """Rows of the joined q, k, v product."""
    return m.q_width + 2 * m.kv_width


def part_width(m: ModelConfig, splits: int) -> int:
    """Elements of all pieces of attention: sums, largest and mass of each."""
    return m.heads * splits * (m.head_dim + 2)


def _layer(m: ModelConfig, splits: int) -> Region:
    x_type = value_type("x", m.hidden)
    block = Block(arg_types=[x_type])
    w = _Writer(block)
    x: SSAValue = block.args[0]
    kv = value_type("key", m.kv_width)
    (h,) = w.put("norm", [x], [value_type("h", m.hidden)])
    rows = qkv_rows(m)
    (raw,) = w.put("product", [h], [value_type("raw", rows)], "qkv", rows, m.hidden)
    q, key, value = w.put(
        "rotate", [raw], [value_type("q", m.q_width), kv, value_type("value", m.kv_width)]
    )
    (cache,) = w.put("append", [key, value], [value_type("cache", 2 * m.kv_width)])
    kind = value_type("part", part_width(m, splits)) if splits > 1 else None
    attn_type = value_type("attn", m.q_width)
    (attn,) = w.put("attend", [q, cache], [kind or attn_type], "cache", m.kv_heads, m.head_dim)
    if splits > 1:
        (attn,) = w.put("combine", [attn], [attn_type])
    y = value_type("y", m.hidden)
    (o,) = w.put("product", [attn], [y], "o", m.hidden, m.q_width)
    (x,) = w.put("add", [x, o], [x_type])
    (h,) = w.put("norm", [x], [value_type("h", m.hidden)])
    (pair,) = w.put("product", [h], [value_type("pair", 2 * m.ffn)], "up", 2 * m.ffn, m.hidden)
    (act,) = w.put("gate", [pair], [value_type("act", m.ffn)])
    (down,) = w.put("product", [act], [y], "down", m.hidden, m.ffn)
    (x,) = w.put("add", [x, down], [x_type])
    block.add_op(YieldOp([x]))
    return Region(block)


def operators_module(m: ModelConfig, splits: int = 1) -> ModuleOp:
    """The step of a model as operators; `splits` is how many pieces a context is attended in."""
    module = ModuleOp([])
    w = _Writer(module.body.block)
    x_type, best = value_type("x", m.hidden), value_type("best", 2)
    (token,) = w.put("token", [], [value_type("token", 1)])
    (x,) = w.put("embed", [token], [x_type])
    repeat = RepeatOp([x], [x_type], m.layers, _layer(m, splits))
    w.block.add_op(repeat)
    (h,) = w.put("norm", [repeat.outputs[0]], [value_type("h", m.hidden)])
    (raw,) = w.put("product", [h], [value_type("scores", m.vocab)], "head", m.vocab, m.hidden)
    logits, tops = w.put("best", [raw], [value_type("logits", m.vocab), best])
    w.put("sample", [logits, tops], [value_type("token", 1)])
    return module
