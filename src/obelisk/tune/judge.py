"""What is right: the program's float64 meaning on several input sets, and the judgement of raw
output bytes.

Takes the program and its `Inputs`; gives a `Reference`, computed once per tuning. Outputs are
filled with a NaN of a chosen payload before every call, so an element that still holds it was never
written. The tolerance is the dtype's, or, where that is more, four times the error that the program
itself makes in its own dtypes: an ill-conditioned program must not fail a right candidate, and a
fixed tolerance must not pass a wrong one. That holds for each element, and for the output as a
whole: small elements would else be right whatever they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from obelisk.ir.dtype import DType
from obelisk.ir.graph import Graph
from obelisk.ir.interp import evaluate
from obelisk.ir.kernels import align
from obelisk.ir.node import Node
from obelisk.ir.numeric import NumpyAlgebra, Precision, bind, run
from obelisk.ir.op import Op
from obelisk.tune.deviation import settled, wide
from obelisk.tune.inputs import Inputs, output_specs
from obelisk.tune.types import Status

SLACK = 4.0  # allowed multiple of the program's own rounding error
# The largest ratio is set by one element near zero and by luck: two equally exact kernels differ in
# it by c or more with a chance of about 2 / (pi c). A hundred makes that rare.
RATIO_SLACK = 100.0
MANY = 16.0  # elements whose errors average out: a normal output of 64 has the weight of 21
_GROUP = 64
_SMALL = 1 << 24  # bytes of inputs up to which every set is also summed term by term
_TERMWISE = 500_000_000  # products that are added one by one; beyond it in chunks
_TOLERANCE = {  # dtype: (atol, rtol)
    DType.F64: (1e-12, 1e-10), DType.F32: (1e-5, 1e-4), DType.F16: (1e-3, 1e-2),
    DType.BF16: (1e-2, 2e-2), DType.F8E4M3: (0.0625, 0.125),
}  # fmt: skip
_NORM = {  # dtype: the norm of an output's error over the norm of the output
    DType.F64: 1e-10, DType.F32: 1e-4, DType.F16: 2e-3, DType.BF16: 1.6e-2, DType.F8E4M3: 0.125,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Yardstick:
    """The error that the program makes in its own dtypes, for one output, over all sets.

    Attributes:
        ratio: max of |error| / (atol + rtol * |exact|).
        relative: max of |error| in a group of elements, relative to the largest |exact| in it.
        norm: norm of the error over the norm of the exact output.
    """

    ratio: float = 0.0
    relative: float = 0.0
    norm: float = 0.0

    def widened(self, other: Yardstick) -> Yardstick:
        """The larger of both, each way."""
        return Yardstick(
            max(self.ratio, other.ratio),
            max(self.relative, other.relative),
            max(self.norm, other.norm),
        )


@dataclass(frozen=True, slots=True)
class Reference:
    """The right answers.

    Attributes:
        expected: per set, the outputs in float64 (integers as they are).
        judged: per set and output, which elements are compared, or None for all.
        yardsticks: per output.
    """

    expected: tuple[tuple[np.ndarray, ...], ...]
    judged: tuple[tuple[np.ndarray | None, ...], ...]
    yardsticks: tuple[Yardstick, ...]


def reference(program: Graph, inputs: Inputs) -> Reference:
    """Compute the right answers on all sets.

    The inputs are halved, down to a deviation of 1/16, until the program does not overflow in its
    own dtypes (`deviation.settled`). Elements that are infinite or NaN in the exact result, or in
    the program's own dtypes even so, are not judged: there the program itself has no answer.
    """
    working = settled(program, inputs)
    expected: list[tuple[np.ndarray, ...]] = []
    judged: list[tuple[np.ndarray | None, ...]] = []
    sticks = [Yardstick() for _ in program.outputs]
    for k in range(inputs.sets):
        arrays = inputs.select(k)
        exact = run(program, arrays)
        orders = [working[k]]
        masks = tuple(_mask(e, w) for e, w in zip(exact, orders[0], strict=True))
        if k == 0 or sum(n.nbytes for n in program.inputs) <= _SMALL:
            orders.append(_termwise(program, arrays))
        for got in orders:
            rows = zip(got, exact, program.outputs, masks, strict=True)
            found = [own_error(g, e, node, m) for g, e, node, m in rows]
            sticks = [a.widened(b) for a, b in zip(sticks, found, strict=True)]
        expected.append(tuple(exact))
        judged.append(masks)
    return Reference(tuple(expected), tuple(judged), tuple(sticks))


def excused(program: Graph, right: Reference) -> list[str]:
    """What the program itself excuses, for the readers of a report: outputs of which candidates are
    allowed more than their dtype's share of the norm, since the program in its own dtypes is off so
    far, and elements that are not judged.
    """
    out = []
    for i, (name, own) in enumerate(zip(program.output_names, right.yardsticks, strict=True)):
        if SLACK * own.norm > _NORM.get(program.outputs[i].dtype, np.inf):
            out.append(
                f"output {name!r} is off by {own.norm:.2g} of its norm in the program's own "
                f"dtypes: candidates were allowed {SLACK * own.norm:.2g}"
            )
        masks = [row[i] for row in right.judged]
        left = sum(int((~m).sum()) for m in masks if m is not None)
        if left:
            whole = sum(row[i].size for row in right.expected)
            out.append(
                f"output {name!r}: the program has no finite answer at {left} of {whole} elements, "
                "which were not judged"
            )
    return out


class _Termwise(NumpyAlgebra):
    """The program's own dtypes with sums taken term by term, the least exact order that a kernel
    may use.

    numpy sums in pairs and BLAS in blocks, which is up to ten times more exact at 4096 terms;
    measured by these alone, a plain loop would look wrong.
    """

    def __init__(self) -> None:
        super().__init__(Precision.WORKING)

    def apply(self, node: Node, args: Sequence[Any], lead: int) -> Any:
        if node.op is Op.MATMUL and node.dtype.is_float:
            pairs = zip(args, node.inputs, strict=True)
            return _matmul(*(align(x, lead, i.rank, node.rank) for x, i in pairs))
        if node.op is Op.SUM and node.dtype.is_float and node.attrs.keep == 1:
            axis = node.attrs.axis - node.inputs[0].rank
            with np.errstate(all="ignore"):
                return np.take(np.add.accumulate(args[0], axis=axis), [-1], axis=axis)
        return super().apply(node, args, lead)


def _matmul(a: Any, b: Any) -> Any:
    terms = a.shape[-1]
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    chunk = 1 + terms * prod(shape) // _TERMWISE
    out = np.zeros(shape, dtype=np.result_type(a, b))
    with np.errstate(all="ignore"):
        for k in range(0, terms, chunk):
            left, right = a[..., k : k + chunk], b[..., k : k + chunk, :]
            out += left * right if chunk == 1 else left @ right
    return out


def _termwise(program: Graph, arrays: Sequence[Any]) -> list[np.ndarray]:
    algebra = _Termwise()
    values = evaluate(program.outputs, bind(program, arrays, algebra), algebra)
    with np.errstate(all="ignore"):
        return [
            np.asarray(v).astype(o.dtype.numpy)
            for v, o in zip(values, program.outputs, strict=True)
        ]


def _mask(exact: np.ndarray, working: np.ndarray) -> np.ndarray | None:
    good = np.isfinite(wide(exact)) & np.isfinite(wide(working))
    return None if good.all() else good


def own_error(
    got: np.ndarray, exact: np.ndarray, node: Node, judged: np.ndarray | None = None
) -> Yardstick:
    """The error of a result that is right by definition; infinities in it do not count."""
    if not node.dtype.is_float or got.size == 0:
        return Yardstick()
    with np.errstate(all="ignore"):
        gap = np.abs(got.astype(np.float64) - exact)
    gap = np.where(np.isfinite(gap), gap, 0.0)
    if judged is not None:
        gap = np.where(judged, gap, 0.0)
    tolerance = _tolerance(node.dtype, np.where(np.isfinite(exact), exact, 0.0))
    sizes = magnitudes(exact)
    relative = gap[sizes > 0] / sizes[sizes > 0]
    whole = _relative(gap, np.where(np.isfinite(exact), exact, 0.0), judged)
    return Yardstick(float((gap / tolerance).max()), float(relative.max(initial=0.0)), whole)


def magnitudes(exact: np.ndarray) -> np.ndarray:
    """For each element the largest finite |exact| in its group."""
    size = group_size(exact.shape)
    flat = np.abs(exact.ravel())
    flat[~np.isfinite(flat)] = 0.0
    tops = np.maximum.reduceat(flat, np.arange(0, flat.size, size))
    return np.repeat(tops, size)[: flat.size].reshape(exact.shape)


def group_size(shape: Sequence[int]) -> int:
    """Elements of a group: as many rows of the last axis as make 64 elements.

    Magnitudes may differ by many powers of ten from row to row (exp), hardly ever within one.
    """
    row = max(shape[-1], 1) if shape else 1
    return row * -(-_GROUP // row)


def _tolerance(dtype: DType, exact: np.ndarray) -> np.ndarray:
    atol, rtol = _TOLERANCE[dtype]
    return np.asarray(atol + rtol * np.abs(exact))


@dataclass(frozen=True, slots=True)
class Compared:
    """A result against the reference.

    Attributes:
        error: max of |got - exact| / (atol + rtol * |exact|); inf where a NaN or infinity should
            not be.
        share: max of |got - exact| / what is allowed there; at most 1 is right.
        worst: index of the element with the largest share.
        relative: norm of the difference over the norm of the exact result, judged elements only;
            0 for integers that agree.
        limit: what is allowed of `relative`; at most that is right, too.
    """

    error: float
    share: float
    worst: tuple[int, ...]
    relative: float = 0.0
    limit: float = np.inf


def compare(
    got: np.ndarray,
    exact: np.ndarray,
    node: Node,
    judged: np.ndarray | None = None,
    own: Yardstick | None = None,
) -> Compared:
    """Compare a result with the exact one over the judged elements.

    Allowed at an element is its tolerance t = atol + rtol * |exact|, or more where the program
    itself errs more: up to SLACK * own.relative * the magnitude of its group, but not beyond
    RATIO_SLACK * own.ratio * t. Both are needed: one element near zero raises the ratio of all,
    one huge element the magnitude of its group. Besides, an output that is not zero may be off by
    the dtype's share of its norm, or by SLACK * own.norm where that is more; by RATIO_SLACK where
    few elements make up the norm. Integers and bools must be equal.
    """
    shape, limit = got.shape, np.inf
    if got.size == 0:
        return Compared(0.0, 0.0, ())
    if node.dtype.is_float:
        with np.errstate(all="ignore"):
            gap = np.abs(got.astype(np.float64) - exact)
            tolerance = _tolerance(node.dtype, exact)
            own = own or Yardstick()
            near = own.relative * magnitudes(exact)
            single = RATIO_SLACK * own.ratio * tolerance
            allowed = np.maximum(tolerance, np.minimum(single, SLACK * near))
            error, share = gap / tolerance, gap / allowed
            relative = _relative(gap, exact, judged)
            weight = _weight(exact if judged is None else exact[judged])
            if weight:
                slack = SLACK if weight >= MANY else RATIO_SLACK
                limit = max(_NORM[node.dtype], slack * own.norm)
    else:
        differ = got.astype(np.int64) != exact.astype(np.int64)
        error = share = np.where(differ, np.inf, 0.0)
        relative = float(share.max())
    if judged is not None:
        error, share = np.where(judged, error, 0.0), np.where(judged, share, 0.0)
    error, share = (np.where(np.isnan(x), np.inf, x) for x in (error, share))
    worst = np.unravel_index(int(share.argmax()), shape) if shape else ()
    place = tuple(int(i) for i in worst)
    return Compared(float(error.max()), float(share.max()), place, relative, limit)


def _weight(exact: np.ndarray) -> float:
    """How many elements make up the norm: all of them where they are of one magnitude, 1 where one
    is far larger than the others; 0 where all are zero.
    """
    top = float(np.abs(exact).max(initial=0.0))
    if not top > 0.0:
        return 0.0
    squares = np.square(exact / top)
    return float(np.square(squares.sum()) / np.square(squares).sum())


def _relative(gap: np.ndarray, exact: np.ndarray, judged: np.ndarray | None) -> float:
    """The norm of the gaps over that of the exact values; infinite where one is not a number."""
    if judged is not None:
        gap, exact = gap[judged], exact[judged]
    top = float(np.abs(exact).max(initial=0.0)) or 1.0  # squares of the largest floats overflow
    size = float(np.sqrt(np.square(exact / top).sum()))
    off = float(np.sqrt(np.square(gap / top).sum()))
    if off == 0.0:
        return 0.0
    return off / size if size > 0 and np.isfinite(off) else float("inf")


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
            bits = (0x7FC0 | tag).to_bytes(2, "little")
        case DType.F8E4M3:
            bits = b"\x7f"  # the format has one NaN
        case _:
            bits = bytes([(0xA5, 0x5A, 0x3C, 0xC3)[turn % 4]]) * dtype.numpy.itemsize
    return np.frombuffer(bits, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Of one call: status, why, and the worst error, share and relative error of the outputs."""

    status: Status
    detail: str = ""
    error: float = 0.0
    share: float = 0.0
    relative: float = 0.0


def judge(
    raw: Sequence[np.ndarray], program: Graph, right: Reference, which: int, turn: int
) -> Judgement:
    """Judge the raw bytes of all outputs after a call on input set `which`.

    They were filled beforehand with `fill(dtype, turn)`.
    """
    error = share = relative = 0.0
    for i, (node, spec) in enumerate(zip(program.outputs, output_specs(program), strict=True)):
        name, size = program.output_names[i], spec.dtype.numpy.itemsize
        exact, got = right.expected[which][i], spec.view(raw[i])
        found = compare(got, exact, node, right.judged[which][i], right.yardsticks[i])
        untouched = (raw[i].reshape(-1, size) == fill(spec.dtype, turn)).all(axis=1)
        count = int(untouched.sum())
        # An integer may be right and equal the fill; a NaN of ours cannot.
        if count and (found.share > 1 or spec.dtype.is_float):
            first = np.unravel_index(int(np.argmax(untouched)), spec.shape) if spec.shape else ()
            text = (
                f"output {name!r}: {count} of {untouched.size} elements were not written, "
                f"the first at {tuple(int(x) for x in first)}"
            )
            return Judgement(Status.INCOMPLETE, text, np.inf, np.inf)
        if found.share > 1:
            where = found.worst
            text = (
                f"output {name!r} at {where}: got {float(got[where]):.6g}, "
                f"expected {float(exact[where]):.6g} (error {found.error:.3g} times the tolerance, "
                f"{found.share:.3g} times what is allowed)"
            )
            return Judgement(Status.WRONG, text, found.error, found.share, found.relative)
        if found.relative > found.limit:
            text = (
                f"output {name!r} as a whole: the norm of its error is {found.relative:.3g} of its "
                f"own, {found.limit:.3g} is allowed"
            )
            off = found.relative / found.limit
            return Judgement(Status.WRONG, text, found.error, off, found.relative)
        error, share = max(error, found.error), max(share, found.share)
        relative = max(relative, found.relative)
    return Judgement(Status.OK, "", error, share, relative)
