"""Two kinds of plots, made of the pieces in reflex_ipc/svg.py: bars, and lines over a logarithmic axis."""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reflex_ipc.svg import COLOURS, document, line, text, tick

FLOOR = "#9a9a9a"
GLYPH = 7.5
"""Width of a letter or a figure at most, on average, whatever the font is."""
_LINE = 16  # of text


class Bar(NamedTuple):
    label: str
    value: float
    colour: str
    whisker: tuple[float, float] | None = None  # smallest and p90


class Group(NamedTuple):
    """Bars under one heading; `mark` is drawn as a line across them."""

    label: str
    bars: Sequence[Bar]
    mark: float | None = None


def beside(labels: Sequence[tuple[float, str]]) -> list[int]:
    """The line of text of each label that is centred at x, counted from the top, so that none touches another: labels
    of a line follow each other from left to right."""
    ends: list[float] = []  # of each line
    lines = {}
    for i, (x, words) in sorted(enumerate(labels), key=lambda label: label[1][0]):
        half = len(words) * GLYPH / 2
        row = next((row for row, end in enumerate(ends) if end + GLYPH <= x - half), len(ends))
        ends[row : row + 1] = [x + half]
        lines[i] = row
    return [lines[i] for i in range(len(labels))]


def bars(title: str, unit: str, groups: Sequence[Group]) -> str:
    left, width, row, gap = 300, 620, 22, 34
    top = max(max([b.value, *(b.whisker or ())]) for group in groups for b in group.bars)
    step = tick(top)
    scale = width / (math.ceil(top / step) * step)
    y, body = 60, []
    for group in groups:
        body.append(text(8, y, group.label, weight="bold"))
        y += 10
        begin = y
        for bar in group.bars:
            body.append(text(left - 8, y + 15, bar.label, anchor="end"))
            body.append(
                f'<rect x="{left}" y="{y + 3}" width="{bar.value * scale:.1f}" height="15" fill="{bar.colour}"/>'
            )
            end = bar.value
            if bar.whisker is not None:
                low, high = (left + v * scale for v in bar.whisker)
                end = max(end, bar.whisker[1])
                body.append(line(low, y + 10.5, high, y + 10.5))
                body += [line(x, y + 7, x, y + 14) for x in (low, high)]
            body.append(text(left + end * scale + 6, y + 15, f"{bar.value:.0f}" if top >= 20 else f"{bar.value:.1f}"))
            y += row
        if group.mark is not None:
            x = left + group.mark * scale
            body.append(
                f'<line x1="{x:.1f}" y1="{begin}" x2="{x:.1f}" y2="{y}" stroke="{FLOOR}" stroke-dasharray="4 3"/>'
            )
        y += gap
    bottom = y - gap + 6
    ticks = []
    for i in range(round(width / scale / step) + 1):
        x = left + i * step * scale
        ticks.append(line(x, 44, x, bottom, opacity=0.25))
        ticks.append(text(x, bottom + 18, f"{i * step:g}", anchor="middle"))
    ticks.append(text(left + width, bottom + 36, unit, anchor="end"))
    return document(title, left + width + 80, bottom + 46, [*ticks, *body])


def lines(
    title: str, x_unit: str, y_unit: str, series: Mapping[str, Sequence[tuple[float, float]]]
) -> str:  # fmt: skip
    """Points of each series joined; x logarithmic, y from zero."""
    left, width, top, height = 70, 560, 50, 300
    xs = sorted({x for points in series.values() for x, _ in points})
    highest = max(y for points in series.values() for _, y in points)
    step = tick(highest)
    rise = height / (math.ceil(highest / step) * step)
    low, high = math.log(xs[0]), math.log(xs[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        share = (math.log(x) - low) / (high - low) if high > low else 0.5
        return left + 20 + share * (width - 40), top + height - y * rise

    body = []
    for i in range(round(height / rise / step) + 1):
        y = top + height - i * step * rise
        body += [line(left, y, left + width, y, opacity=0.25), text(left - 8, y + 4, f"{i * step:g}", anchor="end")]
    labels = [(place(x, 0)[0], f"{x:.3g}" if x < 100 else f"{x:.0f}") for x in xs]
    rows = beside(labels)
    for (x, words), row in zip(labels, rows, strict=True):
        bottom = top + height + row * _LINE
        body += [line(x, top + height, x, bottom + 5, opacity=0.5), text(x, bottom + 18, words, anchor="middle")]
    bottom = top + height + 36 + max(rows) * _LINE
    body.append(text(left + width, bottom, x_unit, anchor="end"))
    body.append(text(8, top - 12, y_unit))
    coloured = [name for name in series if name != "floor"]
    for number, (name, points) in enumerate(series.items()):
        stroke = colour(name, coloured)
        places = [place(*point) for point in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        body.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="2"/>')
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{stroke}"/>' for x, y in places]
        y = top + 12 + 20 * number
        body.append(f'<rect x="{left + width + 16}" y="{y - 10}" width="12" height="12" fill="{stroke}"/>')
        body.append(text(left + width + 34, y, name))
    legend = 34 + GLYPH * max(map(len, series))
    return document(title, left + width + legend, max(bottom + 10, top + 20 * len(series)), body)


def colour(name: str, names: Sequence[str]) -> str:
    """The one of a name among those that have one; grey for others."""
    return COLOURS[names.index(name) % len(COLOURS)] if name in names else FLOOR
