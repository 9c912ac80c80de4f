"""Which variant of decoding is fastest, in one process: the 8B shape in Q4_K_M, all variants loaded, in turns.

    python bench/decode_variants.py OUT                      in about 2 minutes
    python bench/decode_variants.py OUT --model FILE.gguf --limit 120

A variant is an overlay of kernel sources (bench/variants), an edit of one, and constants of reflex_ipc.cuda. Kernels
are compiled here, without those that decoding does not run; a variant's logits are compared with the first one's, and
with its own of a second run, bit by bit. Prints where a step's time goes, then tokens a second: `alone` is a launch
among its like (all layers, dependent launches, weights from memory), `in step` what the step loses without it.
"""

import argparse
import concurrent.futures
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

import models
import numpy as np
from measure import ROOT

import build
from reflex_ipc import archs
from reflex_ipc.cuda import executor as cuda
from reflex_ipc.cuda import launch, linear, lower
from reflex_ipc.cuda.launch import Launch
from reflex_ipc.gguf import GGUF
from reflex_ipc.plan import Step
from reflex_ipc.sampler import Sampler, Sampling

DEPTHS = (128, 4096)
TOKENS = 64
SOURCES = ("linear_q4_k", "linear_q6_k", "attention_decode_128", "embed", "rope", "elementwise", "norm", "sample")
CONSTANTS = {
    "stages": (linear, "_STAGES"),
    "blocks": (linear, "_PER_MULTIPROCESSOR"),
    "share": (lower, "MIN_SHARE"),
    "ahead": (lower, "AHEAD"),
}
THIRD_BLOCK = ("matvec.cuh", "matvec_threads, 2)", "matvec_threads, 3)")
ATTENTION = ("attention_decode.cuh", "heads.cuh", "rope.cu")


class Variant(NamedTuple):
    """overlay: files of bench/variants/base that replace the kernels' own; edit: (file, old, new)."""

    name: str
    overlay: tuple[str, ...] = ()
    edit: tuple[str, str, str] | None = None
    stages: int = 2
    blocks: int = 2
    share: int = 32
    ahead: int = 0


MATVEC = ("matvec.cuh", "product.cuh", "linear.cuh")
VARIANTS = (
    Variant("base", (*MATVEC, *ATTENTION)),
    Variant("base, 3 stages", (*MATVEC, *ATTENTION), stages=3),
    Variant("new attention", MATVEC),
    Variant("new matvec", ATTENTION),
    Variant("both"),
    Variant("both, 3 stages", stages=3),
    Variant("both, 4 stages", stages=4),
    Variant("3 stages, 6 MB ahead", stages=3, ahead=6 << 20),
    Variant("3 stages, 12 MB ahead", stages=3, ahead=12 << 20),
    Variant("3 stages, 20 MB ahead", stages=3, ahead=20 << 20),
    Variant("3 stages, share 64", stages=3, share=64),
    Variant("3 stages, share 128", stages=3, share=128),
    Variant("3 stages, share 256", stages=3, share=256),
    Variant("1 block, 4 stages", blocks=1, stages=4),
    Variant("80 registers, 2 stages", edit=THIRD_BLOCK),
    Variant("80 registers, 3 stages", edit=THIRD_BLOCK, stages=3),
    Variant("80 registers, 3 blocks", edit=THIRD_BLOCK, blocks=3),
)
TABLES = ("base", "3 stages, 12 MB ahead")


# --- kernels --------------------------------------------------------------------------------------------------------


def kernels(variants: Sequence[Variant], where: Path, target: str) -> dict[tuple[Any, ...], tuple[str, str]]:
    """A directory of kernels for each set of sources, and what they spill."""
    compiler, made = build.Compiler(), {}
    jobs: dict[tuple[Any, ...], list[concurrent.futures.Future[build.Object]]] = {}
    cache = where / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for variant in variants:
            key = variant.overlay, variant.edit
            if key in jobs:
                continue
            staged = where / f"sources-{len(jobs)}"
            staged.mkdir(exist_ok=True)
            names = [*(ROOT / "kernels").glob("*.cuh"), *(ROOT / "kernels" / f"{name}.cu" for name in SOURCES)]
            for path in names:
                overlay = ROOT / "bench" / "variants" / "base" / path.name
                text = (overlay if path.name in variant.overlay else path).read_text()
                if variant.edit is not None and path.name == variant.edit[0]:
                    assert variant.edit[1] in text
                    text = text.replace(*variant.edit[1:])
                if path.name == "formats.cuh":  # no products of many rows
                    text = re.sub(r"^  REFLEX_(MATMUL.*|WIDEN.*)$", "", text, flags=re.M).replace(
                        "FORMAT, FORMAT) \\", "FORMAT, FORMAT)"
                    )
                (staged / path.name).write_text(text)
            jobs[key] = [
                pool.submit(_compile, compiler, staged / f"{name}.cu", target, cache / staged.name) for name in SOURCES
            ]
        for key, tasks in jobs.items():
            built = [task.result() for task in tasks]
            lib = where / f"lib-{len(made)}"
            build.write_target(
                lib / target,
                compiler,
                built,
                target,
                built[0].source.parent.parent / "cache" / built[0].source.parent.name,
            )
            spills = [f"{name} {use.spill}" for o in built for name, use in o.usage.items() if use.spill]
            made[key] = str(lib), ", ".join(spills)
    return made


def _compile(compiler: build.Compiler, source: Path, target: str, cache: Path) -> build.Object:
    cache.mkdir(parents=True, exist_ok=True)
    return compiler.compile(source, target, cache)


# --- one variant ----------------------------------------------------------------------------------------------------


class Loaded:
    """A model loaded with one variant."""

    def __init__(self, variant: Variant, lib: str, path: Path) -> None:
        self.variant = variant
        self.use()
        cuda.Kernels = partial(launch.Kernels, lib=lib)  # type: ignore[assignment,misc]
        self.gguf = GGUF.open(path)
        self.plan = archs.build(self.gguf)
        self.executor = cuda.CudaExecutor(self.gguf, self.plan, DEPTHS[-1] + 2 * TOKENS)
        e = self.executor
        e._wait(len(e._weights.groups) - 1)
        e._stream.synchronize()
        e._back(DEPTHS[-1] + 2 * TOKENS)
        e._stream.fill(e._places.cache, 0x3C, e._layout.pages(DEPTHS[-1] + 2 * TOKENS) * e._layout.page_bytes)
        self.rates: dict[int, list[float]] = {depth: [] for depth in DEPTHS}

    def use(self) -> None:
        for name, (module, constant) in CONSTANTS.items():
            setattr(module, constant, getattr(self.variant, name))

    def at(self, depth: int) -> None:
        """One step behind `depth` tokens of which nothing else is known."""
        self.executor._n_past = depth
        self.executor.forward(Step.text([7], depth, range(1)))

    def logits(self, n: int = 24) -> bytes:
        """Of a few tokens, one by one from the beginning."""
        self.use()
        self.executor._n_past = 0
        rows = []
        for i in range(n):
            self.executor.forward(Step.text([(i * 7919 + 11) % self.plan.n_vocab], i, range(1)))
            rows.append(self.executor.logits().tobytes())
        return b"".join(rows)

    def decode(self, depth: int) -> float:
        """Tokens a second."""
        self.use()
        self.at(depth)
        tokens = self.executor.decode(Sampler(Sampling(temperature=0.0), self.plan.n_vocab, []))
        for _ in range(3):
            next(tokens)
        began = time.perf_counter()
        for _ in range(TOKENS):
            next(tokens)
        took = time.perf_counter() - began
        tokens.close()  # type: ignore[attr-defined]
        self.executor._stream.synchronize()
        return TOKENS / took

    # Where the time goes

    def launches(self, depth: int) -> "Iterator[tuple[str, int, Launch]]":
        """(what it is, bytes of weights, launch) of one step."""
        self.use()
        self.at(depth)
        low = self.executor._lowering
        low.is_dependent, low.is_passing = low.can_depend, False
        shape = lower.Shape(1, 1, False, low.n_splits(depth + 1))
        for group, made in low.launches(shape):
            size = sum(self.plan.weights[name].nbytes for name in group.weights) if group else 0
            role = re.sub(r"blk\.\d+\.", "", group.name) if group else "rope table"
            for one in made:
                name = one.function.name
                kept = size if name.startswith("matvec") else 0
                yield f"{role}: {name} x{'x'.join(map(str, one.grid))} {one.shared >> 10}K", kept, one

    def table(self, depth: int) -> list[dict[str, Any]]:
        steps = list(self.launches(depth))
        whole = self._time([one for _, _, one in steps])
        rows = [{"what": "step", "n": len(steps), "us": whole, "in_step_us": whole, "gb_s": None}]
        for what in dict.fromkeys(what for what, _, _ in steps):
            mine = [one for other, _, one in steps if other == what]
            size = next(size for other, size, _ in steps if other == what)
            # So many copies that the launches add up to something, for small numbers of them.
            times = max(1, 36 // len(mine))
            alone = self._time(mine * times) / (len(mine) * times)
            without = self._time([one for other, _, one in steps if other != what])
            rows.append(
                {
                    "what": what,
                    "n": len(mine),
                    "us": alone,
                    "in_step_us": (whole - without) / len(mine),
                    "gb_s": size / alone / 1e3 if size else None,
                }
            )
        return rows

    def _time(self, launches: Sequence[Launch], repeats: int = 7, turns: int = 4) -> float:
        """Microseconds of all of them as one graph."""
        stream, device = self.executor._stream, self.executor._dev()
        with stream.capture() as capture:
            for one in launches:
                one()
        graph = capture.graph.instantiate()
        capture.graph.close()
        begin, end = device.event(timing=True), device.event(timing=True)
        took = []
        for _ in range(repeats):
            graph.launch(stream)
            begin.record(stream)
            for _ in range(turns):
                graph.launch(stream)
            end.record(stream)
            end.synchronize()
            took.append(1000 * end.milliseconds_since(begin) / turns)
        graph.close()
        return median(took)


# --- all of them ----------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Variants of decoding, in turns.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, default=Path(tempfile.gettempdir()) / "reflex-variants" / "8b.gguf")
    parser.add_argument("--shape", default="qwen3-8b", choices=models.SHAPES)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--target", default="sm_90a")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--limit", type=float, default=140, help="seconds; rounds end when they are over")
    options = parser.parse_args()
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    work = options.model.parent
    work.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        making = None if options.model.exists() else pool.submit(_make, options)
        libs = kernels(VARIANTS, work, options.target)
        print(f"kernels: {time.monotonic() - began:.0f} s", flush=True)
        if making is not None:
            making.result()
    print(f"model: {time.monotonic() - began:.0f} s", flush=True)
    result: dict[str, Any] = {"variants": [], "tables": {}}
    loaded: list[Loaded] = []
    first = None
    for variant in VARIANTS:
        entry: dict[str, Any] = {**variant._asdict(), "spills": libs[variant.overlay, variant.edit][1]}
        result["variants"].append(entry)
        try:
            one = Loaded(variant, libs[variant.overlay, variant.edit][0], options.model)
            logits = one.logits()
            values = np.frombuffer(logits, np.float32).astype(np.float64)
            if first is None:
                first = values
            entry["error"] = float(np.linalg.norm(values - first) / np.linalg.norm(first))
            entry["repeats"] = logits == one.logits()
            for depth in DEPTHS:
                one.decode(depth)
        except Exception as error:  # one variant's trouble is not the others'
            entry["failed"] = repr(error)
            print(f"{variant.name}: {error!r}", flush=True)
            continue
        entry["rates"] = one.rates
        loaded.append(one)
    print(f"loaded: {time.monotonic() - began:.0f} s", flush=True)
    for one in loaded:
        if one.variant.name in TABLES:
            result["tables"][one.variant.name] = one.table(DEPTHS[0])
    print(f"tables: {time.monotonic() - began:.0f} s", flush=True)
    for _ in range(options.rounds):
        if time.monotonic() - began > options.limit:
            break
        for one in loaded:
            for depth in DEPTHS:
                one.rates[depth].append(one.decode(depth))
    (options.out / "decode_variants.json").write_text(json.dumps(result, indent=1) + "\n")
    render(result)
    for one in loaded:
        one.executor.close()
    return 0


def _make(options: argparse.Namespace) -> None:
    part = options.model.with_suffix(".part")
    models.make(part, options.shape, layers=options.layers)
    part.rename(options.model)


def render(result: dict[str, Any]) -> None:
    for name, rows in result["tables"].items():
        print(f"\n{name}: one step at depth {DEPTHS[0]}\n{'us alone':>9} {'in step':>8} {'GB/s':>6} {'n':>4}  what")
        for row in rows:
            rate = f"{row['gb_s']:.0f}" if row["gb_s"] else "-"
            print(f"{row['us']:9.2f} {row['in_step_us']:8.2f} {rate:>6} {row['n']:4d}  {row['what']}")
    depths = "".join(f"{f'tok/s at {depth} (range)':>26}" for depth in DEPTHS)
    print(f"\n{'variant':26}{depths}  error against the first, bits repeat, spills")
    for entry in result["variants"]:
        if "failed" in entry:
            print(f"{entry['name']:26}failed: {entry['failed']}")
            continue
        cells = "".join(
            f"{f'{median(r):.1f} ({min(r):.0f}-{max(r):.0f})' if r else '-':>26}" for r in entry["rates"].values()
        )
        print(f"{entry['name']:26}{cells}  {entry['error']:.1e} {entry['repeats']} {entry['spills']}")


if __name__ == "__main__":
    sys.exit(main())
