"""Who is measured: contenders.toml read, programs found or compiled, prompts of a given length made."""

import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from measure import ROOT, Absent, MeasurementError

FILE = ROOT / "bench" / "contenders.toml"
FLOOR, REFLEX, DECISION = "floor", "reflex", "reflex system1"
DISKS = ("disk, direct", "disk, buffered")
"""Rows that others are held against; of the disk's the faster one."""
_OURS = ("floor", "disk")
"""Programs in C beside this file, compiled here and now; a command that has one's name in braces needs it."""
_KEYS = {"name", "command", "binary", "env", "echo", "prepare", "prompt", "prompt_tokens", "cache"}


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


def read(path: Path = FILE) -> list[Contender]:
    """Every contender of a file; MeasurementError names what is wrong in it."""
    with open(path, "rb") as file:
        tables = tomllib.load(file).get("contender", [])
    found = []
    for table in tables:
        unknown = table.keys() - _KEYS
        if unknown or "name" not in table or "command" not in table:
            what = f"unknown keys {sorted(unknown)}" if unknown else "name and command are needed"
            raise MeasurementError(f"{path}: contender {table.get('name', '?')}: {what}")
        if table.get("cache", "warm") not in ("warm", "cold"):
            raise MeasurementError(f"{path}: contender {table['name']}: cache is {table['cache']!r}, not warm or cold")
        lists = {key: tuple(table[key]) for key in ("command", "prepare", "prompt_tokens") if key in table}
        found.append(Contender(**{**table, **lists}))
    names = [contender.name for contender in found]
    if len({*names}) < len(names):
        raise MeasurementError(f"{path}: two contenders have one name")
    return found


def locate(
    contenders: Sequence[Contender], binaries: Mapping[str, str], out: Path
) -> tuple[list[tuple[Contender, dict[str, str]]], list[Absent]]:
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
    command = [compiler, "-O1", str(ROOT / "bench" / f"{name}.c"), "-o", str(program), "-ldl", "-lpthread"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise MeasurementError(f"bench/{name}.c does not compile: {getattr(error, 'stderr', error)}") from None
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
