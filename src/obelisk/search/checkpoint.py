"""Finished units on disk, so that a search that was stopped goes on where it was.

One JSON file, written whole and put in place at once, every few seconds. It names its format and
version and the digest of everything that units depend on (program, machine, space, seed): a file of
another search is refused, not mixed in.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from obelisk.base.errors import ParseError, UserError
from obelisk.search.units import VERSION, Context, Outcome, dumps, outcome

FORMAT = "obelisk-search"
EVERY_SECONDS = 2.0


class Checkpoint:
    """The finished units of one search; on disk if it has a path."""

    def __init__(self, context: Context, path: Path | None) -> None:
        self.context, self.path = context, path
        self.units: dict[str, Outcome] = {}
        self._written = time.monotonic()
        self._new = False

    def add(self, result: Outcome) -> None:
        """Keep a finished unit; the file follows within seconds."""
        self.units[result.key] = result
        self._new = True
        if time.monotonic() - self._written > EVERY_SECONDS:
            self.write()

    def write(self) -> None:
        """Write now, if there is anything new. Raises `UserError` when the place cannot be
        written.
        """
        if self.path is None or not (self._new or not self.path.exists()):
            return
        data = {
            "format": FORMAT,
            "version": VERSION,
            "identity": self.context.identity,
            "machine": self.context.machine.name,
            "space": self.context.space.key,
            "seed": self.context.seed,
            "program": self.context.program,
            "units": {key: unit.plain() for key, unit in sorted(self.units.items())},
        }
        try:
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
            with os.fdopen(handle, "w", encoding="utf-8") as f:
                f.write(dumps(data) + "\n")
            os.replace(name, self.path)
        except OSError as e:
            raise UserError(f"checkpoint {self.path} cannot be written: {e}") from None
        self._written, self._new = time.monotonic(), False

    def load(self, path: Path) -> None:
        """Take the finished units of a file.

        Raises `ParseError` if it is no checkpoint of this version and `UserError` if it belongs to
        another search, naming what differs.
        """
        data = _read(path)
        if data["identity"] != self.context.identity:
            own = {
                "program": self.context.program,
                "machine": self.context.machine.name,
                "space": self.context.space.key,
                "seed": self.context.seed,
            }
            differing = [name for name, value in own.items() if data.get(name) != value]
            raise UserError(
                f"{path} belongs to another search (it differs in "
                f"{', '.join(differing) or 'the description of the machine'}): give the same "
                "program, machine and options, or leave --resume away"
            )
        try:
            units = [outcome(u) for u in data["units"].values()]
        except (ParseError, AttributeError, TypeError) as e:
            raise ParseError(f"{path}: {e}") from None
        self.units.update({u.key: u for u in units})


def _read(path: Path) -> Any:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise ParseError(f"{path}: not a checkpoint: {e}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ParseError(f"{path}: not a checkpoint of a search (no format {FORMAT!r})")
    if data.get("version") != VERSION:
        raise ParseError(
            f"{path}: checkpoint version {data.get('version')}, this Obelisk reads {VERSION}: "
            "start the search again"
        )
    return data
