"""Launch to first token of a model with experts: routed experts first, against everything in its order.

    python bench/experts_starts.py qwen3-30b-a3b-Q4_K_M.gguf --out results/experts_starts.json

Whole processes, started as the launcher starts them (the driver and the copy of the model before the interpreter),
that differ in one argument of the executor. Both kinds take turns, and must answer the same.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import contenders
import ending
import measure
from coldstart import STATES, Run, in_state, start
from measure import ROOT, MeasurementError, summary

PROGRAM = f"""
import gc, sys
gc.disable()
sys.path.append({str(ROOT)!r})
from reflex_ipc.cuda.executor import CudaExecutor
CudaExecutor.__init__.__kwdefaults__["experts_first"] = sys.argv.pop(1) == "first"
from reflex_ipc.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""The command, with a word in front that says which kind."""
KINDS = ("first", "whole")
EARLY = ROOT / "reflex_ipc" / "cuda" / "lib" / "early.so"


def launch(kind: str, model: str, prompt: str, n: int) -> Run:
    command = ["run", model, "-p", prompt, "-n", str(n), "--ignore-eos", "--backend", "cuda"]
    env = {**os.environ, "LD_PRELOAD": str(EARLY), "REFLEX_EARLY": "0", "REFLEX_MODEL": model}
    return start([sys.executable, "-I", "-S", "-c", PROGRAM, kind, *command], env)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    model, until = os.path.abspath(options.model), time.monotonic() + options.seconds
    prompts = {n: contenders.prompt(model, n, options.variant) for n in options.prompt_tokens}
    rows: dict[tuple[str, int, str], dict[str, Any]] = {}
    measure.make_warm(model)
    for number, state in enumerate(options.state):
        # What time is left is shared by the states that are left.
        end = time.monotonic() + (until - time.monotonic()) / (len(options.state) - number)
        with in_state(state) as before:
            for turn in range(-1, options.n):
                if turn > 0 and time.monotonic() > end:
                    break
                for n, prompt in prompts.items():
                    answers = set()
                    for kind in KINDS if turn % 2 else KINDS[::-1]:
                        before()
                        found = launch(kind, model, prompt, options.tokens)
                        answers.add(found.output)
                        row = rows.setdefault((state, n, kind), {"state": state, "prompt_tokens": n, "kind": kind})
                        if turn >= 0:  # the first is not counted
                            row.setdefault("first_ms", []).append(found.first_ms)
                            row.setdefault("exit_ms", []).append(found.exit_ms)
                    if len(answers) > 1:
                        raise MeasurementError(f"{n} tokens: the two kinds answered differently: {answers}")
    return list(rows.values())


def render(rows: list[dict[str, Any]]) -> str:
    body = []
    for row in rows:
        first, ended = summary(row["first_ms"]), summary(row["exit_ms"])
        body.append([
            *(row["state"], str(row["prompt_tokens"]), row["kind"], str(first.n)),
            *(f"{ms:.1f}" for ms in (first.median, first.min, first.p90, ended.median)),
        ])  # fmt: skip
    return measure.table(["state", "tokens", "experts", "n", "first token, ms", "min", "p90", "exit, ms"], body)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Whole starts, routed experts first or not.")
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True, help="the JSON")
    parser.add_argument("--state", nargs="+", choices=STATES, default=["back-to-back", "held"])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[1, 5, 12], metavar="N")
    parser.add_argument("--tokens", type=int, default=1, help="of the answer")
    parser.add_argument("-n", type=int, default=8, help="starts that count, of each (8)")
    parser.add_argument("--seconds", type=float, default=60, help="begin no round beyond this")
    parser.add_argument("--variant", type=int, default=0, help="another word in front: a token may have no text")
    parser.add_argument("--sha256", metavar="DIGEST", help="of the model file, where it is known already")
    options = parser.parse_args()
    try:
        rows = run(options)
    except MeasurementError as error:
        sys.stderr.write(f"experts_starts: {error}\n")
        return 1
    content = {"models": [measure.model_entry(options.model, options.sha256)], "rows": rows, "not_run": []}
    measure.save(options.out, measure.document("experts_starts", content))
    print(render(rows))
    return 0


if __name__ == "__main__":
    ending.run(main)
