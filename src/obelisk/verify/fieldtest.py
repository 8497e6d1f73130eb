"""The field judge: runs program and candidate over finite fields on the same random inputs.

Takes an instance and a seed; gives whether the outputs agree, where not, what was assumed on the
way and how likely a difference would have been missed. Elements that went through the root of a
non-square ("of a negative number") only count against a candidate where other draws agree with
them: they are redrawn until elements free of doubt were compared.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from obelisk.ir.interp import evaluate
from obelisk.verify.fields import (
    NEG_INF,
    ROOT_P,
    ROOT_Q,
    UNDEFINED,
    FieldAlgebra,
    Residues,
    Undecidable,
)
from obelisk.verify.growth import Growth, miss_probability
from obelisk.verify.instances import Instance
from obelisk.verify.modular import P, Q

Array = Any
REDRAWS = 96  # extra draws where roots of non-squares leave doubt
_ENOUGH = 4  # elements free of doubt that must have been compared then


class Agreement(enum.Enum):
    """Outcome of the field judge on one instance."""

    MATCH = "match"
    MISMATCH = "mismatch"
    UNDECIDED = "undecided"


@dataclass(slots=True)
class FieldOutcome:
    """What the draws on one instance gave.

    Attributes:
        agreement: the outcome.
        detail: a mismatch's place and values, or why nothing was decided.
        draws: draws made.
        miss: bound on the chance that one draw misses a difference (inf: no bound).
        terms: exponential terms of the largest formula, 0 where there is none.
        degree: degree of the largest formula.
        assumed: uninterpreted functions that were met.
        doubtful: undecided only for want of elements whose square roots exist; redraws may help.
    """

    agreement: Agreement
    detail: str = ""
    draws: int = 0
    miss: float = 0.0
    terms: float = 0.0
    degree: float = 0.0
    assumed: set[str] = field(default_factory=set)
    doubtful: bool = False


@dataclass(slots=True)
class _Tally:
    """Comparison of one output over the draws so far."""

    compared: int = 0
    clear: int = 0
    doubtful: bool = False
    mismatch: str | None = None


def run_instance(instance: Instance, seed: int, draws: int, redraws: int = REDRAWS) -> FieldOutcome:
    """Run `draws` draws, and up to `redraws` more while roots leave doubt; deterministic for the
    seed.
    """
    try:
        out = _test(instance, seed, draws, redraws, nested=False)
        if "second exp" in out.assumed:  # give second exponentials their laws, then ask again
            out = _test(instance, seed, draws, redraws, nested=True)
    except Undecidable as e:
        return FieldOutcome(Agreement.UNDECIDED, str(e))
    return out


def _test(instance: Instance, seed: int, draws: int, redraws: int, nested: bool) -> FieldOutcome:
    out = FieldOutcome(Agreement.MATCH)
    tallies = [_Tally() for _ in instance.program.outputs]
    while out.draws < draws or (
        out.draws < draws + redraws
        and any(t.mismatch is None and t.doubtful and t.clear < _ENOUGH for t in tallies)
    ):
        _draw(instance, (seed, out.draws), nested, tallies, out)
        out.draws += 1
        for k, tally in enumerate(tallies):
            if tally.mismatch is not None:
                out.agreement = Agreement.MISMATCH
                out.detail = (
                    f"output {k} {tally.mismatch}; inputs {instance.sizes}, uniform residues, "
                    f"draw {out.draws - 1} of seed {seed}"
                )
                return out
    for k, tally in enumerate(tallies):
        if tally.compared == 0:
            out.agreement = Agreement.UNDECIDED
            out.detail = f"output {k} is undefined at every element that was drawn"
        elif tally.doubtful and tally.clear < _ENOUGH:
            out.agreement = Agreement.UNDECIDED
            out.doubtful = True
            out.detail = (
                f"output {k}: the graphs differ where square roots have no root, and too few "
                "elements have all of theirs"
            )
    return out


def _draw(
    instance: Instance,
    seed: tuple[int, int],
    nested: bool,
    tallies: list[_Tally],
    out: FieldOutcome,
) -> None:
    rng = np.random.default_rng([abs(seed[0]), seed[1], int(nested)])
    algebra = FieldAlgebra(rng, nested)
    values = [algebra.draw(node, rng) for node in instance.program.inputs]
    results: list[list[Residues]] = []
    for graph in (instance.program, instance.candidate):
        bindings = dict(zip(graph.inputs, values, strict=True))
        results.append(evaluate(graph.outputs, bindings, algebra))
    out.assumed |= algebra.assumed
    for node, a, b, tally in zip(instance.program.outputs, *results, tallies, strict=True):
        _compare(_whole(a, node.shape), _whole(b, node.shape), tally)
        out.miss = max(out.miss, miss_probability(a.growth, b.growth))
        for g in (a.growth, b.growth):
            out.terms = max(out.terms, g.terms, g.below) if g.exponent else out.terms
        out.degree = max(out.degree, _degree(a.growth), _degree(b.growth))


def _degree(g: Growth) -> float:
    return max(g.top, g.bottom, g.exponent)


def _whole(x: Residues, shape: tuple[int, ...]) -> Residues:
    return Residues(
        np.broadcast_to(x.p, shape),
        None if x.q is None else np.broadcast_to(x.q, shape),
        None if x.marks is None else np.broadcast_to(x.marks, shape),
        x.growth,
        None,
        x.plain,
    )


def _compare(a: Residues, b: Residues, tally: _Tally) -> None:
    """Add one output of one draw to its tally."""
    if a.plain is not b.plain:
        raise Undecidable("one side gives integers, the other floats")
    differ = a.p != b.p
    roots = ROOT_P
    hashed = a.growth.exponent or b.growth.exponent  # then a part modulo Q is no image of the value
    if a.q is not None and b.q is not None and not hashed:
        differ = differ | (a.q != b.q)
        roots = ROOT_P | ROOT_Q
    clear = np.ones(a.p.shape, bool)
    skip = np.zeros(a.p.shape, bool)
    if a.marks is not None or b.marks is not None:
        void_a, void_b = a.bits & UNDEFINED, b.bits & UNDEFINED
        low_a, low_b = a.bits & NEG_INF, b.bits & NEG_INF
        skip = (void_a & void_b) != 0
        differ = np.where((low_a & low_b) != 0, False, differ | (low_a != low_b))
        differ = (differ | (void_a != void_b)) & ~skip
        clear = ((a.bits | b.bits) & roots) == 0
    tally.compared += int(np.count_nonzero(~skip))
    tally.clear += int(np.count_nonzero(clear & ~skip))
    certain = differ & clear
    if certain.any():
        at = tuple(int(i) for i in np.unravel_index(int(np.argmax(certain)), certain.shape))
        tally.mismatch = f"element {list(at)}: program {_show(a, at)}, candidate {_show(b, at)}"
    elif differ.any():
        tally.doubtful = True


def _show(x: Residues, at: tuple[int, ...]) -> str:
    if x.marks is not None and x.marks[at] & UNDEFINED:
        return "undefined"
    if x.marks is not None and x.marks[at] & NEG_INF:
        return "-inf"
    if x.plain:
        return str(int(x.p[at]))
    text = f"{int(x.p[at])} mod {P}"
    return text if x.q is None else f"{text} and {int(x.q[at])} mod {Q}"
