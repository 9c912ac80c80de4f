"""Matrix products: which kernels, in which shape, with which arguments. The kernels' side is `kernels/linear.cuh`.

`linear` turns a product of M rows with up to four matrices into calls: a matrix-vector kernel for one row, tensor cores
with weights dequantised on the way for a few, and for many a scratch of half-precision weights under one plain product.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

MAX_MATRICES = 4
"""Matrices a call can take."""

FLOATS = ("F32", "F16", "BF16")
FORMATS = (
    *FLOATS,
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", "Q1_0", "Q2_0", "TQ1_0", "TQ2_0"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
)
"""GGUF types that have kernels."""

PAIRS = (
    ("Q4_K", "Q6_K"),
    ("Q4_K", "Q5_K"),
    ("Q5_K", "Q6_K"),
    ("Q3_K", "Q4_K"),
    ("Q3_K", "Q5_K"),
    ("Q2_K", "Q3_K"),
    ("Q2_K", "Q4_K"),
    ("Q5_0", "Q8_0"),
    ("IQ4_XS", "Q5_K"),
    ("Q8_0", "F32"),
)
"""Types that share a matrix-vector kernel: what llama.cpp's mixes put beside each other in one layer."""


class Limits(NamedTuple):
    """What the choice of a shape depends on, from the device's attributes."""

    multiprocessors: int
    shared_per_block: int
    """Bytes, opted in."""


class Matrix(NamedTuple):
    """One weight and where its product goes; addresses are the device's, 0 for none.

    `bias` is (n_out) and `residual` (M, out_stride), both float32 and added. `expert_bytes` is the size of one expert.
    """

    type: str
    weight: int
    n_out: int
    out: int
    out_stride: int
    bias: int = 0
    residual: int = 0
    expert_bytes: int = 0


class Call(NamedTuple):
    """One launch: what `Function.prepare` takes, but for the stream."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    arguments: tuple[bytes]
