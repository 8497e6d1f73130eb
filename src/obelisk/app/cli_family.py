"""`obelisk optimize PROGRAM --family batch=1..64`: one search and one verdict for a whole range.

Takes what the user typed; gives a family graph, and prints what was found for it. `NAME=LOW..HIGH`
is the batch of a named program, or the parameter `batch` of a function; `INPUT.AXIS=LOW..HIGH` is a
dim of an input of any program, with all dims that must be equal to it. A file that begins with
`dim NAME = LOW..HIGH`, or the JSON form, is a family already.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from obelisk.app.display import Display, rows_table, stdout
from obelisk.app.loading import load_program
from obelisk.app.report import show_us
from obelisk.app.sized import CompiledFamily, optimize_family
from obelisk.base.errors import UserError
from obelisk.ir.family import (
    Dim,
    FamilyGraph,
    along,
    family_from_json,
    family_text,
    is_family_json,
    is_family_text,
    parse_family,
    trace,
)

_SHOWN = 7  # sizes in the printed table


def asked(
    program: str,
    spec: str | None,
    batch: int,
    dtype: str | None,
    device: str,
    report: Path | None,
    save: Path | None,
) -> FamilyGraph | None:
    """The family that a command line asks for, or None for an ordinary program.

    Raises `UserError` for options that a family does not have.
    """
    stored = stored_family(program)
    if spec is None and stored is None:
        return None
    if spec is not None and stored is not None:
        raise UserError(f"{program} is a family already: leave --family away")
    if device not in ("cpu", "host"):
        raise UserError(f"a family runs on cpu so far, got --device {device}")
    if report is not None or save is not None:
        raise UserError("a family has no --report and no --save: use --json")
    return stored if spec is None else load_family(program, spec, batch, dtype)


def stored_family(program: str) -> FamilyGraph | None:
    """The family that a file holds; None where `program` names no such file."""
    path = Path(program)
    if not path.is_file() or path.suffix == ".py":
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None  # whoever reads it as a graph says what is wrong
    if is_family_text(text):
        return parse_family(text)
    if text.lstrip().startswith("{"):
        try:
            data = json.loads(text)
        except json.JSONDecodeError:
            return None
        if is_family_json(data):
            return family_from_json(data)
    return None


def load_family(program: str, spec: str, batch: int = 1, dtype: str | None = None) -> FamilyGraph:
    """The family of a program along the dim that `spec` names.

    Raises `UserError` for a wrong spec, and what loading a program raises.
    """
    place = re.match(r"\s*([A-Za-z_]\w*)\.(\d+)\s*=", spec)
    dim = Dim.parse(spec)
    if place is not None:
        return along(load_program(program, batch, dtype), place[1], int(place[2]), dim)
    if dim.name != "batch":
        raise UserError(
            f"--family {spec}: a dim is batch, or INPUT.AXIS as in k.2=1..4096; got {dim.name!r}"
        )
    if batch != 1:
        raise UserError("--batch and --family batch=LOW..HIGH both say what the batch is")
    return trace(lambda n: load_program(program, n, dtype), dim)


def run_family(
    family: FamilyGraph,
    *,
    budget: float,
    seed: int,
    cache: bool,
    write: Callable[[Any], None],
) -> CompiledFamily:
    """Optimize, print, write; the body of `obelisk optimize --family`. `write` takes the JSON
    form.
    """
    with Display() as progress:
        made = optimize_family(family, budget=budget, seed=seed, cache=cache, progress=progress)
    console = stdout()
    report = made.report(_shown(family.dim))
    console.print(family_text(family), highlight=False, markup=False, soft_wrap=True)
    rows = [
        (
            str(r["size"]),
            "its own operators" if r["structure"] is None else f"structure {r['structure']}",
            str(r["kernels"]),
            show_us(r["predicted_us"]),
            f"{r['chosen_ms']:.1f} ms",
        )
        for r in report["sizes"]
    ]
    heads = (family.dim.name, "runs", "kernels", "predicted", "chosen in")
    console.print(rows_table(heads, rows, left=2))
    for k, s in enumerate(report["structures"]):
        line = f"structure {k}: {s['note']}: {s['verdict']}: {s['bound']}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for line in report["fallen"]:
        console.print(f"left out: {line}", highlight=False, markup=False, soft_wrap=True)
    found = report["search"]
    where = " (from the cache)" if report["cached"] else ""
    console.print(
        f"searched once, at {family.dim.name} {report['searched_at']}: {found['states']:,} states "
        f"in {found['seconds']:.1f} s{where}; {report['verdict']}",
        soft_wrap=True,
    )
    write(report)
    return made


def _shown(dim: Dim) -> list[int]:
    """A few sizes from end to end, about equally far apart in ratio."""
    ratio = dim.high / dim.low
    sizes = {round(dim.low * ratio ** (k / (_SHOWN - 1))) for k in range(_SHOWN)}
    return sorted(sizes | {dim.low, dim.high})
