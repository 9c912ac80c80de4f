"""What all matrix products share: what they are of, the launches that they become, and how scratch is divided.

The kernels' side is `kernels/linear.cuh`.
"""

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

from reflex_ipc.cuda.formats import LOSSLESS
from reflex_ipc.cuda.memory import aligned

TYPE_CHECKING = False
if TYPE_CHECKING:
    from reflex_ipc.cuda.device import Device, Stream
    from reflex_ipc.cuda.launch import Kernels, Launch

MAX_MATRICES = 4
"""Matrices a launch can take."""
WARPS = 8
THREADS = 32 * WARPS
"""Of a block, where a kernel has no reason for others."""
TILE = 128
"""Rows of x and of W that a block of gemm_half multiplies."""
PARTS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Parts of the columns that blocks of `few.cuh` may share out."""
MOST_CLUSTERED = 8
"""Parts that a cluster adds up, at most: what every device with clusters takes."""
SUMS = 16 << 20
"""Bytes of scratch for the sums of such parts at most, where no clusters add them up,"""
LEAST_SUMS = 1 << 20
"""and at least: blocks of a small matrix are mostly padding."""
TILES = 4096
"""Blocks of rows of x and W of a product whose columns are shared out, at most."""

_WIDENED = 128 << 20  # bytes of half-precision weights in scratch at a time
GEMM = Struct("<8Q9i4x")
"""The arguments of `kernels/gemm.cu`."""
_MATRIX = Struct("<5Q2i")
_ROWS = Struct("<4Q6ifi")


class Limits(NamedTuple):
    """What the choice of a shape depends on, from the device's attributes."""

    multiprocessors: int
    shared_per_block: int
    """Bytes, opted in."""
    cluster: int = 1
    """Blocks that may read each other's shared memory, where kernels do (`kernels/copy.cuh`)."""
    together: bool = False
    """Four warps multiply k-quants of few rows together (`kernels/multiply.cuh`)."""


def limits_of(device: "Device", kernels: "Kernels") -> Limits:
    """Of an open device, for the kernels that were chosen for it."""
    is_sm_90a = kernels.target == "sm_90a"  # as kernels are compiled: `has_clusters` of copy.cuh
    return Limits(
        device.attribute(device.MULTIPROCESSORS),
        device.attribute(device.SHARED_PER_BLOCK),
        MOST_CLUSTERED if is_sm_90a else 1,
        is_sm_90a,
    )


class Matrix(NamedTuple):
    """One weight and where its product goes; addresses are the device's, 0 for none.

    `bias` is (n_out) and `residual` (M, out_stride), both float32 and added.
    """

    type: str
    weight: int
    n_out: int
    out: int
    out_stride: int
    bias: int = 0
    residual: int = 0


class Input(NamedTuple):
    """x: n rows of `width` float32 at `address`, `stride` apart; RMS-normalised on the way in where `norm` is given."""

    address: int
    n: int
    width: int
    stride: int
    norm: int = 0
    eps: float = 0.0


class Experts(NamedTuple):
    """Which experts the rows of x go to: at `ids`, `n_used` of them as float32 a token, tokens `stride` apart."""

    ids: int
    stride: int
    n_used: int
    bytes: int
    """Of one expert's matrix."""
    n_expert: int


class Call(NamedTuple):
    """One launch: what `Function.prepare` takes, but for the stream and whether it is dependent."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    arguments: tuple[bytes]
    cluster: tuple[int, int, int] | None = None

    def prepare(self, kernels: "Kernels", stream: "Stream", dependent: bool = False) -> "Launch":
        return kernels.function(self.kernel).prepare(
            *(self.grid, self.block, self.arguments, stream),
            shared=self.shared,
            dependent=dependent,
            cluster=self.cluster,
        )


class Scratch:
    """How scratch is divided: n rows of x as halves and their powers of two, then rows of W and theirs. Exact products
    have a second plane with what halves lose, of x and, where it counts, of W."""

    def __init__(self, scratch: int, n: int, width: int, exact: bool = False, kind: str = "") -> None:
        self.padded = aligned(width, 256)
        self.x_stride = self.padded * (2 if exact else 1)
        self.w_planes = 2 if exact and kind not in LOSSLESS else 1
        self.products = (1 + self.w_planes) if exact else 1
        """Planes that are multiplied with each other."""
        self.x = scratch
        self.scale = aligned(self.x + 2 * n * self.x_stride, 256)
        self.widened = aligned(self.scale + 4 * n, 256)
        self._at_a_time = max(TILE, _WIDENED // (2 * self.padded * self.w_planes) // TILE * TILE)
        self.widened_scale = self.widened

    def rows(self, n_out: int) -> int:
        """Rows of W in scratch at a time; places their powers of two behind them."""
        rows = min(self._at_a_time, n_out)
        self.widened_scale = aligned(self.widened + 2 * rows * self.padded * self.w_planes, 256)
        return rows


PAGE_ROW_BYTES = 16 * (32 + 2)
"""Of a row in a page of 256 columns: units of 8 columns, and sums (`kernels/pages.cuh`)."""


class Pages:
    """How scratch is divided for `kernels/few.cuh`: pages of n rows of x (`kernels/pages.cuh`), their powers of two,
    how many parts of each tile have arrived, and the sums of parts."""

    def __init__(self, scratch: int, n: int, width: int) -> None:
        self.n_pages = -(-width // 256)
        self.pages = scratch
        self.scale = aligned(scratch + PAGE_ROW_BYTES * n * self.n_pages, 256)
        self.arrived = aligned(self.scale + 4 * n, 256)
        self.sums = self.arrived + 4 * TILES


def sums_bytes(n: int, rows: int) -> int:
    """Scratch for the sums of n rows of x with so many rows of W, of as many parts of the columns as there may be."""
    return min(SUMS, max(LEAST_SUMS, 4 * n * rows * PARTS[-1]))


def prepare(
    x: Input, out: int, scale: int, rows: int, padded: int, unit_step: int, row_step: int, low: int = 0
) -> Call:
    """x as halves at `out`, its powers of two at `scale`: `kernels/rows.cu` has the layout."""
    arguments = _ROWS.pack(
        x.address, x.norm, out, scale, x.n, x.width, x.stride, padded, unit_step, row_step, x.eps, low
    )
    return Call("prepare_rows", (rows, 1, 1), (THREADS, 1, 1), 0, (arguments,))


def pack_matrices(matrices: Sequence[Matrix], expert_bytes: int = 0) -> bytes:
    """What the arguments of a kernel of `kernels/linear.cuh` end in: MAX_MATRICES of its `Matrix`."""
    packed = b"".join(
        _MATRIX.pack(m.weight, m.out, m.bias, m.residual, expert_bytes, m.n_out, m.out_stride) for m in matrices
    )
    return packed.ljust(MAX_MATRICES * _MATRIX.size, b"\0")
