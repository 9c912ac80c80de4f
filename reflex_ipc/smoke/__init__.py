"""`reflex smoke`: does this device run the kernels, and run them right? No model is needed.

Every kernel of the build gets a small input, launched as a model launches it, and what it leaves is compared with what
Python or NumPy makes of it in float64, from the formulas of `ops.py` and nothing that kernels share. The first family
needs the standard library only, so that the time to the first correct result is the device's.
"""

import time
from argparse import Namespace

from reflex_ipc.cuda.device import start_driver
from reflex_ipc.environment import complete_site
from reflex_ipc.errors import CheckFailedError
from reflex_ipc.smoke import first
from reflex_ipc.smoke.bench import Bench, relative
from reflex_ipc.terminal import write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from reflex_ipc.smoke.bench import Outcome

    Family: TypeAlias = Callable[[Bench], Iterator[Outcome]]


def smoke(arguments: Namespace) -> int:
    """Returns the exit code; raises CheckFailedError, naming the family, when a kernel computes something else."""
    opening = start_driver(arguments.device)
    with opening.wait() as device:
        bench = Bench(device)
        free, total = device.memory()
        major, minor = device.cu.version()
        _say(f"device   {device.index}: {device.name}, compute capability {'.'.join(map(str, device.capability))}")
        _say(f"driver   CUDA {major}.{minor}; memory {free >> 20} of {total >> 20} MiB free")
        _say(f"kernels  {bench.kernels.target}, {len(bench.kernels.names())} of them, CUDA {bench.kernels.toolkit}")
        first_result = 0.0
        for name, family in families():
            largest = check(bench, name, family)
            first_result = first_result or time.monotonic() - _process_start()
            _say(f"ok       {name:<44} {largest:8.1e}")
        _say(f"first correct result {first_result * 1e3:.0f} ms after the process began")
    return 0


def check(bench: Bench, name: str, family: "Family") -> float:
    """The largest error of a family. Raises CheckFailedError."""
    largest = 0.0
    for got, wanted, bound in family(bench):
        error = relative(got, wanted)
        if not error <= bound:
            raise CheckFailedError(f"{name}: off by {error:.1e}, more than {bound:.0e}")
        largest = max(largest, error)
    bench.check_guards(name)
    return largest


def families() -> "Iterator[tuple[str, Family]]":
    """Every family by its name, with the kernels it is made of."""
    yield "embedding rows", first.embedding
    yield "arguments of every width", first.arguments
    complete_site()
    from reflex_ipc.smoke import attention, delta, experts, latent, matrices, rows, sampling

    yield "norms, gates, sums, slices", rows.rows
    yield "rotary positions", rows.rotation
    yield "attention: head sizes, groups, long texts", attention.attention
    yield "latent attention, absorbed and expanded", latent.latent
    yield "delta nets: a token, chunks, trees", delta.delta
    yield "experts and routers", experts.layers
    yield "experts of every type", experts.types
    yield "products and embeddings of every type", matrices.types
    yield "products in float32", matrices.floats
    yield "sampling", sampling.sampling
    yield "log-probabilities", sampling.log_probabilities


def _say(text: str) -> None:
    write(text + "\n")


def _process_start() -> float:
    """When this process began, on the clock of time.monotonic."""
    import os

    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    # That clock counts from the boot, sleep included; monotonic leaves sleep out.
    asleep = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return ticks / os.sysconf("SC_CLK_TCK") - asleep
