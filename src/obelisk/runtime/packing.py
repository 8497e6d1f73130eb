"""Repacking a checkpoint into a plan's layout, once, when it is loaded.

Takes a `WeightLayout` and a source of float32 tensors; gives one aligned arena. int8 rows are
rounded to the nearest multiple of largest / 127; bf16 to the nearest even.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from obelisk.base.errors import UserError
from obelisk.plan.layout import MatrixLayout, RowBlock, VectorLayout, WeightLayout

Array = Any
Source = Callable[[str], Array]
CACHE_LINE = 64


def aligned(size: int) -> Array:
    """`size` zero bytes at an address that is a multiple of a cache line."""
    raw = np.zeros(size + CACHE_LINE, np.uint8)
    skip = -raw.ctypes.data % CACHE_LINE
    return raw[skip : skip + size]


def _gather(blocks: Sequence[RowBlock], layer: int, source: Source, tail: tuple[int, ...]) -> Array:
    """Rows in packed order, zeros where nothing belongs; float32 (rows, *tail)."""
    out = np.zeros((sum(b.rows for b in blocks), *tail), np.float32)
    at = 0
    for b in blocks:
        width = len(b.tensors)
        for i, name in enumerate(b.tensors):
            rows = source(name.format(layer=layer))[b.start : b.start + b.count]
            if width == 1:
                out[at : at + b.count] = rows
                continue
            whole = b.count // b.every * b.every
            turns = out[at : at + b.rows - b.pad].reshape(-1, width, b.every, *tail)
            turns[: whole // b.every, i] = rows[:whole].reshape(-1, b.every, *tail)
            if whole < b.count:
                turns[whole // b.every, i, : b.count - whole] = rows[whole:]
        at += b.rows
    return out


def quantise(w: Array) -> tuple[Array, Array]:
    """Rows as int8 and their scales: w is about q * scale, symmetric; a zero row has scale 1."""
    scale = np.abs(w).max(axis=1) / np.float32(127)
    scale = np.where(scale > 0, scale, np.float32(1)).astype(np.float32)
    return np.clip(np.rint(w / scale[:, None]), -127, 127).astype(np.int8), scale


def to_bf16(w: Array) -> Array:
    """float32 rounded to bf16, as the upper 16 bits."""
    u = np.ascontiguousarray(w, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def _panels(w: Array, m: MatrixLayout) -> Array:
    """Rows padded and cut into panels, chunks side by side."""
    full = np.zeros((m.rows, m.cols_padded), w.dtype)
    full[: w.shape[0], : m.cols] = w
    cut = full.reshape(m.rows // m.panel, m.panel, m.cols_padded // m.lanes, m.lanes)
    return np.ascontiguousarray(cut.transpose(0, 2, 1, 3))


def _place(arena: Array, at: int, data: Array) -> None:
    raw = data.reshape(-1).view(np.uint8)
    arena[at : at + raw.size] = raw


def _matrix(arena: Array, base: int, m: MatrixLayout, layer: int, source: Source) -> None:
    w = _gather(m.blocks, layer, source, (m.cols,))
    if not np.isfinite(w).all():
        raise UserError(f"weights of {m.blocks[0].tensors[0].format(layer=layer)} are not finite")
    if m.format == "int8":
        w, scale = quantise(w)
        full = np.ones(m.rows, np.float32)
        full[: scale.size] = scale
        _place(arena, base + m.scale_offset, full)
    elif m.format == "bf16":
        w = to_bf16(w)
    _place(arena, base + m.offset, _panels(w, m))


def _vector(arena: Array, base: int, v: VectorLayout, layer: int, source: Source) -> None:
    _place(arena, base + v.offset, _gather(v.blocks, layer, source, ()))


def pack(layout: WeightLayout, source: Source) -> Array:
    """The arena: uint8, aligned to a cache line."""
    arena = aligned(layout.total_bytes)
    for m in layout.matrices:
        _matrix(arena, 0, m, 0, source)
    for v in layout.vectors:
        _vector(arena, 0, v, 0, source)
    for layer in range(layout.layers):
        base = layout.layer_offset + layer * layout.layer_bytes
        for m in layout.layer_matrices:
            _matrix(arena, base, m, layer, source)
        for v in layout.layer_vectors:
            _vector(arena, base, v, layer, source)
    return arena
