"""What the device can do at best, measured where and when the engine is: copy, read, host to device, bf16 products.

`python bench/rates.py` prints JSON. It needs torch or CuPy. The figures are bytes and operations a second, copies
counted both ways.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import ending

COPY = READ = 4 << 30  # bytes, beyond any cache
HOST = 1 << 30
SIDE = 8192  # of the square matrices
ROUNDS = 10


def main() -> int:
    for attempt in (_torch, _cupy):
        try:
            found = attempt()
        except ImportError:
            continue
        sys.stdout.write(json.dumps(found) + "\n")
        return 0
    sys.stderr.write("rates: neither torch nor CuPy is installed\n")
    return 1


def shares(row: Mapping[str, Any], found: Mapping[str, Any] | None) -> dict[str, float]:
    """Of the read, copy and bf16 rates, what a row uses; nothing where either is not known."""
    if found is None or "bytes" not in row:
        return {}
    seconds = median(row["seconds"])
    return {
        "of_read": row["bytes"] / seconds / found["read_bytes_s"],
        "of_copy": row["bytes"] / seconds / found["copy_bytes_s"],
        "of_bf16": row["flops"] / seconds / found["bf16_flop_s"],
    }


def _seconds(work: Callable[[], object], synchronize: Callable[[], object]) -> float:
    """A turn's mean over ROUNDS, after 3 that do not count: the clocks rise first."""
    for _ in range(3):
        work()
    synchronize()
    began = time.perf_counter()
    for _ in range(ROUNDS):
        work()
    synchronize()
    return (time.perf_counter() - began) / ROUNDS


def _result(by: str, copy: float, read: float, host: float, product: float) -> dict[str, Any]:
    return {
        "by": by,
        "copy_bytes_s": 2 * COPY / copy,
        "read_bytes_s": READ / read,
        "host_to_device_bytes_s": HOST / host,
        "bf16_flop_s": 2 * SIDE**3 / product,
    }


def _torch() -> dict[str, Any]:
    import torch  # type: ignore[import-not-found,unused-ignore]

    if not torch.cuda.is_available():
        raise ImportError
    a = torch.ones(READ // 4, device="cuda")
    b = torch.empty_like(a)
    pinned = torch.empty(HOST // 4).pin_memory()
    x, y = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    works = (lambda: b.copy_(a), a.sum, lambda: b[: HOST // 4].copy_(pinned, non_blocking=True), lambda: x @ y)
    return _result(f"torch {torch.__version__}", *(_seconds(work, torch.cuda.synchronize) for work in works))


def _cupy() -> dict[str, Any]:
    import cupy  # type: ignore[import-not-found,unused-ignore]
    import numpy as np

    a = cupy.ones(READ // 4, dtype=cupy.float32)
    b = cupy.empty_like(a)
    memory = cupy.cuda.alloc_pinned_memory(HOST)
    pinned = np.frombuffer(memory, np.float32, HOST // 4)
    # CuPy has no bf16; half precision runs at the same rate.
    x, y = (cupy.random.standard_normal((SIDE, SIDE), dtype=cupy.float32).astype(cupy.float16) for _ in range(2))
    works = (lambda: cupy.copyto(b, a), a.sum, lambda: b[: HOST // 4].set(pinned), lambda: x @ y)
    done = cupy.cuda.Device().synchronize
    return _result(f"cupy {cupy.__version__}, float16", *(_seconds(work, done) for work in works))


if __name__ == "__main__":
    ending.run(main)
