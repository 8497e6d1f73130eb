"""Bytes that a launch moves between device memory, caches and its blocks.

Takes a block graph, the layouts of its operands and a machine; gives a `Traffic`. A tile that
several blocks read is read from device memory once if the bytes touched between two reads of it fit
a cache, else each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from obelisk.ir.block import BlockGraph, Reduce
from obelisk.ir.build import row_major
from obelisk.ir.node import Node
from obelisk.ir.op import LoadAttrs, Op
from obelisk.machine.description import Machine, MachineKind

CACHE_SHARE = 0.5  # of a cache that one launch can count on

INPUT_SHARE = 0.25  # of a cache: inputs that fill no more stay in it between calls
RESULT_SHARE = 0.125  # of a cache: a result that fills no more is there for the next launch
WRITE_FACTOR = 2.0  # a CPU reads a line of memory before it writes part of it


@dataclass(frozen=True, slots=True)
class Operand:
    """A kernel tensor as a launch sees it.

    Attributes:
        strides: elements between neighbours, by dim (0: broadcast).
        cached: an earlier launch of the same graph left it in the last cache.
    """

    strides: tuple[int, ...]
    cached: bool


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes by where they come from.

    Attributes:
        memory: between device memory and the chip (reads and writes, whole cache lines).
        cache: served by the last cache.
        near: served by a core's own cache (CPU L2).
        useful: bytes asked for, each element once.
    """

    memory: float
    cache: float
    near: float
    useful: float


@lru_cache(maxsize=16384)
def strides_of(node: Node) -> tuple[int, ...]:
    """Element strides of a kernel-level value: inputs as declared, views as they follow, everything
    else row-major.
    """
    match node.op:
        case Op.INPUT:
            return node.attrs.strides or row_major(node.shape)
        case Op.TRANSPOSE:
            inner = strides_of(node.inputs[0])
            return tuple(inner[p] for p in node.attrs.perm)
        case Op.SLICE:
            return strides_of(node.inputs[0])
        case Op.BROADCAST:
            source = node.inputs[0]
            pad = node.rank - source.rank
            inner = strides_of(source)
            return (0,) * pad + tuple(
                s if source.shape[d] == node.shape[d + pad] else 0 for d, s in enumerate(inner)
            )
    return row_major(node.shape)


@lru_cache(maxsize=16384)
def run_length(
    tile: tuple[int, ...], full: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[int, int]:
    """Elements of a tile that lie side by side in memory, and from one such run to the next.

    The second is 0 for a tile of one run: the next block or iteration mostly goes on where it ends.
    """
    run, cut = 1, False
    for s, t, n in sorted(zip(strides, tile, full, strict=True)):
        if t == 1 or s == 0:
            cut = cut or n > 1
        elif cut or s != run:
            return run, s
        else:
            run *= t
            cut = t != n
    return run, 0


@lru_cache(maxsize=16384)
def line_factors(run: float, step: float, kind: MachineKind) -> tuple[float, float]:
    """Bytes moved, in streaming time, per useful byte of runs that start `step` bytes apart (0: one
    run), from memory and from a cache.

    Whole lines are moved. On a CPU the prefetcher starts anew with each run and each page: the
    constants fit reads of an f32 matrix in strips of 8 to 1024 columns on Zen 3. From memory (64
    MB) they ran at 0.15 to 0.6 of the rate of whole rows, from the last cache (4 MB) at 0.3 for 32
    bytes, 0.7 for 64 and the full rate from 128 bytes on.
    """
    on_cpu = kind is MachineKind.CPU
    line = 64 if on_cpu else 32
    lines = up(run, line) / run
    if step:
        lines = min(lines, max(1.0, step / run))  # several runs of one line move it once
    if not on_cpu or not step:
        return lines, lines
    page = min(1.0, step / 4096)
    restart = 1.1 * min(1.0, 2048 / run) + 3.3 * (64 / max(run, 64)) ** 1.6
    # Part of a line that a neighbour reads soon is often still there: the root of the waste.
    return lines**0.5 * (1 + page * restart), lines * (1 + 0.4 * page * (run <= 64))


def up(value: float, to: int) -> float:
    """`value` rounded up to a multiple of `to`."""
    return float(-(-value // to) * to)


def _block_reads(block: BlockGraph) -> list[tuple[LoadAttrs, Node, float]]:
    """Each load with the bytes one block reads through it."""
    out = []
    for load in block.loads:
        at: LoadAttrs = load.attrs
        times = at.loop if at.fmap is not None else 1
        out.append((at, load, float(load.nbytes * times)))
    return out


def launch_traffic(block: BlockGraph, operands: tuple[Operand, ...], machine: Machine) -> Traffic:
    """Traffic of a launch. `operands[i]` describes kernel tensor number i."""
    reads = _block_reads(block)
    per_block = sum(r for _, _, r in reads)
    grid = block.grid
    last = machine.last_cache * CACHE_SHARE
    near_cache = machine.cache(2) if machine.kind is MachineKind.CPU else None
    near_size = near_cache.size * CACHE_SHARE if near_cache else 0.0
    params = block.info.params
    unique_all = float(sum(_bytes(shape, dtype.bits) for shape, dtype in params))
    memory = cache = near = useful = 0.0
    seen: set[int] = set()
    for at, load, _ in reads:
        unique = _bytes(at.full, at.dtype.bits)
        operand = operands[at.index]
        mapped = {a for a, d in enumerate(at.imap) if d is not None}
        total = float(unique)
        for a, g in enumerate(grid):
            if a not in mapped:
                total *= g
        width = at.dtype.nbytes
        run, step = run_length(load.shape, at.full, operand.strides)
        slow, quick = line_factors(run * width, step * width, machine.kind)
        left = total
        for a in reversed(range(len(grid))):
            if a in mapped or grid[a] == 1:
                continue
            # Reads of this tile by the blocks of axis `a` lie this many bytes of other reads apart.
            faster = 1
            for g in grid[a + 1 :]:
                faster *= g
            apart = min(per_block * faster, unique_all)
            again = left * (1 - 1 / grid[a])
            if apart <= near_size:
                near += again
            elif apart <= last or unique_all <= last:
                cache += again * quick
            else:
                memory += again * slow
            left -= again
        useful += unique if at.index not in seen else 0
        if operand.cached or (at.index in seen and unique_all <= last):
            cache += left * quick
        else:
            memory += left * slow
        seen.add(at.index)
    for store, shape in zip(block.stores, block.info.shapes, strict=True):
        size = _bytes(shape, store.dtype.bits)
        useful += size
        if store.reduce is not Reduce.NONE:
            # Partial results go out and come back once per block along the folded axes.
            folded = 1
            for a, d in enumerate(store.omap):
                folded *= grid[a] if d is None else 1
            cache += 2.0 * size * folded
        width = store.dtype.nbytes
        run, step = run_length(store.value.shape, shape, row_major(shape))
        slow, quick = line_factors(run * width, step * width, machine.kind)
        if size <= machine.last_cache * RESULT_SHARE and machine.kind is MachineKind.CPU:
            cache += size * quick
        else:
            memory += size * slow * (WRITE_FACTOR if machine.kind is MachineKind.CPU else 1.0)
    return Traffic(memory, cache, near, useful)


def _bytes(shape: tuple[int, ...], bits: int) -> int:
    n = 1
    for s in shape:
        n *= s
    return (n * bits + 7) // 8
