"""What a result has to look like before others work on it (`compare.load`): fields and what they hold."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from coldstart import CACHES, STATES
from measure import NO_TIME, MeasurementError

LONGEST_NAME = 200  # bytes of a model file's: results are named after it


class Kind(NamedTuple):
    """Of a value: in words, and whether one is."""

    words: str
    holds: Callable[[Any], bool]


Shape = Kind | Mapping[str, Any] | list[Any]
"""A kind; an object with these fields at least; in a list, what each of a list is."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_name(value: Any) -> bool:
    if not isinstance(value, str) or value.startswith(".") or not value.isprintable():
        return False
    return "/" not in value and 0 < len(value.encode()) <= LONGEST_NAME


def _one_of(*values: str) -> Kind:
    return Kind("one of " + ", ".join(values), lambda value: isinstance(value, str) and value in values)


def _or_none(kind: Kind) -> Kind:
    return Kind(f"{kind.words} or null", lambda value: value is None or kind.holds(value))


TEXT = Kind("a text", lambda value: isinstance(value, str) and value != "")
NAME = Kind(f"a plain file name of at most {LONGEST_NAME} bytes", _is_name)
COUNT = Kind("a count", lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0)
NUMBER = Kind("a number", _is_number)
RUNS = Kind("a list of numbers", lambda value: isinstance(value, list) and value != [] and all(map(_is_number, value)))
TIMES = Kind("a list of times above 0", lambda value: RUNS.holds(value) and min(value) > 0)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))

DOCUMENT: Mapping[str, Shape] = {
    "when": TEXT,
    "command": [TEXT],
    "source": {"commit": _or_none(TEXT), "changed": _or_none(FLAG), "sources_sha256": TEXT},
    "machine": {
        "gpu": _or_none(OBJECT),
        "cpu": TEXT,
        "cores": COUNT,
        "kernel": TEXT,
        "python": TEXT,
        "driver_environment": OBJECT,
    },
    "models": [{"file": NAME, "bytes": COUNT, "sha256": TEXT}],
    "rows": [OBJECT],
    "not_run": [{"contender": TEXT, "why": Kind("a text", lambda value: isinstance(value, str))}],
}
PART: Mapping[str, Shape] = {"part": TEXT, "models": [TEXT]}
ROUNDS: Mapping[str, Shape] = {"kind": TEXT, "of": OBJECT, "asked": COUNT}
"""What `measure.Absent` has where time was lacking, either or."""
OF_KIND: Mapping[str, Mapping[str, Shape]] = {
    "timeline": {"backend": TEXT, "runs": COUNT, "plain_ms": TIMES, "traced_ms": TIMES, "trace": OBJECT},
    "warm": {"backend": TEXT, "rates": _or_none(OBJECT)},
    "stdio": {"backend": TEXT},
    "types": {"n_in": COUNT, "n_out": COUNT, "bound": NUMBER},
}
_STARTS: Mapping[str, Shape] = {
    "state": _one_of(*STATES),
    "cache": _one_of(*CACHES),
    "model": NAME,
    "contender": TEXT,
    "prompt_tokens": _or_none(COUNT),
    "n": COUNT,
}
ROWS: Mapping[str, Mapping[str, Shape]] = {
    "coldstart": {**_STARTS, "command": [TEXT], "env": OBJECT, "first_ms": TIMES, "exit_ms": TIMES},
    "energy": {
        **_STARTS,
        "batch_s": NUMBER,
        "idle_before_w": NUMBER,
        "idle_after_w": NUMBER,
        "gross_j": NUMBER,
        "gross_error_j": NUMBER,
        "net_j": _or_none(NUMBER),
        "net_error_j": NUMBER,
    },
    "warm": {"engine": TEXT, "what": TEXT, "tokens": COUNT, "seconds": TIMES, "per_second": NUMBER},
    "stdio": {"what": TEXT, "seconds": TIMES, "prompt_tokens": COUNT},
    "types": {
        "type": TEXT,
        "rare": FLAG,
        "bits": NUMBER,
        "rows": COUNT,
        "bytes": COUNT,
        "seconds": RUNS,
        "error": NUMBER,
    },
}
IF_THERE: Mapping[str, Mapping[str, Shape]] = {"stdio": {"inside_s": TIMES}}
"""What a row may have besides."""
WITHOUT_MODEL = ("types",)
MAY_BE_EMPTY = ("coldstart", "energy", "timeline")
"""The first two when time was up before the first row, the last has none at all."""


def check(document: Mapping[str, Any]) -> None:
    """MeasurementError names the first field that is missing or holds something else. `kind` is a known one."""
    kind = document["kind"]
    _check(document, DOCUMENT, "")
    _check(document, OF_KIND.get(kind, {}), "")
    if not document["models"] and kind not in WITHOUT_MODEL:
        raise MeasurementError("models: there is none")
    if not document["rows"] and kind not in MAY_BE_EMPTY:
        raise MeasurementError("rows: there is none")
    _check(document.get("pieces", []), [TEXT], "pieces")
    files = [entry["file"] for entry in document["models"]]
    for i, row in enumerate(document["rows"]):
        may_have = {name: inner for name, inner in IF_THERE.get(kind, {}).items() if name in row}
        _check(row, {**ROWS.get(kind, {}), **may_have}, f"rows[{i}]")
        if "model" in row and row["model"] not in files:
            raise MeasurementError(f"rows[{i}].model: is none of the models")
    for i, absent in enumerate(document["not_run"]):
        if absent.get("reason") == NO_TIME:
            _check(absent, PART if "part" in absent else ROUNDS, f"not_run[{i}]")


def _check(value: Any, shape: Shape, path: str) -> None:
    if isinstance(shape, Kind):
        if not shape.holds(value):
            raise MeasurementError(f"{path}: has to be {shape.words}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise MeasurementError(f"{path}: has to be a list")
        for i, each in enumerate(value):
            _check(each, shape[0], f"{path}[{i}]")
    else:
        if not isinstance(value, dict):
            raise MeasurementError(f"{path}: has to be an object")
        for name, inner in shape.items():
            at = f"{path}.{name}" if path else name
            if name not in value:
                raise MeasurementError(f"{at}: is missing")
            _check(value[name], inner, at)
