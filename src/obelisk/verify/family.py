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
    """

    verdict: Verdict
    forms: frozenset[str]
    tested: tuple[int, ...]
    seen: frozenset[str] = frozenset()

    def covers(self, program: Graph, candidate: Graph, varying: Dims) -> bool:
        """Whether the verdict reaches this pair: its form is proved, or this very graph was
        tested.
        """
        if not self.verdict.accepted:
            return False
        return candidate.digest in self.seen or form_of(program, candidate, varying) in self.forms


def form_of(program: Graph, candidate: Graph, varying: Dims) -> str | None:
    """The form of a pair; None where the prover has none. Takes milliseconds, and no proof."""
    obligation = _posed(program, candidate, varying)
    return None if obligation is None else _form(obligation)


def _posed(program: Graph, candidate: Graph, varying: Dims) -> Obligation | None:
    try:
        return pose(program, candidate, varying)
    except (Unprovable, RecursionError):
        return None


def _form(obligation: Obligation) -> str:
    return digest("form", obligation.text)


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
    groups = _grouped(cases, varying, judges, proof)
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
    return FamilyVerdict(verdict, frozenset(proved), tuple(tested), frozenset(seen))


def _grouped(
    cases: Sequence[Case], dims: Dims, judges: list[JudgeResult], proof: bool
) -> dict[str, tuple[bool, list[Case]]]:
    """Cases by form (those without one by themselves), each with whether its form is proved; with
    `proof` only up to the first that is not.
    """
    prover = Prover()
    groups: dict[str, tuple[bool, list[Case]]] = {}
    for case in cases:
        obligation = _posed(case.program, case.candidate, dims)
        key = "no form" if obligation is None else _form(obligation)
        if key not in groups:
            joined = False
            if obligation is not None:
                found: Obligation = obligation
                tried = prover.settle(lambda given=found: given)  # type: ignore[misc]
                joined = tried.joined
                judges.append(
                    JudgeResult("proof", joined or None, f"form {key[:12]}: {tried.detail}",
                                tried.seconds)
                )  # fmt: skip
            groups[key] = (joined, [])
        groups[key][1].append(case)
        if proof and not groups[key][0]:
            break
    return groups


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
