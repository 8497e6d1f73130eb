"""Progress reporting that stages may call without knowing who listens.

A stage takes a `Progress` and calls `update(**counts)` as often as it likes; the default listens to
nothing. The command line passes a listener that draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Progress(Protocol):
    """Listens to a stage. `update` must be cheap: inner loops call it, at a bounded rate."""

    def update(self, stage: str, counts: Mapping[str, float | int | str]) -> None:
        """Take the newest counts of `stage` (for the search: states, pruned, candidates, verified,
        seconds).
        """


class Silent:
    """A `Progress` that drops everything."""

    def update(self, stage: str, counts: Mapping[str, float | int | str]) -> None:
        """Ignore the counts."""
