"""The messages of the wire: frozen requests and events, a line to an object, an event to a line.

`parse` turns one line into a request, or into a `Refusal` that says what is wrong with it and where; it never raises.
`encode` turns one event into one line of ASCII. Neither knows in which order messages may come: that is session.py.

"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from reflex_ipc import strict_json
from reflex_ipc.errors import InvalidJsonError, InvalidRequestError
from reflex_ipc.sampler import MAX_TOP_LOGPROBS
from reflex_ipc.stops import DEFAULT_MAX_TOKENS, MAX_STOP_CHARS, MAX_STOPS

PROTOCOL = 1
LARGEST_INTEGER = 2**53
LONGEST_ID = 128  # bytes of UTF-8

Id = int | str


class Limits(NamedTuple):
    """What one process takes from its clients; `hello` lists them all. None: nothing beyond the model's own bound."""

    line_bytes: int = 4 << 20  # one line, without its newline; also what is read ahead while a request runs
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    write_timeout_ms: int = 30_000  # how long a reader may leave one event unread
    connections: int = 1

    def to_wire(self) -> dict[str, int | None]:
        fixed = {
            "id_bytes": LONGEST_ID,
            "integer": LARGEST_INTEGER,
            "nesting": strict_json.DEEPEST_NESTING,
            "stop_strings": MAX_STOPS,
            "stop_string_chars": MAX_STOP_CHARS,
            "top_logprobs": MAX_TOP_LOGPROBS,
        }
        return {**self._asdict(), **fixed}


# Requests


class Generate(NamedTuple):
    """Continue a prompt: exactly one of `prompt`, `tokens` and `messages` is not None."""

    id: Id
    prompt: str | None = None
    tokens: tuple[int, ...] | None = None
    messages: list[dict[str, Any]] | None = None
    template_arguments: dict[str, Any] | None = None
    max_tokens: int = DEFAULT_MAX_TOKENS
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    prompt_logprobs: bool = False
    deadline_ms: int | None = None
    sampling: Mapping[str, Any] = MappingProxyType({})  # keyword arguments of Sampling, which checks their ranges


class Score(NamedTuple):
    """Score candidates as continuations: exactly one of `prompt` and `messages` is not None."""

    id: Id
    candidates: tuple[str, ...]
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    template_arguments: dict[str, Any] | None = None
    normalize: str = "sum"
    temperature: float = 1.0
    join: str = ""
    end: bool = False
    neutral: str | None = None
    deadline_ms: int | None = None


class Tokenize(NamedTuple):
    id: Id
    text: str
    special: bool = True


class Detokenize(NamedTuple):
    id: Id
    tokens: tuple[int, ...]


class Info(NamedTuple):
    id: Id


class Cancel(NamedTuple):
    id: Id
    target: Id


Request = Generate | Score | Tokenize | Detokenize | Info | Cancel


class Refusal(NamedTuple):
    """A line that is no request: the id if it could be read, an error code, and the field the message speaks of."""

    id: Id | None
    code: str
    message: str
    field: str | None = None


# Events


class Hello(NamedTuple):
    protocol: int
    version: str
    ops: tuple[str, ...]
    limits: Mapping[str, int | None]


class Loading(NamedTuple):
    phase: str
    bytes: int
    total: int


class Ready(NamedTuple):
    model: Mapping[str, Any]
    timings: Mapping[str, float]


class Started(NamedTuple):
    id: Id
    prompt_tokens: int


class Prompt(NamedTuple):
    """One token of the prompt, where its log-probabilities were asked for. The first has none."""

    id: Id
    index: int  # type: ignore[assignment]
    token: int
    text: str
    logprob: float | None
    bytes: tuple[int, ...] | None = None
    top_logprobs: Sequence[Mapping[str, Any]] | None = None


class Token(NamedTuple):
    """One token. `token` is None where withheld text is flushed; `bytes` are there where they aren't whole UTF-8."""

    id: Id
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    token: int | None
    text: str
    logprob: float | None
    bytes: tuple[int, ...] | None = None
    top_logprobs: Sequence[Mapping[str, Any]] | None = None


class Done(NamedTuple):
    id: Id
    finish_reason: str
    text: str
    usage: Mapping[str, int]
    timings: Mapping[str, float]


class Result(NamedTuple):
    """The answer of everything but `generate`; its fields depend on the op and stand in the event itself."""

    id: Id
    fields: Mapping[str, Any]


class Error(NamedTuple):
    """`fatal` (with the process's exit code, where it ends) means that nothing follows on this connection."""

    id: Id | None
    code: str
    message: str
    field: str | None = None
    fatal: bool | None = None
    exit_code: int | None = None


Event = Hello | Loading | Ready | Started | Prompt | Token | Done | Result | Error

EVENT_NAMES: dict[type, str] = {
    kind: kind.__name__.lower() for kind in (Hello, Loading, Ready, Started, Prompt, Token, Done, Result, Error)
}
_LEFT_OUT_WHEN_NONE = frozenset({"bytes", "top_logprobs", "field", "fatal", "exit_code"})


def encode(event: Event) -> bytes:
    """The event as one line: ASCII JSON and a newline."""
    wire: dict[str, Any] = {}
    for name, value in event._asdict().items():
        if value is None and name in _LEFT_OUT_WHEN_NONE:
            continue
        if name == "fields":
            wire.update(value)
        elif name == "timings":
            wire[name] = {phase: round(milliseconds, 3) for phase, milliseconds in value.items()}
        else:
            wire[name] = value
        if name == "id":
            wire["event"] = EVENT_NAMES[type(event)]
    if "event" not in wire:
        wire = {"event": EVENT_NAMES[type(event)], **wire}
    try:
        line = orjson.dumps(wire)
    except orjson.JSONEncodeError:  # a file name that is not UTF-8 carries lone surrogates
        line = orjson.dumps(_without_surrogates(wire))
    if not line.isascii():
        # Escaping the finished line character by character in Python costs 50 times more on long texts.
        import json

        line = json.dumps(orjson.loads(line), separators=(",", ":")).encode()
    return line + b"\n"


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_without_surrogates(key): _without_surrogates(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_surrogates(each) for each in value]
    return value


# From a line to a request


def parse(line: bytes, limits: Limits) -> Request | Refusal:
    """The request on this line (its newline removed), or what is wrong with it."""
    try:
        message = strict_json.loads(line)
    except strict_json.NotAllowed as error:
        field = None if error.path is None else strict_json.written(error.path)
        return Refusal(None if field == "id" else find_id(line), InvalidJsonError.code, str(error), field)
    if not isinstance(message, dict):
        return Refusal(None, InvalidRequestError.code, "a request is a JSON object")
    id: Id | None = None
    try:
        id = _id("id", _required("id", message))
        op = _required("op", message)
        if not isinstance(op, str) or op not in _PARSERS:
            raise _Wrong("op", f"unknown; this engine knows {', '.join(OPS)}")
        return _PARSERS[op](id, message, limits)
    except _Wrong as wrong:
        field, why = strict_json.clipped(wrong.args[0]), wrong.args[1]
        return Refusal(id, InvalidRequestError.code, f"{field}: {why}", field)


def find_id(line: bytes) -> Id | None:
    """The id of a line that is not a valid request, or only the start of a line; None if none can be read.

    The first 10,000 lexemes are looked at: strings count as one, so this covers what people send and bounds the rest.
    """
    for path, value in strict_json.members(line, most=10_000):
        if path == ("id",):
            try:
                return _id("id", orjson.loads(value))
            except (_Wrong, orjson.JSONDecodeError):
                return None
    return None


class _Wrong(Exception):
    """A field that is not what it must be: (path of the field, what it must be)."""


# A checker takes (path of the field, decoded value), returns the value for the request or raises _Wrong.
_Check = Callable[[str, Any], Any]


def _required(field: str, message: dict[str, Any]) -> Any:
    if field not in message:
        raise _Wrong(field, "missing")
    return message[field]


def _id(field: str, value: Any) -> Id:
    if isinstance(value, str):
        if len(value.encode()) <= LONGEST_ID:
            return value
    elif type(value) is int and abs(value) <= LARGEST_INTEGER:
        return value
    raise _Wrong(field, f"must be a string of at most {LONGEST_ID} bytes or an integer within ±2^53")


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _Wrong(field, "must be a string")
    return value


def _boolean(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Wrong(field, "must be true or false")
    return value


def _number(field: str, value: Any) -> float:
    if type(value) not in (int, float) or abs(value) > LARGEST_INTEGER:
        raise _Wrong(field, "must be a number within ±2^53")
    return value  # type: ignore[no-any-return]


def _integer(low: int, high: int = LARGEST_INTEGER) -> _Check:
    def check(field: str, value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            top = "2^53" if high == LARGEST_INTEGER else str(high)
            bottom = "-2^53" if low == -LARGEST_INTEGER else str(low)
            raise _Wrong(field, f"must be an integer from {bottom} to {top}")
        return value

    return check


def _token_ids(field: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _Wrong(field, "must be a list of token ids")
    for place, each in enumerate(value):
        if type(each) is not int or not 0 <= each <= LARGEST_INTEGER:
            raise _Wrong(f"{field}[{place}]", "must be a token id")
    return tuple(value)


def _stop_strings(field: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_STOPS:
        raise _Wrong(field, f"must be a list of at most {MAX_STOPS} strings")
    for place, each in enumerate(value):
        if not isinstance(each, str) or not 0 < len(each) <= MAX_STOP_CHARS:
            raise _Wrong(f"{field}[{place}]", f"must be a string of 1 to {MAX_STOP_CHARS} characters")
    return tuple(value)


def _candidates(field: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise _Wrong(field, "must be a list of at least one string")
    for place, each in enumerate(value):
        if not isinstance(each, str) or not each:
            raise _Wrong(f"{field}[{place}]", "must be a string that is not empty")
    return tuple(value)


def _neutral(field: str, value: Any) -> str:
    if not _text(field, value):
        raise _Wrong(field, "must be a string that is not empty")
    return value  # type: ignore[no-any-return]


def _logit_bias(field: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise _Wrong(field, "must be an object from token ids to numbers")
    bias = {}
    for key, each in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key):
            raise _Wrong(f"{field}.{key}", "its name must be a token id")
        bias[int(key)] = _number(f"{field}.{key}", each)
    return bias


def _messages(field: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise _Wrong(field, "must be a list of at least one message")
    for place, each in enumerate(value):
        if not isinstance(each, dict):
            raise _Wrong(f"{field}[{place}]", "must be an object")
        _text(f"{field}[{place}].role", each.get("role"))
        _free(f"{field}[{place}]", each)
    return value


def _object(field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(field, "must be an object")
    _free(field, value)
    return value


def _free(field: str, value: Any) -> None:
    """Check the numbers in a value whose meaning is the chat template's (recursion: nesting is bounded by then)."""
    if isinstance(value, dict):
        for key, each in value.items():
            _free(f"{field}.{key}", each)
    elif isinstance(value, list):
        for place, each in enumerate(value):
            _free(f"{field}[{place}]", each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        _number(field, value)


_SAMPLING: dict[str, _Check] = {
    "temperature": _number,
    "top_k": _integer(0),
    "top_p": _number,
    "min_p": _number,
    "repeat_penalty": _number,
    "repeat_last_n": _integer(-1),
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "logit_bias": _logit_bias,
    "seed": _integer(-LARGEST_INTEGER),
    "top_logprobs": _integer(0, MAX_TOP_LOGPROBS),
}
_GENERATE: dict[str, _Check] = {
    "prompt": _text,
    "tokens": _token_ids,
    "messages": _messages,
    "template_arguments": _object,
    "max_tokens": _integer(0),
    "stop": _stop_strings,
    "ignore_eos": _boolean,
    "prompt_logprobs": _boolean,
    "deadline_ms": _integer(1),
    **_SAMPLING,
}


def _checked(message: dict[str, Any], checks: Mapping[str, _Check]) -> dict[str, Any]:
    """Every field of the message but `id` and `op`, checked; one that has no check is unknown."""
    fields = {}
    for field, value in message.items():
        if field in ("id", "op"):
            continue
        check = checks.get(field)
        if check is None:
            raise _Wrong(field, f"unknown field; {message['op']} takes {', '.join(checks) or 'none'}")
        fields[field] = check(field, value)
    return fields


def _generate(id: Id, message: dict[str, Any], limits: Limits) -> Generate:
    fields = _checked(message, _GENERATE)
    given = [name for name in ("prompt", "tokens", "messages") if name in fields]
    if len(given) != 1:
        raise _Wrong(given[1] if given else "prompt", "exactly one of prompt, tokens and messages must be given")
    if "template_arguments" in fields and given != ["messages"]:
        raise _Wrong("template_arguments", "goes with messages only")
    sampling = {name: fields.pop(name) for name in _SAMPLING if name in fields}
    most = limits.max_tokens or LARGEST_INTEGER
    if fields.setdefault("max_tokens", min(DEFAULT_MAX_TOKENS, most)) > most:
        raise _Wrong("max_tokens", f"must be at most {most}, this engine's limit")
    return Generate(id, sampling=sampling, **fields)


_SCORE: dict[str, _Check] = {
    "prompt": _text,
    "messages": _messages,
    "template_arguments": _object,
    "candidates": _candidates,
    "normalize": _text,
    "temperature": _number,
    "join": _text,
    "end": _boolean,
    "neutral": _neutral,
    "deadline_ms": _integer(1),
}


def _score(id: Id, message: dict[str, Any], limits: Limits) -> Score:
    _required("candidates", message)
    fields = _checked(message, _SCORE)
    if ("prompt" in fields) == ("messages" in fields):
        raise _Wrong("prompt", "exactly one of prompt and messages must be given")
    if "template_arguments" in fields and "messages" not in fields:
        raise _Wrong("template_arguments", "goes with messages only")
    return Score(id, **fields)


def _tokenize(id: Id, message: dict[str, Any], limits: Limits) -> Tokenize:
    _required("text", message)
    return Tokenize(id, **_checked(message, {"text": _text, "special": _boolean}))


def _detokenize(id: Id, message: dict[str, Any], limits: Limits) -> Detokenize:
    _required("tokens", message)
    return Detokenize(id, **_checked(message, {"tokens": _token_ids}))


def _info(id: Id, message: dict[str, Any], limits: Limits) -> Info:
    return Info(id, **_checked(message, {}))


def _cancel(id: Id, message: dict[str, Any], limits: Limits) -> Cancel:
    _required("target", message)
    return Cancel(id, **_checked(message, {"target": _id}))


_PARSERS: dict[str, Callable[[Id, dict[str, Any], Limits], Request]] = {
    "generate": _generate,
    "score": _score,
    "tokenize": _tokenize,
    "detokenize": _detokenize,
    "info": _info,
    "cancel": _cancel,
}
OPS = tuple(_PARSERS)
