"""How long a measurement will take, to be known before a machine is asked for: seconds, from sizes.

As on an H200 with 16 cores, where files are written at 1.0 to 1.6 GB/s and one start of 0.4, 5.0 and 18.6 GB is over
after 0.26, 0.35 and 0.60 seconds. They are for planning: what is measured ends by the clock.
"""

WRITTEN, HASHED = 1.0e9, 1.2e9  # bytes a second
START_S, COPIED = 0.27, 50e9  # of a process that copies nothing; bytes a second to the device
CHECKED = 100e9  # bytes of a file a second whose pages are asked for, before each start
READ = 1.7e9  # bytes a second from the disk, nothing in memory
WARM_S, LOADED = 35.0, 1.0e9  # bench/warm.py: rates, prompts, decoding; and what depends on the size, bytes a second
TOOL_S = 12.0  # bench/timeline.py, bench/stdio.py


def making(size: float) -> float:
    """A model file of so many bytes, written and hashed."""
    return size / WRITTEN + size / HASHED


def starts(size: float, n: int, contenders: int, gap_s: float = 0.0) -> float:
    """`n` starts that count of each contender, and the one that does not, with `gap_s` before each that counts."""
    one = START_S + size / COPIED + size / CHECKED + 0.1
    return contenders * ((n + 1) * one + n * gap_s)


def cold(size: float, n: int, contenders: int) -> float:
    """`n` starts of each contender, all of the file read from the disk."""
    return contenders * n * (0.8 + size / READ)


def warm(size: float) -> float:
    """Loaded: prompts, decoding, scores, and the device's own rates."""
    return WARM_S + size / LOADED
