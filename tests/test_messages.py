"""Lines to requests and events to lines, against the standard library's json as the second opinion."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflex_ipc import messages
from reflex_ipc.messages import Cancel, Detokenize, Done, Error, Generate, Hello, Info, Limits, Refusal, Token, Tokenize

LIMITS = Limits()


def parse(line: str | bytes, limits: Limits = LIMITS) -> Any:
    return messages.parse(line.encode() if isinstance(line, str) else line, limits)


def refused(line: str | bytes, code: str, id: Any, *words: str) -> Refusal:
    """The line is refused with this code and this id, and the message has these words."""
    refusal = parse(line)
    assert isinstance(refusal, Refusal), refusal
    assert (refusal.code, refusal.id) == (code, id), refusal
    for word in words:
        assert word in refusal.message, refusal
    return refusal


# Requests


def test_every_request() -> None:
    assert parse('{"id":1,"op":"generate","prompt":"Hi"}') == Generate(1, prompt="Hi")
    assert parse('{"op":"info","id":"a"}') == Info("a")
    assert parse('{"id":1,"op":"tokenize","text":"<|im_end|>","special":false}') == Tokenize(1, "<|im_end|>", False)
    assert parse('{"id":1,"op":"detokenize","tokens":[1,2]}') == Detokenize(1, (1, 2))
    assert parse('{"id":9,"op":"cancel","target":"x"}') == Cancel(9, "x")


def test_generate_with_every_field() -> None:
    sampling = {
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0,
        "repeat_penalty": 1.1,
        "repeat_last_n": -1,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.1,
        "logit_bias": {"5": -1.5, "0": 2},
        "seed": -(2**53),
        "top_logprobs": 20,
    }
    others = {"max_tokens": 0, "stop": ["a", "b"], "ignore_eos": True, "deadline_ms": 1}
    line = json.dumps({"id": 1, "op": "generate", "tokens": [3, 4], **others, **sampling})
    assert parse(line) == Generate(
        1,
        tokens=(3, 4),
        max_tokens=0,
        stop=("a", "b"),
        ignore_eos=True,
        deadline_ms=1,
        sampling={**sampling, "logit_bias": {5: -1.5, 0: 2}},
    )
    chat = {"messages": [{"role": "user", "content": "Hi"}], "template_arguments": {"enable_thinking": False}}
    assert parse(json.dumps({"id": 1, "op": "generate", **chat})) == Generate(1, **chat)


@pytest.mark.parametrize("id", [0, -1, 2**53, -(2**53), "", "x" * 128, "é" * 64, "\x00", "😀"])
def test_ids_that_are_taken(id: int | str) -> None:
    assert parse(json.dumps({"id": id, "op": "info"})) == Info(id)
    assert parse(json.dumps({"id": 1, "op": "cancel", "target": id})) == Cancel(1, id)


@pytest.mark.parametrize(
    "id",
    ["9007199254740993", "-9007199254740993", "1" * 30, "1e3", "1.0", "true", "null", "[]", "{}"],
)
def test_ids_that_are_not(id: str) -> None:
    assert refused(f'{{"id":{id},"op":"info"}}', "invalid_request", None, "id:", "128 bytes", "2^53").field == "id"
    line = f'{{"id":1,"op":"cancel","target":{id}}}'
    assert refused(line, "invalid_request", 1, "target:").field == "target"


def test_ids_are_at_most_128_bytes_long() -> None:
    for id in ("x" * 129, "é" * 65):
        assert refused(json.dumps({"id": id, "op": "info"}), "invalid_request", None, "128 bytes").field == "id"


FIELDS = {
    # field of generate: values that are refused
    "prompt": ["1", "null", "[1]"],
    "tokens": ["1", '"1"', "[1.0]", "[-1]", "[true]", "[null]", "[9007199254740993]", "[[1]]"],
    "messages": ['"Hi"', "[]", "[1]", "[{}]", '[{"role":1}]', '[{"role":"user","content":1e300}]'],
    "max_tokens": ["-1", "1.5", "true", '"1"', "9007199254740993", "1e2", "null"],
    "stop": ['"a"', "[1]", '[""]', json.dumps(["a"] * 17), json.dumps(["a" * 257]), "{}"],
    "ignore_eos": ["1", "null", '"true"'],
    "deadline_ms": ["0", "-1", "1.5", "1e999999"],
    "temperature": ['"1"', "null", "true", "[1]", "1e300", "-1e16"],
    "top_k": ["-1", "1.0"],
    "top_p": ['"0.5"'],
    "min_p": ["{}"],
    "repeat_penalty": ["[]"],
    "repeat_last_n": ["-2", "0.5"],
    "presence_penalty": ["false"],
    "frequency_penalty": ["null"],
    "logit_bias": ["[]", '{"a":1}', '{"-1":1}', '{"01":1}', '{"1":"x"}', '{"1.0":1}', '{"99999999999":1}', '{"٣":1}'],
    "seed": ["9007199254740993", "1.0", "null", "-9007199254740993", "18446744073709551616"],
    "top_logprobs": ["21", "-1", "true"],
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_bad_value_is_refused_by_name(field: str) -> None:
    prompt = "" if field in ("prompt", "tokens", "messages") else '"prompt":"x",'
    for value in FIELDS[field]:
        line = f'{{"id":"é","op":"generate",{prompt}"{field}":{value}}}'
        refusal = parse(line)
        assert isinstance(refusal, Refusal), line
        assert refusal.id == "é", line
        if refusal.code == "invalid_request":
            assert refusal.field is not None and refusal.field.split(".")[0].split("[")[0] == field, refusal
            assert refusal.message.startswith(refusal.field + ": "), refusal
        else:
            assert value == "1e999999"  # no JSON number that a double can hold: there is no field yet


def test_the_place_is_named() -> None:
    def field(line: str) -> str | None:
        return refused(line, "invalid_request", 1).field

    assert field('{"id":1,"op":"generate","tokens":[1,2,"3"]}') == "tokens[2]"
    assert field('{"id":1,"op":"generate","prompt":"","stop":["a",""]}') == "stop[1]"
    assert field('{"id":1,"op":"score","prompt":"","candidates":["a",""]}') == "candidates[1]"
    assert field('{"id":1,"op":"score","prompt":"","candidates":["a"],"neutral":""}') == "neutral"
    assert field('{"id":1,"op":"generate","messages":[{"role":"user"},{"role":2}]}') == "messages[1].role"
    assert field('{"id":1,"op":"generate","prompt":"","logit_bias":{"x":2}}') == "logit_bias.x"
    deep = '{"id":1,"op":"generate","messages":[{"role":"a"}],"template_arguments":{"tools":[{"n":1e20}]}}'
    assert field(deep) == "template_arguments.tools[0].n"


def test_unknown_and_missing_fields() -> None:
    refusal = refused('{"id":1,"op":"generate","prompt":"","temprature":1}', "invalid_request", 1, "temperature")
    assert refusal.field == "temprature"
    assert refused('{"id":1,"op":"info","prompt":""}', "invalid_request", 1).field == "prompt"
    assert refused('{"id":1,"op":"embed"}', "invalid_request", 1, "generate").field == "op"
    assert refused('{"id":1,"op":"score","prompt":"x"}', "invalid_request", 1, "missing").field == "candidates"
    assert refused('{"id":1,"op":["generate"]}', "invalid_request", 1).field == "op"
    assert refused('{"id":1}', "invalid_request", 1, "missing").field == "op"
    assert refused('{"op":"info"}', "invalid_request", None, "missing").field == "id"
    assert refused('{"id":1,"op":"tokenize"}', "invalid_request", 1, "missing").field == "text"
    assert refused('{"id":1,"op":"detokenize"}', "invalid_request", 1, "missing").field == "tokens"
    assert refused('{"id":1,"op":"cancel"}', "invalid_request", 1, "missing").field == "target"


def test_a_key_as_long_as_a_line() -> None:
    long = "x" * 100_000
    for line in (f'{{"id":1,"op":"info","{long}":1}}', f'{{"id":1,"op":"info","{long}":1,"{long}":1}}'):
        refusal = parse(line)
        assert refusal.id == 1 and refusal.field == "x" * 200 + "..." and len(refusal.message) < 600


def test_exactly_one_prompt() -> None:
    for prompts in ("", ',"prompt":"a","tokens":[1]', ',"tokens":[1],"messages":[{"role":"user"}]'):
        refused(f'{{"id":1,"op":"generate"{prompts}}}', "invalid_request", 1, "exactly one of prompt, tokens and")
    line = '{"id":1,"op":"generate","prompt":"a","template_arguments":{}}'
    assert refused(line, "invalid_request", 1).field == "template_arguments"


@pytest.mark.parametrize("line", ["1", '"x"', "[]", "null", "true", '[{"id":1,"op":"info"}]'])
def test_a_line_that_is_no_object(line: str) -> None:
    refused(line, "invalid_request", None, "object")


def test_limits_on_tokens() -> None:
    limits = Limits(max_tokens=10, prompt_tokens=2)
    assert parse('{"id":1,"op":"generate","prompt":""}', limits).max_tokens == 10
    assert parse('{"id":1,"op":"generate","prompt":"","max_tokens":10}', limits).max_tokens == 10
    assert parse('{"id":1,"op":"generate","prompt":"","max_tokens":11}', limits).field == "max_tokens"
    assert parse('{"id":1,"op":"generate","tokens":[1,2]}', limits).tokens == (1, 2)
    assert parse('{"id":1,"op":"generate","prompt":""}').max_tokens == 128


# What JSON libraries let through


@pytest.mark.parametrize(
    "tail",
    [
        *(
            "NaN",
            "Infinity",
            "-Infinity",
            "1e999",
            "01",
            "1.",
            ".5",
            "+1",
            "0x1",
            "'a'",
            "{}}",
            "{",
            "",
            "1,",
            "undefined",
        ),
        *('"\\ud800"', '"\\udc00"', '"\\ud800x"', '"\\udc00\\ud800"', '"\t"', '"\x01"', '"\\x"', '"a'),
    ],
)
def test_what_is_not_json(tail: str) -> None:
    refused(f'{{"id":7,"op":"generate","prompt":{tail}}}', "invalid_json", 7, "column")


def test_bytes_that_are_not_utf8() -> None:
    for tail in (b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xf5\x80\x80\x80"):
        refused(b'{"id":7,"op":"generate","prompt":"' + tail + b'"}', "invalid_json", 7)
    refused(b"\xef\xbb\xbf{}", "invalid_json", None)


def test_a_key_that_stands_twice() -> None:
    for line, id, field in [
        ('{"id":1,"op":"info","op":"info"}', 1, "op"),
        ('{"id":1,"op":"info","\\u006fp":"info"}', 1, "op"),
        ('{"id":1,"id":2,"op":"info"}', None, "id"),
        ('{"id":1,"id":1,"op":"info"}', None, "id"),
        ('{"op":"generate","id":1,"messages":[{"role":"a"},{"role":"b","role":"b"}]}', 1, "messages[1].role"),
        ('{"op":"generate","id":1,"messages":[],"x":{"a:":{"b":":","b":"\\":"}}}', 1, "x.a:.b"),
        ('{"op":"generate","id":1,"logit_bias":{"1":{"x":1},"1":2}}', 1, "logit_bias.1"),
        ('{"":1,"id":1,"":2}', 1, ""),
    ]:
        assert refused(line, "invalid_json", id, "twice").field == field
    many = '{"id":1,"op":"generate","messages":[{"role":"a","content":"::{}[]"},{"role":"a","name":"\\\\"}]}'
    assert parse(many).messages[0]["content"] == "::{}[]"


def test_nesting() -> None:
    def nested(depth: int) -> str:
        inner = "[" * (depth - 2) + "]" * (depth - 2)
        return '{"id":1,"op":"generate","messages":[{"role":"a"}],"template_arguments":{"a":@}}'.replace("@", inner)

    assert isinstance(parse(nested(32)), Generate)
    assert isinstance(parse(nested(32).replace('"a":[', '"a":[{},{},')), Generate)
    place = nested(33).index("]", 90) - 1
    refused(nested(33), "invalid_json", 1, "deeper than 32", f"column {place + 1}")
    refused(nested(1000), "invalid_json", 1, "deeper than 32")
    refused(nested(100_000), "invalid_json", 1, "depth")
    refused("[" * 1_000_000, "invalid_json", None)
    refused('{"a":' * 1_000_000, "invalid_json", None)


def test_whitespace_is_fine() -> None:
    assert parse(b' \t{ "id" : 1 ,\t"op" : "info" } \r') == Info(1)


def test_the_id_is_read_from_what_is_broken() -> None:
    for line, id in [
        ('{"op":"generate","prompt":"a"b","id":5}', None),  # the quotes have changed places
        ('{"op":"generate" "prompt":"a","id":5}', 5),
        ('{"op":"generate","prompt":NaN,"id":"\\u00e9"}', "é"),
        ('{"prompt":{"id":3},"id":4,', 4),
        ('{"prompt":["id",3],"x":{"id":3}', None),
        ('{"id":5', None),  # it may go on
        ('{"id":56,"op', 56),
        ('{"id":1.5,"op', None),
        ('{"id":"\\ud800","op', None),
        ('["id":5,]', None),
        ('"id":5,', None),
        ("}}}{]", None),
    ]:
        assert messages.find_id(line.encode()) == id, line


# Fuzzing

BASES = [
    '{"id":1,"op":"generate","prompt":"Hi \\u00e9\\ud83d\\ude00: {}","stop":["\\n\\n"],"temperature":0.5}',
    '{"id":"a","op":"generate","tokens":[1,22,333],"logit_bias":{"1":-1.5,"2":0},"seed":9007199254740992}',
    '{"op":"generate","messages":[{"role":"user","content":[{"type":"text"}]}],"id":-3,"template_arguments":{"a":[{}]}}',
    '{"id":9,"op":"cancel","target":"a"}',
    '{"id":0,"op":"tokenize","text":"\\\\\\"","special":true}',
    '{"op":"detokenize","tokens":[0],"id":9007199254740993}',
    ' {"id" : "x" , "op" : "info" } \r',
]
PIECES = [
    b'"',
    b"\\",
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b"-",
    b"0",
    b" ",
    b"NaN",
    b"Infinity",
    b"1e999",
    b".5",
    b"null",
]
PIECES += [b"\\ud800", b"\\u0069d", b'"id":5,', b'"op":"info",', b"\xff", b"\xc3\xa9", b"\x00", b"[" * 40, b"9" * 30]


def mutate(rng: random.Random, line: bytes) -> bytes:
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        at, to = sorted(rng.randrange(len(line) + 1) for _ in range(2))
        how = rng.randrange(5)
        if how == 0:
            line = line[:at] + rng.choice(PIECES) + line[at:]
        elif how == 1:
            line = line[:at] + bytes([rng.randrange(256)]) + line[at + 1 :]
        elif how == 2:
            line = line[:at] + line[to:]
        elif how == 3:
            line = line[:to] + line[at:]
        else:
            line = line[:at]
    return line.replace(b"\n", b" ")


class NotAllowed(Exception):
    pass


def _no_constant(text: str) -> Any:
    raise NotAllowed


def _finite(text: str) -> float:
    if abs(value := float(text)) == float("inf"):
        raise NotAllowed
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise NotAllowed
    return dict(pairs)


STRICT = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_once)


def _depth(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if children is None else 1 + max(map(_depth, children), default=0)


def second_opinion(line: bytes) -> tuple[bool, Any]:
    """(whether the line is JSON as the protocol allows, the value)"""
    try:
        text = line.decode()
        value = STRICT.decode(text)
        json.dumps(value, ensure_ascii=False).encode()  # no lone surrogates
        return _depth(value) <= 32, value
    except (ValueError, NotAllowed, RecursionError):
        return False, None


def test_fuzz() -> None:
    rng = random.Random(20240)
    outcomes = {"invalid_json": 0, "invalid_request": 0, "request": 0, "id": 0}
    for _ in range(110_000):
        line = mutate(rng, rng.choice(BASES).encode())
        result = messages.parse(line, LIMITS)
        valid, value = second_opinion(line)
        if isinstance(result, Refusal):
            outcomes[result.code] += 1
            assert (result.code == "invalid_request") == valid, line
            outcomes["id"] += result.id is not None
        else:
            outcomes["request"] += 1
            assert valid, line
        if valid and isinstance(value, dict):
            id = value.get("id")
            good = isinstance(id, str) or (type(id) is int and abs(id) <= 2**53)
            assert result.id == (id if good else None) and type(result.id) is type(id if good else None), line
        line_out = messages.encode(Error(*result[:4]) if isinstance(result, Refusal) else Error(result.id, "a", "b"))
        assert line_out.count(b"\n") == 1 and line_out.isascii()
    assert min(outcomes.values()) > 9_000, outcomes


# Events


def test_events_as_the_contract_writes_them() -> None:
    assert messages.encode(Token(1, 0, 12366, " Paris", -0.31)) == (
        b'{"id":1,"event":"token","index":0,"token":12366,"text":" Paris","logprob":-0.31}\n'
    )
    assert messages.encode(Error(None, "invalid_json", "x")) == (
        b'{"id":null,"event":"error","code":"invalid_json","message":"x"}\n'
    )
    assert messages.encode(Error(None, "model_file", "x", fatal=True, exit_code=3)) == (
        b'{"id":null,"event":"error","code":"model_file","message":"x","fatal":true,"exit_code":3}\n'
    )
    assert messages.encode(messages.Result(3, {"text": "x"})) == b'{"id":3,"event":"result","text":"x"}\n'
    assert messages.encode(Token(1, 1, None, "x", None)).endswith(b'"token":null,"text":"x","logprob":null}\n')
    partial = json.loads(messages.encode(Token(1, 1, 5, "", -1.0, (0xE2, 0x82))))
    assert partial["bytes"] == [0xE2, 0x82]
    done = messages.encode(Done(1, "stop", "x", {"prompt_tokens": 1}, {"prompt_ms": 1.23456}))
    assert done == (
        b'{"id":1,"event":"done","finish_reason":"stop","text":"x","usage":{"prompt_tokens":1},'
        b'"timings":{"prompt_ms":1.235}}\n'
    )
    hello = json.loads(messages.encode(Hello(1, "0", messages.OPS, LIMITS.to_wire())))
    assert list(hello) == ["event", "protocol", "version", "ops", "limits"]
    assert hello["limits"]["line_bytes"] == 4 << 20 and hello["limits"]["prompt_tokens"] is None


@given(st.text(), st.floats())
def test_every_event_is_one_line_of_ascii(text: str, number: float) -> None:
    line = messages.encode(Token(text, 0, None, text, number))
    assert line.isascii() and line.index(b"\n") == len(line) - 1
    read = json.loads(line, parse_constant=_no_constant)
    assert read["text"] == read["id"] == text
    finite = abs(number) < float("inf")
    assert read["logprob"] == (number if finite else None)


def test_a_file_name_that_is_not_utf8() -> None:
    line = messages.encode(Error(None, "model_file", "/tmp/\udcff\udcfe.gguf: missing é", "\udc80"))
    read = json.loads(line)
    assert read["message"] == "/tmp/\\udcff\\udcfe.gguf: missing é" and read["field"] == "\\udc80"
    assert parse(json.dumps({"id": read["message"], "op": "info"})).id == read["message"]
