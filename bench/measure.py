"""What every measurement here shares: statistics, the page cache, where it ran, and the JSON it becomes."""

import ctypes
import functools
import hashlib
import json
import mmap
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import NormalDist, median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = 1


Absent = dict[str, Any]
"""What did not run: `contender` and `why`, for people. Where time was lacking also `reason`, NO_TIME, and what was
asked for, which another piece may have (bench/collect.py): `part` and `models` of bench/device.py, or `asked` runs of
every row of `kind` with the fields in `of`, of which `done` were done."""
NO_TIME = "no time"


class MeasurementError(Exception):
    """A figure cannot be had honestly; the message says why."""


def count(text: str) -> int:
    """An option of argparse: a whole number from 1 on."""
    if (n := int(text)) < 1:
        raise ValueError
    return n


class Summary(NamedTuple):
    n: int
    min: float
    median: float
    p90: float


def summary(runs: Sequence[float]) -> Summary:
    """p90 is interpolated between the two runs around it (NumPy's "linear", R's type 7)."""
    ordered = sorted(runs)
    at = 0.9 * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    p90 = ordered[below] + (at - below) * (ordered[above] - ordered[below])
    return Summary(len(ordered), ordered[0], median(ordered), p90)


def rank_test(before: Sequence[float], after: Sequence[float]) -> float:
    """One-sided p of the Mann-Whitney test: how likely ranks this high are for `after` if nothing changed.

    Exact where no two runs are equal and there are at most 40 a side, else the normal approximation with ties and
    continuity corrected for.
    """
    m, n = len(before), len(after)
    u = sum((a > b) + 0.5 * (a == b) for a in after for b in before)
    ties = [list(before).count(x) + list(after).count(x) for x in {*before, *after}]
    if max(m, n) <= 40 and max(ties) == 1:
        counts = _rank_sums(m, n)
        return sum(counts[int(u) :]) / sum(counts)
    total = m + n
    variance = m * n / 12 * (total + 1 - sum(t**3 - t for t in ties) / (total * (total - 1)))
    if variance == 0:
        return 1.0
    return 1 - NormalDist().cdf((u - m * n / 2 - 0.5) / variance**0.5)


@functools.cache
def _rank_sums(m: int, n: int) -> list[int]:
    """For every U from 0 to m * n, how many of the orders of m and n runs have it."""
    rows = [[1] for _ in range(n + 1)]  # of 0 runs before
    for i in range(1, m + 1):
        row = [[1]]
        for j in range(1, n + 1):
            # The last run is one of `after`, above all i before, or one of `before`.
            counts = [0] * (i * j + 1)
            for u, count in enumerate(row[j - 1]):
                counts[u + i] += count
            for u, count in enumerate(rows[j]):
                counts[u] += count
            row.append(counts)
        rows = row
    return rows[n]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def resident(path: str | os.PathLike[str]) -> float:
    """The share of a file's pages that are in memory. The file is mapped for the question only, and not touched."""
    size = os.path.getsize(path)
    if size == 0:
        raise MeasurementError(f"{path}: the file is empty")
    pages = -(-size // mmap.PAGESIZE)
    answer = ctypes.create_string_buffer(pages)
    fd = os.open(path, os.O_RDONLY)
    try:
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), f"{path} cannot be mapped")
        failed = _libc.mincore(address, size, answer)
        _libc.munmap(address, size)
    finally:
        os.close(fd)
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {path} failed")
    return answer.raw.translate(_LOWEST).count(1) / pages


_LOWEST = bytes(value & 1 for value in range(256))


def make_cold(path: str | os.PathLike[str]) -> None:
    """Drop a file from the page cache and see that it is gone: MeasurementError where something holds on to it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)  # what is not written yet cannot be dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    if resident(path) == 0:
        return
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError as error:
        raise MeasurementError(f"{path} stays in the page cache, and drop_caches says {error.strerror}") from None
    left = resident(path)
    if left > 0:
        raise MeasurementError(f"{left:.1%} of {path} stay in the page cache: some process has the file mapped")


def make_warm(path: str | os.PathLike[str]) -> None:
    """Read a file until all of it is in memory: MeasurementError where it does not stay."""
    for _ in range(3):
        if resident(path) == 1:
            return
        with open(path, "rb", buffering=0) as file:
            buffer = bytearray(4 << 20)
            while file.readinto(buffer):
                pass
    left = resident(path)
    if left < 1:
        raise MeasurementError(f"only {left:.1%} of {path} stay in memory: the machine has too little for the file")


def sha256(path: str | os.PathLike[str]) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_entry(path: str | os.PathLike[str], digest: str | None = None) -> dict[str, Any]:
    """How a result names the file it was measured with."""
    return {"file": os.path.basename(path), "bytes": os.path.getsize(path), "sha256": digest or sha256(path)}


def document(kind: str, content: dict[str, Any], library: str | None = None) -> dict[str, Any]:
    """A result: its content, and all that is needed to say where it came from and to get it again. Pieces are told
    apart by `when`, and two machines, or two short pieces, may end within a second."""
    now = time.time_ns() // 1_000_000
    return {
        "schema": SCHEMA,
        "kind": kind,
        "when": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now // 1000))}.{now % 1000:03}Z",
        "command": [os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]],
        "source": source(),
        "machine": machine(library),
        **content,
    }


def save(path: str | os.PathLike[str], result: dict[str, Any]) -> None:
    """Whole or not at all: a run that is cut short leaves what was there."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        part.write_text(json.dumps(result, indent=1) + "\n")
        part.rename(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


_SOURCES = ("", ".py", ".cu", ".cuh", ".c", ".h", ".toml")


def source() -> dict[str, Any]:
    """What ran: the commit, whether the working tree differs from it, and a hash that a copy without git has too."""
    files: list[str] = []
    try:
        commit = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
        changed = bool(_output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        commit, changed = None, None
    for folder in ("bin", "reflex_ipc", "kernels", "bench"):
        files += (str(p) for p in (ROOT / folder).rglob("*") if p.suffix in _SOURCES and p.is_file())
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(os.path.relpath(name, ROOT).encode() + b"\0" + Path(name).read_bytes())
    return {"commit": commit, "changed": changed, "sources_sha256": digest.hexdigest()}


def machine(library: str | None = None) -> dict[str, Any]:
    """Device and host. Without NVML the device is None."""
    import nvml

    try:
        with nvml.Device(library=library or nvml.LIBRARY) as device:
            gpu: dict[str, Any] | None = device.describe()
    except nvml.NVMLError:
        gpu = None
    memory = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    processor = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "gpu": gpu,
        "cpu": processor[1] if processor else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(memory[1]) * 1024 if memory else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "driver_environment": {k: v for k, v in os.environ.items() if k.startswith(("CUDA_", "REFLEX_", "LD_PRELOAD"))},
    }


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as they need; the first is text, the others are figures."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
