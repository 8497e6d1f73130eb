"""Bottom-up synthesis of one kernel for one schedule: the bank of values and the best derivation of
the targets.

A *schedule* says which axes the grid cuts and which one the loop cuts. Under a schedule a
block-level value is a tile whose dims are axes, known at a phase (before, in, or after the loop).
Values are combined cheapest first; one is kept if its normal form can still become part of a target
(`terms.Goal`), if it obeys the loop's rules, and if no equal value (by normal form, then by
fingerprint over two prime fields) is in the bank at no more cost. Because the rules bound every
exponent and every sum, the closure is finite: when the queue empties, the space of this schedule is
exhausted within the value limit.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from obelisk.ir import Node, Op
from obelisk.search import field as F
from obelisk.search.axes import Axis, Dims
from obelisk.search.program import Program, aligned, apply_field
from obelisk.search.terms import Peak, Poly
from obelisk.search.tiles import both, broadcast, given, led, meet, rescaled, running, turned
from obelisk.search.value import COMBINED, LEAD, LOOP_AT, Counts, Mode, Schedule, Stage, Value
from obelisk.search.weigher import Weigher

_UNARY = (
    Op.EXP,
    Op.LOG,
    Op.SQRT,
    Op.RSQRT,
    Op.SQUARE,
    Op.TANH,
    Op.SIGMOID,
    Op.ERF,
    Op.NEG,
)
_LINEAR_UNARY = (Op.NEG,)
_LAWLESS = (Op.LESS, Op.WHERE, Op.MAX, Op.MIN)
TURN = 0.05  # weight of a transpose, which is mostly a way to read


class Synthesis:
    """The bank for one schedule."""

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        counts: Counts,
        *,
        most_values: int,
        most_ops: int,
        online: bool,
        mode: Mode,
        stop: Callable[[], bool],
    ) -> None:
        self.program, self.schedule, self.counts = program, schedule, counts
        self.segment, self.terms = program.segment, program.terms
        self.most_values, self.most_ops, self.online, self.stop = (
            most_values,
            most_ops,
            online,
            stop,
        )
        self.mode = mode
        self.values: list[Value] = []
        self.weights: list[float] = []
        self._by_form: dict[object, Value] = {}
        self._by_print: dict[object, Value] = {}
        self._queue: list[tuple[float, int]] = []
        self._ready: list[Value] = []
        self._done: set[int] = set()
        self._by_poly: dict[int, list[Value]] = {}
        self._ops = program.segment.ops
        self._turned = [n for n in program.segment.nodes if n.op is Op.TRANSPOSE]
        self._lawless = [n for n in program.segment.nodes if n.op in _LAWLESS]
        self._pseudo = len(
            program.segment.extents
        )  # the axis of blocks, once it is a dim of a tile
        self.weigher = Weigher(self.segment.extents, schedule)

    # -- tiles -----------------------------------------------------------------------------------
    def scatter(self, x: F.Pair, dims: Dims) -> F.Pair:
        """A whole tiny tensor cut by the schedule: leading axes for the grid and the loop, then the
        tile.
        """

        def cut(a: Any) -> Any:
            shape: list[int] = []
            place: dict[int, int] = {}
            own: list[int] = []
            for axis, n in zip(dims, a.shape, strict=True):
                for at, cutter in enumerate((self.schedule.split, self.schedule.loop)):
                    if axis is not None and axis == cutter:
                        place[at] = len(shape)
                        shape.append(2)
                        n //= 2
                own.append(len(shape))
                shape.append(n)
            extra = 0
            for i in range(LEAD):
                if i not in place:
                    place[i] = len(shape) + extra
                    extra += 1
            return a.reshape((*shape, *(1,) * extra)).transpose(
                [*(place[i] for i in range(LEAD)), *own]
            )

        return cut(x[0]), None if x[1] is None else cut(x[1])

    # -- the bank --------------------------------------------------------------------------------
    def offer(
        self,
        step: tuple[Any, ...],
        operands: tuple[Value, ...],
        dims: Dims,
        phase: Stage,
        poly: Poly,
        weight: float,
        compute: Callable[[], F.Pair],
        *,
        partial: str = "",
        peak: int = -1,
        open_fold: str = "",
        gauge: bool = False,
    ) -> None:
        """Try one value: prune it, merge it with an equal one, or add it."""
        self.counts.states += 1
        if not gauge and not self.program.goal.useful(poly):
            self.counts.prune("goal")
            return
        mask, cost = 0, weight
        for v in operands:
            mask |= v.mask
        if operands:
            cost += self._total(mask)
        form = (poly.id, dims, phase, partial, peak, open_fold)
        known = self._by_form.get(form)
        if known is not None:
            self._merge(known, step, mask, cost, weight)
            return
        if len(self.values) >= self.most_values:
            self.counts.prune("bank size")
            return
        if mask.bit_count() + 1 > self.most_ops + len(self.segment.leaves):
            self.counts.prune("operators")
            return
        data = compute()
        print_key = (
            data[0].shape,
            data[0].tobytes(),
            data[1] is None,
            dims,
            phase,
            partial,
            peak,
            open_fold,
        )
        known = self._by_print.get(print_key)
        if known is not None:
            self._by_form[form] = known
            self._merge(known, step, mask, cost, weight)
            return
        bit = len(self.weights)
        self.weights.append(weight)
        v = Value(
            len(self.values),
            step,
            dims,
            phase,
            partial,
            peak,
            open_fold,
            poly,
            data,
            mask | 1 << bit,
            cost,
            gauge,
        )
        self.values.append(v)
        self._by_form[form] = self._by_print[print_key] = v
        heapq.heappush(self._queue, (cost, v.id))

    def _total(self, mask: int) -> float:
        out = 0.0
        while mask:
            low = mask & -mask
            out += self.weights[low.bit_length() - 1]
            mask ^= low
        return out

    def _merge(
        self, known: Value, step: tuple[Any, ...], mask: int, cost: float, weight: float
    ) -> None:
        """An equal value: keep the cheaper derivation."""
        self.counts.bank_hits += 1
        if cost < known.cost * (1 - 1e-9):
            bit = len(self.weights)
            self.weights.append(weight)
            known.step, known.mask, known.cost = step, mask | 1 << bit, cost
            if known.id not in self._done:
                heapq.heappush(self._queue, (cost, known.id))

    # -- the closure -----------------------------------------------------------------------------
    def run(self) -> None:
        """Close the bank, cheapest value first."""
        self._leaves()
        while self._queue:
            if self.stop():
                return
            cost, ident = heapq.heappop(self._queue)
            v = self.values[ident]
            if ident in self._done or cost > v.cost:
                continue
            self._done.add(ident)
            self._expand(v)
            self._ready.append(v)

    def _leaves(self) -> None:
        for i, leaf in enumerate(self.segment.leaves):
            dims = self.segment.dims[leaf]
            data = self.scatter(self.program.tiny[leaf], dims)
            phase = (
                Stage.LOOP
                if self.schedule.loop in [a for a in dims if a is not None]
                else Stage.INVARIANT
            )
            if self.schedule.loop is None:
                phase = Stage.INVARIANT
            weight = self.weigher.work(dims, None, phase) * 0.5
            self.offer(("load", i), (), dims, phase, self.program.poly[leaf], weight, given(data))
        for node in self.segment.nodes:
            if node.op is Op.CONST:
                step: tuple[Any, ...] = ("const", node.attrs.value)
            elif node.op is Op.SIZE:
                axis = self.program.size_axis(node)
                step = ("size", axis) if axis is not None else ("const", 1.0)
            else:
                continue
            data = self.program.tiny[node]
            lead = (
                data[0].reshape((1,) * LEAD),
                None if data[1] is None else data[1].reshape((1,) * LEAD),
            )
            self.offer(
                step,
                (),
                (),
                Stage.INVARIANT,
                self.program.poly[node],
                0.0,
                given(lead),
                gauge=True,
            )

    def _expand(self, v: Value) -> None:
        self._transposes(v)
        self._unary(v)
        self._reductions(v)
        self._accumulators(v)
        self._cross(v)
        self._by_poly.setdefault(v.poly.id, []).append(v)
        self._templates(v)
        for w in [*self._ready, v]:
            self._pair(v, w)
            if w is not v:
                self._pair(w, v)

    def _transposes(self, v: Value) -> None:
        """The transposes of the program, on values that have the axes of its operand or ones."""
        if v.peak != -1:
            return
        for node in self._turned:
            source, perm = self.segment.dims[node.inputs[0]], node.attrs.perm
            if len(v.dims) != len(source) or any(
                a not in (None, b) for a, b in zip(v.dims, source, strict=True)
            ):
                continue
            axes = [0, 1, *(LEAD + p for p in perm)]
            self.offer(
                (Op.TRANSPOSE, v.id, *perm),
                (v,),
                tuple(v.dims[p] for p in perm),
                v.phase,
                v.poly,
                TURN * self.weigher.work(v.dims, None, v.phase),
                partial(_turned, v, axes),
                partial=v.partial,
                open_fold=v.open,
            )

    def _unary(self, v: Value) -> None:
        for op in _UNARY:
            if op not in self._ops:
                continue
            if (v.partial or v.open) and op not in _LINEAR_UNARY:
                self.counts.prune("partial value")
                continue
            if v.peak != -1 and op not in _LINEAR_UNARY and op is not Op.EXP:
                continue
            if op is Op.EXP and not self._may_exponentiate(v):
                self.counts.prune("range")
                continue
            self._emit(op, (v,), v.dims, None, v.peak)

    def _may_exponentiate(self, v: Value) -> bool:
        """exp only of what the program itself exponentiates, or of a value shifted by its
        maximum.
        """
        return (self.mode.raw and v.poly.id in self.program.raw_exponents) or self._is_shifted(v)

    def _is_shifted(self, v: Value) -> bool:
        return bool(v.step[0] == "shift")

    def _reductions(self, v: Value) -> None:
        sums = Op.SUM in self._ops or Op.MATMUL in self._ops
        peaks = Op.REDUCE_MAX in self._ops or (self.online and Op.EXP in self._ops)
        for d, axis in enumerate(v.dims):
            if axis == self._pseudo:
                self._fold_blocks(v, d)
                continue
            if axis is None or axis not in self.segment.reduced or v.phase is Stage.COMBINE:
                continue
            dims = (*v.dims[:d], None, *v.dims[d + 1 :])
            if v.partial == "tile" and axis != self.schedule.loop:
                continue  # the same sum is there before the accumulator
            if sums and v.partial != "max":
                self._reduce(Op.SUM, v, d, axis, dims)
            if peaks and not v.partial and v.peak < 0:
                self._reduce(Op.REDUCE_MAX, v, d, axis, dims)

    def _fold_blocks(self, v: Value, d: int) -> None:
        """Second kernel: sum the blocks' parts. The normal form does not tell parts from the
        whole.
        """
        if v.partial == "sum" and v.peak in (-1, COMBINED):
            dims = (*v.dims[:d], None, *v.dims[d + 1 :])
            self.offer(
                (Op.SUM, v.id, d),
                (v,),
                dims,
                v.phase,
                v.poly,
                self.weigher.work(v.dims, None, v.phase) * 8,
                lambda: F.total(v.data, LEAD + d),
                peak=v.peak,
            )

    def _cross(self, v: Value) -> None:
        """Store the blocks' parts and read them in a second kernel, where the blocks are a leading
        dim.
        """
        if (
            self.schedule.split is None
            or v.partial
            or v.phase in (Stage.LOOP, Stage.COMBINE)
            or not v.open
        ):
            return
        # (blocks, 1, tile...) -> (1, 1, blocks, tile...)
        p, q = v.data
        data = (led(p), None if q is None else led(q))
        dims = (self._pseudo, *v.dims)
        self.offer(
            ("cross", v.id),
            (v,),
            dims,
            Stage.COMBINE,
            v.poly,
            16 * self.weigher.work(v.dims, None, v.phase),
            given(data),
            partial=v.open,
            peak=v.peak,
        )

    def _weigh(self, v: Value, m: Value) -> None:
        """v * exp(m - max over blocks of m), m the maximum that each block shifted v by."""
        if (
            v.phase is not Stage.COMBINE
            or m.phase is not Stage.COMBINE
            or v.peak < 0
            or v.partial != "sum"
        ):
            return
        source, own = self.values[m.step[1]], self.values[v.peak]
        if source.id != own.id and (source.step[0] != "accum_max" or source.step[1] != own.step[1]):
            return

        def compute() -> F.Pair:
            a, b = both(v, m)
            return F.mul(a, F.exp(F.linear(b, F.peak(b, LEAD), -1)))

        self.offer(
            ("weigh", v.id, m.id),
            (v, m),
            v.dims,
            v.phase,
            v.poly,
            16 * self.weigher.work(v.dims, None, v.phase),
            compute,
            partial="sum",
            peak=COMBINED,
        )

    def _reduce(self, op: Op, v: Value, d: int, axis: Axis, dims: Dims) -> None:
        t = self.terms
        poly = t.sum(v.poly, axis) if op is Op.SUM else t.peak(v.poly, axis)
        if op is Op.SUM and t.cancels(poly, v.poly):
            self.counts.prune("cancellation")
            return
        partial = v.partial or (
            ("sum" if op is Op.SUM else "max")
            if axis == self.schedule.loop and v.phase is Stage.LOOP
            else ""
        )
        if partial == "tile":
            partial = ""
        self.offer(
            (op, v.id, d),
            (v,),
            dims,
            v.phase,
            poly,
            self.weigher.work(v.dims, None, v.phase),
            lambda: (F.total if op is Op.SUM else F.peak)(v.data, LEAD + d),
            partial=partial,
            peak=v.peak,
            open_fold=v.open
            or (("sum" if op is Op.SUM else "max") if axis == self.schedule.split else ""),
        )

    def _accumulators(self, v: Value) -> None:
        if v.phase is not Stage.LOOP:
            return
        weight = self.weigher.work(v.dims, None, v.phase)
        loop_axis = LOOP_AT
        if not v.partial:
            self._tile_accumulator(v, weight)
            return
        if v.partial == "max":
            for name, phase, compute in (
                ("accum_max", Stage.POST, lambda: F.peak(v.data, loop_axis)),
                ("running_max", Stage.LOOP, lambda: running(v.data, loop_axis)),
            ):
                if name == "running_max" and not self.online:
                    continue
                self.offer(
                    (name, v.id),
                    (v,),
                    v.dims,
                    phase,
                    v.poly,
                    weight,
                    compute,
                    open_fold=v.open,
                    peak=-2 if phase is Stage.LOOP else -1,
                )
            return
        if v.peak >= 0:
            m = self.values[v.peak]
            self.offer(
                ("accum_rescale", v.id, m.id),
                (v, m),
                v.dims,
                Stage.POST,
                v.poly,
                weight * 3,
                lambda: rescaled(v.data, m.data, loop_axis),
                peak=m.id,
                open_fold=v.open,
            )
            return
        self.offer(
            ("accum_sum", v.id),
            (v,),
            v.dims,
            Stage.POST,
            v.poly,
            weight,
            lambda: F.total(v.data, loop_axis),
            open_fold=v.open,
        )

    def _tile_accumulator(self, v: Value, weight: float) -> None:
        """Tiles summed element by element over the iterations; what is left to sum is the tile."""
        axis = self.schedule.loop
        sums = Op.SUM in self._ops or Op.MATMUL in self._ops
        if not sums or axis not in v.dims or axis not in self.segment.reduced or v.peak != -1:
            return
        assert axis is not None
        if not self.program.goal.useful(self.terms.sum(v.poly, axis)):
            return  # not a tile whose sum is wanted
        self.offer(
            ("accum_sum", v.id),
            (v,),
            v.dims,
            Stage.POST,
            v.poly,
            weight,
            lambda: F.total(v.data, LOOP_AT),
            partial="tile",
            open_fold=v.open,
        )

    # -- pairs -----------------------------------------------------------------------------------
    def _pair(self, a: Value, b: Value) -> None:
        if b.step[0] == "cross":
            self._weigh(a, b)
        if not meet(a, b) or a.partial == "max" or b.partial == "max":
            return
        self._shift(a, b)
        if a.peak == -2 or b.peak == -2 or a.open == "max" or b.open == "max":
            return
        dims = broadcast(a.dims, b.dims)
        if dims is not None:
            self._elementwise(a, b, dims)
        if Op.MATMUL in self._ops and Stage.COMBINE not in (a.phase, b.phase):
            self._matmul(a, b)

    def _shift(self, a: Value, b: Value) -> None:
        """a - b, b a maximum of a: the argument of a safe exponential."""
        if a.partial or a.open or a.peak != -1 or a.poly.id not in self.program.exponents:
            return
        if len(b.poly.terms) != 1:
            return
        ((mono, _),) = b.poly.terms
        if len(mono) != 1:
            return
        kind = self.terms.kind[mono[0][0]]
        if not isinstance(kind, Peak) or kind.of is not a.poly:
            return
        dims = broadcast(a.dims, b.dims)
        if dims is None or dims != a.dims:
            return
        moving = b.peak == -2
        phase = max(a.phase, b.phase)
        self.offer(
            ("shift", a.id, b.id),
            (a, b),
            dims,
            phase,
            self.terms.add(a.poly, b.poly, -1),
            self.weigher.work(dims, None, phase),
            lambda: F.linear(*both(a, b), -1),
            peak=b.id if moving or b.open else -1,
            gauge=True,
        )

    def _elementwise(self, a: Value, b: Value, dims: Dims) -> None:
        ops = self._ops
        if a.id <= b.id and (Op.MUL in ops or Op.DIV in ops) and not (a.partial and b.partial):
            self._linear_pair(Op.MUL, a, b, dims)
        if (Op.DIV in ops or Op.RSQRT in ops) and not b.partial and not b.open:
            self._linear_pair(Op.DIV, a, b, dims)
        if a.id < b.id and (Op.ADD in ops or Op.SUB in ops):
            self._sum_pair(Op.ADD, a, b, dims)
        if Op.SUB in ops and a is not b:
            self._sum_pair(Op.SUB, a, b, dims)

    def _templates(self, v: Value) -> None:
        """Operators without laws: only as the program applies them, on values equal to its
        operands.
        """
        for node in self._lawless:
            polys = [self.program.poly[i] for i in node.inputs]
            if v.poly not in polys:
                continue
            choices = [self._by_poly.get(p.id, []) for p in polys]
            for operands in itertools.product(*choices):
                if v not in operands or any(x.partial or x.open or x.peak != -1 for x in operands):
                    continue
                dims: Dims | None = operands[0].dims
                for x, y in itertools.pairwise(operands):
                    dims = broadcast(dims, y.dims) if dims is not None and meet(x, y) else None
                if dims is not None:
                    self._emit(node.op, operands, dims, None, -1)

    def _linear_pair(self, op: Op, a: Value, b: Value, dims: Dims) -> None:
        """A product or quotient. Against a partial sum the other factor must not vary over what is
        still to be summed.
        """
        for x, y in ((a, b), (b, a)):
            over = self._pseudo if x.phase is Stage.COMBINE else self.schedule.loop
            if x.partial and over in y.dims:
                self.counts.prune("summed too early")
                return
        if a.open and b.open:
            return
        if (a.open and self._varies(b)) or (b.open and self._varies(a)):
            self.counts.prune("summed too early")
            return
        peak = self._joint_peak(op, a, b)
        if peak is None:
            return
        self._emit(
            op, (a, b), dims, None, peak, partial=a.partial or b.partial, open_fold=a.open or b.open
        )

    def _varies(self, v: Value) -> bool:
        """True if a value differs between elements that the split axis will still sum over."""
        return self.schedule.split in v.dims if self.schedule.split is not None else False

    def _joint_peak(self, op: Op, a: Value, b: Value) -> int | None:
        """The shift of a product; a quotient of equally shifted values has none; two shifts do not
        multiply.
        """
        if a.peak == -1 and b.peak == -1:
            return -1
        if op is Op.DIV:
            return -1 if a.peak == b.peak else (a.peak if b.peak == -1 else None)
        if a.peak != -1 and b.peak != -1:
            return None
        return a.peak if b.peak == -1 else b.peak

    def _sum_pair(self, op: Op, a: Value, b: Value, dims: Dims) -> None:
        if a.partial != b.partial or a.open != b.open or a.peak != b.peak:
            self.counts.prune("unlike sums")
            return
        if self.mode.joined and op is Op.ADD and a.step[0] is Op.MATMUL is b.step[0]:
            self._joined(a, b, dims)
            return
        self._emit(op, (a, b), dims, None, a.peak, partial=a.partial, open_fold=a.open)

    def _joined(self, a: Value, b: Value, dims: Dims) -> None:
        """xw + yv as [x y] @ [w; v]: one product, and the concatenation is only a place in
        memory.
        """
        x, w = (self.values[i] for i in a.step[1:])
        y, v = (self.values[i] for i in b.step[1:])
        if x.dims[:-1] != y.dims[:-1] or w.dims[:-2] != v.dims[:-2] or w.dims[-1] != v.dims[-1]:
            return
        operands = (x, y, w, v)
        self.offer(
            ("joined", *(o.id for o in operands)),
            operands,
            dims,
            max(o.phase for o in operands),
            self.terms.add(a.poly, b.poly),
            sum(0.25 * self.weigher.work(dims, o.dims[-1], o.phase) for o in (x, y)),
            lambda: F.linear(*both(a, b), 1),
            partial=a.partial,
            peak=a.peak,
            open_fold=a.open,
        )

    def _matmul(self, a: Value, b: Value) -> None:
        if len(a.dims) < 2 or len(b.dims) < 2:
            return
        axis = a.dims[-1]
        if axis is None or b.dims[-2] != axis or axis not in self.segment.reduced:
            return
        if a.partial or b.partial or (a.open and b.open):
            return
        if (a.open and self._varies(b)) or (b.open and self._varies(a)):
            return
        batch = broadcast(a.dims[:-2], b.dims[:-2])
        if batch is None or (a.dims[-2] is not None and a.dims[-2] == b.dims[-1]):
            return
        dims = (*batch, a.dims[-2], b.dims[-1])
        if axis in dims or len({x for x in dims if x is not None}) != sum(
            x is not None for x in dims
        ):
            return
        peak = self._joint_peak(Op.MUL, a, b)
        if peak is None:
            return
        looped = axis == self.schedule.loop
        self._emit(
            Op.MATMUL,
            (a, b),
            dims,
            axis,
            peak,
            partial="sum" if looped else "",
            open_fold=a.open or b.open or ("sum" if axis == self.schedule.split else ""),
        )

    def _emit(
        self,
        op: Op,
        operands: tuple[Value, ...],
        dims: Dims,
        axis: Axis | None,
        peak: int,
        *,
        partial: str = "",
        open_fold: str = "",
    ) -> None:
        phase = max(v.phase for v in operands)
        if op in _LINEAR_UNARY:
            partial, open_fold = operands[0].partial, operands[0].open
        poly, rule = self.program.combined(op, tuple(v.poly for v in operands), axis)
        if rule:
            self.counts.states += rule == "goal"
            self.counts.prune(rule)
            return
        self.offer(
            (op, *(v.id for v in operands)),
            operands,
            dims,
            phase,
            poly,
            self.weigher.weight(op, dims, operands[-1].dims, axis, phase),
            lambda: apply_field(op, [aligned(v.data, LEAD, len(dims)) for v in operands], 0),
            partial=partial,
            peak=peak,
            open_fold=open_fold,
        )

    # -- targets ---------------------------------------------------------------------------------
    def find(self, target: Node) -> Value | None:
        """The bank's cheapest value that equals a target under this schedule, if there is one."""
        dims = self.segment.dims[target]
        want = self.scatter(self.program.tiny[target], dims)[0]
        looped = self.schedule.loop is not None and self.schedule.loop in dims
        best: Value | None = None
        for v in self.values:
            if v.partial or v.open or v.peak != -1:
                continue
            if v.dims == dims and v.phase is not Stage.COMBINE:
                if looped != (v.phase is Stage.LOOP):
                    continue
                got = v.data[0]
            elif v.phase is Stage.COMBINE and v.dims == (None, *dims):
                got = v.data[0].reshape((1,) * LEAD + v.data[0].shape[LEAD + 1 :])
            else:
                continue
            if (
                got.shape == want.shape
                and np.array_equal(got, want)
                and (not best or v.cost < best.cost)
            ):
                best = v
        return best


def _turned(v: Value, axes: list[int]) -> F.Pair:
    """A value's numbers, transposed."""
    return turned(v.data, axes)
