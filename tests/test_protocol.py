"""protocol.md and protocol.schema.json against the engine and the table: what they say is what happens."""

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from reflex_ipc import errors, messages, scoring
from reflex_ipc.chat import ChatTemplate
from reflex_ipc.messages import Limits, Refusal
from reflex_ipc.sampler import Sampling
from reflex_ipc.session import TRANSITIONS, State
from tests.wire import ROOT, Stdio

PAGE = (ROOT / "protocol.md").read_text()
SCHEMA = json.loads((ROOT / "protocol.schema.json").read_text())


def validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({**SCHEMA, "anyOf": [{"$ref": f"#/$defs/{name}"}]})


REQUEST, EVENT = validator("request"), validator("event")


def undeclared(event: Any, schema: dict[str, Any]) -> list[str]:
    """Keys that the schema has no word for; it allows them, because clients have to, but we should not send any."""
    while "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    if isinstance(event, list):
        return [each for item in event for each in undeclared(item, schema.get("items", {}))]
    if not isinstance(event, dict) or "properties" not in schema or schema["properties"].keys() >= {"n_ctx", "file"}:
        return []
    known = schema["properties"]
    return [key for key in event if key not in known] + [
        each for key, value in event.items() if key in known for each in undeclared(value, known[key])
    ]


# The examples


def conversations() -> list[tuple[str, list[str]]]:
    blocks = re.findall(r"^```(wire\S*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [(kind, text.splitlines()) for kind, text in blocks]


def same(written: Any, heard: Any, key: str = "") -> bool:
    """Whether an event is the one on the page, but for what differs from run to run and machine to machine."""
    if key in ("timings", "model"):
        # Measurements, and what may differ from model to model: the keys on the page are there.
        return written.keys() <= heard.keys() and (key == "timings" or all(written[k] == heard[k] for k in written))
    if isinstance(written, float) and isinstance(heard, float):
        return abs(written - heard) < 0.02
    if isinstance(written, dict):
        return written.keys() == heard.keys() and all(same(written[k], heard[k], k) for k in written)
    if isinstance(written, list):
        return len(written) == len(heard) and all(map(same, written, heard))
    return written == heard or (written == "…" and isinstance(heard, str))


def matches(written: dict[str, Any], heard: dict[str, Any]) -> bool:
    if written["event"] == heard["event"] == "loading":
        return written.keys() == heard.keys()
    if written.get("finish_reason") == "cancelled":
        written = {**written, "usage": heard["usage"]}
    return same(written, heard)


@pytest.mark.model
def test_the_examples(smollm2: Path) -> None:
    with Stdio(smollm2) as engine:
        for kind, lines in conversations():
            if kind == "wire":
                run(lines, engine)
        engine.end_input()
        assert engine.rest() == [] and engine.code() == 0


def run(lines: list[str], engine: Stdio) -> None:
    """Send what the page sends, and hear what it hears, in that order."""
    skipping = None  # the name of the events that are left out here
    for line in lines:
        mark, _, text = line.partition(" ")
        if mark == "->":
            engine.send(text.encode() + b"\n")
        elif mark == "…":
            skipping = "token"
        else:
            assert mark == "<-", line
            written = json.loads(text)
            heard = engine.event()
            while heard["event"] == (skipping or ("loading" if written["event"] == "ready" else None)):
                heard = engine.event()
            skipping = None
            EVENT.validate(heard)
            assert undeclared(heard, SCHEMA["$defs"][heard["event"]]) == []
            assert matches(written, heard), f"protocol.md has\n{text}\nand the engine says\n{json.dumps(heard)}"


def test_the_example_of_a_failed_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Stdio("missing.gguf") as engine:
        ((_, lines),) = [each for each in conversations() if each[0] == "wire-fatal"]
        run(lines, engine)
        assert engine.rest() == [] and engine.code() == 3


def test_every_message_has_an_example() -> None:
    texts = [line[3:] for _, lines in conversations() for line in lines if line[:2] in ("->", "<-")]
    shown: set[str] = set()
    for text in texts:
        try:
            message = json.loads(text)
        except ValueError:
            continue
        shown |= {message.get("event"), message.get("op")}
        if "event" in message:
            EVENT.validate(message)
    assert shown >= set(messages.OPS) | set(messages.EVENT_NAMES.values())
    headings = " ".join(re.findall(r"^### (.*)$", PAGE, re.MULTILINE))
    assert all(op in headings for op in messages.OPS)


# The tables on the page


def diagram() -> str:
    """The table as a diagram: an arrow for each pair of states, with everything that leads from one to the other."""
    lines = ["stateDiagram-v2", "    [*] --> loading"]
    for state, row in TRANSITIONS.items():
        for after in State:
            happenings = [each.value for each in row if row[each] is after]
            if happenings:
                lines.append(f"    {state.value} --> {after.value} : {', '.join(happenings)}")
    return "\n".join([*lines, "    closed --> [*]", ""])


def test_the_diagram_is_the_table() -> None:
    (written,) = re.findall(r"^```mermaid\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert written == diagram()


def test_error_codes_and_limits_are_all_there() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| *(\d*) *\|", PAGE, re.MULTILINE))
    for name, value in vars(errors).items():
        if isinstance(value, type) and getattr(value, "code", None) in rows:
            assert rows[value.code] == str(value.exit_code), name
    said = {"invalid_json", "invalid_request", "template", "model_file", "unsupported_model", "device"}
    said |= {"out_of_memory", "context_overflow", "cancelled", "deadline", "busy", "internal"}
    assert said <= rows.keys()
    section = PAGE[PAGE.index("## Limits") : PAGE.index("## The Unix socket")]
    defaults = dict(re.findall(r"^\| `(\w+)` \| ([\w; ]+?) ", section, re.MULTILINE))
    for name, value in Limits()._asdict().items():
        assert defaults[name].rstrip(";") == json.dumps(value)


def test_fields_and_limits_of_the_schema() -> None:
    definitions = SCHEMA["$defs"]
    for op in messages.OPS:
        kind = {"generate": messages.Generate, "tokenize": messages.Tokenize, "detokenize": messages.Detokenize}
        kind |= {"info": messages.Info, "cancel": messages.Cancel, "score": messages.Score}
        fields = set(kind[op]._fields) | {"op"}
        if op == "generate":
            fields = fields - {"sampling"} | set(Sampling.__slots__)
        assert set(definitions[op]["properties"]) == fields
    for kind_of_event, name in messages.EVENT_NAMES.items():
        if name != "result":
            assert set(definitions[name]["properties"]) == set(kind_of_event._fields) | {"event"}
    assert set(definitions["limits"]["properties"]) == set(Limits().to_wire())
    for name, definition in definitions["limits"]["properties"].items():
        assert definition.get("const", Limits().to_wire()[name]) == Limits().to_wire()[name]


# The schema against the parser

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3.5,
    -0.5,
    1e6 + 0.5,
    1e-3,
    2**31,
    2**53,
    2**53 + 1,
    -(2**53),
    "",
    "x",
]
VALUES += ["x" * 128, "x" * 129, "x" * 256, "x" * 257, [], [""], ["a"], ["a"] * 16, ["a"] * 17, [1, 2], [-1], [1.5]]
VALUES += [
    {},
    {"1": 0.5},
    {"01": 1},
    {"1": "x"},
    {"a": 1},
    [{"role": "user", "content": "x"}],
    [{"role": 1}],
    [{}],
    20,
    21,
    "sum",
    "pmi",
]


def test_the_schema_and_the_parser_agree() -> None:
    """Random requests: one is valid by the schema exactly if the engine takes it."""
    rng = random.Random(5)
    outcomes = {True: 0, False: 0}
    fields = {op: list(SCHEMA["$defs"][op]["properties"]) for op in messages.OPS}
    for _ in range(2500):
        op = rng.choice([*messages.OPS, "generate", "generate"])
        request: dict[str, Any] = {"id": rng.choice(VALUES[:20] if rng.random() < 0.2 else [1, "a"]), "op": op}
        for field in rng.sample(fields[op], rng.randrange(min(5, len(fields[op])))):
            if field not in ("id", "op"):
                fit = [each for each in VALUES if not list(validator_of(op, field).iter_errors(each))]
                request[field] = rng.choice(fit if rng.random() < 0.8 else VALUES)
        if op in ("generate", "score") and rng.random() < 0.7:
            request = {"prompt": "x", **request}
        if op == "score" and rng.random() < 0.7:
            request = {"candidates": ["a"], **request}
        if rng.random() < 0.05:
            request["unknown"] = 1
        valid = not list(REQUEST.iter_errors(request))
        assert accepted(request) == valid, request
        outcomes[valid] += 1
    assert min(outcomes.values()) > 800, outcomes


_validators: dict[tuple[str, str], jsonschema.Draft202012Validator] = {}


def validator_of(op: str, field: str) -> jsonschema.Draft202012Validator:
    if (op, field) not in _validators:
        definition = SCHEMA["$defs"][op]["properties"][field]
        _validators[op, field] = jsonschema.Draft202012Validator({"$defs": SCHEMA["$defs"], **definition})
    return _validators[op, field]


def accepted(request: dict[str, Any]) -> bool:
    parsed = messages.parse(json.dumps(request).encode(), Limits())
    if isinstance(parsed, Refusal):
        return False
    if isinstance(parsed, messages.Generate):
        try:
            Sampling(**parsed.sampling)
            if parsed.messages is not None:
                read_messages(parsed.messages)
        except errors.InvalidRequestError:
            return False
    if isinstance(parsed, messages.Score):
        try:
            scoring.check(parsed.candidates, scoring.Options(parsed.normalize, parsed.temperature))
            if parsed.messages is not None:
                read_messages(parsed.messages)
        except errors.InvalidRequestError:
            return False
    return True


MESSAGES: list[Any] = [
    {"role": "user", "content": "x"},
    {"role": "x", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": ""}]},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
    {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "name": "f", "arguments": {"a": [1]}}]},
    {"role": "tool", "content": "", "name": "f", "tool_call_id": "1", "reasoning_content": None},
]


def test_the_schema_and_the_template_reader_agree() -> None:
    """The same for messages: those above, each with one value exchanged, anywhere."""
    rng = random.Random(6)
    outcomes = {True: 0, False: 0}
    schema = validator("message")
    for _ in range(2500):
        message = json.loads(json.dumps(rng.choice(MESSAGES)))
        place = message
        while rng.random() < 0.5:
            key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
            if not isinstance(place[key], dict | list) or not place[key]:
                break
            place = place[key]
        key = rng.choice([*place, "extra", "name"]) if isinstance(place, dict) else rng.randrange(len(place))
        if isinstance(place, dict) and rng.random() < 0.3:
            place.pop(key, None)
        elif rng.random() < 0.8:
            place[key] = rng.choice([None, 1, "", "x", [], {}, [""], [{}], "text", {"name": "f"}, [{"name": "f"}]])
        valid = not list(schema.iter_errors(message))
        try:
            read_messages([message])
        except errors.InvalidRequestError:
            assert not valid, message
        else:
            assert valid, message
        outcomes[valid] += 1
    assert min(outcomes.values()) > 500, outcomes


def read_messages(conversation: list[dict[str, Any]]) -> None:
    """Raise InvalidRequestError for what no template is given, whatever it says."""
    ChatTemplate("{{ messages }}").render(conversation)
