"""Keeps the driver initialised for the processes that start meanwhile: the `held` state of bench/coldstart.py.

`python bench/hold.py` calls cuInit, prints "holding" and waits for the end of its stdin, which comes at the latest when
whoever started it is gone. No context, no memory beyond what the driver takes, no work: while it lives, other processes
start the driver faster.
"""

import ctypes
import os
import sys


def main() -> int:
    library = sys.argv[1] if len(sys.argv) > 1 else "libcuda.so.1"
    try:
        code = ctypes.CDLL(library).cuInit(0)
    except OSError as error:
        sys.stderr.write(f"hold: {error}\n")
        return 1
    if code:
        sys.stderr.write(f"hold: cuInit failed: error {code}\n")
        return 1
    try:
        os.write(1, b"holding\n")
    except BrokenPipeError:
        return 1
    while os.read(0, 1 << 12):
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
