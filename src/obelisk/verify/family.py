"""One verdict for a candidate at every size of a family.

Takes the pairs (program, candidate) that a structure gives at the sizes of a symbolic dim; gives
one verdict for all of them, and the *forms* that are proved. A form is the digest of an obligation
that names no size (`prove.pose`): two sizes of one form pose the same problem, so one proof serves
both, and a size that nobody looked at is covered if and only if its obligation is one of those.
Fields and floats judge the smallest size of every form and both ends of the range. What is not
proved is tested at the sizes that the verdict names.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from obelisk.base.digest import digest
from obelisk.ir.family import Dim, Linear
from obelisk.ir.graph import Graph
from obelisk.verify.judge import Verifier
from obelisk.verify.pieces import Cut, find_cuts, pose_pieces, same_structure, with_rules
from obelisk.verify.prove import Obligation, Prover, pose
from obelisk.verify.terms import Unprovable
from obelisk.verify.verdict import JudgeResult, Verdict, VerdictKind

_TESTED = 3  # sizes of an unproved form that are tested

Dims = Mapping[tuple[int, int], Linear]  # (input, dim) whose extent varies: its rule


@dataclass(frozen=True, slots=True)
class Case:
    """Program and candidate at one size of the family."""

    size: int
    program: Graph
    candidate: Graph


@dataclass(frozen=True, slots=True)
class FamilyVerdict:
    """The verdict on a candidate at all sizes.

    Attributes:
        verdict: proved if the form of every size that was looked at is; the bound says how many
            sizes and forms there are, and where fields and floats looked.
        forms: digests of the proved forms.
        tested: sizes at which fields and floats found no difference.
        seen: digests of the candidate's graphs at those sizes.
        cuts: where the graphs were cut into pieces, for the forms that are proved so.
    """

    verdict: Verdict
    forms: frozenset[str]
    tested: tuple[int, ...]
    seen: frozenset[str] = frozenset()
    cuts: tuple[Cut, ...] = ()

    def covers(self, program: Graph, candidate: Graph, varying: Dims) -> bool:
        """Whether the verdict reaches this pair: its form is proved, or this very graph was
        tested.
        """
        if not self.verdict.accepted:
            return False
        if candidate.digest in self.seen or form_of(program, candidate, varying) in self.forms:
            return True
        pieces = _posed_pieces(program, candidate, self.cuts, varying) if self.cuts else []
        return bool(pieces) and _form(pieces) in self.forms


def form_of(program: Graph, candidate: Graph, varying: Dims) -> str | None:
    """The form of a pair; None where the prover has none. Takes milliseconds, and no proof."""
    whole = _posed(program, candidate, varying)
    return _form(whole) if whole else None


def _posed(program: Graph, candidate: Graph, varying: Dims) -> list[Obligation]:
    """The obligation of the whole; nothing where it has none."""
    try:
        return [pose(program, candidate, varying)]
    except (Unprovable, RecursionError):
        return []


def _posed_pieces(
    program: Graph, candidate: Graph, cuts: Sequence[Cut], varying: Dims
) -> list[Obligation]:
    """The obligations of the pieces; nothing where one has none."""
    try:
        return pose_pieces(program, candidate, cuts, varying)
    except (Unprovable, RecursionError):
        return []


def _form(obligations: Sequence[Obligation]) -> str:
    return digest("form", *(o.text for o in obligations))


def verify_family(
    dim: Dim,
    varying: Dims,
    cases: Sequence[Case],
    *,
    seed: int = 0,
    proof: bool = False,
) -> FamilyVerdict:
    """Judge a candidate at every case; `varying` is `FamilyGraph.extents`.

    Proves each form once. Refuted as soon as one size is; the witness names it. With `proof` the
    answer is unknown as soon as one form is not proved, before anything is tested.
    """
    began = time.perf_counter()
    judges: list[JudgeResult] = []
    forms = _Forms(cases, varying, judges, seed)
    groups = forms.grouped(cases, proof)
    open_at = next((m[0].size for ok, m in groups.values() if not ok), None)
    if proof and open_at is not None:
        why = f"not proved at {dim.name} {open_at}"
        spent = time.perf_counter() - began
        unknown = Verdict(VerdictKind.UNKNOWN, why, spent, None, tuple(judges))
        return FamilyVerdict(unknown, frozenset(), ())
    proved = {key for key, (ok, _) in groups.items() if ok}
    ends = {cases[0].size, cases[-1].size}
    tested: list[int] = []
    seen: set[str] = set()
    for key, (_, members) in groups.items():
        few = members[:1] if key in proved else _spread(members)
        for case in (*few, *(c for c in members if c.size in ends and c not in few)):
            verdict = Verifier(case.program, seed=seed).verify(case.candidate)
            judges += [
                JudgeResult(j.judge, j.passed, f"{dim.name} {case.size}: {j.detail}", j.seconds)
                for j in verdict.judges
            ]
            if not verdict.accepted:
                where = f"at {dim.name} {case.size}: {verdict.bound}"
                bad = Verdict(verdict.kind, where, time.perf_counter() - began, verdict.witness,
                              tuple(judges))  # fmt: skip
                return FamilyVerdict(bad, frozenset(), ())
            tested.append(case.size)
            seen.add(case.candidate.digest)
    tested.sort()
    kind = VerdictKind.PROVED if len(proved) == len(groups) else VerdictKind.TESTED
    bound = _bound(dim, cases, groups, tested)
    verdict = Verdict(kind, bound, time.perf_counter() - began, None, tuple(judges))
    cuts = forms.cuts if forms.cut else ()
    return FamilyVerdict(verdict, frozenset(proved), tuple(tested), frozenset(seen), cuts)


class _Forms:
    """Finds the forms of cases and proves each once: of the whole, and from the first failure of
    that on, of the pieces.
    """

    def __init__(
        self, cases: Sequence[Case], dims: Dims, judges: list[JudgeResult], seed: int
    ) -> None:
        self.cases, self.dims, self.judges, self.seed = cases, dims, judges, seed
        self.prover = Prover()
        self.cuts: tuple[Cut, ...] = ()
        self.cut = False  # whether pieces are tried
        self.known: dict[str, bool] = {}  # form: proved

    def grouped(self, cases: Sequence[Case], proof: bool) -> dict[str, tuple[bool, list[Case]]]:
        """Cases by form (those without one together), each form with whether it is proved; with
        `proof` only up to the first that is not.
        """
        groups: dict[str, tuple[bool, list[Case]]] = {}
        for case in cases:
            key = self.form(case)
            groups.setdefault(key, (self.known[key], []))[1].append(case)
            if proof and not self.known[key]:
                break
        return groups

    def form(self, case: Case) -> str:
        """The form of a case, proved if it can be."""
        whole = _posed(case.program, case.candidate, self.dims)
        key = _form(whole) if whole else "no form"
        if key not in self.known and not self.cut:
            self.settled(key, whole)
        if self.known.get(key):
            return key
        if not self.cut:
            self.cut, self.cuts = True, self._cuts()
        pieces = _posed_pieces(case.program, case.candidate, self.cuts, self.dims)
        if not pieces:
            self.known.setdefault(key, False)
            return key
        own = _form(pieces)
        if own not in self.known:
            self.settled(own, pieces)
        return own

    def settled(self, key: str, obligations: Sequence[Obligation]) -> bool:
        """Try to prove a form."""
        joined = bool(obligations)
        for k, obligation in enumerate(obligations):
            tried = self.prover.discharge(obligation)
            joined = joined and tried.joined
            part = f" piece {k + 1} of {len(obligations)}" if len(obligations) > 1 else ""
            told = f"form {key[:12]}{part}: {tried.detail}"
            self.judges.append(JudgeResult("proof", tried.joined or None, told, tried.seconds))
            if not joined:
                break
        self.known[key] = joined
        return joined

    def _cuts(self) -> tuple[Cut, ...]:
        """Cuts found at the smallest size at which few values agree by chance, with the rules of
        their extents.
        """
        first, last = self.cases[0], self.cases[-1]
        case = next((c for c in self.cases if c.size > 3), last)
        cuts = find_cuts(case.program, case.candidate, self.seed)
        small = next((c for c in self.cases if c.size > 1), first)
        if small.size == last.size or not same_structure(small.program, last.program):
            return cuts
        return with_rules(cuts, small.program, last.program, (small.size, last.size))


def _spread(members: Sequence[Case]) -> list[Case]:
    """A few of them, from the smallest to the largest."""
    if len(members) <= _TESTED:
        return list(members)
    step = (len(members) - 1) / (_TESTED - 1)
    return [members[round(k * step)] for k in range(_TESTED)]


def _bound(
    dim: Dim, cases: Sequence[Case], groups: dict[str, tuple[bool, list[Case]]], tested: list[int]
) -> str:
    sizes = ", ".join(map(str, tested))
    proved = [len(members) for ok, members in groups.values() if ok]
    if len(proved) == len(groups):
        forms = "one form" if len(groups) == 1 else f"{len(groups)} forms, each proved once"
        if len(cases) == dim.span:
            claim = f"for all sizes of {dim} and all inputs: {forms}"
        else:
            claim = (
                f"for all inputs at every size of {dim} of {forms}, as all {len(cases)} sizes that "
                "were looked at are"
            )
        return f"{claim}; fields and floats at {dim.name} {sizes}"
    rest = f"; {sum(proved)} of {len(cases)} sizes looked at are proved" if proved else ""
    return f"fields and floats at {dim.name} {sizes}{rest}"
