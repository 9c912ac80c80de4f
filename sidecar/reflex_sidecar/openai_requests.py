"""OpenAI's request fields -> the engine's `generate`.

Fields that mean the same to both go through as they are: the engine checks them, and its error names the field. Here is
only what has to be translated, what can't be done (refused, by name) and what can be left out without harm; and what
OpenAI has an error code for of its own.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from reflex_sidecar.errors import ApiError, bad_request, missing, wrong_type

SAME = frozenset(
    [
        "temperature",
        "top_p",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "seed",
        # not OpenAI's, but the engine's own
        "top_k",
        "min_p",
        "repeat_penalty",
        "repeat_last_n",
        "ignore_eos",
        "deadline_ms",
    ]
)
HARMLESS = frozenset(
    [
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
    ]
)
"""They ask for nothing that an answer could show, and are ignored."""
IMPOSSIBLE = frozenset(
    [
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "response_format",
        "modalities",
        "audio",
        "prediction",
        "web_search_options",
        "reasoning_effort",
        "verbosity",
        "suffix",
        "best_of",
    ]
)
"""What can't be done: refused unless the value asks for nothing (`_ASKS_NOTHING`)."""
_ASKS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "suffix": ("",),
    "best_of": (1,),
}
_CHAT_ONLY = frozenset(("messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"))
_COMPLETION_ONLY = frozenset(("prompt", "echo"))
_BOTH = frozenset(("model", "max_tokens", "stop", "stream", "stream_options", "logprobs", "n"))

COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions when it is not given, as OpenAI has it."""
MOST_LOGPROBS = 20
MOST_STOPS = 16
LONGEST_STOP = 256
"""In characters. These two are protocol.md's, where they are no setting of the engine's."""


class Job(NamedTuple):
    """One generation: what the engine is asked, and how the answer is to look."""

    model: Any  # the name it was asked for under
    ask: dict[str, Any]  # without its id; max_tokens may be missing, see `bounded`
    names: dict[str, str]  # engine's field -> the request's name for it
    stream: bool
    include_usage: bool
    logprobs: int | None  # None: not asked for; else how many alternatives
    usual_tokens: int | None  # max_tokens where none was given; None: as many as there is room for
    echo: str | list[int] | None = None  # the prompt, if it is to stand before the answer


def bounded(job: Job, limits: Mapping[str, Any], context: Any) -> Job:
    """With `max_tokens` filled in, now that it is known what this engine takes: its limits, its context in tokens."""
    if "max_tokens" in job.ask:
        return job
    bounds = [each for each in (job.usual_tokens, limits.get("max_tokens"), context) if isinstance(each, int)]
    return job._replace(ask=job.ask | {"max_tokens": min(bounds)}) if bounds else job


def chat(body: dict[str, Any]) -> Job:
    """Raises ApiError 400 that names the parameter."""
    body = _given(body, _CHAT_ONLY | _BOTH)
    ask, names = _common(body)
    ask["messages"] = _messages(body.get("messages"))
    if "chat_template_kwargs" in body:
        ask["template_arguments"] = body["chat_template_kwargs"]
        names["template_arguments"] = "chat_template_kwargs"
    most = _count(body, "max_tokens", None)
    if "max_completion_tokens" in body:
        most = _count(body, "max_completion_tokens", None)
        if body.get("max_tokens", most) != most:
            raise bad_request("max_tokens", "differs from max_completion_tokens")
        names["max_tokens"] = "max_completion_tokens"
    if most is not None:
        ask["max_tokens"] = most
    wants = _flag(body, "logprobs")
    alternatives = _count(body, "top_logprobs", MOST_LOGPROBS)
    if alternatives is not None and not wants:
        raise bad_request("top_logprobs", "takes logprobs: true")
    logprobs = (alternatives or 0) if wants else None
    return _job(body, ask, names, logprobs, None)


def completion(body: dict[str, Any]) -> Job:
    """Raises ApiError 400 that names the parameter."""
    body = _given(body, _COMPLETION_ONLY | _BOTH)
    ask, names = _common(body)
    prompt = _prompt(body.get("prompt"))
    if isinstance(prompt, str):
        ask["prompt"] = prompt
    else:
        ask["tokens"] = prompt
        names["tokens"] = "prompt"
    if (most := _count(body, "max_tokens", None)) is not None:
        ask["max_tokens"] = most
    logprobs = _count(body, "logprobs", MOST_LOGPROBS)
    echo = _flag(body, "echo")
    if echo and logprobs is not None:
        ask["prompt_logprobs"] = True
        names["prompt_logprobs"] = "logprobs"
    return _job(body, ask, names, logprobs, COMPLETION_TOKENS)._replace(echo=prompt if echo else None)


def _given(body: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """The fields that say something: null is as good as absent. Raises for what is unknown or can't be done."""
    given = {name: value for name, value in body.items() if value is not None and name not in HARMLESS}
    for name, value in given.items():
        if name in IMPOSSIBLE and value not in _ASKS_NOTHING.get(name, ()):
            raise bad_request(name, "is not supported", "unsupported_parameter")
        if name not in known and name not in IMPOSSIBLE and name not in SAME:
            raise bad_request(name, "unknown parameter", "unknown_parameter")
    if _count(given, "n", None, least=1) not in (None, 1):
        raise bad_request("n", "one answer a request is all there is", "unsupported_value")
    return given


def _common(body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """What both endpoints take; `temperature` is 1 when it is not given, as OpenAI has it."""
    ask: dict[str, Any] = {"op": "generate", "temperature": 1}
    ask |= {name: body[name] for name in SAME if name in body}
    _check_temperature(ask["temperature"])
    ask["stop"] = _stop(body.get("stop", []))
    return ask, {}


def _check_temperature(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type("temperature", "a number")
    if value < 0:
        raise bad_request("temperature", "has to be at least 0", "decimal_below_min_value")


def _stop(stop: Any) -> list[str]:
    """A text, or a list of some."""
    if isinstance(stop, str):
        named = [("stop", stop)]
    elif isinstance(stop, list):
        named = [(f"stop[{i}]", each) for i, each in enumerate(stop)]
    else:
        raise wrong_type("stop", "a text or a list of texts")
    if len(named) > MOST_STOPS:
        raise bad_request("stop", f"has to be at most {MOST_STOPS} texts", "array_above_max_length")
    for path, each in named:
        if not isinstance(each, str):
            raise wrong_type(path, "a text")
        if not each:
            raise bad_request(path, "has to be at least one character", "string_below_min_length")
        if len(each) > LONGEST_STOP:
            raise bad_request(path, f"has to be at most {LONGEST_STOP} characters", "string_above_max_length")
    return [each for _, each in named]


def _job(
    body: dict[str, Any], ask: dict[str, Any], names: dict[str, str], logprobs: int | None, usual_tokens: int | None
) -> Job:
    stream = _flag(body, "stream")
    options = body.get("stream_options", {})
    if not isinstance(options, dict):
        raise wrong_type("stream_options", "an object")
    for name in options:
        if name not in ("include_usage", "include_obfuscation"):
            raise bad_request(f"stream_options.{name}", "unknown parameter", "unknown_parameter")
    if options and not stream:
        raise bad_request("stream_options", "takes stream: true")
    if logprobs:
        ask["top_logprobs"] = logprobs
    usage = _flag(options, "include_usage", "stream_options.include_usage")
    return Job(body.get("model"), ask, names, stream, usage, logprobs, usual_tokens)


def _flag(body: dict[str, Any], name: str, path: str | None = None) -> bool:
    value = body.get(name, False)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise wrong_type(path or name, "true or false")
    return value


def _count(body: dict[str, Any], name: str, most: int | None, least: int = 0) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(name, "an integer")
    if value < least:
        raise bad_request(name, f"has to be at least {least}", "integer_below_min_value")
    if most is not None and value > most:
        raise bad_request(name, f"has to be at most {most}", "integer_above_max_value")
    return value


def _prompt(prompt: Any) -> str | list[int]:
    """A text, a list of token ids, or a list of one of these."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in prompt):
        return prompt
    if isinstance(prompt, list) and len(prompt) > 1 and all(isinstance(each, str | list) for each in prompt):
        raise bad_request("prompt", "one prompt a request is all there is", "unsupported_value")
    kinds = "a text or a list of token ids"
    raise missing("prompt", kinds) if prompt is None else wrong_type("prompt", kinds)


_MESSAGE_FIELDS = frozenset(("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"))
_EMPTY_IN_ANSWERS = frozenset(("refusal", "audio", "annotations", "function_call", "logprobs", "reasoning"))
"""Fields that an answer of OpenAI's carries along; sent back, they are left out if there is nothing in them."""


def _messages(messages: Any) -> list[dict[str, Any]]:
    if messages is None:
        raise missing("messages", "a list of messages")
    if not isinstance(messages, list):
        raise wrong_type("messages", "a list of messages")
    if not messages:
        raise bad_request("messages", "there has to be a message", "empty_array")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _message(path: str, message: Any) -> dict[str, Any]:
    """One message for the chat template: content parts joined, `developer` called what templates call it."""
    if not isinstance(message, dict):
        raise wrong_type(path, "an object")
    given = {
        name: value
        for name, value in message.items()
        if value is not None and not (name in _EMPTY_IN_ANSWERS and not value)
    }
    for name in given:
        if name not in _MESSAGE_FIELDS:
            raise bad_request(f"{path}.{name}", "unknown parameter", "unknown_parameter")
    if "role" not in given:
        raise missing(f"{path}.role", "a text")
    if not isinstance(given["role"], str):
        raise wrong_type(f"{path}.role", "a text")
    if given["role"] == "developer":
        given["role"] = "system"
    content = given.get("content")
    if content is None and not given.get("tool_calls"):
        raise missing(f"{path}.content", "a text or a list of text parts")
    if isinstance(content, list):
        given["content"] = "".join(_part(f"{path}.content[{i}]", part) for i, part in enumerate(content))
    elif content is not None and not isinstance(content, str):
        raise wrong_type(f"{path}.content", "a text or a list of text parts")
    return given


def _part(path: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise wrong_type(path, "an object with a type")
    for name, what in (("type", "the kind of part"), ("text", "a text")):
        value = part.get(name)
        if value is None:
            raise missing(f"{path}.{name}", what)
        if not isinstance(value, str):
            raise wrong_type(f"{path}.{name}", what)
        if name == "type" and value != "text":
            raise bad_request(f"{path}.type", "only text parts are supported", "invalid_value")
    return str(part["text"])


def check_model(asked: Any, served: tuple[str, ...]) -> None:
    """Whether this model is served here. Raises ApiError 404 so that nobody talks to another one unknowingly."""
    if asked is None or asked in served:
        return
    if not isinstance(asked, str):
        raise wrong_type("model", "a text")
    raise ApiError(404, "model_not_found", f"the model {asked[:100]!r} is not served here; {served[0]!r} is")
