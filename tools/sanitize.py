"""The kernels under compute-sanitizer: every kernel of the build, and whole small models of every family.

    python tools/sanitize.py OUT                          memcheck, racecheck and initcheck, side by side
    python tools/sanitize.py OUT --tool memcheck --limit 130

First come the families of `reflex smoke`, which launch every kernel there is on small inputs and compare what they
leave; those of every type of weights in parts. Then models: each reads a prompt in steps of many, some and a few
tokens, generates, and scores a tree. A tool is several processes on the one device, each of which takes what is next;
what there was no time for is said, and which kernels were never launched. Under initcheck smoke's buffers are not
filled before. Exit code 1 where a tool found something or did not come to all. Logs go to OUT.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.append(str(ROOT / "bench"))  # behind tests/, which has a wire.py of its own

import ending  # noqa: E402

FIXTURES = ROOT / "tests" / "fixtures"
TOOLS = ("memcheck", "racecheck", "initcheck")
PROCESSES = 4
"""Of a tool. A process of one works on its host's processor most of the time, instrumenting modules."""
PARTS = 6
"""Of a family of smoke that has every type of weights."""
MODELS = (
    *("exact/qwen3-f16", "quantised/qwen3-w256-Q4_K_M", "quantised/qwen3moe-w256-Q4_K_M", "exact/qwen35-f16"),
    *("exact/deepseek3-f16", "exact/qwen3next-f16", "quantised/deepseek3-w256-Q4_K_M", "exact/llama-f16"),
    *("exact/qwen2-f16", "quantised/llama-w256-Q4_K_M", "quantised/qwen3-w256-IQ4_XS", "large/qwen3"),
    *("exact/qwen35moe-f16", "exact/deepseek2-lite-f16"),
)
FOUND = 9
"""The sanitizer's exit code where it found something; ours would be another."""


class Processes:
    """What runs, each in a process group with what it runs itself; ended together, once and for all."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_over = False

    def run(self, command: Sequence[str | Path], log: Path, limit_s: float) -> int | None:
        """The exit code; None where it was out of time."""
        with open(log, "wb") as file:
            with self._lock:
                if self._is_over:
                    return None
                process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
                self._running.add(process)
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return None
            finally:
                with self._lock:
                    self._running.discard(process)

    def end(self) -> None:
        with self._lock:
            self._is_over = True
            for process in self._running:
                with suppress(ProcessLookupError):  # it has just ended by itself
                    os.killpg(process.pid, signal.SIGKILL)


def selection() -> list[str]:
    """What is run, in this order: `smoke: FAMILY`, `smoke: FAMILY #PART`, or a model's name."""
    from reflex_ipc import smoke

    found = []
    for name, _ in smoke.families():
        parts = [f" #{part}" for part in range(PARTS)] if "every type" in name else [""]
        found += [f"smoke: {name}{part}" for part in parts]
    # The longest first: what begins last should be short.
    return [*sorted(found, key=lambda item: "every type" not in item), *MODELS]


def run_smoke(item: str, poison: bool, library: str | None = None) -> list[str]:
    """One family of smoke, or a part of one; the kernels that it launched."""
    from reflex_ipc import smoke
    from reflex_ipc.cuda.device import start_driver
    from reflex_ipc.cuda.formats import FORMATS
    from reflex_ipc.smoke import experts, matrices
    from reflex_ipc.smoke.bench import Bench

    name, _, part = item.removeprefix("smoke: ").partition(" #")
    if part:
        matrices.KINDS = experts.KINDS = tuple(FORMATS)[int(part) :: PARTS]
    family = dict(smoke.families())[name]
    with (start_driver(0, library) if library else start_driver(0)).wait() as device:
        bench = Bench(device, poison=poison)
        smoke.check(bench, name, family)
        return list(bench.kernels._functions)


def run_model(name: str) -> list[str]:
    """Use a model in all ways; the kernels that it launched."""
    from reflex_ipc import archs
    from reflex_ipc.cuda.executor import CudaExecutor
    from reflex_ipc.cuda.linear import FEW
    from reflex_ipc.gguf import GGUF
    from reflex_ipc.plan import Step
    from reflex_ipc.sampler import Sampler, Sampling

    with GGUF.open(str(FIXTURES / f"{name}.gguf")) as gguf:
        plan = archs.build(gguf)
        executor = CudaExecutor(gguf, plan, 256)
        try:
            executor.reserve(192)
            n = FEW + 6
            executor.forward(Step.text([i % 70 for i in range(n)], 0, [n - 1]))  # through half-precision scratch
            executor.forward(Step.text(range(40), n, [39]))  # dequantised on the way, in stages
            n += 40
            executor.forward(Step.text(range(7), n, range(7)))  # and by each warp
            n += 7
            tree = Step([1, 2, 3, 4], [n, n + 1, n + 1, n + 2], [-1, 0, 0, 2], [1, 3], 1)
            executor.score(tree, [[5, 6], [7]])
            executor.forward(Step.text([9], executor.n_past, [0]))
            for settings in (Sampling(), Sampling(temperature=0.8, seed=1, top_k=40, top_p=0.9)):
                answer = executor.decode(Sampler(settings, plan.n_vocab, [9]))
                for _ in range(3):
                    next(answer)
                answer.close()
                executor.forward(Step.text([9], executor.n_past, [0]))
            return list(executor._kernels._functions)
        finally:
            executor.close()


def run(tool: str, claims: Path, until: float) -> int:
    """Under the sanitizer: take what is next until nothing is left, saying what was done."""
    for number, item in enumerate(selection()):
        try:
            os.close(os.open(claims / str(number), os.O_CREAT | os.O_EXCL))
        except FileExistsError:  # another process has it
            continue
        if time.monotonic() > until:
            print(f"not run: {item}", flush=True)
            continue
        began = time.monotonic()
        names = run_smoke(item, poison=tool != "initcheck") if item.startswith("smoke: ") else run_model(item)
        print(f"launched: {' '.join(names)}\ndone: {item}, {time.monotonic() - began:.0f} s", flush=True)
    return 0


def sanitize(processes: Processes, program: str, tool: str, out: Path, limit_s: float) -> str:
    """One tool over everything; what came of it, in a line or two."""
    until = time.monotonic() + 0.7 * limit_s  # nothing is begun later
    # Driver calls that fail are the driver layer's to report; some are expected to, where a device lacks something.
    command = [program, "--tool", tool, "--report-api-errors", "no"]
    command += ["--error-exitcode", str(FOUND), "--print-limit", "20", sys.executable, __file__, "--tool", tool]
    logs = [out / f"{tool}-{number}.log" for number in range(PROCESSES)]

    with tempfile.TemporaryDirectory() as claims, ThreadPoolExecutor(PROCESSES) as pool:
        whole = [*command, "--until", str(until), "--claims", claims]
        codes = list(pool.map(lambda log: processes.run(whole, log, limit_s), logs))
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    failures = [code for code in codes if code not in (0, FOUND, None)]
    worst = FOUND if FOUND in codes else failures[0] if failures else None if None in codes else 0
    word = {0: "clean", FOUND: "FOUND SOMETHING", None: "out of time"}.get(worst, f"failed, exit code {worst}")
    done, launched = set(said(lines, "done: ")), {n for names in said(lines, "launched: ") for n in names.split()}
    left = [item for item in selection() if not any(each.startswith(f"{item}, ") for each in done)]
    text = f"{tool}: {word}; {len(done)} done" + (f", left out: {'; '.join(left)}" if left else ", nothing left out")
    never = sorted(every_kernel() - launched)
    return text + (f"\n{tool}: never launched: {' '.join(never)}" if never else "; every kernel was launched")


def said(lines: Sequence[str], word: str) -> Iterator[str]:
    return (line.removeprefix(word) for line in lines if line.startswith(word))


def every_kernel() -> set[str]:
    """Of the build that this device runs."""
    from reflex_ipc.cuda.device import Device
    from reflex_ipc.cuda.launch import Kernels

    with Device(0) as device:
        return set(Kernels(device).names())


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="The kernels under compute-sanitizer.")
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "build", help="folder of the logs")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="repeatable; all by default")
    parser.add_argument("--limit", type=float, default=500, metavar="S", help="seconds in all (500)")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--claims", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.until is not None:
        return run(options.tool[0], options.claims, options.until)
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    program = shutil.which("compute-sanitizer") or shutil.which(f"{home}/bin/compute-sanitizer")
    if program is None:
        sys.stderr.write("sanitize: no compute-sanitizer on the PATH or in CUDA_HOME\n")
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    tools = options.tool or TOOLS
    processes = Processes()
    with ThreadPoolExecutor(len(tools)) as pool:
        try:
            one = partial(sanitize, processes, program)
            found = list(pool.map(lambda tool: one(tool, options.out, options.limit), tools))
        finally:
            processes.end()  # after a signal; the threads wait for them
    print(*found, sep="\n")
    return 0 if all(": clean; " in text and "nothing left out; every kernel" in text for text in found) else 1


if __name__ == "__main__":
    ending.run(main)
