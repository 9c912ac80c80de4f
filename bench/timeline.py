"""Traces of starts on this machine: where the time goes, whether the tracks agree, and what tracing itself costs.

    python bench/timeline.py MODEL --out results/timeline.json [--backend cuda] [--runs N]

Starts with and without --trace take turns; the phases are the median over the traced ones, the trace that is kept, and
that the report draws, is of the start whose first output came at the median.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import ending
import measure
from measure import ROOT, MeasurementError

sys.path.insert(0, str(ROOT))
from reflex_ipc import waterfall
from reflex_ipc.launched import LAUNCHED
from reflex_ipc.trace import label

LATE = 1.0
"""Milliseconds by which the mark of an arrival may come after what waited for it: a thread of Python sets it."""


def start(arguments: argparse.Namespace, *more: str) -> float:
    """Milliseconds of a whole process."""
    command = [str(ROOT / "bin" / "reflex"), "run", arguments.model, arguments.prompt, "-n", "1", *more]
    began = time.monotonic_ns()
    done = subprocess.run(
        [*command, "--backend", arguments.backend],
        env={**os.environ, LAUNCHED: str(began)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    ended = time.monotonic_ns()
    if done.returncode:
        raise MeasurementError(f"reflex ended with {done.returncode}: {done.stderr.strip()}")
    return (ended - began) / 1e6


def arrivals(bars: list[waterfall.Bar]) -> dict[str, float]:
    """When each layer was there, as far as the first token waits for it: of one in two parts, where experts come first,
    the part that all tokens need."""
    parts = [bar for bar in bars if bar.track == "copy"]
    is_partial = any((bar.track, bar.name) == ("upload", "experts first") for bar in bars)
    return {bar.name: bar.end for bar in (reversed(parts) if is_partial else parts)}


def disagreements(bars: list[waterfall.Bar], slack: float) -> list[str]:
    """What cannot have happened as a trace says: overlapping spans of a stream, layers computed before they came."""
    found = []
    arrived = arrivals(bars)
    for track in ("copy", "compute"):
        spans = [bar for bar in bars if bar.track == track]
        for one, two in pairwise(spans):
            if two.start < one.end - slack:
                found.append(f"{track}: {two.name} begins {one.end - two.start:.3f} ms before {one.name} ends")
    for bar in bars:
        if bar.track == "compute" and bar.start < arrived.get(bar.name, 0.0) - slack - LATE:
            found.append(f"{bar.name} is computed {arrived[bar.name] - bar.start:.3f} ms before it has arrived")
    return found


def lateness(bars: list[waterfall.Bar]) -> float:
    """Milliseconds by which the latest mark of an arrival came after its layer's work had begun; 0 if none did."""
    arrived = arrivals(bars)
    begun = {bar.name: bar.start for bar in reversed(bars) if bar.track == "compute"}
    return max((at - begun[name] for name, at in arrived.items() if name in begun), default=0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True, help="the JSON")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--runs", type=measure.count, default=20)
    parser.add_argument("--sha256", metavar="DIGEST", help="of the model file, where it is known already")
    arguments = parser.parse_args()
    traces: list[dict[str, Any]] = []
    plain, traced = [], []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        for _ in range(arguments.runs + 1):
            plain.append(start(arguments))
            traced.append(start(arguments, "--trace", str(file)))
            traces.append(json.loads(file.read_text()))
    del plain[0], traced[0], traces[0]  # the first finds cold caches

    phases: dict[str, list[float]] = {}
    problems: list[str] = []
    outs = []
    for trace in traces:
        bars, out = waterfall.bars(trace)
        outs.append(out or 0.0)
        for bar in bars:
            if bar.track in waterfall.PHASES:
                phases.setdefault(label(bar.track, bar.name), []).append(bar.end - bar.start)
        problems += disagreements(bars, trace["otherData"].get("device_clock_within_ms", 0.0) + 0.002)
    middle = traces[outs.index(statistics.median_low(outs))]
    result = {
        "models": [measure.model_entry(arguments.model, arguments.sha256)],
        "backend": arguments.backend, "runs": arguments.runs,
        "plain_ms": plain, "traced_ms": traced, "first_output_ms": outs,
        "phases_ms": {name: statistics.median(values) for name, values in phases.items()},
        "device_clock_within_ms": [trace["otherData"].get("device_clock_within_ms") for trace in traces],
        "arrivals_late_ms": max(0.0, *(lateness(waterfall.bars(trace)[0]) for trace in traces)),
        "disagreements": problems, "rows": [], "not_run": [], "trace": middle,
    }  # fmt: skip
    measure.save(arguments.out, measure.document("timeline", result))
    for name, ms in result["phases_ms"].items():
        print(f"{name:<28}{ms:10.2f}")
    print(f"{waterfall.OUT:<28}{statistics.median(outs):10.2f}")
    print(f"{'whole process':<28}{statistics.median(plain):10.2f}   with --trace {statistics.median(traced):.2f}")
    print(f"{'latest mark of an arrival':<28}{result['arrivals_late_ms']:10.2f}")
    print(*problems, f"{len(problems)} disagreements in {len(traces)} traces", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    ending.run(main)
