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
from math import prod

from obelisk.base.errors import Infeasible
from obelisk.ir.block import BlockGraph, Phase
from obelisk.ir.dtype import DType
from obelisk.ir.node import Node
from obelisk.ir.op import Op
from obelisk.lower.cuda.layout import Layout, column_dim, right_dim, row_dim, up
from obelisk.lower.cuda.names import CTYPE
from obelisk.lower.cuda.options import CudaOptions
from obelisk.lower.cuda.values import ACCUMULATORS, State, Text, Value, Values, base_of
from obelisk.lower.schedule import Operand
from obelisk.machine.description import Machine

THREADS = 256  # of a block, where its loop has work for them
HOIST_REGISTERS = 64  # of an operand that is kept in registers through the loop
MOST_STAGES = 4
MOST_RESIDENT = 4
NARROW = (DType.F16, DType.BF16)


@dataclass(frozen=True, slots=True)
class Stage:
    """A load that passes through shared memory.

    Attributes:
        node: the load; `rows` and `inner`: its axes, inner the contiguous one.
        height, width: of the tile in shared memory, in elements, padded.
        stride: bytes between its rows: an odd number of 16-byte chunks, so that the eight rows that
            ldmatrix reads lie in different banks.
        offset: bytes from the start of its region.
        loop: one tile an iteration and stage, not one for the whole block.
        fast: by 16-byte asynchronous copies.
    """

    node: Node
    rows: int
    inner: int
    height: int
    width: int
    stride: int
    offset: int
    loop: bool
    fast: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the tile in shared memory."""
        return self.height * self.stride


class Fragments(Values):
    """Prints one block graph with products."""

    def __init__(
        self,
        block: BlockGraph,
        params: Sequence[Operand],
        results: Sequence[Operand],
        machine: Machine,
        options: CudaOptions,
    ) -> None:
        names = (
            [f"in{i}" for i in range(len(params))],
            [f"out{j}" for j in range(len(results))],
        )
        super().__init__(block, params, results, "", names, 0)
        self.options, self.machine = options, machine
        self.shared_limit = machine.shared_bytes
        self.products = [n for n in block.body if n.op is Op.MATMUL]
        self._roles()
        self._warps()
        self._stages()
        self.packed: dict[tuple[Node, str], str] = {}

    # ---- plan

    def _roles(self) -> None:
        """Which axis is the products' rows, and which are depths."""
        if not self.products:
            raise Infeasible("no product")
        rows: set[int | None] = set()
        self.depths: set[int] = set()
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
        self.m: int = rows.pop()  # type: ignore[assignment]
        if self.m in self.depths or any(
            self.axes.of[n.inputs[1]][-1] == self.m for n in self.products
        ):
            raise Infeasible("an axis that is rows of one product and columns of another")

    def _warps(self) -> None:
        """Warps along the rows, tiles of 16 rows of each, and groups that share the loop."""
        extent, loop = self.axes.axes[self.m].extent, self.block.loop
        tiles = -(-extent // 16)
        self.tiles = 2 if tiles > 1 else 1
        self.row_warps = -(-tiles // self.tiles)
        if self.options.row_warps:
            self.row_warps = min(self.options.row_warps, tiles)
            self.tiles = -(-tiles // self.row_warps)
        if self.row_warps > 16 or self.tiles > 4:
            raise Infeasible(f"{extent} rows in one block")
        self.clamped = self.tiles * self.row_warps == 1 and extent < 16
        self._columns()
        self.group_threads = 32 * self.row_warps * self.column_warps
        most = max(1, min(loop, 1024 // self.group_threads))
        wanted = self.options.groups or max(1, THREADS // self.group_threads)
        self.groups = min(wanted, most)
        self.threads = self.groups * self.group_threads
        dims = {self.m: row_dim(self.axes.axes[self.m], self.tiles, self.row_warps)}
        for axis in self.axes.axes:
            if axis.number != self.m:
                step = 16 if axis.number in self.depths else 8
                shared = self.column_warps if axis.number == self.n else 1
                dims[axis.number] = column_dim(axis, step, shared)
        if self.column_warps > 1:
            for a, d in dims.items():
                if a != self.m:
                    dims[a] = replace(d, lead=f"{d.lead} && warp_column == 0")
        order = (self.m, *(a.number for a in self.axes.axes if a.number != self.m))
        self.c = Layout("result", dims, order)

    def _columns(self) -> None:
        """The axis whose columns the warps of a group share, and how many warps: columns of results
        that nothing folds.
        """
        self.n, self.column_warps = -1, 1
        folded = {
            self.axes.of[x.inputs[0]][x.attrs.axis]
            for x in self.block.body
            if x.op in (Op.SUM, Op.REDUCE_MAX)
        }
        columns = [a for s in self.block.stores for a in self.axes.known(s.value) if a != self.m]
        if len(set(columns)) != 1 or columns[0] in folded | self.depths:
            return
        extent = self.axes.axes[columns[0]].extent
        wanted = self.options.column_warps
        if not wanted:
            wanted = 1 if self.looped else max(1, 8 // self.row_warps)
        while wanted > 1 and extent % (8 * wanted):
            wanted //= 2
        if wanted > 1:
            self.n, self.column_warps = columns[0], wanted

    def right(self, k: int, n: int) -> Layout:
        """The layout of a right operand with depth k and columns n."""
        axes = self.axes.axes
        shared = self.column_warps if n == self.n else 1
        dims = {k: column_dim(axes[k], 16), n: right_dim(axes[n], shared)}
        return Layout(f"right {k} {n}", dims, (k, n))

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
        self.stages: dict[Node, Stage] = {}
        fixed = moving = 0
        for node in self._operands():
            strides, moves = self.load_moves(node)
            dims = [(a, strides[d]) for d, a in enumerate(self.axes.of[node]) if a is not None]
            (ra, rs), (ia, inner_step) = dims
            if rs == 1 and inner_step != 1:
                (ra, rs), (ia, inner_step) = (ia, inner_step), (ra, rs)
            height, width = (
                self.row_warps * self.tiles * 16
                if a == self.m
                else up(self.axes.axes[a].extent, 16)
                for a in (ra, ia)
            )
            if ra == self.m and self.clamped:
                height = self.axes.axes[ra].extent
            chunks = width // 8
            stride = (chunks | 1) * 16
            loop = self.when(node) is Phase.LOOP
            fast = inner_step == 1 and all(s % 8 == 0 for s in (rs, *moves))
            stage = Stage(
                node, ra, ia, height, width, stride, moving if loop else fixed, loop, fast
            )
            self.stages[node] = stage
            if loop:
                moving += stage.nbytes
            else:
                fixed += stage.nbytes
        self.fixed, self.moving = fixed, moving
        while not self._pipeline():
            if self.groups == 1:
                raise Infeasible(
                    f"{fixed + 2 * moving} bytes of tiles in shared memory, the limit is "
                    f"{self.shared_limit}"
                )
            self.groups = -(-self.groups // 2)
            self.threads = self.groups * self.group_threads

    def _pipeline(self) -> bool:
        """Tiles in flight of a group and resident blocks; False where not even two tiles fit."""
        fixed, moving = self.fixed, self.moving
        each = -(-self.block.loop // self.groups)
        self.ahead = self.buffers = 0
        wanted = self.options.resident or min(
            MOST_RESIDENT, -(-self.block.blocks // self.machine.cores)
        )
        resident = max(1, min(wanted, self.machine.threads_per_core // self.threads))
        most = min((self.options.stages or MOST_STAGES) - 1, each)
        while True:
            limit = min(self.shared_limit, self.machine.shared_per_core // resident - 1024)
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
        return self.shared <= self.shared_limit

    # ---- products

    def place(self, stage: Stage, side: str) -> str:
        """The shared address from which this lane reads fragments of a staged tile."""
        rows, inner = {
            ("a", False): ("((lane >> 3) & 1) * 8 + (lane & 7)", "(lane >> 4) * 16"),
            ("a", True): ("(lane >> 4) * 8 + (lane & 7)", "((lane >> 3) & 1) * 16"),
            ("b", True): ("((lane >> 3) & 1) * 8 + (lane & 7)", "(lane >> 4) * 16"),
            ("b", False): ("(lane >> 4) * 8 + (lane & 7)", "((lane >> 3) & 1) * 16"),
        }[side, self.crossed(stage, side)]
        if side == "a" and self.row_warps > 1:
            if stage.rows == self.m:
                rows += f" + warp_row * {self.tiles * 16}"
            else:
                inner += f" + warp_row * {self.tiles * 32}"
        if side == "b" and self.column_warps > 1 and self.n in (stage.rows, stage.inner):
            part = self.axes.axes[self.n].extent // self.column_warps
            if stage.rows == self.n:
                rows += f" + warp_column * {part}"
            else:
                inner += f" + warp_column * {part * 2}"
        if side == "a" and stage.rows == self.m and self.clamped:
            rows = f"min({rows}, {stage.height - 1})"  # rows that are not there repeat the last
        base = "tile" if stage.loop else "fixed"
        return f"{base} + {stage.offset} + ({rows}) * {stage.stride} + {inner}"

    def crossed(self, stage: Stage, side: str) -> bool:
        """Whether fragments are read transposed: the depth runs along the rows of the tile."""
        return (stage.inner == self.m) if side == "a" else (stage.inner not in self.side_depth)

    def fragment(self, stage: Stage, side: str, deep: str, wide: str) -> str:
        """The offset of a fragment: `deep` numbers 16 steps of depth, `wide` 16 rows or columns."""
        down, along = (deep, wide) if self.crossed(stage, side) else (wide, deep)
        return f"({down}) * {16 * stage.stride} + ({along}) * 32"

    def lane_address(self, stage: Stage, side: str, text: Text) -> str:
        name = self.name("at")
        text.line(f"const unsigned {name} = {self.place(stage, side)};")
        return name

    def load(self, node: Node, layout: Layout, text: Text) -> Value:
        """Staged loads come from shared memory as fragments, others straight from device memory."""
        stage = self.stages.get(node)
        if stage is None:
            return super().load(node, layout, text)
        side = "a" if layout is self.c else "b"
        k = (
            next(a for a in self.axes.known(node) if a != self.m)
            if side == "a"
            else layout.order[0]
        )
        n = self.m if side == "a" else layout.order[1]
        if side == "a" and k not in self.depths:
            raise Infeasible("a staged tile whose columns are no depth")
        self.side_depth = {k}
        axes = layout.sorted(self.axes.known(node))
        value = Value(self.name("x"), axes, "f")
        dtype = CTYPE[node.attrs.dtype]
        self.declare(text, value, layout)
        at = self.lane_address(stage, side, text)
        load = "ob_ldmatrix_t" if self.crossed(stage, side) else "ob_ldmatrix"
        steps = layout.dim(k).registers // 4
        wide = self.tiles if side == "a" else -(-layout.dim(n).registers // 2)
        text.line("#pragma unroll")
        text.open(f"for (int k = 0; k < {steps}; k++)")
        text.line("#pragma unroll")
        text.open(f"for (int w = 0; w < {wide}; w++)")
        text.line("unsigned f[4];")
        text.line(f"{load}(f, {at} + {self.fragment(stage, side, 'k', 'w')});")
        v = value.name
        for h in range(2):  # half of the depth
            for e in range(2):  # half of the rows or columns
                if side == "a":
                    r, first = f"2 * w + {e}", f"4 * k + {2 * h}"
                    one, two = f"{v}[{r}][{first}]", f"{v}[{r}][{first} + 1]"
                    reg = 2 * h + e
                else:
                    r, first = f"2 * w + {e}", f"4 * k + {2 * h}"
                    one, two = f"{v}[{first}][{r}]", f"{v}[{first} + 1][{r}]"
                    reg = 2 * e + h
                line = f"ob_unpack({dtype}{{}}, f[{reg}], {one}, {two});"
                if side == "b" and layout.dim(n).registers % 2 and e == 1:
                    line = f"if ({r} < {layout.dim(n).registers}) " + line
                text.line(line)
        text.close()
        text.close()
        return value

    def cover(self, value: Value, k: int, layout: Layout, text: Text) -> None:
        """Zero the elements of an operand that do not exist along the depth."""
        guard = self.guard(k, layout)
        if guard:
            self.nest(text, value.axes, layout)
            text.line(f"if (!({guard})) {self.at(value)} = 0.0f;")
            self.unnest(text, value.axes)

    def scaled(self, a: Node, b: Node, k: int, n: int) -> tuple[Node, Node, bool] | None:
        """For b = v * s or v / s with one s a step of depth: (v, s, divided). The scale may as well
        go to a computed left operand: then v needs no second tile.
        """
        node = base_of(b)
        if node.op not in (Op.MUL, Op.DIV) or base_of(a) in self.stages:
            return None
        if len(self.users[node]) != 1 or node in self.stored:
            return None
        v, s = node.inputs
        if node.op is Op.MUL and self.axes.known(base_of(v)) == (k,):
            v, s = s, v
        if base_of(v) not in self.stages or self.axes.known(base_of(s)) != (k,):
            return None
        if set(self.axes.known(v)) != {k, n} or base_of(s).op is Op.LOAD:
            return None
        return v, s, node.op is Op.DIV

    def left(self, x: Node, k: int, text: Text, scale: str = "") -> tuple[str, str]:
        """Lines that fill `unsigned a[4]` for tile w and step k, and what is declared before.
        `scale` is a factor at register r{k}.
        """
        node = base_of(x)
        steps = self.c.dim(k).registers // 4
        stage = self.stages.get(node)
        registers = self.tiles * steps * 4
        key = (node, f"a {scale}")
        dtype = CTYPE[x.dtype]
        if stage is not None:
            self.side_depth = {k}
            load = "ob_ldmatrix_t" if self.crossed(stage, "a") else "ob_ldmatrix"
            hoist = self.looped and not stage.loop and registers <= HOIST_REGISTERS
            if not hoist:
                at = self.lane_address(stage, "a", text)
                return f"{load}(a, {at} + {self.fragment(stage, 'a', 'k', 'w')});", ""
            if key not in self.packed:
                home = self.out[self.when(node)]
                name = self.packed[key] = self.name("a")
                home.line(f"unsigned {name}[{self.tiles}][{steps}][4];")
                at = self.lane_address(stage, "a", home)
                home.line("#pragma unroll")
                home.open(f"for (int w = 0; w < {self.tiles}; w++)")
                home.line("#pragma unroll")
                home.line(
                    f"for (int k = 0; k < {steps}; k++) "
                    f"{load}({name}[w][k], {at} + {self.fragment(stage, 'a', 'k', 'w')});"
                )
                home.close()
            return "", f"{self.packed[key]}[w][k]"
        if key not in self.packed:
            value = self.value(node, self.c)
            home = self.out[self.when(node)]
            if value.axes != (self.m, k):
                raise Infeasible("a left operand without rows or depth of its own")
            if scale:
                home = text
                product = Value(self.name("v"), value.axes, "f")
                self.declare(home, product, self.c)
                self.nest(home, value.axes, self.c)
                home.line(f"{self.at(product)} = {self.at(value)} * {scale};")
                self.unnest(home, value.axes)
                value = product
            self.cover(value, k, self.c, home)
            name = self.packed[key] = self.name("a")
            v = value.name
            home.line(f"unsigned {name}[{self.tiles}][{steps}][4];")
            home.line("#pragma unroll")
            home.open(f"for (int w = 0; w < {self.tiles}; w++)")
            home.line("#pragma unroll")
            home.open(f"for (int k = 0; k < {steps}; k++)")
            for h in range(2):
                for e in range(2):
                    at = f"{v}[2 * w + {e}][4 * k + {2 * h}"
                    home.line(
                        f"{name}[w][k][{2 * h + e}] = ob_pack({dtype}{{}}, {at}], {at} + 1]);"
                    )
            home.close()
            home.close()
        return "", f"{self.packed[key]}[w][k]"

    def right_operand(self, x: Node, k: int, n: int, text: Text) -> tuple[str, str, str]:
        """Lines that fill `unsigned b[4]` for columns of pair w, step k; and the two registers of a
        tile of 8 columns where they are packed already.
        """
        node = base_of(x)
        stage = self.stages.get(node)
        dtype = CTYPE[x.dtype]
        if stage is not None:
            self.side_depth = {k}
            load = "ob_ldmatrix_t" if self.crossed(stage, "b") else "ob_ldmatrix"
            at = self.lane_address(stage, "b", text)
            return f"{load}(b, {at} + {self.fragment(stage, 'b', 'k', 'w')});", "", ""
        layout = self.right(k, n)
        key = (node, layout.name)
        if key not in self.packed:
            value = self.value(node, layout)
            home = self.out[self.when(node)]
            if value.axes != (k, n):
                raise Infeasible("a right operand without depth or columns of its own")
            self.cover(value, k, layout, home)
            name = self.packed[key] = self.name("b")
            steps, tiles = layout.dim(k).registers // 4, layout.dim(n).registers
            home.line(f"unsigned {name}[{steps}][{tiles}][2];")
            home.line("#pragma unroll")
            home.open(f"for (int k = 0; k < {steps}; k++)")
            home.line("#pragma unroll")
            home.open(f"for (int t = 0; t < {tiles}; t++)")
            v = value.name
            for h in range(2):
                first = f"4 * k + {2 * h}"
                home.line(
                    f"{name}[k][t][{h}] = "
                    f"ob_pack({dtype}{{}}, {v}[{first}][t], {v}[{first} + 1][t]);"
                )
            home.close()
            home.close()
        name = self.packed[key]
        return "", f"{name}[k][t][0]", f"{name}[k][t][1]"

    def product(self, node: Node, layout: Layout, text: Text) -> Value:
        if layout is not self.c:
            raise Infeasible("a product's result as right operand of another")
        n = self.axes.of[node][-1]
        assert n is not None
        value = Value(self.name("c"), (self.m, n), "f")
        self.multiply(node, value, text, fresh=True)
        return value

    def multiply(self, node: Node, value: Value, text: Text, fresh: bool) -> None:
        """value (+)= a @ b."""
        a, b = node.inputs
        k, n = self.axes.of[a][-1], self.axes.of[b][-1]
        assert k is not None
        assert n is not None
        dtype = CTYPE[a.dtype]
        scale = ""
        found = self.scaled(a, b, k, n)
        if found is not None:
            b, s, divided = found
            layout = self.right(k, n)
            if divided:
                scale = self.derived(base_of(s), layout, "inv", "ob_fast_inverse({0})")
            else:
                scale = self.at(self.value(s, layout))
        fill_a, ready_a = self.left(a, k, text, scale)
        fill_b, low, high = self.right_operand(b, k, n, text)
        if fresh:
            self.declare(text, value, self.c, "0.0f")
        steps = self.c.dim(k).registers // 4
        tiles = self.c.dim(n).registers // 2
        text.line("#pragma unroll")
        text.open(f"for (int k = 0; k < {steps}; k++)")
        if fill_a:
            text.line(f"unsigned as[{self.tiles}][4];")
            text.line("#pragma unroll")
            text.open(f"for (int w = 0; w < {self.tiles}; w++)")
            text.line("unsigned (&a)[4] = as[w];")
            text.line(fill_a)
            text.close()
            ready_a = "as[w]"
        text.line("#pragma unroll")
        if fill_b:
            text.open(f"for (int p = 0; p < {-(-tiles // 2)}; p++)")
            text.line("unsigned b[4];")
            text.line("{ const int w = p; " + fill_b + " }")
            text.line("#pragma unroll")
            text.open("for (int e = 0; e < 2; e++)")
            text.line("const int t = 2 * p + e;")
            if tiles % 2:
                text.line(f"if (t >= {tiles}) continue;")
            low, high = "b[2 * e]", "b[2 * e + 1]"
        else:
            text.open(f"for (int t = 0; t < {tiles}; t++)")
        text.line("#pragma unroll")
        text.open(f"for (int w = 0; w < {self.tiles}; w++)")
        v = value.name
        cells = ", ".join(f"{v}[2 * w + {i}][2 * t + {j}]" for i in range(2) for j in range(2))
        text.line(f"ob_mma({dtype}{{}}, {cells}, {ready_a}, {low}, {high});")
        text.close()
        if fill_b:
            text.close()
        text.close()
        text.close()

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
            strides, moves = self.load_moves(s.node)
            step = {a: strides[d] for d, a in enumerate(self.axes.of[s.node]) if a is not None}
            start = self.steps(moves)
            base = self.param_names[s.node.attrs.index] + (f" + {start}" if start else "")
            rows, columns = self.part(s.rows), self.part(s.inner)
            sizes = f"{s.height}, {s.width}, {s.stride}, {threads}"
            if s.fast:
                full = (rows, columns) == (str(s.height), str(s.width))
                out.append(
                    f"ob_copy_tile<{sizes}, {str(full).lower()}>({to} + {s.offset}, {base}, "
                    f"{step[s.rows]}ll, {rows}, {columns}, {who});"
                )
            else:
                out.append(
                    f"ob_copy_any<{sizes}>({to} + {s.offset}, {base}, {step[s.rows]}ll, "
                    f"{step[s.inner]}ll, {rows}, {columns}, {who});"
                )
        return out

    def build(self) -> None:
        """Print all values on demand of the stores."""
        self._sharers()
        for j, store in enumerate(self.block.stores):
            late = self.when(base_of(store.value)) is Phase.POST
            self.store(j, self.after if late else self.c)

    def exchange_elements(self) -> int:
        return sum(
            prod(self.layouts_of(s).dim(a).registers for a in s.value.axes) for s in self.states
        )

    def layouts_of(self, s: State) -> Layout:
        return self.layouts.get(s.value.name, self.c)

    def _sharers(self) -> None:
        """How many groups do what comes after the loop, each for its part of the columns; 1 where a
        product or a fold needs whole rows there.
        """
        self.after, self.sharers = self.c, 1
        if self.groups == 1:
            return
        post = [n for n in self.block.body if self.when(n) is Phase.POST]
        if any(n.op in (Op.MATMUL, Op.SUM, Op.REDUCE_MAX) for n in post):
            return
        columns = {
            a for n in post if n.op in ACCUMULATORS for a in self.axes.known(n) if a != self.m
        }
        columns |= {
            a
            for s in self.block.stores
            if self.when(base_of(s.value)) is Phase.POST
            for a in self.axes.known(s.value)
            if a != self.m
        }
        n = self.groups
        while n > 1 and any(self.c.dim(a).registers % (2 * n) for a in columns):
            n -= 1
        if n == 1 or not columns:
            return
        dims = dict(self.c.dims)
        for a in dims:
            if a == self.m:
                continue
            d = dims[a] = replace(dims[a], lead=f"{dims[a].lead} && group == 0")
            if a in columns:
                part = d.registers // n
                index = d.index.replace("{r}", f"({{r}} + group * {part})")
                dims[a] = replace(d, registers=part, index=index)
        self.sharers = n
        self.after = Layout("after", dims, self.c.order)

    def accumulator(self, node: Node, layout: Layout) -> Value:
        """After the loop each sharing group has its part of an accumulator, joined by `merge`."""
        if layout is self.c or self.sharers == 1:
            return super().accumulator(node, layout)
        self.value(node, self.c)
        axes = layout.sorted(self.axes.known(node))
        return Value(self.name("all"), axes, "f")

    def merge(self, text: Text) -> None:
        """Join the groups' accumulators in the sharing groups."""
        total, gt, groups = self.exchange_elements(), self.group_threads, self.groups
        text.line("__syncthreads();")
        text.line(f"float *const exchange = (float *)(arena + {self.fixed});")
        places: dict[str, int] = {}
        at = 0
        for s in self.states:
            places[s.value.name] = at
            at += prod(self.layouts_of(s).dim(a).registers for a in s.value.axes)

        def cell(s: State, group: str, layout: Layout) -> str:
            flat, size = [], 1
            for a in reversed(s.value.axes):
                r = f"r{a}"
                if layout.dim(a).registers != self.layouts_of(s).dim(a).registers:
                    r = f"(r{a} + group * {layout.dim(a).registers})"
                flat.append(f"{r} * {size}" if size > 1 else r)
                size *= self.layouts_of(s).dim(a).registers
            index = " + ".join([str(places[s.value.name]), *flat])
            return f"exchange[(({group}) * {total} + {index}) * {gt} + member]"

        for s in self.states:
            self.nest(text, s.value.axes, self.layouts_of(s))
            text.line(f"{cell(s, 'group', self.layouts_of(s))} = {self.at(s.value)};")
            self.unnest(text, s.value.axes)
        text.line("__syncthreads();")
        if self.sharers == 1:
            text.open("if (group == 0)")
        for s in self.states:
            if s.op is not Op.RUNNING_MAX:
                continue
            self.nest(text, s.value.axes, self.c)
            text.line("#pragma unroll")
            text.line(
                f"for (int other = 0; other < {groups}; other++) {self.at(s.value)} = "
                f"fmaxf({self.at(s.value)}, {cell(s, 'other', self.c)});"
            )
            self.unnest(text, s.value.axes)
        for s in self.states:
            if s.op is Op.RUNNING_MAX:
                continue
            layout = self.after if self.layouts_of(s) is self.c else self.layouts_of(s)
            made = self.known.get((self.owners[s.value.name], layout))
            if made is None:
                continue
            if made.name != s.value.name:
                self.declare(text, made, layout)
            op = Op.ACCUM_MAX if s.op is Op.ACCUM_MAX else Op.ACCUM_SUM
            self.nest(text, made.axes, layout)
            text.line(f"float all = {self.neutral(op, 'f')};")
            text.line("#pragma unroll")
            text.open(f"for (int other = 0; other < {groups}; other++)")
            item = cell(s, "other", layout)
            if s.peak is not None:
                peak = next(t for t in self.states if t.value.name == s.peak.name)
                item += f" * ob_decay({cell(peak, 'other', self.c)}, {self.at(s.peak)})"
            text.line(f"all = {self.join(op, 'f', 'all', item)};")
            text.close()
            text.line(f"{self.at(made)} = all;")
            self.unnest(text, made.axes)
        if self.sharers == 1:
            text.close()

    def body(self) -> list[str]:
        """The kernel's text between its braces."""
        self.build()
        t = Text()
        fixed = [s for s in self.stages.values() if not s.loop]
        moving = [s for s in self.stages.values() if s.loop]
        groups, loop = self.groups, self.block.loop
        for line in self.split_lines(False):
            t.line(line)
        if self.stages:
            t.line("const unsigned fixed = ob_shared(arena);")
        if fixed:
            for line in self.copies(fixed, "fixed", self.threads, "thread"):
                t.line(line)
            t.line("ob_copy_commit();")
        if moving:
            size = self.moving
            t.line(f"const unsigned tiles = fixed + {self.fixed} + group * {size * self.buffers};")
            for s in range(self.ahead):
                t.open()
                t.line(f"const int it = group + {s * groups};")
                t.open(f"if (it < {loop})")
                for line in self.split_lines(True):
                    t.line(line)
                for line in self.copies(
                    moving, f"tiles + {s * size}", self.group_threads, "member"
                ):
                    t.line(line)
                t.close()
                t.line("ob_copy_commit();")
                t.close()
        if fixed:
            t.line(f"ob_copy_wait<{self.ahead if moving else 0}>();")
            t.line("__syncthreads();")
        t.lines += self.out[Phase.INVARIANT].lines
        if self.looped:
            self.loop(t, moving)
            self.finish_folds(t)
            if groups > 1 and self.states:
                if moving:
                    t.line("ob_copy_wait<0>();")
                self.merge(t)
            if groups > 1:
                t.open(f"if (group < {self.sharers})")
            t.lines += ["  " * t.depth + x for x in self.out[Phase.POST].lines]
            if groups > 1:
                t.close()
        return t.lines

    def loop(self, t: Text, moving: Sequence[Stage]) -> None:
        """The pipelined loop of a group."""
        loop, groups, ahead = self.block.loop, self.groups, self.ahead
        step = f"it += {groups}, slot = slot == {self.buffers - 1} ? 0 : slot + 1"
        if not moving:
            step = f"it += {groups}"
        slot = ", slot = 0" if moving else ""
        t.line("#pragma unroll 1")
        t.open(f"for (int it = group{slot}; it < {loop}; {step})")
        if moving:
            t.line(f"ob_copy_wait<{ahead - 1}>();")
            t.line(f"ob_group_barrier<{self.group_threads}>(1 + group);")
            t.line(f"const unsigned tile = tiles + slot * {self.moving};")
        if moving and self.buffers > ahead:
            t.open()
            t.line(f"const int next = it + {ahead * groups};")
            t.open(f"if (next < {loop})")
            t.line(f"const unsigned to = tiles + (slot == 0 ? {ahead} : slot - 1) * {self.moving};")
            t.line("const int it = next;")
            for line in self.split_lines(True):
                t.line(line)
            for line in self.copies(moving, "to", self.group_threads, "member"):
                t.line(line)
            t.close()
            t.close()
        if moving:
            t.line("ob_copy_commit();")
        for line in self.split_lines(True):
            t.line(line)
        t.lines += ["  " * t.depth + x for x in self.out[Phase.LOOP].lines]
        t.close()

    def shared_bytes(self) -> int:
        """Bytes of shared memory: tiles, or what the groups exchange in their place."""
        exchange = 0
        if self.groups > 1:
            exchange = self.fixed + 4 * self.groups * self.exchange_elements() * self.group_threads
        slack = 0
        if self.column_warps > 1 and self.axes.axes[self.n].extent // self.column_warps % 16:
            # The last warp's fragments of 16 columns reach half beyond the tile.
            slack = 16 * max(s.stride for s in self.stages.values())
        need = max(self.shared + slack, exchange)
        if need > self.shared_limit:
            raise Infeasible(f"{need} bytes of shared memory, the limit is {self.shared_limit}")
        return need
