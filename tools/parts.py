"""A file in parts, for a machine that takes only so much at a time.

    python tools/parts.py split FILE FOLDER --mib 27     FOLDER/part-0, FOLDER/part-1 ..., a folder each
    python tools/parts.py join FOLDER/part-0 OUT         there, once a part, in any order

The join that has the last part writes OUT and checks it; those before say how many are missing. What has come so far
lies beside OUT, in OUT.parts.
"""

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path


def split(file: Path, folder: Path, size: int) -> list[Path]:
    """Write the parts; their folders."""
    with open(file, "rb") as source:
        whole = {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(source, "sha256").hexdigest()}
        n = -(-whole["bytes"] // size)
        source.seek(0)
        folders = []
        for i in range(n):
            part = folder / f"part-{i}"
            part.mkdir(parents=True, exist_ok=True)
            (part / "data").write_bytes(source.read(size))
            (part / "of.json").write_text(json.dumps({**whole, "part": i, "parts": n}))
            folders.append(part)
    return folders


def join(part: Path, out: Path) -> int:
    """Add a part; how many are missing. OUT is there when it is 0. Raises ValueError where parts are of two files, or
    together are not the file."""
    of = json.loads((part / "of.json").read_text())
    waiting = Path(f"{out}.parts")
    waiting.mkdir(parents=True, exist_ok=True)
    head = waiting / "of.json"
    whole = {key: of[key] for key in ("bytes", "sha256", "parts")}
    if head.exists() and json.loads(head.read_text()) != whole:
        raise ValueError(f"{waiting} has parts of another file; remove it")
    head.write_text(json.dumps(whole))
    coming = waiting / f"{of['part']}.coming"
    shutil.copyfile(part / "data", coming)
    coming.rename(waiting / str(of["part"]))
    missing = sum(not (waiting / str(i)).exists() for i in range(of["parts"]))
    if missing:
        return missing
    joined = waiting / "joined"
    with open(joined, "wb") as target:
        for i in range(of["parts"]):
            with open(waiting / str(i), "rb") as source:
                shutil.copyfileobj(source, target, 1 << 20)
    with open(joined, "rb") as source:
        if hashlib.file_digest(source, "sha256").hexdigest() != of["sha256"]:
            raise ValueError(f"the parts in {waiting} are not the file: its sha256 is another")
    joined.rename(out)
    shutil.rmtree(waiting)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="A file in parts, and whole again.")
    commands = parser.add_subparsers(dest="command", required=True)
    splitting = commands.add_parser("split")
    splitting.add_argument("file", type=Path)
    splitting.add_argument("folder", type=Path)
    splitting.add_argument("--mib", type=int, default=27, help="of a part (27)")
    joining = commands.add_parser("join")
    joining.add_argument("part", type=Path)
    joining.add_argument("out", type=Path)
    options = parser.parse_args()
    if options.command == "split":
        for folder in split(options.file, options.folder, options.mib << 20):
            print(folder)
        return 0
    try:
        missing = join(options.part, options.out)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"parts: {error}\n")
        return 1
    print(f"{options.out}: " + (f"{missing} parts are missing" if missing else "whole, sha256 as it was"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
