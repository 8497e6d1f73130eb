"""What a compiler made of a kernel's text, looked at: operands of products that a loop keeps.

Takes CUDA C++ for sm_90a; compares the PTX, where an operand that the loop does not write has
registers of its own, with the machine code, where the assembler has chosen registers: one that the
loop writes again is lost after its first iteration (seen with CUDA 13.0, LOG.md).
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

NVDISASM = "triton/backends/nvidia/bin/nvdisasm"
WIDE = {
    "LDSM.16.M88.4": 4, "LDSM.16.MT88.4": 4, "LDG.E.128": 4, "LDS.128": 4, "LDS.64": 2,
    "LDL.64": 2, "LDL.128": 4,
}  # fmt: skip
RESTORED = r"^(?:LDL\S*|MOV) "  # from local memory, or from a register that keeps it


def loop_of(lines: list[str], at: int, label: str, jump: str) -> tuple[int, int] | None:
    """The first and last line of the innermost loop around a line: the nearest jump behind it that
    goes back to a label before it. (Loops that wait lie behind everything, and jump back as well.)
    """
    where = {m[1]: i for i, x in enumerate(lines) if (m := re.match(label, x))}
    found = [
        (i, where[m[1]])
        for i, x in enumerate(lines)
        if i > at and (m := re.search(jump, x)) and m[1] in where and where[m[1]] < at
    ]
    end, start = min(found, default=(0, 0))
    return (start, end) if found else None


def kept_operands(ptx: str) -> list[bool]:
    """For each `wgmma` with a left operand in registers, in order: whether its loop never writes
    that operand.
    """
    lines = [x.strip() for x in ptx.splitlines()]
    out = []
    for at, line in enumerate(lines):
        m = re.search(r"wgmma\.mma_async\S* \{[^}]*\}, \{(%\w+),", line)
        if not m:
            continue
        loop = loop_of(lines, at, r"(\$L__BB\w+):", r"bra(?:\.uni)?\s+(\$L__BB\w+);")
        inside = lines[loop[0] : loop[1]] if loop else []
        written = re.compile(rf"[\w.]+\s+{re.escape(m[1])},")
        out.append(loop is not None and not any(written.match(x) for x in inside))
    return out


def lost_operands(sass: str, kept: list[bool]) -> list[str]:
    """Products of machine code whose operand should be kept and is written in their loop."""
    lines = [re.sub(r"/\*\w+\*/", "", x).strip() for x in sass.splitlines()]
    products = [
        (i, int(m[1])) for i, x in enumerate(lines) if (m := re.search(r"HGMMA\S* R\d+, R(\d+)", x))
    ]
    assert len(products) == len(kept), (len(products), len(kept))
    lost = []
    for (at, first), keep in zip(products, kept, strict=True):
        loop = loop_of(lines, at, r"(\.L_x_\d+):", r"BRA.*`\((\.L_x_\d+)\)")
        if not keep or loop is None:
            continue
        before = lines[at : loop[0] : -1] + lines[loop[1] : at : -1]  # the latest first
        for register in range(first, first + 4):
            line = next((x for x in before if writes(x, register)), "")
            if line and not re.search(RESTORED, line):
                lost.append(f"{lines[at]} after {line}")
    return lost


def writes(line: str, register: int) -> bool:
    """Whether an instruction's result lies in a register."""
    m = re.match(r"(?:@!?U?P\w+ +)?([A-Z]\S*) (?:P\w+, )?R(\d+)\b", line)
    if not m or m[1].startswith(("ST", "RED", "BAR", "HGMMA", "SYNCS", "R2UR")):
        return False
    return int(m[2]) <= register < int(m[2]) + WIDE.get(m[1], 1)


def lost_in(source: str, folder: Path, nvcc: str, nvdisasm: str) -> list[str]:
    """`lost_operands` of a kernel's text, compiled for sm_90a."""
    text, ptx, cubin = (folder / f"k.{x}" for x in ("cu", "ptx", "cubin"))
    text.write_text(source)
    for out, kind in ((ptx, "-ptx"), (cubin, "-cubin")):
        command = [nvcc, kind, "-std=c++17", "-arch=sm_90a", "-w", "-o", str(out), str(text)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    sass = subprocess.run(
        [nvdisasm, "-c", str(cubin)], check=True, capture_output=True, text=True, timeout=120
    ).stdout
    return lost_operands(sass, kept_operands(ptx.read_text()))
