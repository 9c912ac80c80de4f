"""JSON as the protocol allows it: orjson, and what orjson lets through and the protocol does not.

A key that stands twice in one object and nesting without end can be told from the line only: the decoded value no
longer shows them. What is broken can be looked through for what it holds all the same: `members` reads any bytes.
"""

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import orjson

DEEPEST_NESTING = 32

Path = tuple[str | int, ...]
"""Where a value stands: keys and indices, from the outside in."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[]{}:"))
_LEXEME = re.compile(_STRING.pattern + rb'|[\[\]{}:,]|[^\s"\[\]{}:,]+', re.DOTALL)


class NotAllowed(ValueError):
    """What is wrong with the line; `path` says where, if it is a matter of a member."""

    def __init__(self, message: str, path: Path | None = None):
        super().__init__(message)
        self.path = path


def loads(line: bytes) -> Any:
    """The value on the line. Raises NotAllowed.

    With its strings taken out, a line of valid JSON has as many colons as members, and a dict has lost those whose key
    came again. So counting finds a double key without reading the line a second time key by key.
    """
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise NotAllowed(f"not JSON that the protocol allows: {error}") from None
    skeleton = _STRING.sub(b"", line).translate(None, _NO_STRUCTURE)
    depth = deepest = 0
    for mark in skeleton:
        if mark in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif mark in b"]}":
            depth -= 1
    if deepest > DEEPEST_NESTING:
        raise NotAllowed(f"nested deeper than {DEEPEST_NESTING} at {_deep_place(line)}")
    if skeleton.count(b":") != _member_count(value):
        raise _double_key(line)
    return value


def members(line: bytes, most: int | None = None) -> Iterator[tuple[Path, bytes]]:
    """(path, first lexeme of the value) of each member of each object on the line, which may be broken anywhere."""
    path: list[str | int] = []  # the key or index at each level that is open
    key = None  # the string that will be a key if a colon follows
    after_colon = False
    for match in islice(_LEXEME.finditer(line), most):
        lexeme = match[0]
        if after_colon:
            after_colon = False
            if match.end() < len(line):  # the last lexeme of a cut line may be cut too
                yield tuple(path), lexeme
        if lexeme == b":":
            if key is not None and path and isinstance(path[-1], str):
                path[-1] = key
                after_colon = True
        elif lexeme in b"{[":
            path.append(0 if lexeme == b"[" else "")
        elif lexeme in b"}]":
            if path:
                path.pop()
        elif lexeme == b"," and path and isinstance(path[-1], int):
            path[-1] += 1
        key = _key(lexeme) if lexeme.startswith(b'"') else None


def written(path: Path) -> str:
    """("messages", 0, "role") -> messages[0].role"""
    parts = [f"[{each}]" if isinstance(each, int) else f".{each}" for each in path]
    return clipped("".join(parts).removeprefix("."))


def clipped(text: str) -> str:
    """A key can be as long as a line; what an error says of it is not."""
    return text if len(text) <= 200 else text[:200] + "..."


def _member_count(value: Any) -> int:
    if isinstance(value, dict):
        return len(value) + sum(map(_member_count, value.values()))
    if isinstance(value, list):
        return sum(_member_count(each) for each in value if isinstance(each, dict | list))
    return 0


def _double_key(line: bytes) -> NotAllowed:
    seen = set()
    for path, _ in members(line):
        if path in seen:
            return NotAllowed(f"{written(path)}: the key stands twice in one object", path)
        seen.add(path)
    raise AssertionError("members are missing, but no key stands twice")


def _deep_place(line: bytes) -> str:
    depth = 0
    for match in _LEXEME.finditer(line):
        depth += (match[0] in b"{[") - (match[0] in b"}]")
        if depth > DEEPEST_NESTING:
            return f"column {match.start() + 1}"
    return "its end"


def _key(lexeme: bytes) -> str | None:
    try:
        return orjson.loads(lexeme)  # type: ignore[no-any-return]
    except orjson.JSONDecodeError:
        return None
