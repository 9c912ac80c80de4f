"""The seal: which sources the tests on a device have vouched for.

CI has no device. `pytest -m gpu` on a machine with one writes tests/gpu/verified.json when everything passed: the hash
of every file it vouches for, the tests that passed, those that were skipped and why, device and driver. It is complete
when the suite passed twice, with the cubins and with `REFLEX_FORCE_PTX=1`. Where no device could be had,
tests/gpu/pending.json names what changed since, and why it stands unverified: CI accepts that, `reflex doctor` and the
README show it, and it is the first thing to clear.

    python kernels/seal.py                   say what is vouched for and what is not
    python kernels/seal.py pending "why"     write pending.json
"""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VOUCHED = (
    "kernels/",
    "reflex_ipc/cuda/",
    "reflex_ipc/archs/",
    "reflex_ipc/ops.py",
    "reflex_ipc/plan.py",
    "reflex_ipc/backends.py",
    "reflex_ipc/engine.py",
    "reflex_ipc/generation.py",
    "reflex_ipc/sampler.py",
    "reflex_ipc/scoring.py",
    "reflex_ipc/healing.py",
    "reflex_ipc/tree.py",
    "reflex_ipc/scores.py",
)
RUNS = ("cubin", "ptx")
SUFFIXES = (".py", ".cu", ".cuh", ".c", ".h", ".json")


class Seal:
    """The two files of one source tree, and what they say about it."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.verified_path = root / "tests" / "gpu" / "verified.json"
        self.pending_path = root / "tests" / "gpu" / "pending.json"

    def hashes(self) -> dict[str, str]:
        """Every file vouched for and its SHA-256, by its path from the root."""
        paths: list[Path] = []
        for name in VOUCHED:
            place = self.root / name
            built = place / "lib"
            paths += [p for p in place.rglob("*") if built not in p.parents] if name.endswith("/") else [place]
        return {
            str(path.relative_to(self.root)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(paths)
            if path.is_file() and path.suffix in SUFFIXES
        }

    def changed(self) -> list[str]:
        """The files that the last verified run did not see as they are, or saw and that are gone."""
        then, now = self._read(self.verified_path).get("files", {}), self.hashes()
        return sorted(path for path in {*then, *now} if then.get(path) != now.get(path))

    def missing_runs(self) -> list[str]:
        """Which of the two runs has not passed on the files of the last one."""
        runs = self._read(self.verified_path).get("runs", {})
        return [run for run in RUNS if run not in runs]

    def problem(self) -> str | None:
        """What CI fails on, or None: changes that no device has seen and pending.json does not name, or a pending.json
        that names what is no longer so."""
        changed, pending = self.changed(), self._read(self.pending_path)
        named = pending.get("files", [])
        unnamed = [path for path in changed if not any(_covers(name, path) for name in named)]
        idle = [name for name in named if not any(_covers(name, path) for path in changed)]
        if unnamed:
            return (
                "no device has verified " + ", ".join(unnamed) + '; run pytest -m gpu, or kernels/seal.py pending "why"'
            )
        if idle and not self.missing_runs():
            return f"{self.pending_path.name} names what is verified: {', '.join(idle)}; remove it"
        if self.missing_runs() and not pending:
            return f"the device suite has not run with {' and '.join(self.missing_runs())} on these files"
        if pending and not str(pending.get("why", "")).strip():
            return f"{self.pending_path.name} does not say why"
        return None

    def status(self) -> dict[str, Any]:
        """For the manifest: {"state": "verified", "device", "driver", "runs"} or {"state": "pending", "why", "files",
        "runs"}; of each run how many tests passed, and how many were skipped by reason, on whichever files."""
        changed, pending = self.changed(), self._read(self.pending_path)
        runs = self._read(self.verified_path).get("runs", {})
        counts = {
            name: {"passed": len(run["tests"]), "skipped": {why: len(left) for why, left in run["skipped"].items()}}
            for name, run in runs.items()
        }
        if changed or self.missing_runs():
            return {"state": "pending", "why": pending.get("why", "not said"), "files": changed, "runs": counts}
        return {
            "state": "verified",
            "device": runs["cubin"]["device"],
            "driver": runs["cubin"]["driver"],
            "runs": counts,
        }

    def record(
        self, run: str, tests: Sequence[str], device: str, driver: str, skipped: Mapping[str, str] | None = None
    ) -> None:
        """A whole run of the suite passed on the files as they are, but for the tests that were skipped: name -> why,
        kept as why -> names."""
        files, old = self.hashes(), self._read(self.verified_path)
        runs = old.get("runs", {}) if old.get("files") == files else {}
        left_out: dict[str, list[str]] = {}
        for name, why in sorted((skipped or {}).items()):
            left_out.setdefault(why, []).append(name)
        runs[run] = {"device": device, "driver": driver, "tests": sorted(tests), "skipped": left_out}
        self._write(self.verified_path, {"files": files, "runs": runs})
        if not self.missing_runs():
            self.pending_path.unlink(missing_ok=True)

    def write_pending(self, why: str) -> None:
        """Name what changed since the last verified run; all of it, by folder, if there was none."""
        never = not self.verified_path.exists()
        self._write(self.pending_path, {"why": why, "files": list(VOUCHED) if never else self.changed()})

    @staticmethod
    def _read(path: Path) -> dict[str, Any]:
        return dict(json.loads(path.read_text())) if path.exists() else {}

    @staticmethod
    def _write(path: Path, content: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def _covers(name: str, path: str) -> bool:
    return path.startswith(name) if name.endswith("/") else path == name


def main(arguments: list[str]) -> int:
    """The command."""
    seal = Seal()
    match arguments:
        case []:
            print(json.dumps(seal.status(), indent=1))
            if problem := seal.problem():
                print(problem, file=sys.stderr)
                return 1
        case ["pending", why]:
            seal.write_pending(why)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
