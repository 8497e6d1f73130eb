"""A launch's timeline: which core ran which task when, from the kernel's own time stamps.

Takes the recorded stamps; gives `Span`s, and the trace-event JSON that Perfetto and Chrome open.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from obelisk.runtime.launch import KIND_STEP

Array = Any


@dataclass(frozen=True, slots=True)
class Span:
    """One task on one core: kind, layer (0 outside layers), start and end in seconds since the
    first task.
    """

    core: int
    kind: str
    layer: int
    start: float
    end: float


def spans_of(kinds: Sequence[str], stamps: Array, counts: Array) -> list[Span]:
    """Spans from stamps (cores, room, 3) of which `counts` (cores,) are filled, by start."""
    filled = [stamps[c, : int(n)] for c, n in enumerate(counts)]
    first = min((float(part[:, 1].min()) for part in filled if len(part)), default=0.0)
    out = []
    for core, part in enumerate(filled):
        for code, start, end in part:
            kind, layer = divmod(int(code), KIND_STEP)
            out.append(Span(core, kinds[kind], layer, float(start) - first, float(end) - first))
    return sorted(out, key=lambda s: (s.start, s.core))


def trace_events(spans: Iterable[Span]) -> dict[str, Any]:
    """The spans in the trace-event format: one track for each core, times in microseconds."""
    return {
        "displayTimeUnit": "ns",
        "traceEvents": [
            {
                "name": s.kind, "ph": "X", "pid": 0, "tid": s.core, "ts": s.start * 1e6,
                "dur": (s.end - s.start) * 1e6, "args": {"layer": s.layer},
            }
            for s in spans
        ],
    }  # fmt: skip
