"""Packed matrices back as plain ones: the inverse of `packing`, for what runs outside the kernel.

Takes an arena and a `MatrixLayout`; gives float32 rows in packed order, as the kernel means them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from obelisk.plan.layout import WORD, MatrixLayout

Array = Any
_KINDS = {"fp32": np.float32, "bf16": np.uint16, "fp16": np.float16, "int8": np.int8}


def _widened(stored: Array, form: str) -> Array:
    """Stored elements of a plain format as float32, without scales."""
    if form == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def _chunks(arena: Array, base: int, m: MatrixLayout) -> Array:
    """A plain format's elements as stored: a view (panels, chunks, panel, lanes)."""
    raw = arena[base + m.offset :][: m.nbytes].view(_KINDS[m.format])
    return raw.reshape(m.rows // m.panel, -1, m.panel, m.lanes)


def _scales(arena: Array, base: int, m: MatrixLayout) -> Array:
    """int8: the scales (rows,)."""
    return arena[base + m.scale_offset :][: 4 * m.rows].view(np.float32)


def _grouped(raw: Array, m: MatrixLayout) -> Array:
    """Scales or zeros, stored by panels, as float32 (rows, groups)."""
    parts = raw[: m.rows * m.groups].reshape(-1, m.groups, m.panel)
    return parts.transpose(0, 2, 1).reshape(m.rows, m.groups).astype(np.float32)


def _four_bits(arena: Array, base: int, m: MatrixLayout) -> Array:
    stored = arena[base + m.offset :][: m.nbytes].view(np.uint32)
    words = stored.reshape(m.rows // m.panel, -1, m.panel, m.lanes).transpose(0, 2, 1, 3)
    out = np.empty((m.rows, m.cols_padded // (WORD * m.lanes), WORD, m.lanes), np.float32)
    rows = words.reshape(m.rows, -1, m.lanes)
    for j in range(WORD):
        out[:, :, j] = (rows >> np.uint32(4 * j)) & np.uint32(15)
    w = out.reshape(m.rows, m.cols_padded)
    zero = np.full((m.rows, m.groups), 8, np.float32)
    if m.zero_offset >= 0:
        zero = _grouped(arena[base + m.zero_offset :], m)
    scale = _grouped(arena[base + m.scale_offset :][: 2 * m.rows * m.groups].view(np.float16), m)
    for g in range(m.groups):
        part = w[:, g * m.group : (g + 1) * m.group]
        part -= zero[:, g : g + 1]
        part *= scale[:, g : g + 1]
    return w[:, : m.cols]


def matrix(arena: Array, base: int, m: MatrixLayout) -> Array:
    """float32 (rows, cols) of a matrix whose part of the arena begins at `base`."""
    if m.format == "w4a16":
        return _four_bits(arena, base, m)
    rows = _widened(_chunks(arena, base, m).transpose(0, 2, 1, 3), m.format)
    w = rows.reshape(m.rows, m.cols_padded)[:, : m.cols]
    return w * _scales(arena, base, m)[:, None] if m.format == "int8" else w


def rows_of(arena: Array, base: int, m: MatrixLayout, which: Array) -> Array:
    """float32 (len(which), cols): some rows of a matrix of a plain format."""
    stored = _chunks(arena, base, m)[which // m.panel, :, which % m.panel]
    w = _widened(stored, m.format).reshape(len(which), m.cols_padded)[:, : m.cols]
    return w * _scales(arena, base, m)[which, None] if m.format == "int8" else w
