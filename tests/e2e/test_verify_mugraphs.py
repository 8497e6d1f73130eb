"""The saved Mirage graphs: the 190 wrong ones are all refuted, every other one is accepted."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from obelisk.app.programs import find_program
from obelisk.ir import DType, Graph
from obelisk.ir.mirage import load_mirage
from obelisk.verify import VerdictKind, verify_many

FILES = {
    "gqa_bs1": "gqa", "mha_bs1": "mha", "mqa_bs1": "mqa", "rmsnorm_bs1": "rmsnorm",
    "gated_mlp": "gated_mlp", "single_gated_mlp": "gated_mlp", "lora": "lora",
    "single_lora": "lora", "ntrans_bs1": "ntrans",
}  # fmt: skip


def _program(name: str) -> Graph:
    return find_program(name).graph(dtype=DType.F16)


@pytest.mark.parametrize("file", FILES)
def test_right_graphs_are_proved(mugraphs: Path, file: str) -> None:
    entries = load_mirage(mugraphs / f"{file}.json")
    start = time.process_time()
    verdicts = verify_many(
        _program(FILES[file]), [e.graph or e.error or ValueError() for e in entries]
    )
    spent = time.process_time() - start
    for verdict in verdicts:
        assert verdict.kind is VerdictKind.PROVED, str(verdict)
    assert spent / len(entries) < 2


def test_all_190_wrong_graphs_are_refuted_with_a_witness(mugraphs: Path) -> None:
    entries = load_mirage(mugraphs / "qknorm_gqa_bs1.json")
    assert len(entries) == 190
    start = time.process_time()
    verdicts = verify_many(
        _program("qknorm"), [e.graph or e.error or ValueError() for e in entries]
    )
    spent = time.process_time() - start
    for verdict in verdicts:
        assert verdict.kind is VerdictKind.REFUTED, str(verdict)
        assert "program" in (verdict.witness or "")
        assert "candidate" in (verdict.witness or "")
        assert "malformed" not in (verdict.witness or "")
    assert spent / len(entries) < 0.5  # at small sizes: whole ones take over a second each


@pytest.mark.parametrize("seed", [1, 2])
def test_other_seeds_agree_on_a_sample(mugraphs: Path, seed: int) -> None:
    for file, name, kind in (
        ("qknorm_gqa_bs1", "qknorm", VerdictKind.REFUTED),
        ("rmsnorm_bs1", "rmsnorm", VerdictKind.PROVED),
        ("mqa_bs1", "mqa", VerdictKind.PROVED),
    ):
        graphs = [e.graph for e in load_mirage(mugraphs / f"{file}.json")[::12]]
        for verdict in verify_many(_program(name), [g for g in graphs if g], seed=seed):
            assert verdict.kind is kind, str(verdict)


def test_a_graph_of_another_program_is_refuted(mugraphs: Path) -> None:
    """qknorm's own inputs, but attention without the norms."""
    (first, *_) = load_mirage(mugraphs / "gqa_bs1.json")
    assert first.graph is not None
    (verdict,) = verify_many(_program("qknorm"), [first.graph])
    assert verdict.kind is VerdictKind.REFUTED
