"""Names and addresses in generated C: element types, run-time extents, pointers into buffers."""

from __future__ import annotations

from obelisk.ir.block import Split, ceil_div
from obelisk.ir.dtype import DType
from obelisk.lower.tile import BufferKind, Chain, Extent, Kernel, Product

CTYPE = {
    DType.F64: "double",
    DType.F32: "float",
    DType.F16: "ob_f16",
    DType.BF16: "ob_bf16",
    DType.F8E4M3: "ob_f8",
    DType.I32: "int32_t",
    DType.I8: "int8_t",
    DType.BOOL: "uint8_t",
}


def split_name(split: Split) -> str:
    """The variable that holds how much of a tile is there."""
    axis = "x" if split.axis is None else str(split.axis)
    return f"n{split.full}_{axis}{'_l' if split.loop else ''}"


def extent(e: Extent) -> str:
    """An extent in C: a number, or a variable where tiles may be short."""
    return str(e.size) if e.split is None else split_name(e.split)


def pointer(kernel: Kernel, buffer: int, offset: int, moves: tuple[int, ...]) -> str:
    """The address of an access's first element for the current block and iteration."""
    b = kernel.buffers[buffer]
    ctype = CTYPE[b.dtype]
    parts = [str(offset)] if offset else []
    for a, step in enumerate(moves[: len(kernel.grid)]):
        if step and kernel.grid[a] > 1:
            parts.append(f"g{a} * {step}L")
    if moves and moves[-1] and kernel.loop > 1:
        parts.append(f"it * {moves[-1]}L")
    if b.kind is BufferKind.TILE:
        base = f"({ctype} *)(arena + {kernel.offsets[buffer]})"
    else:
        base = f"({ctype} *)t[{slot(kernel, buffer)}]"
    return " + ".join([base, *parts])


def slot(kernel: Kernel, buffer: int) -> int:
    """Place of a param or result among a kernel's pointers: params first."""
    b = kernel.buffers[buffer]
    params = sum(1 for x in kernel.buffers if x.kind is BufferKind.PARAM)
    return b.index if b.kind is BufferKind.PARAM else params + b.index


def splits_of(kernel: Kernel) -> list[Split]:
    """The cuts with short tiles that a kernel's statements meet, in a fixed order."""
    found: set[Split] = set()
    for s in (*kernel.before, *kernel.body, *kernel.after):
        match s:
            case Chain(dims=dims):
                extents = [*dims]
            case Product(a=a, b=b, c=c):
                extents = [*a.shape, *b.shape, *c.shape]
        found |= {e.split for e in extents if e.split is not None}
    return sorted(found, key=lambda s: (s.full, -1 if s.axis is None else s.axis, s.loop))


def split_line(kernel: Kernel, split: Split) -> str:
    """C that computes the extent of the current block's (and iteration's) part of a dim, as the
    interpreter does.
    """
    parts = 1 if split.axis is None else kernel.grid[split.axis]
    chunk = ceil_div(split.full, parts)
    at = "0L" if split.axis is None else f"g{split.axis} * {chunk}L"
    head = f"const long {split_name(split)} = ob_part({split.full}, {at}, {chunk}"
    if not split.loop:
        return f"{head}, 0, {chunk});"
    tile = ceil_div(chunk, kernel.loop)
    return f"{head}, it * {tile}L, {tile});"
