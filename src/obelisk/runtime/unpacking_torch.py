"""A CUDA plan's packed matrices back as plain ones, where they lie: by torch's views and permutes.

Takes an arena (a uint8 tensor on any device) and a `MatrixLayout`; gives a `Reader` of a `Weight`,
which the products of `prefill_torch` read. A reader holds views and no copies, for a view costs the
host as much as starting a kernel. A weight format is one entry of `READERS`. It imports torch: only
what runs prompts on a device imports it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from obelisk.base.errors import UserError
from obelisk.plan.layout import MatrixLayout

Tensor = Any
# The digits of an element's place in a block of 16 rows by 32 columns (`MatrixLayout.fragments`):
# s, g, q, t, h of row 8 h + g and columns 8 q + 4 s + 2 t, + 1, which move as one 32-bit word.
DIGITS = (2, 8, 4, 2, 2)
WIDE = (2, 2, 4, 8, 4)  # of fp32: h, p, g, q, e of row 8 h + 2 g + p and column 4 q + e
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix (rows, cols) in the type of the products' inputs; `scale` (rows,), where there is
    one, multiplies what a product gives.
    """

    value: Tensor
    scale: Tensor | None = None


Reader = Callable[[], Weight]


def _true(rows: Tensor, m: MatrixLayout) -> Tensor:
    """Rows without padded columns."""
    return rows if m.cols == m.cols_padded else rows[:, : m.cols]


def _pairs(arena: Tensor, base: int, m: MatrixLayout) -> Tensor:
    """16-bit weights, two to a word: (tiles of rows, blocks of columns, s, g, q, t, h)."""
    stored = arena[base + m.offset : base + m.offset + m.nbytes].view(torch.int32)
    return stored.view(m.rows // m.panel, m.cols_padded // m.lanes, *DIGITS)


def _sixteen(arena: Tensor, base: int, m: MatrixLayout) -> Reader:
    turned, kind = _pairs(arena, base, m).permute(0, 6, 3, 1, 4, 2, 5), TYPES[m.format]
    return lambda: Weight(_true(turned.reshape(m.rows, -1).view(kind), m))


def _whole(arena: Tensor, base: int, m: MatrixLayout) -> Tensor:
    """fp32 weights: (tiles of rows, blocks of columns, h, p, g, q, e)."""
    stored = arena[base + m.offset : base + m.offset + m.nbytes].view(torch.float32)
    return stored.view(m.rows // m.panel, m.cols_padded // m.lanes, *WIDE)


def _thirty_two(arena: Tensor, base: int, m: MatrixLayout) -> Reader:
    turned = _whole(arena, base, m).permute(0, 2, 4, 3, 1, 5, 6)
    return lambda: Weight(_true(turned.reshape(m.rows, -1), m))


def _bytes(arena: Tensor, base: int, m: MatrixLayout) -> Tensor:
    """int8: (tiles, blocks, g, q, s, h, i), i within the four columns of a register."""
    stored = arena[base + m.offset : base + m.offset + m.nbytes].view(torch.int8)
    return stored.view(m.rows // m.panel, m.cols_padded // m.lanes, 8, 4, 2, 2, 4)


def _scales(arena: Tensor, base: int, m: MatrixLayout) -> Tensor:
    """int8: of every row."""
    return arena[base + m.scale_offset :][: 4 * m.rows].view(torch.float32)


def _eight(arena: Tensor, base: int, m: MatrixLayout) -> Reader:
    stored, scales = _bytes(arena, base, m), _scales(arena, base, m)

    def read() -> Weight:
        turned = stored.permute(0, 5, 2, 1, 3, 4, 6)
        return Weight(_true(turned.half().reshape(m.rows, -1), m), scales)

    return read


def _four(arena: Tensor, base: int, m: MatrixLayout) -> Reader:
    """Levels less zeros, times scales, rounded to fp16."""
    words, each = m.panel * m.lanes // 2, m.panel * m.lanes // m.group
    size = words + each * (2 if m.zero_offset < 0 else 3)
    shape = (m.rows // m.panel, m.cols_padded // m.lanes, size)
    slabs = arena[base + m.offset :][: math.prod(shape)].view(shape)
    pairs = slabs[..., :words].unflatten(-1, (2, 8, 4, 2, 2, 4))  # f, g, q, j, s, i

    def numbers(at: int, size: int, kind: torch.dtype) -> Tensor:
        found = slabs[..., at : at + size * each].contiguous().view(kind)
        found = found.unflatten(-1, (8, m.lanes // m.group, 2))  # tile, slab, g, group, h
        return found.permute(0, 4, 2, 1, 3).reshape(m.rows, m.groups, 1)

    def read() -> Weight:
        level = torch.stack([pairs & 15, pairs >> 4], -1)  # ..., h
        # tile, slab, f, g, q, j, s, i, h to tile, h, g, slab, f, j, q, s, i
        level = level.permute(0, 8, 3, 1, 2, 5, 4, 6, 7).reshape(m.rows, m.groups, -1).half()
        zero = 8 if m.zero_offset < 0 else numbers(m.zero_offset, 1, torch.uint8).half()
        value = (level - zero) * numbers(m.scale_offset, 2, torch.float16)
        return Weight(_true(value.view(m.rows, -1), m))

    return read


READERS: dict[str, Callable[[Tensor, int, MatrixLayout], Reader]] = {
    "fp32": _thirty_two, "bf16": _sixteen, "fp16": _sixteen, "int8": _eight, "w4a16": _four,
}  # fmt: skip


def readable(m: MatrixLayout) -> bool:
    """Whether `reader` reads how it is stored."""
    return m.fragments and m.format in READERS


def reader(arena: Tensor, base: int, m: MatrixLayout) -> Reader:
    """Of a matrix whose part of the arena begins at `base`; raises `UserError` naming a format that
    is not read here.
    """
    if not readable(m):
        raise UserError(f"{m.name} is stored as {m.format}: its prompts run in the kernel")
    return READERS[m.format](arena, base, m)


def rows_of(arena: Tensor, base: int, m: MatrixLayout, which: Tensor) -> Tensor:
    """float32 (len(which), cols): some rows of a matrix of a plain format."""
    tile, row = which // m.panel, which % m.panel
    at = (tile, slice(None))
    if m.format == "int8":
        found = _bytes(arena, base, m)[(*at, row % 8, slice(None), slice(None), row // 8)]
        level = found.reshape(len(which), -1)[:, : m.cols]  # rows, blocks, q, s, i
        return level.float() * _scales(arena, base, m)[which, None]
    if m.format == "fp32":
        # rows, blocks, q, e
        whole = _whole(arena, base, m)[(*at, row // 8, row % 2, row % 8 // 2)]
        return whole.reshape(len(which), -1)[:, : m.cols].contiguous()
    words = _pairs(arena, base, m)[(*at, slice(None), row % 8, slice(None), slice(None), row // 8)]
    # rows, blocks, s, q, t
    stored = words.permute(0, 1, 3, 2, 4).reshape(len(which), -1).view(TYPES[m.format])
    return stored[:, : m.cols].float()
