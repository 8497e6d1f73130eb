"""Right operands computed from a staged tile and written back in its place.

Takes a right operand that is an elementwise value of one tile in shared memory and of folds along
its rows (a norm of keys or values); appends CUDA C++ by which the warps of a group compute it once
for all of them, row by row, and leave it where the tile was. So it is read as a plain tile is, by
`wgmma` too, and is rounded once, to its own dtype. Where an earlier product of the iteration runs
on its own, this happens meanwhile.
"""

from __future__ import annotations

from obelisk.base.errors import Infeasible
from obelisk.ir.block import Phase
from obelisk.ir.dtype import DType
from obelisk.ir.node import Node
from obelisk.ir.op import Op
from obelisk.lower.chains import ELEMENTWISE
from obelisk.lower.cuda.layout import Dim, Layout, column_dim
from obelisk.lower.cuda.names import CTYPE
from obelisk.lower.cuda.product import LINE, Products, Stage
from obelisk.lower.cuda.values import VIEWS, Text, Value, base_of

FRAGMENT = 16  # rows and columns that one ldmatrix reads


class Remade(Products):
    """Prints computed right operands into the tiles that they are computed from.

    Attributes:
        written: operands that are in their place already, in the current iteration's text.
        fenced: of those, the ones that the group has met behind.
        raws: fragments of tiles, as they are.
    """

    raws: dict[Node, str]
    written: set[Node]
    fenced: set[Node]

    def tile_of(self, x: Node) -> Node | None:
        """The staged load whose tile a right operand can take; None where there is none.

        Nothing but this operand may read the tile, and no row of it may need another.
        """
        node = base_of(x)
        if not self.options.remake or node in self.operands or self.when(node) is not Phase.LOOP:
            return None
        inside, found = self._reach(node)
        if found is None or self.when(found) is not Phase.LOOP or node in self.stored:
            return None
        (rows, _), (inner, _) = self.tile_dims(found)
        axes = self.axes.axes
        if set(self.axes.known(node)) != {rows, inner} or found.attrs.dtype is not x.dtype:
            return None
        for a in (rows, inner):
            if axes[a].split is not None or axes[a].extent % FRAGMENT:
                return None
        for n in inside:
            if n.op in (Op.SUM, Op.REDUCE_MAX):
                if self.axes.of[n.inputs[0]][n.attrs.axis] != inner:
                    return None
            elif n.op is Op.LOAD and n is not found:
                if self.axes.known(n) not in ((), (inner,)) or n in self.operands:
                    return None
            elif n.op not in ELEMENTWISE and n.op not in (*VIEWS, Op.LOAD):
                return None
        ends = {p for p in self.products if base_of(p.inputs[1]) is node}
        for n in inside:
            if n.op is Op.LOAD and n is not found:
                continue
            for user in self.users[n]:
                if user not in inside and user.op is not Op.SIZE and not self._leads(user, ends):
                    return None
        return found

    def _leads(self, node: Node, ends: set[Node]) -> bool:
        """Whether a node is one of `ends`, or a view that nothing but they read."""
        if node in ends:
            return True
        if node.op not in VIEWS or node in self.stored:
            return False
        return all(self._leads(u, ends) for u in self.users[node])

    def _reach(self, node: Node) -> tuple[set[Node], Node | None]:
        """All that a value is computed from, and the one staged load among it with all its axes."""
        inside: set[Node] = set()
        found: list[Node] = []
        stack = [node]
        while stack:
            n = stack.pop()
            if n in inside or n.op in (Op.CONST, Op.SIZE):
                continue
            inside.add(n)
            if n.op is Op.LOAD and set(self.axes.known(n)) == set(self.axes.known(node)):
                found.append(n)
            stack.extend(n.inputs)
        ours = [n for n in found if n in self.operands]
        return inside, ours[0] if len(found) == 1 and ours else None

    def place_layout(self, stage: Stage) -> Layout:
        """Rows of a tile dealt to the warps of a group, 16 to each at a time; `w` counts them."""
        axis = self.axes.axes[stage.rows]
        warps = self.group_threads // 32
        index = "(lane >> 2) + {r} * 8 + row"
        rows = Dim(axis, 2, index, (4, 16), (warps, 1), "lane < 4", 1, True)
        columns = column_dim(self.axes.axes[stage.inner], FRAGMENT)
        dims = {stage.rows: rows, stage.inner: columns}
        return Layout(f"place {stage.rows} {stage.inner}", dims, (stage.rows, stage.inner))

    def open_rows(self, stage: Stage, text: Text) -> str:
        """A loop over the rows of a tile that this warp has, 16 at a time: `row` is the first.
        Gives what stands in front of a store, where some warps have no rows in some rounds.

        Such warps work on the first rows and store nothing. A branch around the work would stand
        between a `wgmma` and the wait for it: ptxas 13.0 then gave the registers of an operand that
        the loop keeps to one that it makes anew (LOG.md).
        """
        warps, height = self.group_threads // 32, self.axes.axes[stage.rows].extent
        rounds = -(-height // (FRAGMENT * warps))
        text.line("#pragma unroll")
        text.open(f"for (int w = 0; w < {rounds}; w++)")
        text.line(f"const int row = w * {FRAGMENT * warps} + (member >> 5) * {FRAGMENT};")
        first, guard = "row", ""
        if height % (FRAGMENT * warps):
            first, guard = f"(row < {height} ? row : 0)", f"if (row < {height}) "
        chunk = "(lane >> 4) * 16" if stage.stride else "((lane >> 4 ^ lane) & 7) * 16"
        text.line(
            f"const unsigned spot = {self.home(stage)} + (((lane >> 3) & 1) * 8 + (lane & 7) + "
            f"{first}) * {stage.stride or LINE} + {chunk};"
        )
        return guard

    def remake(self, product: Node, text: Text) -> None:
        """Compute a right operand and write it where its tile is, once an iteration."""
        x = product.inputs[1]
        node, found = base_of(x), self.in_tile(product, self.wide)
        if found is None or node in self.written:
            return
        self.written.add(node)
        stage = self.stages[found]
        layout, dtype = self.place_layout(stage), CTYPE[x.dtype]
        guard = self.open_rows(stage, text)
        scale = self.row_scale(node, found, layout, text)
        v = ""
        if not scale:
            value = self.value(node, layout)
            v = value.name
            if value.axes != layout.order:
                raise Infeasible("a right operand without depth or columns of its own")
        text.line("#pragma unroll")
        text.open(f"for (int k = 0; k < {stage.width // FRAGMENT}; k++)")
        text.line("unsigned f[4];")
        for half in range(2):
            for e in range(2):
                i, one = 2 * half + e, f"{v}[{e}][4 * k + {2 * half}"
                made = f"ob_pack({dtype}{{}}, {one}], {one} + 1])"
                if scale:
                    made = f"ob_times({self.raw(stage, text)}[k][{i}], {scale}[{e}])"
                text.line(f"f[{i}] = {made};")
        text.line(f"{guard}ob_stmatrix({self.step_of(stage)}, f);")
        text.close()
        text.close()
        if self.wide or self.bulk:
            text.line("ob_operand_fence();")

    def row_scale(self, node: Node, tile: Node, layout: Layout, text: Text) -> str:
        """For a tile times or over one number a row: registers with that number twice, of the
        tile's own dtype; "" for other operands.
        """
        if node.op not in (Op.MUL, Op.DIV) or node.dtype is not DType.F16:
            return ""
        v, s = map(base_of, node.inputs)
        if node.op is Op.MUL and s is tile:
            v, s = s, v
        rows = layout.order[0]
        if v is not tile or self.axes.known(s) != (rows,) or s.op is Op.LOAD:
            return ""
        self.raw(self.stages[tile], text)
        over = node.op is Op.DIV
        item = self.reciprocal(s, layout) if over else self.at(self.value(s, layout))
        name = self.name("two")
        text.line(f"unsigned {name}[2];")
        self.nest(text, (rows,), layout)
        text.line(f"{name}[r{rows}] = ob_pack({CTYPE[node.dtype]}{{}}, {item}, {item});")
        self.unnest(text, (rows,))
        return name

    def raw(self, stage: Stage, text: Text) -> str:
        """The fragments of the rows at hand, as they are in memory."""
        if stage.node not in self.raws:
            name = self.raws[stage.node] = self.name("f")
            steps = stage.width // FRAGMENT
            text.line(f"unsigned {name}[{steps}][4];")
            text.line("#pragma unroll")
            text.line(
                f"for (int k = 0; k < {steps}; k++) ob_ldmatrix({name}[k], {self.step_of(stage)});"
            )
        return self.raws[stage.node]

    def step_of(self, stage: Stage) -> str:
        """The address of 16 columns, number k, of the rows at `spot`."""
        if stage.stride:
            return "spot + k * 32"
        return f"(spot ^ k % 4 * 32) + k / 4 * {stage.height * LINE}"

    def meet(self, x: Node, text: Text) -> None:
        """All warps of the group have written their rows."""
        node = base_of(x)
        if node in self.written and node not in self.fenced:
            self.fenced.add(node)
            text.line(f"ob_group_barrier<{self.group_threads}>(1 + group);")

    def meanwhile(self, node: Node, text: Text) -> None:
        """What can be done while the product `node` runs: operands of the others."""
        if text is not self.out[Phase.LOOP]:
            return
        for other in self.products:
            if other is not node and self.when(other) is Phase.LOOP:
                self.remake(other, text)

    def load(self, node: Node, layout: Layout, text: Text) -> Value:
        """A staged tile in the layout in which its rows are rewritten."""
        stage = self.stages.get(node)
        if stage is None or not layout.name.startswith("place "):
            return super().load(node, layout, text)
        value = Value(self.name("x"), layout.order, "f")
        self.declare(text, value, layout)
        f, dtype = self.raw(stage, text), CTYPE[stage.node.attrs.dtype]
        text.line("#pragma unroll")
        text.open(f"for (int k = 0; k < {stage.width // FRAGMENT}; k++)")
        for half in range(2):
            for e in range(2):
                one = f"{value.name}[{e}][4 * k + {2 * half}"
                text.line(f"ob_unpack({dtype}{{}}, {f}[k][{2 * half + e}], {one}], {one} + 1]);")
        text.close()
        return value
