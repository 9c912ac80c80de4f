"""What a run needs in host memory, and what there is."""

from typing import NamedTuple

from reflex_ipc.environment import control_groups
from reflex_ipc.ops import Attention, LatentAttention
from reflex_ipc.plan import PREFILL_CHUNK, Plan

# Interpreter, NumPy and BLAS, the vocabulary, and reading buffers; measured with the demo model.
_BASE = 160 << 20
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
