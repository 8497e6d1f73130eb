"""Names, literals and addresses in generated CUDA C++.

Takes IR types and tile-program accesses, gives text. The scalar operators' expressions are here
too, since both emitters print them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf

import numpy as np

from obelisk.ir.block import Split, ceil_div
from obelisk.ir.dtype import DType
from obelisk.ir.op import Op

CTYPE = {
    DType.F64: "double",
    DType.F32: "float",
    DType.F16: "ob_f16",
    DType.BF16: "ob_bf16",
    DType.F8E4M3: "ob_f8",
    DType.I32: "int",
    DType.I8: "signed char",
    DType.BOOL: "ob_bool",
}
KIND_TYPE = {"f": "float", "d": "double", "i": "int", "m": "bool"}
_ARITH = {Op.ADD: "+", Op.SUB: "-", Op.MUL: "*", Op.DIV: "/"}


def kind_of(dtype: DType) -> str:
    """f (f32), d (f64), i (i32) or m (truth): how values of a dtype are computed."""
    if dtype is DType.F64:
        return "d"
    if dtype is DType.BOOL:
        return "m"
    return "f" if dtype.is_float else "i"


def literal(value: float, kind: str) -> str:
    """A number in CUDA C++, exactly as its type rounds it."""
    if kind == "m":
        return "true" if value else "false"
    if kind == "i":
        number = int(value)
        return f"({number + 1} - 1)" if number == -(2**31) else str(number)
    if isinf(value):
        text = "-OB_INF" if value < 0 else "OB_INF"
        return text if kind == "f" else f"(double)({text})"
    text = f"{float(np.float32(value)):.9g}" if kind == "f" else f"{value:.17g}"
    if not any(c in text for c in ".ein"):
        text += ".0"
    return text + ("f" if kind == "f" else "")


def convert(text: str, have: str, want: str) -> str:
    """An expression of one kind as another kind."""
    return text if have == want else f"ob_{want}({text})"


def fits_int(value: float) -> bool:
    """Whether a constant is exactly an i32."""
    return not isinf(value) and value == int(value) and abs(value) < 2**31


def meeting_kind(operands: Sequence[tuple[DType, float | None]], fallback: str) -> str:
    """The kind in which an operator's operands (dtype, value of a constant) meet."""
    kinds = {kind_of(d) for d, c in operands if c is None}
    for k in "dfim":
        if k in kinds:
            if k == "i" and not all(fits_int(c) for _, c in operands if c is not None):
                return "d"
            return k
    return fallback


def operator(op: Op, args: Sequence[str]) -> str:
    """An elementwise operator on expressions of one kind (comparison and choice included)."""
    match op:
        case Op.ADD | Op.SUB | Op.MUL | Op.DIV:
            return f"{args[0]} {_ARITH[op]} {args[1]}"
        case Op.NEG:
            return f"-{args[0]}"
        case Op.SQUARE:
            return f"{args[0]} * {args[0]}"
        case Op.LESS:
            return f"{args[0]} < {args[1]}"
        case Op.WHERE:
            return f"{args[0]} ? {args[1]} : {args[2]}"
        case _:
            return f"ob_{op.value}({', '.join(args)})"


def split_name(split: Split) -> str:
    """The variable that holds how much of a tile is there."""
    axis = "x" if split.axis is None else str(split.axis)
    return f"n{split.full}_{axis}{'_l' if split.loop else ''}"


def split_line(
    split: Split, grid: Sequence[int], loop: int, iteration: str = "it", tag: str = ""
) -> str:
    """The extent of the current block's (and iteration's) part of a dim, as the interpreter takes
    it.
    """
    parts = 1 if split.axis is None else grid[split.axis]
    chunk = ceil_div(split.full, parts)
    at = "0" if split.axis is None else f"{tag}g{split.axis} * {chunk}"
    head = f"const int {tag}{split_name(split)} = ob_part({split.full}, {at}, {chunk}"
    if not split.loop:
        return f"{head}, 0, {chunk});"
    tile = ceil_div(chunk, loop)
    return f"{head}, {iteration} * {tile}, {tile});"


def grid_lines(
    grid: Sequence[int], block: str, tag: str = "", fastest: int | None = None
) -> list[str]:
    """Coordinates g0, g1, ... of a block from its number; neighbouring blocks differ along the last
    axis, or along `fastest`.
    """
    out, step = [], 1
    order = list(reversed(range(len(grid))))
    if fastest is not None:
        order.remove(fastest)
        order.insert(0, fastest)
    for a in order:
        text = "0"
        if grid[a] > 1:
            text = block if step == 1 else f"{block} / {step}"
            if a != order[-1]:
                text = f"{text} % {grid[a]}"
        out.append(f"const int {tag}g{a} = {text};")
        step *= grid[a]
    return out
