"""Launch to first token of whole processes, timed from outside.

    python bench/coldstart.py MODEL.gguf --out results/coldstart.json
    python bench/coldstart.py MODEL.gguf --state idle --prompt-tokens 5 512 --binary llama-completion=/path/to/it

Three states of the driver, never mixed (what it costs to bring it up depends on them):
    idle          nothing has used the GPU for a while (STATES): a cron job, the first request of the day
    back-to-back  another start has just ended
    held          a process keeps the driver initialised (bench/hold.py)
and two of the page cache: warm (all of the model file is in memory) and cold (none of it is; interpreter and libraries
stay). Before every start it is seen to that both are so. Contenders are interleaved, each round in another order, and
the first round is not counted (nor waited for, where the state has a gap). The clock starts before the process is made
and stops at the first byte of the first token, and again when the process is gone.
"""

import argparse
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import contenders
import ending
import measure
from contenders import DISKS, FLOOR, Contender
from measure import NO_TIME, ROOT, Absent, MeasurementError, summary


class State(NamedTuple):
    gap_s: float  # between the end of a start and the next one
    held: bool


STATES = {"idle": State(4.0, False), "back-to-back": State(0.0, False), "held": State(0.0, True)}
CACHES = ("warm", "cold")
DRIVER = "/dev/nvidia-uvm"  # open in every process that has initialised the driver
LIMIT_S = 600.0  # for one start
KEPT = 4096  # bytes of what it says


class Run(NamedTuple):
    first_ms: float
    exit_ms: float
    output: bytes  # what came after the echo, as far as it is kept


class Failed(MeasurementError):
    """A start that gave no token."""


class Silent(Failed):
    """It ended well, but without a byte of output: the token has no text."""


def start(argv: Sequence[str], env: Mapping[str, str], echo: int = 0, limit_s: float = LIMIT_S) -> Run:
    """One process, from launch to its end. `echo`: bytes of output that are not yet the answer. Failed says why a start
    does not count."""
    with tempfile.TemporaryFile() as errors:
        began = time.clock_gettime(time.CLOCK_MONOTONIC)
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=env,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise Failed(f"{argv[0]} does not start: {error.strerror}") from None
        exits = os.pidfd_open(process.pid)  # Popen.wait with a limit looks every 50 ms only
        try:
            assert process.stdout is not None
            output, n_bytes, first = b"", 0, 0.0
            # Within the limit, whatever happens: what a process has left behind may hold the pipe for ever.
            pipe = process.stdout.fileno()
            while piece := _ready(pipe, began + limit_s) and os.read(pipe, 1 << 16):
                n_bytes += len(piece)
                if not first and n_bytes > echo:
                    first = time.clock_gettime(time.CLOCK_MONOTONIC)
                output += piece[: max(0, echo + KEPT - len(output))]
            is_over = _ready(exits, began + limit_s)
            ended = time.clock_gettime(time.CLOCK_MONOTONIC)
        finally:
            _kill(process)
            process.wait()
            os.close(exits)
            if process.stdout is not None:
                process.stdout.close()
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - KEPT))
        said = errors.read().decode(errors="replace").strip().splitlines()[-1:]
    if not is_over:
        after = f"{limit_s:g} s, with {n_bytes} bytes of output"
        raise Failed(f"it was not over after {after}: {' '.join(said) or 'nothing on stderr'}")
    if process.returncode:
        raise Failed(f"exit code {process.returncode}: {' '.join(said) or 'nothing on stderr'}")
    if not first:
        raise Silent("it ended without a byte of output" + (f": {said[0]}" if said else ""))
    return Run((first - began) * 1e3, (ended - began) * 1e3, output[echo:])


def _ready(fd: int, until: float) -> bool:
    """Whether there is something to read, or an end, before `until`."""
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    left = until - time.monotonic()
    return left > 0 and bool(waiting.poll(left * 1e3))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With what it started: a child that lives on would keep the pipe open, and the device."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def users(device: str = DRIVER, proc: str = "/proc") -> dict[int, str]:
    """Process -> name, of those that have a device open."""
    found = {}
    for entry in os.listdir(proc):
        if not entry.isdigit():
            continue
        try:
            links = [os.readlink(f"{proc}/{entry}/fd/{fd}") for fd in os.listdir(f"{proc}/{entry}/fd")]
            if device in links:
                found[int(entry)] = Path(f"{proc}/{entry}/comm").read_text().strip()
        except OSError:
            pass  # it ended, or belongs to somebody else
    return found


class Gate:
    """Called before each start: it sees to it that the state is what it is called, which MeasurementError denies, and
    waits until the last start has been over for as long as the state asks for. Whatever is done between two starts is
    done within that time; `ended` says when it began."""

    def __init__(self, check: Callable[[], None], gap_s: float) -> None:
        self._check = check
        self._gap_s = gap_s
        self.ended()

    def __call__(self) -> None:
        self._check()
        time.sleep(max(0.0, self._last + self._gap_s - time.monotonic()))

    def ended(self) -> None:
        self._last = time.monotonic()


@contextmanager
def in_state(name: str, holder: Sequence[str] | None = None, device: str = DRIVER) -> Iterator[Gate]:
    """Bring a state about."""
    state = STATES[name]
    process: subprocess.Popen[bytes] | None = None

    def others() -> dict[int, str]:
        return {pid: comm for pid, comm in users(device).items() if process is None or pid != process.pid}

    def check() -> None:
        if process is not None and process.poll() is not None:
            raise MeasurementError(f"the process that holds the driver ended with {process.returncode}")
        if found := others():
            raise MeasurementError(f"state {name}: other processes have the driver open: {found}")

    if found := others():
        raise MeasurementError(f"state {name}: other processes have the driver open: {found}")
    if state.held:
        command = holder or [sys.executable, "-I", "-S", str(ROOT / "bench" / "hold.py")]
        # It ends when its stdin does: however this process goes, it does not leave the driver held.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
        assert process.stdout is not None
        if process.stdout.readline() != b"holding\n":
            process.kill()
            process.wait()
            raise MeasurementError("state held: the driver could not be initialised")
    try:
        yield Gate(check, state.gap_s)
    finally:
        if process is not None:
            process.kill()
            process.wait()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.stdout.close()


class Cell(NamedTuple):
    """One row to be: a contender and what fills its command."""

    contender: Contender
    fields: dict[str, str]
    prompt_tokens: int | None

    def launch(self) -> Run:
        echo = len(self.fields["prompt"].encode()) if self.contender.echo else 0
        return start(self.contender.argv(self.fields), self.contender.environment(), echo)

    @property
    def label(self) -> str:
        name = self.contender.name
        return name if self.prompt_tokens is None else f"{name}, {self.prompt_tokens} tokens"


def cells(
    ready: Sequence[tuple[Contender, dict[str, str]]], model: str, prompt_tokens: Sequence[int], variant: int = 0
) -> list[Cell]:
    """Every contender with every prompt that it is for; one where the prompt makes no difference."""
    needed = any(contender.prompt for contender, _ in ready)
    prompts = {n: contenders.prompt(model, n, variant) for n in prompt_tokens if needed}
    found = []
    for contender, fields in ready:
        texts: list[tuple[int | None, str]] = [*prompts.items()] if contender.prompt else [(None, "")]
        for n, text in texts:
            if contender.prompt_tokens and n not in contender.prompt_tokens:
                continue
            more = {"model": os.path.abspath(model), "prompt": text, "context": str((n or max(prompt_tokens)) + 16)}
            found.append(Cell(contender, {**fields, **more}, n))
    return found


def of_cache(found: Sequence[Cell], cache: str) -> list[Cell]:
    """Those that are started with such a page cache."""
    return [cell for cell in found if cell.contender.cache in (None, cache)]


def prepare(found: Sequence[Cell], absent: list[Absent]) -> list[Cell]:
    """Run what contenders want run once; those where it fails are moved to `absent`."""
    done: dict[str, str | None] = {}
    for cell in found:
        contender = cell.contender
        if contender.name not in done and contender.prepare:
            command = contender.argv(cell.fields, contender.prepare)
            try:
                result = subprocess.run(command, env=contender.environment(), capture_output=True, text=True)
                why = (result.stderr.strip()[-300:] or f"exit code {result.returncode}") if result.returncode else None
            except OSError as error:
                why = str(error)
            done[contender.name] = why
            if why is not None:
                absent.append({"contender": contender.name, "why": f"prepare failed: {why}"})
    return [cell for cell in found if done.get(cell.contender.name) is None]


def rounds(
    found: Sequence[Cell],
    state: str,
    cache: str,
    n: int,
    absent: list[Absent],
    *,
    discard: bool = True,
    until: float = float("inf"),
    holder: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """`n` starts of each cell that is for this page cache, interleaved, in one state; a row each. Who fails is moved to
    `absent` with the reason.

    Ends after a whole round when the next would go beyond `until` (CLOCK_MONOTONIC): a row's `n` says what was done.
    """
    active = of_cache(found, cache)
    runs: dict[int, list[Run]] = {id(cell): [] for cell in active}
    with in_state(state, holder) as gate:
        longest = 0.0
        for number in range(-1 if discard else 0, n):
            began = time.monotonic()
            if not active:
                break
            if began + longest > until:
                names = ", ".join(cell.label for cell in active)
                why = f"{state}, {cache} cache: {max(number, 0)} of {n} rounds, then the time was up"
                file = os.path.basename(active[0].fields["model"])
                of = {"state": state, "cache": cache, "model": file}
                asked = {"kind": "coldstart", "of": of, "asked": n, "done": max(number, 0)}
                absent.append({"contender": f"{names}: {file}", "why": why, "reason": NO_TIME, **asked})
                break
            turn = number % len(active)
            for cell in active[turn:] + active[:turn]:
                model = cell.fields["model"]
                (measure.make_cold if cache == "cold" else measure.make_warm)(model)
                if number >= 0:
                    gate()
                try:
                    run = cell.launch()
                except Failed as failure:
                    absent.append({"contender": cell.label, "why": f"{state}, {cache} cache: {failure}"})
                    active.remove(cell)
                    continue
                finally:
                    gate.ended()
                if number >= 0:
                    runs[id(cell)].append(run)
            waited = STATES[state].gap_s * len(active) if number < 0 else 0.0  # which the next round will
            longest = max(longest, time.monotonic() - began + waited)
    return [_row(cell, state, cache, runs[id(cell)]) for cell in active if runs[id(cell)]]


def _row(cell: Cell, state: str, cache: str, runs: Sequence[Run]) -> dict[str, Any]:
    return {
        "state": state,
        "cache": cache,
        "model": os.path.basename(cell.fields["model"]),
        "contender": cell.contender.name,
        "prompt_tokens": cell.prompt_tokens,
        # Where the checkout lies says nothing about what was run.
        "command": [
            (word if len(word) < 200 else word[:60] + "…").replace(f"{measure.ROOT}/", "./")
            for word in cell.contender.argv(cell.fields)
        ],
        "env": dict(cell.contender.env),
        "n": len(runs),
        "first_ms": [round(run.first_ms, 3) for run in runs],
        "exit_ms": [round(run.exit_ms, 3) for run in runs],
        "output": runs[-1].output.decode(errors="replace")[:80],
    }


def floors(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str], float]:
    """(state, cache, model) -> the floor's median."""
    return {
        (row["state"], row["cache"], row["model"]): summary(row["first_ms"]).median
        for row in rows
        if row["contender"] == FLOOR
    }


def disks(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str], float]:
    """(state, cache, model) -> the median of the faster way to read all of the file from the disk."""
    found: dict[tuple[str, str, str], float] = {}
    for row in rows:
        if row["contender"] in DISKS:
            case, median = (row["state"], row["cache"], row["model"]), summary(row["first_ms"]).median
            found[case] = min(median, found.get(case, median))
    return found


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text, a table for each state, cache and model."""
    lines, floor, disk = [], floors(rows), disks(rows)
    for case in dict.fromkeys((row["state"], row["cache"], row["model"]) for row in rows):
        body = []
        for row in rows:
            if (row["state"], row["cache"], row["model"]) == case:
                s, ended = summary(row["first_ms"]), summary(row["exit_ms"])
                name = row["contender"] + (f", {row['prompt_tokens']} tokens" if row["prompt_tokens"] else "")
                ratios = [f"{s.median / of[case]:.2f}" if case in of else "-" for of in (floor, disk)]
                figures = (f"{x:.1f}" for x in (s.min, s.median, s.p90, ended.median))
                body.append([name, str(s.n), *figures, *(ratios if disk else ratios[:1])])
        head = [f"{case[2]}, {case[0]}, {case[1]} cache", "n", "min", "median", "p90", "exit", "x floor"]
        head += ["x disk"] if disk else []
        lines.append(measure.table(head, body))
    return "\n\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Launch to first token, whole processes.")
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--out", type=Path, required=True, help="the JSON")
    parser.add_argument("--state", action="append", choices=STATES, help="repeatable; all by default")
    parser.add_argument("--cache", action="append", choices=CACHES, help="repeatable; warm by default")
    parser.add_argument("--prompt-tokens", type=measure.count, nargs="+", default=[5], metavar="N")
    parser.add_argument("-n", type=measure.count, default=20, help="starts that count, of each (20)")
    parser.add_argument("--contenders", type=Path, default=contenders.FILE, metavar="TOML")
    parser.add_argument("--only", action="append", metavar="NAME", help="contenders, repeatable; all by default")
    parser.add_argument("--binary", action="append", default=[], metavar="NAME=PATH")
    options = parser.parse_args()
    ready, absent = contenders.choose(options.only or [], options.binary, ROOT / "build" / "bench", options.contenders)
    models = [measure.model_entry(model) for model in dict.fromkeys(options.models)]
    rows: list[dict[str, Any]] = []
    for model in dict.fromkeys(options.models):
        found = prepare(cells(ready, model, options.prompt_tokens), absent)
        for cache in dict.fromkeys(options.cache or ["warm"]):
            for state in dict.fromkeys(options.state or STATES):
                try:
                    rows += rounds(found, state, cache, options.n, absent)
                except MeasurementError as error:
                    absent.append({"contender": f"{state}, {cache} cache: {model}", "why": str(error)})
                # Each as soon as it is done: what ends this later does not take it along.
                content = {"models": models, "rows": rows, "not_run": absent}
                measure.save(options.out, measure.document("coldstart", content))
    print(render(rows))
    for each in absent:
        print(f"not run: {each['contender']}: {each['why']}")
    return 0 if rows else 1


if __name__ == "__main__":
    ending.run(main)
