"""Every family at a real size, one after the other: the file, cold starts against the floor, a prompt, decoding.

    python bench/families.py OUT                                       all shapes, in about 6 minutes
    python bench/families.py OUT --plan                                what each will take
    python bench/families.py OUT --models qwen3.5-9b --folder /tmp/models --keep

Writes JSON under OUT as bench/device.py does and prints one table last. A shape is done whole before the next is begun,
the smallest first, and its file is deleted: the disk has to hold the largest, 22 GB, and not all 56. One that would not
be done in the time that is left is not begun. Kernels must be built. Bytes are those a step has
to move at least (bench/work.py), as a share of what a device copy moves in the same run.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import contenders
import device
import ending
import measure
import models
import times
from contenders import DECISION, FLOOR, REFLEX
from measure import ROOT, MeasurementError, summary
from rates import shares

SHAPES = ("qwen3.5-0.8b", "qwen3.5-9b", "deepseek-v2-lite", "qwen3-30b-a3b", "qwen3.5-35b-a3b")
N = 10
CONTENDERS = 2  # the floor and reflex


def takes(name: str) -> dict[str, float]:
    """Seconds of each part of a shape."""
    size = models.size(name)
    found = {"file": times.making(size), "starts": times.starts(size, N, CONTENDERS), "warm": times.warm(size)}
    return found | {"all": sum(found.values())}


def plan(names: Sequence[str]) -> str:
    body = [[name, f"{models.size(name) / 1e9:.1f}", *(f"{s:.0f}" for s in takes(name).values())] for name in names]
    total = sum(takes(name)["all"] for name in names)
    table = measure.table(["", "GB", "file, s", "starts, s", "warm, s", "all, s"], body)
    return f"{table}\nall shapes: {total:.0f} s"


def measure_shape(session: device.Session, folder: Path, name: str, ready: Sequence[Any]) -> dict[str, Any]:
    """Everything of one shape, as one row of the table; what failed is in `session.absent`."""
    path = device.make(session, folder, name)
    row: dict[str, Any] = {"model": name, "bytes": path.stat().st_size}
    session.part("first starts", [name], device.first_starts, session, name, path, ready, [5])
    found = session.cells.get(name, [])
    out = f"coldstart-{name}"
    most = session.left() - takes(name)["warm"]  # what comes behind has to fit, too
    session.part("starts", [name], session.starts, out, found, "back-to-back", "warm", N, most)
    session.part("warm", [name], session.tool, "warm", name, path, *device.TOOLS["warm"])
    return row | starts(session.out / f"{out}.json") | warm(session.out / f"warm-{name}.json")


def starts(path: Path) -> dict[str, Any]:
    """Medians of the floor and of ours, from what was saved."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text())["rows"]
    return {
        f"{row['contender']}_ms": summary(row["first_ms"]).median for row in rows if row["contender"] in (FLOOR, REFLEX)
    }


def warm(path: Path) -> dict[str, Any]:
    """Prefill of 512 tokens and decoding at depth 128, from what was saved."""
    if not path.exists():
        return {}
    saved = json.loads(path.read_text())
    found: dict[str, Any] = {}
    for row in saved["rows"]:
        of = row["engine"], row["what"], row["depth"] if row["what"] == "decode" else row["tokens"]
        if of in (("reflex", "prefill", 512), ("reflex", "decode", 128)):
            found[row["what"]] = {
                "per_second": row["per_second"],
                "bytes_s": row["bytes"] / summary(row["seconds"]).median,
                "of_copy": shares(row, saved["rates"]).get("of_copy"),
            }
    return found


def render(rows: Sequence[dict[str, Any]]) -> str:
    def figure(value: float | None, form: str = ".1f") -> str:
        return "-" if value is None else format(value, form)

    head = ["", "GB", "floor ms", "reflex ms", "beyond"]
    for what in ("prefill 512", "decode at 128"):
        head += [f"{what} tok/s", "GB/s", "% of copy"]
    body = []
    for row in rows:
        floor, ours = row.get("floor_ms"), row.get("reflex_ms")
        line = [row["model"], figure(row["bytes"] / 1e9, ".2f"), figure(floor)]
        line += [figure(ours), figure(ours - floor if ours and floor else None)]
        for what in ("prefill", "decode"):
            of = row.get(what, {})
            copied = of.get("of_copy")
            line += [figure(of.get("per_second"), ".0f"), figure(of.get("bytes_s", 0) / 1e9 if of else None, ".0f")]
            line.append(figure(copied and 100 * copied))
        body.append(line)
    return measure.table(head, body)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Every family at a real size.")
    parser.add_argument("out", type=Path, help="folder of the JSON files")
    parser.add_argument("--limit", type=float, default=420, metavar="S", help="seconds in all (420)")
    parser.add_argument("--models", nargs="+", choices=models.SHAPES, default=SHAPES)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench", help="of the model files")
    parser.add_argument("--keep", action="store_true", help="keep the model files")
    parser.add_argument("--plan", action="store_true", help="print what each shape will take, and end")
    options = parser.parse_args()
    print(plan(options.models), flush=True)
    if options.plan:
        return 0
    device.needs_driver()
    session = device.Session(options.out, options.limit)
    named = [contender for contender in contenders.read() if contender.name != DECISION]
    ready, session.absent = contenders.locate(named, {}, options.folder)
    rows = []
    for name in options.models:
        needed = takes(name)["all"]
        if session.left() < needed:
            why = f"it takes some {needed:.0f} s, and {session.left():.0f} were left"
            session.absent.append({"contender": name, "why": why})
            continue
        try:
            rows.append(measure_shape(session, options.folder, name, ready))
        except (MeasurementError, OSError) as error:
            session.absent.append({"contender": name, "why": str(error)})
        finally:
            if not options.keep:
                (options.folder / f"{name}-Q4_K_M.gguf").unlink(missing_ok=True)
    for text in filter(None, session.texts):
        print(f"\n{text}")
    for each in dict.fromkeys((e["contender"], e["why"]) for e in session.absent):
        print(f"not run: {each[0]}: {each[1]}")
    print(f"\n{render(rows)}")
    return 0


if __name__ == "__main__":
    ending.run(main)
