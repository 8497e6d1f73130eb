"""Reading graph files by what they contain: Obelisk text, Obelisk JSON, or a Mirage checkpoint.

Gives one `Entry` per graph; a Mirage graph that is malformed is an entry with its error. Writing
picks the form by the file's extension: `.json` JSON, `.mirage.json` a Mirage checkpoint, anything
else text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from obelisk.base.errors import MalformedGraph, ParseError, UserError
from obelisk.ir.graph import Graph
from obelisk.ir.jsonform import dumps, from_json, is_json_graph
from obelisk.ir.mirage import MirageEntry, is_mirage, load_mirage
from obelisk.ir.mirage_out import save_mirage
from obelisk.ir.text import parse_all, to_text

Entry = MirageEntry  # index, and either a graph or the error that says what is wrong with it


def read_graphs(path: str | Path) -> list[Entry]:
    """The graphs of a file, told apart by content. Raises `ParseError` naming the file and the
    place.
    """
    path = Path(path)
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ParseError(f"{path}: cannot be read as text: {e}") from None
    try:
        if content.lstrip()[:1] in ("{", "["):
            return _read_json(content, path)
        graphs = parse_all(content)
    except UserError as e:
        if str(path) in str(e):
            raise
        raise type(e)(f"{path}: {e}") from None
    if not graphs:
        raise ParseError(f"{path}: holds no graph; expected text form, JSON form or Mirage's")
    return [Entry(i, g, None) for i, g in enumerate(graphs)]


def _read_json(content: str, path: Path) -> list[Entry]:
    try:
        data = json.loads(content)
    except json.JSONDecodeError as e:
        raise ParseError(f"not JSON: {e}") from None
    if is_mirage(data):
        return load_mirage(data, path.stem)
    if is_json_graph(data):
        return [Entry(0, from_json(data), None)]
    if isinstance(data, list) and data and all(is_json_graph(d) for d in data):
        return [Entry(i, from_json(d), None) for i, d in enumerate(data)]
    raise ParseError("JSON, but neither an Obelisk graph (field 'schema') nor a Mirage checkpoint")


def read_graph(path: str | Path) -> Graph:
    """The single graph of a file; raises `ParseError` when it holds several, or the graph's own
    error.
    """
    entries = read_graphs(path)
    if len(entries) != 1:
        raise ParseError(f"{path}: holds {len(entries)} graphs; one was expected")
    entry = entries[0]
    if entry.graph is None:
        assert entry.error is not None
        raise entry.error
    return entry.graph


def write_graphs(path: str | Path, graphs: Sequence[Graph]) -> None:
    """Write graphs in the form that the extension names; raises `MalformedGraph` for several in
    `.json`.
    """
    path = Path(path)
    if path.name.endswith(".mirage.json"):
        save_mirage(graphs, path)
    elif path.suffix == ".json":
        if len(graphs) != 1:
            raise MalformedGraph(f"{path}: the JSON form holds one graph, got {len(graphs)}")
        path.write_text(dumps(graphs[0]), encoding="utf-8")
    else:
        path.write_text("\n".join(to_text(g) for g in graphs), encoding="utf-8")
