"""What comes first, without NumPy: rows of an embedding, and arguments of every width."""

from array import array
from struct import pack, unpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reflex_ipc.smoke.bench import Bench, Outcome


def embedding(bench: "Bench") -> "Iterator[Outcome]":
    """embed_F16, embed_Q8_0"""
    width, tokens = 64, [2, 0, 3]
    table = _numbers(4 * width, 1)
    blocks, back = _q8_0(table)
    at = bench.integers(tokens)
    for kind, raw, values in (("F16", pack(f"<{len(table)}e", *table), table), ("Q8_0", blocks, back)):
        out = bench.room(4 * width * len(tokens))
        bench.run(f"embed_{kind}", (1, 3, 1), 128, out, bench.put(raw), at, width, len(raw) // 4, 0)
        yield bench.get(out, width * 3), [x for t in tokens for x in values[t * width : (t + 1) * width]], 0.0


def _q8_0(table: "Sequence[float]") -> tuple[bytes, list[float]]:
    """Blocks of 32 numbers, and the numbers they stand for."""
    blocks, back = b"", []
    for begin in range(0, len(table), 32):
        levels = [round(x * 127) for x in table[begin : begin + 32]]
        blocks += pack("<e32b", 1 / 128, *levels)
        back += [level / 128 for level in levels]
    return blocks, back


def arguments(bench: "Bench") -> "Iterator[Outcome]":
    """smoke_arguments, smoke_axpy_*"""
    out = bench.room(64)
    five = pack("<5i", -7, 1, 2, 3, 1 << 30)
    bench.run("smoke_arguments", (1, 1, 1), 1, -3, 65535, -(1 << 31), -(1 << 62), -2.5, 1e300, five, out)
    wanted = (-3, 65535, -(1 << 31), -(1 << 62), *unpack("<iq", pack("<fd", -2.5, 1e300)), -7, 1 << 30)
    yield unpack("<8q", bench.stream.read(out, 64)), wanted, 0.0
    x, y = _numbers(1000, 2), _numbers(1000, 3)
    at = bench.floats(y)
    bench.run("smoke_axpy_f32", (2, 1, 1), 256, 1000, 0.5, bench.floats(x), at)
    yield bench.get(at, 1000), [0.5 * p + q for p, q in zip(x, y, strict=True)], 0.0
    at = bench.integers(range(1000))
    bench.run("smoke_axpy_i32", (2, 1, 1), 256, 1000, -3, bench.integers(range(5, 1005)), at)
    yield array("i", bench.stream.read(at, 4000)), [i - 3 * (i + 5) for i in range(1000)], 0.0


def _numbers(n: int, seed: int) -> list[float]:
    """n numbers between -1 and 1, exact in half precision."""
    found = []
    for _ in range(n):
        seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
        found.append((seed >> 16) % 2001 / 1024 - 1000 / 1024)
    return found
