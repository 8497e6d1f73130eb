"""How a tile's elements are dealt to the registers of a block's threads.

A `Layout` gives for each axis how many registers of a thread run along it, the element index of
register `{r}` in this thread, and which threads hold other elements of the axis. The fragments of
the matrix instructions and the plain dealing of rows and vectors to threads are all of this form,
so elementwise operators, folds, loads and stores are printed once for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from obelisk.base.errors import Infeasible
from obelisk.lower.cuda.axes import Axis

WARP = 32
SHORT_FOLD = 8
REGISTER_LIMIT = 160  # values of one tile in a thread; more would spill


@dataclass(frozen=True, slots=True)
class Dim:
    """One axis in a layout.

    Attributes:
        axis: the axis.
        registers: registers of a thread along it.
        index: text of the element index of register {r} in this thread.
        lanes: first and last distance (powers of two) between lanes of a warp that hold its other
            elements; (0, 0): none.
        warps: number of warps that hold its other elements, and the distance between them.
        lead: text that is true in the threads that hold its first elements ("": all).
        vector: neighbouring registers that are neighbouring elements, aligned to their number.
        exact: registers and threads hold exactly the axis' extent.
    """

    axis: Axis
    registers: int
    index: str
    lanes: tuple[int, int]
    warps: tuple[int, int]
    lead: str
    vector: int
    exact: bool


def up(n: int, to: int) -> int:
    """`n` rounded up to a multiple of `to`."""
    return -(-n // to) * to


def row_dim(axis: Axis, tiles: int, warps: int, wide: bool = False) -> Dim:
    """Rows of a product's result: `tiles` tiles of 16 rows in each of `warps` warps. With `wide`
    four warps in a row hold 64 rows of a tile together.
    """
    base = f"({{r}} >> 1) * {64 if wide else 16} + ({{r}} & 1) * 8 + (lane >> 2)"
    if wide:
        base = f"(warp_row >> 2) * {tiles * 64} + (warp_row & 3) * 16 + " + base
    elif warps > 1:
        base = f"warp_row * {tiles * 16} + " + base
    lead = "lane < 4" + (" && warp_row == 0" if warps > 1 else "")
    return Dim(
        axis, 2 * tiles, base, (4, 16), (warps, 1), lead, 1, axis.extent == 16 * tiles * warps
    )


def column_dim(axis: Axis, step: int, warps: int = 1) -> Dim:
    """Columns of a product's result, or the depth of its right operand. `warps` share them."""
    n = up(axis.extent, step) // warps
    index = "({r} >> 1) * 8 + (lane & 3) * 2 + ({r} & 1)"
    if warps > 1:
        index = f"warp_column * {n} + " + index
    return Dim(
        axis, n // 4, index, (1, 2), (warps, 1), "(lane & 3) == 0", 2, n * warps == axis.extent
    )


def right_dim(axis: Axis, warps: int = 1) -> Dim:
    """Columns of a product's right operand. `warps` share them."""
    n = up(axis.extent, 8) // warps
    index = "{r} * 8 + (lane >> 2)"
    if warps > 1:
        index = f"warp_column * {n} + " + index
    return Dim(axis, n // 8, index, (4, 16), (warps, 1), "lane < 4", 1, n * warps == axis.extent)


@dataclass(frozen=True, slots=True)
class Layout:
    """A dealing of axes to threads. `order` lists the axes, the one with vectors last; `idle`: not
    all threads hold elements of their own; `apart`: long folds in a thread are kept in parts.
    """

    name: str
    dims: Mapping[int, Dim]
    order: tuple[int, ...]
    idle: bool = False
    apart: bool = False

    def __hash__(self) -> int:
        return hash((self.name, self.order))

    def dim(self, axis: int) -> Dim:
        """How an axis is dealt; raises `Infeasible` where the layout does not have it."""
        if axis not in self.dims:
            raise Infeasible(f"axis {axis} has no place in the layout {self.name!r}")
        return self.dims[axis]

    def sorted(self, axes: Sequence[int]) -> tuple[int, ...]:
        """Axes in the layout's order."""
        for a in axes:
            self.dim(a)
        return tuple(a for a in self.order if a in axes)


def dealt(
    axes: Sequence[Axis], inner: int | None, folded: Sequence[int], threads: int, vector: int
) -> Layout:
    """Axes dealt to threads with no product in mind: the contiguous axis `inner` in vectors over
    neighbouring threads, then the axes that are kept, then the folded ones.
    """
    by_number = {a.number: a for a in axes}
    rest = [a.number for a in axes if a.number != inner]
    rest.sort(key=lambda n: (n in folded, -by_number[n].extent, n))
    order = ([inner] if inner is not None else []) + rest
    dims: dict[int, Dim] = {}
    stride, left = 1, threads
    for number in order:
        axis = by_number[number]
        v = vector if number == inner else 1
        need = -(-axis.extent // v)
        parts = 1
        # A short fold within a thread costs less than one across warps.
        while (
            not (number in folded and axis.extent <= SHORT_FOLD)
            and parts < need
            and parts * 2 <= left
        ):
            parts *= 2
        groups = -(-need // parts)
        place = f"thread / {stride} % {parts}" if parts > 1 else "0"
        if v > 1:
            index = f"(({{r}} / {v}) * {parts} + ({place})) * {v} + {{r}} % {v}"
        else:
            index = f"{{r}} * {parts} + ({place})"
        top = stride * parts
        lanes = (stride, min(top, WARP) // 2) if parts > 1 and stride < WARP else (0, 0)
        warps = (top // max(stride, WARP), max(stride, WARP) // WARP) if top > WARP else (1, 1)
        lead = f"({place}) == 0" if parts > 1 else ""
        exact = groups * parts * v == axis.extent
        dims[number] = Dim(axis, groups * v, index, lanes, warps, lead, v, exact)
        stride *= parts
        left //= parts
    layout_order = tuple(n for n in order if n != inner) + ((inner,) if inner is not None else ())
    idle = f"thread / {stride} == 0" if left > 1 else ""
    name = f"dealt {threads}" + (f" {idle}" if idle else "")
    return Layout(name, dims, layout_order, bool(idle))
