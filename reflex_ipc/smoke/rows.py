"""Ops that take each row by itself, and rotary positions."""

from collections.abc import Iterator

import numpy as np

from reflex_ipc import ops
from reflex_ipc.ops import Rope, Value
from reflex_ipc.smoke.bench import Bench, Outcome
from reflex_ipc.smoke.layer import Array, Layer, float_weight, numbers, outcome, rms, sigmoid, weight

ROUNDING = 1e-6
"""A few roundings of float32, and its exp."""
EPS = 0.25
"""Large, so that it counts."""


def rows(bench: Bench) -> Iterator[Outcome]:
    """rms_norm, l2_norm, swiglu, gate, add, slice, concat, select_rows"""
    a, b, one = (numbers(5, width, seed=width) for width in (333, 332, 1))
    b = np.concatenate([b, one], axis=1)
    of_a, of_b, of_one = Value("a", 333), Value("b", 333), Value("one", 1)
    norm = weight("F32", 111, seed=9)
    parts = a.reshape(5, 3, 111)
    out = Value("out", 333)
    cases: list[tuple[ops.Op, Array, float]] = [
        (ops.RmsNorm("out", out, of_a, "norm", 3, EPS), rms(parts, EPS) * norm.values, ROUNDING),
        (
            ops.L2Norm("out", out, of_a, 3, EPS),
            parts / np.sqrt((parts**2).sum(axis=2, keepdims=True) + EPS),
            ROUNDING,
        ),
        (ops.SwiGlu("out", out, of_a, of_b), a * sigmoid(a) * b, ROUNDING),
        (ops.Gate("out", out, of_a, of_b), a * sigmoid(b), ROUNDING),
        (ops.Gate("out", out, of_a, of_one), a * sigmoid(one), ROUNDING),
        (ops.Add("out", out, of_a, of_b), a + b, 0.0),
        (ops.Slice("out", Value("out", 150), of_a, 3, 11, 50), parts[:, :, 11:61], 0.0),
        (ops.Concat("out", Value("out", 334), of_a, of_one), np.concatenate([a, one], axis=1), 0.0),
    ]
    for op, wanted, bound in cases:
        layer = Layer(bench, [op], {"norm": norm})
        yield outcome(layer.run({"a": a, "b": b, "one": one}), wanted, bound)
    picked = bench.room(2 * 4 * 333)
    chosen = bench.integers([4, 1])
    bench.run("select_rows", (2, 1, 1), 256, picked, bench.put(a.astype(np.float32).tobytes()), chosen, 666, 333)
    yield bench.get(picked, 666), a[[4, 1]].reshape(-1).tolist(), 0.0


def rotation(bench: Bench) -> Iterator[Outcome]:
    """rope_table, rotate: all of a head and a part of it, from position 0 and from 100,000 on; with factors, too"""
    for style, n_rot, offset, past, magnitude in (("norm", 64, 0, 0, 1.0), ("neox", 32, 16, 100_000, 1.25)):
        rope = Rope(style, n_rot, 1e6, magnitude=magnitude)
        x, factors = numbers(4, 3 * 64, seed=n_rot), float_weight(1.5 + numbers(n_rot // 2, seed=3))
        for name, by in ((None, np.ones(1)), ("factors", factors.values)):
            op = ops.Rotate("r", Value("r", 192), Value("x", 192), 3, offset, rope, name)
            layer = Layer(bench, [op], {"factors": factors})
            layer.n_past = past
            yield outcome(layer.run({"x": x}), rotated(x.reshape(4, 3, 64), rope, offset, past, by), ROUNDING)


def rotated(x: Array, rope: Rope, offset: int = 0, past: int = 0, factors: Array | float = 1.0) -> Array:
    """x (n, heads, d) at positions from `past` on."""
    out = x.copy()
    angle = np.arange(past, past + len(x))[:, None, None] * (np.array(rope.frequencies()) / factors)
    cos, sin = rope.magnitude * np.cos(angle), rope.magnitude * np.sin(angle)
    part, half = out[:, :, offset : offset + rope.n_rot], rope.n_rot // 2
    first, second = (part[..., ::2], part[..., 1::2]) if rope.style == "norm" else (part[..., :half], part[..., half:])
    first[:], second[:] = first * cos - second * sin, first * sin + second * cos
    return out
