"""What got slower between two results, beyond noise.

    python bench/compare.py OLD.json NEW.json        files of one kind, or two folders of them

A row is called slower when three things hold: the ranks of its runs say so (one-sided Mann-Whitney test, at 5% shared
out among all rows compared), its median rose by more than 1%, and, for cold starts, the same is true of what it takes
beyond the floor, round by round, so that a slower machine is not taken for a slower program. Ranks need no assumption
about how runs scatter, and one outlier is one rank. Rows with too few runs to ever be told apart are named as such.
Energy has no single runs: there the difference has to exceed both uncertainties together. Where machine, driver or
model file are not the same in both, or the floor or the disk alone moved, it is said first (`other`). Exit code 1 when
something got slower.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ending
import shape
from contenders import DISKS, FLOOR
from measure import SCHEMA, MeasurementError, rank_test, summary

LEVEL = 0.05  # of one false alarm among all rows
LEAST = 0.01  # a smaller change is not worth a name
KEYS = (
    "state",
    "cache",
    "model",
    "engine",
    "contender",
    "what",
    "prompt_tokens",
    "tokens",
    "depth",
    "candidates",
    "type",
    "rows",
)
TIMES = {"first_ms": "to the first token", "exit_ms": "to the exit", "seconds": ""}
KINDS = ("coldstart", "energy", "timeline", "warm", "stdio", "types")
Row = Mapping[str, Any]
Floor = Sequence[float] | None


class Finding(NamedTuple):
    verdict: str  # other (not of the program), slower, faster, same, too few, gone, new
    row: str
    detail: str


def load(path: Path) -> list[dict[str, Any]]:
    """The results of a file, or of a folder's files; MeasurementError names one that is none, and what it lacks."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise MeasurementError(f"{path}: no results")
    found = []
    for file in files:
        document = read(file)
        try:
            shape.check(document)
        except MeasurementError as error:
            raise MeasurementError(f"{file}: {error}") from None
        found.append(document)
    return found


def read(file: Path) -> dict[str, Any]:
    """A result by its schema and its kind, whatever it lacks. MeasurementError where it is none."""
    try:
        document: dict[str, Any] = json.loads(file.read_text())
        schema, kind = document["schema"], document["kind"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise MeasurementError(f"{file} is no result of these tools: {error!r}") from None
    if schema != SCHEMA or kind not in KINDS:
        raise MeasurementError(f"{file} is no result of these tools: schema {schema!r}, kind {kind!r}")
    return document


def key(row: Row) -> tuple[str, ...]:
    return tuple(str(row[k]) for k in KEYS if row.get(k) is not None)


def by_key(documents: Sequence[Mapping[str, Any]]) -> dict[tuple[str, ...], Row]:
    """Every row under its name. A row that names no model is of its document's."""
    found: dict[tuple[str, ...], Row] = {}
    for document in documents:
        for row in document["rows"]:
            whole = row
            if "model" not in row and document["models"]:
                whole = {"model": document["models"][0]["file"], **row}
            name = (document["kind"], *key(whole))
            if name in found:
                raise MeasurementError(f"two results for {', '.join(name)}")
            found[name] = whole
    return found


def compare(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[Finding]:
    before, after = by_key(old), by_key(new)
    both = [name for name in before if name in after]
    n_tests = sum(t in before[name] for name in both for t in TIMES)
    level = LEVEL / max(n_tests, 1)
    findings = [*_apart(old, new)]
    findings += [Finding("gone", ", ".join(name), "") for name in before if name not in after]
    findings += [Finding("new", ", ".join(name), "") for name in after if name not in before]
    for name in both:
        a, b = before[name], after[name]
        for times, what in TIMES.items():
            if times in a and times in b:
                floors = (_floor(before, a, times), _floor(after, b, times))
                label = ", ".join(name) + (f", {what}" if what else "")
                finding = _times(label, a[times], b[times], floors, level)
                if a.get("contender") in (FLOOR, *DISKS) and finding.verdict in ("slower", "faster"):
                    finding = finding._replace(verdict="other")  # the machine's, not the program's
                findings.append(finding)
        if "gross_j" in a:
            findings.append(_joules(", ".join(name), a, b))
    return findings


def _apart(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """What is not the same on both sides, so that a difference need not be the program's: machines, model files."""

    def machines(documents: Sequence[Mapping[str, Any]]) -> str:
        of = (d["machine"] for d in documents)
        gpus = (((m["gpu"] or {}).get("name"), (m["gpu"] or {}).get("driver"), m["cpu"]) for m in of)
        return "; ".join(dict.fromkeys(", ".join(str(each) for each in gpu if each) for gpu in gpus))

    before, after = machines(old), machines(new)
    if before != after:
        yield Finding("other", "machine", f"{before} -> {after}")
    digests = {entry["file"]: entry["sha256"] for document in old for entry in document["models"]}
    for file in dict.fromkeys(
        entry["file"]
        for document in new
        for entry in document["models"]
        if digests.get(entry["file"], entry["sha256"]) != entry["sha256"]
    ):
        yield Finding("other", file, "two different model files are called so")


def _floor(rows: Mapping[tuple[str, ...], Row], row: Row, times: str) -> Sequence[float] | None:
    """The floor's runs where `row` was measured; None for the floor itself and where there is none."""
    if row.get("contender") in (None, FLOOR):
        return None
    case = [row["state"], row["cache"], row["model"]]
    for other in rows.values():
        same = [other.get("state"), other.get("cache"), other.get("model")] == case
        if other.get("contender") == FLOOR and same and times in other:
            return [*other[times]]
    return None


def _beyond(runs: Sequence[float], floor: Sequence[float]) -> list[float]:
    """What runs take more than the floor of their own round, so that the floor's scatter counts, too; more than its
    median, where rows do not have the same rounds."""
    if len(runs) != len(floor):
        floor = [summary(floor).median] * len(runs)
    return [run - least for run, least in zip(runs, floor, strict=True)]


def _times(label: str, a: Sequence[float], b: Sequence[float], floors: tuple[Floor, Floor], level: float) -> Finding:
    old, new = summary(a).median, summary(b).median
    change = new / old - 1 if old else math.inf if new else 0.0
    detail = f"median {old:.6g} -> {new:.6g} ({change:+.1%})"
    if 1 / math.comb(len(a) + len(b), len(a)) > level:
        return Finding(
            "too few", label, f"{detail}; {len(a)} and {len(b)} runs cannot be told apart at p < {level:.2g}"
        )
    verdict = _verdict(a, b, change, level)
    if verdict != "same" and floors[0] is not None and floors[1] is not None:
        beyond_a, beyond_b = _beyond(a, floors[0]), _beyond(b, floors[1])
        rise = summary(beyond_b).median - summary(beyond_a).median
        if _verdict(beyond_a, beyond_b, rise / old, level) != verdict:
            return Finding("same", label, f"{detail}, but not beyond the floor, which moved as well")
    p = rank_test(a, b) if change > 0 else rank_test(b, a)
    return Finding(verdict, label, f"{detail}, p = {p:.2g}")


def _verdict(a: Sequence[float], b: Sequence[float], change: float, level: float) -> str:
    if change > LEAST and rank_test(a, b) < level:
        return "slower"
    if change < -LEAST and rank_test(b, a) < level:
        return "faster"
    return "same"


def _joules(label: str, a: Row, b: Row) -> Finding:
    rise, noise = b["gross_j"] - a["gross_j"], a["gross_error_j"] + b["gross_error_j"]
    detail = f"gross {a['gross_j']:.1f} -> {b['gross_j']:.1f} J, uncertain by {noise:.1f}"
    return Finding("same" if abs(rise) <= noise else "slower" if rise > 0 else "faster", label, detail)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="What got slower between two results.")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    options = parser.parse_args()
    try:
        findings = compare(load(options.old), load(options.new))
    except MeasurementError as error:
        sys.stderr.write(f"compare: {error}\n")
        return 2
    for finding in sorted(
        findings, key=lambda f: ("other", "slower", "faster", "gone", "new", "too few", "same").index(f.verdict)
    ):
        print(f"{finding.verdict:8} {finding.row}" + (f": {finding.detail}" if finding.detail else ""))
    return int(any(finding.verdict == "slower" for finding in findings))


if __name__ == "__main__":
    ending.run(main)
