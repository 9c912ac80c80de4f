"""OpenAI's fields -> the engine's request, and bodies that are not to be taken. No engine here."""

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reflex_sidecar import openai_requests
from reflex_sidecar.body import parse_object
from reflex_sidecar.errors import ApiError, from_engine

SIDECAR = Path(__file__).parents[2] / "sidecar"
USER = {"role": "user", "content": "x"}


def chat(**fields: Any) -> openai_requests.Job:
    return openai_requests.chat({"messages": [USER], **fields})


def completion(**fields: Any) -> openai_requests.Job:
    return openai_requests.completion({"prompt": "x", **fields})


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"tools": [TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {}}, "audio"),
        ({"prediction": {}}, "prediction"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"temprature": 1}, "temprature"),
        ({"prompt": "x"}, "prompt"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "user", "content": 3}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": "x", "refusal": "no"}]}, "messages[0].refusal"),
    ],
)
def test_chat_refuses_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert param in caught.value.message
    assert caught.value.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"messages": [USER]}, "messages"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": 1}, "echo"),
    ],
)
def test_completions_refuse_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_what_asks_for_nothing_is_taken() -> None:
    quiet = {"n": 1, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "modalities": ["text"]}
    nulls = dict.fromkeys(("stop", "tools", "functions", "logprobs", "top_logprobs", "max_tokens", "stream_options"))
    harmless = dict.fromkeys(openai_requests.HARMLESS, "x")
    assert chat(**quiet) == chat(**nulls) == chat(**harmless) == chat()
    assert completion(best_of=1, suffix="", echo=False) == completion()


def test_chat_request() -> None:
    job = chat(stop="\n", top_p=0.5, seed=3, logprobs=True, top_logprobs=2, chat_template_kwargs={"a": 1})
    assert job.ask == {
        "op": "generate",
        "messages": [USER],
        "template_arguments": {"a": 1},
        "stop": ["\n"],
        "temperature": 1,
        "top_p": 0.5,
        "seed": 3,
        "top_logprobs": 2,
    }
    assert job.names == {"template_arguments": "chat_template_kwargs"}
    assert (job.stream, job.include_usage, job.logprobs, job.echo) == (False, False, 2, None)


def test_max_tokens_where_none_is_given() -> None:
    def bounded(job: openai_requests.Job, limits: dict[str, Any], context: Any) -> Any:
        return openai_requests.bounded(job, limits, context).ask.get("max_tokens")

    assert bounded(chat(), {"max_tokens": None}, 4096) == 4096  # as long as there is room
    assert bounded(chat(), {"max_tokens": 100}, 4096) == 100
    assert bounded(chat(), {}, None) is None
    assert bounded(chat(max_completion_tokens=7), {"max_tokens": 3}, 2) == 7  # for the engine to refuse
    assert bounded(completion(), {"max_tokens": None}, 4096) == 16
    assert bounded(completion(), {"max_tokens": 4}, 4096) == 4


def test_engine_errors_get_the_names_that_were_used() -> None:
    event = {"event": "error", "code": "invalid_request", "message": "max_tokens: too many", "field": "max_tokens"}
    error = from_engine(event, {"max_tokens": "max_completion_tokens"})
    assert (error.status, error.param) == (400, "max_completion_tokens")
    assert error.message == "max_completion_tokens: too many"
    inner = from_engine({"event": "error", "code": "invalid_request", "field": "tokens[3]"}, {"tokens": "prompt"})
    assert inner.param == "prompt[3]"
    assert from_engine({"code": "busy"}, {}).headers["retry-after"] == "1"
    assert from_engine({"code": "something new"}, {}).status == 500


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[]", b"3", b"{", b'{"a": 1, "a": 2}', b'{"a": NaN}', b'{"a": Infinity}', b'{"a": 1e999}'),
        *(b'{"a": 1e300}', b'{"a": "\\ud800"}', b'{"\\udfff": 1}', b'{"a": "\xff"}', b"\xef\xbb\xbf{}"),
        *(b'{"a": %s}' % (b"9" * 5000), b'{"a":' * 100_000, b"[" * 1_000_000),
    ],
)
def test_bodies_that_are_not_taken(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_object(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    sorted({"messages", "prompt", "stop", "stream", "stream_options", "logprobs", "top_logprobs", "n", "echo", "model"})
    + sorted(openai_requests.SAME | openai_requests.IMPOSSIBLE | openai_requests.HARMLESS)
)
MESSAGE = st.dictionaries(st.sampled_from(["role", "content", "name", "refusal", "x"]), JSON, max_size=4)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(NAMES, JSON | st.lists(MESSAGE, max_size=2), max_size=6))
def test_any_object_is_taken_or_refused(body: dict[str, Any]) -> None:
    for translate in (openai_requests.chat, openai_requests.completion):
        try:
            job = translate(body)
        except ApiError as error:
            assert error.status == 400 and error.param
        else:
            assert job.ask["op"] == "generate"


def test_the_sidecar_is_built_from_the_protocol_alone() -> None:
    own = {"reflex_sidecar", "starlette", "uvicorn", "h11"}  # the dependencies in its pyproject.toml
    files = list((SIDECAR / "reflex_sidecar").glob("*.py"))
    assert len(files) > 10
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                top = name.partition(".")[0]
                assert top in own or top in sys.stdlib_module_names, f"{file.name} imports {name}"


def test_the_readme_lists_the_fields() -> None:
    readme = (SIDECAR / "README.md").read_text()
    for title, names in (("Ignored", openai_requests.HARMLESS), ("Refused", openai_requests.IMPOSSIBLE)):
        [line] = [line for line in readme.splitlines() if line.startswith(f"| {title} |")]
        assert set(re.findall(r"`(\w+)`", line.partition(", unless")[0])) == set(names)
