"""Everything on a machine with a GPU, in one call and within a time limit: build, model files, all measurements.

    python bench/device.py OUT                                in about 20 minutes
    python bench/device.py OUT --only cold --models qwen3-8b  in about 5: page cache cold, beside the disk alone
    python bench/device.py OUT --only idle --models qwen3-8b --n 20 --limit 500

Writes JSON under OUT, a file for each measurement, each as soon as it is done, and prints a short table last. Kernels
are built first; model files are made meanwhile and kept. `--plan` prints what each part will take and does nothing.

Where one call is too short for everything, `--only`, `--models` and `--contenders` share it out among several, on
machines that may be gone between them; bench/collect.py puts the results of all into one folder. A cold page cache is a
call of its own: each of its starts takes seconds, as long as the disk does. The idle state comes last, because each of
its starts waits for 4 seconds, and 20 runs of a shape beside the floor take 3 minutes. Of both each shape gets its part
of the time that is left, rows say how many runs that was, and what was cut is listed as not run.
"""

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import coldstart
import contenders
import ending
import energy
import measure
import models
import nvml
import times
from coldstart import Cell
from contenders import DECISION, Contender
from measure import NO_TIME, ROOT, Absent, MeasurementError

MODELS = ("qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b")
LARGE = 10e9  # bytes; larger files come behind the others, one by one
PARTS = ("back-to-back", "held", "timeline", "warm", "stdio", "energy", "idle")
COLD = "cold"
TOOLS = {
    "timeline": ("--runs", "7"),
    "warm": ("--score", "32", "512", "--repeat", "3"),
    "stdio": (),
}
"""Instruments that are run as they are, and their options."""
MARGIN = 100 << 20  # of the disk, besides a file's weights
PROMPTS = {"back-to-back": (5, 128, 512, 2048), "held": (5, 512)}
"""Tokens, by state; in others the shortest."""
N = 20
_SHORTEST = min(min(lengths) for lengths in PROMPTS.values())
ENERGY = (20, 10.0, 4.0)  # starts and seconds of a batch, at least; seconds of idle power


class Session:
    """One call: what is measured, where it goes, how much time is left, how many starts of each are wanted."""

    def __init__(self, out: Path, limit_s: float, n: int = N) -> None:
        self.out = out
        self.n = n
        self.began = time.monotonic()
        self.until = self.began + limit_s
        self.texts: list[str] = []
        self.absent: list[Absent] = []
        self.entries: dict[str, dict[str, Any]] = {}  # by file name
        self.cells: dict[str, list[Cell]] = {}  # by model

    def left(self) -> float:
        return self.until - time.monotonic()

    def part(self, part: str, names: Sequence[str], work: Callable[..., object], *arguments: Any) -> None:
        """Do a part, of these models, if there is time, and go on without it where it cannot be done."""
        began = time.monotonic()
        name = ", ".join([part, *names])
        if self.left() < 5:
            asked = {"reason": NO_TIME, "part": part, "models": [*names]}
            self.absent.append({"contender": name, "why": "no time was left", **asked})
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

    def energy(self, name: str, found: Sequence[Cell]) -> None:
        with nvml.Device() as device:
            counter = energy.Counter(device.joules)
            n, seconds, idle_s = ENERGY
            rows = energy.measure_cells(found, counter, n, seconds, idle_s, self.absent, self.until)
        self.save(name, "energy", rows)
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


def needs_driver() -> None:
    """MeasurementError where there is none: nothing could be measured of what is about to be built."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MeasurementError(
            f"no NVIDIA driver on this machine, and nothing to measure without one: {error}"
        ) from None


def build(target: str) -> str:
    command = [sys.executable, str(ROOT / "kernels" / "build.py"), target]
    result = subprocess.run(command, capture_output=True, text=True)
    return (result.stdout + result.stderr).strip() if result.returncode == 0 else f"FAILED: {result.stderr.strip()}"


def make(session: Session, folder: Path, name: str) -> Path:
    """A model file, made where it is not there yet. MeasurementError where the disk is too small for it."""
    path = folder / f"{name}-Q4_K_M.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        needed, free = models.size(name) + MARGIN, shutil.disk_usage(folder).free
        if needed > free:
            raise MeasurementError(f"{path.name} takes {needed / 1e9:.1f} GB; {folder} has {free / 1e9:.1f}")
        began = time.monotonic()
        size = models.make(path, name)
        with open(path, "rb") as file:
            os.fsync(file)  # or writing it would go on while starts are measured
        print(f"{path.name}: {size / 1e9:.2f} GB, {size / 1e9 / (time.monotonic() - began):.2f} GB/s", flush=True)
    session.entries[path.name] = measure.model_entry(path)
    return path


def first_starts(session: Session, name: str, model: Path, ready: Sequence[Any], prompts: Sequence[int]) -> None:
    """Choose prompts that are answered with a token that has text, where there are some, by trying them."""
    for variant in range(8):
        found = session.cells[name] = coldstart.cells(ready, str(model), prompts, variant)
        try:
            for cell in coldstart.of_cache(found, "warm"):
                cell.launch()
            return
        except coldstart.Failed as failure:
            print(f"{model.name}, {cell.label}: {failure}", flush=True)
            if not isinstance(failure, coldstart.Silent):
                return


def prompts(parts: Sequence[str]) -> list[int]:
    """The lengths that these parts ask for."""
    return sorted({n for part in parts for n in PROMPTS.get(part, (_SHORTEST,))})


def _in_state(found: Sequence[Cell], state: str) -> list[Cell]:
    return [cell for cell in found if cell.prompt_tokens in (None, *PROMPTS[state])]


def _short(found: Sequence[Cell]) -> list[Cell]:
    """What the parts are made of that have one prompt: a token of each contender, no decision."""
    return [c for c in found if c.prompt_tokens in (None, _SHORTEST) and c.contender.name != DECISION]


def run(session: Session, parts: Sequence[str], names: Sequence[str], files: dict[str, Path], more: str = "") -> None:
    """The parts, of these models together. `more` distinguishes the names of the files they go to."""
    every = [cell for name in names for cell in session.cells.get(name, [])]
    for state in PROMPTS:
        if state in parts:
            out = f"coldstart-{state}{more}"
            session.part(state, names, session.starts, out, _in_state(every, state), state, "warm", session.n)
    for part in TOOLS:
        if part in parts:
            for name in names:
                session.part(part, [name], session.tool, part, name, files[name], *TOOLS[part])
    if "energy" in parts:
        session.part("energy", names, session.energy, f"energy{more}", _short(every))


def one_by_one(session: Session, part: str, names: Sequence[str]) -> None:
    """`cold` or `idle`, whose starts are long: each model gets its share of the time that is left."""
    state, cache = ("back-to-back", "cold") if part == COLD else (part, "warm")
    for i, name in enumerate(names):
        share = session.left() / (len(names) - i)
        found = _short(session.cells.get(name, []))
        session.part(part, [name], session.starts, f"coldstart-{part}-{name}", found, state, cache, session.n, share)


def plan(parts: Sequence[str], names: Sequence[str], n: int, ready: Sequence[Contender]) -> str:
    """What each part of each model will take, in seconds."""
    body, total = [], 0.0

    def rows(part: str, cache: str = "warm") -> int:
        """Rows of a part in a table of a model."""
        cells = [
            Cell(contender, {}, tokens)
            for contender in ready
            for tokens in (PROMPTS.get(part, (_SHORTEST,)) if contender.prompt else (None,))
            if tokens in (None, *(contender.prompt_tokens or (tokens,)))
        ]
        return len(coldstart.of_cache(cells if part in PROMPTS else _short(cells), cache))

    for name in names:
        size = models.size(name)
        takes = {"file": times.making(size), "first starts": times.starts(size, 0, len(ready) + 3)}
        for part in parts:
            if part in PROMPTS:
                takes[part] = times.starts(size, n, rows(part))
            elif part == "idle":
                takes[part] = times.starts(size, n, rows(part), coldstart.STATES["idle"].gap_s)
            elif part == "energy":
                takes[part] = rows(part) * (ENERGY[1] + ENERGY[2] + 2 * energy.SETTLE_S + 2)
            elif part == COLD:
                takes[part] = times.cold(size, n, rows(part, "cold"))
            else:
                takes[part] = times.warm(size) if part == "warm" else times.TOOL_S
        total += sum(takes.values())
        body += [[f"{name}: {part}", f"{seconds:.0f}"] for part, seconds in takes.items()]
    return measure.table(["", "seconds"], [*body, ["all of it, kernels built", f"{total:.0f}"]])


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Everything on a machine with a GPU.")
    parser.add_argument("out", type=Path, help="folder of the JSON files")
    parser.add_argument("--limit", type=float, default=1500, metavar="S", help="seconds in all (1500)")
    parser.add_argument("--only", action="append", choices=(*PARTS, COLD), help="repeatable; all but cold by default")
    parser.add_argument("--models", nargs="+", choices=models.SHAPES, default=MODELS)
    parser.add_argument("--n", type=measure.count, default=N, help=f"starts that count, of each ({N})")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="of bench/contenders.toml; all by default")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench", help="of the model files")
    parser.add_argument("--target", default="sm_90a", help="of the kernels; none builds none (sm_90a)")
    parser.add_argument("--binary", action="append", default=[], metavar="NAME=PATH", help="of other engines")
    parser.add_argument("--plan", action="store_true", help="print what each part will take, and end")
    options = parser.parse_args()
    parts = options.only or PARTS
    ready, absent = contenders.choose(options.contenders or [], options.binary, options.folder)
    if options.plan:
        print(plan(parts, options.models, options.n, [contender for contender, _ in ready]))
        return 0
    needs_driver()
    session = Session(options.out, options.limit, options.n)
    session.absent = absent
    files: dict[str, Path] = {}
    with ThreadPoolExecutor(1) as builder:
        built = builder.submit(build, options.target) if options.target != "none" else None
        for name in options.models:
            files[name] = make(session, options.folder, name)
        if built is not None:
            print(f"kernels: {built.result()}", flush=True)
    print(f"ready after {time.monotonic() - session.began:.0f} s", flush=True)
    lengths = prompts(parts)
    small = [name for name in files if session.entries[files[name].name]["bytes"] < LARGE]
    for i, names in enumerate([small, *([name] for name in files if name not in small)]):
        for name in names:
            session.part("first starts", [name], first_starts, session, name, files[name], ready, lengths)
        run(session, parts, names, files, f"-{names[0]}" if i else "")
    for part in (COLD, "idle"):
        if part in parts:
            one_by_one(session, part, list(files))
    for text in filter(None, session.texts):
        print(f"\n{text}")
    for each in dict.fromkeys((e["contender"], e["why"]) for e in session.absent):
        print(f"not run: {each[0]}: {each[1]}")
    return 0


if __name__ == "__main__":
    ending.run(main)
