"""Random graphs: each is accepted against itself and its tiled form, never after a change."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import SMALL, blocked_pair, kernel_graph

from obelisk.ir import Graph, make_graph
from obelisk.ir import build as b
from obelisk.verify import VerdictKind, verify
from obelisk.verify.prove import Prover

SEEDS = st.integers(0, 10**6)


@settings(max_examples=15, deadline=None)
@given(SEEDS)
def test_a_graph_equals_itself(seed: int) -> None:
    graph = kernel_graph(seed, dims=SMALL)
    verdict = verify(graph, graph, seed=seed)
    assert verdict.kind is not VerdictKind.REFUTED, str(verdict)


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_tiled_forms_are_accepted(seed: int) -> None:
    pair = blocked_pair(seed)
    verdict = verify(pair.program, pair.candidate, seed=seed)
    assert verdict.accepted, str(verdict)


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_changed_tiled_forms_are_refuted_and_never_joined(seed: int) -> None:
    pair = blocked_pair(seed)
    out = pair.candidate.outputs[0]
    factor = random.Random(seed).choice((2.0, -1.0, 0.5, 1.001))
    changed = make_graph(pair.candidate.inputs, [out * factor, *pair.candidate.outputs[1:]])
    assert isinstance(changed, Graph)
    assert verify(pair.program, changed, seed=seed).kind is VerdictKind.REFUTED
    assert not Prover().prove(pair.program, changed).joined
    assert b.mul(out, factor) in changed.outputs
