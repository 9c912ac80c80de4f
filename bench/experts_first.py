"""Does a model of experts answer sooner when the experts that the first token needs are uploaded first?

    python bench/experts_first.py qwen3-30b-a3b-Q4_K_M.gguf --out results/experts.json

What cuda/routed.py was built on; bench/experts_starts.py measures what came of it. One way, all weights go up in the
order of the layers, and the first token is out when the last has arrived. The other way sends everything but the
experts, and then, layer by layer, what the router chose: a choice that only the device knows, after the layer before it
is done. That is a chain of round trips: ids to the host, slabs read from the page cache, slabs copied, the next layer.
Both are run here with the driver's own copies, from the same page cache. The
chain computes nothing, not even the routers, so it is shorter than any real one could be; its choices are drawn at
random, as different for each token of the prompt as those of random weights.

`at best` is the chain without an interpreter: its bytes at the rate of the whole upload, and the bare round trips.
"""

import argparse
import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import measure
import piped
from measure import MeasurementError, summary

from reflex_ipc import archs
from reflex_ipc.cuda.device import Device
from reflex_ipc.cuda.driver import LIBRARY, Driver
from reflex_ipc.cuda.memory import Pinned
from reflex_ipc.cuda.upload import Upload
from reflex_ipc.cuda.weights import Weights
from reflex_ipc.environment import usable_cpus
from reflex_ipc.errors import ReflexError
from reflex_ipc.gguf import GGUF
from reflex_ipc.ops import ExpertLinear
from reflex_ipc.plan import Plan

THREADS = 12  # readers, as many as the upload has

Piece = tuple[int, int, int, int]
"""fd, offset in the file, bytes, place behind the base on the device: as `Upload` takes them."""


class Layer(NamedTuple):
    """A layer's expert tensors: each expert's slabs by its number."""

    slabs: list[list[Piece]]
    n_used: int


def layers(gguf: GGUF, plan: Plan, weights: Weights) -> list[Layer]:
    found: dict[str, Layer] = {}
    for op in plan.ops:
        if isinstance(op, ExpertLinear):
            tensor = plan.weights[op.weight]
            n_expert, fd = tensor.ne[2], gguf.shards[tensor.shard].fd
            layer = found.setdefault(op.routes.name, Layer([[] for _ in range(n_expert)], op.routes.width // 2))
            size, place = tensor.nbytes // n_expert, weights.place[op.weight]
            for i in range(n_expert):
                layer.slabs[i].append((fd, tensor.offset + i * size, size, place + i * size))
    return list(found.values())


def upload(device: Device, base: int, groups: Sequence[tuple[int, Sequence[Piece]]]) -> float:
    """Seconds from the first copy to the last byte, the engine's own way."""
    way = Upload(sum(piece[2] for _, pieces in groups for piece in pieces))
    way.order(groups)
    time.sleep(0.05)  # the ring's pages are touched meanwhile, as while the driver starts
    began = time.perf_counter()
    way.start(device, base)
    way.join()
    seconds = time.perf_counter() - began
    way.close()
    return seconds


class Readers:
    """Threads that read slabs and copy them, each with a page-locked buffer and a stream. A context manager."""

    def __init__(self, device: Device, base: int, room: int, n: int) -> None:
        self._device, self._base, self._n = device, base, n
        self._work: list[list[Piece]] = [[] for _ in range(n)]
        self._starts = [threading.Semaphore(0) for _ in range(n)]
        self._done = threading.Semaphore(0)
        self._buffers = [device.pinned(room, "slabs") for _ in range(n)]
        self._streams = [device.stream() for _ in range(n)]
        self._error: BaseException | None = None
        self._ends = False
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(n)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "Readers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ends = True
        for start in self._starts:
            start.release()
        for thread in self._threads:
            thread.join()

    def bring(self, pieces: Sequence[Piece]) -> None:
        """Read and copy; returns when all is on the device."""
        for i in range(self._n):
            self._work[i] = list(pieces[i :: self._n])
            self._starts[i].release()
        for _ in range(self._n):
            self._done.acquire()
        if self._error is not None:
            raise self._error

    def _run(self, i: int) -> None:
        self._device.make_current()
        buffer, stream = self._buffers[i], self._streams[i]
        while True:
            self._starts[i].acquire()
            if self._ends:
                return
            try:
                self._copy(self._work[i], buffer, stream)
            except BaseException as error:
                self._error = error
            self._done.release()

    def _copy(self, pieces: Sequence[Piece], buffer: Pinned, stream: Any) -> None:
        cu, at = self._device.cu, 0
        for fd, offset, size, place in pieces:
            if at + size > buffer.size:
                stream.synchronize()
                at = 0
            if os.preadv(fd, [buffer.view[at : at + size]], offset) != size:
                raise MeasurementError("the file became shorter")
            cu.check(
                cu.cuMemcpyHtoDAsync_v2(self._base + place, buffer.address + at, size, stream.handle), "copying a slab"
            )
            at += size
        stream.synchronize()


def chain(
    device: Device, chosen: Sequence[Sequence[Piece]], readers: Readers | None, ids: int, mailbox: Pinned
) -> float:
    """Seconds for all layers: ids to the host, slabs to the device, the next. Without readers, round trips alone."""
    stream = device.stream()
    began = time.perf_counter()
    for pieces in chosen:
        stream.to_host(mailbox.address, ids, mailbox.size)
        stream.synchronize()
        if readers is not None:
            readers.bring(pieces)
    seconds = time.perf_counter() - began
    stream.close()
    return seconds


def choose(found: Sequence[Layer], n_tokens: int, seed: int) -> list[list[Piece]]:
    """The slabs of each layer that some token of a prompt wants."""
    rng = random.Random(seed)
    chosen = []
    for layer in found:
        experts = {i for _ in range(n_tokens) for i in rng.sample(range(len(layer.slabs)), layer.n_used)}
        chosen.append([piece for i in sorted(experts) for piece in layer.slabs[i]])
    return chosen


def total(groups: Sequence[Sequence[Piece]]) -> int:
    return sum(piece[2] for pieces in groups for piece in pieces)


def run(device: Device, gguf: GGUF, plan: Plan, prompts: Sequence[int], n: int) -> list[dict[str, Any]]:
    weights = Weights(gguf, plan)
    found = layers(gguf, plan, weights)
    if not found:
        raise MeasurementError(f"{gguf.path} has no experts")
    experts = {op.weight for op in plan.ops if isinstance(op, ExpertLinear)}
    shared = [
        (gguf.shards[t.shard].fd, t.offset, t.nbytes, weights.place[name])
        for name, t in plan.weights.items()
        if name not in experts
    ]
    base = device.allocate(weights.size, "weights").address - weights.start
    mailbox = device.pinned(4 * max(prompts) * found[0].n_used, "ids")
    slab = max(piece[2] for layer in found for slabs in layer.slabs for piece in slabs)
    rows: list[dict[str, Any]] = []
    with Readers(device, base, 4 * slab, max(1, min(THREADS, usable_cpus()))) as readers:
        everything = [upload(device, base, weights.groups) for _ in range(n)]
        rest = [upload(device, base, [(0, shared)]) for _ in range(n)]
        size = total([pieces for _, pieces in weights.groups])
        rows.append({"what": "everything", "bytes": size, "seconds": everything})
        rows.append({"what": "all but experts", "bytes": total([shared]), "seconds": rest})
        rate = size / summary(everything).median
        for n_tokens in prompts:
            choices = [choose(found, n_tokens, seed) for seed in range(n)]
            trips = [chain(device, chosen, None, base, mailbox) for chosen in choices]
            chains = [chain(device, chosen, readers, base, mailbox) for chosen in choices]
            moved = sum(map(total, choices)) / n
            rows.append({
                "what": f"chain, {n_tokens} tokens",
                "bytes": moved,
                "seconds": chains,
                "whole_s": summary(rest).median + summary(chains).median,
                "at_best_s": summary(rest).median + summary(trips).median + moved / rate,
                "trips_s": trips,
            })  # fmt: skip
    return rows


def render(model: str, rows: Sequence[dict[str, Any]]) -> str:
    head = [model, "GB", "n", "ms, median", "min", "GB/s", "first token, ms", "at best, ms"]
    body = []
    for row in rows:
        s = summary(row["seconds"])
        line = [row["what"], f"{row['bytes'] / 1e9:.2f}", str(s.n), f"{s.median * 1e3:.1f}", f"{s.min * 1e3:.1f}"]
        line.append(f"{row['bytes'] / s.median / 1e9:.1f}")
        if row["what"] == "everything":
            line += [f"{s.median * 1e3:.1f}"] * 2
        else:
            line += [f"{row[key] * 1e3:.1f}" if key in row else "-" for key in ("whole_s", "at_best_s")]
        body.append(line)
    return measure.table(head, body)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Routed experts first, or everything in order.")
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True, help="the JSON")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[1, 5], metavar="N")
    parser.add_argument("-n", type=int, default=10)
    parser.add_argument("--library", default=LIBRARY, help="the driver's")
    parser.add_argument("--sha256", metavar="DIGEST", help="of the model file, where it is known already")
    options = parser.parse_args()
    try:
        measure.make_warm(options.model)
        with GGUF.open(options.model) as gguf, Device(0, Driver(options.library)) as device:
            rows = run(device, gguf, archs.build(gguf), options.prompt_tokens, options.n)
    except (MeasurementError, ReflexError) as error:
        sys.stderr.write(f"experts_first: {error}\n")
        return 1
    content = {"models": [measure.model_entry(options.model, options.sha256)], "rows": rows, "not_run": []}
    measure.save(options.out, measure.document("experts", content))
    print(render(Path(options.model).name, rows))
    return 0


if __name__ == "__main__":
    piped.run(main)
