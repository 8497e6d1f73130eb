"""Triton kernels on the CPU: every set of graphs of `tests.triton_interpreter` against float64.

They run in a process of their own, because Triton decides at import whether it interprets.
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


# Set and the least number of graphs that it must have.
SETS = {
    "programs": 24,  # every named program in f16 and f32
    "found": 10,  # what the search returns
    "blocks": 45,  # every feature of the block level
    "operators": 22,  # every operator and dtype
    "choices": 15,  # every lowering choice
    "scores": 20,  # attention: lengths 1 to 65, scores of 5 to 1000, f16 and bf16
    "random:0:10": 10,
}


def test_kernels_equal_float64() -> None:
    """All sets in one process: what it imports takes longer than most sets."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton_interpreter", *SETS],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        timeout=SECONDS, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    for name, least in SETS.items():
        assert sum(line["set"] == name for line in lines) >= least, name
    wrong = [line for line in lines if line.get("error", float("inf")) > 1.0]
    assert not wrong
