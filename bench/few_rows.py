"""What a product of 8 to 128 rows costs, on this device: every linear of a layer, and whether it is right.

    python bench/few_rows.py OUT                 in about 150 seconds: OUT/few_rows.json, short tables last
    python bench/few_rows.py OUT --types Q4_K --counts 8 40 --no-sweep

Up to 64 rows three ways: `old` is matmul.cuh, where each warp reads x itself, 8 or 16 rows a block, `new` few.cuh, and
`gemm` weights widened to halves and one plain product. Above, `new` in widths from 32 on, and `gemm`. Of 8 and 16 rows
`old`, and for k-quants `new` with room for 16. Times are of the products alone: x is halves already.
One launch of a graph multiplies with many matrices in turn, more than the second-level cache holds, each product
dependent on the one before. The sweep runs `new` in every shape it can have, next to the one that cuda/few.py chooses.
Kernels are compiled here.
"""

import argparse
import concurrent.futures
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import ending  # noqa: E402
import measure  # noqa: E402
import numpy as np  # noqa: E402

import build  # noqa: E402
from reflex_ipc.cuda import linear  # noqa: E402
from reflex_ipc.cuda.device import Device, start_driver  # noqa: E402
from reflex_ipc.cuda.few import FewShape, few, few_parts, few_shape, few_shapes  # noqa: E402
from reflex_ipc.cuda.formats import FEW_WIDTH, FLOATS, FORMATS, WHOLE, WIDTHS  # noqa: E402
from reflex_ipc.cuda.gemm import gemm_half  # noqa: E402
from reflex_ipc.cuda.launch import Kernels  # noqa: E402
from reflex_ipc.cuda.products import Call, Input, Limits, Matrix, Scratch, limits_of, pack_matrices, prepare  # noqa: E402
from reflex_ipc.reference.dequant import dequantise  # noqa: E402

TYPES = ("Q4_K", "Q6_K", "Q8_0", "F16")
LESS = (8, 16)
COUNTS = (17, 24, 32, 40, 48, 64)
MORE = (80, 96, 128)
SWEPT = (32, 40, 64)
OLD_WIDTHS = (8, 16)
POOL = 768 << 20  # bytes of weights at a time
BEYOND_CACHE = 160 << 20  # bytes of weights of a graph at least
CHECKED = 192  # rows of W


class Product(NamedTuple):
    model: str
    name: str
    n_in: int
    rows: tuple[int, ...]
    swiglu: bool = False


PRODUCTS = (
    Product("8B", "qkv", 4096, (4096, 1024, 1024)),
    Product("8B", "o", 4096, (4096,)),
    Product("8B", "gate, up", 4096, (12288, 12288), True),
    Product("8B", "down", 12288, (4096,)),
    Product("0.6B", "qkv", 1024, (2048, 1024, 1024)),
    Product("0.6B", "o", 2048, (1024,)),
    Product("0.6B", "gate, up", 1024, (3072, 3072), True),
    Product("0.6B", "down", 3072, (1024,)),
)
OUTPUT = Product("8B", "output", 4096, (151936,))
"""Of at most 16 rows."""
LAYERS = {"8B": 36, "0.6B": 28}


def kernels(types: Sequence[str], work: Path, target: str) -> str:
    """Compile what is compared; the directory of the result."""
    sources = work / "sources"
    sources.mkdir(parents=True, exist_ok=True)
    for path in (*(ROOT / "kernels").glob("*.cuh"), *(ROOT / "kernels" / f"{n}.cu" for n in ("rows", "gemm"))):
        (sources / path.name).write_text(path.read_text())
    files = [sources / "rows.cu", sources / "gemm.cu"]
    for kind in types:
        name = kind.lower()
        old = "".join(f"REFLEX_MATMUL(old_{name}_{w}, {kind}, {w})\n" for w in OLD_WIDTHS)
        made = {f"old_{name}": f'#include "matmul.cuh"\n{old}REFLEX_WIDEN(widen_{name}, {kind})\n'}
        for w in [w for w in WIDTHS if w > FEW_WIDTH or (w == FEW_WIDTH and kind in WHOLE)]:
            made[f"few_{name}_{w}"] = f'#include "few.cuh"\nREFLEX_FEW(few_{name}_{w}, {kind}, {w})\n'
        for stem, text in made.items():
            (sources / f"{stem}.cu").write_text(text)
            files.append(sources / f"{stem}.cu")
    compiler, cache = build.Compiler(), work / "cache"
    cache.mkdir(exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        built = list(pool.map(lambda file: compiler.compile(file, target, cache), files))
    lib = work / "lib"
    if not (lib / target).exists():
        build.write_target(lib / target, compiler, built, target, cache)
    return str(lib)


class Bench:
    """The device, and memory for everything."""

    def __init__(self, device: Device, lib: str, dependent: bool) -> None:
        self.device, self.stream, self.kernels, self.dependent = (
            device,
            device.stream(),
            Kernels(device, lib),
            dependent,
        )
        self.limits = limits_of(device, self.kernels)
        self.pool, self.x, self.out = self.take(POOL), self.take(128 * 12288 * 4), self.take(128 * 24576 * 4)
        self.scratch = self.take(400 << 20)
        rng = np.random.default_rng(1)
        self.halves = rng.standard_normal((128, 12288)).astype(np.float32)
        self.stream.to_device(self.x, self.halves.tobytes())

    def take(self, size: int) -> int:
        """Room that goes with the device."""
        return int(self.device.allocate(size, "measuring").address)

    def feed(self, kind: str) -> None:
        """The pool is full of weights of this type: the same 32 MB again and again."""
        form = FORMATS[kind]
        unit = 96 * form.block_bytes * 256  # whole rows of every product
        rng = np.random.default_rng(2)
        size = (32 << 20) // unit * unit
        if kind == "F16":
            self.block = (0.02 * rng.standard_normal(size // 2)).astype(np.float16).view(np.uint8)
        else:
            # No scale of such bytes is infinite or subnormal.
            self.block = rng.integers(4, 48, size, dtype=np.uint8)
        self.stream.to_device(self.pool, self.block.tobytes())
        filled = size
        while filled < POOL:
            step = min(filled, POOL - filled)
            self.stream.within(self.pool + filled, self.pool, step)
            filled += step
        self.stream.synchronize()

    def matrices(self, kind: str, product: Product, place: int) -> tuple[list[Matrix], int]:
        """One layer's from this place in the pool on, and where the next one's begin."""
        form, found, out = FORMATS[kind], [], self.out
        for n in product.rows:
            found.append(Matrix(kind, self.pool + place, n, out, n))
            place += -(-n * product.n_in // form.block * form.block_bytes // 256) * 256
            out += 128 * 4 * n
        return found, place

    def graph(self, layers: Sequence[Sequence[Call]]) -> float:
        """Microseconds of one of them."""
        with self.stream.capture() as capture:
            for calls in layers:
                for call in calls:
                    call.prepare(self.kernels, self.stream, self.dependent)()
        graph = capture.graph.instantiate()
        capture.graph.close()
        before, after = self.device.event(timing=True), self.device.event(timing=True)
        took = []
        for _ in range(4):
            before.record(self.stream)
            graph.launch(self.stream)
            after.record(self.stream)
            after.synchronize()
            took.append(1000 * after.milliseconds_since(before) / len(layers))
        graph.close()
        before.close()
        after.close()
        return median(took[1:])

    def run(self, calls: Sequence[Call]) -> None:
        for call in calls:
            call.prepare(self.kernels, self.stream)()
        self.stream.synchronize()

    def entry(self, m: int, product: Product) -> Input:
        return Input(self.x, m, product.n_in, product.n_in)

    def time(self, way: "Way", kind: str, product: Product, m: int) -> float:
        layers: list[list[Call]] = []
        place = size = 0
        first, each = self.matrices(kind, product, 0)
        while place + each <= POOL and size < max(BEYOND_CACHE, 3 * each) and len(layers) < 64:
            matrices, end = self.matrices(kind, product, place)
            layers.append(way(self, kind, product, m, matrices)[1:])
            size += end - place
            place = end
        self.run(way(self, kind, product, m, first)[:1])
        return self.graph(layers)

    def error(self, way: "Way", kind: str, product: Product, m: int) -> float:
        """Relative, of the last rows of the last matrix (with SwiGLU, of both)."""
        matrices, _ = self.matrices(kind, product, 0)
        n = min(CHECKED, product.rows[-1])
        form, last = FORMATS[kind], product.rows[-1] - n
        row = product.n_in // form.block * form.block_bytes
        x = self.halves.reshape(-1)[: m * product.n_in].reshape(m, product.n_in).astype(np.float64)
        sums = []
        for matrix in matrices if product.swiglu else matrices[-1:]:
            at = matrix.weight - self.pool + last * row
            raw = np.frombuffer(self.stream.read(self.pool + at, n * row), np.uint8)
            w = dequantise(raw, kind, n * product.n_in).reshape(n, product.n_in).astype(np.float64)
            sums.append(x @ w.T)
        wanted = sums[0]
        if product.swiglu:
            with np.errstate(over="ignore"):
                wanted = sums[0] / (1 + np.exp(-sums[0])) * sums[1]
        to = matrices[0] if product.swiglu else matrices[-1]
        self.stream.fill(to.out, 0xFF, 4 * m * to.n_out)
        self.run(way(self, kind, product, m, matrices))
        got = np.frombuffer(self.stream.read(to.out, 4 * m * to.n_out), np.float32).reshape(m, -1)[:, last:]
        return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


# --- ways -----------------------------------------------------------------------------------------------------------
# (bench, type, product, rows of x, matrices) -> launches, the first of which prepares x.


class Way:
    def __call__(self, bench: Bench, kind: str, product: Product, m: int, matrices: list[Matrix]) -> list[Call]:
        raise NotImplementedError


class Old(Way):
    def __call__(self, bench: Bench, kind: str, product: Product, m: int, matrices: list[Matrix]) -> list[Call]:
        width = next(w for w in OLD_WIDTHS if w >= m or w == OLD_WIDTHS[-1])
        n_rows = -(-m // width) * width
        room = Scratch(bench.scratch, n_rows, product.n_in)
        x = bench.entry(m, product)
        piece = 16 if kind in FLOATS else FORMATS[kind].piece
        capacity = max(1, bench.limits.multiprocessors * 2 // (n_rows // width))
        tiles = [(n, 8 if product.swiglu else 16) for n in (product.rows[:1] if product.swiglu else product.rows)]
        split, blocks = linear.split_warps(tiles, -(-product.n_in // (4 * piece)), capacity)
        arguments = linear._MATMUL.pack(
            room.x, room.scale, m, n_rows, product.n_in, len(matrices), product.swiglu, split
        ) + pack_matrices(matrices)
        grid = (blocks, n_rows // width, 1)
        return [
            prepare(x, room.x, room.scale, n_rows, room.padded, n_rows, 1),
            Call(f"old_{kind.lower()}_{width}", grid, (256, 1, 1), 0, (arguments,)),
        ]


class New(Way):
    """In the shape that cuda/few.py chooses, or a given one."""

    def __init__(self, width: int | None = None, shape: FewShape | None = None) -> None:
        self.width, self.shape = width, shape

    def __call__(self, bench: Bench, kind: str, product: Product, m: int, matrices: list[Matrix]) -> list[Call]:
        width = self.width or next(w for w in WIDTHS if w >= max(m, FEW_WIDTH + 1))
        return few(bench.limits, bench.entry(m, product), matrices, bench.scratch, product.swiglu, width, self.shape)


class Gemm(Way):
    def __call__(self, bench: Bench, kind: str, product: Product, m: int, matrices: list[Matrix]) -> list[Call]:
        return gemm_half(bench.limits, bench.entry(m, product), matrices, bench.scratch, product.swiglu, False)


WAYS: dict[str, Way] = {"old": Old(), "new": New(), "gemm": Gemm()}


def ways_of(kind: str, m: int) -> dict[str, Way]:
    """What a product of m rows is timed in."""
    if m > 64:
        return {f"new {width}": New(width) for width in (32, 40, 64)} | {"gemm": Gemm()}
    if m > FEW_WIDTH:
        return WAYS
    return {"old": Old()} | ({"new": New(FEW_WIDTH)} if kind in WHOLE else {})


def shapes(limits: Limits, kind: str, width: int, product: Product) -> Iterator[FewShape]:
    n_stages = -(-product.n_in // FORMATS[kind].few_columns)
    seen = set()
    for warps, _, stages, shared in few_shapes(limits, kind, width):
        for wanted in few_parts(limits):
            each = -(-n_stages // wanted)
            shape = FewShape(warps, -(-n_stages // each), each, stages, shared)
            if shape not in seen and shape.parts in few_parts(limits):
                seen.add(shape)
                yield shape


# --- all of it ------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Products of a few rows: time and check them.")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory of the result")
    parser.add_argument("--types", nargs="+", default=list(TYPES), choices=TYPES)
    parser.add_argument("--counts", nargs="*", type=int, default=list(COUNTS), metavar="M", help="rows of x")
    parser.add_argument("--more", nargs="*", type=int, default=list(MORE), metavar="M", help="beyond those")
    parser.add_argument(
        "--less", nargs="*", type=int, default=list(LESS), choices=LESS, metavar="M", help="below those"
    )
    parser.add_argument("--no-sweep", action="store_true")
    parser.add_argument("--limit", type=float, default=150, help="seconds, after which the sweep ends")
    parser.add_argument("--target", default="sm_90a")
    parser.add_argument("--library", default="libcuda.so.1", help="the driver")
    parser.add_argument("--kernels", help="directory of the kernels, where they are compiled already")
    given = parser.parse_args()
    began = time.monotonic()
    given.out.mkdir(parents=True, exist_ok=True)
    lib = given.kernels or kernels(given.types, given.out / "work", given.target)
    print(f"kernels: {time.monotonic() - began:.0f} s", flush=True)
    device = start_driver(0, given.library).wait()
    bench = Bench(device, lib, device.capability >= (9, 0))
    counts = (*given.less, *given.counts, *given.more)
    rows: list[dict[str, Any]] = []
    swept: list[dict[str, Any]] = []
    for kind in given.types:
        bench.feed(kind)
        for product in (*PRODUCTS, *((OUTPUT,) if kind in WHOLE else ())):
            size = sum(product.rows) * product.n_in // FORMATS[kind].block * FORMATS[kind].block_bytes
            for m in given.less if product is OUTPUT else counts:
                for name, way in ways_of(kind, m).items():
                    us = bench.time(way, kind, product, m)
                    row = {"type": kind, "model": product.model, "product": product.name, "m": m, "way": name, "us": us}
                    row |= {"gb_s": size / us / 1e3, "tflop_s": 2e-6 * m * sum(product.rows) * product.n_in / us}
                    if m in (*given.less, given.counts[0], 40, 64):
                        row["error"] = bench.error(way, kind, product, m)
                    rows.append(row)
        print(f"{kind}: {time.monotonic() - began:.0f} s", flush=True)
        if given.no_sweep or kind not in ("Q4_K", "Q6_K", "Q8_0"):
            continue
        for product in PRODUCTS:
            if kind == "Q8_0" and product.model == "8B":
                continue
            less = [m for m in given.less if m == FEW_WIDTH and kind in WHOLE]
            for m in (*less, *(SWEPT if kind != "Q6_K" else (40,))):
                of = product.rows[:1] if product.swiglu else product.rows
                chosen = few_shape(bench.limits, kind, m, m, product.n_in, of, product.swiglu)
                found = []
                for shape in shapes(bench.limits, kind, m, product):
                    if time.monotonic() - began < given.limit:
                        found.append((bench.time(New(m, shape), kind, product, m), shape))
                if found:
                    us, best = min(found)
                    mine = next((t for t, shape in found if shape == chosen), float("nan"))
                    entry = {"type": kind, "product": product.name, "model": product.model, "m": m, "us": mine}
                    entry |= {"chosen": chosen[:4], "best_us": us, "best": best[:4]}
                    swept.append(entry | {"all": [[t, *shape] for t, shape in sorted(found)]})
        print(f"{kind}, swept: {time.monotonic() - began:.0f} s", flush=True)
    measure.save(given.out / "few_rows.json", measure.document("few_rows", {"rows": rows, "sweep": swept}))
    render(rows, swept, counts)
    device.close()
    worst = max((row["error"] for row in rows if "error" in row), default=0.0)
    return int(not worst < 1e-3)


def render(rows: Sequence[dict[str, Any]], swept: Sequence[dict[str, Any]], counts: Sequence[int]) -> None:
    print("\nin which shape: (warps, parts, stages a part, stages in memory), chosen and best")
    for e in swept:
        print(
            f"{e['type']:5}{e['model']:5}{e['product']:9}{e['m']:3} {e['us']:7.1f} {e['chosen']}"
            f"{e['best_us']:7.1f} {e['best']}"
        )
    print("\nus a product at 40 rows: old, new, gemm; new's GB/s, TFLOP/s; errors")
    for at in dict.fromkeys((r["type"], r["model"], r["product"]) for r in rows):
        found = {r["way"]: r for r in rows if (r["type"], r["model"], r["product"], r["m"]) == (*at, 40)}
        if found:
            line = "".join(f"{found[w]['us']:8.1f}" for w in WAYS)
            errors = "".join(f" {found[w]['error']:.1e}" for w in WAYS)
            new = found["new"]
            print(f"{at[0]:5}{at[1]:5}{at[2]:9}{line}{new['gb_s']:7.0f}{new['tflop_s']:6.0f}{errors}")
    print("\nus of the output: old, new")
    for r in rows:
        if r["product"] == OUTPUT.name:
            print(f"{r['type']:5}{r['m']:3} {r['way']:4}{r['us']:8.1f}")
    print("\nms of all layers' products" + "".join(f"{m:7}" for m in counts))
    layers = [r for r in rows if r["product"] != OUTPUT.name]
    for kind, model in dict.fromkeys((r["type"], r["model"]) for r in layers):
        for way in dict.fromkeys(r["way"] for r in layers):
            line = ""
            for m in counts:
                found_us = [
                    r["us"] for r in layers if (r["type"], r["model"], r["way"], r["m"]) == (kind, model, way, m)
                ]
                line += f"{sum(found_us) * LAYERS[model] / 1e3:7.2f}" if found_us else "      -"
            print(f"{kind:6}{model:6}{way:14}{line}")


if __name__ == "__main__":
    ending.run(main)
