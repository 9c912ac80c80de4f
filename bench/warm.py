"""How fast a loaded model is: prompts of many lengths, decoding at several depths, scoring.

    python bench/warm.py MODEL.gguf --out results/warm.json
    python bench/warm.py MODEL.gguf --out FILE --backend cpu --prefill 32 128 --llama-bench /path/to/llama-bench

Everything goes through `Engine`, as a program would. Each figure stands beside the bytes it has to move and the
operations it has to do (bench/work.py), and their share of what bench/rates.py measured in the same run.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ending
import measure
import work
from measure import ROOT, MeasurementError, summary
from rates import shares

from reflex_ipc import archs
from reflex_ipc.engine import Engine
from reflex_ipc.gguf import GGUF
from reflex_ipc.plan import PREFILL_CHUNK

PREFILL = (32, 128, 512, 2048, 8192)
NEW_LENGTHS = (128,)
DEPTHS = (128, 2048, 8192)
ROOM = 64  # tokens of a context besides: a candidate's, the one that is not counted
CANDIDATES = (" Paris", " London", " Berlin", " Rome", " a city that is not in the north")


class Bench:
    """Measurements of one open engine. Prompts are random tokens, another each time: nothing can be reused."""

    def __init__(self, engine: Engine, repeat: int) -> None:
        self.engine = engine
        self.repeat = repeat
        self._random = random.Random(7)
        tokenizer = engine.tokenizer
        # Plain words: as text they become at most as many tokens again.
        some = range(min(tokenizer.n_vocab, 4000))
        self._words = [i for i in some if tokenizer.token_bytes(i).strip().isalpha() and i not in tokenizer.eog]

    def prefill(self, n: int) -> dict[str, Any]:
        """From a prompt of n tokens to the first token behind it."""
        return self._row("prefill", {"tokens": n}, n, self._times(lambda: self._first(n)), self._prompt(n))

    def new_length(self, n: int) -> dict[str, Any]:
        """The same of prompts a little longer than n, of which no length has come before."""
        self._first(n)
        seconds = [self._first(n + 1 + i) for i in range(self.repeat)]
        return self._row("prefill of a new length", {"tokens": n}, n, seconds, self._prompt(n))

    def _first(self, n: int) -> float:
        """Seconds from a prompt of n tokens to the first token behind it."""
        ids = self._ids(n)
        began = time.perf_counter()
        for _ in self.engine.generate(ids, max_tokens=1, ignore_eos=True):
            break
        return time.perf_counter() - began

    def _prompt(self, n: int) -> work.Work:
        total = work.Work(0, 0)
        for start in range(0, n, PREFILL_CHUNK):
            size = min(PREFILL_CHUNK, n - start)
            total += work.step(self.engine.plan, size, start, int(start + size == n))
        return total

    def decode(self, depth: int, n: int) -> dict[str, Any]:
        """n tokens, one by one, behind a prompt of `depth`; the first is not counted."""

        def once() -> float:
            began = 0.0
            # Withheld text comes last, without an id and after everything was computed: it is not waited for.
            for seen, _ in enumerate(self.engine.generate(self._ids(depth), max_tokens=n + 1, ignore_eos=True)):
                if seen == 0:
                    began = time.perf_counter()
                if seen == n:
                    break
            return time.perf_counter() - began

        total = work.Work(0, 0)
        for i in range(n):
            total += work.step(self.engine.plan, 1, depth + i, 1)
        return self._row("decode", {"depth": depth, "tokens": n}, n, self._times(once), total)

    def score(self, n: int) -> dict[str, Any]:
        """Candidates behind a prompt of n tokens, all in one step."""
        beginnings: set[tuple[int, ...]] = set()

        def once() -> float:
            text = self.engine.detokenize(self._ids(n))
            began = time.perf_counter()
            scores = self.engine.score(text, CANDIDATES)
            seconds = time.perf_counter() - began
            beginnings.clear()
            for tokens in (candidate.tokens for candidate in scores.candidates):
                beginnings.update(tokens[:i] for i in range(len(tokens)))
            return seconds

        seconds = self._times(once)
        # Logits behind every beginning of a candidate, the empty one too, which is the prompt's end.
        total = work.step(self.engine.plan, n + len(beginnings) - 1, 0, len(beginnings))
        return self._row("score", {"tokens": n, "candidates": len(CANDIDATES)}, len(CANDIDATES), seconds, total)

    def _ids(self, n: int) -> list[int]:
        return self._random.choices(self._words, k=n)

    def _times(self, once: Callable[[], float]) -> list[float]:
        for _ in range(2):  # buffers, clocks; launches of a length are kept, and graphs made, when it comes again
            once()
        return [once() for _ in range(self.repeat)]

    def _row(self, what: str, of: dict[str, int], n: int, seconds: Sequence[float], total: work.Work) -> dict[str, Any]:
        return {
            "engine": "reflex",
            "what": what,
            **of,
            "seconds": list(seconds),
            "per_second": n / summary(seconds).median,
            "bytes": total.bytes,
            "flops": total.flops,
        }


def _context(model: str) -> int:
    """Tokens the model was trained for."""
    with GGUF.open(model) as opened:
        return archs.build(opened).n_ctx_train


def rates() -> dict[str, Any] | None:
    """bench/rates.py in a process of its own; None where it cannot be had."""
    result = subprocess.run([sys.executable, str(ROOT / "bench" / "rates.py")], capture_output=True, text=True)
    return json.loads(result.stdout) if result.returncode == 0 else None


def llama_bench(binary: str, model: str, prefill: Sequence[int], depths: Sequence[int], n: int) -> list[dict[str, Any]]:
    """llama-bench on the same file, flash attention on. MeasurementError says why there is no figure."""
    rows = []
    jobs = [["-p", ",".join(map(str, prefill)), "-n", "0"]] if prefill else []
    jobs += [["-p", "0", "-n", str(n), "-d", ",".join(map(str, depths))]] if depths else []
    for job in jobs:
        command = [binary, "-m", model, "-fa", "1", "-ngl", "99", "-o", "json", *job]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise MeasurementError(f"exit code {done.returncode}: {' '.join(done.stderr.strip().splitlines()[-1:])}")
        try:
            for entry in json.loads(done.stdout):
                seconds = [ns / 1e9 for ns in entry["samples_ns"]]
                tokens = entry["n_gen"] or entry["n_prompt"]
                of = {"depth": entry["n_depth"], "tokens": tokens} if entry["n_gen"] else {"tokens": tokens}
                what = "decode" if entry["n_gen"] else "prefill"
                per_second = tokens / summary(seconds).median
                rows.append({"engine": "llama-bench", "what": what, **of, "seconds": seconds, "per_second": per_second})
        except (ValueError, LookupError, TypeError, ArithmeticError) as error:
            raise MeasurementError(f"its JSON is not what is known of it: {error!r}") from None
    return rows


def render(model: str, rows: Sequence[Mapping[str, Any]], found: Mapping[str, Any] | None) -> str:
    head = [model, "engine", "a second", "ms", "GB/s", "TFLOP/s", "% of read", "% of copy", "% of bf16"]
    body = []
    for row in rows:
        s, share = summary(row["seconds"]).median, shares(row, found)
        what = f"{row['what']} {row['tokens']}" + (f" at {row['depth']}" if "depth" in row else "")
        moved = [f"{row['bytes'] / s / 1e9:.0f}", f"{row['flops'] / s / 1e12:.2f}"] if "bytes" in row else ["-", "-"]
        percent = [f"{100 * share[k]:.1f}" if k in share else "-" for k in ("of_read", "of_copy", "of_bf16")]
        body.append([what, row["engine"], f"{row['per_second']:.1f}", f"{s * 1e3:.2f}", *moved, *percent])
    return measure.table(head, body)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Speed of a loaded model.")
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True, help="the JSON")
    parser.add_argument("--backend", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--prefill", type=measure.count, nargs="*", default=list(PREFILL), metavar="N")
    parser.add_argument("--new-lengths", type=measure.count, nargs="*", default=list(NEW_LENGTHS), metavar="N")
    parser.add_argument("--depths", type=int, nargs="*", default=list(DEPTHS), metavar="N")
    parser.add_argument("--decode-tokens", type=measure.count, default=128, metavar="N")
    parser.add_argument("--score", type=measure.count, nargs="*", default=[512], metavar="N", help="prompt lengths")
    parser.add_argument("--repeat", type=measure.count, default=5)
    parser.add_argument("--llama-bench", metavar="PATH")
    parser.add_argument("--sha256", metavar="DIGEST", help="of the model file, where it is known already")
    options = parser.parse_args()
    most, absent = _context(options.model), []
    for what, lengths, more in (
        ("prefill", options.prefill, ROOM),
        ("prefill of a new length", options.new_lengths, options.repeat + ROOM),
        ("decode at depth", options.depths, options.decode_tokens + ROOM),
        ("score", options.score, ROOM),
    ):
        for n in [n for n in lengths if n + more > most]:
            lengths.remove(n)
            absent.append({"contender": f"reflex, {what} {n}", "why": f"the model's context is {most} tokens"})
    new_lengths = [n + options.repeat for n in options.new_lengths]
    longest = max(
        [*options.prefill, *new_lengths, *(d + options.decode_tokens for d in options.depths), *options.score],
        default=1,
    )
    with Engine.open(options.model, backend=options.backend, context=longest + ROOM) as engine:
        bench = Bench(engine, options.repeat)
        rows = [bench.prefill(n) for n in options.prefill]
        rows += [bench.new_length(n) for n in options.new_lengths]
        rows += [bench.decode(depth, options.decode_tokens) for depth in options.depths]
        rows += [bench.score(n) for n in options.score]
        backend = engine.backend
    if options.llama_bench:
        lengths = options.prefill, options.depths, options.decode_tokens
        try:
            rows += llama_bench(options.llama_bench, options.model, *lengths)
        except (MeasurementError, OSError) as error:
            absent.append({"contender": "llama-bench", "why": str(error)})
    else:
        absent.append({"contender": "llama-bench", "why": "not given (--llama-bench PATH)"})
    found = rates() if backend == "cuda" else None
    content = {
        "models": [measure.model_entry(options.model, options.sha256)],
        "backend": backend,
        "rates": found,
        "rows": rows,
        "not_run": absent,
    }
    measure.save(options.out, measure.document("warm", content))
    print(render(Path(options.model).name, rows, found))
    return 0


if __name__ == "__main__":
    ending.run(main)
