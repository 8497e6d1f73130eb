"""How large the inputs may be: so that nothing overflows on the way that is finite by its meaning.

Takes a program and its `Inputs`; brings the inputs to a deviation of 1, 1/2, ... 1/16 and gives the
program's results in its own dtypes there, for every set. A program may overflow inside and still
have finite results: a softmax whose sum is infinite in f16 gives p / inf = 0, and is then wrong by
its own dtypes. What it gives in them measures what candidates are allowed, so it must be right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from obelisk.ir.dtype import DType
from obelisk.ir.graph import Graph
from obelisk.ir.interp import evaluate
from obelisk.ir.numeric import NumpyAlgebra, Precision, bind
from obelisk.tune.inputs import Inputs

LEAST_SCALE = 1 / 16
NEAR = 0.9  # of a dtype's largest number: beyond it another order of rounding may overflow
Beyond = Mapping[int, np.ndarray]  # by the order of steps: which elements are out of range


class _Watched(NumpyAlgebra):
    """Notes which values of a program are beyond the range of their dtypes, infinite or NaN."""

    def __init__(self, precision: Precision) -> None:
        super().__init__(precision)
        self.beyond: dict[int, np.ndarray] = {}
        self.steps = 0

    def settle(self, value: Any, dtype: DType, block: bool) -> Any:
        out = super().settle(value, dtype, block)
        if dtype.is_float and np.size(out):
            held = np.float64 if dtype is DType.F64 else np.float32
            limit = NEAR * float(ml_dtypes.finfo(held if block else dtype.numpy).max)
            with np.errstate(all="ignore"):
                # The extremes first, without memory for a mask: a NaN fails both comparisons.
                if not (np.min(out) >= -limit and np.max(out) <= limit):
                    self.beyond[self.steps] = ~(np.abs(out) <= limit)
        self.steps += 1
        return out


def _watched(
    program: Graph, arrays: Sequence[Any], precision: Precision
) -> tuple[list[np.ndarray], Beyond]:
    """What `ir.run` gives in the program's own dtypes (in float64: as it is), and what was beyond
    range.
    """
    algebra = _Watched(precision)
    values = evaluate(program.outputs, bind(program, arrays, algebra), algebra)
    if precision is Precision.EXACT:
        return values, algebra.beyond
    with np.errstate(all="ignore"):
        pairs = zip(values, program.outputs, strict=True)
        results = [np.asarray(v, order="C").astype(o.dtype.numpy) for v, o in pairs]
    return results, algebra.beyond


def _meant(program: Graph, arrays: Sequence[Any], scale: float) -> Beyond:
    """What is beyond range by the program's meaning: in float64, at the least deviation. A mask's
    infinities are, and what would overflow whatever the inputs.
    """
    factor = LEAST_SCALE / scale
    small = [
        np.asarray(x, np.float64) * factor if node.dtype.is_float else x
        for node, x in zip(program.inputs, arrays, strict=True)
    ]
    return _watched(program, small, Precision.EXACT)[1]


def _overflows(found: Beyond, meant: Beyond) -> bool:
    return any(step not in meant or (mask & ~meant[step]).any() for step, mask in found.items())


def wide(array: np.ndarray) -> np.ndarray:
    """Narrow floats in float64, others as they are: numpy's tests know only its own types."""
    return array if array.dtype.kind in "iub" else array.astype(np.float64)


def settled(program: Graph, inputs: Inputs) -> list[list[np.ndarray]]:
    """Halve the inputs, down to a deviation of 1/16, until the program's results are finite in its
    own dtypes, and no step on the way is beyond the range of its dtype that is within it by its
    meaning, in any set. Gives the results of each set in the program's own dtypes.

    The same for the same program and seed.
    """
    meant: dict[int, Beyond] = {}
    while True:
        results: list[list[np.ndarray]] = []
        for k in range(inputs.sets):
            arrays = inputs.select(k)
            got, beyond = _watched(program, arrays, Precision.WORKING)
            results.append(got)
            if inputs.scale <= LEAST_SCALE:
                continue
            bad = k == 0 and not all(np.isfinite(wide(x)).all() for x in got)
            if not bad and beyond:
                if k not in meant:
                    meant[k] = _meant(program, arrays, inputs.scale)
                bad = _overflows(beyond, meant[k])
            if bad:
                inputs.halve()
                break
        else:
            return results
