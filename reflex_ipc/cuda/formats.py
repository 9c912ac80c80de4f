"""Which types of weights have kernels, which kernels these are, and what of a type the shapes of launches depend on."""

from typing import NamedTuple

from reflex_ipc.cuda.memory import aligned


class Format(NamedTuple):
    """What the shapes of launches depend on; `dequant.cuh` has the same."""

    piece: int
    """Elements a lane reads at a time."""
    block: int
    """Elements of a block: columns are cut at multiples."""
    block_bytes: int

    @property
    def few_columns(self) -> int:
        """Columns of a stage of `few.cuh`."""
        block_pieces = self.block // self.piece
        return 4 * self.piece * (block_pieces // 4 if block_pieces > 4 else 2 if self.piece == 16 else 1)

    @property
    def _chunks(self) -> int:
        size = self.few_columns * self.block_bytes // self.block
        return size // 16 if self.block > 1 and self.block_bytes % 16 == 0 else (size + 30) // 16

    @property
    def slot(self) -> int:
        """Bytes of a row of a stage of `grouped.cuh`: of one that begins elsewhere than at a multiple of 16, too."""
        return 16 * (self._chunks | 1)

    @property
    def few_slot(self) -> int:
        """Bytes of a row of a stage of `few.cuh`."""
        has_minima = self.piece == 64 and self.block_bytes % 16 == 0  # Q4_K and Q5_K
        return 16 * ((self._chunks + 1) // 4 * 4 + 2) if has_minima else self.slot

    @property
    def rows(self) -> int:
        """Rows of a matrix-vector tile."""
        return 2 if self.piece == 64 or self.piece * self.block_bytes > 20 * self.block else 4

    def stage(self, lanes: int) -> int:
        """Bytes of a stage of a warp's ring, where `lanes` of its 32 share a row. Rows that begin elsewhere than at
        multiples of 16 bytes are copied from the one before."""
        segment = lanes * self.piece // self.block * self.block_bytes
        return self.rows * 32 // lanes * aligned(segment + (16 if self.block_bytes % 16 else 0), 16)


FLOATS = ("F32", "F16", "BF16")
LOSSLESS = (*FLOATS, "NVFP4")
"""Weights that lose nothing that counts as halves."""
FORMATS = {
    "F32": Format(8, 1, 4),
    "F16": Format(16, 1, 2),
    "BF16": Format(16, 1, 2),
    "Q4_0": Format(32, 32, 18),
    "Q4_1": Format(32, 32, 20),
    "Q5_0": Format(32, 32, 22),
    "Q5_1": Format(32, 32, 24),
    "Q8_0": Format(32, 32, 34),
    "Q2_K": Format(64, 256, 84),
    "Q3_K": Format(64, 256, 110),
    "Q4_K": Format(64, 256, 144),
    "Q5_K": Format(64, 256, 176),
    "Q6_K": Format(64, 256, 210),
    "IQ4_NL": Format(32, 32, 18),
    "IQ4_XS": Format(32, 256, 136),
    "MXFP4": Format(32, 32, 17),
    "NVFP4": Format(32, 64, 36),
    "Q1_0": Format(32, 128, 18),
    "Q2_0": Format(32, 64, 18),
    "TQ1_0": Format(16, 256, 54),
    "TQ2_0": Format(64, 256, 66),
    "IQ1_S": Format(32, 256, 50),
    "IQ1_M": Format(32, 256, 56),
    "IQ2_XXS": Format(32, 256, 66),
    "IQ2_XS": Format(32, 256, 74),
    "IQ2_S": Format(32, 256, 82),
    "IQ3_XXS": Format(32, 256, 98),
    "IQ3_S": Format(32, 256, 110),
}
"""GGUF types that have kernels."""

PAIRS = (
    ("Q2_K", "Q3_K"),
    ("Q2_K", "Q4_K"),
    ("Q3_K", "Q4_K"),
    ("Q3_K", "Q5_K"),
    ("Q4_K", "Q5_K"),
    ("Q4_K", "Q6_K"),
    ("Q5_K", "Q6_K"),
    ("Q5_0", "Q8_0"),
    ("IQ4_XS", "Q5_K"),
)
"""Types that share a matrix-vector kernel: what llama.cpp's mixes put beside each other in one layer."""

WIDTHS = (8, 16, 32, 40, 64)
"""Rows of x that a block multiplies where weights are dequantised on the way."""
MATMUL_WIDTH = 16
"""The widest of `matmul.cuh`, where each warp reads x itself; wider ones are of `few.cuh`."""
FEW_WIDTH = 16
"""The narrowest of `few.cuh`: of the types of `WHOLE`, on sm_90a."""
COMMON = ("F16", "BF16", "Q4_0", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""What most models are made of."""
RARE = ("Q1_0", "Q2_0", "TQ1_0", "TQ2_0", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
"""What few models have, and none is made of."""
WHOLE = ("Q4_K", "Q5_K", "Q6_K")
"""What `kernels/whole.cuh` multiplies as whole numbers: on sm_90a x comes in an order of its own, and four warps
multiply together."""


def widths(kind: str) -> tuple[int, ...]:
    """Those of WIDTHS that kernels are compiled for: what fits a package. 32 rows at once are 6% faster than 40, for
    types whose arithmetic is what takes the time."""
    if kind in COMMON:
        return tuple(width for width in WIDTHS if width != 32 or kind in ("Q8_0", "Q4_K", "Q6_K"))
    if kind in RARE:
        return (MATMUL_WIDTH,)
    return (MATMUL_WIDTH, WIDTHS[-1]) if kind == "NVFP4" else (*WIDTHS[:2], WIDTHS[-1])
