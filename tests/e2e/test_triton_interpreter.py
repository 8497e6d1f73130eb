"""Triton kernels on the CPU: every set of graphs of `tests.triton_interpreter` against float64.

Each set runs in a process of its own, because Triton decides at import whether it interprets.
Skipped loudly where Triton, or torch, whose tensors its interpreter takes, is not installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from tests.conftest import ROOT

SECONDS = 240.0
for needed in ("triton", "torch"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"NOT RUN: Triton's interpreter needs {needed}", allow_module_level=True)


def interpreted(name: str) -> list[dict[str, Any]]:
    """The lines of a set."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton_interpreter", name],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        timeout=SECONDS, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("programs", 24),  # every named program in f16 and f32
        ("found", 10),  # what the search returns
        ("blocks", 45),  # every feature of the block level
        ("operators", 22),  # every operator and dtype
        ("choices", 15),  # every lowering choice
        ("scores", 20),  # attention: lengths 1 to 65, scores of 5 to 1000, f16 and bf16
        ("random:0:10", 10),
    ],
)
def test_kernels_equal_float64(name: str, least: int) -> None:
    lines = interpreted(name)
    assert len(lines) >= least
    for line in lines:
        assert "error" in line, line
        assert line["error"] <= 1.0, line
