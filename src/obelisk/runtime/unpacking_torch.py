"""A CUDA plan's packed matrices back as plain ones, where they lie: by torch's views and permutes.

Takes an arena (a uint8 tensor on any device) and a `MatrixLayout`; gives a `Weight`, which the
products of `prefill_torch` read. A weight format is one entry of `MATRICES`. It imports torch: only
what runs prompts on a device imports it.
"""

from __future__ import annotations

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
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix (rows, cols) in the type of the products' inputs; `scale` (rows,), where there is
    one, multiplies what a product gives.
    """

    value: Tensor
    scale: Tensor | None = None


def _pairs(arena: Tensor, base: int, m: MatrixLayout) -> Tensor:
    """16-bit weights, two to a word: (tiles of rows, blocks of columns, s, g, q, t, h)."""
    stored = arena[base + m.offset : base + m.offset + m.nbytes].view(torch.int32)
    return stored.view(m.rows // m.panel, m.cols_padded // m.lanes, *DIGITS)


def _sixteen(arena: Tensor, base: int, m: MatrixLayout) -> Weight:
    turned = _pairs(arena, base, m).permute(0, 6, 3, 1, 4, 2, 5)
    return Weight(turned.reshape(m.rows, -1).view(TYPES[m.format])[:, : m.cols])


MATRICES: dict[str, Callable[[Tensor, int, MatrixLayout], Weight]] = {
    "bf16": _sixteen, "fp16": _sixteen,
}  # fmt: skip


def readable(m: MatrixLayout) -> bool:
    """Whether `matrix` reads how it is stored."""
    return m.fragments and m.format in MATRICES


def matrix(arena: Tensor, base: int, m: MatrixLayout) -> Weight:
    """A matrix whose part of the arena begins at `base`; raises `UserError` naming a format that
    is not read here.
    """
    if not readable(m):
        raise UserError(f"{m.name} is stored as {m.format}: its prompts run in the kernel")
    return MATRICES[m.format](arena, base, m)


def rows_of(arena: Tensor, base: int, m: MatrixLayout, which: Tensor) -> Tensor:
    """float32 (len(which), cols): some rows of a matrix of 16-bit weights."""
    tile, row = which // m.panel, which % m.panel
    found = _pairs(arena, base, m)[tile, :, :, row % 8, :, :, row // 8]  # rows, blocks, s, q, t
    stored = found.permute(0, 1, 3, 2, 4).reshape(len(which), -1).view(TYPES[m.format])
    return stored[:, : m.cols].float()
