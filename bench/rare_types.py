"""What a product costs with weights of every type: those that go one generic way against those that have a fast one.

    python bench/rare_types.py OUT               in about half a minute: OUT/types.json, a table last
    python bench/rare_types.py OUT --types Q4_K IQ2_S --counts 40

One matrix of 8B, from 4,096 to 12,288, times 1, 40 and 128 rows, in the launches that the executor makes of it, what
prepares the rows included. One launch of a graph multiplies with many such matrices in turn, more than the second-level
cache holds; the time is a product's. Errors are relative, of the last rows, against float64.

The bound is on a rare type's time against that of the fast type whose bits a weight are nearest, of several the fastest
(`nearest`): both then have about as much to read. Beside it stands the time against the median of all fast types
(`against_median`), which favours types of few bits.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import ending  # noqa: E402
import measure  # noqa: E402
import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402

from reflex_ipc.cuda import LIB  # noqa: E402
from reflex_ipc.cuda.device import Device, start_driver  # noqa: E402
from reflex_ipc.cuda.formats import FORMATS, RARE  # noqa: E402
from reflex_ipc.cuda.launch import Kernels  # noqa: E402
from reflex_ipc.cuda.linear import linear, scratch_bytes  # noqa: E402
from reflex_ipc.cuda.products import Call, Input, Matrix, limits_of  # noqa: E402
from reflex_ipc.reference.dequant import dequantise  # noqa: E402

N_IN, N_OUT = 4096, 12288
COUNTS = (1, 40, 128)
BEYOND_CACHE = 160 << 20  # bytes of weights of a graph at least
WARM = 3  # launches that do not count
CHECKED = 96  # rows of W
WORST = 1e-3  # of the errors: x is half precision from two rows on
BOUND = 3.0  # times the nearest fast type


def bits(kind: str) -> float:
    """Of a weight."""
    return 8 * FORMATS[kind].block_bytes / FORMATS[kind].block


def weights(kind: str, n_out: int) -> npt.NDArray[np.uint8]:
    """Random blocks of whole rows whose scales are neither infinite nor subnormal."""
    rng = np.random.default_rng(2)
    if kind in ("F32", "F16"):
        values = 0.02 * rng.standard_normal(n_out * N_IN, dtype=np.float32)
        return values.astype(np.dtype(f"f{FORMATS[kind].block_bytes}")).view(np.uint8)
    if kind == "BF16":
        values = 0.02 * rng.standard_normal(n_out * N_IN, dtype=np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    form = FORMATS[kind]
    blocks = rng.integers(4, 48, (n_out * N_IN // form.block, form.block_bytes), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(118, 124, len(blocks), dtype=np.uint8)  # its scale is an exponent
    return blocks.reshape(-1)


class Bench:
    """The device, x, and room for one type's matrices."""

    def __init__(self, device: Device, lib: str, n_most: int, n_out: int, rounds: int, beyond: int) -> None:
        self.device, self.stream, self.kernels = device, device.stream(), Kernels(device, lib)
        self.limits = limits_of(device, self.kernels)
        self.n_out, self.rounds, self.beyond = n_out, rounds, beyond
        self.dependent = device.capability >= (9, 0)
        self.values = np.random.default_rng(1).standard_normal((n_most, N_IN)).astype(np.float32)
        self.x, self.out = self.take(self.values.nbytes), self.take(4 * n_most * n_out)
        self.stream.to_device(self.x, self.values.tobytes())
        self.pool = self.take(max(self.copies(kind) * self.size(kind) for kind in FORMATS))
        matrices = [Matrix(kind, 0, n_out, 0, n_out) for kind in FORMATS]
        self.scratch = self.take(max(scratch_bytes(self.limits, n_most, N_IN, [matrix]) for matrix in matrices))

    def take(self, size: int) -> int:
        """Room that goes with the device."""
        return int(self.device.allocate(size, "measuring").address)

    def size(self, kind: str) -> int:
        """Bytes of a matrix; each begins at a multiple of 256."""
        used = self.n_out * N_IN // FORMATS[kind].block * FORMATS[kind].block_bytes
        return -(-used // 256) * 256

    def copies(self, kind: str) -> int:
        return max(2, -(-self.beyond // self.size(kind)))

    def feed(self, kind: str) -> None:
        """The pool is full of one matrix, again and again."""
        self.blocks = weights(kind, self.n_out)
        for i in range(self.copies(kind)):
            if i == 0:
                self.stream.to_device(self.pool, self.blocks.tobytes())
            else:
                self.stream.within(self.pool + i * self.size(kind), self.pool, self.blocks.nbytes)
        self.stream.synchronize()

    def calls(self, kind: str, m: int, i: int) -> list[Call]:
        matrix = Matrix(kind, self.pool + i * self.size(kind), self.n_out, self.out, self.n_out)
        return linear(self.limits, Input(self.x, m, N_IN, N_IN), [matrix], self.scratch)

    def seconds(self, kind: str, m: int) -> list[float]:
        """Of a product, each launch of the graph."""
        n = self.copies(kind)
        ready = [
            call.prepare(self.kernels, self.stream, self.dependent) for i in range(n) for call in self.calls(kind, m, i)
        ]
        with self.stream.capture() as capture:
            for each in ready:
                each()
        graph = capture.graph.instantiate()
        capture.graph.close()
        before, after = self.device.event(timing=True), self.device.event(timing=True)
        took = []
        for _ in range(WARM + self.rounds):
            before.record(self.stream)
            graph.launch(self.stream)
            after.record(self.stream)
            after.synchronize()
            took.append(after.milliseconds_since(before) / 1e3 / n)
        for thing in (graph, before, after):
            thing.close()
        return took[WARM:]

    def error(self, kind: str, m: int) -> float:
        """Relative, of the last rows."""
        checked = min(CHECKED, self.n_out)
        raw = self.blocks[-(self.blocks.nbytes // self.n_out * checked) :]
        w = dequantise(raw, kind, checked * N_IN).reshape(checked, N_IN).astype(np.float64)
        wanted = self.values[:m].astype(np.float64) @ w.T
        self.stream.fill(self.out, 0xFF, 4 * m * self.n_out)  # NaN
        for call in self.calls(kind, m, 0):
            call.prepare(self.kernels, self.stream)()
        self.stream.synchronize()
        got = np.frombuffer(self.stream.read(self.out, 4 * m * self.n_out), np.float32).reshape(m, -1)[:, -checked:]
        return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def compared(rows: Sequence[dict[str, Any]]) -> None:
    """Give every rare row its `nearest` fast type, what it takes `against_nearest` and `against_median`."""
    for row in rows:
        fast = [other for other in rows if not other["rare"] and other["rows"] == row["rows"]]
        if not row["rare"] or not fast or not all(median(other["seconds"]) for other in fast):
            continue
        took = median(row["seconds"])
        near = min(fast, key=lambda other: (abs(bits(other["type"]) - bits(row["type"])), median(other["seconds"])))
        row["nearest"] = near["type"]
        row["against_nearest"] = took / median(near["seconds"])
        row["against_median"] = took / median(median(other["seconds"]) for other in fast)


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    body = []
    for row in rows:
        took = median(row["seconds"])
        rate = f"{row['bytes'] / took / 1e9:.0f}" if took else "-"
        figures = [f"{row['bits']:.2f}", str(row["rows"]), f"{took * 1e6:.1f}", rate]
        ratios = [f"{row[key]:.2f}" if key in row else "-" for key in ("against_nearest", "against_median")]
        body.append([row["type"], *figures, row.get("nearest", "-"), *ratios, f"{row['error']:.1e}"])
    return measure.table(["", "bits", "rows", "µs", "GB/s", "nearest", "x nearest", "x median", "error"], body)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Products with weights of every type.")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory of the result")
    parser.add_argument("--types", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--counts", nargs="+", type=measure.count, default=list(COUNTS), metavar="M", help="rows of x")
    parser.add_argument("--n-out", type=measure.count, default=N_OUT, metavar="N", help=f"rows of the matrix ({N_OUT})")
    parser.add_argument("--rounds", type=measure.count, default=10, help="launches of a graph that count")
    parser.add_argument(
        "--beyond", type=measure.count, default=BEYOND_CACHE, metavar="BYTES", help="of weights of a graph"
    )
    parser.add_argument("--library", default="libcuda.so.1", help="the driver")
    parser.add_argument("--kernels", default=LIB, help="directory of the kernels, where it is another")
    given = parser.parse_args()
    device = start_driver(0, given.library).wait()
    bench = Bench(device, given.kernels, max(given.counts), given.n_out, given.rounds, given.beyond)
    rows: list[dict[str, Any]] = []
    for kind in given.types:
        bench.feed(kind)
        of = {"type": kind, "rare": kind in RARE, "bits": bits(kind), "bytes": bench.blocks.nbytes}
        for m in given.counts:
            measured = {"seconds": bench.seconds(kind, m), "error": bench.error(kind, m)}
            rows.append({**of, "rows": m, "flops": 2 * m * given.n_out * N_IN, **measured})
    device.close()
    compared(rows)
    content = {"models": [], "n_in": N_IN, "n_out": given.n_out, "bound": BOUND, "rows": rows, "not_run": []}
    measure.save(given.out / "types.json", measure.document("types", content))
    print(render(rows))
    ratios = [row["against_nearest"] for row in rows if "against_nearest" in row]
    if ratios:
        print(f"rare types: at most {max(ratios):.2f} times the nearest fast one, median {median(ratios):.2f}")
    worst = float(np.max([row["error"] for row in rows]))
    print(f"largest error {worst:.1e}")
    return int(not worst <= WORST)


if __name__ == "__main__":
    ending.run(main)
