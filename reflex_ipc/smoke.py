"""`reflex smoke`: does this device run the kernels, and run them right? No model, nothing but the standard library.

The families of kernels that a dense model generates and scores with get a small input each, and what they leave is
compared with what Python makes of it in float64.
"""

import math
import time
from argparse import Namespace
from array import array
from struct import Struct, pack

from reflex_ipc.cuda import linear, products
from reflex_ipc.cuda.device import start_driver
from reflex_ipc.cuda.launch import Kernels
from reflex_ipc.cuda.places import PAGE, Places
from reflex_ipc.cuda.sampling import CONTROL, Sampling
from reflex_ipc.cuda.steps import log_probabilities, score_bytes
from reflex_ipc.errors import CheckFailedError
from reflex_ipc.sampler import Sampler
from reflex_ipc.sampler import Sampling as Settings
from reflex_ipc.terminal import write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reflex_ipc.cuda.device import Device
    from reflex_ipc.cuda.launch import Shape

    Matrix = list[list[float]]
    Outcome = tuple[Sequence[float], Sequence[float], float]  # what the device left, what is right, the bound

_GUARD = 256  # bytes behind every buffer that nothing may touch


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
        first = 0.0
        for name, family in FAMILIES.items():
            largest = 0.0
            for got, wanted, bound in family(bench):
                error = _relative(got, wanted)
                if not error <= bound:
                    raise CheckFailedError(f"{name}: off by {error:.1e}, more than {bound:.0e}")
                largest = max(largest, error)
            bench.check_guards(name)
            first = first or time.monotonic() - _process_start()
            _say(f"ok       {name:<44} {largest:8.1e}")
        _say(f"first correct result {first * 1e3:.0f} ms after the process began")
    return 0


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


def _relative(got: "Sequence[float]", wanted: "Sequence[float]") -> float:
    norm = math.sqrt(sum(w * w for w in wanted)) or 1.0
    error = math.sqrt(sum((g - w) ** 2 for g, w in zip(got, wanted, strict=True))) / norm
    return error if error == error else math.inf


class Bench:
    """A device with buffers that are poisoned with NaN and watched for writes behind their end."""

    def __init__(self, device: "Device") -> None:
        self.device = device
        self.kernels = Kernels(device)
        self.stream = device.stream()
        self.guards: list[int] = []
        self.limits = products.limits_of(device, self.kernels)

    def room(self, size: int) -> int:
        """A buffer of NaN."""
        memory = self.device.allocate(size + _GUARD, "a test")
        self.stream.fill(memory.address, 0xFF, size + _GUARD)
        self.guards.append(memory.address + size)
        return memory.address

    def put(self, data: bytes) -> int:
        """A buffer with these bytes."""
        address = self.room(len(data))
        self.stream.to_device(address, data)
        return address

    def floats(self, numbers: "Sequence[float]") -> int:
        return self.put(array("f", numbers).tobytes())

    def integers(self, numbers: "Sequence[int]") -> int:
        return self.put(array("i", numbers).tobytes())

    def get(self, address: int, n: int) -> "array[float]":
        """n float32 of a buffer, when everything queued is done."""
        return array("f", self.stream.read(address, 4 * n))

    def run(self, kernel: str, grid: "Shape", block: int, *arguments: "int | float | bytes", shared: int = 0) -> None:
        self.kernels.function(kernel).prepare(grid, (block, 1, 1), arguments, self.stream, shared=shared)()

    def check_guards(self, family: str) -> None:
        for address in self.guards:
            if self.stream.read(address, _GUARD) != b"\xff" * _GUARD:
                raise CheckFailedError(f"{family}: a kernel wrote behind the end of its output")


def _numbers(n: int, seed: int) -> list[float]:
    """n numbers between -1 and 1, exact in half precision."""
    numbers = []
    for _ in range(n):
        seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
        numbers.append((seed >> 16) % 2001 / 1024 - 1000 / 1024)
    return numbers


def _rows(x: "Sequence[float]", width: int) -> "Matrix":
    return [list(x[i : i + width]) for i in range(0, len(x), width)]


def _halves(numbers: "Sequence[float]") -> bytes:
    return pack(f"<{len(numbers)}e", *numbers)


def _q8_0(numbers: "Sequence[float]") -> tuple[bytes, list[float]]:
    """Blocks of 32 numbers, and the numbers they stand for."""
    blocks, back = b"", []
    for row in _rows(numbers, 32):
        levels = [round(x * 127) for x in row]
        blocks += pack("<e32b", 1 / 128, *levels)
        back += [level / 128 for level in levels]
    return blocks, back


def _embed(bench: Bench) -> "Iterator[Outcome]":
    width, tokens = 64, [2, 0, 3]
    table = _numbers(4 * width, 1)
    blocks, back = _q8_0(table)
    at = bench.integers(tokens)
    for kind, raw, values in (("F16", _halves(table), table), ("Q8_0", blocks, back)):
        out = bench.room(4 * width * len(tokens))
        bench.run(f"embed_{kind}", (1, 3, 1), 128, out, bench.put(raw), at, width, len(raw) // 4, 0)
        yield bench.get(out, width * 3), [x for t in tokens for x in values[t * width : (t + 1) * width]], 0.0


def _norm(bench: Bench) -> "Iterator[Outcome]":
    width, x, weight = 100, _numbers(300, 2), _numbers(100, 3)
    out = bench.room(1200)
    bench.run("rms_norm", (3, 1, 1), 64, out, bench.floats(x), bench.floats(weight), width, 1e-6)
    wanted = []
    for row in _rows(x, width):
        scale = 1 / math.sqrt(sum(v * v for v in row) / width + 1e-6)
        wanted += [v * scale * w for v, w in zip(row, weight, strict=True)]
    yield bench.get(out, 300), wanted, 1e-6


def _elementwise(bench: Bench) -> "Iterator[Outcome]":
    a, b = _numbers(333, 4), _numbers(333, 5)
    x, y, out = bench.floats(a), bench.floats(b), bench.room(4 * 333)
    bench.run("swiglu", (2, 1, 1), 256, out, x, y, 333)
    yield bench.get(out, 333), [p / (1 + math.exp(-p)) * q for p, q in zip(a, b, strict=True)], 1e-6
    bench.run("add", (2, 1, 1), 256, out, x, y, 333)
    yield bench.get(out, 333), [p + q for p, q in zip(a, b, strict=True)], 1e-7


def _rope(bench: Bench) -> "Iterator[Outcome]":
    heads, d, positions = 2, 16, [0, 1, 4000]
    frequencies = [10000.0 ** (-2 * i / d) for i in range(d // 2)]
    table = bench.room(8 * len(positions) * d // 2)
    at = bench.put(pack(f"<{len(frequencies)}d", *frequencies))
    bench.run("rope_table", (3, 1, 1), 64, table, bench.integers(positions), at, 0, 1.0, d // 2)
    x = _numbers(len(positions) * heads * d, 6)
    entry, out = bench.floats(x), bench.room(4 * len(x))
    for is_neox in (0, 1):
        bench.run("rotate", (3, 1, 1), 64, out, entry, table, heads, d, 0, d, is_neox)
        wanted = list(x)
        for t, position in enumerate(positions):
            for h in range(heads):
                for i, frequency in enumerate(frequencies):
                    first = (t * heads + h) * d + (i if is_neox else 2 * i)
                    second = first + (d // 2 if is_neox else 1)
                    c, s = math.cos(position * frequency), math.sin(position * frequency)
                    wanted[first] = x[first] * c - x[second] * s
                    wanted[second] = x[first] * s + x[second] * c
        yield bench.get(out, len(x)), wanted, 1e-6


def _attention(bench: Bench) -> "Iterator[Outcome]":
    """A prompt of n tokens in the cache, then its last token as decoding sees it. One key head, two query heads."""
    n, heads, d = 70, 2, 32
    q, k, v = _numbers(n * heads * d, 7), _numbers(n * d, 8), _numbers(n * d, 9)
    scale = 1 / math.sqrt(d)
    wanted = []
    for t in range(n):
        for h in range(heads):
            row = q[(t * heads + h) * d : (t * heads + h + 1) * d]
            scores = [
                scale * sum(a * b for a, b in zip(row, k[s * d : (s + 1) * d], strict=True)) for s in range(t + 1)
            ]
            peak = max(scores)
            weights = [math.exp(s - peak) for s in scores]
            wanted += [sum(w * v[s * d + i] for s, w in enumerate(weights)) / sum(weights) for i in range(d)]
    page_bytes = PAGE * (4 * d + 8)
    cache = Struct("<QqiiiI").pack(bench.room(page_bytes), page_bytes, 1, d, d, 0)
    at_q, at_k, at_v, past = bench.floats(q), bench.floats(k), bench.floats(v), bench.integers([0])
    out = bench.room(4 * len(q))
    stride = pack("<7if", heads * d, d, d, heads, 0, 0, 0, 0.0)
    everything = pack("<7Q", at_q, at_k, at_v, 0, 0, 0, past) + cache + stride
    bench.run("finish_heads", (1, n, 1), 128, everything, 0)
    prompt = pack("<4Q", at_q, out, 0, past) + cache + pack("<iif3i", n, heads, scale, heads, 0, 0)
    tiles = -(-n * heads // 64)
    bench.run("attention_prefill_64", (tiles, 1, 1), 128, prompt, shared=2 * 192 * 72 + 4 * 192)
    yield bench.get(out, len(q)), wanted, 1e-3
    last = (n - 1) * heads * d
    past = bench.integers([n - 1])
    out, partial = bench.room(4 * heads * d), bench.room(4 * heads * 3 * (d + 2))
    one = pack("<7Q", at_q + 4 * last, at_k, at_v, 0, 0, 0, past) + cache + stride
    one += pack("<3Qfi", out, partial, bench.integers([0]), scale, 0)
    bench.run("attention_decode_8_2", (3, 1, 1), 256, one)
    yield bench.get(out, heads * d), wanted[last:], 1e-3


def _products(bench: Bench) -> "Iterator[Outcome]":
    n_in, n_out = 64, 40
    weights = _numbers(n_in * n_out, 10)
    blocks, back = _q8_0(weights)
    for kind, raw, values in (("F16", _halves(weights), weights), ("Q8_0", blocks, back)):
        matrix = _rows(values, n_in)
        at = bench.put(raw)
        for n in (1, 5, 80, 150):
            x = _numbers(n * n_in, 11)
            out = bench.room(4 * n * n_out)
            product = products.Matrix(kind, at, n_out, out, n_out)
            scratch = bench.room(max(linear.scratch_bytes(n, n_in, [product]), 4))
            entry = products.Input(bench.floats(x), n, n_in, n_in)
            for call in linear.linear(bench.limits, entry, [product], scratch):
                call.prepare(bench.kernels, bench.stream)()
            wanted = [sum(a * b for a, b in zip(row, w, strict=True)) for row in _rows(x, n_in) for w in matrix]
            yield bench.get(out, n * n_out), wanted, 1e-3


def _sampling(bench: Bench) -> "Iterator[Outcome]":
    n = 5000
    logits = [8 * x for x in _numbers(n, 12)]
    peak = max(logits)
    log_sum = math.log(sum(math.exp(x - peak) for x in logits))
    places = Places()
    places.control = bench.put(CONTROL.pack(3, 1, 0, 0))
    places.tokens, places.positions = bench.integers([-1]), bench.integers([-1])
    sampling = Sampling(bench.device, bench.kernels, bench.stream, n, places)
    at = bench.floats(logits)
    for settings in (Settings(), Settings(temperature=0.9, top_k=50, top_p=0.9, seed=7, top_logprobs=3)):
        sampler = Sampler(settings, n, [])
        sampling.begin(sampler)
        for launch in sampling.launches(sampling.kind(sampler), at, dependent=False):
            launch()
        sampled = sampling.receive(sampling.queued(), sampler)
        if settings.is_greedy:
            yield [sampled.id, sampled.logprob], [logits.index(peak), -log_sum], 1e-6
        else:
            ranked = sorted(range(n), key=lambda i: (-logits[i], i))
            yield [i for i, _ in sampled.top], ranked[:3], 0.0
            yield [sampled.logprob], [logits[sampled.id] - peak - log_sum], 1e-6
            yield [ranked.index(sampled.id) < 50], [True], 0.0


def _log_probabilities(bench: Bench) -> "Iterator[Outcome]":
    n, targets = 9000, [[3, 8999, 20], [], [0]]
    logits = [8 * x for x in _numbers(len(targets) * n, 13)]
    at = bench.room(score_bytes(len(targets), 4, n))
    found, sums = log_probabilities(bench.kernels, bench.stream, bench.floats(logits), n, targets, at)
    for row, chosen, got, got_sum in zip(_rows(logits, n), targets, found, sums, strict=True):
        log_sum = math.log(sum(math.exp(x) for x in row))
        yield [*got, got_sum], [*(row[t] - log_sum for t in chosen), log_sum], 1e-6


FAMILIES: "dict[str, Callable[[Bench], Iterator[Outcome]]]" = {
    "embedding rows": _embed,
    "norms": _norm,
    "SwiGLU, sums": _elementwise,
    "rotary positions": _rope,
    "attention: a prompt, a token": _attention,
    "products of 1, 5, 80, 150 rows": _products,
    "sampling": _sampling,
    "log-probabilities": _log_probabilities,
}
