"""Every planted fault is refuted, and every candidate that it was planted in is accepted."""

from __future__ import annotations

import pytest
from tests.verify_faults import CASES, built

from obelisk.ir import Graph
from obelisk.verify import VerdictKind, refuted_malformed, verify

FAMILIES = {name.split(":")[0]: name for name in CASES}


def test_there_are_at_least_forty() -> None:
    assert len(CASES) >= 40


@pytest.mark.parametrize("family", FAMILIES)
def test_the_candidates_are_correct(family: str) -> None:
    program, make, _ = CASES[FAMILIES[family]]
    for seed in (0, 1, 2):
        verdict = verify(program, make(), seed=seed)
        assert verdict.kind is VerdictKind.PROVED, str(verdict)


@pytest.mark.parametrize("name", CASES)
def test_the_fault_is_refuted_with_a_witness(name: str) -> None:
    program, _, make = CASES[name]
    candidate = built(make)
    if not isinstance(candidate, Graph):  # a map that cannot be
        verdict = refuted_malformed(candidate)
        assert verdict.kind is VerdictKind.REFUTED
        assert any(w in verdict.witness or "" for w in ("overlap", "gap", "two grid axes"))
        return
    for seed in (0, 1):
        verdict = verify(program, candidate, seed=seed)
        assert verdict.kind is VerdictKind.REFUTED, str(verdict)
        assert "element" in (verdict.witness or "")


@pytest.mark.parametrize("name", CASES)
def test_the_fault_changed_the_graph(name: str) -> None:
    _, good, bad = CASES[name]
    candidate = built(bad)
    assert not isinstance(candidate, Graph) or candidate.digest != good().digest
