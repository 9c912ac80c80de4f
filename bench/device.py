"""Everything on a machine with a GPU, in one call and within a time limit: build, model files, all measurements.

    python bench/device.py OUT                                in about 8 minutes
    python bench/device.py OUT --only idle --models qwen3-8b  that state and shape alone, with all its runs
    python bench/device.py docs/benchmarks && make bench-report

Writes JSON under OUT, a file for each measurement, each as soon as it is done, and prints a short table last. Kernels
are built first; model files are made meanwhile and kept. The idle state comes last, because each of its starts waits
for 5 seconds, and 20 runs of a shape beside the floor take 4 minutes: each shape gets its share of the time that is
left, rows say how many runs that was, and what was cut is listed as not run.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import coldstart
import contenders
import energy
import measure
import models
import nvml
from coldstart import Cell
from measure import ROOT, MeasurementError

MODELS = ("qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b")
LARGE = 10e9  # bytes; larger files come last, and not cold: the disk would take all the time
PARTS = ("back-to-back", "held", "cold", "timeline", "warm", "stdio", "energy", "large", "idle")
TOOLS = {
    "timeline": ("--runs", "7"),
    "warm": ("--prefill", "512", "--depths", "128", "4096", "--score", "32", "512", "--repeat", "3"),
    "stdio": (),
}
"""Instruments that are run as they are, and their options."""
PROMPTS = (5, 512)
N, N_COLD = 20, 3
ENERGY = (20, 10.0, 4.0)  # starts and seconds of a batch, at least; seconds of idle power


class Session:
    """One call: what is measured, where it goes, how much time is left."""

    def __init__(self, out: Path, limit_s: float) -> None:
        self.out = out
        self.began = time.monotonic()
        self.until = self.began + limit_s
        self.texts: list[str] = []
        self.absent: list[dict[str, str]] = []
        self.entries: dict[str, dict[str, Any]] = {}  # by file name
        self.cells: dict[str, list[Cell]] = {}  # by model

    def left(self) -> float:
        return self.until - time.monotonic()

    def part(self, name: str, work: Callable[..., object], *arguments: Any) -> None:
        """Do a part if there is time, and go on without it where it cannot be done."""
        began = time.monotonic()
        if self.left() < 5:
            self.absent.append({"contender": name, "why": "no time was left"})
            return
        try:
            work(*arguments)
        except (MeasurementError, nvml.NVMLError, OSError, subprocess.SubprocessError) as error:
            self.absent.append({"contender": name, "why": str(error)})
            print(f"{name}: {error}", flush=True)
        print(f"{name}: {time.monotonic() - began:.0f} s, {self.left():.0f} s left", flush=True)

    def save(self, name: str, kind: str, rows: list[dict[str, Any]]) -> None:
        if rows:
            entries = [self.entries[file] for file in dict.fromkeys(row["model"] for row in rows)]
            content = {"models": entries, "rows": rows, "not_run": list(self.absent)}
            measure.save(self.out / f"{name}.json", measure.document(kind, content))

    def starts(
        self, name: str, found: Sequence[Cell], state: str, cache: str, n: int, limit_s: float = float("inf")
    ) -> None:
        """Cold starts, into one file."""
        discard = cache == "warm"  # a cold cache has nothing to get used to, and its starts are long
        until = min(self.until, time.monotonic() + limit_s)
        rows = coldstart.rounds(found, state, cache, n, self.absent, discard=discard, until=until)
        self.save(name, "coldstart", rows)
        self.texts.append(coldstart.render(rows))

    def energy(self, found: Sequence[Cell]) -> None:
        with nvml.Device() as device:
            counter = energy.Counter(device.joules)
            n, seconds, idle_s = ENERGY
            rows = energy.measure_cells(found, counter, n, seconds, idle_s, self.absent, self.until)
        self.save("energy", "energy", rows)
        self.texts.append(energy.render(rows))

    def tool(self, tool: str, name: str, model: Path, *options: str) -> None:
        """Another instrument, in a process of its own: this one must not have the driver open."""
        options = ("--out", str(self.out / f"{tool}-{name}.json"), "--backend", "cuda", *options)
        options += ("--sha256", self.entries[model.name]["sha256"])
        command = [sys.executable, str(ROOT / "bench" / f"{tool}.py"), str(model), *options]
        result = subprocess.run(command, capture_output=True, text=True, timeout=max(self.left(), 5))
        if result.returncode:
            raise MeasurementError((result.stderr.strip() or "it failed").splitlines()[-1])
        self.texts.append(result.stdout.rstrip())


def build(target: str) -> str:
    command = [sys.executable, str(ROOT / "kernels" / "build.py"), target]
    result = subprocess.run(command, capture_output=True, text=True)
    return (result.stdout + result.stderr).strip() if result.returncode == 0 else f"FAILED: {result.stderr.strip()}"


def make(session: Session, folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """The model files, made where they are not there yet."""
    found = {}
    for name in names:
        path = folder / f"{name}-Q4_K_M.gguf"
        if not path.exists():
            began = time.monotonic()
            size = models.make(path, name)
            with open(path, "rb") as file:
                os.fsync(file)  # or writing it would go on while starts are measured
            print(f"{path.name}: {size / 1e9:.2f} GB, {size / 1e9 / (time.monotonic() - began):.2f} GB/s", flush=True)
        session.entries[path.name] = measure.model_entry(path)
        found[name] = path
    return found


def first_starts(session: Session, name: str, model: Path, ready: Sequence[Any]) -> None:
    """Choose prompts that are answered with a token that has text, where there are some, by trying them."""
    for variant in range(8):
        found = session.cells[name] = coldstart.cells(ready, str(model), PROMPTS, variant)
        try:
            for cell in found:
                cell.launch()
            return
        except coldstart.Failed as failure:
            print(f"{model.name}, {cell.label}: {failure}", flush=True)
            if not isinstance(failure, coldstart.Silent):
                return


def run(
    session: Session, parts: Sequence[str], files: dict[str, Path], small: Sequence[str], ready: Sequence[Any]
) -> None:
    """The parts, what matters most first."""
    for name in small:
        session.part(f"first starts, {name}", first_starts, session, name, files[name], ready)
    every = [cell for name in small for cell in session.cells.get(name, [])]
    short = [cell for cell in every if cell.prompt_tokens in (None, min(PROMPTS))]
    for state in ("back-to-back", "held"):
        if state in parts:
            session.part(state, session.starts, f"coldstart-{state}", every, state, "warm", N)
    if "cold" in parts:
        session.part("cold", session.starts, "coldstart-cold", short, "back-to-back", "cold", N_COLD)
    for part in ("timeline", "warm", "stdio"):
        if part in parts:
            for name in small:
                session.part(f"{part}, {name}", session.tool, part, name, files[name], *TOOLS[part])
    if "energy" in parts:
        session.part("energy", session.energy, short)
    if "large" in parts:
        for name in (name for name in files if name not in small):
            large(session, name, files[name], ready)
    if "idle" in parts:
        for i, name in enumerate(small):
            found = [cell for cell in short if cell in session.cells.get(name, [])]
            share = session.left() / (len(small) - i)
            session.part(f"idle, {name}", session.starts, f"coldstart-idle-{name}", found, "idle", "warm", N, share)


def large(session: Session, name: str, model: Path, ready: Sequence[Any]) -> None:
    session.part(f"first starts, {name}", first_starts, session, name, model, ready)
    for state in ("back-to-back", "held"):
        out, found = f"coldstart-{state}-{name}", session.cells.get(name, [])
        session.part(f"{state}, {name}", session.starts, out, found, state, "warm", N)
    session.part(f"warm, {name}", session.tool, "warm", name, model, *TOOLS["warm"])


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Everything on a machine with a GPU.")
    parser.add_argument("out", type=Path, help="folder of the JSON files")
    parser.add_argument("--limit", type=float, default=460, metavar="S", help="seconds in all (460)")
    parser.add_argument("--only", action="append", choices=PARTS, help="repeatable; all by default")
    parser.add_argument("--models", nargs="+", choices=models.SHAPES, default=MODELS)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench", help="of the model files")
    parser.add_argument("--target", default="sm_90a", help="of the kernels; none builds none (sm_90a)")
    parser.add_argument("--binary", action="append", default=[], metavar="NAME=PATH", help="of other engines")
    options = parser.parse_args()
    session, parts = Session(options.out, options.limit), options.only or PARTS
    with ThreadPoolExecutor(1) as builder:
        built = builder.submit(build, options.target) if options.target != "none" else None
        files = make(session, options.folder, options.models)
        if built is not None:
            print(f"kernels: {built.result()}", flush=True)
    print(f"ready after {time.monotonic() - session.began:.0f} s", flush=True)
    try:
        binaries = dict(pair.split("=", 1) for pair in options.binary)
        ready, session.absent = contenders.locate(contenders.read(), binaries, options.folder)
    except MeasurementError as error:
        sys.stderr.write(f"device: {error}\n")
        return 1
    small = [name for name in files if session.entries[files[name].name]["bytes"] < LARGE]
    run(session, parts, files, small, ready)
    for text in filter(None, session.texts):
        print(f"\n{text}")
    for each in dict.fromkeys((e["contender"], e["why"]) for e in session.absent):
        print(f"not run: {each[0]}: {each[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
