"""The float judge: a candidate against its program in float64, and in the program's own dtypes.

Three checks on several distributions of inputs. *Meaning*: both interpreted in float64 must agree
to what float64 can resolve, judged by how far the program in float32 is from itself in float64.
*Accuracy*: in its own dtypes the candidate may be four times as far from the float64 reference as
the program is in those dtypes. *Range*: where the program stays well inside the range of its types,
the candidate must be finite wherever the program is. No tolerance is a fixed absolute number.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from obelisk.ir.dtype import DType
from obelisk.ir.graph import Graph
from obelisk.ir.node import Node
from obelisk.ir.numeric import NumpyAlgebra, Precision
from obelisk.ir.resize import blocks_of
from obelisk.verify.instances import Instance, work_of
from obelisk.verify.rounding import HEADROOM, Rounding, interpret, row_scale

Array = Any

SINGLE_TO_DOUBLE = 2.0**-29  # float64's rounding unit over float32's
_DRAWS, _DRAWS_AT_FULL_SIZE = 8, 2  # of random rounding, where a difference is seen
SLACK = 64  # two float64 evaluations in different orders against one float32 error
ALLOWED = 4  # times the program's own error in the working dtype


class Effort(enum.Enum):
    """How much work and how many input elements a look at full size may cost."""

    LITTLE = (300_000_000, 4_000_000)  # for a candidate that was proved: tens of milliseconds
    SOME = (1_500_000_000, 4_000_000)  # for one that was not: a fraction of a second
    MUCH = (8_000_000_000, 120_000_000)  # to decide between refuted and tested: seconds


_BLOCK_STEPS = 40_000  # node evaluations of a graph with short tiles, which runs block by block


class _Single(NumpyAlgebra):
    """Everything in float32, whatever the dtypes: the yardstick of conditioning."""

    def __init__(self) -> None:
        super().__init__(Precision.WORKING)

    def _held(self, x: Array, dtype: DType) -> Array:
        with np.errstate(over="ignore"):
            return x.astype(np.float32)

    def settle(self, value: Array, dtype: DType, block: bool) -> Array:
        return super().settle(value, dtype, True)


class _Working(NumpyAlgebra):
    """The graph's own dtypes; records how near to the limits of its types it came."""

    def __init__(self) -> None:
        super().__init__(Precision.WORKING)
        self.nearness = 0.0

    def settle(self, value: Array, dtype: DType, block: bool) -> Array:
        out = super().settle(value, dtype, block)
        if dtype.is_float and out.size:
            limit = _largest(dtype.accumulator if block else dtype)
            low, high = float(np.min(out)), float(np.max(out))
            if low == -np.inf:  # a masked score is meant
                low = float(np.min(out, initial=0, where=~np.isneginf(out)))
            top = max(high, -low) / limit
            self.nearness = max(self.nearness, np.inf if np.isnan(top) else top)
        return out


def _largest(dtype: DType) -> float:
    return float(ml_dtypes.finfo(dtype.numpy).max)


def _unit(dtype: DType) -> float:
    """Relative rounding step of a dtype."""
    return float(ml_dtypes.finfo(dtype.numpy).eps) if dtype.is_float else 0.0


# Distributions


def _one_hot(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    out = np.zeros(shape)
    if out.ndim:
        at = rng.integers(0, shape[-1], (*shape[:-1], 1))
        np.put_along_axis(out, at, 1.0, axis=-1)
    return out


Draw = Callable[[np.random.Generator, tuple[int, ...]], Array]
DISTRIBUTIONS: tuple[tuple[str, Draw], ...] = (
    ("normal", lambda rng, shape: rng.standard_normal(shape)),
    ("small", lambda rng, shape: rng.standard_normal(shape) * 1e-3),
    ("large", lambda rng, shape: rng.standard_normal(shape) * 24),
    ("negative", lambda rng, shape: -np.abs(rng.standard_normal(shape))),
    ("one-hot", _one_hot),
    ("zeros", lambda rng, shape: np.zeros(shape)),
)
NEAR_OVERFLOW = "near-overflow"


def draw_inputs(
    inputs: Sequence[Node], distribution: str, seed: int, scale: float = 1.0
) -> list[Array]:
    """Inputs of the nodes' shapes and dtypes, the same for the same arguments.

    `distribution` is a name of `DISTRIBUTIONS`, or "near-overflow" (normal); floats are multiplied
    by `scale`. Integers are uniform in -4..4, booleans are fair coins.
    """
    fn = dict(DISTRIBUTIONS).get(distribution, DISTRIBUTIONS[0][1])
    rng = np.random.default_rng(seed)
    out: list[Array] = []
    for node in inputs:
        if node.dtype is DType.BOOL:
            out.append(rng.integers(0, 2, node.shape).astype(np.bool_))
        elif not node.dtype.is_float:
            out.append(rng.integers(-4, 5, node.shape).astype(node.dtype.numpy))
        else:
            limit = _largest(node.dtype)
            values = np.clip(fn(rng, node.shape) * scale, -limit, limit)
            out.append(values.astype(node.dtype.numpy))
    return out


@dataclass(frozen=True, slots=True)
class Difference:
    """What the float judge saw: which check failed, where, and both values."""

    check: str
    output: int
    element: tuple[int, ...]
    expected: float
    got: float
    allowed: float
    distribution: str
    scale: float
    sizes: str
    seed: int

    def __str__(self) -> str:
        scaled = "" if self.scale == 1 else f" x {self.scale:g}"
        note = {
            "meaning": f"float64: differs by more than {self.allowed:.3g}"
            if np.isfinite(self.got)
            else "float64: not finite where the program is finite",
            "accuracy": f"own dtypes: error above {self.allowed:.3g}, {ALLOWED}x the program's",
            "range": "own dtypes: not finite where the program is finite, with head-room of 64",
        }[self.check]
        return (
            f"output {self.output} element {list(self.element)}: program {self.expected:.9g}, "
            f"candidate {self.got:.9g} ({note}); inputs {self.sizes}, {self.distribution!r}{scaled}"
            f", draw_inputs seed {self.seed}"
        )


@dataclass(frozen=True, slots=True)
class _Reference:
    """The program on one set of inputs."""

    arrays: list[Array]
    exact: list[Array]
    single: list[Array]
    working: list[Array]
    nearness: float
    rounding: Rounding


class FloatJudge:
    """Compares candidates with one program; what the program gave on a set of inputs is kept.

    Args:
        program: the program.
        seed: of all inputs.
    """

    def __init__(self, program: Graph, seed: int) -> None:
        self.program, self.seed = program, seed
        self._full: _Reference | None = None
        self._full_scale = 1.0

    def small(
        self, instance: Instance, distributions: Sequence[str] | None = None
    ) -> Difference | None:
        """All checks on a small instance; None when it passes."""
        names = [d for d, _ in DISTRIBUTIONS] if distributions is None else distributions
        for name in names:
            reference = self._reference(instance.program, name, 1.0)
            found = self._compare(instance, reference, name, 1.0)
            if found is not None:
                return found
        if distributions is not None:
            return None
        scale = self._largest_scale(instance.program)
        if scale is None:
            return None
        reference = self._reference(instance.program, NEAR_OVERFLOW, scale)
        return self._compare(instance, reference, NEAR_OVERFLOW, scale)

    def affordable(self, candidate: Graph, ragged: bool, effort: Effort) -> bool:
        """Whether one evaluation at full size is cheap enough."""
        work, elements = effort.value
        if sum(n.elements for n in self.program.inputs) > elements:
            return False
        if ragged and _block_steps(candidate) > (10 if effort is Effort.MUCH else 1) * _BLOCK_STEPS:
            return False
        return work_of(self.program) + work_of(candidate) <= work

    def full(
        self, instance: Instance, meaning: bool = True, working: bool = True
    ) -> Difference | None:
        """The checks on normal inputs at the sizes asked about: `meaning` in float64, `working` in
        the graphs' own dtypes.
        """
        if self._full is None:
            # The largest of these scales at which the program itself is finite in its own dtypes.
            for scale in (1.0, 0.25, 1 / 16):
                self._full_scale = scale
                self._full = self._reference(self.program, "normal", scale, _DRAWS_AT_FULL_SIZE)
                if all(np.isfinite(w).all() for w in self._full.working):
                    break
        assert self._full is not None
        return self._compare(instance, self._full, "normal", self._full_scale, meaning, working)

    def _reference(
        self, program: Graph, name: str, scale: float, draws: int = _DRAWS
    ) -> _Reference:
        arrays = draw_inputs(program.inputs, name, self.seed, scale)
        exact = interpret(program, arrays, NumpyAlgebra(Precision.EXACT))
        single = interpret(program, arrays, _Single())
        own = _Working()
        return _Reference(
            arrays,
            exact,
            single,
            interpret(program, arrays, own),
            own.nearness,
            Rounding(program, arrays, exact, self.seed, draws),
        )

    def _largest_scale(self, program: Graph) -> float | None:
        """The largest power of two by which normal inputs can be scaled while the program keeps
        head-room, and a product of three inputs fits its type. So a rewrite may form such a product
        where the program does not (a division moved behind a matmul does), but nothing larger.
        """
        if not any(n.dtype.is_float for n in program.inputs):
            return None

        def fits(exponent: int) -> bool:
            arrays = draw_inputs(program.inputs, "normal", self.seed, 2.0**exponent)
            own = _Working()
            outputs = interpret(program, arrays, own)
            return own.nearness < HEADROOM and all(np.isfinite(o).all() for o in outputs)

        low, high = -8, _product_scale(program)
        if not fits(low):
            return None
        if fits(high):
            return float(2.0**high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return float(2.0**low)

    def _compare(
        self,
        instance: Instance,
        reference: _Reference,
        name: str,
        scale: float,
        meaning: bool = True,
        working: bool = True,
    ) -> Difference | None:
        graph, arrays = instance.candidate, reference.arrays
        exact = interpret(graph, arrays, NumpyAlgebra(Precision.EXACT)) if meaning else []
        own = interpret(graph, arrays, NumpyAlgebra(Precision.WORKING)) if working else []
        where = (name, scale, instance.sizes, self.seed)
        for k, node in enumerate(graph.outputs):
            if meaning:
                got = exact[k]
                found = _meaning(reference, k, got, careful=False)
                found = found and _meaning(reference, k, got, careful=True)
                if found is not None:
                    return _difference(found, k, reference.exact[k], got, where)
            if not working:
                continue
            got, mine = own[k], reference.working[k]
            if reference.nearness < HEADROOM:
                found = _range(reference, k, got)
                if found is not None:
                    return _difference(found, k, mine, got, where)
            unit = _unit(node.dtype)
            found = _accuracy(reference, k, got, unit, careful=False)
            found = found and _accuracy(reference, k, got, unit, careful=True)
            if found is not None:
                return _difference(found, k, reference.exact[k], got, where)
        return None


def _product_scale(program: Graph) -> int:
    """The exponent up to which three scaled inputs can be multiplied, with head-room."""
    limits = [_largest(n.dtype) for n in program.inputs if n.dtype.is_float]
    return int(np.log2(min(limits)) / 3) - 3


def _difference(
    found: tuple[str, tuple[int, ...], float],
    output: int,
    want: Array,
    got: Array,
    where: tuple[str, float, str, int],
) -> Difference:
    check, element, allowed = found
    return Difference(
        check, output, element, float(want[element]), float(got[element]), allowed, *where
    )


def _block_steps(graph: Graph) -> int:
    return sum(b.blocks * b.loop * len(b.body) for b in blocks_of(graph) if b.info.ragged)


Found = tuple[str, tuple[int, ...], float] | None


def _worst(excess: Array) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(excess)), excess.shape))


def _meaning(reference: _Reference, k: int, got: Array, careful: bool) -> Found:
    """Where float64 values differ by more than rounding can explain. `careful` counts what random
    rounding does to the program, too, which takes several runs of it.
    """
    want, single, rounding = reference.exact[k], reference.single[k], reference.rounding
    if want.dtype.kind != "f":
        bad = want != got
        return ("meaning", _worst(bad), 0.0) if bad.any() else None
    finite = np.isfinite(want)
    lost = finite & ~np.isfinite(got)
    if careful and lost.any():
        lost = lost & rounding.stays_finite(Precision.EXACT, k)
    if lost.any():
        return "meaning", _worst(lost), 0.0
    finite = finite & np.isfinite(got)
    if not finite.any():
        return None
    with np.errstate(all="ignore"):
        scale = row_scale(want)
        relative = np.where(
            finite & np.isfinite(single) & (scale > 0), np.abs(single - want) / scale, 0
        )
        conditioning = min(float(relative.max()), 1.0) + 2.0**-23
        if (finite & ~np.isfinite(single)).any():
            # Beyond f32's range a value is an exponential, whose argument (below 710) was rounded.
            conditioning = max(conditioning, 2.0**-12)
        allowed = SLACK * SINGLE_TO_DOUBLE * conditioning * scale
        # An output that is nothing but zeros gives no scale: noise of float64 at the size of 1.
        allowed = np.where(scale > 0, allowed, 2.0**-46)
        if careful:
            allowed = np.maximum(allowed, SLACK * rounding.spread(Precision.EXACT, k))
        excess = np.where(finite, np.abs(got - want) - allowed, -1)
    if not (excess > 0).any():
        return None
    at = _worst(excess)
    return "meaning", at, float(np.broadcast_to(allowed, want.shape)[at])


def _range(reference: _Reference, k: int, other: Array) -> Found:
    """Where the candidate left the range of its types and the program, which does not depend on the
    ends of that range, did not.
    """
    own = reference.working[k]
    if own.dtype.kind != "f":
        return None
    lost = np.isfinite(own) & ~np.isfinite(other)
    if lost.any():
        lost = lost & reference.rounding.stays_finite(Precision.WORKING, k)
    return ("range", _worst(lost), 0.0) if lost.any() else None


def _accuracy(reference: _Reference, k: int, other: Array, unit: float, careful: bool) -> Found:
    """Where the candidate is more than four times as inaccurate as the program at its worst, or
    (`careful`) at its worst under random rounding.
    """
    want, own = reference.exact[k], reference.working[k]
    if want.dtype.kind != "f":
        return None
    both = np.isfinite(want) & np.isfinite(own) & np.isfinite(other)
    if not both.any():
        return None
    with np.errstate(all="ignore"):
        scale = float(np.abs(np.where(both, want, 0)).max())
        yardstick = float(np.where(both, np.abs(own - want), 0).max())
        error = np.asarray(yardstick)
        if careful:
            error = np.maximum(error, reference.rounding.spread(Precision.WORKING, k))
        allowed = np.broadcast_to(ALLOWED * (error + unit * scale), want.shape)
        excess = np.where(both, np.abs(other - want) - allowed, -1)
    if not (excess > 0).any():
        return None
    at = _worst(excess)
    return "accuracy", at, float(allowed[at])
