"""docs/ir.md says what the code does: its examples run, and its text form is what they print."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from obelisk.ir import Op
from obelisk.ir.text import parse, to_text

DOCS = Path(__file__).resolve().parents[2] / "docs" / "ir.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)


def test_examples_run_and_print_what_is_shown() -> None:
    first, second = blocks("python")
    names: dict[str, Any] = {}
    exec(first, names)
    assert names["graph"].outputs[0].shape == (4, 32)
    exec(second, names)
    shown = blocks("text")[0]
    assert to_text(names["fused"]) == shown
    assert parse(shown) == names["fused"]


def test_every_operator_is_documented() -> None:
    text = DOCS.read_text(encoding="utf-8")
    missing = [op.value for op in Op if f"`{op.value}`" not in text]
    assert not missing
