"""Weights from a checkpoint of the same type into a plan's fragments, as they are stored.

Nothing is rounded, so nothing is widened: each element is moved once, from the file's pages to its
place. Takes a `MatrixLayout` and tensors as the files hold them; writes into an arena. Threads may
pack several matrices at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from obelisk.base.errors import UserError
from obelisk.plan.layout import MatrixLayout, RowBlock

Array = Any
Raw = Callable[[str], Array | None]
TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # numpy's names of the formats
BITS: dict[str, Any] = {"bf16": np.uint16, "fp16": np.uint16, "fp32": np.uint32}
EXPONENT = {"bf16": 0x7F80, "fp16": 0x7C00, "fp32": 0x7F800000}  # all ones: not finite
SLAB = 1024  # rows that are moved together: they stay in a core's cache


def nothing_stored(name: str) -> Array | None:
    """A `Raw` where every tensor is read as float32."""
    return None


def _rows(blocks: Sequence[RowBlock], layer: int, raw: Raw, form: str) -> list[Array] | None:
    """The blocks' rows in packed order, one array each; None where a tensor has another type."""
    out = []
    for b in blocks:
        found = [raw(name.format(layer=layer)) for name in b.tensors]
        if any(t is None or t.dtype.name != TYPES[form] for t in found):
            return None
        parts = [t.view(BITS[form])[b.start : b.start + b.count] for t in found if t is not None]
        if len(parts) == 1 and not b.pad:
            out.append(parts[0])
            continue
        full = np.zeros((b.rows, parts[0].shape[1]), BITS[form])
        if len(parts) == 1:
            full[: b.count] = parts[0]
        else:
            whole = b.count // b.every * b.every
            turns = full[: b.rows - b.pad].reshape(-1, len(parts), b.every, full.shape[1])
            for i, part in enumerate(parts):
                turns[: whole // b.every, i] = part[:whole].reshape(-1, b.every, full.shape[1])
                if whole < b.count:
                    turns[whole // b.every, i, : b.count - whole] = part[whole:]
        out.append(full)
    return out


def _fragments(rows: Array, to: Array) -> None:
    """Rows (a multiple of 16, whole columns) into tiles (.., column blocks, 512 elements)."""
    blocks = rows.shape[1] // 32
    if rows.dtype == np.uint32:
        cut = rows.reshape(-1, 2, 4, 2, blocks, 8, 4)  # tile, h, g, p, block, q, e
        to.reshape(-1, blocks, 2, 2, 4, 8, 4)[:] = cut.transpose(0, 4, 1, 3, 2, 5, 6)
        return
    pairs = rows.view(np.uint32).reshape(-1, 2, 8, blocks, 4, 2, 2)  # tile, h, g, block, q, s, t
    to.view(np.uint32).reshape(-1, blocks, 2, 8, 4, 2, 2)[:] = pairs.transpose(0, 3, 5, 2, 4, 6, 1)


def straight(arena: Array, base: int, m: MatrixLayout, layer: int, raw: Raw) -> bool:
    """Pack a matrix as it is stored; False, and nothing is done, where it has to be converted.

    Raises `UserError` naming a tensor that is not finite.
    """
    if not m.fragments or m.format not in TYPES:
        return False
    parts = _rows(m.blocks, layer, raw, m.format)
    if parts is None:
        return False
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
    kind = BITS[m.format]
    stored = arena[base + m.offset :][: m.nbytes].view(kind)
    tiles = stored.reshape(m.rows // m.panel, m.cols_padded // m.lanes, m.panel * m.lanes)
    mask = kind(EXPONENT[m.format])
    for first in range(0, m.rows, SLAB):
        part, count = rows[first : first + SLAB], min(SLAB, m.rows - first)
        if ((part & mask) == mask).any():
            raise UserError(
                f"weights of {m.blocks[0].tensors[0].format(layer=layer)} are not finite"
            )
        if part.shape != (count, m.cols_padded) or not part.flags.c_contiguous:
            full = np.zeros((count, m.cols_padded), kind)
            full[: part.shape[0], : part.shape[1]] = part
            part = full
        _fragments(part, tiles[first // m.panel : (first + count) // m.panel])
    return True
