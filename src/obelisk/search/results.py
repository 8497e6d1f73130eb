"""Candidates on disk: found on one machine, judged and measured on another.

One JSON file with the program, the machine that the costs are for, and every candidate's graph in
the JSON form of `ir`, its predicted cost and its note. Reading gives the very same interned graphs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from obelisk.base.errors import ParseError, UserError
from obelisk.ir import Graph
from obelisk.ir.jsonform import from_json, to_json
from obelisk.search.space import SearchResult

FORMAT = "obelisk-candidates"
VERSION = 1


@dataclass(frozen=True, slots=True)
class StoredCandidate:
    """A graph, its predicted seconds, launches, bytes and operations, and how it was found."""

    graph: Graph
    seconds: float
    launches: int
    bytes: float
    flops: float
    note: str


@dataclass(frozen=True, slots=True)
class CandidateFile:
    """What a file holds: candidate 0 is the program; `machine` names what the costs are for."""

    machine: str
    candidates: tuple[StoredCandidate, ...]

    @property
    def program(self) -> Graph:
        """The program that all candidates should equal."""
        return self.candidates[0].graph


def write_candidates(path: str | Path, result: SearchResult, machine: str) -> None:
    """Write a search's candidates; raises `UserError` if the file cannot be written."""
    rows = [
        {
            "graph": to_json(c.graph),
            "seconds": c.cost.seconds,
            "launches": c.cost.launches,
            "bytes": c.cost.bytes,
            "flops": c.cost.flops,
            "note": c.note,
        }
        for c in result.candidates
    ]
    data = {"format": FORMAT, "version": VERSION, "machine": machine, "candidates": rows}
    try:
        Path(path).write_text(json.dumps(data) + "\n", encoding="utf-8")
    except OSError as e:
        raise UserError(f"{path}: candidates cannot be written: {e}") from None


def read_candidates(path: str | Path) -> CandidateFile:
    """Read what `write_candidates` wrote.

    Raises `ParseError` naming the file for another form or version, and the graph's own error where
    one of them is malformed.
    """
    try:
        data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise ParseError(f"{path}: not a file of candidates: {e}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ParseError(f"{path}: not a file of candidates (no format {FORMAT!r})")
    if data.get("version") != VERSION:
        raise ParseError(f"{path}: version {data.get('version')}, this Obelisk reads {VERSION}")
    try:
        found = tuple(
            StoredCandidate(
                from_json(row["graph"]),
                float(row["seconds"]),
                int(row["launches"]),
                float(row["bytes"]),
                float(row["flops"]),
                str(row["note"]),
            )
            for row in data["candidates"]
        )
        machine = str(data["machine"])
    except (KeyError, TypeError, ValueError) as e:
        if isinstance(e, UserError):
            raise type(e)(f"{path}: {e}") from None
        raise ParseError(f"{path}: a field is missing or wrong: {e!r}") from None
    if not found:
        raise ParseError(f"{path}: holds no candidate")
    return CandidateFile(machine, found)
