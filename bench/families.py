"""Every family at a real size, one after the other: the file, cold starts against the floor, a prompt, decoding.

    python bench/families.py OUT                                       all shapes, in about 6 minutes
    python bench/families.py OUT --models qwen3.5-9b --folder /tmp/models --keep

Writes JSON under OUT as bench/device.py does and prints one table last. A shape is done whole before the next is begun,
the smallest first, and its file is deleted: they take 56 GB together. Kernels must be built. Bytes are those a step has
to move at least (bench/work.py), as a share of what a device copy moves in the same run.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import coldstart
import contenders
import device
import measure
import models
from contenders import FLOOR
from measure import ROOT, MeasurementError, summary
from rates import shares

SHAPES = ("qwen3.5-0.8b", "qwen3.5-9b", "deepseek-v2-lite", "qwen3-30b-a3b", "qwen3.5-35b-a3b")
N = 10
LEAST_S = 45.0  # a shape is not begun with less left


def measure_shape(session: device.Session, folder: Path, name: str, ready: Sequence[Any]) -> dict[str, Any]:
    """Everything of one shape, as one row of the table; what failed is in `session.absent`."""
    path = folder / f"{name}-Q4_K_M.gguf"
    row: dict[str, Any] = {"model": name}
    began = time.monotonic()
    if not path.exists():
        size = models.make(path, name)
        row["made_bytes_s"] = size / (time.monotonic() - began)
        with open(path, "rb") as file:
            os.fsync(file)  # or writing it would go on while starts are measured
    session.entries[path.name] = measure.model_entry(path)
    row["bytes"] = path.stat().st_size
    found = coldstart.cells(ready, str(path), [5])
    out = f"coldstart-{name}"
    session.part(f"starts, {name}", session.starts, out, found, "back-to-back", "warm", N, session.left() / 2)
    session.part(f"warm, {name}", session.tool, "warm", name, path, *device.TOOLS["warm"])
    return row | starts(session.out / f"{out}.json") | warm(session.out / f"warm-{name}.json")


def starts(path: Path) -> dict[str, Any]:
    """Medians of the floor and of ours, from what was saved."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text())["rows"]
    return {
        f"{row['contender']}_ms": summary(row["first_ms"]).median
        for row in rows
        if row["contender"] in (FLOOR, "reflex")
    }


def warm(path: Path) -> dict[str, Any]:
    """Prefill and decode, from what was saved."""
    if not path.exists():
        return {}
    saved = json.loads(path.read_text())
    found: dict[str, Any] = {}
    for row in saved["rows"]:
        if (row["what"], row.get("depth", 0)) in (("prefill", 0), ("decode", 128)):
            found[row["what"]] = {
                "per_second": row["per_second"],
                "bytes_s": row["bytes"] / summary(row["seconds"]).median,
                "of_copy": shares(row, saved["rates"]).get("of_copy"),
            }
    return found


def render(rows: Sequence[dict[str, Any]]) -> str:
    def figure(value: float | None, form: str = ".1f") -> str:
        return "-" if value is None else format(value, form)

    head = ["", "GB", "made GB/s", "floor ms", "reflex ms", "beyond"]
    for what in ("prefill 512", "decode at 128"):
        head += [f"{what} tok/s", "GB/s", "% of copy"]
    body = []
    for row in rows:
        floor, ours, made = row.get("floor_ms"), row.get("reflex_ms"), row.get("made_bytes_s")
        line = [row["model"], figure(row["bytes"] / 1e9, ".2f"), figure(made and made / 1e9, ".2f"), figure(floor)]
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
    options = parser.parse_args()
    session = device.Session(options.out, options.limit)
    try:
        ready, session.absent = contenders.locate(contenders.read(), {}, options.folder)
    except MeasurementError as error:
        sys.stderr.write(f"families: {error}\n")
        return 1
    rows = []
    for name in options.models:
        if session.left() < LEAST_S:
            session.absent.append({"contender": name, "why": "no time was left"})
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
    sys.exit(main())
