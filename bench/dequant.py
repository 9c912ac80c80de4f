"""Speed of the NumPy dequantisers: `python bench/dequant.py [--model FILE.gguf] [--threads N]`.

Every type is timed on random blocks that do not fit in cache (best of several runs, output already in memory). GB/s
counts the blocks read and the float32 values written. With a model, all its tensors are dequantised into fresh memory,
as when it is loaded, by N threads that take whole tensors in turn.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ending
import numpy as np

from reflex_ipc.reference.dequant import DEQUANTISERS, dequantise


def time_type(name: str, n_elements: int, runs: int) -> tuple[float, float]:
    """(nanoseconds an element, GB/s) of one type."""
    dequantiser = DEQUANTISERS[name]
    n_blocks = n_elements // dequantiser.block_elements
    rng = np.random.default_rng(0)
    # No scale of such bytes is infinite or subnormal, as none of a real weight is: those are slower.
    data = rng.integers(4, 64, n_blocks * dequantiser.block_bytes, dtype=np.uint8)
    out = np.zeros(n_blocks * dequantiser.block_elements, np.float32)
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        dequantise(data, name, out.size, out)
        best = min(best, time.perf_counter() - start)
    return best / out.size * 1e9, (data.nbytes + out.nbytes) / best / 1e9


def time_model(path: Path, n_threads: int) -> tuple[int, float]:
    """(elements, seconds) of dequantising a whole file whose pages are in the cache."""
    from gguf import GGUFReader

    tensors = [(t.data, t.tensor_type.name, int(t.n_elements)) for t in GGUFReader(path).tensors]
    for data, _, _ in tensors:
        data.max()  # page it in
    tensors.sort(key=lambda tensor: -tensor[2])
    with ThreadPoolExecutor(n_threads) as pool:
        start = time.perf_counter()
        weights = list(pool.map(lambda tensor: dequantise(*tensor), tensors))
        seconds = time.perf_counter() - start
    return sum(w.size for w in weights), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--elements", type=int, default=1 << 24, help="elements a type is timed on (default %(default)s)"
    )
    parser.add_argument("--runs", type=int, default=5, help="runs of which the best counts (default %(default)s)")
    parser.add_argument("--model", type=Path, help="a GGUF file to dequantise whole")
    parser.add_argument("--threads", type=int, default=1, help="threads for the model (default %(default)s)")
    options = parser.parse_args()
    if options.model is None:
        print(f"{'type':8} {'ns/element':>10} {'GB/s':>6}")
        for name in DEQUANTISERS:
            ns, rate = time_type(name, options.elements, options.runs)
            print(f"{name:8} {ns:10.2f} {rate:6.1f}")
    else:
        for _ in range(options.runs):
            n_elements, seconds = time_model(options.model, options.threads)
            print(f"{n_elements / 1e6:.1f} M weights, {options.threads} threads: {seconds:.3f} s")


if __name__ == "__main__":
    ending.run(main)
