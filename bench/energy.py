"""Joules a start, from NVML's total energy counter.

    python bench/energy.py MODEL.gguf --out results/energy.json

The counter moves in steps of some 100 ms, so a single start cannot be resolved: a batch of starts is bracketed by two
steps, the idle power measured before and after it. Gross is the batch's energy by the number of starts; net is what
remains when idle power over the same time is taken off. A figure that is uncertain by more than a tenth is refused.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import coldstart
import contenders
import ending
import measure
import nvml
from measure import NO_TIME, ROOT, Absent, MeasurementError

SHARE = 0.1  # the largest uncertainty a figure may have, of itself
SETTLE_S = 2.0  # after a batch, before idle power is taken


class Edge(NamedTuple):
    """A moment at which the counter moved. Seconds, joules."""

    at: float
    joules: float


class Counter:
    """Steps of the energy counter. Raises MeasurementError where it does not move."""

    def __init__(self, joules: Callable[[], float], poll_s: float = 0.001) -> None:
        self._joules = joules
        self._poll_s = poll_s
        edges = [self.edge() for _ in range(4)]
        self.interval_s = (edges[-1].at - edges[0].at) / 3

    def edge(self, limit_s: float = 2.0) -> Edge:
        """Wait for the next step."""
        before, began = self._joules(), time.monotonic()
        while (now := self._joules()) == before:
            if time.monotonic() - began > limit_s:
                raise MeasurementError(f"the energy counter did not move in {limit_s} s: this device has none")
            time.sleep(self._poll_s)
        return Edge(time.monotonic(), now)

    def power(self, seconds: float) -> float:
        """Mean watts over so many seconds."""
        begin = self.edge()
        time.sleep(seconds)
        end = self.edge()
        return (end.joules - begin.joules) / (end.at - begin.at)


class Batch(NamedTuple):
    n: int
    begin: Edge
    end: Edge


class Figures(NamedTuple):
    """Joules a start with their uncertainties; net is None where it is below what can be resolved."""

    gross_j: float
    gross_error_j: float
    net_j: float | None
    net_error_j: float


def starts(counter: Counter, launch: Callable[[], object], n: int, seconds: float) -> Batch:
    """At least `n` starts in at least so many seconds, between two steps of the counter."""
    begin, done = counter.edge(), 0
    while done < n or time.monotonic() - begin.at < seconds:
        launch()
        done += 1
    return Batch(done, begin, counter.edge())


def figures(batch: Batch, interval_s: float, idle_before_w: float, idle_after_w: float) -> Figures:
    """Raises MeasurementError where the counter is too coarse for the batch.

    Uncertain are the energy of one step, and for net also the idle power, by half of what it differed before and after.
    """
    seconds, joules = batch.end.at - batch.begin.at, batch.end.joules - batch.begin.joules
    error = interval_s * joules / seconds
    if error > SHARE * joules:
        raise MeasurementError(
            f"{batch.n} starts in {seconds:.2f} s are below the resolution of the energy counter, which moves every "
            f"{interval_s * 1e3:.0f} ms: measure at least {interval_s / SHARE:.1f} s"
        )
    idle = (idle_before_w + idle_after_w) / 2
    net, net_error = joules - idle * seconds, error + abs(idle_before_w - idle_after_w) / 2 * seconds
    resolved = net_error <= SHARE * abs(net)
    return Figures(joules / batch.n, error / batch.n, net / batch.n if resolved else None, net_error / batch.n)


def measure_cells(
    found: Sequence[coldstart.Cell],
    counter: Counter,
    n: int,
    seconds: float,
    idle_s: float,
    absent: list[Absent],
    until: float = float("inf"),
) -> list[dict[str, Any]]:
    """A row for each cell: a batch of starts back to back, page cache warm, idle power before and after.

    None is begun that would take until after `until` (CLOCK_MONOTONIC).
    """
    rows, longest = [], seconds + idle_s + 2 * SETTLE_S
    with coldstart.in_state("back-to-back") as gate:
        time.sleep(SETTLE_S)
        idle_before = counter.power(idle_s)
        for cell in coldstart.of_cache(found, "warm"):
            began = time.monotonic()
            if began + longest > until:
                model, name = Path(cell.fields["model"]).name, cell.contender.name
                of = {"model": model, "contender": name, "prompt_tokens": cell.prompt_tokens}
                asked = {"kind": "energy", "of": of, "asked": n, "done": 0}
                absent.append({"contender": cell.label, "why": "energy: no time was left", "reason": NO_TIME, **asked})
                continue
            measure.make_warm(cell.fields["model"])
            gate()
            try:
                cell.launch()  # not counted
                time.sleep(SETTLE_S)
                batch = starts(counter, cell.launch, n, seconds)
                time.sleep(SETTLE_S)
                idle_after = counter.power(idle_s)
                result = figures(batch, counter.interval_s, idle_before, idle_after)
            except MeasurementError as error:
                absent.append({"contender": cell.label, "why": f"energy: {error}"})
                continue
            rows.append(_row(cell, batch, counter.interval_s, idle_before, idle_after, result))
            idle_before, longest = idle_after, max(longest, time.monotonic() - began)
    return rows


def _row(
    cell: coldstart.Cell, batch: Batch, interval_s: float, idle_before_w: float, idle_after_w: float, result: Figures
) -> dict[str, Any]:
    return {
        "state": "back-to-back",
        "cache": "warm",
        "model": Path(cell.fields["model"]).name,
        "contender": cell.contender.name,
        "prompt_tokens": cell.prompt_tokens,
        "n": batch.n,
        "batch_s": batch.end.at - batch.begin.at,
        "joules": batch.end.joules - batch.begin.joules,
        "counter_interval_s": interval_s,
        "idle_before_w": idle_before_w,
        "idle_after_w": idle_after_w,
        **result._asdict(),
    }


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["joules a start, back to back", "n", "idle W", "gross", "+-", "net", "+-", "wall ms"]
    body = []
    for row in rows:
        name = f"{row['model']}, {row['contender']}" + (f", {row['prompt_tokens']}" if row["prompt_tokens"] else "")
        net = "below resolution" if row["net_j"] is None else f"{row['net_j']:.1f}"
        idle = (row["idle_before_w"] + row["idle_after_w"]) / 2
        gross = [f"{row['gross_j']:.1f}", f"{row['gross_error_j']:.1f}"]
        wall = row["batch_s"] / row["n"] * 1e3
        body.append([name, str(row["n"]), f"{idle:.1f}", *gross, net, f"{row['net_error_j']:.1f}", f"{wall:.0f}"])
    return measure.table(head, body)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Joules a start.")
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--out", type=Path, required=True, help="the JSON")
    parser.add_argument("--prompt-tokens", type=measure.count, nargs="+", default=[5], metavar="N")
    parser.add_argument("-n", type=measure.count, default=30, help="starts at least (30)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of starts at least (20)")
    parser.add_argument("--idle", type=float, default=6.0, help="seconds of idle power before and after (6)")
    parser.add_argument("--contenders", type=Path, default=contenders.FILE, metavar="TOML")
    parser.add_argument("--only", action="append", metavar="NAME", help="contenders, repeatable; all by default")
    parser.add_argument("--binary", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--nvml", default=nvml.LIBRARY, metavar="LIBRARY")
    options = parser.parse_args()
    ready, absent = contenders.choose(options.only or [], options.binary, ROOT / "build" / "bench", options.contenders)
    models = [measure.model_entry(model) for model in dict.fromkeys(options.models)]
    rows: list[dict[str, Any]] = []
    with nvml.Device(library=options.nvml) as device:
        counter = Counter(device.joules)
        for model in dict.fromkeys(options.models):
            found = coldstart.prepare(coldstart.cells(ready, model, options.prompt_tokens), absent)
            rows += measure_cells(found, counter, options.n, options.seconds, options.idle, absent)
            content = {"models": models, "rows": rows, "not_run": absent}
            measure.save(options.out, measure.document("energy", content, options.nvml))
    print(render(rows))
    for each in absent:
        print(f"not run: {each['contender']}: {each['why']}")
    return 0 if rows else 1


if __name__ == "__main__":
    ending.run(main)
