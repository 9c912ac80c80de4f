"""The command in a world that misbehaves: the engine prints where it must not, `detokenize` of some ids fails, and the
time of day can't be relied on.

A real engine otherwise: what can't be had at will, such as a lost device, is raised from inside it.
"""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from reflex_ipc import cli
from reflex_ipc.engine import Engine
from reflex_ipc.errors import DeviceError

FAILURES = {
    13: DeviceError("the device fell off the bus"),
    14: MemoryError(),
    15: ZeroDivisionError("what nobody foresaw"),
}

_open, _detokenize = Engine.open, Engine.detokenize


def noisy_open(model: str, **options: Any) -> Engine:
    """Whatever an import or a library prints, from wherever it does."""
    print("stray print", flush=True)
    os.write(1, b"stray write\n")
    os.system("echo stray child")
    return _open(model, **options)


def wall_clock() -> float:
    raise AssertionError("the time of day was asked for")


def detokenize(self: Engine, ids: Sequence[int]) -> str:
    if len(ids) == 1 and ids[0] in FAILURES:
        raise FAILURES[ids[0]]
    return _detokenize(self, ids)


if __name__ == "__main__":
    time.time = time.time_ns = wall_clock  # type: ignore[assignment]
    Engine.open = noisy_open  # type: ignore[method-assign, assignment]
    Engine.detokenize = detokenize  # type: ignore[method-assign]
    sys.exit(cli.main(sys.argv[1:]))
