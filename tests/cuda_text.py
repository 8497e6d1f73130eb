"""CUDA text made C++ for the CPU twins: asm statements become calls, a library is built once.

Used by `mega_cuda_twin` and `lower_cuda_twin`, whose functions lie in cuda_on_cpu.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent / "cuda_on_cpu"


def preprocessed(source: str, *flags: str) -> str:
    """What the preprocessor leaves of a kernel."""
    return subprocess.run(
        ["g++", "-E", "-P", *flags, "-x", "c++", "-"], input=source, capture_output=True, text=True,
        check=True, timeout=60,
    ).stdout  # fmt: skip


def _closing(text: str, at: int) -> int:
    """The place of the parenthesis that closes the one at `at`, strings left out."""
    depth, quoted = 0, False
    for i in range(at, len(text)):
        c = text[i]
        if c == '"' and text[i - 1] != "\\":
            quoted = not quoted
        elif not quoted and c in "()":
            depth += 1 if c == "(" else -1
            if depth == 0:
                return i
    raise AssertionError("an asm statement does not end")


def _operands(part: str) -> list[str]:
    """The expressions of one section."""
    out, at = [], 0
    while (m := re.compile(r'\s*,?\s*"[^"]*"\s*\(').match(part, at)) is not None:
        end = _closing(part, m.end() - 1)
        out.append(part[m.end() : end])
        at = end + 1
    return out


def _parts(body: str) -> tuple[str, list[str], list[str]]:
    """An asm statement's template, outputs and inputs."""
    template, rest = "", body
    while (m := re.match(r'\s*"((?:[^"\\]|\\.)*)"', rest)) is not None:
        template += m[1]
        rest = rest[m.end() :]
    sections = [s for s in re.split(r":(?![^(]*\))", rest.replace("::", ": :"))][1:]
    outs, ins = (_operands(sections[i]) if len(sections) > i else [] for i in range(2))
    return template, outs, ins


def asm_called(text: str, call: Callable[[str, list[str], list[str]], str]) -> str:
    """The text with `call(template, outputs, inputs)` in place of each asm statement."""
    out, at = [], 0
    for m in re.finditer(r"\basm\s*(?:volatile)?\s*\(", text):
        if m.start() < at:
            continue
        end = _closing(text, m.end() - 1)
        out += [text[at : m.start()], call(*_parts(text[m.end() : end]))]
        at = end + 1
    return "".join([*out, text[at:]])


def _built(text: str, folder: Path, ending: str, *flags: str) -> Path:
    """What g++ makes of a C++ text, where it is not there yet."""
    name = folder / hashlib.sha256("\n".join([text, *flags]).encode()).hexdigest()[:24]
    made = name.with_suffix(ending)
    if not made.is_file():
        name.with_suffix(".cpp").write_text(text)
        subprocess.run(
            ["g++", "-std=c++17", "-O1", "-fno-strict-aliasing", "-fPIC", "-fvisibility=hidden",
             "-w", "-Wno-psabi", "-o", str(made), str(name.with_suffix(".cpp")), *flags],
            check=True, timeout=280,
        )  # fmt: skip
    return made


def library(text: str, folder: Path, runner: str, room: int) -> Path:
    """The library of a C++ text and of what runs it, a text in cuda_on_cpu that is compiled once
    for all; `room` is the bytes of a block's shared memory. Built where it is not there yet.
    """
    texts = "".join(p.read_text() for p in sorted(HERE.iterdir()))
    again = hashlib.sha256(texts.encode()).hexdigest()[:24]  # when a header changes
    flags = ("-c", f"-I{HERE}", f"-DTWIN_BYTES={room}", f"-DTWIN_{again}")
    runs = _built(f'#include "{runner}"\n', folder, ".o", *flags)
    return _built(text, folder, ".so", "-shared", str(runs))
