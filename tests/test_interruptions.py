"""Whatever takes long can be ended while it runs, and leaves nothing behind: by cancel, deadline, signal, hang-up."""

import json
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_ipc import errors
from reflex_ipc.engine import Engine
from reflex_ipc.errors import CancelledError, DeadlineError
from reflex_ipc.plan import Step
from tests.polling import Poll
from tests.wire import Socket, Stdio, command, start, stop

PASS = {"op": "score", "prompt": "word " * 1500, "candidates": [" a", " b"]}  # one pass of 20 s and more on this thread
SOON = 3.0  # seconds; a piece of an operation takes 0.1 at most where the machine is not busy
SMALL = {"op": "score", "prompt": "The capital of France is", "candidates": [" Paris", " Rome"]}


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Stdio]:
    with Stdio(smollm2) as engine:
        yield engine.ready()


def logprobs(engine: Stdio) -> list[Any]:
    return [each["token_logprobs"] for each in engine.answer({"id": "small", **SMALL})[-1]["candidates"]]


@pytest.mark.model
def test_a_pass_is_cancelled_or_late(engine: Stdio) -> None:
    before = logprobs(engine)
    for ask, code, field in (
        ({"id": 1, **PASS}, "cancelled", None),
        ({"id": 1, **PASS, "deadline_ms": 700}, "deadline", "deadline_ms"),
    ):
        began = time.monotonic()
        engine.send(ask)
        if code == "cancelled":
            time.sleep(0.7)
            engine.send({"id": 2, "op": "cancel", "target": 1})
            assert engine.event()["found"] == "running"
        error = engine.event()
        assert (error["id"], error["event"], error["code"], error.get("field")) == (1, "error", code, field)
        assert 0.7 <= time.monotonic() - began < 0.7 + SOON
    assert logprobs(engine) == before


@pytest.mark.model
@pytest.mark.parametrize("is_tree", [False, True])
def test_an_operation_of_thousands_of_rows_asks_inside(smollm2: Path, is_tree: bool) -> None:
    """After at most some 0.1 s where the machine is not busy, 4 before."""
    with Engine.open(smollm2, backend="cpu", threads=1) as engine:
        executor = engine._executor
        executor.reserve(4096)
        parents = [0 if i % 8 == 1 else i - 1 for i in range(4096)] if is_tree else range(-1, 4095)
        step = Step([500] * 4096, range(4096), parents, [4095], 1 if is_tree else 4096)
        poll = Poll(6)
        with pytest.raises(CancelledError):
            executor.score(step, [[1]], poll)
        assert poll.longest < 0.25


@pytest.mark.model
def test_one_piece_of_a_prompt_is_cancelled(engine: Stdio) -> None:
    """512 tokens are one step, of some seconds."""
    engine.send({"id": 1, "op": "generate", "tokens": [500] * 512, "max_tokens": 1})
    engine.until("started")
    time.sleep(0.3)
    began = time.monotonic()
    engine.send({"id": 2, "op": "cancel", "target": 1})
    ack, done = engine.event(), engine.event()
    assert time.monotonic() - began < 1.5
    assert ack["found"] == "running" and done["finish_reason"] == "cancelled"
    assert "prompt_ms" not in done["timings"]
    assert engine.answer({"id": 3, "op": "generate", "prompt": "The capital of France is", "max_tokens": 1})[-1][
        "text"
    ] == (" Paris")


@pytest.mark.model
def test_making_tokens_is_ended(engine: Stdio) -> None:
    """One word of four megabytes: seconds of merging. And of many words, by a deadline."""
    engine.send({"id": 1, "op": "tokenize", "text": "ab" * 1_900_000})
    time.sleep(3.5)  # read, parsed, cut into symbols
    began = time.monotonic()
    engine.send({"id": 2, "op": "cancel", "target": 1})
    ack, error = engine.event(), engine.event()
    assert time.monotonic() - began < 1.5
    assert ack["found"] == "running" and (error["event"], error["code"]) == ("error", "cancelled")
    rng = np.random.default_rng(1)
    words = "".join(map(chr, rng.choice([32, *range(97, 123)], 1_000_000)))
    for ask, last in (
        ({"op": "generate", "prompt": words}, ("done", "deadline")),
        ({"op": "score", "prompt": words, "candidates": [" a"]}, ("error", "deadline")),
    ):
        began = time.monotonic()
        events = engine.answer({"id": 3, "deadline_ms": 200, **ask})
        assert time.monotonic() - began < 0.2 + SOON
        assert (events[-1]["event"], events[-1].get("finish_reason", events[-1].get("code"))) == last
        assert len(events) == 1  # no `started`


@pytest.mark.model
@pytest.mark.parametrize("ask", [PASS, {"op": "tokenize", "text": "ab" * 1_900_000}], ids=["pass", "tokens"])
def test_sigterm_inside(smollm2: Path, ask: dict[str, Any]) -> None:
    with Stdio(smollm2) as engine:
        engine.ready()
        engine.send({"id": 1, **ask})
        time.sleep(1)
        began = time.monotonic()
        engine.process.send_signal(signal.SIGTERM)
        assert engine.rest() == []
        assert engine.code() == -signal.SIGTERM and engine.complaints() == ""
        assert time.monotonic() - began < 4


@pytest.mark.model
def test_a_client_that_leaves_inside_a_pass(smollm2: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="r") as directory:
        path = Path(directory) / "s"
        process = start(command("uds", smollm2, path))
        try:
            with Socket(path) as leaves, Socket(path) as stays:
                leaves.ready()
                stays.ready()
                leaves.send({"id": 1, **PASS})
                time.sleep(0.7)
                stays.send({"id": 2, **SMALL})
                leaves.socket.close()
                began = time.monotonic()
                result = stays.event()
                assert time.monotonic() - began < SOON
                assert result["candidates"][0]["text"] == " Paris" and result["best"] == 0
        finally:
            stop(process)


@pytest.mark.parametrize("name", ["llama", "qwen35", "qwen3moe", "deepseek3"])
@pytest.mark.parametrize("reason", ["cancelled", "deadline"])
def test_a_step_that_is_ended_anywhere(fixtures: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str) -> None:
    """After each operation in turn; the sequence is forgotten, and what comes next is what it always is."""
    monkeypatch.setattr(errors, "ASK_EVERY_S", 0.0)
    step = Step.text([5, 6, 7, 8], 0, range(4))
    kind = DeadlineError if reason == "deadline" else CancelledError
    with Engine.open(fixtures / "exact" / f"{name}-f16.gguf", backend="cpu") as engine:
        executor = engine._executor
        executor.reserve(16)
        executor.forward(step)
        expected = executor.logits().copy()
        asked = 0
        for last in range(1, 10_000):
            executor.reset()
            executor.forward(Step.text([9, 10], 0, []))
            asked = 0

            def poll(last: int = last) -> str | None:
                nonlocal asked
                asked += 1
                return reason if asked == last else None

            try:
                executor.score(Step.text([5, 6], 2, [1]), [[3]], poll)
            except kind:
                assert executor.n_past == 0 and not len(executor.logits())
                if last % 7 == 1:
                    executor.forward(step)
                    assert np.array_equal(executor.logits(), expected)
            else:
                break
        assert last > len(engine.plan.ops) / 2
        assert executor.n_past == 4


def test_no_question_is_asked_more_often_than_it_pays() -> None:
    asked: list[float] = []
    watch = errors.Watch(lambda: asked.append(time.monotonic()))  # type: ignore[arg-type, func-returns-value]
    until = time.monotonic() + 0.2
    calls = 0
    while time.monotonic() < until:
        watch()
        calls += 1
    assert calls > 1000 and 2 <= len(asked) <= 21
    errors.Watch(None)()
    errors.go_on(None)


@pytest.mark.parametrize("name", ["llama", "qwen35", "deepseek3"])
def test_the_prompts_own_tokens(fixtures: Path, name: str) -> None:
    """Across the border of the pieces they are computed in, against the logits of the whole, in float64."""
    with Engine.open(fixtures / "exact" / f"{name}-f16.gguf", backend="cpu") as engine:
        ids = [int(each) for each in np.random.default_rng(2).integers(0, engine.tokenizer.n_vocab, 150)]
        logits = engine.logits(ids).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        plain = [token.id for token in engine.generate(ids, max_tokens=4)]
        tokens = list(engine.generate(ids, max_tokens=4, prompt_logprobs=True, top_logprobs=3))
        prompt = [token for token in tokens if token.of_prompt]
        assert [token.id for token in prompt] == ids and tokens[: len(ids)] == prompt
        assert [token.id for token in tokens[len(ids) :]] == plain
        assert prompt[0].logprob is None and prompt[0].top == ()
        for row, token in zip(expected, prompt[1:], strict=False):
            assert token.logprob == pytest.approx(row[token.id], abs=1e-4)
            assert [id for id, _ in token.top] == list(np.argsort(-row, kind="stable")[:3])
            assert [logprob for _, logprob in token.top] == pytest.approx(sorted(row)[:-4:-1], abs=1e-4)
        spelt = b"".join(engine.tokenizer.token_bytes(each, special=True) for each in ids)
        assert "".join(token.text for token in prompt) == spelt.decode("utf-8", "replace")


def test_prompt_events(fixtures: Path) -> None:
    """A token that the engine puts in front of a text is no part of it; what stands in the text is."""
    with Stdio(fixtures / "exact" / "llama-f16.gguf") as engine:
        engine.ready()
        text = "Hello <|im_end|> é"
        ask = {"op": "generate", "prompt_logprobs": True, "max_tokens": 2, "ignore_eos": True}
        started, *events, done = engine.answer({"id": 1, **ask, "prompt": text})
        prompt = [each for each in events if each["event"] == "prompt"]
        assert [each["index"] for each in prompt] == list(range(started["prompt_tokens"]))
        assert "".join(each["text"] for each in prompt) == text
        assert next(each["index"] for each in events if each["event"] == "token") == 0
        assert done["usage"]["completion_tokens"] == 2 and not done["text"].startswith("Hello")
        ids = [each["token"] for each in prompt]
        by_ids = [each for each in engine.answer({"id": 2, **ask, "tokens": ids}) if each["event"] == "prompt"]
        assert [each["logprob"] for each in by_ids] == [each["logprob"] for each in prompt]
        chat = engine.answer({"id": 3, **ask, "messages": [{"role": "user", "content": "Hi"}]})
        shown = "".join(each["text"] for each in chat if each["event"] == "prompt")
        assert shown.startswith("<|im_start|>user\nHi<|im_end|>\n"), json.dumps(shown)
