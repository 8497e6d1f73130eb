"""Matrix products in registers: fragments from shared memory, `mma` by a warp, `wgmma` by four.

Takes values in the layout of the products' results and tiles in shared memory; appends CUDA C++ to
the text of a phase. The plan (which axis is rows, which warps hold what, where tiles lie) is
`fragment`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from obelisk.base.errors import Infeasible
from obelisk.ir.block import Phase
from obelisk.ir.dtype import DType
from obelisk.ir.node import Node
from obelisk.ir.op import Op
from obelisk.lower.chains import ELEMENTWISE
from obelisk.lower.cuda.layout import Dim, Layout, column_dim, right_dim
from obelisk.lower.cuda.names import CTYPE
from obelisk.lower.cuda.options import CudaOptions
from obelisk.lower.cuda.values import VIEWS, Text, Value, Values, base_of

HOIST_REGISTERS = 64  # of an operand that is kept in registers through the loop
WIDE_ROWS = WIDE_COLUMNS = 64  # of a product by four warps
LINE = 128  # bytes of a row of a swizzled tile: 64 columns
VECTOR = 8  # 16-bit elements of a 16-byte access
SCALE_BYTES = 1024  # of shared memory for scales that a group's threads share


@dataclass(frozen=True, slots=True)
class Stage:
    """A load that passes through shared memory.

    Attributes:
        node: the load; `rows` and `inner`: its axes, inner the contiguous one.
        height, width: of the tile in shared memory, in elements, padded.
        stride: bytes between its rows, an odd number of 16-byte chunks, so that the eight rows that
            ldmatrix reads lie in different banks; or 0: blocks of 64 columns with rows of 128
            bytes, the eight chunks of row r in the order chunk ^ (r % 8).
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
        return self.height * (self.stride or self.width * 2)


class Products(Values):
    """Prints products.

    Attributes:
        m: the axis of the products' rows; `shared_axes`: those whose columns warps share.
        depths: axes that products fold.
        tiles: tiles of 16 rows of a warp. `row_warps`, `column_warps`: warps of a group.
        clamped: fewer than 16 rows, of which the real ones alone are in shared memory.
        wide: four warps make a product together.
        bulk: a warp of its own fills the pipeline. `aligned`: some tiles are swizzled.
        unsettled: accumulators whose products run on to the end of an iteration.
        c: the layout of results. `stages`: loads in shared memory; `operands`: those that will be.
    """

    m: int
    shared_axes: frozenset[int]
    depths: set[int]
    tiles: int
    row_warps: int
    column_warps: int
    clamped: bool
    wide: bool
    groups: int
    group_threads: int
    bulk: bool
    aligned: bool
    options: CudaOptions
    c: Layout
    stages: dict[Node, Stage]
    operands: dict[Node, None]
    products: list[Node]
    packed: dict[tuple[Node, str], str]
    unsettled: list[str]
    side_depth: set[int]

    def right(self, k: int, n: int) -> Layout:
        """The layout of a right operand with depth k and columns n."""
        axes = self.axes.axes
        shared = self.column_warps if n in self.shared_axes else 1
        dims = {k: column_dim(axes[k], 16), n: right_dim(axes[n], shared)}
        return Layout(f"right {k} {n}", dims, (k, n))

    def tile_dims(self, node: Node) -> tuple[tuple[int, int], tuple[int, int]]:
        """A load's two axes with their strides in device memory, the contiguous one last."""
        strides, _ = self.load_moves(node)
        outer, inner = ((a, strides[d]) for d, a in enumerate(self.axes.of[node]) if a is not None)
        if outer[1] == 1 and inner[1] != 1:
            outer, inner = inner, outer
        return outer, inner

    # ---- fragments of staged tiles

    def place(self, stage: Stage, side: str) -> str:
        """The shared address from which this lane reads fragments of a staged tile."""
        rows, chunk = {
            ("a", False): ("((lane >> 3) & 1) * 8 + (lane & 7)", "(lane >> 4)"),
            ("a", True): ("(lane >> 4) * 8 + (lane & 7)", "((lane >> 3) & 1)"),
            ("b", True): ("((lane >> 3) & 1) * 8 + (lane & 7)", "(lane >> 4)"),
            ("b", False): ("(lane >> 4) * 8 + (lane & 7)", "((lane >> 3) & 1)"),
        }[side, self.crossed(stage, side)]
        inner = ""
        if side == "a" and self.row_warps > 1:
            first = f"warp_row * {self.tiles * 16}"
            if self.wide:
                first = f"(warp_row >> 2) * {self.tiles * 64} + (warp_row & 3) * 16"
            if stage.rows == self.m:
                rows += f" + {first}"
            else:
                inner += f" + ({first}) * 2"
        if side == "b" and stage.rows in self.shared_axes:
            rows += f" + warp_column * {self.axes.axes[stage.rows].extent // self.column_warps}"
        elif side == "b" and stage.inner in self.shared_axes and stage.stride:
            part = self.axes.axes[stage.inner].extent // self.column_warps
            inner += f" + warp_column * {part * 2}"
        low = "lane"
        if side == "a" and stage.rows == self.m and self.clamped:
            rows = f"min({rows}, {stage.height - 1})"  # rows that are not there repeat the last
            low = f"({rows})"
        chunks = f"{chunk} * 16" if stage.stride else f"(({chunk} ^ {low}) & 7) * 16"
        return f"{self.home(stage)} + ({rows}) * {stage.stride or LINE} + ({chunks}){inner}"

    def home(self, stage: Stage) -> str:
        """The shared address of a staged tile."""
        return f"{'tile' if stage.loop else 'fixed'} + {stage.offset}"

    def crossed(self, stage: Stage, side: str) -> bool:
        """Whether fragments are read transposed: the depth runs along the rows of the tile."""
        return (stage.inner == self.m) if side == "a" else (stage.inner not in self.side_depth)

    def spot(self, stage: Stage, side: str, at: str, deep: str, wide: str) -> str:
        """The address of a fragment: `deep` numbers 16 steps of depth, `wide` tiles of rows (side
        a) or 16 columns.
        """
        if side == "a" and self.wide:
            wide = f"{wide} * 4"  # a warp's next tile is 64 rows on
        down, along = (deep, wide) if self.crossed(stage, side) else (wide, deep)
        if stage.stride:
            return f"{at} + ({down}) * {16 * stage.stride} + ({along}) * 32"
        if side == "b" and stage.inner in self.shared_axes:
            part = self.axes.axes[stage.inner].extent // self.column_warps
            along = f"(warp_column * {part // 16} + {along})"
        block = stage.height * LINE
        return f"({at} ^ (({along}) % 4 * 32)) + ({along}) / 4 * {block} + ({down}) * {16 * LINE}"

    def lane_address(self, stage: Stage, side: str, text: Text) -> str:
        name = self.name("at")
        text.line(f"const unsigned {name} = {self.place(stage, side)};")
        return name

    # ---- operands

    def load(self, node: Node, layout: Layout, text: Text) -> Value:
        """Staged loads come from shared memory as fragments, others straight from device memory."""
        stage = self.stages.get(node)
        if stage is None:
            return super().load(node, layout, text)
        if layout.name.startswith("rows "):
            return self.load_rows(stage, layout, text)
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
        text.line(f"{load}(f, {self.spot(stage, side, at, 'k', 'w')});")
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
        go to a computed left operand or to fragments of v: then v needs no second tile.
        """
        node = base_of(b)
        if node.op not in (Op.MUL, Op.DIV) or base_of(a) in self.operands:
            return None
        if len(self.users[node]) != 1 or node in self.stored:
            return None
        v, s = node.inputs
        if node.op is Op.MUL and self.axes.known(base_of(v)) == (k,):
            v, s = s, v
        if base_of(v) not in self.operands or self.axes.known(base_of(s)) != (k,):
            return None
        if set(self.axes.known(v)) != {k, n} or base_of(s).op is Op.LOAD:
            return None
        return v, s, node.op is Op.DIV

    def bounded(self, a: Node) -> bool:
        """Whether a left operand has room in its dtype for a scale: it is exp(x - peak of x), or
        has the exponents of f32.
        """
        node = base_of(a)
        if a.dtype is DType.BF16:
            return True
        gap = base_of(node.inputs[0]) if node.op is Op.EXP else None
        if gap is None or gap.op is not Op.SUB:
            return False
        x, peak = (base_of(v) for v in gap.inputs)
        if peak.op is Op.RUNNING_MAX:
            peak = base_of(peak.inputs[0])
        return peak.op is Op.REDUCE_MAX and base_of(peak.inputs[0]) is x

    def by_two(self, node: Node) -> bool:
        """Whether a product's result is in units of log 2: nothing but a fast exponential reads it,
        and its left operand, which is computed, takes the factor before it is rounded.
        """
        if node.op is not Op.MATMUL or len(self.users[node]) != 1 or node in self.stored:
            return False
        (power,), left = self.users[node], base_of(node.inputs[0])
        if power.op is not Op.EXP or not self.narrow(power) or left in self.operands:
            return False
        a, b = node.inputs
        k, n = self.axes.of[a][-1], self.axes.of[b][-1]
        if k is None or n is None or self.scaled(a, b, k, n) is not None:
            return False
        return left.op in ELEMENTWISE and self.reads(left) == {node}

    def reads(self, node: Node) -> set[Node]:
        """What reads a value, views of it left out."""
        found: set[Node] = set()
        for user in self.users[node]:
            found |= self.reads(user) if user.op in VIEWS else {user}
        return found

    # ---- operands that are written into their tiles: `remade` prints them

    def tile_of(self, x: Node) -> Node | None:
        """The staged load whose tile a right operand can take."""
        return None

    def in_tile(self, product: Node, wide: bool) -> Node | None:
        """The staged load in whose tile a product finds its right operand computed: where no scale
        can go elsewhere.
        """
        a, b = product.inputs
        k, n = self.axes.of[a][-1], self.axes.of[b][-1]
        assert k is not None
        assert n is not None
        if self.scaled(a, b, k, n) is not None and (self.bounded(a) or not wide):
            return None
        return self.tile_of(b)

    def remake(self, product: Node, text: Text) -> None:
        """Write a product's right operand where its tile is."""

    def meet(self, x: Node, text: Text) -> None:
        """Wait until all warps of the group have written a right operand."""

    def meanwhile(self, node: Node, text: Text) -> None:
        """Print what can be done while the product `node` runs."""

    def deal(self, b: Node, s: Node, k: int, n: int) -> Layout | None:
        """A layout in which the threads of a group share the rows of the staged tile `b`, so that
        each scale of a row is computed once in the group, not once a warp; None where it has not
        that form.
        """
        stage = self.stages[b]
        threads, depth = self.group_threads, self.axes.axes[k].extent
        width = self.axes.axes[n].extent
        if (stage.rows, stage.inner) != (k, n) or not self.options.share_scales:
            return None
        if stage.height != depth or stage.width != width or self.when(s) is not Phase.LOOP:
            return None
        if self.column_warps > 1 or 4 * self.groups * depth > SCALE_BYTES:
            return None
        across = 1
        while across < 8 and 2 * across * depth <= threads and width % (16 * across) == 0:
            across *= 2
        if depth % (threads // across) or self.reaches_more(s, b):
            return None
        rows, part = threads // across, width // across
        down = Dim(
            self.axes.axes[k], depth // rows, f"{{r}} * {rows} + member / {across}", (0, 0), (1, 1),
            "", 1, True,
        )  # fmt: skip
        lanes = (1, across // 2) if across > 1 else (0, 0)
        along = Dim(
            self.axes.axes[n], part, f"member % {across} * {part} + {{r}}", lanes, (1, 1),
            f"member % {across} == 0" if across > 1 else "", VECTOR, True,
        )  # fmt: skip
        return Layout(f"rows {k} {n}", {k: down, n: along}, (k, n), apart=True)

    def reaches_more(self, s: Node, b: Node) -> bool:
        """Whether a value depends on more than the staged tile `b` and constants."""
        stack, seen = [s], set()
        while stack:
            x = base_of(stack.pop())
            if x in seen or x is b or x.op in (Op.SIZE, Op.CONST):
                continue
            seen.add(x)
            if x.op is Op.LOAD or x.op is Op.MATMUL or self.when(x) is not Phase.LOOP:
                return True
            stack.extend(x.inputs)
        return False

    def shared_scale(self, a: Node, s: Node, divided: bool, deal: Layout, text: Text) -> str:
        """The scale (its reciprocal if `divided`) at register r{k}, by way of shared memory. A left
        operand `a` that the scale does not go to is made before the group meets, so that neither
        waits for the other.
        """
        k, n = deal.order
        depth = self.axes.axes[k].extent
        item = self.reciprocal(s, deal) if divided else self.at(self.value(s, deal))
        name, got = self.name("scales"), self.name("scale")
        barrier = f"ob_group_barrier<{self.group_threads}>(1 + group);"
        home = self.carried if self.late else text
        home.line(f"__shared__ float {name}[{self.groups * depth}];")
        if self.bulk:
            text.line(barrier)  # the last iteration's have been read
        self.nest(text, (k,), deal)
        lead = deal.dim(n).lead
        where = f"{name}[group * {depth} + {self.index(k, deal)}]"
        text.line(f"{f'if ({lead}) ' if lead else ''}{where} = {item};")
        self.unnest(text, (k,))
        if not self.bounded(a):
            self.value(a, self.c)
        text.line(barrier)
        text.line(f"float {got}[{self.c.dim(k).registers}];")
        self.nest(text, (k,), self.c)
        text.line(f"{got}[r{k}] = {name}[group * {depth} + {self.index(k, self.c)}];")
        self.unnest(text, (k,))
        return f"{got}[r{k}]"

    def scale_of(self, node: Node, text: Text) -> str:
        """The scale of each step of depth of a product's right operand, at register r{k}."""
        a, b = node.inputs
        k, n = self.axes.of[a][-1], self.axes.of[b][-1]
        assert k is not None
        assert n is not None
        found = self.scaled(a, b, k, n)
        if found is None:
            return ""
        v, s, divided = found
        deal = self.deal(base_of(v), base_of(s), k, n)
        if deal is not None:
            return self.shared_scale(a, base_of(s), divided, deal, text)
        if divided:
            return self.reciprocal(base_of(s), self.right(k, n))
        return self.at(self.value(s, self.right(k, n)))

    def scale_pairs(self, scale: str, k: int, dtype: str, text: Text) -> str:
        """Scales of steps of depth, two to a register as fragments of right operands have them."""
        name = self.name("pair")
        count = self.c.dim(k).registers // 2
        text.line(f"unsigned {name}[{count}];")
        text.line("#pragma unroll")
        text.open(f"for (int i = 0; i < {count}; i++)")
        text.line("float s[2];")
        text.line("#pragma unroll")
        text.open("for (int j = 0; j < 2; j++)")
        text.line(f"const int r{k} = 2 * i + j;")
        guard = self.guard(k, self.c)
        text.line(f"s[j] = {f'({guard}) ? {scale} : 0.0f' if guard else scale};")
        text.close()
        text.line(f"{name}[i] = ob_pack({dtype}{{}}, s[0], s[1]);")
        text.close()
        return name

    def load_rows(self, stage: Stage, layout: Layout, text: Text) -> Value:
        """A staged tile in a layout that deals its rows to threads."""
        value = Value(self.name("x"), layout.order, "f")
        self.declare(text, value, layout)
        k, n = layout.order
        self.loops(text, layout.order, layout, VECTOR)
        place = f"ob_place<{stage.height}, {stage.stride}>"
        at = f"{place}({self.index(k, layout)}, ({self.index(n, layout)}) / {VECTOR})"
        dtype = CTYPE[stage.node.attrs.dtype]
        text.line("unsigned f[4];")
        text.line(f"ob_load16(f, {self.home(stage)} + {at});")
        for i in range(4):
            one, two = (f"{value.name}[r{k}][r{n} + {2 * i + j}]" for j in range(2))
            text.line(f"ob_unpack({dtype}{{}}, f[{i}], {one}, {two});")
        self.unnest(text, layout.order)
        return value

    def left(
        self, x: Node, k: int, text: Text, scale: str = "", late: bool = False
    ) -> tuple[str, str]:
        """Lines that fill `unsigned a[4]` for tile w and step k, and what is declared before.
        `scale` is a factor at register r{k}; `late`: the product comes an iteration later.
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
                return f"{load}(a, {self.spot(stage, 'a', at, 'k', 'w')});", ""
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
                    f"{load}({name}[w][k], {self.spot(stage, 'a', at, 'k', 'w')});"
                )
                home.close()
            return "", f"{self.packed[key]}[w][k]"
        if key not in self.packed:
            value = self.value(node, self.c)
            home = self.out[self.when(node)]
            if value.axes != (self.m, k):
                raise Infeasible("a left operand without rows or depth of its own")
            if scale:
                home = home if scale == "OB_LOG2E" else text
                product = Value(self.name("v"), value.axes, "f")
                self.declare(home, product, self.c)
                self.nest(home, value.axes, self.c)
                home.line(f"{self.at(product)} = {self.at(value)} * {scale};")
                self.unnest(home, value.axes)
                value = product
            self.cover(value, k, self.c, home)
            name = self.packed[key] = self.name("a")
            v = value.name
            (self.carried if late else home).line(f"unsigned {name}[{self.tiles}][{steps}][4];")
            if late:
                home = self.finish
                self.kept.append(v)
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
            return f"{load}(b, {self.spot(stage, 'b', at, 'k', 'w')});", "", ""
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
        scale, pairs = "", ""
        if not self.wide:
            self.remake(node, text)  # early: other products lie before the group meets
        found, made = self.scaled(a, b, k, n), self.in_tile(node, self.wide)
        if found is not None and made is None:
            b = found[0]
            scale = self.scale_of(node, text)
            if not self.bounded(a):
                pairs, scale = self.scale_pairs(scale, k, dtype, text), ""
        late = node in self.late
        scale = scale or ("OB_LOG2E" if self.by_two(node) else "")
        fill_a, ready_a = self.left(a, k, text, scale, late)
        if made is not None:
            self.remake(node, text)  # where none ran meanwhile
            self.meet(b, text)
            b = made
        if late:
            text = self.later
        if self.wide:
            self.multiply_wide(base_of(b), (k, n), value, text, (fill_a, ready_a, fresh), node)
            return
        fill_b, low, high = self.right_operand(b, k, n, text)
        if pairs:
            fill_b += f" for (int i = 0; i < 4; i++) b[i] = ob_times(b[i], {pairs}[2 * k + i % 2]);"
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

    def multiply_wide(
        self,
        b: Node,
        axes: tuple[int, int],
        value: Value,
        text: Text,
        left: tuple[str, str, bool],
        node: Node,
    ) -> None:
        """value (+)= a @ b, the product `node`, by four warps at once; b is a swizzled tile in
        shared memory.
        """
        (k, n), (fill_a, ready_a, fresh) = axes, left
        stage = self.stages[b]
        self.side_depth = {k}
        across = self.crossed(stage, "b")
        if fresh:
            self.declare(text, value, self.c)
        steps, blocks = self.c.dim(k).registers // 4, self.c.dim(n).registers // 16
        dtype = CTYPE[b.attrs.dtype]
        at = self.name("b")
        text.line(f"const unsigned long long {at} = ob_operand({self.home(stage)});")
        if fill_a:
            ready_a = self.name("a")
            text.line(f"unsigned {ready_a}[{self.tiles}][{steps}][4];")
            text.line("#pragma unroll")
            text.open(f"for (int k = 0; k < {steps}; k++)")
            text.line("#pragma unroll")
            text.open(f"for (int w = 0; w < {self.tiles}; w++)")
            text.line(f"unsigned (&a)[4] = {ready_a}[w][k];")
            text.line(fill_a)
            text.close()
            text.close()
            ready_a += "[w][k]"
        # In units of 16 bytes: one more step of depth, one more block of 64 columns.
        block = stage.height * LINE // 16
        if across:
            step = f"k * {16 * LINE // 16} + j * {block}"
        else:
            step = f"k / 4 * {block} + k % 4 * 2 + j * {WIDE_COLUMNS * LINE // 16}"
        text.line("ob_wgmma_begin();")
        text.line("#pragma unroll")
        text.open(f"for (int k = 0; k < {steps}; k++)")
        text.line("#pragma unroll")
        text.open(f"for (int j = 0; j < {blocks}; j++)")
        text.line("#pragma unroll")
        text.open(f"for (int w = 0; w < {self.tiles}; w++)")
        add = "k > 0" if fresh else "1"
        text.line(
            f"ob_wgmma<{int(across)}>({dtype}{{}}, {value.name}, w, 16 * j, {ready_a}, "
            f"{at} + ({step}), {add});"
        )
        for _ in range(3):
            text.close()
        text.line("ob_wgmma_commit();")
        if fresh:
            self.meanwhile(node, text)
        if node in self.early:  # the loop waits for it
            return
        if fresh or not (text is self.out[Phase.LOOP] or text is self.later):
            text.line("ob_wgmma_wait();")
            text.line(f"ob_wgmma_settle({value.name});")
        else:  # an accumulator: nothing in this iteration reads it
            self.unsettled.append(value.name)
