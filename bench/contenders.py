"""Who is measured: contenders.toml read, programs found or compiled, prompts of a given length made."""

import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from measure import ROOT, Absent, MeasurementError

FILE = ROOT / "bench" / "contenders.toml"
FLOOR, REFLEX, DECISION = "floor", "reflex", "reflex system1"
DISKS = ("disk, direct", "disk, buffered")
"""Rows that others are held against; of the disk's the faster one."""
_OURS = ("floor", "disk")
"""Programs in C beside this file, compiled here and now; a command that has one's name in braces needs it."""


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(each) is kind for each in value)


_TEXT = ("a text", lambda value: isinstance(value, str))
_FLAG = ("true or false", lambda value: isinstance(value, bool))
_WORDS_OF_COMMAND = ("a list of texts", lambda value: _is_list(value, str))
_KEYS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "name": _TEXT,
    "command": _WORDS_OF_COMMAND,
    "binary": _TEXT,
    "env": ("texts by name", lambda value: isinstance(value, dict) and _is_list([*value.values()], str)),
    "echo": _FLAG,
    "prepare": _WORDS_OF_COMMAND,
    "prompt": _FLAG,
    "prompt_tokens": ("a list of counts", lambda value: _is_list(value, int) and min(value, default=1) > 0),
    "cache": ("warm or cold", lambda value: value in ("warm", "cold")),
}
"""What a contender may have, and what it has to be."""


class Contender(NamedTuple):
    """One way to start a process; contenders.toml says what the fields mean."""

    name: str
    command: tuple[str, ...]
    binary: str | None = None
    env: Mapping[str, str] = {}  # never changed
    echo: bool = False
    prepare: tuple[str, ...] = ()
    prompt: bool = True
    prompt_tokens: tuple[int, ...] = ()
    cache: str | None = None

    def argv(self, fields: Mapping[str, str], command: Sequence[str] | None = None) -> list[str]:
        """The command with its fields filled in, `{start}` being now."""
        now = repr(time.clock_gettime(time.CLOCK_MONOTONIC))
        words = []
        for word in self.command if command is None else command:
            for name, value in {**fields, "start": now}.items():
                word = word.replace("{" + name + "}", value)
            words.append(word)
        return words

    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.env}


Found = tuple[list[tuple[Contender, dict[str, str]]], list[Absent]]


def read(path: Path = FILE) -> list[Contender]:
    """Every contender of a file; MeasurementError names what is wrong in it."""
    try:
        tables = tomllib.loads(path.read_text()).get("contender", [])
    except (OSError, ValueError) as error:
        raise MeasurementError(f"{path}: {error}") from None
    if not _is_list(tables, dict) or not tables:
        raise MeasurementError(f"{path}: a list [[contender]] is needed")
    found = []
    for table in tables:
        unknown = table.keys() - _KEYS.keys()
        if unknown or "name" not in table or not table.get("command"):
            what = f"unknown keys {sorted(unknown)}" if unknown else "name and command are needed"
            raise MeasurementError(f"{path}: contender {table.get('name', '?')}: {what}")
        for key, value in table.items():
            what, holds = _KEYS[key]
            if not holds(value):
                raise MeasurementError(f"{path}: contender {table['name']}: {key} is {value!r}, not {what}")
        lists = {key: tuple(table[key]) for key in ("command", "prepare", "prompt_tokens") if key in table}
        found.append(Contender(**{**table, **lists}))
    names = [contender.name for contender in found]
    if len({*names}) < len(names):
        raise MeasurementError(f"{path}: two contenders have one name")
    return found


def choose(names: Sequence[str], binaries: Sequence[str], out: Path, path: Path = FILE) -> Found:
    """`locate` for those of a file with these names, all where none is given. `binaries` are of the form NAME=PATH, and
    `out` is where our own programs go."""
    every = read(path)
    if unknown := {*names} - {contender.name for contender in every}:
        raise MeasurementError(f"no contender is called {', '.join(sorted(unknown))}")
    if wrong := [pair for pair in binaries if "=" not in pair]:
        raise MeasurementError(f"--binary is NAME=PATH, not {wrong[0]}")
    named = [contender for contender in every if not names or contender.name in names]
    return locate(named, dict(pair.split("=", 1) for pair in binaries), out)


def locate(contenders: Sequence[Contender], binaries: Mapping[str, str], out: Path) -> Found:
    """(those that can run, with the fields of their commands), (those that cannot, and why)."""
    ready, absent = [], []
    for contender in contenders:
        fields = {"root": str(ROOT), "python": sys.executable}
        try:
            if contender.binary is not None:
                binary = binaries.get(contender.binary) or shutil.which(contender.binary)
                if binary is None or not os.access(binary, os.X_OK):
                    raise MeasurementError(f"no {contender.binary} on this machine")
                fields["binary"] = binary
            for name in _OURS:
                if any("{" + name + "}" in word for word in contender.command):
                    fields[name] = str(compiled(name, out))
        except MeasurementError as error:
            absent.append({"contender": contender.name, "why": str(error)})
            continue
        ready.append((contender, fields))
    return ready, absent


def compiled(name: str, out: Path) -> Path:
    """A program of `_OURS`; MeasurementError where there is no compiler for it."""
    program = out / name
    program.parent.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CC", "cc")
    part = program.with_name(f".{name}.{os.getpid()}")  # another call may be running the one that is there
    command = [compiler, "-O1", str(ROOT / "bench" / f"{name}.c"), "-o", str(part), "-ldl", "-lpthread"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
        part.rename(program)
    except (OSError, subprocess.CalledProcessError) as error:
        part.unlink(missing_ok=True)
        why = (getattr(error, "stderr", None) or str(error)).strip()
        raise MeasurementError(f"bench/{name}.c does not compile: {why}") from None
    return program


_WORDS = (
    *("The", "capital", "of", "France", "is", "a", "city", "on", "the", "river"),
    *("where", "people", "live", "and", "work", "most", "of", "the", "year"),
)


def prompt(model: str | os.PathLike[str], n_tokens: int, variant: int = 0) -> str:
    """A text that the model's own tokenizer makes exactly `n_tokens` of, the begin-of-sequence token included.

    Each `variant` begins with another word: random weights may answer one prompt with a token that has no text.
    """
    sys.path.insert(0, str(ROOT))
    from reflex_ipc.errors import ReflexError
    from reflex_ipc.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.from_gguf(os.fspath(model))
    except ReflexError as error:
        raise MeasurementError(str(error)) from None
    words: list[str] = []
    while (n := len(tokenizer.encode(" ".join(words)))) < n_tokens or not words:
        for _ in range(max(1, (n_tokens - n) // 2)):  # a word may be more than one token
            words.append(_WORDS[(variant + len(words)) % len(_WORDS)])
    if n != n_tokens:
        raise MeasurementError(f"{model}: no text of common words has {n_tokens} tokens; the nearest has {n}")
    return " ".join(words)
