"""Operators that move elements of computed values: reshape, transpose, slice, concat.

Takes values of a block graph; gives variables. Triton has no slices and its tiles are padded, so
what is no plain reshape of whole powers of two is a gather along one axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from obelisk.ir.block import Phase
from obelisk.ir.node import Node
from obelisk.ir.op import Op, ReshapeAttrs
from obelisk.lower.cuda.names import kind_of
from obelisk.lower.triton.names import convert, power
from obelisk.lower.triton.padding import kept_dims
from obelisk.lower.triton.values import Dim, Value, Values, shape_text, subscript
from obelisk.lower.views import row_major, structural


class Moves(Values):
    """Prints what only moves elements."""

    def moved(self, node: Node) -> Value:
        operand, phase = node.inputs[0], self.when(node)
        value = self.value(operand)
        if value.number is not None:
            return value
        match node.op:
            case Op.TRANSPOSE:
                return self.transposed(node, value, phase)
            case Op.BROADCAST:
                pad = node.rank - operand.rank
                return replace(value, dims=tuple(d + pad for d in value.dims))
            case Op.SLICE:
                return self.sliced(node, value, phase)
            case _:
                old, new = self.dims(operand), self.dims(node)
                return self.reshaped(value, old, new, phase)

    def transposed(self, node: Node, value: Value, phase: Phase) -> Value:
        at = {p: d for d, p in enumerate(node.attrs.perm)}  # operand dim -> result dim
        there = [at[d] for d in value.dims]
        order = sorted(range(len(there)), key=lambda k: there[k])
        dims = tuple(there[k] for k in order)
        if order == list(range(len(order))):
            return replace(value, dims=dims)
        text = f"tl.permute({value.text}, {shape_text(order)})"
        return Value(self.let(phase, "turned", text), dims, value.kind)

    def taken(
        self, value: Value, dims: Sequence[Dim], axis: int, index: str, pad: int, phase: Phase
    ) -> str:
        """value[..., index, ...] along `axis`, all dims present; `index` counts along `pad`."""
        which = value.dims
        sizes = [pad if d == axis else dims[d].pad for d in which]
        self.bounded(sizes)
        spread = subscript(f"({index})", (axis,), which)
        spread = f"tl.broadcast_to({spread}, {shape_text(sizes)})"
        return self.let(phase, "taken", f"tl.gather({value.text}, {spread}, {which.index(axis)})")

    def counted(self, pad: int) -> str:
        """An i32 index along a padded dim."""
        return f"{self.index(pad)}.to(tl.int32)" if self.wide else self.index(pad)

    def sliced(self, node: Node, value: Value, phase: Phase) -> Value:
        axis, start = node.attrs.axis, node.attrs.start
        if axis not in value.dims or node.shape == node.inputs[0].shape:
            return value
        old, new = self.dims(node.inputs[0]), self.dims(node)
        if new[axis].size == 1:  # one element: pick it by a sum over what is not it
            self.index(old[axis].pad)
            inside = subscript(f"(r{old[axis].pad} == {start})", (axis,), value.dims)
            zero = "False" if value.kind == "m" else "0"
            text = f"tl.where({inside}, {value.text}, {zero})"
            if value.kind == "m":
                text = convert(text, "m", "i")
            text = f"tl.sum({text}, {value.dims.index(axis)})"
            if value.kind == "m":
                text = convert(text, "i", "m")
            name = self.let(phase, "taken", text)
            return Value(name, tuple(d for d in value.dims if d != axis), value.kind)
        pad = new[axis].pad
        last = old[axis].size - 1
        index = f"tl.minimum({self.counted(pad)} + {start}, {last})"
        return replace(value, text=self.taken(value, old, axis, index, pad, phase))

    def concat(self, node: Node) -> None:
        """Operands side by side: loads at shifted addresses, others gathered."""
        axis, phase, kind = node.attrs.axis, self.when(node), kind_of(node.dtype)
        dims = self.dims(node)
        pad = dims[axis].pad
        which = tuple(d for d, dim in enumerate(dims) if dim.size > 1)
        at, texts = 0, []
        for operand in node.inputs:
            size = operand.shape[axis]
            if operand in self.views:
                loaded = self.load(self.views[operand], dims, phase, (axis, at, size))
                value = self.converted(loaded, phase)
            else:
                value = self.value(operand)
                own = self.dims(operand)
                if axis in value.dims:
                    index = f"tl.minimum(tl.maximum({self.counted(pad)} - {at}, 0), {size - 1})"
                    text = self.taken(value, own, axis, index, pad, phase)
                    value = replace(value, text=text)
            value = self.filled(value, dims, which, phase)
            texts.append((at + size, convert(value.text, value.kind, kind)))
            at += size
        self.index(pad)
        text = texts[-1][1]
        for end, part in reversed(texts[:-1]):
            text = f"tl.where({subscript(f'(r{pad} < {end})', (axis,), which)}, {part}, {text})"
        self.known[node] = Value(self.let(phase, "joined", text), which, kind)

    def reshaped(self, value: Value, old: Sequence[Dim], new: Sequence[Dim], phase: Phase) -> Value:
        """A row-major reshape. Only dims that stay may have short tiles."""
        pairs = kept_dims([d.size for d in old], [d.size for d in new])
        kept_old, kept_new = {a for a, _ in pairs}, {b for _, b in pairs}
        source = [d for d, dim in enumerate(old) if dim.size > 1]
        target = [d for d, dim in enumerate(new) if dim.size > 1]
        middle = [d for d in source if d not in kept_old]
        inner = [d for d in target if d not in kept_new]
        if not middle or not set(middle) & set(value.dims):
            there = dict(pairs)
            dims = tuple(there[d] for d in value.dims if d in there)
            return replace(value, dims=dims)
        value = self.filled(value, old, source, phase)
        pads = self.pads(new, target)
        self.bounded(pads)
        whole = all(old[d].pad == old[d].size for d in middle)
        whole = whole and all(new[d].pad == new[d].size for d in inner)
        if whole:
            text = f"tl.reshape({value.text}, {shape_text(pads)})"
            return Value(self.let(phase, "shaped", text), tuple(target), value.kind)
        flat = self.place_in(old, new, pairs, phase)
        index = f"tl.reshape(tl.broadcast_to({flat}, {shape_text(pads)}), [{prod(pads)}])"
        line = f"tl.reshape({value.text}, [{prod(self.pads(old, source))}])"
        text = f"tl.reshape(tl.gather({line}, {index}, 0), {shape_text(pads)})"
        return Value(self.let(phase, "shaped", text), tuple(target), value.kind)

    def place_in(
        self,
        old: Sequence[Dim],
        new: Sequence[Dim],
        pairs: Sequence[tuple[int, int]],
        phase: Phase,
    ) -> str:
        """For each element of the new tile, its place in the old padded tile (0 where it has none),
        as an expression over the new tile's dims.
        """
        source = [d for d, dim in enumerate(old) if dim.size > 1]
        target = [d for d, dim in enumerate(new) if dim.size > 1]
        steps = dict(zip(source, row_major(self.pads(old, source)), strict=True))
        middle = [d for d in source if d not in {a for a, _ in pairs}]
        inner = [d for d in target if d not in {b for _, b in pairs}]
        counts = row_major([new[d].size for d in inner])
        terms = [
            subscript(self.counted(new[d].pad), (d,), target) + (f" * {c}" if c > 1 else "")
            for d, c in zip(inner, counts, strict=True)
        ]
        total = prod(old[d].size for d in middle)
        number = self.let(phase, "n", f"tl.minimum({' + '.join(terms) or '0'}, {total - 1})")
        parts = []
        for d, c in zip(middle, row_major([old[d].size for d in middle]), strict=True):
            text = number if c == 1 else f"{number} // {c}"
            if d != middle[0]:
                text = f"{text} % {old[d].size}"
            parts.append(f"({text}) * {steps[d]}" if steps[d] > 1 else f"({text})")
        for a, b in pairs:
            step = f" * {steps[a]}" if steps[a] > 1 else ""
            parts.append(subscript(self.counted(new[b].pad), (b,), target) + step)
        return " + ".join(parts)

    def split_axis(self, node: Node, operand: Node, dims: list[Dim]) -> tuple[Value, list[Dim]]:
        axis, keep = node.attrs.axis, node.attrs.keep
        outer = operand.shape[axis] // keep
        pad = self.padding.of(node, axis)
        two = [
            Dim(outer, power(outer), "" if power(outer) == outer else str(outer)),
            Dim(keep, pad, "" if pad == keep else str(keep)),
        ]
        new = [*dims[:axis], *two, *dims[axis + 1 :]]
        phase = self.when(node)
        if operand in self.views:
            shape = (*operand.shape[:axis], outer, keep, *operand.shape[axis + 1 :])
            view = structural(self.views[operand], ReshapeAttrs(shape))
            if view is not None:
                return self.converted(self.load(view, new, phase), phase), new
        value = self.plain(self.value(operand))
        if axis not in value.dims:  # the same throughout: both parts are
            there = tuple(d if d < axis else d + 1 for d in value.dims)
            return replace(value, dims=there), new
        return self.reshaped(value, dims, new, phase), new
