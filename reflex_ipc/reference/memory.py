"""What a run needs in host memory, and what there is."""

import os
import sys
from typing import NamedTuple

from reflex_ipc.environment import control_groups
from reflex_ipc.errors import OutOfMemoryError
from reflex_ipc.ops import Attention, LatentAttention
from reflex_ipc.plan import PREFILL_CHUNK, Plan

# Interpreter, NumPy and BLAS, the vocabulary, and reading buffers; measured with the demo model.
_BASE = 160 << 20
# What BLAS reserves for each of its threads as it is loaded, most of it never touched: measured with OpenBLAS 0.3.
_THREAD_ADDRESSES = 41 << 20
CONTEXT_STEP = 256
"""The cache grows by this many tokens at a time."""
SCORES = 1 << 21
"""Attention scores at once: 8 MiB, some 30 ms of one processor with their exponentials."""


class Need(NamedTuple):
    """Bytes."""

    weights: int
    cache: int
    scratch: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.scratch

    def __str__(self) -> str:
        return (
            f"{mib(self.total)} of memory ({mib(self.weights)} weights as float32, {mib(self.cache)} cache, "
            f"{mib(self.scratch)} working space)"
        )


def mib(n: int) -> str:
    return f"{n / (1 << 20):,.0f} MiB"


def estimate(plan: Plan, n_ctx: int, n_step: int = PREFILL_CHUNK) -> Need:
    """What the reference executor needs at a context of `n_ctx` tokens, in steps of at most `n_step`."""
    per_token, fixed = plan.state_elements()
    n_step = min(n_ctx, n_step)
    # Scores of one group of heads, or of one head, before and after the softmax's exponential; a block of them at once.
    groups = [op.n_head // op.n_head_kv for op in plan.ops if isinstance(op, Attention)]
    groups += [1 for op in plan.ops if isinstance(op, LatentAttention)]
    heads = max(groups, default=0)
    scores = 3 * max(min(n_step * n_ctx * heads, SCORES), n_ctx * heads)
    return Need(
        weights=4 * sum(t.n_elements for t in plan.resident()),
        cache=4 * (per_token * n_ctx + fixed),
        scratch=4 * (plan.peak_width() * n_step + scores + 2 * plan.n_vocab) + _BASE,
    )


def first(plan: Plan, n_ctx: int) -> Need:
    """What an executor needs before it has been told how long its sequence will be."""
    return estimate(plan, min(n_ctx, CONTEXT_STEP))


def check(path: str, need: Need) -> None:
    """Raises OutOfMemoryError with the sum where there is not as much. To be asked before NumPy is imported: a BLAS
    that finds no address space ends the process by itself."""
    for free, of in ((available(), ""), (address_space(), " of the address space that `ulimit -v` leaves")):
        if free is not None and need.total > free:
            raise OutOfMemoryError(f"{path} needs {need}; {mib(max(free, 0))}{of} are free")


def address_space() -> int | None:
    """Bytes that this process may still map for a `Need`, beside the threads of its BLAS; None without a limit."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    with open("/proc/self/statm") as file:
        left = limit - int(file.read().split()[0]) * resource.getpagesize()
    if "numpy" in sys.modules:
        return left + _BASE  # it is there already
    threads = os.environ.get("OPENBLAS_NUM_THREADS", "")
    return left - _THREAD_ADDRESSES * (int(threads) if threads.isdecimal() else len(os.sched_getaffinity(0)))


def available() -> int | None:
    """Bytes this process may still take: what the kernel says is available, within its control group's limit."""
    limits = []
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    limits.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError):
        pass  # no such file in this container: what was found until here counts
    for limit, used in zip(control_groups("memory.max"), control_groups("memory.current"), strict=False):
        if limit.isdecimal() and used.isdecimal():
            limits.append(int(limit) - int(used))
    return min(limits, default=None)
