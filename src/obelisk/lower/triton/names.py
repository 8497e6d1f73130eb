"""Names, literals and expressions in generated Triton.

Takes IR types and operators, gives text. Values have the same four kinds as in the CUDA target: f
(f32), d (f64), i (i32) and m (truth).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf

from obelisk.ir.block import Split, ceil_div
from obelisk.ir.dtype import DType
from obelisk.ir.op import Op
from obelisk.lower.cuda.names import kind_of, split_name

MOST_COLUMNS = 76  # of a call, within a loop of a function of 100 columns
KIND_TYPE = {"f": "tl.float32", "d": "tl.float64", "i": "tl.int32", "m": "tl.int1"}
# What a pointer's elements are; f8 and bool are bytes, so that no architecture matters.
ELEMENT = {
    DType.F64: "tl.float64",
    DType.F32: "tl.float32",
    DType.F16: "tl.float16",
    DType.BF16: "tl.bfloat16",
    DType.F8E4M3: "tl.uint8",
    DType.I32: "tl.int32",
    DType.I8: "tl.int8",
    DType.BOOL: "tl.uint8",
}
_INFIX = {Op.ADD: "+", Op.SUB: "-", Op.MUL: "*", Op.DIV: "/", Op.LESS: "<"}


def power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def literal(value: float, kind: str) -> str:
    """A number as a Python literal, exactly."""
    if kind == "m":
        return "True" if value else "False"
    if kind == "i":
        return str(int(value))
    if isinf(value):
        return 'float("-inf")' if value < 0 else 'float("inf")'
    return repr(float(value))


def scalar(value: float, kind: str) -> str:
    """A number as a value of its kind, for functions that take no bare literals."""
    return f"tl.full([], {literal(value, kind)}, {KIND_TYPE[kind]})"


def convert(text: str, have: str, want: str) -> str:
    """A value of one kind as another kind."""
    if have == want:
        return text
    if want == "m":
        return f"({text} != 0)"
    return f"{text}.to({KIND_TYPE[want]})"


def stored(text: str, dtype: DType) -> str:
    """A value in the kind of `dtype` as an element of it."""
    kind = kind_of(dtype)
    match dtype:
        case DType.F8E4M3:
            return f"ob_to_f8({text})"
        case DType.BF16:
            return f"ob_to_bf16({text})"
        case _:
            same = ELEMENT[dtype] == KIND_TYPE[kind]
            return text if same else f"{text}.to({ELEMENT[dtype]})"


def call_text(name: str, arguments: Sequence[str]) -> str:
    """A call, one argument a line where it would be long."""
    text = f"{name}({', '.join(arguments)})"
    if len(text) <= MOST_COLUMNS:
        return text
    return "\n".join([f"{name}(", *(f"    {a}," for a in arguments), ")"])


def indented(text: str) -> str:
    """A statement one level deeper."""
    return "\n".join(f"    {line}" for line in text.split("\n"))


def lowest(dtype: DType) -> float:
    """Neutral element of the maximum."""
    if dtype.is_float:
        return float("-inf")
    return float(-(1 << (dtype.bits - 1)))


def operator(op: Op, args: Sequence[str], kind: str) -> str:
    """An elementwise operator on values of one kind."""
    match op:
        case Op.ADD | Op.SUB | Op.MUL | Op.DIV | Op.LESS:
            return f"{args[0]} {_INFIX[op]} {args[1]}"
        case Op.MAX | Op.MIN:
            name = "tl.maximum" if op is Op.MAX else "tl.minimum"
            nan = ", propagate_nan=tl.PropagateNan.ALL" if kind in "fd" else ""
            return f"{name}({args[0]}, {args[1]}{nan})"
        case Op.NEG:
            return f"-{args[0]}"
        case Op.SQUARE:
            return f"{args[0]} * {args[0]}"
        case Op.WHERE:
            return f"tl.where({args[0]}, {args[1]}, {args[2]})"
        case Op.SIGMOID:
            return f"1.0 / (1.0 + tl.exp(-{args[0]}))"
        case Op.RSQRT:
            return f"1.0 / tl.sqrt({args[0]})"
        case Op.TANH:
            return f"ob_tanh({args[0]})"
        case _:
            return f"tl.{op.value}({args[0]})"


def part_line(split: Split, grid: Sequence[int], loop: int, iteration: str) -> str:
    """The extent of the current block's (and iteration's) part of a dim, as the interpreter takes
    it.
    """
    parts = 1 if split.axis is None else grid[split.axis]
    chunk = ceil_div(split.full, parts)
    at = "0" if parts == 1 else f"g{split.axis} * {chunk}"
    if not split.loop:
        start, tile = "0", chunk
    else:
        tile = ceil_div(chunk, loop)
        start = f"{iteration} * {tile}" if loop > 1 else "0"
    return f"{split_name(split)} = ob_part({split.full}, {at}, {chunk}, {start}, {tile})"


def grid_lines(grid: Sequence[int], wide: bool) -> list[str]:
    """Coordinates g0, g1, ... of a block from its number; axes of one block have none."""
    if max(grid) == 1:
        return []
    out = ["block = tl.program_id(0)" + (".to(tl.int64)" if wide else "")]
    step = 1
    for a in reversed(range(len(grid))):
        if grid[a] > 1:
            text = "block" if step == 1 else f"block // {step}"
            first = all(n == 1 for n in grid[:a])
            out.append(f"g{a} = {text if first else f'{text} % {grid[a]}'}")
        step *= grid[a]
    return out
