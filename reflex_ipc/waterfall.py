"""A trace as a picture: phases from the launch to the first token, then when each layer arrived and was computed."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from reflex_ipc import svg
from reflex_ipc.errors import InvalidRequestError
from reflex_ipc.timings import OUT
from reflex_ipc.trace import label

LEFT, WIDTH, ROW = 190, 700, 20
SHORTEST = 0.05
"""Milliseconds: phases shorter than that have no row."""
PHASES = {"main": svg.COLOURS[2], "early": svg.COLOURS[6], "driver": svg.COLOURS[3], "upload": svg.COLOURS[4]}
LAYERS = {"copy": (svg.COLOURS[0], "arrives"), "compute": (svg.COLOURS[1], "is computed")}
OTHER = svg.COLOURS[7]


class Bar(NamedTuple):
    track: str
    name: str
    start: float  # milliseconds
    end: float


def bars(trace: Mapping[str, Any]) -> tuple[list[Bar], float | None]:
    """What a Chrome trace says took how long, and when the first of the answer was out, if it was.

    Raises InvalidRequestError for what is no such trace.
    """
    try:
        events: Sequence[dict[str, Any]] = trace["traceEvents"]
        names = {e["tid"]: str(e["args"]["name"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
        found = [
            Bar(names[e["tid"]], str(e["name"]), e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3)
            for e in events
            if e["ph"] == "X"
        ]
        out = next((float(e["ts"]) / 1e3 for e in events if e["ph"] == "i" and e["name"] == OUT), None)
    except (KeyError, TypeError) as error:
        raise InvalidRequestError(f"this is no trace as --trace writes it: {error!r}") from None
    if not found:
        raise InvalidRequestError("the trace has no spans")
    return found, out


def draw(trace: Mapping[str, Any], title: str) -> str:
    """The picture as SVG text, from the launch to the first output."""
    found, out = bars(trace)
    end = max(bar.end for bar in found) if out is None else out
    shown = [bar for bar in found if bar.start < end]
    unit = svg.tick(end)
    scale = WIDTH / (end * 1.02)
    y, body = 44.0, []

    def bar_at(bar: Bar, y: float, height: float, colour: str) -> str:
        stop = min(bar.end, end)
        about = f"{bar.name}: {bar.start:.2f} to {bar.end:.2f} ms, {bar.end - bar.start:.3f} ms"
        return svg.box(LEFT + bar.start * scale, y, max((stop - bar.start) * scale, 0.6), height, colour, about)

    rows = _rows(shown)
    top = y
    track = ""
    for (owner, name), parts in rows:
        if owner != track:
            y += 6 if track else 0
            track = owner
        body.append(svg.text(LEFT - 8, y + 14, label(owner, name), anchor="end"))
        body += [bar_at(bar, y + 3, ROW - 6, PHASES.get(owner, OTHER)) for bar in parts]
        took = sum(bar.end - bar.start for bar in parts)
        # Beside the bar, or before it where it ends at the right edge.
        x, anchor = LEFT + min(parts[-1].end, end) * scale + 5, "start"
        if x > LEFT + WIDTH - 40:
            x, anchor = LEFT + parts[0].start * scale - 5, "end"
        body.append(svg.text(x, y + 14, _ms(took), anchor=anchor, size=11))
        y += ROW
    layers = [bar for bar in shown if bar.track in LAYERS]
    if layers:
        y += 14
        y = _legend(body, layers, y)
        scopes = list(dict.fromkeys(bar.name for bar in layers))
        height = 12 if len(scopes) <= 24 else 8 if len(scopes) <= 64 else 5
        labelled = 0.0
        for scope in scopes:
            number = scope.removeprefix("blk.")
            if y - labelled >= 12 and (height > 8 or not number.isdecimal() or int(number) % 5 == 0):
                body.append(svg.text(LEFT - 8, y + height / 2 + 4, scope, anchor="end", size=10))
                labelled = y
            body += [bar_at(b, y + 1, height - 2, LAYERS[b.track][0]) for b in layers if b.name == scope]
            y += height
    grid = []
    for i in range(int(end * 1.02 / unit) + 1):
        x = LEFT + i * unit * scale
        grid += [svg.line(x, top, x, y + 4, opacity=0.25), svg.text(x, y + 20, f"{i * unit:g}", anchor="middle")]
    grid.append(svg.text(LEFT + WIDTH, y + 38, "ms since the launch", anchor="end"))
    if out is not None:
        x = LEFT + out * scale
        grid += [
            svg.line(x, top - 4, x, y + 4, dashes="4 3"),
            svg.text(x, top - 8, f"{OUT}: {_ms(out)} ms", anchor="end"),
        ]
    return svg.document(title, LEFT + WIDTH + 20, y + 48, [*grid, *body])


def _rows(shown: Sequence[Bar]) -> list[tuple[tuple[str, str], list[Bar]]]:
    """The phases worth a row, by track and then by time; the loads of kernel modules share one."""
    rows: dict[tuple[str, str], list[Bar]] = {}
    for track in PHASES:
        for bar in shown:
            if bar.track == track:
                rows.setdefault((track, "modules" if bar.name.startswith("module ") else bar.name), []).append(bar)
    return [(key, parts) for key, parts in rows.items() if sum(b.end - b.start for b in parts) >= SHORTEST]


def _legend(body: list[str], layers: Sequence[Bar], y: float) -> float:
    body.append(svg.text(LEFT - 8, y + 10, "layer", anchor="end", weight="bold"))
    x = float(LEFT)
    for track, (colour, words) in LAYERS.items():
        if any(bar.track == track for bar in layers):
            body += [svg.box(x, y, 12, 12, colour), svg.text(x + 18, y + 11, words)]
            x += 110
    return y + 20


def _ms(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 1 else f"{ms:.2f}"
