"""What the wire costs: a line in, an event out, the loop around each token of an engine that answers at once.

`python bench/wire.py`
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import ending
from measure import MeasurementError

sys.path.insert(0, str(Path(__file__).parents[1]))

TOKENS = 20_000


def microseconds(work: Callable[[], Any]) -> float:
    """The best of five rounds of about 20 ms."""
    began = time.perf_counter()
    work()
    times = max(1, int(0.02 / (time.perf_counter() - began)))
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(times):
            work()
        best = min(best, time.perf_counter() - began)
    return best / times * 1e6


class Instant:
    """An engine whose tokens cost nothing."""

    timings: Mapping[str, float] = MappingProxyType({})
    tokenizer = SimpleNamespace(prepare=lambda: None)

    def __enter__(self) -> "Instant":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def info(self) -> dict[str, Any]:
        return {}

    def generate(self, prompt: Any, *, poll: Callable[[], str | None], **_: Any) -> Any:
        return Tokens(poll)


class Tokens:
    prompt_tokens, reused_tokens, completion_tokens, finish_reason = 5, 0, TOKENS, "length"
    timings: Mapping[str, float] = MappingProxyType({})

    def __init__(self, poll: Callable[[], str | None]):
        self.poll = poll

    def __iter__(self) -> Any:
        from reflex_ipc.generation import Token

        for _ in range(TOKENS):
            yield Token(12366, " Paris", -0.31, (), None)
            self.poll()

    def close(self) -> None:
        pass


def serve() -> int:
    from reflex_ipc.loop import serve_stdio

    return serve_stdio("none", lambda *_, **__: Instant())  # type: ignore[arg-type, return-value]


def loop() -> float:
    """Microseconds a token through a process: engine's question, event, pipe, reader."""
    process = subprocess.Popen([sys.executable, __file__, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin and process.stdout
    process.stdin.write(b'{"id":1,"op":"generate","tokens":[1,2,3,4,5]}\n')
    process.stdin.close()
    began, line = 0.0, b""
    for line in process.stdout:
        if b'"started"' in line:
            began = time.perf_counter()
        if b'"done"' in line:
            break
    took = time.perf_counter() - began
    process.wait()
    if b'"done"' not in line or not began:
        raise MeasurementError(f"the loop gave no answer: {line.decode().strip()}")
    return took / TOKENS * 1e6


def main() -> None:
    from reflex_ipc.messages import Done, Limits, Token, encode, parse

    def report(name: str, work: Callable[[], Any]) -> None:
        print(f"  {microseconds(work):10.1f}  {name}")

    limits = Limits()
    short = b'{"id":1,"op":"generate","prompt":"The capital of France is","max_tokens":64,"temperature":0,"seed":1}'
    print("a line to a request, microseconds")
    for name, line in {
        "a short one": short,
        "with a colon in the prompt": short.replace(b"The", b"Q: The"),
        "100 kB of prompt": json.dumps({"id": 1, "op": "generate", "prompt": "Some words: " * 8500}).encode(),
        "100,000 token ids": json.dumps({"id": 1, "op": "generate", "tokens": list(range(100_000))}).encode(),
    }.items():
        report(name, partial(parse, line, limits))

    mixed = Done(1, "stop", "日本 é words " * 3000, {}, {})
    print("an event to a line, microseconds")
    for name, event in {
        "a token": Token(1, 5, 12366, " Paris", -0.31),
        "a token that is not ASCII": Token(1, 5, 12366, " 日本語😀", -0.31),
        "done, 50 kB of ASCII text": Done(1, "stop", "Some words, " * 4000, {}, {}),
        "done, 50 kB of mixed text": mixed,
    }.items():
        report(name, partial(encode, event))
    text = json.dumps(json.loads(encode(mixed)), ensure_ascii=False)
    beyond = re.compile("[^\x00-\x7f]")
    report("the last, escaped by a pattern", lambda: beyond.sub(lambda found: f"\\u{ord(found[0]):04x}", text))

    print("the loop, microseconds a token, its reader included")
    print(f"  {min(loop() for _ in range(3)):10.1f}")


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        os._exit(serve())
    ending.run(main)
