"""Layouts: registers and threads hold each element of a tile once; folds join the right ones."""

from __future__ import annotations

import functools
import itertools

import pytest

from obelisk.lower.cuda.axes import Axis
from obelisk.lower.cuda.layout import Dim, column_dim, dealt, right_dim, row_dim


@functools.cache
def place(dim: Dim, register: int, thread: int, row_warps: int = 1) -> int:
    """The element index that the text of a dim gives."""
    text = dim.index.format(r=register).replace("/", "//")
    warp = thread // 32
    names = {
        "thread": thread, "lane": thread % 32, "warp_row": warp % row_warps,
        "warp_column": warp // row_warps,
    }  # fmt: skip
    return int(eval(text, {"__builtins__": {}}, names))


def test_result_fragments_cover_a_tile_once() -> None:
    rows, columns = row_dim(Axis(0, 64, None), 2, 2), column_dim(Axis(1, 48, None), 8)
    seen = [
        (place(rows, r, t, 2), place(columns, q, t, 2))
        for t, r, q in itertools.product(range(64), range(rows.registers), range(columns.registers))
    ]
    assert sorted(seen) == sorted(itertools.product(range(64), range(48)))


def test_column_warps_share_the_columns() -> None:
    rows, columns = row_dim(Axis(0, 16, None), 1, 1), column_dim(Axis(1, 64, None), 8, 4)
    seen = [
        (place(rows, r, t), place(columns, q, t))
        for t, r, q in itertools.product(
            range(128), range(rows.registers), range(columns.registers)
        )
    ]
    assert sorted(seen) == sorted(itertools.product(range(16), range(64)))


def test_result_columns_are_where_the_next_products_depth_is() -> None:
    """A scale along the depth of a right operand serves the left operand's columns as it is."""
    left, right = column_dim(Axis(0, 64, None), 16), right_dim(Axis(1, 32, None))
    depth = column_dim(Axis(0, 64, None), 16)
    for t, q in itertools.product(range(32), range(left.registers)):
        assert place(left, q, t) == place(depth, q, t)
    seen = [
        (place(depth, q, t), place(right, n, t))
        for t, q, n in itertools.product(range(32), range(depth.registers), range(right.registers))
    ]
    assert sorted(seen) == sorted(itertools.product(range(64), range(32)))


def partners(dim: Dim, thread: int) -> set[int]:
    """Threads that a fold along a dim joins: lanes by distances, then warps."""
    out = {thread}
    first, last = dim.lanes
    d = first
    while d and d <= last:
        out |= {t ^ d for t in out}
        d *= 2
    warps, step = dim.warps
    if warps > 1:
        mask = (warps - 1) * 32 * step
        out = {(t & ~mask) | (w * 32 * step) for t in out for w in range(warps)}
    return out


@pytest.mark.parametrize(
    ("extents", "inner", "folded", "threads", "vector"),
    [
        ((512,), 0, (0,), 64, 8),
        ((1000,), 0, (0,), 128, 8),
        ((16, 64), 1, (0,), 256, 4),
        ((3, 40, 24), 2, (1,), 128, 8),
        ((16, 2, 8, 8), 3, (0,), 128, 4),
        ((5, 7), None, (), 32, 1),
    ],
)
def test_dealt_tiles(
    extents: tuple[int, ...], inner: int | None, folded: tuple[int, ...], threads: int, vector: int
) -> None:
    layout = dealt(
        [Axis(i, n, None) for i, n in enumerate(extents)], inner, folded, threads, vector
    )
    dims = [layout.dim(i) for i in range(len(extents))]
    registers = [range(d.registers) for d in dims]
    held = {
        t: {
            tuple(place(d, r, t) for d, r in zip(dims, regs, strict=True))
            for regs in itertools.product(*registers)
        }
        for t in range(threads)
    }
    everything = set().union(*held.values())
    assert set(itertools.product(*map(range, extents))) <= everything
    for axis in folded:
        dim = dims[axis]
        for t in range(0, threads, 7):
            joined = {place(dim, r, p) for p in partners(dim, t) for r in range(dim.registers)}
            assert joined == {
                place(dim, r, p) for p in range(threads) for r in range(dim.registers)
            }
            others = [d for i, d in enumerate(dims) if i != axis]
            for p in partners(dim, t):  # those that are joined differ along this axis alone
                assert all(place(d, 0, p) == place(d, 0, t) for d in others)


@pytest.mark.parametrize("extent", [8, 24, 64])
def test_fragment_folds_join_lanes_of_one_row_or_column(extent: int) -> None:
    rows, columns = row_dim(Axis(0, 16, None), 1, 1), column_dim(Axis(1, extent, None), 8)
    for t in range(32):
        along = partners(columns, t)
        assert {place(columns, q, p) for p in along for q in range(columns.registers)} == set(
            range(extent)
        )
        assert {place(rows, 0, p) for p in along} == {place(rows, 0, t)}
        down = partners(rows, t)
        assert {place(rows, r, p) for p in down for r in range(2)} == set(range(16))
        assert {place(columns, 0, p) for p in down} == {place(columns, 0, t)}


@pytest.mark.parametrize(("tiles", "warps"), [(1, 4), (1, 8), (2, 4), (2, 8)])
def test_four_warps_hold_64_rows_of_a_tile_together(tiles: int, warps: int) -> None:
    """As wgmma lays its results: warp i of four has rows 16 i to 16 i + 15 of every 64."""
    extent = 16 * tiles * warps
    rows = row_dim(Axis(0, extent, None), tiles, warps, True)
    columns = column_dim(Axis(1, 8, None), 8)
    seen = []
    for t, r in itertools.product(range(32 * warps), range(rows.registers)):
        row = place(rows, r, t, warps)
        assert row % 64 // 16 == t // 32 % 4
        seen += [(row, place(columns, q, t, warps)) for q in range(columns.registers)]
    assert sorted(seen) == sorted(itertools.product(range(extent), range(8)))


def chunk_at(rows: int, row: int, chunk: int) -> int:
    """`ob_place<rows, 0>` of copy.cuh, in units of 16 bytes."""
    return (chunk // 8) * rows * 8 + row * 8 + ((chunk ^ row) & 7)


def test_swizzled_tiles_hold_every_chunk_once_and_spread_columns_over_banks() -> None:
    rows, chunks = 32, 16
    places = [chunk_at(rows, r, c) for r in range(rows) for c in range(chunks)]
    assert sorted(places) == list(range(rows * chunks))
    for c in range(chunks):  # eight rows of a column, as ldmatrix reads them
        assert len({chunk_at(rows, r, c) % 8 for r in range(8)}) == 8


@pytest.mark.parametrize("along", range(8))
def test_fragments_of_swizzled_tiles_are_where_the_copies_put_them(along: int) -> None:
    """The emitter xors the step of 16 columns into a lane's address (`Products.spot`)."""
    rows = 64
    for lane in range(32):
        row, half = ((lane >> 3) & 1) * 8 + (lane & 7), lane >> 4
        at = row * 128 + ((half ^ lane) & 7) * 16
        got = (at ^ (along % 4 * 32)) + along // 4 * rows * 128
        assert got == chunk_at(rows, row, 2 * along + half) * 16
