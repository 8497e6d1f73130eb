"""Matrix products of a block graph: on matrix units where Triton has them, else elementwise.

Takes values of a block graph; gives variables. Operands of 16 bits stay so; f32 is multiplied as
f32 (no tf32); f8 and i8 are held by f16 exactly. What a tile lacks along the depth is 0 on both
sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from obelisk.base.errors import Infeasible
from obelisk.ir.block import Phase
from obelisk.ir.dtype import DType
from obelisk.ir.node import Node
from obelisk.ir.op import Op
from obelisk.lower.cuda.names import kind_of
from obelisk.lower.triton.moves import Moves
from obelisk.lower.triton.names import convert, indented, stored
from obelisk.lower.triton.padding import on_matrix_units
from obelisk.lower.triton.values import ACCUMULATORS, Dim, Value, shape_text, subscript

MOST_TERMS = 1 << 17  # multiply-adds of an elementwise product, padded
LONG_DEPTH, DEPTH_STEP = 128, 64  # from where on a tile's depth is read in parts of what length
EXACT_DEPTH = 1024  # products of bytes that a sum of f32 holds exactly


class Products(Moves):
    """Prints products."""

    def closes(self, node: Node) -> bool:
        users = self.users[node]
        return (
            len(users) == 1
            and users[0].op in ACCUMULATORS
            and users[0].op is not Op.ACCUM_MAX
            and users[0].inputs[0] is node
            and node not in self.stored
            and self.phase[node] is Phase.LOOP
            and on_matrix_units(node)
            and kind_of(node.dtype) == "f"
            and self.batches(node) < 2
        )

    def batches(self, node: Node) -> int:
        """Batch dims of more than one element."""
        return sum(n > 1 for n in node.shape[:-2])

    def product(self, node: Node) -> Value:
        if on_matrix_units(node):
            return self.dot(node)
        return self.elementwise_product(node)

    def chunked(self, node: Node) -> bool:
        """Whether a product reads its operands bit by bit: both lie in device memory as they are
        multiplied, and are long.
        """
        kind = self.unit_type(node)
        return (
            self.dims(node.inputs[0])[-1].pad > LONG_DEPTH
            and not self.wide
            and kind_of(node.dtype) == "f"
            and self.batches(node) == 0
            and all(
                x in self.views
                and self.params[self.views[x].buffer].dtype is kind
                and all(s for s, n in zip(self.views[x].strides, x.shape, strict=True) if n > 1)
                for x in node.inputs
            )
        )

    def in_chunks(self, node: Node, start: str) -> str:
        """`start` plus the product, the depth in a loop of its own."""
        phase, kind = self.when(node), self.unit_type(node)
        total, step = self.let(phase, "part", start), self.name("k")
        outer, self.text.lines[phase] = self.text.lines[phase], []
        texts = []
        for x, depth in ((node.inputs[0], -1), (node.inputs[1], -2)):
            view, dims = self.views[x], list(self.dims(x))
            limit = dims[depth].limit
            dims[depth] = Dim(DEPTH_STEP, DEPTH_STEP, f"{limit} - {step}" if limit else "")
            stride = view.strides[depth]
            further = step if stride == 1 else f"{step} * {stride}"
            value = self.load(view, dims, phase, further=further)
            self.streamed += int(prod(self.pads(dims, value.dims)) * kind.nbytes)
            texts.append(value.text)
        inside = [*self.text.lines[phase], f"{total} = ob_dot({', '.join(texts)}, {total})"]
        self.text.lines[phase] = outer
        self.inner = True
        size = node.inputs[0].shape[-1]
        self.line(phase, f"for {step} in range(0, {size}, {DEPTH_STEP}):")
        for text in inside:
            self.line(phase, indented(text))
        return total

    def multiplied(self, node: Node, state: str) -> str:
        if self.chunked(node):
            return self.in_chunks(node, state)
        a, b = self.factors(node)
        return f"ob_dot({a}, {b}, {state})"

    def dot(self, node: Node) -> Value:
        """A product of its own."""
        phase, dims = self.when(node), self.dims(node)
        which = tuple(d for d, dim in enumerate(dims) if dim.size > 1)
        pads = self.pads(dims, which)
        self.bounded(pads)
        sizes = pads if len(pads) < 4 else [prod(pads[:-2]), *pads[-2:]]
        zero = f"tl.zeros({shape_text(sizes)}, tl.float32)"
        if self.chunked(node):
            return Value(self.in_chunks(node, zero), which, "f")
        a, b = self.factors(node)
        text = f"ob_dot({a}, {b}, {zero})"
        if sizes != pads:
            text = f"tl.reshape({text}, {shape_text(pads)})"
        if kind_of(node.dtype) == "i":
            depth = node.inputs[0].shape[-1]
            if depth > EXACT_DEPTH:
                raise Infeasible(
                    f"a product of bytes over {depth} elements in one tile; the limit is "
                    f"{EXACT_DEPTH}, a loop makes tiles shorter"
                )
            text = f"{text}.to(tl.int32)"
            if node.dtype is DType.I8:
                text = f"{text}.to(tl.int8).to(tl.int32)"
        return Value(self.let(phase, "product", text), which, kind_of(node.dtype))

    def unit_type(self, node: Node) -> DType:
        """The element type in which both operands meet."""
        kinds = {i.dtype for i in node.inputs}
        if kinds in ({DType.F16}, {DType.BF16}):
            return next(iter(kinds))
        if kinds <= {DType.F8E4M3, DType.I8, DType.F16}:
            return DType.F16
        return DType.F32

    def factors(self, node: Node) -> tuple[str, str]:
        """Both operands as tensors of two dims (three with a batch) of one type."""
        a, b = node.inputs
        return self.factor(node, a, a.rank - 1), self.factor(node, b, b.rank - 2)

    def factor(self, node: Node, x: Node, depth: int) -> str:
        """An operand with its batch as the product's; `depth` is the dim that is summed."""
        phase, own, whole = self.when(x), self.dims(x), self.dims(node)
        kind = self.unit_type(node)
        value = self.raw(x)
        ready = value.raw is kind
        if not ready:
            value = self.plain(self.value(x))
        text = value.text if ready else convert(value.text, value.kind, "f")
        # What a load lacks is 0 already, unless its depth is but one element repeated.
        direct = x in self.views and depth in value.dims
        guard = own[depth].guard
        if guard and not direct:
            self.index(own[depth].pad)
            want = tuple(sorted({*value.dims, depth}))
            inside = subscript(guard, (depth,), want)
            text = f"tl.where({inside}, {subscript(text, value.dims, want)}, 0.0)"
            value = replace(value, dims=want)
        if not ready:
            text = stored(text, kind)
        if direct and self.phase[x] is Phase.LOOP:
            self.streamed += int(prod(self.pads(own, value.dims)) * kind.nbytes)
        batch = [d for d in range(node.rank - 2) if whole[d].size > 1]
        want_all = [d - node.rank + x.rank for d in batch] + [x.rank - 2, x.rank - 1]
        sizes = [whole[d].pad for d in batch] + [own[-2].pad, own[-1].pad]
        if list(value.dims) != want_all:
            self.bounded(sizes)
            text = self.let(phase, "factor", text)
            text = f"tl.broadcast_to({subscript(text, value.dims, want_all)}, {shape_text(sizes)})"
        if len(batch) > 1:
            text = f"tl.reshape({text}, {shape_text([prod(sizes[:-2]), *sizes[-2:]])})"
        return text if text == value.text else self.let(phase, "factor", text)

    def elementwise_product(self, node: Node) -> Value:
        """Multiply and sum; dims in order batch..., m, k, n."""
        phase, rank, kind = self.when(node), node.rank, kind_of(node.dtype)
        a, b = node.inputs
        whole = self.dims(node)
        depth = self.dims(a)[-1]
        # Index space: the product's dims with the depth between rows and columns.
        space = [*whole[:-1], depth, whole[-1]]
        sides = ((a, {a.rank - 2: rank - 2, a.rank - 1: rank - 1}),
                 (b, {b.rank - 2: rank - 1, b.rank - 1: rank}))  # fmt: skip
        texts: list[tuple[str, tuple[int, ...]]] = []
        for x, ends in sides:
            value = self.plain(self.value(x))
            there = tuple(ends.get(d, d + rank - x.rank) for d in value.dims)
            texts.append((convert(value.text, value.kind, kind), there))
        which = tuple(sorted({*texts[0][1], *texts[1][1]}))
        along = rank - 1
        if depth.size > 1 and along not in which:
            which = tuple(sorted({*which, along}))
        sizes = [space[d].pad for d in which]
        self.bounded(sizes)
        if prod(sizes) > MOST_TERMS:
            raise Infeasible(
                f"a product of {a.dtype} tiles with {prod(sizes)} terms has no matrix unit here; "
                f"the limit is {MOST_TERMS}, a larger grid or loop makes tiles smaller"
            )
        parts = [subscript(t, d, which) for t, d in texts]
        text = f"{parts[0]} * {parts[1]}"
        text = self.summed(text, texts, space, which, along, kind)
        left = tuple(d if d < along else d - 1 for d in which if d != along)
        if node.dtype is DType.I8:
            text = f"({text}).to(tl.int8).to(tl.int32)"
        return Value(self.let(phase, "product", text), left, kind)

    def summed(
        self,
        text: str,
        parts: Sequence[tuple[str, tuple[int, ...]]],
        space: Sequence[Dim],
        which: tuple[int, ...],
        along: int,
        kind: str,
    ) -> str:
        """The sum of the terms along the depth, 0 where there is none."""
        depth = space[along]
        guard = depth.guard
        size, pad = depth.size, depth.pad
        zero = "0" if kind == "i" else "0.0"
        if size == 1:
            return f"tl.where({guard}, {text}, {zero})" if guard else text
        if guard:
            self.index(pad)
            text = f"tl.where({subscript(guard, (along,), which)}, {text}, {zero})"
        elif not any(along in d for _, d in parts):
            sizes = shape_text([space[d].pad for d in which])
            text = f"tl.broadcast_to({text}, {sizes})"
        return f"tl.sum({text}, {which.index(along)})"
