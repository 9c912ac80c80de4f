"""A trace as a picture: phases from the launch to the first token, then when each layer arrived and was computed."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from reflex_ipc import svg
from reflex_ipc.errors import InvalidRequestError
from reflex_ipc.terminal import visible
from reflex_ipc.timings import OUT
from reflex_ipc.trace import MOST_SPANS, label

LEFT, WIDTH, ROW = 190, 700, 20
SHORTEST = 0.05
"""Milliseconds: phases shorter than that have no row."""
PHASES = {"main": svg.COLOURS[2], "early": svg.COLOURS[6], "driver": svg.COLOURS[3], "upload": svg.COLOURS[4]}
LAYERS = {"copy": (svg.COLOURS[0], "arrives"), "compute": (svg.COLOURS[1], "is computed")}
OTHER = svg.COLOURS[7]


MOST_EVENTS = MOST_SPANS + 1000  # besides spans, those that name tracks
LARGEST = 10**15  # microseconds, and of a track's number


class Bar(NamedTuple):
    track: str
    name: str
    start: float  # milliseconds
    end: float


def bars(trace: Mapping[str, Any]) -> tuple[list[Bar], float | None]:
    """What a Chrome trace says took how long, and when the first of the answer was out, if it was. Events of kinds that
    --trace does not write are passed over.

    Raises InvalidRequestError, which names the event and its field, for what is no such trace.
    """
    events = trace.get("traceEvents")
    if not isinstance(events, list):
        raise InvalidRequestError("this is no trace as --trace writes it: it has no list traceEvents")
    if len(events) > MOST_EVENTS:
        raise InvalidRequestError(f"the trace has {len(events)} events; --trace writes at most {MOST_EVENTS}")
    tracks: dict[int, str] = {}
    found: list[Bar] = []
    out: float | None = None
    threads = [(i, e) for i, e in enumerate(events) if isinstance(e, dict) and e.get("name") == "thread_name"]
    for i, event in threads:
        if event.get("ph") == "M":
            args = event.get("args")
            tracks[_number(i, event, "tid", int)] = _name(i, args if isinstance(args, dict) else {}, "args.name")
    for i, event in enumerate(events):
        if not isinstance(event, dict):
            raise _refusal(i, event, "it", "no object")
        kind = event.get("ph")
        if kind == "X":
            track = _number(i, event, "tid", int)
            if track not in tracks:
                raise _refusal(i, event, "tid", f"{track}, of which no thread_name event says what it is")
            start, took = _number(i, event, "ts"), _number(i, event, "dur")
            if took < 0:
                raise _refusal(i, event, "dur", f"{took:g}: it ends before it begins")
            found.append(Bar(tracks[track], _name(i, event, "name"), start / 1e3, (start + took) / 1e3))
        elif kind == "i" and out is None and event.get("name") == OUT:
            out = _number(i, event, "ts") / 1e3
    if not found:
        raise InvalidRequestError("the trace has no spans")
    return found, out


def _number(i: int, event: Mapping[str, Any], field: str, kind: Any = (int, float)) -> Any:
    value = event.get(field)
    if isinstance(value, bool) or not isinstance(value, kind) or not abs(value) <= LARGEST:
        what = "a whole number" if kind is int else "a number of microseconds"
        raise _refusal(i, event, field, "missing" if field not in event else f"not {what}: {_short(value)}")
    return value


def _name(i: int, holder: Mapping[str, Any], field: str) -> str:
    value = holder.get("name")
    if not isinstance(value, str):
        raise _refusal(i, holder, field, "missing" if value is None else f"no text: {_short(value)}")
    return visible(value)  # neither a terminal nor a picture takes every character


def _refusal(i: int, event: Any, field: str, what: str) -> InvalidRequestError:
    name = event.get("name") if isinstance(event, dict) else None
    called = f" ({_short(name)})" if isinstance(name, str) else ""
    return InvalidRequestError(f"event {i}{called} of the trace: {field} is {what}")


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:60] + "…"


def draw(trace: Mapping[str, Any], title: str) -> str:
    """The picture as SVG text, from the launch to the first output. Raises InvalidRequestError as `bars` does, and
    where that is no stretch of time."""
    found, out = bars(trace)
    end = max(bar.end for bar in found) if out is None else out
    if end < SHORTEST:
        raise InvalidRequestError(f"the trace ends {end:g} ms after the launch: there is nothing to draw")
    shown = [bar for bar in found if bar.start < end]
    unit = svg.tick(end)
    scale = WIDTH / (end * 1.02)
    y, body = 44.0, []

    def bar_at(bar: Bar, y: float, height: float, colour: str) -> str:
        begin, stop = max(bar.start, 0.0), min(bar.end, end)
        about = f"{bar.name}: {bar.start:.2f} to {bar.end:.2f} ms, {bar.end - bar.start:.3f} ms"
        return svg.box(LEFT + begin * scale, y, max((stop - begin) * scale, 0.6), height, colour, about)

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
            if y - labelled >= 12 and (height > 8 or not number.isdecimal() or number[-1] in "05"):
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
