"""Results as a page: docs/benchmarks.md with its tables, and the plots beside it.

    python bench/report.py                         docs/benchmarks/*.json -> docs/benchmarks.md, docs/benchmarks/*.svg
    python bench/report.py RESULTS --out PAGE.md   the plots go to PAGE/

All results of a page come from one machine and one state of the sources; others are refused. What was measured again
since, but not everything, is in RESULTS/since and has a page of its own, PAGE/since.md; each page speaks of the other.
"""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import coldstart
import compare
import ending
import measure
import svg
from contenders import DECISION, FLOOR, REFLEX
from measure import ROOT, MeasurementError, summary
from rates import shares

sys.path.insert(0, str(ROOT))
from reflex_ipc import waterfall

Row = Mapping[str, Any]
SINCE = "since"
_GAP = f"{coldstart.STATES['idle'].gap_s:g} seconds"
_STATES = {
    "idle": f"nothing has used the GPU for {_GAP}: a cron job, the first request of the day",
    "back-to-back": "another start has just ended",
    "held": "a process keeps the driver initialised",
}
_CACHES = {"warm": "all of the model file in memory", "cold": "none of the model file in memory"}


def page(
    documents: Sequence[Mapping[str, Any]], plots: str, results: str, note: str = ""
) -> tuple[str, dict[str, str]]:
    """(the page, plots by file name). `plots` is the folder the page finds them in, `results` that of the documents,
    `note` a sentence on top."""
    one_origin(documents)
    compare.by_key(documents)  # refuses doubles
    documents = sorted(documents, key=lambda d: max((model["bytes"] for model in d["models"]), default=0))
    rows = {kind: [r for d in documents if d["kind"] == kind for r in d["rows"]] for kind in ("coldstart", "energy")}
    pictures: dict[str, str] = {}
    parts = [
        f"# Benchmarks\n\nMade by `make bench-report` from the JSON files in [`{results}/`]({results}), which hold "
        "every run. The instruments are in `bench/`; the head of each says what it measures and how."
        + (f"\n\n{note}" if note else ""),
        _origin(documents),
    ]
    if rows["coldstart"]:
        parts.append(_coldstart(rows["coldstart"], _sizes(documents), pictures))
        parts.append(_decisions(rows["coldstart"]))
        parts.append(_curves(rows["coldstart"], _sizes(documents), pictures))
    if rows["energy"]:
        parts.append(_energy(rows["energy"], pictures))
    for document in documents:
        if document["kind"] == "timeline":
            parts.append(_timeline(document, pictures))
    for kind, section in (("warm", _warm), ("stdio", _stdio), ("types", _types)):
        parts += [section(document) for document in documents if document["kind"] == kind]
    parts.append(_not_run(documents))
    parts.append(_repeat(documents))
    text = "\n\n".join(part for part in parts if part) + "\n"
    return text.replace("(plot:", f"({plots}/"), pictures


def one_origin(documents: Sequence[Mapping[str, Any]]) -> None:
    """MeasurementError where results do not belong on one page."""
    for what, of in (
        ("machines", lambda d: (d["machine"]["gpu"], d["machine"]["cpu"])),
        ("states of the sources", lambda d: d["source"]["sources_sha256"]),
    ):
        if any(of(document) != of(documents[0]) for document in documents):
            raise MeasurementError(f"the results are of different {what}; a page has one")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns of figures to the right, of words to the left."""
    lines = [*rows]
    figures = [all(line[i][:1] in tuple("0123456789+-") for line in lines) for i in range(len(head))]
    align = ["---:" if figure else "---" for figure in figures]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, align, *lines))


def _origin(documents: Sequence[Mapping[str, Any]]) -> str:
    machine, source = documents[0]["machine"], documents[0]["source"]
    gpu = machine["gpu"] or {}
    commit = source["commit"]
    if commit is None:  # measured on a copy without git: this tree's commit, if its sources are the same
        here = measure.source()
        commit = here["commit"] if here["sources_sha256"] == source["sources_sha256"] else None
    commit = commit or "not known: measured on a copy without git"
    link = f"PCIe generation {gpu.get('pcie_generation')}, {gpu.get('pcie_width')} lanes"
    environment = ", ".join(f"`{k}={v}`" for k, v in machine["driver_environment"].items()) or "none set"
    facts = [
        ("device", f"{gpu['name']}, driver {gpu['driver']}, CUDA {gpu['cuda']}, {link}" if gpu else "none"),
        ("persistence mode", ("off", "on")[gpu["persistence"]] if gpu.get("persistence") in (0, 1) else "not known"),
        ("host", f"{machine['cpu']}, {machine['cores']} cores, kernel {machine['kernel']}, Python {machine['python']}"),
        ("driver's environment", environment),
        ("commit", commit + (" and changes not committed" if source["changed"] else "")),
        ("sources", f"`sha256 {source['sources_sha256'][:16]}` over reflex_ipc, kernels and bench"),
        ("when", " to ".join(dict.fromkeys((min(d["when"] for d in documents), max(d["when"] for d in documents))))),
    ]
    models = {model["file"]: model for document in documents for model in document["models"]}
    files = [(m["file"], f"{m['bytes'] / 1e9:.3f} GB", f"`{m['sha256']}`") for m in models.values()]
    return (
        "## Where and with what\n\n" + _table(("", ""), facts) + "\n\n"
        + _table(("model file", "size", "sha256"), files)
    )  # fmt: skip


def _coldstart(rows: Sequence[Row], sizes: Mapping[str, int], pictures: dict[str, str]) -> str:
    floor, disk = coldstart.floors(rows), coldstart.disks(rows)
    parts = [
        "## Cold start\n\nMilliseconds from launch to the first byte of the first token, whole processes timed from "
        "outside, contenders interleaved. The floor is a C program that brings the driver up and copies the same file "
        "to the device (`bench/floor.c`); nothing can be faster that does the same work. Ratios below 1 are of starts "
        "that do less, where routed experts come first, of a cold page cache, which reflex reads ahead while the "
        "driver starts and the floor does not, or within the spread of the runs."
    ]
    for state, cache in ((state, cache) for state in coldstart.STATES for cache in coldstart.CACHES):
        here = [row for row in rows if (row["state"], row["cache"]) == (state, cache)]
        if not here:
            continue
        name = f"coldstart-{state}-{cache}.svg"
        pictures[name] = _coldstart_plot(here, floor, f"Launch to first token, {state}, {cache} page cache")
        body = []
        for row in here:
            s, ended = summary(row["first_ms"]), summary(row["exit_ms"])
            base = floor.get((state, cache, row["model"]))
            beyond = f"{s.median - base:+.1f} ms, {s.median / base:.2f}" if base else "-"
            figures = [f"{x:.1f}" for x in (s.min, s.median, s.p90, ended.median)]
            line = [row["model"], row["contender"], str(row["prompt_tokens"] or "-"), str(s.n), *figures, beyond]
            if cache == "cold":
                alone = disk.get((state, cache, row["model"]))
                line.append(f"{s.median / alone:.2f}" if alone else "-")
            body.append(line)
        head = ["model", "contender", "prompt tokens", "n", "min", "median", "p90", "exit, median"]
        head += ["beyond floor, ratio", *(["times the disk alone"] if cache == "cold" else [])]
        about = f"State *{state}*: {_STATES[state]}. Page cache {cache}: {_CACHES[cache]}."
        if cache == "cold":
            about += _disk_alone({model: ms for (*case, model), ms in disk.items() if case == [state, cache]}, sizes)
        parts.append(
            f"### {state.capitalize()}, page cache {cache}\n\n{about}\n\n{_table(head, body)}\n\n![bars](plot:{name})"
        )
    return "\n\n".join(parts)


def _disk_alone(medians: Mapping[str, float], sizes: Mapping[str, int]) -> str:
    if not medians:
        return ""
    rates = ", ".join(f"{sizes[model] / ms / 1e6:.2f} GB/s ({model})" for model, ms in medians.items())
    return (
        " The disk alone, in the same rounds, is a program that reads all of the file with 12 threads, 4 MiB at a "
        "time, past the page cache and through it (`bench/disk.c`); of the two the one with the lower median counts: "
        f"{rates}."
    )


def _decisions(rows: Sequence[Row]) -> str:
    """What a decision takes longer than a token behind the same prompt, where both were started in the same rounds."""
    named = {(row["contender"], row["state"], row["cache"], row["model"], row["prompt_tokens"]): row for row in rows}
    body = []
    for (contender, *case), row in named.items():
        other = named.get((DECISION, *case))
        if contender != REFLEX or other is None:
            continue
        token, decision = row["first_ms"], other["first_ms"]
        medians = summary(token).median, summary(decision).median
        state, _, model, tokens = case
        line = [model, state, str(tokens), str(len(decision)), *(f"{median:.1f}" for median in medians)]
        line.append(f"{medians[1] - medians[0]:+.1f}")
        paired = len(token) == len(decision)
        line.append(f"{summary([b - a for a, b in zip(token, decision, strict=True)]).median:+.1f}" if paired else "-")
        body.append(line)
    head = ("model", "state", "prompt tokens", "n", "`run -n 1`, ms", "`system1`, ms", "more", "more, round by round")
    about = (
        "The command `system1` with three candidates against `run -n 1` behind the same prompt, from launch to the "
        "first byte of output, which is the whole answer of `system1`: medians, their difference, and the median of "
        "the differences within a round."
    )
    return f"### A decision\n\n{about}\n\n{_table(head, body)}" if body else ""


def _names(rows: Sequence[Row]) -> list[str]:
    """Whose bars have colours, in their order: the floor's are grey."""
    return [name for name in dict.fromkeys(row["contender"] for row in rows) if name != FLOOR]


def _coldstart_plot(rows: Sequence[Row], floor: Mapping[tuple[str, str, str], float], title: str) -> str:
    groups, names = [], _names(rows)
    for model in dict.fromkeys(row["model"] for row in rows):
        bars = []
        for row in rows:
            if row["model"] == model:
                s, who = summary(row["first_ms"]), row["contender"]
                label = who + (f", {row['prompt_tokens']} tokens" if row["prompt_tokens"] else "")
                colour = svg.colour(who, names)
                bars.append(svg.Bar(label, s.median, colour, (s.min, s.p90)))
        groups.append(svg.Group(model, bars, floor.get((rows[0]["state"], rows[0]["cache"], model))))
    return svg.bars(title, "ms; bar: median, whisker: min to p90, dashes: floor", groups)


def _sizes(documents: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {model["file"]: model["bytes"] for document in documents for model in document["models"]}


def _curves(rows: Sequence[Row], sizes: Mapping[str, int], pictures: dict[str, str]) -> str:
    """Over model size, for each state; over prompt length, for each model: where there are two points to join."""
    parts = []
    for state in dict.fromkeys(row["state"] for row in rows if row["cache"] == "warm"):
        here = [row for row in rows if row["state"] == state and row["cache"] == "warm"]
        by_size: dict[str, list[tuple[float, float]]] = {}
        by_prompt: dict[str, list[tuple[float, float]]] = {}
        for row in here:
            median, tokens = summary(row["first_ms"]).median, row["prompt_tokens"]
            label = row["contender"] + (f", {tokens} tokens" if tokens else "")
            by_size.setdefault(label, []).append((sizes[row["model"]] / 1e9, median))
            if tokens:
                by_prompt.setdefault(f"{row['contender']}, {row['model']}", []).append((tokens, median))
        for what, unit, series in (
            ("size", "model file, GB", by_size),
            ("prompt", "prompt, tokens", {k: v for k, v in by_prompt.items() if len(v) > 1}),
        ):
            if series and any(len(points) > 1 for points in series.values()):
                name = f"first-token-over-{what}-{state}.svg"
                pictures[name] = svg.lines(f"Time to first token, {state}", unit, "ms", series)
                parts.append(f"![time to first token over {what}, {state}](plot:{name})")
    return "### Over model size and prompt length\n\n" + "\n\n".join(parts) if parts else ""


def _energy(rows: Sequence[Row], pictures: dict[str, str]) -> str:
    body, groups, names = [], [], _names(rows)
    for model in dict.fromkeys(row["model"] for row in rows):
        here = [row for row in rows if row["model"] == model]
        bars = []
        for row in here:
            net = "below resolution" if row["net_j"] is None else f"{row['net_j']:.1f} ± {row['net_error_j']:.1f}"
            label = row["contender"] + (f", {row['prompt_tokens']} tokens" if row["prompt_tokens"] else "")
            gross = f"{row['gross_j']:.1f} ± {row['gross_error_j']:.1f}"
            idle = f"{row['idle_before_w']:.1f}, {row['idle_after_w']:.1f}"
            wall = f"{row['batch_s'] / row['n'] * 1e3:.0f}"
            body.append([model, label, str(row["n"]), gross, net, idle, wall])
            bars.append(svg.Bar(label, row["gross_j"], svg.colour(row["contender"], names)))
        groups.append(svg.Group(model, bars))
    pictures["energy.svg"] = svg.bars("Energy of a start, gross", "J", groups)
    head = ("model", "contender", "starts", "gross, J a start", "net, J a start", "idle before, after, W", "wall, ms")
    return (
        "## Energy\n\nThe device's total energy counter around a batch of starts, one after another, page cache warm. "
        "Net is without what the idle device would have used in the same time.\n\n"
        f"{_table(head, body)}\n\n![energy](plot:energy.svg)"
    )


def _warm(document: Mapping[str, Any]) -> str:
    found, model = document["rates"], document["models"][0]["file"]
    body = []
    for row in document["rows"]:
        s, share = summary(row["seconds"]), shares(row, found)
        what = f"{row['what']} {row['tokens']}" + (f" at depth {row['depth']}" if "depth" in row else "")
        moved = (
            [f"{row['bytes'] / s.median / 1e9:.0f}", f"{row['flops'] / s.median / 1e12:.1f}"]
            if "bytes" in row
            else ["-"] * 2
        )
        percent = [f"{100 * share[k]:.1f}" if k in share else "-" for k in ("of_read", "of_copy", "of_bf16")]
        body.append(
            [what, row["engine"], str(s.n), f"{row['per_second']:.0f}", f"{s.median * 1e3:.2f}", *moved, *percent]
        )
    head = ("", "engine", "n", "a second", "ms, median", "GB/s", "TFLOP/s", "% of read", "% of copy", "% of bf16")
    best = "The device's own rates were not measured."
    if found:
        best = (
            f"Measured in the same run by {found['by']}: read {found['read_bytes_s'] / 1e12:.2f} TB/s, copy "
            f"{found['copy_bytes_s'] / 1e12:.2f} TB/s (both ways), bf16 {found['bf16_flop_s'] / 1e12:.0f} TFLOP/s, "
            f"host to device {found['host_to_device_bytes_s'] / 1e9:.1f} GB/s."
        )
    counted = (
        " Bytes and operations are the least that a step can do with: every weight once (of experts those that so many "
        "tokens reach if all are equally likely), the cache once, two operations for a product (`bench/work.py`); a "
        "prompt counts its steps, decoding every token."
    )
    return f"## Loaded: {model}, backend {document['backend']}\n\n{best}{counted}\n\n{_table(head, body)}"


def _timeline(document: Mapping[str, Any], pictures: dict[str, str]) -> str:
    file, plain, traced = document["models"][0]["file"], summary(document["plain_ms"]), summary(document["traced_ms"])
    name = f"timeline-{Path(file).stem}.svg"
    pictures[name] = waterfall.draw(document["trace"], f"From launch to first output, {file}, {document['backend']}")
    return (
        f"## Where a start's time goes: {file}\n\nOne start of {document['runs']} with `--trace`, back-to-back, the "
        f"one with the median first output. A whole process takes {plain.median:.0f} ms without a trace, "
        f"{traced.median:.0f} with one.\n\n![{file}: phases of a start](plot:{name})"
    )


def _stdio(document: Mapping[str, Any]) -> str:
    body = []
    lengths = [*dict.fromkeys(row["prompt_tokens"] for row in document["rows"])]
    for row in document["rows"]:
        name = row["what"] if len(lengths) == 1 else f"{row['what']}, prompt of {row['prompt_tokens']}"
        for what, seconds in ((name, row["seconds"]), (f"{name}, inside", row.get("inside_s"))):
            if seconds:
                s = summary(seconds)
                body.append([what, str(s.n), *(f"{x * 1e3:.2f}" for x in (s.min, s.median, s.p90, max(seconds)))])
    return (
        f"## Behind a pipe: {document['models'][0]['file']}, backend {document['backend']}\n\nMilliseconds from a "
        f"request to its answer, a fresh prompt of {' or '.join(map(str, lengths))} tokens each; inside: what the "
        "process says it took.\n\n" + _table(("", "n", "min", "p50", "p90", "max"), body)
    )


def _types(document: Mapping[str, Any]) -> str:
    """Every type with all counts of rows on one line, those of one path after the other, by bits a weight."""
    rows = {(row["type"], row["rows"]): row for row in document["rows"]}
    counts = sorted({count for _, count in rows})
    ratios = [(row["against_nearest"], row) for row in rows.values() if "against_nearest" in row]
    body = []
    for row in sorted(rows.values(), key=lambda row: (row["rare"], row["bits"], row["type"])):
        if row["rows"] != counts[0]:
            continue
        each = [rows.get((row["type"], count)) for count in counts]
        took = [summary(of["seconds"]).median if of else 0.0 for of in each]
        line = [row["type"], f"{row['bits']:.2f}", "generic" if row["rare"] else "fast"]
        line += [f"{seconds * 1e6:.1f}" if seconds else "-" for seconds in took]
        line += [f"{row['bytes'] / seconds / 1e9:.0f}" if seconds else "-" for seconds in took]
        if ratios:
            line += [f"{of['against_nearest']:.2f}, {of['nearest']}" if of and "nearest" in of else "-" for of in each]
        body.append(line)
    head = ["type", "bits a weight", "path", *(f"µs, M = {count}" for count in counts)]
    head += [f"GB/s, M = {count}" for count in counts]
    said = ""
    if ratios:
        head += [f"times the nearest, M = {count}" for count in counts]
        most, worst = max(ratios, key=lambda pair: pair[0])
        medians = [summary([row["against_median"] for _, row in ratios if row["rows"] == count]) for count in counts]
        said = (
            " Types without a fast path of their own are held against the fast type whose bits a weight are nearest, "
            "of several the fastest: both have about as much to read."
            f" The largest ratio is {most:.2f}, of {worst['type']} at M = {worst['rows']}; the bound is "
            f"{document['bound']:g}. Against the median of all fast types, the median rare one takes "
            + ", ".join(f"{s.median:.2f}" for s in medians) + f" times as long at M = {', '.join(map(str, counts))}."
        )  # fmt: skip
    return (
        f"## Products by type of weight\n\nOne matrix from {document['n_in']} to {document['n_out']}, all that "
        "the executor launches for M rows of x, weights beyond the cache (`bench/rare_types.py`)."
        f"{said}\n\n{_table(head, body)}"
    )


def _not_run(documents: Sequence[Mapping[str, Any]]) -> str:
    seen = dict.fromkeys((each["contender"], each["why"]) for document in documents for each in document["not_run"])
    return "## Not run\n\n" + _table(("contender", "why"), seen) if seen else ""


def _repeat(documents: Sequence[Mapping[str, Any]]) -> str:
    commands = dict.fromkeys("python " + _shown(document["command"]) for document in documents)
    flags = dict.fromkeys(
        (row["contender"], _shown([*(f"{k}={v}" for k, v in row["env"].items()), *row["command"]]))
        for document in documents
        if document["kind"] == "coldstart"
        for row in document["rows"]
    )
    shown = "\n".join(f"- {name}: `{command}`" for name, command in dict(reversed(list(flags))).items())
    return (
        "## How to repeat it\n\nOn a machine with a GPU, a C compiler and nvcc, from a clone, after `python "
        "kernels/build.py native` and with folders of your own:\n\n```console\n"
        + "\n".join(f"$ {command}" for command in commands)
        + "\n$ make bench-report\n$ python bench/compare.py OLD NEW    # what got slower beyond noise\n```"
        + (f"\n\nEach contender was started like this:\n\n{shown}" if shown else "")
    )


def _shown(command: Sequence[str]) -> str:
    """A command for whoever repeats it: FOLDER for the folders of that machine, T for its clock, no digests."""
    words = [word for before, word in pairwise(["", *command]) if "--sha256" not in (before, word)]
    words = [re.sub(r"^/.*/(?=.)", "FOLDER/", word) for word in words]
    return shlex.join(re.sub(r"^[0-9]+[.][0-9]{6,}$", "T", word) for word in words)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Results as a page.")
    parser.add_argument("results", nargs="?", type=Path, default=ROOT / "docs" / "benchmarks")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks.md")
    options = parser.parse_args()
    results, out, again = options.results, options.out, options.results / SINCE
    plots = out.with_suffix("")
    try:
        if again.is_dir():
            if _newest(again) <= _newest(results):
                raise MeasurementError(f"{again} is no newer than {results}, which stands in for it: remove it")
            note = (
                f"Only what was measured again since [all of it](../{out.name}) was: where both pages have a figure, "
                "this is the newer. Milliseconds of two machines do not compare; what is beyond the floor of each does."
            )
            _write(again, plots / f"{SINCE}.md", note)
            _write(results, out, f"Some of this was measured again since: [{SINCE}.md]({plots.name}/{SINCE}.md).")
        else:
            _write(results, out)
    except MeasurementError as error:
        sys.stderr.write(f"report: {error}\n")
        return 1
    return 0


def _newest(results: Path) -> str:
    return max(str(document["when"]) for document in compare.load(results))


def _write(results: Path, out: Path, note: str = "") -> None:
    plots = out.with_suffix("")
    text, pictures = page(compare.load(results), plots.name, os.path.relpath(results, out.parent), note)
    plots.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        (plots / name).write_text(picture)
    out.write_text(text)
    print(f"{out} and {len(pictures)} plots")


if __name__ == "__main__":
    ending.run(main)
