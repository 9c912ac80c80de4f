"""Products with matrices of every type, in all ways that depend on the number of rows, and rows of embeddings."""

from collections.abc import Iterator, Sequence

import numpy as np

from reflex_ipc.cuda import linear
from reflex_ipc.cuda.few import few
from reflex_ipc.cuda.formats import FEW_WIDTH, FLOATS, FORMATS, PAIRS, WHOLE, widths
from reflex_ipc.cuda.products import Call, Input, Matrix
from reflex_ipc.smoke.bench import Bench, Outcome
from reflex_ipc.smoke.layer import Array, Weight, numbers, outcome, rms, sigmoid, weight

KINDS = tuple(FORMATS)
N_IN, N_OUT, MANY = 512, 40, 130
EPS = 1e-5
FLOAT = 1e-5
"""What halves hold exactly, multiplied by tensor cores, which cut sums off at 2^-17 or so; float32."""
ONE_ROW = 8e-5
"""x as 16-bit integers with a scale for 32 of them."""
HALVES = 2**-10
"""Weights as halves, which are off by 2^-11 at most, and so are the offsets that some types add."""


def types(bench: Bench) -> Iterator[Outcome]:
    """matvec_*, mma_*, few_*, widen_*, gemm_half, embed_*, prepare_rows, prepare_pages"""
    rows = numbers(MANY, N_IN, seed=1)
    for kind in KINDS:
        w = weight(kind, N_IN, N_OUT, seed=2)
        yield from _embedding(bench, w)
        if kind == "F32":
            continue
        bound = FLOAT if kind in FLOATS else HALVES
        yield from _product(bench, rows[:1], [w], FLOAT if kind in FLOATS else ONE_ROW)
        for width in widths(kind):  # a row less than a block takes
            yield from _product(bench, rows[: width - 1], [w], bound)
        if kind in WHOLE and bench.limits.together:
            yield from _product(bench, rows[: FEW_WIDTH - 1], [w], bound, together=True)
        yield from _product(bench, rows, [w], bound)
        yield from _product(bench, rows, [w], FLOAT, exact=True)
        yield from _swiglu(bench, rows, w)
    for pair in PAIRS:
        if pair[0] in KINDS:
            yield from _product(bench, rows[:1], [weight(kind, N_IN, N_OUT, seed=4) for kind in pair], ONE_ROW)


def floats(bench: Bench) -> Iterator[Outcome]:
    """gemm_float, prepare_float_rows, matvec_f32: float32 weights, behind a norm and without; a row and more"""
    w = weight("F32", N_IN, N_OUT, seed=5)
    for n in (1, 7):
        rows = numbers(n, N_IN, seed=6)
        yield from _product(bench, rows, [w], FLOAT)
        yield from _product(bench, rows, [w], FLOAT, norm=weight("F32", N_IN, seed=7))


def _embedding(bench: Bench, w: Weight) -> Iterator[Outcome]:
    tokens = [7, 0, N_OUT - 1]
    out = bench.room(4 * len(tokens) * N_IN)
    arguments = (out, bench.put(w.raw), bench.integers(tokens), N_IN, len(w.raw) // N_OUT, 0)
    bench.run(f"embed_{w.kind}", (1, len(tokens), 1), 128, *arguments)
    yield bench.get(out, len(tokens) * N_IN), w.values[tokens].reshape(-1).tolist(), 1e-7  # a rounding of a product


def _matrices(bench: Bench, weights: Sequence[Weight], n: int) -> list[Matrix]:
    return [Matrix(w.kind, bench.put(w.raw), N_OUT, bench.room(4 * n * N_OUT), N_OUT) for w in weights]


def _launch(bench: Bench, calls: Sequence[Call]) -> None:
    for call in calls:
        call.prepare(bench.kernels, bench.stream)()


def _entry(bench: Bench, rows: Array, norm: int = 0) -> Input:
    return Input(bench.put(rows.astype(np.float32).tobytes()), len(rows), N_IN, N_IN, norm, EPS)


def _product(
    bench: Bench,
    rows: Array,
    weights: Sequence[Weight],
    bound: float,
    *,
    norm: Weight | None = None,
    exact: bool = False,
    together: bool = False,
) -> Iterator[Outcome]:
    """`together`: up to 16 rows with the kernels that four warps multiply in, which small matrices are left out of."""
    n = len(rows)
    matrices = _matrices(bench, weights, n)
    entry = _entry(bench, rows, bench.put(norm.raw) if norm else 0)
    scratch = bench.room(max(linear.scratch_bytes(bench.limits, n, N_IN, matrices, exact=exact), 4))
    if together:
        _launch(bench, few(bench.limits, entry, matrices, scratch, False, FEW_WIDTH))
    else:
        _launch(bench, linear.linear(bench.limits, entry, matrices, scratch, exact=exact))
    x = rms(rows, EPS) * norm.values if norm else rows
    for w, matrix in zip(weights, matrices, strict=True):
        yield bench.get(matrix.out, n * N_OUT), (x @ w.values.T).reshape(-1).tolist(), bound


def _swiglu(bench: Bench, rows: Array, w: Weight) -> Iterator[Outcome]:
    """Gate and up in one, by way of scratch."""
    up = weight(w.kind, N_IN, N_OUT, seed=3)
    rows = rows / 16
    matrices = _matrices(bench, [w, up], len(rows))
    scratch = bench.room(linear.scratch_bytes(bench.limits, len(rows), N_IN, matrices, swiglu=True))
    _launch(bench, linear.linear(bench.limits, _entry(bench, rows), matrices, scratch, swiglu=True))
    gate = rows @ w.values.T
    got = np.array(bench.get(matrices[0].out, len(rows) * N_OUT))
    yield outcome(got, gate * sigmoid(gate) * (rows @ up.values.T), 2 * HALVES)
