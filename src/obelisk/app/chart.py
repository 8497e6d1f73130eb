"""Times of a bench as one SVG: a group of bars per program, ours first, relative to the best rival.

Takes the rows of `bench`; gives text. It promises the same picture for the same rows, and figures
that are those of the rows: a bar's length is its time over the best rival's, its label the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from obelisk.app.bench import BenchRow
from obelisk.app.report import show_us

_BAR, _GAP, _LABEL, _WIDTH, _ROOM = 13, 16, 210, 420, 130  # pixels
_LONGEST = 2.5  # times the best rival: longer bars are cut, and their label says the time
_OURS, _BEST, _OTHER, _FLOOR = "#1b7f4b", "#3b6ea5", "#a9b8c8", "#c0392b"
_SHOWN = 5  # rivals of a program, the fastest


def chart(rows: Sequence[BenchRow]) -> str:
    """The picture; programs without a time or a rival are left out and named below."""
    parts: list[str] = []
    y, left_out = 30, []
    for row in rows:
        best, ratio = row.best_other, row.ratio
        if row.time_us is None or best is None or ratio is None:
            left_out.append(row.name)
            continue
        lines = sorted(row.others.items(), key=lambda x: (x[1], x[0]))[:_SHOWN]
        parts.append(
            f'<text x="8" y="{y + 10}" font-weight="bold">{escape(row.name)}  {ratio:.2f}x</text>'
        )
        y += _BAR + 4
        bars = [("obelisk", row.time_us, _OURS)]
        bars += [(n, t, _BEST if n == best[0] else _OTHER) for n, t in lines]
        top = y
        for name, time_us, colour in bars:
            share = min(time_us / best[1], _LONGEST)
            width = _WIDTH * share / _LONGEST
            parts.append(
                f'<text x="{_LABEL - 6}" y="{y + 10}" text-anchor="end">{escape(name)}</text>'
            )
            parts.append(
                f'<rect x="{_LABEL}" y="{y}" width="{width:.1f}" height="{_BAR - 2}" '
                f'fill="{colour}"/>'
            )
            parts.append(
                f'<text x="{_LABEL + width + 5:.1f}" y="{y + 10}">{show_us(time_us)}</text>'
            )
            y += _BAR
        floor = row.report.floor_us if row.report else None
        if floor is not None:
            x = _LABEL + _WIDTH * min(floor / best[1], _LONGEST) / _LONGEST
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{y}" stroke="{_FLOOR}" '
                'stroke-dasharray="3 2"/>'
            )
        y += _GAP
    note = "Microseconds a call; red: bytes over measured bandwidth."
    if left_out:
        note += f" Without a comparison: {', '.join(left_out)}."
    parts.append(f'<text x="8" y="{y + 8}">{escape(note)}</text>')
    width, height = _LABEL + _WIDTH + _ROOM, y + 24
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="11">'
    )
    return "\n".join(
        [head, f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *parts, "</svg>", ""]
    )
