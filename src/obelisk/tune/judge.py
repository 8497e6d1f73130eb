"""What is right: the program's float64 meaning on several input sets, and the judgement of raw
output bytes.

Takes the program and a seed; gives a `Reference`, computed once per tuning. Outputs are filled with
a NaN of a chosen payload before every call, so an element that still holds it was never written.
The tolerance is the dtype's, or four times the error that the program itself makes in its own
dtypes where that is more: an ill-conditioned program must not fail a correct candidate, and a fixed
tolerance must not pass a wrong one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from obelisk.ir.dtype import DType
from obelisk.ir.graph import Graph
from obelisk.ir.node import Node, Shape
from obelisk.ir.numeric import Precision, random_inputs, run
from obelisk.tune.types import Status

SETS = 3  # different input sets; a fourth run repeats the first
SLACK = 4.0  # allowed multiple of the program's own rounding error
_SCALES = (1.0, 0.5, 0.25, 0.125, 0.0625)
_TOLERANCE = {  # dtype: (atol, rtol)
    DType.F64: (1e-12, 1e-10), DType.F32: (1e-5, 1e-4), DType.F16: (1e-3, 1e-2),
    DType.BF16: (1e-2, 2e-2), DType.F8E4M3: (0.0625, 0.125),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor at the border of a program.

    Shape, dtype, and element strides (None: dense, row-major).
    """

    shape: Shape
    dtype: DType
    strides: Shape | None = None

    @property
    def storage(self) -> int:
        """Elements from the first to the last one, gaps included."""
        if self.strides is None:
            return prod(self.shape)
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the storage as numpy holds it."""
        return self.storage * self.dtype.numpy.itemsize

    def view(self, raw: np.ndarray) -> np.ndarray:
        """The tensor inside its storage bytes."""
        flat = raw[: self.nbytes].view(self.dtype.numpy)
        if self.strides is None:
            return flat.reshape(self.shape)
        step = self.dtype.numpy.itemsize
        return np.lib.stride_tricks.as_strided(flat, self.shape, [s * step for s in self.strides])


def input_specs(graph: Graph) -> list[TensorSpec]:
    """One spec per input."""
    return [TensorSpec(n.shape, n.dtype, n.attrs.strides) for n in graph.inputs]


def output_specs(graph: Graph) -> list[TensorSpec]:
    """One spec per output: dense and row-major."""
    return [TensorSpec(n.shape, n.dtype) for n in graph.outputs]


def stored(array: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """An array laid out as its spec says, in storage whose gaps are 0xFF bytes (NaN in every float
    type).
    """
    raw = np.full(spec.nbytes, 0xFF, dtype=np.uint8)
    view = spec.view(raw)
    view[...] = array
    return view


@dataclass(frozen=True, slots=True)
class Reference:
    """The right answers.

    Attributes:
        inputs: per set, the inputs as logical arrays.
        expected: per set, the outputs in float64 (integers as they are).
        judged: per set and output, which elements are compared, or None for all.
        allowed: per output, the error that passes, in units of the dtype's tolerance.
        scale: standard deviation of the inputs.
    """

    inputs: tuple[tuple[np.ndarray, ...], ...]
    expected: tuple[tuple[np.ndarray, ...], ...]
    judged: tuple[tuple[np.ndarray | None, ...], ...]
    allowed: tuple[float, ...]
    scale: float


def reference(program: Graph, seed: int = 0) -> Reference:
    """Compute the right answers on `SETS` input sets.

    Inputs are normal with deviation 1, or the first power of 1/2 at which the program stays finite
    in its own dtypes. Elements that are infinite or NaN in the exact result, or in the program's
    own dtypes at the smallest scale, are not judged: there the program itself has no answer.
    """
    specs = input_specs(program)

    def draw(k: int, scale: float) -> tuple[np.ndarray, ...]:
        arrays = random_inputs(program, seed * SETS + k, scale)
        return tuple(stored(a, s) for a, s in zip(arrays, specs, strict=True))

    def answers(arrays: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        return run(program, arrays), run(program, arrays, Precision.WORKING)

    for scale in _SCALES:
        first = draw(0, scale)
        exact, working = answers(first)
        if all(
            np.isfinite(_wide(w)[np.isfinite(e)]).all() for e, w in zip(exact, working, strict=True)
        ):
            break
    sets = [first, *(draw(k, scale) for k in range(1, SETS))]
    both = [(exact, working), *(answers(arrays) for arrays in sets[1:])]
    judged = tuple(
        tuple(_mask(e, w) for e, w in zip(exact, working, strict=True)) for exact, working in both
    )
    allowed = []
    for i, node in enumerate(program.outputs):
        own = max(error(w[i], e[i], node, m[i]) for (e, w), m in zip(both, judged, strict=True))
        allowed.append(max(1.0, SLACK * own))
    expected = tuple(tuple(e) for e, _ in both)
    return Reference(tuple(sets), expected, judged, tuple(allowed), scale)


def _wide(array: np.ndarray) -> np.ndarray:
    """Narrow floats in float64, others as they are: numpy's tests know only its own types."""
    return array if array.dtype.kind in "iub" else array.astype(np.float64)


def _mask(exact: np.ndarray, working: np.ndarray) -> np.ndarray | None:
    good = np.isfinite(_wide(exact)) & np.isfinite(_wide(working))
    return None if good.all() else good


def error(
    got: np.ndarray, exact: np.ndarray, node: Node, judged: np.ndarray | None = None
) -> float:
    """max |got - exact| / (atol + rtol * |exact|) over the judged elements; inf for a NaN or
    infinity among them.

    Integers and bools must be equal: the error is 0 or inf.
    """
    if judged is not None:
        got, exact = got[judged], exact[judged]
    if not node.dtype.is_float:
        return 0.0 if np.array_equal(got.astype(np.int64), exact.astype(np.int64)) else np.inf
    if got.size == 0:
        return 0.0
    atol, rtol = _TOLERANCE[node.dtype]
    with np.errstate(all="ignore"):
        ratio = np.abs(got.astype(np.float64) - exact) / (atol + rtol * np.abs(exact))
    return float(np.where(np.isnan(ratio), np.inf, ratio).max())


def fill(dtype: DType, turn: int) -> np.ndarray:
    """The bytes of one element that no candidate computes: a NaN with a payload, other at every
    turn.

    Integers and bools have no NaN: they get a bit pattern, other at every turn, that is right by
    chance at most once.
    """
    tag = 0x21 + turn % 4
    match dtype:
        case DType.F64:
            bits = (0x7FF8_0BE1_15C0_0000 | tag).to_bytes(8, "little")
        case DType.F32:
            bits = (0x7FCB_E100 | tag).to_bytes(4, "little")
        case DType.F16:
            bits = (0x7E00 | tag).to_bytes(2, "little")
        case DType.BF16:
            bits = (0x7FC0 | (tag & 0x3F)).to_bytes(2, "little")
        case DType.F8E4M3:
            bits = b"\x7f"  # the format has one NaN
        case _:
            bits = bytes([(0xA5, 0x5A, 0x3C, 0xC3)[turn % 4]]) * dtype.numpy.itemsize
    return np.frombuffer(bits, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Of one call: status, why, and the worst error over the outputs."""

    status: Status
    detail: str = ""
    error: float = 0.0


def judge(
    raw: Sequence[np.ndarray], program: Graph, right: Reference, which: int, turn: int
) -> Judgement:
    """Judge the raw bytes of all outputs after a call on input set `which`, filled beforehand with
    `fill(., turn)`.
    """
    worst = 0.0
    for i, (node, spec) in enumerate(zip(program.outputs, output_specs(program), strict=True)):
        name, size = program.output_names[i], spec.dtype.numpy.itemsize
        exact, mask = right.expected[which][i], right.judged[which][i]
        got = spec.view(raw[i])
        found = error(got, exact, node, mask)
        untouched = (raw[i].reshape(-1, size) == fill(spec.dtype, turn)).all(axis=1)
        count = int(untouched.sum())
        # An integer may be right and equal the fill; a NaN of ours cannot.
        if count and (found > right.allowed[i] or spec.dtype.is_float):
            first = np.unravel_index(int(np.argmax(untouched)), spec.shape or (1,))
            where = tuple(int(x) for x in first)
            return Judgement(
                Status.INCOMPLETE,
                f"output {name!r}: {count} of {untouched.size} elements were not written, "
                f"the first at {where}",
                float("inf"),
            )
        if found > right.allowed[i]:
            return Judgement(
                Status.WRONG, _why(name, got, exact, mask, found, right.allowed[i]), found
            )
        worst = max(worst, found)
    return Judgement(Status.OK, "", worst)


def _why(
    name: str,
    got: np.ndarray,
    exact: np.ndarray,
    mask: np.ndarray | None,
    found: float,
    allowed: float,
) -> str:
    with np.errstate(all="ignore"):
        gap = np.abs(got.astype(np.float64) - exact.astype(np.float64))
    gap = np.where(np.isnan(gap), np.inf, gap)
    if mask is not None:
        gap = np.where(mask, gap, -1.0)
    where = tuple(int(x) for x in np.unravel_index(int(np.argmax(gap)), gap.shape))
    return (
        f"output {name!r} at {where}: got {float(got[where]):.6g}, "
        f"expected {float(exact[where]):.6g} "
        f"(error {found:.3g} times the tolerance, allowed {allowed:.3g})"
    )
