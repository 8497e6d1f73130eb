"""The verdict on a candidate: interface, fields, floats, then the proof.

`Verifier` holds what can be reused between candidates of one program; `verify` is the plain
function. A difference seen at small sizes is believed where the structure says that sizes play no
part, and is confirmed at the sizes asked about elsewhere. Nothing here raises for a bad candidate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from math import inf, isinf, log10

from obelisk.base.errors import ObeliskError
from obelisk.ir.build import row_major
from obelisk.ir.graph import Graph
from obelisk.ir.node import Node, Shape, topological
from obelisk.ir.op import Op
from obelisk.verify.constants import meant
from obelisk.verify.fieldtest import Agreement, FieldOutcome, run_instance
from obelisk.verify.floats import Difference, Effort, FloatJudge
from obelisk.verify.instances import Instance, full_instance, instances, work_of
from obelisk.verify.pieces import find_cuts, prove_pieces, same_structure
from obelisk.verify.prove import Proof, Prover
from obelisk.verify.verdict import JudgeResult, Verdict, VerdictKind, refuted_malformed

_DRAWS = 2  # field draws per instance
_FIELD_WORK, _FIELD_ELEMENTS = 600_000_000, 30_000_000  # limits of a field run at full size
_SIZE_BOUND_OPS = frozenset({Op.SLICE, Op.RESHAPE, Op.IOTA, Op.BROADCAST})
_NEUTRAL = frozenset({0.0, 1.0, -1.0, -inf})
_FAULTS = (
    ObeliskError, ValueError, ArithmeticError, LookupError, TypeError, AssertionError, MemoryError,
    RecursionError,
)  # fmt: skip


def verify(program: Graph, candidate: Graph, *, seed: int = 0, full_size: bool = False) -> Verdict:
    """Judge `candidate` against `program`: same inputs, outputs compared in order.

    Deterministic for the seed but for the times. `full_size` adds a field run at the graphs' own
    sizes. Never raises for a bad candidate: see `Verdict`.
    """
    return Verifier(program, seed=seed, full_size=full_size).verify(candidate)


def verify_many(
    program: Graph,
    candidates: Iterable[Graph | Exception],
    *,
    seed: int = 0,
    full_size: bool = False,
    on_verdict: Callable[[int, Verdict], None] | None = None,
) -> list[Verdict]:
    """One verdict per candidate, in order; an exception among the candidates (a graph that could
    not be read) is a refutation that says so. `on_verdict(index, verdict)` is called as they come.
    """
    verifier = Verifier(program, seed=seed, full_size=full_size)
    out: list[Verdict] = []
    for k, candidate in enumerate(candidates):
        verdict = (
            refuted_malformed(candidate)
            if isinstance(candidate, Exception)
            else verifier.verify(candidate)
        )
        out.append(verdict)
        if on_verdict is not None:
            on_verdict(k, verdict)
    return out


class Verifier:
    """Judges candidates of one program; the program's own results at full size and the prover's
    engine are kept.

    Args:
        program: the program.
        seed: of every random choice.
        full_size: also run the field judge at full size.
    """

    def __init__(self, program: Graph, *, seed: int = 0, full_size: bool = False) -> None:
        self.program, self.seed, self.full_size = program, seed, full_size
        self.floats = FloatJudge(program, seed)
        self.prover = Prover()

    def verify(self, candidate: Graph) -> Verdict:
        """The verdict on one candidate."""
        return _Case(self, candidate).decide()


class _Case:
    """One candidate on its way through the judges."""

    def __init__(self, verifier: Verifier, candidate: Graph) -> None:
        self.v, self.candidate = verifier, candidate
        self.start = time.perf_counter()
        self.judges: list[JudgeResult] = []
        self.notes: list[str] = []

    def decide(self) -> Verdict:
        wrong = interface_mismatch(self.v.program, self.candidate)
        self._note("interface", wrong is None, wrong or "same inputs and outputs", self.start)
        if wrong is not None:
            return self._end(VerdictKind.REFUTED, "interfaces differ", wrong)
        try:
            return self._judge()
        except _FAULTS as e:
            why = f"a judge failed: {type(e).__name__}: {e}"
            return self._end(VerdictKind.UNKNOWN, why, None)

    def _judge(self) -> Verdict:
        cases = list(instances(self.v.program, self.candidate, self.v.seed))
        own = full_instance(self.v.program, self.candidate)
        if not cases or (self.v.full_size and not cases[0].full):
            if _field_affordable(own):
                cases.append(own)
            elif not cases:
                return self._end(
                    VerdictKind.UNKNOWN,
                    "no smaller instance exists and full size is too large",
                    None,
                )
            else:
                self.notes.append("full size is too large for the field judge")
        started = time.perf_counter()
        outcomes = [run_instance(c, self.v.seed, _DRAWS, 0) for c in cases]
        fields = _summary(outcomes)
        self._note("fields", _passed(fields), _field_detail(cases, outcomes), started)
        started = time.perf_counter()
        difference, where = self._float_tests(cases, own)
        self._note("floats", difference is None, str(difference or "agrees"), started)
        if difference is None and fields.doubtful:
            outcomes = [run_instance(c, self.v.seed, _DRAWS) for c in cases]
            fields = _summary(outcomes)
            self._note("fields", _passed(fields), _field_detail(cases, outcomes), started)
        if difference is not None and (where.full or difference.check != "meaning"):
            return self._refute(str(difference), fields)
        if difference is None and _inconclusive(fields):
            return self._by_proof(cases, fields, own)
        if difference is not None or fields.agreement is Agreement.MISMATCH:
            return self._suspect(fields, difference, own)
        return self._accept(cases, outcomes)

    def _by_proof(self, cases: Sequence[Instance], fields: FieldOutcome, own: Instance) -> Verdict:
        """Floats agree and the fields cannot say: undecided, or a difference that is seen only
        through functions that they do not interpret, whose laws they break. A proof decides.
        """
        started = time.perf_counter()
        proof = self._proof(cases)
        self._note("proof", True if proof.joined else None, proof.detail, started)
        if proof.joined:
            claim = _claim(self.v.program, self.candidate)
            what = f"fields cannot say ({fields.detail or fields.agreement.value})"
            where = ", ".join(c.sizes for c in cases)
            bound = "; ".join([claim, what, f"floats at {where}", *self.notes])
            return self._end(VerdictKind.PROVED, bound, None)
        if fields.agreement is Agreement.UNDECIDED:
            return self._end(VerdictKind.UNKNOWN, f"fields: {fields.detail}", None)
        return self._suspect(fields, None, own)

    def _float_tests(
        self, cases: Sequence[Instance], own: Instance
    ) -> tuple[Difference | None, Instance]:
        floats = self.v.floats
        for k, case in enumerate(cases):
            if case.full and case.program is not self.v.program:
                continue
            found = (
                floats.small(case, None if k == 0 else ("normal",))
                if not case.full or work_of(case.program) < 1 << 22
                else floats.full(case)
            )
            if found is not None:
                return found, case
        return None, own

    def _suspect(
        self, fields: FieldOutcome, difference: Difference | None, own: Instance
    ) -> Verdict:
        """A difference at small sizes: is it one at the sizes asked about?"""
        small = str(difference) if difference is not None else f"fields: {fields.detail}"
        if difference is None and fields.assumed:
            return self._end(
                VerdictKind.UNKNOWN,
                "the field judge sees a difference, but through functions that it does not "
                f"interpret ({', '.join(sorted(fields.assumed))}); floats agree",
                None,
            )
        if not size_bound(self.v.program, self.candidate):
            return self._refute(small, fields)
        if self.v.floats.affordable(self.candidate, own.ragged, Effort.MUCH):
            full = self.v.floats.full(own, working=False)
            if full is not None:
                return self._refute(str(full), fields)
        if _field_affordable(own):
            outcome = run_instance(own, self.v.seed, _DRAWS)
            if outcome.agreement is Agreement.MATCH:
                return self._accept_here(own, outcome)
            if outcome.agreement is Agreement.MISMATCH and not outcome.assumed:
                return self._refute(f"fields: {outcome.detail}", outcome)
        return self._end(
            VerdictKind.UNKNOWN,
            f"differs at smaller sizes, where constants may not fit ({small}); full size is too "
            "large to decide",
            None,
        )

    def _accept(self, cases: Sequence[Instance], outcomes: Sequence[FieldOutcome]) -> Verdict:
        """Fields and floats agree at small sizes: prove, and look at full size where it is
        cheap.
        """
        started = time.perf_counter()
        proof = self._proof(cases)
        self._note("proof", True if proof.joined else None, proof.detail, started)
        own = full_instance(self.v.program, self.candidate)
        if not any(c.full for c in cases) and self.v.floats.affordable(
            self.candidate, own.ragged, Effort.LITTLE if proof.joined else Effort.SOME
        ):
            started = time.perf_counter()
            difference = self.v.floats.full(own, meaning=not proof.joined)
            self._note("floats", difference is None, str(difference or "full size agrees"), started)
            if difference is not None:
                return self._refute(str(difference), outcomes[0])
            self.notes.append("floats also at full size")
        bound = "; ".join([bound_text(cases, outcomes), *self.notes])
        if proof.joined:
            claim = _claim(self.v.program, self.candidate)
            return self._end(VerdictKind.PROVED, f"{claim}; also {bound}", None)
        return self._end(VerdictKind.TESTED, bound, None)

    def _proof(self, cases: Sequence[Instance]) -> Proof:
        """Of the whole, or kernel by kernel where the whole is too much."""
        program, candidate = self.v.program, self.candidate
        whole = self.v.prover.prove(program, candidate)
        small = cases[0]
        if whole.joined or not (
            same_structure(small.program, program) and same_structure(small.candidate, candidate)
        ):
            return whole
        cuts = find_cuts(small.program, small.candidate, self.v.seed)
        pieces = prove_pieces(self.v.prover, program, candidate, cuts)
        return pieces if pieces.joined else Proof(False, f"{whole.detail}; {pieces.detail}", 0.0)

    def _accept_here(self, own: Instance, outcome: FieldOutcome) -> Verdict:
        """The graphs agree at these sizes and not at smaller ones."""
        note = "holds for these sizes only: at smaller ones the graphs differ"
        bound = "; ".join([bound_text([own], [outcome]), note, *self.notes])
        return self._end(VerdictKind.TESTED, bound, None)

    def _refute(self, witness: str, fields: FieldOutcome) -> Verdict:
        if fields.agreement is Agreement.MISMATCH and not witness.startswith("fields"):
            witness += f"; fields: {fields.detail}"
        witness += f"; re-run: verify(program, candidate, seed={self.v.seed})"
        return self._end(VerdictKind.REFUTED, "a difference was seen", witness)

    def _note(self, judge: str, passed: bool | None, detail: str, started: float) -> None:
        self.judges.append(JudgeResult(judge, passed, detail, time.perf_counter() - started))

    def _end(self, kind: VerdictKind, bound: str, witness: str | None) -> Verdict:
        seconds = time.perf_counter() - self.start
        return Verdict(kind, bound, seconds, witness, tuple(self.judges))


def interface_mismatch(program: Graph, candidate: Graph) -> str | None:
    """What differs in number, shape, dtype or strides of inputs and outputs, or None.

    Strides change no meaning: both graphs are judged as functions of tensors. But a kernel made
    from the candidate reads memory by the strides that the candidate declares, and is given tensors
    that lie as the program says. So they are part of the interface. (Results are always dense.)
    """
    for what, mine, theirs in (
        ("inputs", program.inputs, candidate.inputs),
        ("outputs", program.outputs, candidate.outputs),
    ):
        if len(mine) != len(theirs):
            return f"the program has {len(mine)} {what}, the candidate {len(theirs)}"
        for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                return (
                    f"{what[:-1]} {k} is {a.dtype}{list(a.shape)} in the program, "
                    f"{b.dtype}{list(b.shape)} in the candidate"
                )
    for k, (a, b) in enumerate(zip(program.inputs, candidate.inputs, strict=True)):
        own, other = (x.attrs.strides or row_major(x.shape) for x in (a, b))
        if _laid(own, a.shape) != _laid(other, a.shape):
            return (
                f"input {k} lies in memory with strides {own} in the program, {other} in the "
                "candidate: kernels of one would read tensors of the other wrongly; declare the "
                "same strides"
            )
    return None


def _laid(strides: Shape, shape: Shape) -> Shape:
    """Strides that matter: a dim of one element is never stepped along."""
    return tuple(s if n > 1 else 0 for s, n in zip(strides, shape, strict=True))


def _all_nodes(graph: Graph) -> Iterable[Node]:
    stack = topological(graph.outputs)
    while stack:
        node = stack.pop()
        yield node
        if node.op is Op.BLOCK:
            stack.extend(node.attrs.block.body)
        elif node.op is Op.THREAD:
            stack.extend(node.attrs.thread.body)


def size_bound(program: Graph, candidate: Graph) -> bool:
    """True when an attribute or constant may tie the graphs to their sizes, so that they may agree
    at their own sizes and nowhere else.
    """
    return _numbers_differ(program, candidate) or any(
        node.op in _SIZE_BOUND_OPS or (node.op in (Op.SUM, Op.REDUCE_MAX) and node.attrs.keep > 1)
        for graph in (program, candidate)
        for node in _all_nodes(graph)
    )


def _numbers_differ(program: Graph, candidate: Graph) -> bool:
    """Whether the graphs use other constants, or only one of them asks for extents."""
    marks = []
    for graph in (program, candidate):
        nodes = list(_all_nodes(graph))
        consts = {n.attrs.value for n in nodes if n.op is Op.CONST} - _NEUTRAL
        marks.append(({meant(v) for v in consts}, any(n.op is Op.SIZE for n in nodes)))
    return marks[0] != marks[1]


def _claim(program: Graph, candidate: Graph) -> str:
    """How far a proof reaches: slices and constants that stand for extents hold at one size."""
    fixed = any(n.op is Op.SLICE for g in (program, candidate) for n in _all_nodes(g))
    if fixed or _numbers_differ(program, candidate):
        return "for all inputs of these sizes"
    return "for all inputs, at every size that these cuts divide alike"


def _field_affordable(case: Instance) -> bool:
    if sum(n.elements for n in case.program.inputs) > _FIELD_ELEMENTS:
        return False
    return work_of(case.program) + work_of(case.candidate) <= _FIELD_WORK


def _summary(outcomes: Sequence[FieldOutcome]) -> FieldOutcome:
    """A mismatch anywhere, else an undecided one, else a match."""
    for kind in (Agreement.MISMATCH, Agreement.UNDECIDED):
        for outcome in outcomes:
            if outcome.agreement is kind and not (kind is Agreement.MISMATCH and outcome.assumed):
                return outcome
        for outcome in outcomes:
            if outcome.agreement is kind:
                return outcome
    return outcomes[0]


def _inconclusive(outcome: FieldOutcome) -> bool:
    """Whether the fields neither match nor show a difference that is one for certain."""
    if outcome.agreement is Agreement.UNDECIDED:
        return True
    return outcome.agreement is Agreement.MISMATCH and bool(outcome.assumed)


def _passed(outcome: FieldOutcome) -> bool | None:
    if outcome.agreement is Agreement.UNDECIDED:
        return None
    return outcome.agreement is Agreement.MATCH


def _field_detail(cases: Sequence[Instance], outcomes: Sequence[FieldOutcome]) -> str:
    parts = []
    for case, outcome in zip(cases, outcomes, strict=True):
        kind = "full size" if case.full else "short tiles" if case.ragged else "full tiles"
        text = f"{case.sizes} ({kind}): {outcome.agreement.value} in {outcome.draws} draws"
        parts.append(text if not outcome.detail else f"{text}: {outcome.detail}")
    return " | ".join(parts)


def bound_text(cases: Sequence[Instance], outcomes: Sequence[FieldOutcome]) -> str:
    """What the field runs give, in words: how many draws at which sizes, and the chance of a miss.

    Without exponentials: Schwartz-Zippel over the degree of the formulas. With: Theorem 2 of the
    Mirage paper, said to be empty where it is. Uninterpreted functions count as further variables.
    """
    draws = sum(o.draws for o in outcomes)
    where = (
        "at full size" if all(c.full for c in cases) else "at " + ", ".join(c.sizes for c in cases)
    )
    text = f"{draws} field draws {where}"
    terms, degree = max(o.terms for o in outcomes), max(o.degree for o in outcomes)
    misses = [o.miss for o in outcomes for _ in range(o.draws)]
    known = [m for m in misses if not isinf(m)]
    if known:
        total = sum(log10(m) for m in known if m > 0)
        what = "Theorem 2" if terms else "Schwartz-Zippel"
        text += (
            f": a difference at these sizes is missed with chance below 1e{int(total)} ({what}, "
        )
        text += f"degree {degree:.3g}" + (f", {terms:.3g} exponential terms)" if terms else ")")
    else:
        text += (
            f": the textbook bound is empty here ({terms:.3g} exponential terms); a difference "
            "that behaves randomly is missed with chance about 1e-9 a draw"
        )
    assumed = set().union(*(o.assumed for o in outcomes))
    if assumed:
        text += f"; {', '.join(sorted(assumed))} taken as arbitrary functions"
    return text
