"""CUDA C++ for block graphs with products: tiles stay in registers as matrix fragments.

Takes a flattened block graph, how its tensors lie, a machine and options; gives a kernel. The rows
of all products are one axis, dealt to the warps of a group; a warp holds whole rows, so a product's
result feeds the next product, an exponential or a fold without leaving its registers. Groups of
warps share the iterations of the loop, each with its own pipeline of copies to shared memory, and
join their accumulators after it. Raises `Infeasible` where a graph does not have this form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from obelisk.base.errors import Infeasible
from obelisk.ir.block import BlockGraph, Phase
from obelisk.ir.dtype import DType
from obelisk.ir.node import Node
from obelisk.ir.op import LoadAttrs, Op
from obelisk.lower.cuda.cluster import Clustered
from obelisk.lower.cuda.combine import Gathering
from obelisk.lower.cuda.layout import Layout, column_dim, row_dim, up
from obelisk.lower.cuda.options import CudaOptions, TensorMap
from obelisk.lower.cuda.product import LINE, VECTOR, WIDE_COLUMNS, WIDE_ROWS, Stage
from obelisk.lower.cuda.values import ACCUMULATORS, Text, Value, base_of
from obelisk.lower.schedule import Operand
from obelisk.machine.description import Feature, Machine

THREADS = 256  # of a block, where its loop has work for them
WIDE_THREADS = 384  # of a block whose products take four warps
MOST_THREADS = 1024
COPYING = 32  # threads of the warp that copies in bulk, besides the groups'
MOST_WIDE_THREADS = 512  # more leave too few registers for results of 64 rows
STREAM_WARPS = 4  # that share the columns of weights
MOST_STAGES = 4
MOST_BULK_STAGES = 16
MOST_RESIDENT = 4
MOST_BOX = 256  # rows of one bulk copy
MOST_WARPS = 16  # along the rows
NARROW = (DType.F16, DType.BF16)
STATIC = 2048  # bytes of shared memory kept for barriers and scales
ALIGNMENT = 8 * LINE  # of swizzled tiles


@dataclass(frozen=True, slots=True)
class Box:
    """A tile as the copy engine gets it: the number of its map, the map, the text of its first
    column and row, in how many boxes of 64 columns it comes, and whether one block alone reads it.
    """

    number: int
    tensor: TensorMap
    column: str
    row: str
    count: int
    once: str


class Fragments(Clustered):
    """Prints one block graph with products."""

    def __init__(
        self,
        block: BlockGraph,
        params: Sequence[Operand],
        results: Sequence[Operand],
        machine: Machine,
        options: CudaOptions,
        ending: tuple[Gathering, Sequence[int]] | None = None,
    ) -> None:
        names = (
            [f"in{i}" for i in range(len(params))],
            [f"out{j}" for j in range(len(results))],
        )
        super().__init__(block, params, results, "", names, 0)
        self.options, self.machine = options, machine
        self.shared_limit = machine.shared_bytes - STATIC
        self.products = [n for n in block.body if n.op is Op.MATMUL]
        self.local, self.parts = {}, 1
        if ending is not None:
            self.keep(*ending)
        self._roles()
        self.operands = self._operands()
        self.wide = self._wide()
        self._warps()
        self._stages()
        self.packed, self.raws = {}, {}
        self.unsettled = []
        self.written, self.fenced = set(), set()

    # ---- plan

    def _roles(self) -> None:
        """Which axis is the products' rows, and which are depths."""
        if not self.products:
            raise Infeasible("no product")
        rows: set[int | None] = set()
        self.depths = set()
        for node in self.products:
            a, b = node.inputs
            if any(x is not None for v in (node, a, b) for x in self.axes.of[v][:-2]):
                raise Infeasible("a product with a batch inside the block")
            if a.dtype not in NARROW or b.dtype is not a.dtype:
                raise Infeasible(f"a product of {a.dtype} by {b.dtype} in fragments")
            m, k = self.axes.of[a][-2:]
            n = self.axes.of[b][-1]
            if k is None or n is None or m is None:
                raise Infeasible("a product with rows, columns or depth of one")
            rows.add(m)
            self.depths.add(k)
        if len(rows) != 1:
            raise Infeasible("products with rows of different kinds")
        self.m = rows.pop()  # type: ignore[assignment]
        if self.m in self.depths or any(
            self.axes.of[n.inputs[1]][-1] == self.m for n in self.products
        ):
            raise Infeasible("an axis that is rows of one product and columns of another")

    def _wide(self) -> bool:
        """Whether four warps make every product together: rows are a multiple of 64, right operands
        lie in shared memory as they are, and their rows there are whole lines.
        """
        rows = self.axes.axes[self.m].extent
        if not self.options.wgmma or Feature.WGMMA not in self.machine.features:
            return False
        if rows % WIDE_ROWS or rows > WIDE_ROWS * MOST_WARPS // 4 * 4:
            return False
        for node in self.products:
            a, b = node.inputs
            k, n = self.axes.of[a][-1], self.axes.of[b][-1]
            assert k is not None
            assert n is not None
            found = self.scaled(a, b, k, n)
            if found is not None and not self.bounded(a):
                found = None
            source = self.in_tile(node, True) or base_of(found[0] if found else b)
            if source not in self.operands:
                return False
            (_, _), (inner, _) = self.tile_dims(source)
            depth, columns = (self.axes.axes[x].extent for x in (k, n))
            if columns % WIDE_COLUMNS or depth % (16 if inner == n else WIDE_COLUMNS):
                return False
        return True

    def _warps(self) -> None:
        """Warps along the rows, tiles of 16 rows of each, and groups that share the loop."""
        extent, loop = self.axes.axes[self.m].extent, self.block.loop
        tiles = -(-extent // 16)
        if self.wide:
            self.row_warps = min(tiles, 8)
            if self.options.row_warps:
                self.row_warps = min(tiles, max(4, self.options.row_warps // 4 * 4))
        else:
            self.row_warps = min(self.options.row_warps, tiles) or -(-tiles // min(2, tiles))
        self.tiles = -(-tiles // self.row_warps)
        if self.row_warps > MOST_WARPS or self.tiles > (2 if self.wide else 4):
            raise Infeasible(f"{extent} rows in one block")
        self.clamped = self.tiles * self.row_warps == 1 and extent < 16
        self._columns()
        self.group_threads = 32 * self.row_warps * self.column_warps
        most = MOST_WIDE_THREADS if self.wide else MOST_THREADS
        if self.wide and self.options.bulk:
            most -= 128  # with a copying warp besides, 512 threads would have 96 registers each
        most = max(1, min(loop, most // self.group_threads))
        target = WIDE_THREADS if self.wide else THREADS
        wanted = self.options.groups or max(1, target // self.group_threads)
        self.groups = min(wanted, most)
        self.threads = self.groups * self.group_threads
        rows = row_dim(self.axes.axes[self.m], self.tiles, self.row_warps, self.wide)
        dims = {self.m: rows}
        for axis in self.axes.axes:
            if axis.number != self.m:
                step = 16 if axis.number in self.depths else 8
                shared = self.column_warps if axis.number in self.shared_axes else 1
                dims[axis.number] = column_dim(axis, step, shared)
        if self.column_warps > 1:
            for a, d in dims.items():
                if a != self.m:
                    dims[a] = replace(d, lead=f"{d.lead} && warp_column == 0")
        order = (self.m, *(a.number for a in self.axes.axes if a.number != self.m))
        self.c = Layout("result", dims, order)

    def _columns(self) -> None:
        """The axes whose columns the warps of a group share, and how many warps: columns of results
        that nothing folds.
        """
        self.shared_axes, self.column_warps = frozenset(), 1
        folded = {
            self.axes.of[x.inputs[0]][x.attrs.axis]
            for x in self.block.body
            if x.op in (Op.SUM, Op.REDUCE_MAX)
        }
        columns = {a for s in self.block.stores for a in self.axes.known(s.value) if a != self.m}
        if self.wide or not columns or columns & (folded | self.depths):
            return
        wanted = self.options.column_warps
        if not wanted:
            wanted = 1 if self.looped else max(1, 8 // self.row_warps)
            if self._streams():
                wanted = STREAM_WARPS
        while wanted > 1 and any(self.axes.axes[a].extent % (8 * wanted) for a in columns):
            wanted //= 2
        if wanted > 1:
            self.shared_axes, self.column_warps = frozenset(columns), wanted

    def _operands(self) -> dict[Node, None]:
        """Loads that reach a product's operand with both of its axes."""
        found: dict[Node, None] = {}
        for node in self.products:
            for x in node.inputs:
                axes = set(self.axes.known(x))
                stack, seen = [base_of(x)], set()
                while stack:
                    n = base_of(stack.pop())
                    if n in seen or n.op is Op.MATMUL or n.op in ACCUMULATORS:
                        continue
                    seen.add(n)
                    if n.op is Op.LOAD:
                        if set(self.axes.known(n)) == axes and n.attrs.dtype in NARROW:
                            found[n] = None
                    elif n.op not in (Op.SIZE, Op.CONST, Op.IOTA):
                        stack.extend(n.inputs)
        return found

    def _stages(self) -> None:
        """Tiles in shared memory: those of the whole block, then those of a group's pipeline."""
        self.stages = {}
        sizes = {False: 0, True: 0}
        self.bulk = self._bulk()
        if self.launch_threads() > MOST_THREADS:  # the copying warp takes the place of a group
            self.groups = (MOST_THREADS - COPYING) // self.group_threads
            self.threads = self.groups * self.group_threads
        for node in self.operands:
            (ra, rs), (ia, step) = self.tile_dims(node)
            height, width = self._tile_size(node)
            loop = self.when(node) is Phase.LOOP
            swizzled = (self.wide or (self.bulk and loop)) and width % WIDE_COLUMNS == 0
            stride = 0 if swizzled else (width // 8 | 1) * 16
            _, moves = self.load_moves(node)
            steps = (rs, *moves, self.params[node.attrs.index].start)
            fast = step == 1 and all(s % VECTOR == 0 for s in steps)
            offset = up(sizes[loop], ALIGNMENT) if swizzled else sizes[loop]
            stage = Stage(node, ra, ia, height, width, stride, offset, loop, fast)
            self.stages[node] = stage
            sizes[loop] = offset + stage.nbytes
        self.aligned = any(not s.stride for s in self.stages.values())
        unit = ALIGNMENT if self.aligned else 16
        self.fixed, self.moving = up(sizes[False], unit), up(sizes[True], unit)
        while not self._pipeline():
            if self.groups == 1:
                raise Infeasible(
                    f"{self.fixed + 2 * self.moving} bytes of tiles in shared memory, the limit is "
                    f"{self.shared_limit}"
                )
            self.groups = -(-self.groups // 2)
            self.threads = self.groups * self.group_threads

    def _tile_size(self, node: Node) -> tuple[int, int]:
        """Rows and columns of a load's tile in shared memory."""
        (ra, _), (ia, _) = self.tile_dims(node)
        height, width = (
            self.row_warps * self.tiles * 16 if a == self.m else up(self.axes.axes[a].extent, 16)
            for a in (ra, ia)
        )
        return (self.axes.axes[ra].extent if ra == self.m and self.clamped else height), width

    def _streams(self) -> bool:
        """Whether a loop reads weights for few rows: no product feeds another, none is tall."""
        staged = all(base_of(x) in self.operands for n in self.products for x in n.inputs)
        return staged and self.looped and not self.wide and self.row_warps == 1

    def _bulk(self) -> bool:
        """Whether a warp of its own fills the pipeline with bulk copies: the device has them, and
        every tile is a box of a matrix in memory.
        """
        if not self.options.bulk or Feature.BULK_COPY not in self.machine.features:
            return False
        # One more warp takes registers from all: chains of products in 8 or 16 warps would spill.
        if not self.wide and not self._streams() and (self.tiles > 1 or self.threads > 384):
            return False
        moving = [x for x in self.operands if self.when(x) is Phase.LOOP]
        return bool(moving) and all(self.box(x, i) is not None for i, x in enumerate(moving))

    def box(self, node: Node, number: int) -> Box | None:
        """A load's tile as a box of a matrix; None where it is none."""
        (ra, rs), (ia, step) = self.tile_dims(node)
        height, width = self._tile_size(node)
        extents = self.axes.axes[ra], self.axes.axes[ia]
        if step != 1 or rs % VECTOR or self.params[node.attrs.index].start:
            return None
        if any(a.split is not None for a in extents):
            return None
        if (height, width) != tuple(a.extent for a in extents) or width % WIDE_COLUMNS:
            return None
        if height > MOST_BOX or (height % 8 and width > WIDE_COLUMNS):
            return None
        part = self.axes.axes[ia].extent // self.column_warps
        if ia in self.shared_axes and part % 16:
            return None
        if ia == self.m and self.row_warps > 1:
            return None
        at: LoadAttrs = node.attrs
        strides, moves = self.load_moves(node)
        counts = (*self.block.grid, self.block.loop)
        across = sum(m % rs * (n - 1) for m, n in zip(moves, counts, strict=True))
        if across + width > rs or any(s < 0 for s in strides):
            return None
        span = 1 + sum((n - 1) * s for n, s in zip(at.full, strides, strict=True))
        tensor = TensorMap(
            at.index, at.dtype.value, rs, -(-span // rs), rs * 2, WIDE_COLUMNS, height
        )
        columns = self.steps([m % rs for m in moves]) or "0"
        rows = self.steps([m // rs for m in moves]) or "0"
        once = all(d is not None for d, n in zip(at.imap, self.block.grid, strict=True) if n > 1)
        count = width // WIDE_COLUMNS
        return Box(number, tensor, f"(int)({columns})", f"(int)({rows})", count, str(once).lower())

    def maps(self) -> tuple[TensorMap, ...]:
        """The tensor maps of a kernel with bulk copies."""
        moving = [s.node for s in self.stages.values() if s.loop]
        boxes = [self.box(x, i) for i, x in enumerate(moving)] if self.bulk else []
        return tuple(b.tensor for b in boxes if b is not None)

    def whole(self, stage: Stage) -> bool:
        """Whether all of a staged tile exists in every block and iteration."""
        return (self.part(stage.rows), self.part(stage.inner)) == (
            str(stage.height),
            str(stage.width),
        )

    def _pipeline(self) -> bool:
        """Tiles in flight of a group and resident blocks; False where not even two tiles fit."""
        fixed, moving = self.fixed, self.moving
        spare = ALIGNMENT if self.aligned else 0  # the start is moved up to a whole swizzled tile
        most_shared, extra = self.shared_limit - spare, spare + self.received()
        each = -(-self.block.loop // self.groups)
        self.ahead = self.buffers = 0
        grid = max(-(-self.block.blocks // self.machine.cores), 2 if self._streams() else 1)
        wanted = self.options.resident or min(MOST_RESIDENT, grid)
        most = MOST_WIDE_THREADS if self.wide else self.machine.threads_per_core
        resident = max(1, min(wanted, most // self.launch_threads()))
        stages = self.options.stages or (MOST_BULK_STAGES if self.bulk else MOST_STAGES)
        most = min(stages - 1, each)
        while True:
            each_block = self.machine.shared_per_core // resident - 1024 - extra
            limit = min(most_shared, each_block - (STATIC if resident > 1 else 0))
            room = max(0, limit - fixed) // (moving * self.groups) if moving else MOST_STAGES
            ahead = each if room >= each and most >= each else min(most, room - 1)
            if resident == 1 or ahead >= min(2, most):
                break
            resident -= 1
        self.resident = resident
        if moving:
            if ahead < 1:
                return False
            self.ahead = ahead
            self.buffers = ahead if ahead == each else ahead + 1
        self.shared = fixed + self.buffers * moving * self.groups
        return self.shared <= most_shared

    def launch_threads(self) -> int:
        """Threads of a block, the copying warp included."""
        return self.threads + (COPYING if self.bulk else 0)

    def fold_across(self, op: Op, value: Value, axis: int, layout: Layout, text: Text) -> None:
        if layout.dim(axis).warps[0] > 1 or (
            axis == self.m and self.groups > 1 and self.row_warps > 1
        ):
            raise Infeasible("a fold of rows across warps")
        super().fold_across(op, value, axis, layout, text)

    # ---- the kernel

    def copies(self, stages: Sequence[Stage], to: str, threads: int, who: str) -> list[str]:
        """Calls that copy tiles to shared memory."""
        out = []
        for s in stages:
            strides, _ = self.load_moves(s.node)
            step = {a: strides[d] for d, a in enumerate(self.axes.of[s.node]) if a is not None}
            base = self.source(s)
            rows, columns = self.part(s.rows), self.part(s.inner)
            sizes = f"{s.height}, {s.width}, {s.stride}, {threads}"
            if s.fast:
                full = str(self.whole(s)).lower()
                out.append(
                    f"ob_copy_tile<{sizes}, {full}>({to} + {s.offset}, {base}, "
                    f"{step[s.rows]}ll, {rows}, {columns}, {who});"
                )
            else:
                out.append(
                    f"ob_copy_any<{sizes}>({to} + {s.offset}, {base}, {step[s.rows]}ll, "
                    f"{step[s.inner]}ll, {rows}, {columns}, {who});"
                )
        return out

    def source(self, stage: Stage) -> str:
        """The device address of a staged tile of the current block and iteration."""
        start = self.steps(self.load_moves(stage.node)[1])
        base: str = self.param_names[stage.node.attrs.index]
        return base + (f" + {start}" if start else "")

    def build(self) -> None:
        """Print all values on demand of the stores."""
        self.share()
        self.begin()
        for j, store in enumerate(self.block.stores):
            late = self.when(base_of(store.value)) is Phase.POST
            self.store(j, self.after if late else self.c)

    def begin(self) -> None:
        """Print what an iteration begins with, where that is not left to demand."""

    def ring(self) -> list[str]:
        """What comes before anything is read: the barriers of the pipeline's slots."""
        if not self.bulk:
            return []
        slots = self.groups * self.buffers
        warps = self.group_threads // 32
        return [
            f"__shared__ __align__(8) unsigned long long ring[{2 * slots}];",
            f"const unsigned full = ob_shared(ring), empty = full + {8 * slots};",
            "if (thread == 0) {",
            f"  for (int s = 0; s < {slots}; s++) {{",
            "    ob_barrier_init(full + 8 * s, 1);",
            f"    ob_barrier_init(empty + 8 * s, {warps});",
            "  }",
            "  ob_barrier_ready();",
            *(f"  ob_map_fetch(map{i});" for i in range(len(self.maps()))),
            "}",
            "__syncthreads();",
        ]

    def feeder(self, t: Text, moving: Sequence[Stage]) -> None:
        """The copying warp: it fills the slots of all groups in the order of the iterations."""
        groups, buffers, loop = self.groups, self.buffers, self.block.loop
        t.open(f"if (thread >= {self.threads})")
        t.line("#pragma unroll 1")
        t.open(f"for (int it = 0; it < {loop} && lane == 0; it++)")
        t.line(f"const int round = it / {groups}, turn = round / {buffers};")
        t.line(f"const int slot = it % {groups} * {buffers} + round % {buffers};")
        t.line("if (turn) ob_barrier_wait(empty + 8 * slot, (turn - 1) & 1);")
        total = sum(s.height * s.width * 2 for s in moving)
        t.line(f"ob_barrier_expect(full + 8 * slot, {total});")
        t.line(f"const unsigned to = fixed + {self.fixed} + slot * {self.moving};")
        for i, s in enumerate(moving):
            b = self.box(s.node, i)
            assert b is not None
            t.line("#pragma unroll")
            t.line(
                f"for (int j = 0; j < {b.count}; j++) ob_bulk_box<{b.once}>(to + {s.offset} + j * "
                f"{s.height * LINE}, map{i}, {b.column} + j * {WIDE_COLUMNS}, {b.row}, "
                "full + 8 * slot);"
            )
        t.close()
        t.line("return;")
        t.close()

    def body(self) -> list[str]:
        """The kernel's text between its braces."""
        self.build()
        t = Text()
        fixed = [s for s in self.stages.values() if not s.loop]
        moving = [s for s in self.stages.values() if s.loop]
        for line in self.split_lines(False):
            t.line(line)
        if self.stages:
            t.line("const unsigned fixed = ob_shared(base);")
        if self.bulk:
            self.feeder(t, moving)
        if fixed:
            for line in self.copies(fixed, "fixed", self.threads, "thread"):
                t.line(line)
            t.line("ob_copy_commit();")
        if moving:
            size = self.moving * self.buffers
            t.line(f"const unsigned tiles = fixed + {self.fixed} + group * {size};")
        if moving and not self.bulk:
            self.first_copies(t, moving)
        if fixed:
            t.line(f"ob_copy_wait<{self.ahead if moving and not self.bulk else 0}>();")
            if self.wide:
                t.line("ob_operand_fence();")
            t.line(f"ob_group_barrier<{self.threads}>(0);" if self.bulk else "__syncthreads();")
        t.lines += self.out[Phase.INVARIANT].lines
        if self.looped:
            self.loop(t, moving)
            self.finish_folds(t)
            self.ending(t, moving)
        return t.lines

    def first_copies(self, t: Text, moving: Sequence[Stage]) -> None:
        """The tiles that a group has in flight before its loop."""
        for s in range(self.ahead):
            t.open()
            t.line(f"const int it = group + {s * self.groups};")
            t.open(f"if (it < {self.block.loop})")
            for line in self.split_lines(True):
                t.line(line)
            to = f"tiles + {s * self.moving}"
            for line in self.copies(moving, to, self.group_threads, "member"):
                t.line(line)
            t.close()
            t.line("ob_copy_commit();")
            t.close()

    def ending(self, t: Text, moving: Sequence[Stage]) -> None:
        """What comes after the loop."""
        if self.groups > 1 and self.states:
            if moving and not self.bulk:
                t.line("ob_copy_wait<0>();")
            self.merge(t)
        for line in self.inbox(self.needed()):
            t.line(line)
        if self.groups > 1:
            t.open(f"if (group < {self.sharers})")
        t.lines += ["  " * t.depth + x for x in self.out[Phase.POST].lines]
        if self.groups > 1:
            t.close()

    def refill(self, t: Text, moving: Sequence[Stage], now: str) -> None:
        """Copies of the tile that comes `ahead` iterations behind number `now`, where the one in
        front of that was.
        """
        ahead = self.ahead
        if self.buffers > ahead:
            t.open()
            t.line(f"const int next = {now} + {ahead * self.groups};")
            t.open(f"if (next < {self.block.loop})")
            t.line(f"const unsigned to = tiles + (slot == 0 ? {ahead} : slot - 1) * {self.moving};")
            t.line("const int it = next;")
            for line in self.split_lines(True):
                t.line(line)
            for line in self.copies(moving, "to", self.group_threads, "member"):
                t.line(line)
            t.close()
            t.close()
        t.line("ob_copy_commit();")

    def loop(self, t: Text, moving: Sequence[Stage]) -> None:
        """The pipelined loop of a group."""
        loop, groups, ahead = self.block.loop, self.groups, self.ahead
        step = f"it += {groups}"
        if self.bulk:
            t.line("int slot = 0, parity = 0;")
        elif moving:
            step += f", slot = slot == {self.buffers - 1} ? 0 : slot + 1"
        slot = ", slot = 0" if moving and not self.bulk else ""
        t.line("#pragma unroll 1")
        t.open(f"for (int it = group{slot}; it < {loop}; {step})")
        if self.bulk:
            t.line(f"const unsigned at = group * {8 * self.buffers} + 8 * slot;")
            t.line("ob_barrier_wait(full + at, parity);")
        elif moving:
            t.line(f"ob_copy_wait<{ahead - 1}>();")
            if self.wide:
                t.line("ob_operand_fence();")
            t.line(f"ob_group_barrier<{self.group_threads}>(1 + group);")
        if moving:
            t.line(f"const unsigned tile = tiles + slot * {self.moving};")
        if moving and not self.bulk:
            self.refill(t, moving, "it")
        for line in self.split_lines(True):
            t.line(line)
        t.lines += ["  " * t.depth + x for x in self.out[Phase.LOOP].lines]
        if self.unsettled:
            t.line("ob_wgmma_wait();")
            for name in self.unsettled:
                t.line(f"ob_wgmma_settle({name});")
        if self.bulk:
            t.line("ob_barrier_leave(empty + at, lane);")
            t.line(f"if (++slot == {self.buffers}) slot = 0, parity ^= 1;")
        t.close()

    def exchanged(self) -> int:
        """Bytes of tiles for the whole block and of what the groups exchange behind them."""
        if self.groups == 1:
            return self.fixed
        return self.fixed + 4 * self.groups * self.exchange_elements() * self.group_threads

    def shared_bytes(self) -> int:
        """Bytes of shared memory in all."""
        need = self.needed() + self.received()
        if self.aligned:
            need += ALIGNMENT
        limit = self.shared_limit + self.received()
        if need > limit:
            raise Infeasible(f"{need} bytes of shared memory, the limit is {limit}")
        return need

    def needed(self) -> int:
        """Bytes of shared memory for tiles, or in their place for what the groups exchange."""
        slack = 0
        if any(self.axes.axes[a].extent // self.column_warps % 16 for a in self.shared_axes):
            # The last warp's fragments of 16 columns reach half beyond the tile.
            slack = 16 * max(s.stride for s in self.stages.values())
        return up(max(self.shared + slack, self.exchanged()), 16)
