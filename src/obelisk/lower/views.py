"""Affine views: how structural operators become strides, with no element moved.

Takes and gives `View`s and (shape, strides) pairs. Every function either returns the exact view or
None where the result is no affine view of the operand and must be copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from obelisk.ir.node import common_ends
from obelisk.ir.op import BroadcastAttrs, ReshapeAttrs, SliceAttrs, TransposeAttrs
from obelisk.lower.tile import Access, Extent, View


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """Element strides of a dense row-major tensor."""
    out: list[int] = []
    step = 1
    for n in reversed(sizes):
        out.append(step)
        step *= n
    return tuple(reversed(out))


def reshape_strides(
    sizes: Sequence[int], strides: Sequence[int], target: Sequence[int]
) -> tuple[int, ...] | None:
    """Strides with which the elements of (sizes, strides) in row-major order have shape `target`;
    None: no such.
    """
    old = [(n, s) for n, s in zip(sizes, strides, strict=True) if n != 1]
    out: list[int] = []
    i = 0
    todo = [n for n in target if n != 1]
    new: list[int] = []
    j = 0
    while j < len(todo):
        take_old, take_new = [old[i]], [todo[j]]
        i, j = i + 1, j + 1
        a, b = take_old[0][0], take_new[0]
        while a != b:
            if a < b:
                take_old.append(old[i])
                a *= old[i][0]
                i += 1
            else:
                take_new.append(todo[j])
                b *= todo[j]
                j += 1
        for (_, outer), (n, inner) in itertools.pairwise(take_old):
            if outer != n * inner:
                return None
        step = take_old[-1][1]
        part: list[int] = []
        for n in reversed(take_new):
            part.append(step)
            step *= n
        new.extend(reversed(part))
    at = iter(new)
    for n in target:
        out.append(next(at) if n != 1 else 0)
    return tuple(out)


def reshape(view: View, attrs: ReshapeAttrs) -> View | None:
    """Row-major reshape. Only dims outside the reshaped middle may be short (a rule of the block
    level).
    """
    a, b = view.sizes, attrs.shape
    front, back = common_ends(a, b)
    end_a, end_b = len(a) - back, len(b) - back
    middle = reshape_strides(a[front:end_a], view.strides[front:end_a], b[front:end_b])
    if middle is None:
        return None
    shape = (
        *view.shape[:front],
        *(Extent(n) for n in b[front:end_b]),
        *view.shape[end_a:],
    )
    return replace(view, shape=shape, strides=view.strides[:front] + middle + view.strides[end_a:])


def transpose(view: View, attrs: TransposeAttrs) -> View:
    """Permute dims."""
    return replace(
        view,
        shape=tuple(view.shape[p] for p in attrs.perm),
        strides=tuple(view.strides[p] for p in attrs.perm),
    )


def slice_(view: View, attrs: SliceAttrs) -> View:
    """Elements start:stop of one axis (whole, or of an axis with no short tile)."""
    d = attrs.axis
    if attrs.stop - attrs.start == view.shape[d].size:
        return view
    shape = (*view.shape[:d], Extent(attrs.stop - attrs.start), *view.shape[d + 1 :])
    return replace(view, shape=shape, offset=view.offset + attrs.start * view.strides[d])


def broadcast(view: View, attrs: BroadcastAttrs) -> View:
    """Broadcast by numpy's rule: new and stretched dims get stride 0."""
    pad = len(attrs.shape) - len(view.shape)
    shape: list[Extent] = []
    strides: list[int] = []
    for d, n in enumerate(attrs.shape):
        if d >= pad and view.shape[d - pad].size == n:
            shape.append(view.shape[d - pad])
            strides.append(view.strides[d - pad])
        else:
            shape.append(Extent(n))
            strides.append(0)
    return replace(view, shape=tuple(shape), strides=tuple(strides))


def structural(view: View, attrs: object) -> View | None:
    """The view that a structural operator with these attributes gives; None where a copy is needed
    first.
    """
    match attrs:
        case ReshapeAttrs():
            return reshape(view, attrs)
        case TransposeAttrs():
            return transpose(view, attrs)
        case SliceAttrs():
            return slice_(view, attrs)
        case BroadcastAttrs():
            return broadcast(view, attrs)
        case _:
            return None


def aligned(view: View, dims: Sequence[Extent]) -> Access:
    """`view` as operand of a chain over `dims`: dims are aligned at the right, extent 1 is
    broadcast.
    """
    pad = len(dims) - len(view.shape)
    strides = [0] * pad
    for d, e in enumerate(view.shape):
        strides.append(0 if e.size == 1 else view.strides[d])
    return Access(view.buffer, tuple(strides), view.offset, view.moves)
