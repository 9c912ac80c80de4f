"""The results of several calls in one folder, as one state of the sources on one kind of machine.

    python bench/collect.py docs/benchmarks CALL1 CALL2.tar.gz && make bench-report
    python bench/collect.py docs/benchmarks CALL --fresh      what was measured there before goes first

A long list of measurements is run in pieces (`bench/device.py OUT --only idle --models qwen3-8b`), on machines that are
gone afterwards. CALL is what a piece wrote: a folder, an archive of one, a file. Files are named after what is in them,
so that pieces do not overwrite each other. Starts of one row that were measured in two pieces are put together if file,
command and environment are the same, and so are requests behind a pipe if file and backend are; of anything else that
was measured twice the newer stays, and it is said.
Collecting the same piece again changes nothing. Results of other sources, machines or model files are refused, and so
is a file that lacks what is needed (bench/shape.py). Other files in the folder are left alone.
"""

import argparse
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import compare
import ending
import measure
import report
from measure import NO_TIME, MeasurementError

Document = dict[str, Any]
POOLED = {"coldstart": ("first_ms", "exit_ms", "n"), "stdio": ("seconds", "inside_s")}
"""Of a row, by kind: its runs and their number, which those of two pieces add to."""


def read(source: Path) -> list[Document]:
    """The results in a file, in a folder and those within, in an archive."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = source
        if source.is_file() and source.suffix != ".json":
            folder = Path(scratch)
            try:
                with tarfile.open(source) as archive:
                    archive.extractall(folder, filter="data")
            except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
                raise MeasurementError(f"{source}: {error}") from None
        files = [source] if source.suffix == ".json" else sorted(folder.rglob("*.json"))
        if not files:
            raise MeasurementError(f"{source}: no results")
        return [document for file in files for document in compare.load(file)]


def parts(document: Document) -> Iterator[tuple[str, Document]]:
    """(its name, a result of one model) for each model of a result; of cold starts, for each state and cache, too."""
    rows = document["rows"] if document["kind"] in ("coldstart", "energy") else []
    if not rows:
        yield "-".join([document["kind"], *(_stem(model["file"]) for model in document["models"][:1])]), document
    for case in dict.fromkeys(_case(document["kind"], row) for row in rows):
        here = [row for row in rows if _case(document["kind"], row) == case]
        entries = [entry for entry in document["models"] if entry["file"] == here[0]["model"]]
        yield "-".join(case), {**document, "models": entries, "rows": here}


def _case(kind: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    state = (row["state"], row["cache"]) if kind == "coldstart" else ()
    return (kind, *state, _stem(row["model"]))


def _stem(file: str) -> str:
    return Path(file).stem


def _pieces(document: Document) -> list[str]:
    """When the pieces were measured that it has been put together of, or itself."""
    return [*document.get("pieces", [document["when"]])]


def joined(old: Document | None, new: Document) -> tuple[Document, str]:
    """(both as one, what was done)."""
    pieces = _pieces(new)
    if old is None:
        return {**new, "pieces": pieces}, "new"
    before = _pieces(old)
    if set(pieces) <= set(before):
        return old, "there already"
    is_newer = str(new["when"]) >= str(old["when"])
    if new["kind"] not in POOLED or new.get("backend") != old.get("backend"):
        return (
            ({**new, "pieces": pieces}, "newer, in place of what was there") if is_newer else (old, "older, left out")
        )
    rows = {compare.key(row): row for row in old["rows"]}
    replaced = []
    for row in new["rows"]:
        same = rows.get(compare.key(row))
        if same is None:
            rows[compare.key(row)] = row
        elif all(same.get(how) == row.get(how) for how in ("command", "env")):
            runs = {name: [each[name] for each in (same, row) if name in each] for name in POOLED[new["kind"]]}
            rows[compare.key(row)] = {**row, **{name: reduce(add, parts) for name, parts in runs.items() if parts}}
        else:
            rows[compare.key(row)] = row if is_newer else same
            replaced.append(row.get("contender", row.get("what")))
    known = {str(each): each for each in [*old["not_run"], *new["not_run"]]}
    whole = {
        **(new if is_newer else old),
        "rows": [*rows.values()],
        "not_run": [*known.values()],
        "pieces": [*before, *pieces],
    }
    other = f"; of {', '.join(replaced)}, started by another command, the newer" if replaced else ""
    return whole, f"put together with what was there{other}"


def collect(found: Sequence[Document]) -> tuple[dict[str, Document], list[str]]:
    """(results by the name of their file, what was done with each), whatever order they come in. MeasurementError where
    they do not belong together."""
    report.one_origin(found)
    digests: dict[str, str] = {}
    for entry in (entry for document in found for entry in document["models"]):
        if digests.setdefault(entry["file"], entry["sha256"]) != entry["sha256"]:
            raise MeasurementError(f"two different files are called {entry['file']}")
    whole: dict[str, Document] = {}
    said = []
    # What has been put together already comes first, so that a piece of it is known when it comes again.
    for document in sorted(found, key=lambda document: (-len(_pieces(document)), str(document["when"]))):
        for name, part in parts(document):
            whole[name], what = joined(whole.get(name), part)
            said.append(f"{name}: {what}")
    for document in whole.values():
        document["not_run"] = [each for each in document["not_run"] if not _since_done(each, whole)]
    return whole, said


def _since_done(absent: Mapping[str, Any], whole: Mapping[str, Document]) -> bool:
    """Whether another piece has what this one had no time for (`measure.Absent`): a part, or the rest of the runs of
    some rows. Of results from before there were such fields everything stays listed."""
    if absent.get("reason") != NO_TIME:
        return False
    if "part" in absent:
        there = [
            entry["file"]
            for document in whole.values()
            if absent["part"] in _parts_of_device(document)
            for entry in document["models"]
        ]
        return all(any(file.startswith(name) for file in there) for name in absent["models"])
    rows = [
        row
        for document in whole.values()
        if document["kind"] == absent["kind"]
        for row in document["rows"]
        if all(row[field] == value for field, value in absent["of"].items())
    ]
    return bool(rows) and all(row["n"] >= absent["asked"] for row in rows)


def _parts_of_device(document: Document) -> set[str]:
    """What bench/device.py calls it."""
    if document["kind"] != "coldstart":
        return {document["kind"]}
    return {"cold" if row["cache"] == "cold" else row["state"] for row in document["rows"]}


def _is_result(file: Path) -> bool:
    """Whether it is one by schema and kind: nothing else is ever removed."""
    try:
        return bool(compare.read(file))
    except MeasurementError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Results of several calls in one folder.")
    parser.add_argument("into", type=Path, help="the folder, as docs/benchmarks")
    parser.add_argument("calls", nargs="+", type=Path, metavar="CALL", help="folders, archives or files of results")
    parser.add_argument("--fresh", action="store_true", help="drop the results that are in the folder")
    options = parser.parse_args()
    there = sorted(options.into.glob("*.json"))
    try:
        found = [] if options.fresh else [document for file in there for document in compare.load(file)]
        found += [document for call in options.calls for document in read(call)]
        whole, said = collect(found)
        ours = [file for file in there if _is_result(file)]
        for file in there:
            if file.stem in whole and file not in ours:
                raise MeasurementError(f"{file} is no result of these tools, and in the way of one")
        for name, document in whole.items():
            measure.save(options.into / f"{name}.json", document)
        for file in ours:  # under the name that a call gave it, or of a state that is gone
            if file.stem not in whole:
                file.unlink()
    except (MeasurementError, OSError) as error:
        sys.stderr.write(f"collect: {error}\n")
        return 1
    print("\n".join(said))
    return 0


if __name__ == "__main__":
    ending.run(main)
