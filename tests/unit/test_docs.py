"""Record R50: what the pages in docs/ show is there: their Python runs, their options and their
links exist.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from obelisk.app.cli import app
from obelisk.ir import KernelGraph

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("docs/*.md")), ROOT / "README.md"]
GLOBAL = {"--help", "--version"}


def python(page: str) -> list[str]:
    """The Python blocks of a page."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands() -> dict[str, set[str]]:
    """Long options by command ("plan show")."""
    out: dict[str, set[str]] = {}
    top: Any = typer.main.get_command(app)
    for name, command in top.commands.items():
        below = getattr(command, "commands", None)
        found = {name: command} if below is None else {f"{name} {k}": c for k, c in below.items()}
        for full, one in found.items():
            out[full] = {o for p in one.params for o in p.opts if o.startswith("--")} - GLOBAL
    return out


def graph() -> Any:
    g = KernelGraph("rows")
    x, w = g.input((8, 32)), g.input((32, 16))
    g.output(g.matmul(x, w))
    return g.freeze()


def test_the_example_of_the_cache_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OBELISK_CACHE", str(tmp_path / "cache"))
    made = tmp_path / "kernel.so"
    made.write_bytes(b"\x7fELF")
    (code,) = python("cache")
    lines = code.splitlines()
    put = next(i for i, line in enumerate(lines) if line.startswith("store.put"))
    names = {
        "program": graph(), "space_text": "all", "path": made,
    }  # fmt: skip
    exec("\n".join(lines[: put + 1]), names)
    assert names["store"].get(names["key"]).payload["verdict"] == "proved"
    digest = names["store"].list()[0].digest
    exec("\n".join(lines[put + 1 :]).replace('"3fa9"', repr(digest[:4])), names)
    assert not names["store"].list()


def test_the_example_of_the_judges_runs() -> None:
    (code,) = python("verify")
    names: dict[str, Any] = {"program": graph(), "candidate": graph(), "candidates": [graph()] * 2}
    exec(code, names)
    assert names["verdict"].accepted
    assert all(v.accepted for v in names["verdicts"])


def test_every_import_that_a_page_shows_exists() -> None:
    """Also of the examples that need a device or a plan."""
    seen = 0
    for page in PAGES:
        for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.ImportFrom):
                    module = importlib.import_module(node.module or "")
                    for name in node.names:
                        assert hasattr(module, name.name), f"{page.name}: {node.module}.{name.name}"
                        seen += 1
    assert seen > 20


def test_options_on_the_page_are_those_of_the_commands() -> None:
    """Each option of each command is named in its section, and each named one exists somewhere."""
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    mega = (ROOT / "docs" / "megakernel.md").read_text(encoding="utf-8")
    there = commands()
    for name, options in there.items():
        head = name.split()[0]
        section = next(s for s in sections if f"`obelisk {head}" in s.splitlines()[0])
        if head in ("synth", "generate", "plan"):
            section += mega
        for option in options - {"--json"}:  # of all commands that compute something
            shown = "-o " if option == "--output" else option
            assert shown in section, f"{name}: {option} is not documented"
    known = GLOBAL.union(*there.values())
    for page in PAGES:
        for command in re.findall(r"`obelisk [^`]*`", page.read_text(encoding="utf-8")):
            for option in re.findall(r"--[a-z][a-z-]+", command):
                assert option in known or option.startswith("--no-"), f"{page.name}: {command}"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
