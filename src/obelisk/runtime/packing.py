"""Repacking a checkpoint into a plan's layout, once, when it is loaded.

Takes a `WeightLayout` and a source of float32 tensors (and of 4-bit groups, where the checkpoint
has them); gives one aligned arena. int8 rows are rounded to the nearest multiple of largest / 127;
bf16 and fp16 to the nearest even; w4a16 groups are taken as they are, or rounded to the nearest of
16 levels about 0. `stored` gives the weights that an arena means.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, Protocol

import numpy as np
import psutil

from obelisk.base.errors import UserError
from obelisk.base.settings import usable_cores
from obelisk.plan.layout import WORD, MatrixLayout, RowBlock, VectorLayout, WeightLayout
from obelisk.runtime.gptq import Grouped, by_groups
from obelisk.runtime.straight import TYPES, Raw, nothing_stored, straight

Array = Any
Source = Callable[[str], Array]
GroupSource = Callable[[str], Grouped | None]
CACHE_LINE = 64
FP16_LARGEST = 65504.0
HEAD = "lm_head.weight"
COPIES = 6
ALL_ROWS = slice(None)
PLAIN = {**TYPES, "fp32": "float32"}  # formats that a checkpoint may have, by numpy's names


def dense_only(name: str) -> Grouped | None:
    """A `GroupSource` of a checkpoint without 4-bit weights."""
    return None


def aligned(size: int) -> Array:
    """`size` zero bytes at an address that is a multiple of a cache line."""
    raw = np.zeros(size + CACHE_LINE, np.uint8)
    skip = -raw.ctypes.data % CACHE_LINE
    return raw[skip : skip + size]


def _gather(
    blocks: Sequence[RowBlock], layer: int, source: Source, tail: tuple[int, ...],
    kind: Any = np.float32,
) -> Array:  # fmt: skip
    """Rows in packed order, zeros where nothing belongs; (rows, *tail) of the type `kind`."""
    out = np.zeros((sum(b.rows for b in blocks), *tail), kind)
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


def quantise_groups(w: Array, group: int) -> Grouped:
    """Rows as 4-bit groups, round to nearest about the zero 8: largest / 7.5 is the distance of two
    levels, rounded to fp16 first; a group of zeros has scale 1.
    """
    cut = by_groups(w, group)
    scale = np.abs(cut).max(axis=2) / np.float32(7.5)
    scale = np.minimum(scale, np.float32(FP16_LARGEST)).astype(np.float16)
    scale = np.where(scale > 0, scale, np.float16(1)).astype(np.float16)
    level = cut / scale.astype(np.float32)[:, :, None]
    np.rint(level, out=level)
    level += 8
    np.clip(level, 0, 15, out=level)
    q = level.astype(np.uint8).reshape(len(w), -1)[:, : w.shape[1]]
    return Grouped(q, scale, np.full(scale.shape, 8, np.uint8), group)


def to_bf16(w: Array) -> Array:
    """float32 rounded to bf16, as the upper 16 bits."""
    u = np.ascontiguousarray(w, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def to_fp16(w: Array, name: str = "a weight") -> Array:
    """float32 rounded to fp16; raises `UserError` naming `name` where that overflows."""
    if float(np.abs(w).max(initial=0.0)) > FP16_LARGEST:
        raise UserError(
            f"{name} holds {float(np.abs(w).max()):g}, beyond fp16's {FP16_LARGEST:g}: use bf16"
        )
    return np.asarray(w, np.float32).astype(np.float16)


def _panels(w: Array, m: MatrixLayout, cols: int) -> Array:
    """Rows of `cols` stored elements, padded and cut into panels, chunks side by side."""
    full = np.zeros((m.rows, cols), w.dtype)
    full[: w.shape[0], : w.shape[1]] = w
    cut = full.reshape(m.rows // m.panel, m.panel, cols // m.lanes, m.lanes)
    return np.ascontiguousarray(cut.transpose(0, 2, 1, 3))


def panels(w: Array, m: MatrixLayout) -> Array:
    """A matrix of a plain format (one element for each weight) as stored."""
    plain = _panels(w, m, m.cols_padded)
    if not m.fragments:
        return plain
    return wide_fragments(plain) if m.format == "fp32" else fragments(plain)


def fragments(x: Array) -> Array:
    """Blocks (..., 16, 32) in the order of `MatrixLayout.fragments`, (..., 512)."""
    cut = x.reshape(-1, 2, 8, 4, 2, 2, 2)  # block, h, g, q, s, t, e
    turned = cut.transpose(0, 4, 2, 3, 5, 1, 6)  # block, s, g, q, t, h, e
    return np.ascontiguousarray(turned).reshape(*x.shape[:-2], 512)


def wide_fragments(x: Array) -> Array:
    """Blocks (..., 16, 32) of fp32 in the order of `MatrixLayout.fragments`, (..., 512)."""
    cut = x.reshape(-1, 2, 4, 2, 8, 4)  # block, h, g, p, q, e
    return np.ascontiguousarray(cut.transpose(0, 1, 3, 2, 4, 5)).reshape(*x.shape[:-2], 512)


def byte_fragments(q: Array, m: MatrixLayout) -> Array:
    """int8 weights (rows, cols) in the layout's order of bytes, with `fragments`."""
    cut = _panels(q, m, m.cols_padded).reshape(-1, 2, 8, 4, 2, 4)  # block, h, g, q, s, i
    return np.ascontiguousarray(cut.transpose(0, 2, 3, 4, 1, 5))  # block, g, q, s, h, i


def slabs(g: Grouped, m: MatrixLayout) -> Array:
    """4-bit groups as the layout's slabs of 16 rows by 128 columns, with `fragments`: a byte has a
    column of two rows.
    """
    wide = np.zeros((m.rows, m.cols_padded), np.uint8)
    wide[: g.q.shape[0], : g.q.shape[1]] = g.q
    # tile, h, g, slab, f, j, q, s, i
    cut = wide.reshape(-1, 2, 8, m.cols_padded // m.lanes, 2, 2, 4, 2, 4)
    cut = cut.transpose(0, 3, 4, 2, 6, 5, 7, 8, 1)  # tile, slab, f, g, q, j, s, i, h
    low = np.ascontiguousarray(cut[..., 1]) << 4 | cut[..., 0]  # a byte: both h
    out = np.empty((*cut.shape[:2], m.slab_bytes), np.uint8)
    out[..., : m.panel * m.lanes // 2] = low.reshape(*cut.shape[:2], -1)

    def numbers(x: Array) -> Array:
        full = np.zeros((m.rows, m.groups), x.dtype)
        full[: x.shape[0], : x.shape[1]] = x
        each = full.reshape(-1, 2, 8, cut.shape[1], m.lanes // m.group)  # tile, h, g, slab, i
        turned = np.ascontiguousarray(each.transpose(0, 3, 2, 4, 1))
        return turned.reshape(*cut.shape[:2], -1).view(np.uint8)

    scales = numbers(g.scale)
    out[..., m.scale_offset : m.scale_offset + scales.shape[-1]] = scales
    if m.zero_offset >= 0:
        out[..., m.zero_offset :] = numbers(g.zero)
    return out


def words(q: Array, m: MatrixLayout) -> Array:
    """4-bit weights (rows, cols) as the layout's uint32 words."""
    wide = np.zeros((m.rows, m.cols_padded), np.uint8)
    wide[: q.shape[0], : q.shape[1]] = q
    planes = wide.reshape(m.rows, -1, WORD, m.lanes)
    packed = np.empty((m.rows, planes.shape[1], m.lanes, WORD // 2), np.uint8)
    for i in range(WORD // 2):  # the bytes of a word, the lowest first
        np.left_shift(planes[:, :, 2 * i + 1], 4, out=packed[..., i])
        packed[..., i] |= planes[:, :, 2 * i]
    return _panels(packed.view("<u4").reshape(m.rows, -1), m, m.cols_padded // WORD)


def by_panel(x: Array, m: MatrixLayout, kind: Any) -> Array:
    """Scales or zeros (rows, groups) with the rows of a panel side by side."""
    full = np.zeros((m.rows, m.groups), kind)
    full[: x.shape[0], : x.shape[1]] = x
    return np.ascontiguousarray(full.reshape(-1, m.panel, m.groups).transpose(0, 2, 1))


def _place(arena: Array, at: int, data: Array) -> None:
    raw = data.reshape(-1).view(np.uint8)
    arena[at : at + raw.size] = raw


def _finite(w: Array, name: str) -> Array:
    if not np.isfinite(w).all():
        raise UserError(f"weights of {name} are not finite")
    return w


def regroup(name: str, source: Source, grouped: GroupSource, m: MatrixLayout) -> Grouped:
    """A tensor's groups for a w4a16 matrix: the checkpoint's own, else rounded from its weights.

    Raises `UserError` where the checkpoint's groups are not the plan's.
    """
    found = grouped(name)
    if found is None:
        return quantise_groups(_finite(source(name), name), m.group)
    if found.group != m.group:
        raise UserError(f"{name} has groups of {found.group}, the plan groups of {m.group}")
    if m.zero_offset < 0 and not (found.zero == 8).all():
        raise UserError(f"{name} has zeros of its own, the plan was made for none")
    _finite(found.scale, name)
    return found


def _four_bits(
    arena: Array, base: int, m: MatrixLayout, layer: int, source: Source, grouped: GroupSource
) -> None:
    cache: dict[str, Grouped] = {}

    def part(name: str) -> Grouped:
        if name not in cache:
            cache[name] = regroup(name, source, grouped, m)
        return cache[name]

    def gather(field: str, width: int, kind: Any) -> Array:
        return _gather(m.blocks, layer, lambda n: getattr(part(n), field), (width,), kind)

    q, groups = gather("q", m.cols, np.uint8), -(-m.cols // m.group)
    scale = gather("scale", groups, np.float16)
    if m.fragments:
        zero = gather("zero", groups, np.uint8)
        _place(arena, base + m.offset, slabs(Grouped(q, scale, zero, m.group), m))
        return
    _place(arena, base + m.offset, words(q, m))
    _place(arena, base + m.scale_offset, by_panel(scale, m, np.float16))
    if m.zero_offset >= 0:
        zero = gather("zero", groups, np.uint8)
        _place(arena, base + m.zero_offset, by_panel(zero, m, np.uint8))


def _matrix(
    arena: Array, base: int, m: MatrixLayout, layer: int, source: Source, grouped: GroupSource
) -> None:
    if m.format == "w4a16":
        _four_bits(arena, base, m, layer, source, grouped)
        return
    name = m.blocks[0].tensors[0].format(layer=layer)
    w = _finite(_gather(m.blocks, layer, source, (m.cols,)), name)
    if m.format == "int8":
        w, scale = quantise(w)
        full = np.ones(m.rows, np.float32)
        full[: scale.size] = scale
        _place(arena, base + m.scale_offset, full)
        if m.fragments:
            _place(arena, base + m.offset, byte_fragments(w, m))
            return
    elif m.format == "bf16":
        w = to_bf16(w)
    elif m.format == "fp16":
        w = to_fp16(w, name)
    _place(arena, base + m.offset, panels(w, m))


def _vector(arena: Array, base: int, v: VectorLayout, layer: int, source: Source) -> None:
    _place(arena, base + v.offset, _gather(v.blocks, layer, source, ()))


def pack(
    layout: WeightLayout,
    source: Source,
    grouped: GroupSource = dense_only,
    raw: Raw = nothing_stored,
) -> Array:
    """The arena: uint8, aligned to a cache line. Raises `UserError` for weights that are not
    finite, or that the plan's format cannot hold.

    `raw` gives tensors as they are stored, which saves converting them where the plan stores them
    likewise. Threads pack as many matrices at a time as there is memory for.
    """
    arena = aligned(layout.total_bytes)
    parts: list[tuple[int, int, MatrixLayout | VectorLayout]] = []
    parts += [(0, 0, m) for m in layout.matrices]
    parts += [(0, 0, v) for v in layout.vectors]
    for layer in range(layout.layers):
        base = layout.layer_offset + layer * layout.layer_bytes
        parts += [(base, layer, m) for m in layout.layer_matrices]
        parts += [(base, layer, v) for v in layout.layer_vectors]

    def one(part: tuple[int, int, MatrixLayout | VectorLayout]) -> None:
        base, layer, x = part
        if isinstance(x, VectorLayout):
            _vector(arena, base, x, layer, source)
        elif not straight(arena, base, x, layer, raw):
            _matrix(arena, base, x, layer, source, grouped)

    with ThreadPoolExecutor(_workers(layout)) as pool:
        done = [pool.submit(one, part) for part in parts]
        try:
            for future in done:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return arena


def _workers(layout: WeightLayout) -> int:
    """Threads that pack: a matrix in the making takes up to `COPIES` float32 copies of itself."""
    largest = max(m.rows * m.cols for m in (*layout.matrices, *layout.layer_matrices))
    room = int(psutil.virtual_memory().available) // (4 * COPIES * largest)
    return max(1, min(usable_cores(), room))


class RowSource(Protocol):
    """Rows of a tensor by its name, as float32; all of them where none are named."""

    def __call__(self, name: str, rows: slice = ALL_ROWS, /) -> Array: ...


def _as_stored(name: str, w: Array, form: str) -> Array:
    """Rows of a dense tensor as float32, rounded as a plain format rounds them."""
    if w.dtype.name == PLAIN.get(form):  # the checkpoint's rounding is the plan's
        return w.astype(np.float32)
    w = np.asarray(w, np.float32)
    if form == "bf16":
        return (to_bf16(w).astype(np.uint32) << 16).view(np.float32)
    if form == "fp16":
        return to_fp16(w, name).astype(np.float32)
    if form == "int8":
        q, scale = quantise(w)
        return q.astype(np.float32) * scale[:, None]
    return w


def stored(
    layout: WeightLayout,
    source: Source,
    grouped: GroupSource = dense_only,
    part: Callable[[str, slice], Array | None] = lambda name, rows: None,
) -> RowSource:
    """The float32 tensors that an arena of `layout` means: rounded as `pack` rounds them.

    `part` gives rows of a tensor as a checkpoint stores them (None: it cannot), which saves reading
    all of it for a few; of other tensors the latest two are kept. Several threads may read.
    The embedding's tensor is what the embedding means by it; a head that is packed from it once
    more, in another format, is called `HEAD`.
    """
    table = {
        name: (name, m)
        for m in (*layout.matrices, *layout.layer_matrices)
        for b in m.blocks
        for name in b.tensors
        if m.name != "head"
    }
    for m in layout.matrices:
        if m.name == "head":
            table[HEAD] = (m.blocks[0].tensors[0], m)
    kept: dict[str, Array] = {}
    lock = Lock()

    def whole(asked: str, name: str, m: MatrixLayout | None) -> Array:
        with lock:
            if asked not in kept:
                if len(kept) > 1:
                    kept.pop(next(iter(kept)))
                if m is not None and m.format == "w4a16":
                    kept[asked] = regroup(name, source, grouped, m).dense()
                else:
                    kept[asked] = _as_stored(name, source(name), m.format if m else "fp32")
            return kept[asked]

    def read(asked: str, rows: slice = ALL_ROWS, /) -> Array:
        template = re.sub(r"\.layers\.\d+\.", ".layers.{layer}.", asked)
        origin, m = table.get(template, (asked, None))
        name = origin if asked == HEAD else asked
        found = None if m is not None and m.format == "w4a16" else part(name, rows)
        if found is None:
            return whole(asked, name, m)[rows]
        return _as_stored(name, found, m.format if m else "fp32")

    return read
