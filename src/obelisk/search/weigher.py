"""How much work a step of a kernel is, before any size is chosen: what the bank ranks values by.

Takes extents and a schedule; gives weights in multiply-adds of a whole kernel, roughly. They order
derivations of one value under one schedule, no more: what kernels cost is `machine`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from obelisk.ir import Op
from obelisk.search.axes import Axis, Dims
from obelisk.search.value import Schedule, Stage

_WEIGHT = {
    Op.EXP: 12.0, Op.LOG: 12.0, Op.SQRT: 6.0, Op.RSQRT: 6.0, Op.TANH: 16.0, Op.SIGMOID: 14.0,
    Op.ERF: 16.0, Op.DIV: 4.0,
}  # fmt: skip
ITERATIONS = 8.0  # of a loop, where weights are counted


class Weigher:
    """Weights under one schedule, over axes of these extents; an axis beyond them is the one of
    blocks, which a tile of parts has.
    """

    def __init__(self, extents: Sequence[int], schedule: Schedule) -> None:
        self.extents, self.schedule = extents, schedule
        self._work: dict[tuple[Dims, Axis | None, Stage], float] = {}

    def work(self, dims: Dims, extra: Axis | None, phase: Stage) -> float:
        """Elements that a step touches over the whole kernel (replication by the grid aside)."""
        key = (dims, extra, phase)
        if key not in self._work:
            self._work[key] = self._elements(dims, extra, phase)
        return self._work[key]

    def _elements(self, dims: Dims, extra: Axis | None, phase: Stage) -> float:
        axes = {a for a in dims if a is not None and a < len(self.extents)}  # else: that of blocks
        if extra is not None:
            axes.add(extra)
        n = float(prod(self.extents[a] for a in axes))
        if phase is Stage.LOOP and self.schedule.loop not in axes:
            n *= ITERATIONS  # once per iteration; the count is not fixed yet
        if phase is Stage.POST and self.schedule.loop in axes:
            n /= ITERATIONS  # a tile that iterations were summed into
        if self.schedule.split is not None and self.schedule.split not in axes:
            n *= 8.0  # once per block along the split axis
        return n

    def weight(self, op: Op, dims: Dims, last: Dims, axis: Axis | None, phase: Stage) -> float:
        """Weight of an operator; `last` are the dims of its last operand.

        A division by a value of fewer axes is one reciprocal of each divisor and a product, since
        that is how code is generated for it.
        """
        work = self.work(dims, axis, phase)
        if op is Op.MATMUL:
            return 0.25 * work
        if op is Op.DIV:
            divisors = self.work(last, None, phase)
            if divisors < work:
                return work + _WEIGHT[op] * divisors
        return _WEIGHT.get(op, 1.0) * work
