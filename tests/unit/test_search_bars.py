"""What the search has to reach for each named program: the best known structures, in seconds of one
process, in little memory.
"""

from __future__ import annotations

import pytest

from obelisk.app.loading import load_program
from obelisk.app.search_bench import STRUCTURES, search_row
from obelisk.machine import find
from obelisk.search import Space, search

MOST_MEMORY = 2 << 30


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_known_structure_is_found_in_time(name: str) -> None:
    """Processor seconds of one process: 10 until the best, 60 for mlp; the space is exhausted."""
    row = search_row(name, 1, "f32", 120.0, 0, "1")
    assert row["stopped"] == "exhausted"
    assert [title for title, where in row["structures"].items() if where is None] == []
    assert 0 < row["found_seconds"] < (60 if name == "mlp" else 10)
    assert row["peak_memory"] < MOST_MEMORY


def test_rmsnorm_with_eleven_operators() -> None:
    """The best structure within 2 s of processor time, the space exhausted within 30."""
    program = load_program("rmsnorm")
    stats = search(program, find("cpu"), space=Space(block_ops=11), workers=1).stats
    assert stats.stopped == "exhausted"
    assert stats.found_seconds < 2
    assert sum(stats.stage_seconds.values()) < 30
