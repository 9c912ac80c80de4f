"""What ran when, in the Chrome trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

    trace = Trace()
    with Engine.open("model.gguf", trace=trace) as engine:
        ...
    trace.write("trace.json")

Whoever runs something adds spans to a track; times are CLOCK_MONOTONIC nanoseconds. Without a trace nobody measures.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from reflex_ipc.errors import InputOutputError

MOST_SPANS = 200_000
"""A trace is for looking at the beginning of things: spans beyond these are counted and dropped."""

TRACKS = ("main", "early", "driver", "upload", "copy", "compute", "ops")
"""The order in which tracks are shown; those not named here come last."""


class Span(NamedTuple):
    """Something that took from `start` to `end`, nanoseconds; an instant where they are equal."""

    track: str
    name: str
    start: int
    end: int
    args: dict[str, Any]


class Trace:
    """Spans as they come. `collect` is called before they are looked at: there a device's clock is read."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.dropped = 0
        self.about: dict[str, Any] = {}
        """What else is worth knowing, by name; it lands in the file's `otherData`."""
        self._collectors: list[Callable[[], None]] = []

    def add(self, track: str, name: str, start: int, end: int, **args: Any) -> None:
        if len(self.spans) < MOST_SPANS:
            self.spans.append(Span(track, name, start, end, args))
        else:
            self.dropped += 1

    def on_collect(self, collector: Callable[[], None]) -> None:
        """Have something called, once, when all that ran is wanted; `collect` is that."""
        self._collectors.append(collector)

    def collect(self) -> None:
        """Bring in what has been measured elsewhere. Executors call it before they close."""
        while self._collectors:
            self._collectors.pop()()

    def chrome(self, zero: int | None = None) -> dict[str, Any]:
        """The file's content: an object of the Chrome trace format, its clock at 0 at `zero`, or at the first span."""
        self.collect()
        if zero is None:
            zero = min((span.start for span in self.spans), default=0)
        process = os.getpid()
        names = [t for t in TRACKS if any(s.track == t for s in self.spans)]
        names += sorted({s.track for s in self.spans} - set(names))
        thread = {name: number for number, name in enumerate(names, 1)}
        events = [_metadata("process_name", process, 0, {"name": "reflex"})]
        for name, number in thread.items():
            events.append(_metadata("thread_name", process, number, {"name": name}))
            events.append(_metadata("thread_sort_index", process, number, {"sort_index": number}))
        # Of spans that begin together, the one that holds the other comes first.
        for span in sorted(self.spans, key=lambda s: (s.start, -s.end)):
            event = {"name": span.name, "cat": span.track, "pid": process, "tid": thread[span.track]}
            event["ts"] = (span.start - zero) / 1e3
            if span.end > span.start:
                event |= {"ph": "X", "dur": (span.end - span.start) / 1e3}
            else:
                event |= {"ph": "i", "s": "p"}
            events.append(event | ({"args": span.args} if span.args else {}))
        about = {**self.about, "dropped_spans": self.dropped} if self.dropped else self.about
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}

    def write(self, path: str, zero: int | None = None) -> None:
        """Write the file. Raises InputOutputError."""
        import json

        try:
            with open(path, "w", encoding="ascii") as file:
                json.dump(self.chrome(zero), file, separators=(",", ":"))
        except OSError as error:
            raise InputOutputError(f"writing the trace to {path!r} failed: {error.strerror or error}") from error


def label(track: str, name: str) -> str:
    """What to call a phase in a table: its track too, unless that is the main one or the name begins with it."""
    return name if track == "main" or name.startswith(track) else f"{track}: {name}"


def _metadata(name: str, process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "ts": 0, "args": args}
