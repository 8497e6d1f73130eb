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
    accumulators = sum(value_bytes(n) for n in block.body if n.op in CLOSING)
    life = _Lifetimes(block)
    return Residence(life.peak(True), life.peak(False), accumulators)


class _Lifetimes:
    """Who reads what in which phase."""

    def __init__(self, block: BlockGraph) -> None:
        body, phase = block.body, block.info.phase
        self.root: dict[Node, Node] = {}
        readers: dict[Node, list[Node]] = {}
        for node in body:
            view = node.op in VIEWS
            self.root[node] = self.root[node.inputs[0]] if view else node
            readers[node] = []
            if not view:
                for i in dict.fromkeys(self.root[i] for i in node.inputs):
                    readers[i].append(node)
        real = [n for n in body if self.root[n] is n]
        self.closing = [n for n in real if n.op in CLOSING]
        self.states = [n for n in real if n.op is Op.RUNNING_MAX]
        self.inside = [n for n in real if phase[n] is Phase.LOOP or n.op in CLOSING]
        loop = set(self.inside)
        before: set[Node] = set()  # invariant values that the loop reads, at first or second hand
        for node in reversed(real):
            if phase[node] is Phase.INVARIANT and any(
                r in loop or r in before for r in readers[node]
            ):
                before.add(node)
        self.before = [n for n in real if n in before]
        self.after = [n for n in real if n not in before and n not in loop]
        self.kept = [n for n in self.before if any(r not in before for r in readers[n])]
        late = set(self.after)
        self.late = [n for n in (*self.kept, *self.closing) if any(r in late for r in readers[n])]
        stored = {self.root[s.value] for s in block.stores}
        self.fused = {
            n
            for n in real
            if n.op is Op.MATMUL
            and [r.op for r in readers[n]] == [Op.ACCUM_SUM]
            and n not in stored
        }

    def peak(self, with_accumulators: bool) -> int:
        """The largest sum of live bytes over the three phases."""
        skip = set() if with_accumulators else set(self.closing)
        held = {n: value_bytes(n) for n in (*self.kept, *self.closing) if n not in skip}
        held |= {n: 2 * value_bytes(n) for n in self.states}
        pinned = set(held) | skip
        late = {n: value_bytes(n) for n in self.late if n not in skip}
        return max(
            self._phase(self.before, {}, set(self.kept)),
            self._phase(self.inside, held, pinned),
            self._phase(self.after, late, skip),
        )

    def _phase(self, steps: Sequence[Node], held: Mapping[Node, int], pinned: set[Node]) -> int:
        """Peak of one phase: `held` is live at its start, `pinned` values never die in it."""
        root = self.root
        last: dict[Node, int] = {}
        for t, node in enumerate(steps):
            for i in node.inputs:
                last[root[i]] = t
        live = dict(held)
        now = peak = sum(live.values())
        for t, node in enumerate(steps):
            made = (
                node in live or node in self.fused or node.op in CLOSING
            )  # storage is there already
            size = 0 if made else value_bytes(node)
            dying = [
                o
                for o in dict.fromkeys(root[i] for i in node.inputs)
                if o in live and last[o] == t and o not in pinned
            ]
            if size:
                heir = next((o for o in dying if live[o] == size), None) if in_place(node) else None
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
    else), shared memory per block (opt-in). CPU: a core's share of the last cache.
    """
    need = residence(block)
    limit = machine.shared_bytes
    name = f"{machine.name} ({machine.arch})"
    if machine.kind is MachineKind.CPU:
        if need.peak > limit:
            return (
                f"cache: tiles need {need.peak} bytes at once, "
                f"a core of {name} has {limit} of its last cache"
            )
        return None
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
