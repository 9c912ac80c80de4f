"""Products with matrices of every type, in all ways that depend on the number of rows, and rows of embeddings."""

from collections.abc import Iterator, Sequence

import numpy as np

from reflex_ipc.cuda import linear
from reflex_ipc.cuda.few import few
from reflex_ipc.cuda.formats import FEW_WIDTH, FLOATS, FORMATS, LOSSLESS, PAIRS, WHOLE, widths
from reflex_ipc.cuda.products import Call, Input, Matrix
from reflex_ipc.smoke.bench import Bench, Outcome
from reflex_ipc.smoke.layer import Array, Weight, float_weight, numbers, outcome, rms, sigmoid, weight

KINDS = tuple(FORMATS)
N_IN, N_OUT, MANY = 512, 40, 130
EPS = 0.25
"""Large, so that it counts."""
LARGE = 2.0**17
"""Activations pass 65504, the end of half precision."""
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
        both = [weight(kind, N_IN, N_OUT, seed=seed) for seed in (2, 3)]
        yield from _embedding(bench, both[0])
        if kind == "F32":
            continue
        one, more = FLOAT if kind in FLOATS else ONE_ROW, FLOAT if kind in LOSSLESS else HALVES
        for n in (1, *(width - 1 for width in widths(kind)), MANY):  # a row less than a block takes
            yield from _product(bench, rows[:n], both, one if n == 1 else more)
            yield from _swiglu(bench, rows[:n], both, 2 * one if n == 1 else 2 * HALVES)
        if kind in WHOLE and bench.limits.together:
            yield from _product(bench, rows[: FEW_WIDTH - 1], both, more, together=True)
        yield from _product(bench, rows, both, FLOAT, exact=True)
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


def _matrices(bench: Bench, weights: Sequence[Weight], biases: Sequence[Weight], n: int) -> list[Matrix]:
    return [
        Matrix(w.kind, bench.put(w.raw), N_OUT, bench.room(4 * n * N_OUT), N_OUT, bench.put(bias.raw))
        for w, bias in zip(weights, biases, strict=True)
    ]


def _biases(weights: Sequence[Weight], large: float = 1.0) -> list[Weight]:
    return [float_weight(large * numbers(N_OUT, seed=10 + i)) for i in range(len(weights))]


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
    """Of large rows where there is no norm, with biases, and on top of rows of its own. `together`: up to 16 rows with
    the kernels that four warps multiply in, which small matrices are left out of."""
    n, large = len(rows), 1.0 if norm else LARGE
    rows, biases, residual = large * rows, _biases(weights, large), large * numbers(n, N_OUT, seed=8)
    added = bench.put(residual.astype(np.float32).tobytes())
    matrices = [matrix._replace(residual=added) for matrix in _matrices(bench, weights, biases, n)]
    entry = _entry(bench, rows, bench.put(norm.raw) if norm else 0)
    scratch = bench.room(max(linear.scratch_bytes(bench.limits, n, N_IN, matrices, exact=exact), 4))
    if together:
        _launch(bench, few(bench.limits, entry, matrices, scratch, False, FEW_WIDTH))
    else:
        _launch(bench, linear.linear(bench.limits, entry, matrices, scratch, exact=exact))
    x = rms(rows, EPS) * norm.values if norm else rows
    for w, bias, matrix in zip(weights, biases, matrices, strict=True):
        wanted = x @ w.values.T + bias.values + residual
        yield bench.get(matrix.out, n * N_OUT), wanted.reshape(-1).tolist(), bound


def _swiglu(bench: Bench, rows: Array, weights: Sequence[Weight], bound: float) -> Iterator[Outcome]:
    """Gate and up in one, behind a norm."""
    n, biases, norm = len(rows), _biases(weights), weight("F32", N_IN, seed=7)
    matrices = _matrices(bench, weights, biases, n)
    scratch = bench.room(max(linear.scratch_bytes(bench.limits, n, N_IN, matrices, swiglu=True), 4))
    _launch(
        bench, linear.linear(bench.limits, _entry(bench, rows, bench.put(norm.raw)), matrices, scratch, swiglu=True)
    )
    x = rms(rows, EPS) * norm.values
    gate, up = (x @ w.values.T + bias.values for w, bias in zip(weights, biases, strict=True))
    yield outcome(np.array(bench.get(matrices[0].out, n * N_OUT)), gate * sigmoid(gate) * up, bound)
