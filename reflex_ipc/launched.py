"""When this process was launched, and how exactly that is known."""

import os
import time
from typing import NamedTuple

from reflex_ipc import stamps

LAUNCHED = "REFLEX_LAUNCHED"
"""The variable by which whoever launches says when: CLOCK_MONOTONIC nanoseconds, read just before the launch."""


LONGEST = 600 * 10**9
"""Nanoseconds from a launch to our first line: what claims to be longer ago was the launch of something else."""


class Launch(NamedTuple):
    """When the process was made: CLOCK_MONOTONIC nanoseconds, true to `within` nanoseconds, and how that is known."""

    at: int
    within: int
    source: str


def launch() -> Launch:
    """When this process was launched.

    From `REFLEX_LAUNCHED`, if whoever launched said so. Else from the kernel's own note (`starttime` of
    /proc/self/stat), which is rounded down to a clock tick, most often 10 ms; the launch lies within that tick, and
    before what has been stamped. Where there is neither, the first stamp stands for it.
    """
    first = min((began or at for began, at, _ in stamps.moments.values()), default=time.monotonic_ns())
    said = os.environ.get(LAUNCHED, "")
    # The variable may be another process's, inherited: a launch days ago, or one to come, is none.
    if said.isdecimal() and len(said) < 20 and 0 <= first - int(said) < LONGEST:
        return Launch(int(said), 0, LAUNCHED)
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return Launch(first, 0, "first stamp")
    tick = 10**9 // os.sysconf("SC_CLK_TCK")
    # The kernel counts from boot, sleep included, as CLOCK_BOOTTIME does.
    begin = ticks * tick - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns())
    end = min(begin + tick, first)
    if end < begin or first - begin > LONGEST:
        return Launch(first, 0, "first stamp")
    return Launch((begin + end) // 2, (end - begin + 1) // 2, "/proc/self/stat")


def since_launch() -> dict[str, float]:
    """Milliseconds from the launch until now, `launch_ms`, as a timing."""
    return {"launch_ms": (time.monotonic_ns() - launch().at) / 1e6}
