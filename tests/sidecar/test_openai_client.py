"""The `openai` package against a sidecar in front of a real engine."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai.types.shared import ErrorObject
from running import PATIENCE, Sidecar, engine_command, environment, until

from reflex_ipc.engine import Engine as ReflexEngine

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
LONG = {"max_tokens": 4000, "logprobs": True, "top_logprobs": 20, "extra_body": {"ignore_eos": True}}
"""An answer that takes many seconds."""


@pytest.fixture
def client(sidecar: Sidecar) -> Any:
    with openai.OpenAI(base_url=sidecar.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


@pytest.fixture(scope="module")
def engine(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the engine says by itself: requests -> the last event of each."""
    folder = tmp_path_factory.mktemp("cwd")

    def ask(*requests: dict[str, Any]) -> list[dict[str, Any]]:
        lines = "".join(json.dumps({"id": i, **each}) + "\n" for i, each in enumerate(requests))
        done = subprocess.run(
            engine_command("stdio", tiny),
            input=lines,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=folder,
            timeout=PATIENCE,
            check=True,
        )
        events = [json.loads(line) for line in done.stdout.splitlines()]
        return [each for each in events if each.get("event") in ("done", "result", "error")]

    return ask


def test_chat_says_what_the_engine_says(client: openai.OpenAI, engine: Any) -> None:
    [expected] = engine({"op": "generate", "messages": HELLO, "max_tokens": 12})
    answer = client.chat.completions.create(model="llama-f16", messages=HELLO, max_tokens=12, temperature=0)
    assert answer.choices[0].message.content == expected["text"]
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "chat.completion"
    assert answer.model == "llama-f16"
    assert answer.usage and answer.usage.prompt_tokens == expected["usage"]["prompt_tokens"]
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.reflex["finish_reason"] == "length"  # type: ignore[attr-defined]
    assert set(answer.reflex["timings"]) >= {"queued_ms", "prompt_ms", "first_token_ms"}  # type: ignore[attr-defined]


def test_chat_stream(client: openai.OpenAI, engine: Any) -> None:
    [expected] = engine({"op": "generate", "messages": HELLO, "max_tokens": 12})
    chunks = list(
        client.chat.completions.create(
            model="llama-f16",
            messages=HELLO,
            max_completion_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected["text"]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 12
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_stream_without_usage(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="llama-f16", messages=HELLO, max_tokens=2, stream=True))
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


def test_text_parts_and_developer(client: openai.OpenAI) -> None:
    plain: list[Any] = [{"role": "system", "content": "Be brief."}, *HELLO]
    other: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ]
    answers = [
        client.chat.completions.create(model="llama-f16", messages=each, max_tokens=8, temperature=0)
        for each in (plain, other)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert answers[0].usage and answers[1].usage
    assert answers[0].usage.prompt_tokens == answers[1].usage.prompt_tokens


def test_an_answer_can_be_sent_back(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="llama-f16", messages=HELLO, max_tokens=4)
    history = [*HELLO, first.choices[0].message.model_dump(), {"role": "user", "content": "And?"}]
    second = client.chat.completions.create(model="llama-f16", messages=history, max_tokens=4)
    assert second.usage and first.usage and second.usage.prompt_tokens > first.usage.prompt_tokens


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="llama-f16", messages=HELLO, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs and answer.choices[0].logprobs.content
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 6
    for entry in entries:
        assert entry.logprob < 0 and len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].bytes == entry.bytes  # greedy: the likeliest was taken
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert [each.logprob for each in entry.top_logprobs] == sorted(
            (each.logprob for each in entry.top_logprobs), reverse=True
        )
    joined = b"".join(bytes(entry.bytes or []) for entry in entries)
    assert joined.decode("utf-8", "replace") == answer.choices[0].message.content
    chunks = list(
        client.chat.completions.create(
            model="llama-f16", messages=HELLO, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3, stream=True
        )
    )
    streamed = [each for chunk in chunks if (part := chunk.choices[0].logprobs) for each in part.content or []]
    assert streamed == entries


def test_logprobs_without_alternatives(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="llama-f16", messages=HELLO, max_tokens=2, logprobs=True, temperature=0
    )
    assert answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert [entry.top_logprobs for entry in answer.choices[0].logprobs.content] == [[], []]


def test_completions(client: openai.OpenAI, engine: Any) -> None:
    by_text, by_ids, ids = engine(
        {"op": "generate", "prompt": "Once", "max_tokens": 16},
        {"op": "generate", "tokens": [5, 6, 7], "max_tokens": 5},
        {"op": "detokenize", "tokens": [5, 6, 7]},
    )
    answer = client.completions.create(model="llama-f16", prompt="Once", temperature=0)
    assert answer.choices[0].text == by_text["text"]
    assert answer.usage and answer.usage.completion_tokens == 16  # OpenAI's default
    answer = client.completions.create(model="llama-f16", prompt=[5, 6, 7], temperature=0, max_tokens=5, echo=True)
    assert answer.choices[0].text == ids["text"] + by_ids["text"]
    answer = client.completions.create(model="llama-f16", prompt="Once", temperature=0, max_tokens=0, echo=True)
    assert answer.choices[0].text == "Once"
    stream = client.completions.create(model="llama-f16", prompt="Once", temperature=0, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Once" + by_text["text"]


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="llama-f16", prompt="Once", temperature=0, max_tokens=8, logprobs=2)
    columns = answer.choices[0].logprobs
    assert columns and columns.tokens and columns.token_logprobs and columns.top_logprobs and columns.text_offset
    assert len(columns.tokens) == len(columns.token_logprobs) == len(columns.top_logprobs) == 8
    for token, logprob, top in zip(columns.tokens, columns.token_logprobs, columns.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values())
    text = answer.choices[0].text
    for token, begin in zip(columns.tokens, columns.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert text[begin : begin + len(token)] == token


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_an_echoed_prompt(client: openai.OpenAI, tiny: Path, stream: bool) -> None:
    """Against the logits of the whole text, in float64. What this model says holds half characters, too."""
    prompt = "Once upon a té 🦜<|im_end|>"
    ask = {"model": "llama-f16", "prompt": prompt, "temperature": 0, "max_tokens": 3, "logprobs": 2, "echo": True}
    if stream:
        chunks = list(client.completions.create(**ask, stream=True))
        choices = [chunk.choices[0] for chunk in chunks]
    else:
        choices = [client.completions.create(**ask).choices[0]]
    text = "".join(choice.text for choice in choices)
    columns: dict[str, list[Any]] = {}
    for choice in choices:
        for name, column in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
            columns.setdefault(name, []).extend(column or [])
    with ReflexEngine.open(tiny, backend="cpu") as engine:
        ids = engine.tokenize(prompt)
        ids += [token.id for token in engine.generate(ids, max_tokens=3) if token.id is not None]
        logits = engine.logits(ids).astype(np.float64)
        spelt = [engine.tokenizer.token_bytes(token, special=True) for token in ids]
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = [float(logprobs[at, token]) for at, token in enumerate(ids[1:])]
    assert set(map(len, columns.values())) == {len(ids)}
    assert columns["token_logprobs"][0] is None and columns["top_logprobs"][0] is None
    assert columns["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
    for row, top in zip(logprobs, columns["top_logprobs"][1:], strict=False):
        assert sorted(top.values()) == pytest.approx(sorted(row)[-2:], abs=1e-4)
    names = list(map(legacy_name, spelt))
    assert columns["tokens"] == names
    assert text.startswith(prompt)
    for name, begin in zip(names, columns["text_offset"], strict=True):
        if not name.startswith("bytes:"):
            assert text[begin : begin + len(name)] == name


def legacy_name(raw: bytes) -> str:
    """How OpenAI's completions write a token that is no text."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def test_only_the_prompts_logprobs(client: openai.OpenAI) -> None:
    """What benchmarks ask for: no token of an answer."""
    ask = {"model": "llama-f16", "prompt": [5, 6, 7, 8], "max_tokens": 0, "echo": True}
    answer = client.completions.create(**ask, logprobs=0)
    columns = answer.choices[0].logprobs
    assert columns and columns.tokens and columns.token_logprobs and columns.top_logprobs is None
    assert len(columns.tokens) == 4 and columns.token_logprobs[0] is None and max(columns.token_logprobs[1:]) < 0
    plain = client.completions.create(**ask)
    assert plain.choices[0].text == answer.choices[0].text and plain.choices[0].logprobs is None
    assert answer.usage and answer.usage.completion_tokens == 0 and answer.choices[0].finish_reason == "length"


def test_stop_string(client: openai.OpenAI, engine: Any) -> None:
    [expected] = engine({"op": "generate", "prompt": "Once", "max_tokens": 16})
    stop = expected["text"][4:6]
    answer = client.completions.create(model="llama-f16", prompt="Once", temperature=0, stop=stop)
    assert answer.choices[0].text == expected["text"][: expected["text"].index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.reflex["finish_reason"] == "stop_string"  # type: ignore[attr-defined]


def test_seed_and_sampling(client: openai.OpenAI) -> None:
    def text(seed: int) -> str:
        return client.completions.create(model="llama-f16", prompt="Once", seed=seed, top_p=0.9).choices[0].text

    assert text(1) == text(1) != text(2)


def test_deadline_is_the_engines(client: openai.OpenAI) -> None:
    began = time.monotonic()
    answer = client.completions.create(
        model="llama-f16",
        prompt="Once",
        max_tokens=4000,
        logprobs=20,  # many seconds
        extra_body={"ignore_eos": True, "deadline_ms": 300},
    )
    assert 0.3 <= time.monotonic() - began < 5
    assert answer.choices[0].finish_reason == "length"
    assert answer.reflex["finish_reason"] == "deadline"  # type: ignore[attr-defined]
    assert answer.usage and 0 < answer.usage.completion_tokens < 4000


def test_full_context(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="llama-f16", prompt=[5] * 4090, max_tokens=50)
    assert answer.choices[0].finish_reason == "length"
    assert answer.reflex["finish_reason"] == "context"  # type: ignore[attr-defined]


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == "llama-f16"
    assert model.reflex["n_ctx"] == 4096  # type: ignore[attr-defined]
    assert client.models.retrieve("llama-f16") == model
    for other in ("nope", "llama-f16/x", "meta/llama", "%6c"):
        with pytest.raises(openai.NotFoundError, match="'llama-f16' is") as caught:
            client.models.retrieve(other)
        assert (caught.value.code, caught.value.type) == ("model_not_found", "invalid_request_error")


@pytest.mark.parametrize("stream", [False, True])
def test_errors_name_the_parameter(client: openai.OpenAI, stream: bool) -> None:
    def refused(**fields: Any) -> openai.BadRequestError:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**{"model": "llama-f16", "messages": HELLO, "stream": stream, **fields})
        return caught.value

    for fields, param, code in (
        ({"n": 2}, "n", "unsupported_value"),
        ({"n": 0}, "n", "integer_below_min_value"),
        ({"stream_options": 5}, "stream_options", "invalid_type"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "integer_above_max_value"),
        ({"messages": []}, "messages", "empty_array"),
        ({"messages": "x"}, "messages", "invalid_type"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [{"role": 3, "content": "x"}]}, "messages[0].role", "invalid_type"),
        (
            {"messages": [{"role": "user", "content": [{}]}]},
            "messages[0].content[0].type",
            "missing_required_parameter",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        (
            {"messages": [*HELLO, {"role": "user", "content": None}]},
            "messages[1].content",
            "missing_required_parameter",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
        ({"max_tokens": -1}, "max_tokens", "integer_below_min_value"),
        ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
        ({"max_tokens": True}, "max_tokens", "invalid_type"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "integer_below_min_value"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens", "invalid_type"),
        ({"temperature": "a"}, "temperature", "invalid_type"),
        ({"temperature": -0.5}, "temperature", "decimal_below_min_value"),
        ({"stop": 5}, "stop", "invalid_type"),
        ({"stop": ["a", None]}, "stop[1]", "invalid_type"),
        ({"stop": ["a"] * 17}, "stop", "array_above_max_length"),
        ({"stop": ""}, "stop", "string_below_min_length"),
        ({"stop": ["a", "x" * 257]}, "stop[1]", "string_above_max_length"),
        ({"extra_body": {"temprature": 1}}, "temprature", "unknown_parameter"),
    ):
        error = refused(**fields)
        assert (error.param, error.code, error.type) == (param, code, "invalid_request_error")
        # What the client's own model of an error says of its fields.
        assert ErrorObject.model_validate(error.body, strict=True).message == error.body["message"]
    assert refused(seed=0.5).param == "seed"  # the engine's own check
    assert refused(extra_body={"temprature": 1}).param == "temprature"
    long = refused(messages=[{"role": "user", "content": "x" * 9000}])
    assert (long.code, long.param) == ("context_length_exceeded", "messages")
    assert refused(messages=[{"role": "user", "content": "x", "tool_calls": [3]}]).param is not None
    assert refused(logit_bias={"99999": 1}).param == "logit_bias.99999"
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    assert refused(messages=[{"role": "user", "content": [picture]}]).param == "messages[0].content[0].type"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert refused(tools=[tool]).param == "tools"


@pytest.mark.parametrize(
    ("prompt", "param"), [("", "prompt"), ("x" * 9000, "prompt"), ([5] * 5000, "prompt"), ([5, 99999], "prompt[1]")]
)
def test_errors_of_the_prompt_name_it(client: openai.OpenAI, prompt: Any, param: str) -> None:
    """Also where the engine got it under another name, as token ids."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="llama-f16", prompt=prompt)
    assert caught.value.param == param


def test_another_model_is_not_served(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'llama-f16' is") as caught:
        client.chat.completions.create(model="gpt-4o", messages=HELLO)
    assert (caught.value.code, caught.value.param, caught.value.type) == (
        "model_not_found",
        None,
        "invalid_request_error",
    )


def test_closing_a_stream_cancels_in_the_engine(client: openai.OpenAI, sidecar: Sidecar) -> None:
    gone = sidecar.metric("reflex_sidecar_client_gone_total")
    stream = client.chat.completions.create(model="llama-f16", messages=HELLO, stream=True, **LONG)  # type: ignore[call-overload]
    next(iter(stream))
    stream.close()
    until(lambda: sidecar.metric("reflex_sidecar_client_gone_total") == gone + 1)
    until(lambda: sidecar.metric("reflex_sidecar_running") == 0, 2)
    began = time.monotonic()
    client.chat.completions.create(model="llama-f16", messages=HELLO, max_tokens=1)
    assert time.monotonic() - began < 2


def test_leaving_without_a_stream_cancels_too(client: openai.OpenAI, sidecar: Sidecar) -> None:
    gone = sidecar.metric("reflex_sidecar_client_gone_total")
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(model="llama-f16", messages=HELLO, **LONG)  # type: ignore[call-overload]
    until(lambda: sidecar.metric("reflex_sidecar_client_gone_total") == gone + 1, 3)
    until(lambda: sidecar.metric("reflex_sidecar_running") == 0, 2)


@pytest.mark.asyncio
async def test_many_at_once_are_answered_in_turn(sidecar: Sidecar, engine: Any) -> None:
    import asyncio

    prompts = [f"Number {i}" for i in range(10)]
    expected = engine(*({"op": "generate", "prompt": prompt, "max_tokens": 6} for prompt in prompts))
    async with openai.AsyncOpenAI(base_url=sidecar.url + "/v1", api_key="none", max_retries=0) as client:
        answers = await asyncio.gather(
            *(
                client.completions.create(model="llama-f16", prompt=prompt, max_tokens=6, temperature=0)
                for prompt in prompts
            )
        )
    assert [answer.choices[0].text for answer in answers] == [each["text"] for each in expected]
