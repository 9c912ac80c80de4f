"""What the stamps of a start say: its phases since the launch, as text, as JSON and in a trace."""

import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from reflex_ipc import stamps
from reflex_ipc.launched import Launch, launch
from reflex_ipc.stamps import MAIN
from reflex_ipc.terminal import say
from reflex_ipc.trace import Trace, label

if TYPE_CHECKING:
    from collections.abc import Mapping

OUT = "first output"
"""The instant at which the first of the answer was written."""


class Phase(NamedTuple):
    """Nanoseconds from `start` to `end` on one track; phases of a track may lie within each other."""

    track: str
    name: str
    start: int
    end: int


def phases(since: Launch) -> list[Phase]:
    """Every phase stamped after the launch, by its start. The main track's first begins with the launch; the first of
    another track is where that track begins, and no phase."""
    _stamp_early()
    found = []
    last: dict[str, int] = {MAIN: since.at}
    for name, (began, at, track) in sorted(stamps.moments.items(), key=lambda moment: moment[1][1]):
        if began is not None:
            # The launch may be known to a tick only, and then lie behind what came first.
            found.append(Phase(track, name, max(began, since.at), max(at, since.at)))
            continue
        if track in last:
            found.append(Phase(track, name, last[track], at))
        last[track] = at
    return sorted(found, key=lambda phase: (phase.start, -phase.end))


def _stamp_early() -> None:
    """What the driver's start before the interpreter took, where there was one: lib/early.so keeps it."""
    if "reflex_ipc.cuda.native" not in sys.modules:
        return
    from reflex_ipc.cuda import native

    library = native.load()
    times = {} if library is None else native.early_times(library)
    at = {step: round(seconds * 1e9) for step, seconds in times.items()}
    for step, after in (("file", "begun"), ("driver", "begun"), ("context", "driver"), ("copying", "context")):
        if step in at:
            stamps.stamp(f"early {step}", at[after], at=at[step], track="early")


def report(kind: str, totals: "Mapping[str, float]", **more: Any) -> None:
    """What `--timings text` and `--timings json` print: on stderr, which may refuse it without harm."""
    since = launch()
    if "flush" in stamps.moments:
        totals = {**totals, "launch_to_output_ms": (stamps.moments["flush"][1] - since.at) / 1e6}
    if kind == "text":
        _say(since, totals)
        return
    try:
        os.write(2, _json(since, totals, more).encode() + b"\n")
    except OSError:
        return


def _say(since: Launch, totals: "Mapping[str, float]") -> None:
    around = f", +-{since.within / 1e6:.1f} ms" if since.within else ""
    say(f"{'phase':<28}{'from':>10}{'ms':>10}   0 is the launch, by {since.source}{around}")
    for phase in phases(since):
        began, took = (phase.start - since.at) / 1e6, (phase.end - phase.start) / 1e6
        say(f"{label(phase.track, phase.name):<28}{began:10.1f}{took:10.1f}")
    for name, ms in totals.items():
        say(f"{name:<28}{'':10}{ms:10.1f}")


def _json(since: Launch, totals: "Mapping[str, float]", more: "Mapping[str, Any]") -> str:
    """One object, as docs/measuring.md describes it."""
    import json

    return json.dumps(
        {
            "launch": {"source": since.source, "within_ms": since.within / 1e6},
            "phases": [
                {
                    "track": phase.track,
                    "name": phase.name,
                    "start_ms": round((phase.start - since.at) / 1e6, 4),
                    "end_ms": round((phase.end - since.at) / 1e6, 4),
                }
                for phase in phases(since)
            ],
            "timings": {name: round(ms, 4) for name, ms in totals.items()},
            **more,
        }
    )


def write_trace(trace: Trace, path: str) -> None:
    """The trace with the phases of this process in it. Raises InputOutputError."""
    since = launch()
    for phase in phases(since):
        trace.add(phase.track, phase.name, phase.start, phase.end)
    if "flush" in stamps.moments:
        at = stamps.moments["flush"][1]
        trace.add(MAIN, OUT, at, at)
    trace.about |= {"launch": since.source, "launch_within_ms": since.within / 1e6}
    trace.write(path, since.at)
