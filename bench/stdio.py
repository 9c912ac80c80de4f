"""What a client of `reflex stdio` waits for, model loaded: a decision among three candidates, and an answer.

    python bench/stdio.py MODEL.gguf --out results/stdio.json

A real process on a pipe, timed from before a request is written to after its last event is read. Every prompt is
another, so that nothing can be reused. `of it in the process` is what the process itself says a request took: the rest
is the wire and the client.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ending
import measure
from measure import ROOT, MeasurementError, summary

from reflex_ipc.tokenizer import Tokenizer

CANDIDATES = (" Paris", " London", " Berlin")
WARM_UP = 10  # requests that do not count: graphs, clocks


class Prompts:
    """Texts of exactly `n` tokens, each another: common words, drawn at random, always the same ones."""

    def __init__(self, tokenizer: Tokenizer, n: int, seed: int = 7) -> None:
        self._tokenizer, self._n, self._random = tokenizer, n, random.Random(seed)
        some = range(min(tokenizer.n_vocab, 8000))
        self._words = [w for i in some if (w := tokenizer.token_bytes(i)).startswith(b" ") and w[1:].isalpha()]
        self.seen: set[str] = set()

    def next(self) -> str:
        """MeasurementError where the vocabulary has no such text."""
        for _ in range(10_000):
            text = b"".join(self._random.choices(self._words, k=self._n)).decode()[1:] if self._words else ""
            if text not in self.seen and len(self._tokenizer.encode(text)) == self._n:
                self.seen.add(text)
                return text
        raise MeasurementError(f"no text of common words has {self._n} tokens")


class Client:
    """Requests to a process, one at a time."""

    def __init__(self, reads: IO[bytes], writes: IO[bytes]) -> None:
        self._reads, self._writes = reads, writes
        self._id = 0

    def event(self) -> dict[str, Any]:
        line = self._reads.readline()
        if not line:
            raise MeasurementError("reflex stdio ended")
        event: dict[str, Any] = json.loads(line)
        if event["event"] in ("error", "fatal"):
            raise MeasurementError(f"reflex stdio: {event}")
        return event

    def ask(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], float, list[float]]:
        """(last event, seconds to it, seconds to each token before)."""
        self._id += 1
        line = json.dumps({"id": self._id, **request}).encode() + b"\n"
        tokens = []
        began = time.perf_counter()
        try:
            self._writes.write(line)
            self._writes.flush()
        except BrokenPipeError:
            raise MeasurementError("reflex stdio ended") from None
        while (event := self.event())["event"] not in ("done", "result"):
            if event["event"] == "token":
                tokens.append(time.perf_counter() - began)
        return event, time.perf_counter() - began, tokens


@contextmanager
def serving(model: str, backend: str, context: int) -> Iterator[tuple[Client, float]]:
    """A process that has said it is ready, and the milliseconds from its launch to that."""
    command = [sys.executable, "-m", "reflex_ipc", "stdio", model, "--backend", backend, "--context", str(context)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    began = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert process.stdin and process.stdout
    try:
        client = Client(process.stdout, process.stdin)
        while client.event()["event"] != "ready":
            pass
        yield client, (time.perf_counter() - began) * 1e3
        process.stdin.close()
        process.wait(30)
    finally:
        process.kill()
        process.wait()


def scores(client: Client, prompts: Prompts, n: int) -> dict[str, Any]:
    """`n` decisions behind fresh prompts."""
    whole, inside = [], []
    for number in range(-WARM_UP, n):
        request = {"op": "score", "prompt": prompts.next(), "candidates": CANDIDATES}
        event, seconds, _ = client.ask(request)
        if event["passes"] != 1:
            raise MeasurementError(f"a decision took {event['passes']} passes")
        if number >= 0:
            whole.append(seconds)
            inside.append(event["timings"]["total_ms"] / 1e3)
    return {"what": "score", "candidates": len(CANDIDATES), "seconds": whole, "inside_s": inside}


def answers(client: Client, prompts: Prompts, n: int, n_tokens: int) -> list[dict[str, Any]]:
    """`n` greedy answers of `n_tokens`: the first token, and the mean of those behind it."""
    first, later, inside = [], [], []
    request = {"op": "generate", "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
    for number in range(-WARM_UP, n):
        event, _, tokens = client.ask({**request, "prompt": prompts.next()})
        if len(tokens) < n_tokens:
            raise MeasurementError(f"an answer had {len(tokens)} tokens of {n_tokens}")
        if number >= 0:
            first.append(tokens[0])
            later.append((tokens[n_tokens - 1] - tokens[0]) / (n_tokens - 1))
            inside.append(event["timings"]["total_ms"] / 1e3)
    return [
        {"what": "first token", "seconds": first},
        {"what": "each later token", "seconds": later},
        {"what": f"{n_tokens} tokens, of it in the process", "seconds": inside},
    ]


def render(model: str, rows: Sequence[Mapping[str, Any]]) -> str:
    body = []
    for row in rows:
        for what, seconds in ((row["what"], row["seconds"]), ("  of it in the process", row.get("inside_s"))):
            if seconds:
                s = summary(seconds)
                body.append([what, str(s.n), *(f"{x * 1e3:.2f}" for x in (s.min, s.median, s.p90, max(seconds)))])
    return measure.table([f"{model}, ms", "n", "min", "p50", "p90", "max"], body)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Latency of a loaded model behind a pipe.")
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True, help="the JSON")
    parser.add_argument("--backend", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--prompt-tokens", type=int, default=30, metavar="N")
    parser.add_argument("--tokens", type=measure.count, default=32, metavar="N", help="of an answer")
    parser.add_argument("-n", type=measure.count, default=200, help="decisions; a quarter as many answers")
    parser.add_argument("--sha256", metavar="DIGEST", help="of the model file, where it is known already")
    options = parser.parse_args()
    prompts = Prompts(Tokenizer.from_gguf(options.model), options.prompt_tokens)
    with serving(options.model, options.backend, options.prompt_tokens + options.tokens + 64) as (client, ready_ms):
        rows = [
            scores(client, prompts, options.n),
            *answers(client, prompts, max(1, options.n // 4), options.tokens),
        ]
    for row in rows:
        row["prompt_tokens"] = options.prompt_tokens
    content = {
        "models": [measure.model_entry(options.model, options.sha256)],
        "backend": options.backend,
        "ready_ms": ready_ms,
        "rows": rows,
        "not_run": [],
    }
    measure.save(options.out, measure.document("stdio", content))
    print(render(Path(options.model).name, rows))
    return 0


if __name__ == "__main__":
    ending.run(main)
