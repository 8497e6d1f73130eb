"""Block graphs: the work of one thread block, as an interned value, and the analysis of its loop
and
tiles.

A block graph has a grid (up to three axes), a loop count, a number of threads and stores. Its body
is found by walking from the stores to the loads. `analyse` checks the rules of the level and says,
for each value, when it is computed (before or in every iteration, in the loop, after it) and how
each of its dims was cut.
"""

from __future__ import annotations

import enum
import weakref
from dataclasses import dataclass
from functools import cached_property
from math import prod

from obelisk.base.digest import digest
from obelisk.base.errors import MalformedGraph
from obelisk.ir.dtype import DType
from obelisk.ir.node import Node, Shape, topological
from obelisk.ir.op import LoadAttrs, Op, SizeScope

GRID_AXES = 3


class Reduce(enum.Enum):
    """How the blocks along grid axes that a store does not map combine."""

    NONE = "none"
    SUM = "sum"
    MAX = "max"


class Phase(enum.Enum):
    """When a block-level value exists."""

    INVARIANT = "invariant"  # the same in every iteration; usable everywhere
    LOOP = "loop"  # one value per iteration
    POST = "post"  # after the loop


@dataclass(frozen=True, slots=True)
class Split:
    """How a tile's dim came from a kernel tensor's dim of extent `full`: cut by a grid axis, then
    by the loop.
    """

    full: int
    axis: int | None
    loop: bool


@dataclass(frozen=True, slots=True)
class Store:
    """One result of a block graph.

    `omap[a]` is the dim that blocks along grid axis `a` are laid side by side in; None asks that
    the axis has extent 1 or that `reduce` folds it. `fmap` is the dim that loop iterations are laid
    side by side in (only for a value of the loop). `dtype` is what device memory holds.
    """

    value: Node
    omap: tuple[int | None, ...]
    fmap: int | None
    reduce: Reduce
    dtype: DType


class BlockGraph:
    """An interned block graph; build it with `BlockBuilder` or `block_graph`.

    Attributes:
        grid: number of blocks along each axis (one to three).
        loop: number of loop iterations (1: no loop).
        threads: threads of a block (a hint on a CPU).
        stores: the results, in order.
    """

    grid: tuple[int, ...]
    loop: int
    threads: int
    stores: tuple[Store, ...]

    @cached_property
    def info(self) -> BlockInfo:
        """The analysis of this graph (computed once)."""
        return analyse(self.grid, self.loop, self.stores)

    @cached_property
    def digest(self) -> str:
        """Content digest."""
        parts = [
            f"{s.value.digest}|{s.omap}|{s.fmap}|{s.reduce.value}|{s.dtype}" for s in self.stores
        ]
        return digest("block", str(self.grid), str(self.loop), str(self.threads), *parts)

    @cached_property
    def body(self) -> tuple[Node, ...]:
        """All nodes, operands first."""
        return tuple(topological([s.value for s in self.stores]))

    @cached_property
    def loads(self) -> tuple[Node, ...]:
        """The load nodes in body order."""
        return tuple(n for n in self.body if n.op is Op.LOAD)

    @property
    def blocks(self) -> int:
        """Number of blocks in the grid."""
        return prod(self.grid)

    def __repr__(self) -> str:
        counts = f"nodes={len(self.body)} stores={len(self.stores)}"
        return f"<block grid={self.grid} loop={self.loop} {counts}>"


_BLOCKS: weakref.WeakValueDictionary[object, BlockGraph] = weakref.WeakValueDictionary()


def block_graph(
    grid: tuple[int, ...], loop: int, threads: int, stores: tuple[Store, ...]
) -> BlockGraph:
    """The interned block graph; raises `MalformedGraph` when it breaks a rule of the level."""
    key = (grid, loop, threads, stores)
    found = _BLOCKS.get(key)
    if found is not None:
        return found
    graph = BlockGraph.__new__(BlockGraph)
    graph.grid, graph.loop, graph.threads, graph.stores = grid, loop, threads, stores
    _ = graph.info  # checks
    _BLOCKS[key] = graph
    return graph


@dataclass(frozen=True)
class BlockInfo:
    """What `analyse` found.

    Attributes:
        params: shape and dtype of each kernel tensor the block reads, by index.
        phase: when each node exists.
        splits: per node and dim, how the dim was cut (None: whole, or of no single origin).
        shapes: full shape of each store's result.
        ragged: True when some tile is short in some block or iteration.
    """

    params: tuple[tuple[Shape, DType], ...]
    phase: dict[Node, Phase]
    splits: dict[Node, tuple[Split | None, ...]]
    shapes: tuple[Shape, ...]
    ragged: bool


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def tile_extent(full: int, parts: int, loop: int) -> int:
    """Extent of a tile: `full` cut by `parts` blocks, then by `loop` iterations, rounded up each
    time.
    """
    return ceil_div(ceil_div(full, parts), loop)


def load_tile(attrs: LoadAttrs) -> Shape:
    """Shape of the full tile of a load; raises `MalformedGraph` for maps that are out of range or
    overlap.
    """
    rank, grid = len(attrs.full), attrs.grid
    if not 1 <= len(grid) <= GRID_AXES or min(grid) < 1 or attrs.loop < 1:
        raise MalformedGraph(
            f"grid {grid} and loop {attrs.loop}: expected 1 to 3 axes, all at least 1"
        )
    if len(attrs.imap) != len(grid):
        raise MalformedGraph(
            f"imap {attrs.imap} has {len(attrs.imap)} entries for {len(grid)} grid axes"
        )
    used = [d for d in attrs.imap if d is not None]
    for d in [*used, *([] if attrs.fmap is None else [attrs.fmap])]:
        if not 0 <= d < rank:
            raise MalformedGraph(f"load of shape {attrs.full}: mapped dim {d} does not exist")
    if len(set(used)) != len(used):
        raise MalformedGraph(f"imap {attrs.imap}: two grid axes split one dim")
    return tuple(
        tile_extent(
            n,
            next((grid[a] for a, m in enumerate(attrs.imap) if m == d), 1),
            attrs.loop if attrs.fmap == d else 1,
        )
        for d, n in enumerate(attrs.full)
    )


def is_ragged(split: Split | None, tile: int, grid: tuple[int, ...], loop: int) -> bool:
    """True when some tile along this dim is shorter than `tile`."""
    if split is None:
        return False
    parts = (grid[split.axis] if split.axis is not None else 1) * (loop if split.loop else 1)
    return tile * parts != split.full


def analyse(grid: tuple[int, ...], loop: int, stores: tuple[Store, ...]) -> BlockInfo:
    """Check a block graph and describe it. Raises `MalformedGraph` with the value and the rule that
    it breaks.
    """
    from obelisk.ir.splits import propagate  # the per-operator rules; a module of their own

    if not stores:
        raise MalformedGraph("a block graph needs at least one store")
    body = topological([s.value for s in stores])
    params: dict[int, tuple[Shape, DType]] = {}
    phase: dict[Node, Phase] = {}
    splits: dict[Node, tuple[Split | None, ...]] = {}
    ragged = False
    for node in body:
        if node.op is Op.LOAD:
            attrs: LoadAttrs = node.attrs
            if attrs.grid != grid or attrs.loop != loop:
                raise MalformedGraph(
                    f"load {attrs.index} was cut for grid {attrs.grid} loop {attrs.loop}, "
                    f"but the block has grid {grid} loop {loop}"
                )
            seen = params.setdefault(attrs.index, (attrs.full, attrs.dtype))
            if seen != (attrs.full, attrs.dtype):
                raise MalformedGraph(
                    f"load {attrs.index} is declared as {seen} and as {(attrs.full, attrs.dtype)}"
                )
        elif node.op in (Op.INPUT, Op.BLOCK, Op.ELEM):
            raise MalformedGraph(f"{node.op.value} cannot occur inside a block graph")
        for inner in node.attrs.thread.body if node.op is Op.THREAD else (node,):
            _check_size(inner, loop)
        phase[node] = _phase(node, phase)
        splits[node] = propagate(node, splits, phase, grid, loop)
        if any(is_ragged(s, t, grid, loop) for s, t in zip(splits[node], node.shape, strict=True)):
            ragged = True
    if sorted(params) != list(range(len(params))):
        raise MalformedGraph(
            f"loads must number the kernel's inputs 0..n-1, found {sorted(params)}"
        )
    shapes = tuple(_store_shape(s, phase[s.value], splits[s.value], grid, loop) for s in stores)
    return BlockInfo(tuple(params[i] for i in range(len(params))), phase, splits, shapes, ragged)


def _check_size(node: Node, loop: int) -> None:
    if node.op is Op.SIZE and node.attrs.scope is SizeScope.LOOP and node.attrs.loop != loop:
        raise MalformedGraph(
            f"size was taken for loop {node.attrs.loop}, but the block has loop {loop}"
        )


_ACCUMULATORS = (Op.ACCUM_SUM, Op.ACCUM_MAX, Op.ACCUM_RESCALE)


def _phase(node: Node, phase: dict[Node, Phase]) -> Phase:
    """When a value exists, from its operands. Raises where a value of the loop meets one from after
    it.
    """
    if node.op is Op.LOAD:
        return Phase.INVARIANT if node.attrs.fmap is None else Phase.LOOP
    if node.op is Op.SIZE:
        return Phase.INVARIANT
    kinds = {phase[i] for i in node.inputs}
    if node.op in _ACCUMULATORS or node.op is Op.RUNNING_MAX:
        if Phase.POST in kinds:
            raise MalformedGraph(f"{node.op.value} of a value that exists only after the loop")
        if node.op is Op.ACCUM_RESCALE and node.inputs[1].op is not Op.RUNNING_MAX:
            raise MalformedGraph("accum_rescale: its second operand must be a running_max")
        return Phase.LOOP if node.op is Op.RUNNING_MAX else Phase.POST
    if {Phase.LOOP, Phase.POST} <= kinds:
        raise MalformedGraph(
            f"{node.op.value} joins a value of the loop with one from after it; close it first"
        )
    for kind in (Phase.POST, Phase.LOOP):
        if kind in kinds:
            return kind
    return Phase.INVARIANT


def _store_shape(
    store: Store, phase: Phase, splits: tuple[Split | None, ...], grid: tuple[int, ...], loop: int
) -> Shape:
    """Full shape of a result; raises where the blocks' parts overlap or leave a gap."""
    value = store.value
    if len(store.omap) != len(grid):
        raise MalformedGraph(
            f"omap {store.omap} has {len(store.omap)} entries for {len(grid)} grid axes"
        )
    if phase is Phase.LOOP and store.fmap is None and loop > 1:
        raise MalformedGraph(
            "a value of the loop is stored without a loop map or an accumulator: iterations overlap"
        )
    if phase is not Phase.LOOP and store.fmap is not None:
        raise MalformedGraph("a loop map on a value that is not of the loop")
    mapped: dict[int, int] = {}
    for a, d in enumerate(store.omap):
        if d is None:
            if grid[a] > 1 and store.reduce is Reduce.NONE:
                raise MalformedGraph(
                    f"grid axis {a} of {grid[a]} blocks is not mapped by the store: blocks overlap"
                )
            continue
        if not 0 <= d < value.rank:
            raise MalformedGraph(
                f"omap {store.omap}: dim {d} of a value of rank {value.rank} does not exist"
            )
        if d in mapped:
            raise MalformedGraph(f"omap {store.omap}: two grid axes are laid along one dim")
        mapped[d] = a
    if store.fmap is not None and not 0 <= store.fmap < value.rank:
        raise MalformedGraph(f"store loop map {store.fmap}: no such dim in rank {value.rank}")
    shape = []
    for d, tile in enumerate(value.shape):
        axis, in_loop, split = mapped.get(d), store.fmap == d, splits[d]
        if split is not None and (split.axis, split.loop) == (axis, in_loop):
            shape.append(split.full)
            continue
        if is_ragged(split, tile, grid, loop):
            raise MalformedGraph(
                f"store dim {d} is cut as {split} but laid out by axis {axis}: tiles leave a gap"
            )
        shape.append(tile * (grid[axis] if axis is not None else 1) * (loop if in_loop else 1))
    return tuple(shape)
