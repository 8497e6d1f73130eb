"""How much fast memory a block needs, and whether a machine can hold it.

Takes block graphs; gives bytes, or the name of the limit that is broken. Peak live bytes come from
lifetimes in three phases (before the loop, one iteration, after it), so a layout that reuses
storage can reach them. Narrow floats are computed in f32 inside a block, so a computed value counts
4 bytes an element; a load counts its own dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from obelisk.ir.block import BlockGraph, Phase
from obelisk.ir.dtype import DType
from obelisk.ir.graph import VIEWS
from obelisk.ir.node import Node
from obelisk.ir.op import Op
from obelisk.ir.table import TABLE, Kind
from obelisk.machine.description import Machine, MachineKind

SCALARS = frozenset({Op.CONST, Op.SIZE, Op.IOTA})  # made where they are used: no storage
ELEMENTWISE = frozenset({Kind.UNARY, Kind.BINARY, Kind.TERNARY})
CLOSING = frozenset({Op.ACCUM_SUM, Op.ACCUM_MAX, Op.ACCUM_RESCALE})
IN_PLACE = frozenset({DType.F32, DType.F64, DType.I32, DType.BOOL})  # computed as they are loaded
REGISTERS_FOR_TILES = 192  # of the 255 of a thread; the rest holds addresses and fragments


@dataclass(frozen=True, slots=True)
class Residence:
    """Where a block's bytes are.

    Attributes:
        peak: peak live bytes of tiles and accumulators together.
        tiles: the same when the accumulators live in registers.
        accumulators: bytes of the loop's accumulators.
    """

    peak: int
    tiles: int
    accumulators: int


def value_bytes(node: Node) -> int:
    """Bytes of one full tile: loads in their own dtype, computed values in the accumulator type,
    bool in 1 byte.
    """
    if node.op in SCALARS:
        return 0
    if node.op is Op.LOAD or node.dtype is DType.BOOL:
        return node.nbytes
    return node.elements * node.dtype.accumulator.bits // 8


def in_place(node: Node) -> bool:
    """Whether a result may overwrite an operand: element i depends on element i alone."""
    if node.op is Op.THREAD:
        body = node.attrs.thread.body
        return all(TABLE[n.op].kind in ELEMENTWISE or TABLE[n.op].kind is Kind.LEAF for n in body)
    return TABLE[node.op].kind in ELEMENTWISE


def footprint(block: BlockGraph) -> int:
    """Peak live bytes of the block's tiles, accumulators included.

    A value lives from its computation to its last reader. Views (reshape, transpose, broadcast,
    slice) share their operand's storage, an elementwise result takes over an operand of its size
    that it is the last to read, and a product that only one sum accumulator reads is added in
    place. Accumulators live through the loop, a running maximum keeps two copies (the last
    iteration's and this one's), and invariant values that only the end reads are made there. Stores
    are made as soon as their value exists.
    """
    return residence(block).peak


@lru_cache(maxsize=4096)
def residence(block: BlockGraph) -> Residence:
    """`footprint`, with and without the accumulators."""
    life = lifetimes(block)
    accumulators = sum(life.size[n] for n in life.closing)
    before, inside, after = _phases(life, life.size)
    peak = tiles = max(before, inside, after)
    if accumulators:
        late = {n: 0 if n.op in CLOSING else life.size[n] for n in life.late}
        tiles = max(before, inside - accumulators, _peak(life, life.size, life.after, late, set()))
    return Residence(peak, tiles, accumulators)


@lru_cache(maxsize=4096)
def arena(block: BlockGraph) -> int:
    """Peak live bytes on a CPU, which reads loads where they lie: computed values, and loads of
    narrow dtypes once they are widened to f32.
    """
    life = lifetimes(block)
    sizes = dict(life.size)
    for node in block.loads:
        sizes[node] = 0 if node.dtype in IN_PLACE else 4 * node.elements
    return max(_phases(life, sizes))


def _phases(life: Lifetimes, sizes: Mapping[Node, int]) -> tuple[int, int, int]:
    """Peaks before the loop, in an iteration and after it."""
    held = {n: sizes[n] for n in (*life.kept, *life.closing)}
    held |= {n: 2 * sizes[n] for n in life.states}
    late = {n: sizes[n] for n in life.late}
    return (
        _peak(life, sizes, life.before, {}, set(life.kept)),
        _peak(life, sizes, life.inside, held, set(held)),
        _peak(life, sizes, life.after, late, set()),
    )


@lru_cache(maxsize=256)
def lifetimes(block: BlockGraph) -> Lifetimes:
    """The lifetimes of a block's values; `footprint` and `work` ask one after the other."""
    return Lifetimes(block)


class Lifetimes:
    """Who reads what in which phase.

    Attributes:
        root: the value whose storage a value uses: a view's is its operand's.
        readers: for each value with storage of its own, what reads it, through views.
        reads: for each value with storage of its own, the stored values that it reads.
        size: bytes of each such value that it must be given when it is computed.
        before, inside, after: values by phase, operands first.
        kept: values made before the loop and read in it or after it.
        late: accumulators and kept values that the end reads.
        closing, states: accumulators and running maxima.
        stored: values that leave the block.
    """

    def __init__(self, block: BlockGraph) -> None:
        phase = block.info.phase
        self.root: dict[Node, Node] = {}
        root = self.root
        self.readers: dict[Node, list[Node]] = {}
        readers = self.readers
        self.reads: dict[Node, tuple[Node, ...]] = {}
        for node in block.body:
            op = node.op
            if op in VIEWS:
                root[node] = root[node.inputs[0]]
                continue
            root[node] = node
            readers[node] = []
            # `size` asks for an extent, not for elements.
            reads = () if op is Op.SIZE else tuple({root[i]: None for i in node.inputs})
            self.reads[node] = reads
            for i in reads:
                readers[i].append(node)
        self.closing = [n for n in readers if n.op in CLOSING]
        self.states = [n for n in readers if n.op is Op.RUNNING_MAX]
        self.inside = [n for n in readers if phase[n] is Phase.LOOP or n.op in CLOSING]
        loop, before = set(self.inside), set[Node]()
        for node in reversed(readers):  # invariant values that the loop reads, at any remove
            if phase[node] is Phase.INVARIANT and any(
                r in loop or r in before for r in readers[node]
            ):
                before.add(node)
        self.before = [n for n in readers if n in before]
        self.after = [n for n in readers if n not in before and n not in loop]
        self.kept = [n for n in self.before if any(r not in before for r in readers[n])]
        late = set(self.after)
        self.late = [n for n in (*self.kept, *self.closing) if any(r in late for r in readers[n])]
        self.stored = {root[s.value] for s in block.stores}
        self.size = {n: value_bytes(n) for n in readers}
        for node, by in readers.items():
            summed = len(by) == 1 and by[0].op is Op.ACCUM_SUM and node.op is Op.MATMUL
            if summed and node not in self.stored:
                self.size[node] = 0  # added to the accumulator in place


def _peak(
    life: Lifetimes,
    sizes: Mapping[Node, int],
    steps: Sequence[Node],
    held: Mapping[Node, int],
    pinned: set[Node],
) -> int:
    """Peak of one phase: `held` is live at its start, `pinned` values never die in it."""
    reads = life.reads
    last = {o: t for t, node in enumerate(steps) for o in reads[node]}
    live = dict(held)
    now = peak = sum(held.values())
    for t, node in enumerate(steps):
        dying = [o for o in reads[node] if last[o] == t and o in live and o not in pinned]
        size = 0 if node in live else sizes[node]
        if size and node.op not in CLOSING:
            heir = None
            if in_place(node):  # a view may permute elements: only operands that are read as is
                through = {life.root[i] for i in node.inputs if i.op in VIEWS}
                heir = next((o for o in dying if live[o] == size and o not in through), None)
            if heir is not None:
                dying.remove(heir)
                del live[heir]
            else:
                now += size
                peak = max(peak, now)
            live[node] = size
            if node not in last and node not in pinned:
                dying.append(node)  # stored at once, read by nobody here
        for o in dying:
            now -= live.pop(o)
    return peak


def capacity(block: BlockGraph, machine: Machine) -> str | None:
    """Why `block` does not fit `machine`, naming the limit, or None when it fits.

    CUDA: threads of a block, accumulators in registers (else in shared memory with everything
    else), shared memory per block (opt-in). CPU: computed values in a core's share of the last
    cache; loads are read where they lie.
    """
    limit = machine.shared_bytes
    name = f"{machine.name} ({machine.arch})"
    if machine.kind is MachineKind.CPU:
        size = arena(block)
        if size <= limit:
            return None
        return f"cache: tiles need {size} bytes at once, a core of {name} has {limit} of its last"
    need = residence(block)
    if block.threads > machine.threads_per_block:
        return f"threads: {block.threads} in a block, {name} allows {machine.threads_per_block}"
    if block.threads % machine.warp:
        return f"threads: {block.threads} in a block is no multiple of the warp of {machine.warp}"
    if need.peak <= limit:
        return None
    per_thread = min(
        REGISTERS_FOR_TILES, machine.registers_per_thread, machine.registers // block.threads
    )
    registers = -(-need.accumulators // (4 * block.threads))
    if registers <= per_thread and need.tiles <= limit:
        return None
    if need.tiles <= limit:
        return (
            f"registers: accumulators need {registers} a thread of {per_thread} at {block.threads} "
            f"threads, and with them shared memory needs {need.peak} of {limit} bytes on {name}"
        )
    return f"shared memory: tiles need {need.tiles} bytes at once, a block on {name} has {limit}"
