"""Block graph -> `Kernel`: operator order, what gets memory of its own, fused chains, and a memory
plan.

Takes a checked block graph and how its params and results lie in device memory; gives a `Kernel`
whose statements mean exactly what the interpreter computes, short tiles included. Tiles that are
read in place (loads of the compute type, views, values that only a store wants) are aliased to
device memory instead of copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, prod

from obelisk.base.errors import Infeasible
from obelisk.ir.block import BlockGraph, Phase, Store, block_graph, is_ragged
from obelisk.ir.dtype import DType
from obelisk.ir.node import Node, make
from obelisk.ir.op import LoadAttrs, Op
from obelisk.lower import chains
from obelisk.lower.chains import ELEMENTWISE, INLINE
from obelisk.lower.memory import Life, plan
from obelisk.lower.moves import load_moves, store_moves
from obelisk.lower.tile import (
    Buffer,
    BufferKind,
    Chain,
    Extent,
    Kernel,
    Mode,
    Product,
    Scalar,
    Statement,
    View,
    Write,
    reads_of,
    writes_of,
)
from obelisk.lower.views import aligned, row_major, structural

_VIEW_OPS = (Op.RESHAPE, Op.TRANSPOSE, Op.SLICE)
_ACCUMULATORS = (Op.ACCUM_SUM, Op.ACCUM_MAX, Op.ACCUM_RESCALE)


@dataclass(frozen=True, slots=True)
class Operand:
    """A kernel tensor as the kernel sees it: its dtype, element strides, and by how many elements
    its start misses a 16-byte boundary.
    """

    dtype: DType
    strides: tuple[int, ...]
    start: int = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """What a target asks of a schedule.

    Attributes:
        lanes: f32 elements of a vector.
        alias: read loads and write results in place where possible (False: copy every tile).
        work: elements of packing space for a product of (rows, columns, depth) and a dtype.
        arena_limit: bytes of fast memory that a block may use.
        mixed: products read operands of any dtype in place and convert them as they go.
        pairs: a call and the one behind it, which alone reads its results (`tile.private`), may be
            joined in one kernel: blocks of the second then write while blocks of the first read.
    """

    lanes: int
    alias: bool
    work: Callable[[Product], int]
    arena_limit: int
    mixed: bool = False
    pairs: bool = False


def compute_type(dtype: DType) -> DType:
    """The type that values of `dtype` are computed and kept in inside a kernel."""
    match dtype:
        case DType.F64 | DType.BOOL:
            return dtype
        case DType.I4:
            raise Infeasible(
                "i4 tensors are packed two to a byte, which this target cannot address"
            )
        case _:
            return DType.F32 if dtype.is_float else DType.I32


def flatten(block: BlockGraph) -> BlockGraph:
    """The same block graph with every thread graph expanded into its operators."""
    if not any(n.op is Op.THREAD for n in block.body):
        return block
    new: dict[Node, Node] = {}
    for node in block.body:
        args = tuple(new[i] for i in node.inputs)
        if node.op is Op.THREAD:
            inner: dict[Node, Node] = {}
            for n in node.attrs.thread.body:
                inner[n] = (
                    args[n.attrs.index]
                    if n.op is Op.ELEM
                    else make(n.op, tuple(inner[i] for i in n.inputs), n.attrs)
                )
            new[node] = inner[node.attrs.thread.results[node.attrs.result]]
        else:
            new[node] = make(node.op, args, node.attrs)
    stores = tuple(replace(s, value=new[s.value]) for s in block.stores)
    return block_graph(block.grid, block.loop, block.threads, stores)


class _Scheduler:
    """Builds the statements of one kernel."""

    def __init__(
        self,
        block: BlockGraph,
        params: Sequence[Operand],
        results: Sequence[Operand],
        rules: Rules,
    ) -> None:
        self.block, self.rules = block, rules
        self.phase = block.info.phase
        self.buffers: list[Buffer] = [
            *(Buffer(f"p{i}", BufferKind.PARAM, p.dtype, 0, i) for i, p in enumerate(params)),
            *(Buffer(f"r{j}", BufferKind.RESULT, r.dtype, 0, j) for j, r in enumerate(results)),
        ]
        self.params, self.results = params, results
        self.views: dict[Node, View] = {}
        self.packed: dict[tuple[View, DType], View] = {}
        self.parts: dict[Phase, list[Statement]] = {p: [] for p in Phase}
        self.closing: list[Statement] = []
        self.users: dict[Node, list[Node]] = {n: [] for n in block.body}
        for node in block.body:
            for child in node.inputs:
                self.users[child].append(node)
        self.stores: dict[Node, list[int]] = {}
        for j, store in enumerate(block.stores):
            self.stores.setdefault(store.value, []).append(j)
        self.done: set[int] = set()  # stores that their producer already wrote

    # ---- geometry

    def dims(self, node: Node) -> tuple[Extent, ...]:
        """Extents of a value; short tiles carry their cut."""
        grid, loop = self.block.grid, self.block.loop
        return tuple(
            Extent(n, s if is_ragged(s, n, grid, loop) else None)
            for n, s in zip(node.shape, self.block.info.splits[node], strict=True)
        )

    def tile(self, node: Node, dtype: DType, name: str = "t") -> View:
        """A new dense tile for a value."""
        number = len(self.buffers)
        self.buffers.append(
            Buffer(f"{name}{number}", BufferKind.TILE, dtype, max(1, prod(node.shape)))
        )
        still = (0,) * (len(self.block.grid) + 1)
        return View(number, self.dims(node), row_major(node.shape), 0, still)

    def load_view(self, node: Node) -> View:
        """A load as a view of the kernel tensor."""
        at: LoadAttrs = node.attrs
        strides = self.params[at.index].strides
        return View(at.index, self.dims(node), strides, 0, load_moves(node, strides))

    def store_view(self, j: int) -> View:
        """Where result `j` of the current block and iteration goes. Partial results have the
        block's number first.
        """
        store, strides = self.block.stores[j], self.results[j].strides
        moves = store_moves(self.block, j, strides)
        return View(len(self.params) + j, self.dims(store.value), strides, 0, moves)

    # ---- decisions

    def direct(self, node: Node, dtype: DType) -> View | None:
        """The device view that `node` may be computed into: it is stored once, as it is, and used
        nowhere else.
        """
        where = self.stores.get(node, [])
        if not self.rules.alias or len(where) != 1 or self.users[node]:
            return None
        (j,) = where
        if self.buffers[len(self.params) + j].dtype is not dtype:
            return None
        self.done.add(j)
        return self.store_view(j)

    def inlined(self, node: Node) -> bool:
        """Whether a value needs no memory: its users compute it where they need it."""
        users, phase = self.users[node], self.phase[node]
        if node.op not in INLINE:
            return False
        if node.op in (Op.CONST, Op.SIZE):
            return not any(u.op in _VIEW_OPS for u in users)
        if node.op is Op.BROADCAST and node.inputs[0] in self.views:
            return False  # a view, at no cost
        if any(u.op in _VIEW_OPS or u.op is Op.MATMUL for u in users):
            return False
        if any(u.op in (Op.SUM, Op.REDUCE_MAX) and u.attrs.keep > 1 for u in users) and (
            node.op is Op.IOTA or self.counts(node)
        ):
            return False
        if node.op in (Op.IOTA, Op.BROADCAST):
            return True
        later = any(self.phase[u] is not phase for u in users if u.op not in _ACCUMULATORS)
        if phase is Phase.INVARIANT and self.block.loop > 1:
            later = later or any(u.op in _ACCUMULATORS for u in users)
        uses = len(users) + len(self.stores.get(node, []))
        return not later and not (uses > 1 and self.costly(node))

    def counts(self, node: Node) -> bool:
        """Whether an inlined expression reads an index."""
        return any(n.op is Op.IOTA for n in self.expression(node))

    def costly(self, node: Node) -> bool:
        """Whether computing a value twice costs more than keeping it."""
        cost = [n for n in self.expression(node) if n.op in ELEMENTWISE]
        return len(cost) > 2 or any(n.op in chains.COSTLY for n in cost)

    def expression(self, node: Node) -> list[Node]:
        """The operators that would be inlined for `node`."""
        out: list[Node] = []
        stack, seen = [node], {node}
        while stack:
            n = stack.pop()
            out.append(n)
            for i in n.inputs:
                if n.op in INLINE and n.op is not Op.SIZE and i not in self.views and i not in seen:
                    seen.add(i)
                    stack.append(i)
        return out

    # ---- statements

    def emit(self, phase: Phase, statement: Statement) -> None:
        self.parts[phase].append(statement)

    def operand(self, node: Node, phase: Phase) -> View:
        """A value as operand of a product, in its compute type."""
        view = self.views[node]
        kind = compute_type(node.dtype)
        if (self.rules.mixed or self.buffers[view.buffer].dtype is kind) and (
            self.rules.alias or self.buffers[view.buffer].kind is BufferKind.TILE
        ):
            return view
        key = (view, kind)
        if key not in self.packed:
            copy = self.tile(node, kind, "c")
            self.emit(
                self.phase[node],
                chains.chain(node, self.dims(node), {node: view}, copy),
            )
            self.packed[key] = copy
        return self.packed[key]

    def product(self, node: Node, phase: Phase, target: View, mode: Mode) -> None:
        a, b = (self.operand(i, phase) for i in node.inputs)
        kind = compute_type(node.dtype)
        for i in node.inputs:
            if compute_type(i.dtype) is not kind:
                raise Infeasible(f"matmul of {i.dtype} operands with a {node.dtype} result")
        batch = node.rank - 2

        def spread(v: View) -> View:
            pad = batch + 2 - len(v.shape)
            shape = (Extent(1),) * pad + v.shape
            strides = (0,) * pad + v.strides
            strides = tuple(
                0 if d < batch and shape[d].size == 1 else s for d, s in enumerate(strides)
            )
            return replace(v, shape=shape, strides=strides)

        statement = Product(spread(a), spread(b), target, kind, mode)
        size = self.rules.work(statement)
        if size:
            number = len(self.buffers)
            self.buffers.append(Buffer(f"w{number}", BufferKind.TILE, kind, size))
            statement = replace(statement, work=number)
        self.emit(phase, statement)

    def place(self, node: Node) -> None:
        """Give a value a view, computing it where it has none yet."""
        phase = self.phase[node]
        if node.op is Op.LOAD:
            self.views[node] = self.load_view(node)
            return
        if node.op in _ACCUMULATORS or self.inlined(node):
            return
        if node.op is Op.RUNNING_MAX:
            self.running(node)
            return
        kind = compute_type(node.dtype)
        if node.op is Op.MATMUL:
            if self.closes(node):
                return
            target = self.direct(node, kind) or self.tile(node, kind)
            self.product(node, phase, target, Mode.SET)
            self.views[node] = target
        elif node.op in (Op.SUM, Op.REDUCE_MAX):
            if self.closes(node):
                return
            target = self.direct(node, kind) or self.tile(node, kind)
            self.emit(
                phase,
                chains.reduction(node, self.dims(node.inputs[0]), self.views, target),
            )
            self.views[node] = target
        elif node.op is Op.CONCAT:
            self.concat(node, phase, kind)
        elif node.op in _VIEW_OPS or (node.op is Op.BROADCAST and node.inputs[0] in self.views):
            source = self.views[node.inputs[0]]
            view = structural(source, node.attrs)
            if view is None:
                operand = node.inputs[0]
                copy = self.tile(operand, compute_type(operand.dtype), "c")
                self.emit(phase, chains.chain(operand, self.dims(operand), {operand: source}, copy))
                view = structural(copy, node.attrs)
            assert view is not None
            self.views[node] = view
        else:
            target = self.tile(node, kind)
            self.emit(phase, chains.chain(node, self.dims(node), self.views, target))
            self.views[node] = target

    def concat(self, node: Node, phase: Phase, kind: DType) -> None:
        """Each operand is computed right into its slice."""
        target = self.direct(node, self.buffers_type(node, kind)) or self.tile(node, kind)
        axis, at = node.attrs.axis, 0
        for operand in node.inputs:
            part = replace(
                target, shape=self.dims(operand), offset=target.offset + at * target.strides[axis]
            )
            at += operand.shape[axis]
            self.emit(phase, chains.chain(operand, self.dims(operand), self.views, part))
        self.views[node] = target

    def buffers_type(self, node: Node, kind: DType) -> DType:
        """For a value that elements are only copied into: the type of its one store, which then
        needs no tile.
        """
        where = self.stores.get(node, [])
        return self.block.stores[where[0]].dtype if len(where) == 1 else kind

    def closes(self, node: Node) -> bool:
        """Whether a product or reduction is folded straight into its accumulator."""
        users = self.users[node]
        return (
            len(users) == 1
            and users[0].op in _ACCUMULATORS
            and users[0].inputs[0] is node
            and node not in self.stores
            and self.phase[node] is Phase.LOOP
            and not (node.op is Op.REDUCE_MAX and users[0].op is not Op.ACCUM_MAX)
            and not (node.op is Op.SUM and users[0].op is Op.ACCUM_MAX)
            and not (node.op is Op.MATMUL and users[0].op is Op.ACCUM_MAX)
        )

    def fill(self, view: View, dtype: DType, value: float) -> Chain:
        """view = value everywhere."""
        dims = view.shape or (Extent(1),)
        write = Write(0, aligned(view, dims))
        return Chain(dims, (), (Scalar(Op.CONST, (), dtype, 0, value),), (write,))

    def lowest(self, dtype: DType) -> float:
        """Neutral element of max."""
        if dtype.is_float:
            return -inf
        return -128.0 if dtype is DType.I8 else float(-(2**31))

    def running(self, node: Node) -> None:
        """running_max: `node` = max(state, operand); the state follows after the iteration."""
        kind = compute_type(node.dtype)
        state, now = self.tile(node, kind, "s"), self.tile(node, kind)
        self.parts[Phase.INVARIANT].append(self.fill(state, node.dtype, self.lowest(node.dtype)))
        dims = self.dims(node)
        body = chains.Body(dims, {**self.views, node: state})
        old = body.value(node)
        new = body.add(Scalar(Op.MAX, (old, body.value(node.inputs[0])), node.dtype))
        write = Write(new, aligned(now, dims))
        self.emit(Phase.LOOP, Chain(dims, tuple(body.reads), tuple(body.code), (write,)))
        self.views[node] = now
        self.state_of[node] = state
        self.late.append(chains.chain(node, dims, {node: now}, state))
        for user in dict.fromkeys(self.users[node]):
            if user.op is Op.ACCUM_RESCALE and user.inputs[1] is node:
                self.rescale(user)

    def by_product(self, node: Node) -> bool:
        """Whether an accumulator is the target of a product itself."""
        x = node.inputs[0]
        return x.op is Op.MATMUL and self.closes(x)

    def state(self, node: Node) -> View:
        """Where an accumulator lies, and how it starts (a product overwrites it at first)."""
        if node not in self.views:
            kind = compute_type(node.dtype)
            direct = self.direct(node, kind) if self.by_product(node) else None
            self.views[node] = direct or self.tile(node, kind, "s")
            start = self.lowest(node.dtype) if node.op is Op.ACCUM_MAX else 0.0
            if not self.by_product(node):
                self.emit(Phase.INVARIANT, self.fill(self.views[node], node.dtype, start))
        return self.views[node]

    def accumulate(self, node: Node) -> None:
        """The step of an accumulator at the end of each iteration."""
        x, state = node.inputs[0], self.state(node)
        mode = Mode.MAX if node.op is Op.ACCUM_MAX else Mode.ADD
        if self.by_product(node):
            self.product(x, Phase.LOOP, state, Mode.ADD_AFTER_FIRST)
        elif x.op in (Op.SUM, Op.REDUCE_MAX) and x not in self.views:
            dims = self.dims(x.inputs[0])
            self.emit(Phase.LOOP, chains.reduction(x, dims, self.views, state, mode))
        else:
            self.emit(Phase.LOOP, chains.chain(x, self.dims(node), self.views, state, mode))

    def rescale(self, node: Node) -> None:
        """state = old peak is -inf ? 0 : state * exp(old peak - new peak).

        This stands right behind the new peak, so that what is added to the state later may join
        the chain that computes it.
        """
        peak, state = node.inputs[1], self.state(node)
        dims, dtype = self.dims(node), node.dtype
        body = chains.Body(dims, {node: state, peak: self.state_of[peak]})
        acc, old = body.value(node), body.value(peak)
        body.views = {peak: self.views[peak]}
        del body.known[peak]
        new = body.value(peak)
        gap = body.add(Scalar(Op.SUB, (old, new), peak.dtype))
        factor = body.add(Scalar(Op.EXP, (gap,), peak.dtype))
        lowest = body.add(Scalar(Op.CONST, (), peak.dtype, 0, -inf))
        zero = body.add(Scalar(Op.CONST, (), dtype, 0, 0.0))
        seen = body.add(Scalar(Op.LESS, (lowest, old), DType.BOOL))
        product = body.add(Scalar(Op.MUL, (acc, factor), dtype))
        value = body.add(Scalar(Op.WHERE, (seen, product, zero), dtype))
        write = Write(value, aligned(state, dims))
        self.emit(
            Phase.LOOP,
            Chain(
                dims,
                tuple(body.reads),
                tuple(body.code),
                (write,),
                skip_first=self.by_product(node),
            ),
        )

    def store(self, j: int, store: Store) -> None:
        """Write one result where its producer has not done it."""
        if j in self.done:
            return
        phase = self.phase[store.value]
        where = Phase.LOOP if phase is Phase.LOOP else Phase.POST
        dims = self.dims(store.value)
        self.emit(where, chains.chain(store.value, dims, self.views, self.store_view(j)))

    def run(self) -> Kernel:
        """All statements in order."""
        self.state_of: dict[Node, View] = {}
        self.late: list[Statement] = []
        body = self.block.body
        for phase in (Phase.INVARIANT, Phase.LOOP):
            for node in body:
                if self.phase[node] is phase:
                    self.place(node)
        for node in body:
            if node.op in _ACCUMULATORS:
                self.accumulate(node)
        stores = list(enumerate(self.block.stores))
        for j, store in stores:
            if self.phase[store.value] is Phase.LOOP:
                self.store(j, store)
        self.parts[Phase.LOOP].extend(self.late)
        for node in body:
            if self.phase[node] is Phase.POST:
                self.place(node)
        for j, store in stores:
            if self.phase[store.value] is not Phase.LOOP:
                self.store(j, store)
        return self.finish()

    def finish(self) -> Kernel:
        """Merge chains, drop what nobody reads, choose vector dims and plan memory."""
        order = (Phase.INVARIANT, Phase.LOOP, Phase.POST)
        merged = [chains.merge_all(self.parts[p]) for p in order]
        parts = chains.sweep(self.buffers, merged)
        ready: list[tuple[Statement, ...]] = []
        for part in parts:
            ready.append(tuple(self.polish(s) for s in part))
        before, inside, after = ready
        return with_plan(
            Kernel(self.block.grid, self.block.loop, tuple(self.buffers), before, inside, after),
            self.rules.arena_limit,
        )

    def polish(self, statement: Statement) -> Statement:
        if isinstance(statement, Product):
            return statement
        small = chains.collapse(statement)
        return replace(small, vector=chains.choose_vector(small, self.rules.lanes))


def with_plan(kernel: Kernel, limit: int) -> Kernel:
    """The kernel with unused tiles dropped and the others placed; raises `Infeasible` above `limit`
    bytes.
    """
    steps = [*kernel.before, *kernel.body, *kernel.after]
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    loop_at = (len(kernel.before), len(kernel.before) + len(kernel.body) - 1)
    for t, s in enumerate(steps):
        for b in {*reads_of(s), *writes_of(s)}:
            first.setdefault(b, t)
            last[b] = t
    for b in first:
        # A tile that is alive across the loop's border, or carries a value to the next iteration,
        # stays.
        inside = first[b] >= loop_at[0] and last[b] <= loop_at[1]
        carried = inside and b in carried_over(kernel)
        if (
            carried
            or (first[b] < loop_at[0] <= last[b])
            or (loop_at[0] <= first[b] <= loop_at[1] < last[b])
        ):
            first[b] = min(first[b], loop_at[0])
            last[b] = max(last[b], loop_at[1])
    tiles = [b for b in sorted(first) if kernel.buffers[b].kind is BufferKind.TILE]
    lives = [
        Life(int(kernel.buffers[b].elements * kernel.buffers[b].dtype.nbytes), first[b], last[b])
        for b in tiles
    ]
    packed = plan(lives)
    if packed.total > limit:
        raise Infeasible(
            f"the tiles of a block take {packed.total} bytes, the limit is {limit}: "
            "a larger grid or loop makes them smaller"
        )
    offsets = [0] * len(kernel.buffers)
    for b, o in zip(tiles, packed.offsets, strict=True):
        offsets[b] = o
    return replace(kernel, offsets=tuple(offsets), arena=packed.total, bound=packed.bound)


def carried_over(kernel: Kernel) -> set[int]:
    """Buffers whose first use in an iteration reads what an earlier iteration left."""
    written: set[int] = set()
    out: set[int] = set()
    for s in kernel.body:
        out |= {b for b in reads_of(s) if b not in written}
        written |= set(writes_of(s))
    return out


def schedule(
    block: BlockGraph, params: Sequence[Operand], results: Sequence[Operand], rules: Rules
) -> Kernel:
    """The kernel for a block graph.

    `params` and `results` say how the kernel tensors lie in memory; a result whose store reduces
    across blocks is a tensor of partial results with the number of the folded block in front.
    Raises `Infeasible` with the limit.
    """
    return _Scheduler(flatten(block), params, results, rules).run()
