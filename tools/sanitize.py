"""The kernels under compute-sanitizer: whole small models of every family, nothing else in the process.

    python tools/sanitize.py OUT                          memcheck, racecheck and initcheck, side by side
    python tools/sanitize.py OUT --tool memcheck --limit 130

Each model reads a prompt in steps of many, some and a few tokens, generates, and scores a tree. Each tool is a process
of its own, with one model after the other; what there was no time for is said. Exit code 1 where a tool
found something. Logs go to OUT.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "tests" / "fixtures"
TOOLS = ("memcheck", "racecheck", "initcheck")
MODELS = (
    *("exact/qwen3-f16", "quantised/qwen3-w256-Q4_K_M", "quantised/qwen3moe-w256-Q4_K_M", "exact/qwen35-f16"),
    *(
        "exact/deepseek3-f16",
        "exact/qwen3next-f16",
        "quantised/deepseek3-w256-Q4_K_M",
        "exact/llama-f16",
        "exact/qwen2-f16",
    ),
    *("quantised/llama-w256-Q4_K_M", "quantised/qwen3-w256-IQ4_XS", "large/qwen3"),
    *("exact/qwen35moe-f16", "exact/deepseek2-lite-f16"),
)
FOUND = 9
"""The sanitizer's exit code where it found something; ours would be another."""


def run_models(until: float, names: Sequence[str]) -> int:
    """Under the sanitizer: use each model, saying which."""
    sys.path.insert(0, str(ROOT))
    from reflex_ipc import archs
    from reflex_ipc.cuda.executor import CudaExecutor
    from reflex_ipc.cuda.linear import FEW
    from reflex_ipc.gguf import GGUF
    from reflex_ipc.plan import Step
    from reflex_ipc.sampler import Sampler, Sampling

    for name in names:
        if time.monotonic() > until:
            print(f"not run: {name}", flush=True)
            continue
        began = time.monotonic()
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
            finally:
                executor.close()
        print(f"done: {name}, {time.monotonic() - began:.0f} s", flush=True)
    return 0


def sanitize(program: str, tool: str, log: Path, limit_s: float) -> str:
    """One tool over the models; what came of it, in a word or two."""
    until = time.monotonic() + 0.7 * limit_s  # no model is begun later
    # Driver calls that fail are the driver layer's to report; some are expected to, where a device lacks something.
    command = [program, "--tool", tool, "--report-api-errors", "no"]
    command += ["--error-exitcode", str(FOUND), "--print-limit", "20", sys.executable]
    command += [__file__, "--until", str(until)]
    with open(log, "wb") as file:
        try:
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=limit_s).returncode
        except subprocess.TimeoutExpired:
            code = None
    lines = log.read_text(errors="replace").splitlines()
    done, left = (sum(line.startswith(word) for line in lines) for word in ("done: ", "not run: "))
    word = {0: "clean", FOUND: "FOUND SOMETHING", None: "out of time"}.get(code, f"failed, exit code {code}")
    return f"{tool}: {word}; {done} models done, {len(MODELS) - done} not" + (f" ({left} for time)" if left else "")


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="The kernels under compute-sanitizer.")
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "build", help="folder of the logs")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="repeatable; all by default")
    parser.add_argument("--limit", type=float, default=400, metavar="S", help="seconds in all (400)")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.until is not None:
        return run_models(options.until, MODELS)
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    program = shutil.which("compute-sanitizer") or shutil.which(f"{home}/bin/compute-sanitizer")
    if program is None:
        sys.stderr.write("sanitize: no compute-sanitizer on the PATH or in CUDA_HOME\n")
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    tools = options.tool or TOOLS
    with ThreadPoolExecutor(len(tools)) as pool:
        said = list(pool.map(lambda tool: sanitize(program, tool, options.out / f"{tool}.log", options.limit), tools))
    print(*said, sep="\n")
    return 0 if all(": clean; " in line for line in said) else 1


if __name__ == "__main__":
    sys.exit(main())
