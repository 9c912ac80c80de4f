"""Matrix products: which kernels, in which shape, with which arguments. The kernels' side is `kernels/linear.cuh`.

`linear` turns a product of M rows with up to four matrices into calls: a matrix-vector kernel for one row, tensor cores
with weights dequantised on the way for a few, and for many a scratch of half-precision weights under one plain product.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from struct import Struct
from typing import NamedTuple

from reflex_ipc.errors import UnsupportedModelError

MAX_MATRICES = 4
"""Matrices a launch can take."""


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
    def few_slot(self) -> int:
        """Bytes of a row of it: an odd number of 16, with room for a row that begins elsewhere than at a multiple."""
        size = self.few_columns * self.block_bytes // self.block
        chunks = size // 16 if self.block > 1 and self.block_bytes % 16 == 0 else (size + 30) // 16
        return 16 * (chunks | 1)

    @property
    def rows(self) -> int:
        """Rows of a matrix-vector tile."""
        return 2 if self.piece == 64 or self.piece * self.block_bytes > 20 * self.block else 4

    def stage(self, lanes: int) -> int:
        """Bytes of a stage of a warp's ring, where `lanes` of its 32 share a row. Rows that begin elsewhere than at
        multiples of 16 bytes are copied from the one before."""
        segment = lanes * self.piece // self.block * self.block_bytes
        return self.rows * 32 // lanes * _round_up(segment + (16 if self.block_bytes % 16 else 0), 16)


FLOATS = ("F32", "F16", "BF16")
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
"""Rows of x that the kernels with dequantisation on the way multiply at once,"""
ALONE = 16
"""up to so many by `matmul.cuh`, where each warp reads x itself, more by `few.cuh`,"""
MORE_WIDTHS = (32, 40)
"""and those of them that are compiled only for"""
COMMON = ("F16", "BF16", "Q4_0", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

FEW = 128
"""Up to so many rows weights are dequantised on the way, `WIDTHS[-1]` at a time; above, into scratch."""

REPEATED = 16
"""Up to so many rows that must be exact are multiplied one by one: what `matvec` reads of a weight for the second row
is in the cache, and two planes of halves are eight times as many bytes."""

_WARPS = 8
_THREADS = 32 * _WARPS
_TILE = 128  # of gemm_half, both ways
_STAGE = 32 << 10  # bytes of shared memory of a stage of gemm_half
_FLOAT_TILE = 64  # of gemm_float
_WIDENED = 128 << 20  # bytes of half-precision weights in scratch at a time
_PARTIALS = 1152  # bytes of shared memory that matvec needs beside x and its rings
_EDGE = 1024  # bytes that gemm_half needs beside its stages where it multiplies from shared memory
_STAGES = 2  # of a ring of matvec at most
_PER_MULTIPROCESSOR = 2  # blocks of matvec at a time
_SLOTS = 32  # of an expert that are multiplied at once
_GROUPED_WARPS = 4
_SUMS = 16 << 20  # bytes of scratch for sums of parts of the columns at most
_PARTS = (1, 2, 3, 4, 6, 8, 12, 16)
_DENSE = ("F32", "Q1_0", "Q2_0", "TQ1_0", "TQ2_0")  # types whose experts are not grouped: no model has any

_MATRIX = Struct("<5Q2i")
_MATVEC = Struct("<3Q7if7i4x")
_MATMUL = Struct("<2Q6i")
_FEW = Struct("<3Q9i4x")
_ROWS = Struct("<4Q6ifi")
_WIDEN = Struct("<3Q6i")
_GEMM = Struct("<8Q9i4x")
_GROUPING = Struct("<3Q6i")
_GROUPED_ARGS = Struct("<7Q4i")


class Limits(NamedTuple):
    """What the choice of a shape depends on, from the device's attributes."""

    multiprocessors: int
    shared_per_block: int
    """Bytes, opted in."""


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
    """One launch: what `Function.prepare` takes, but for the stream."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    arguments: tuple[bytes]


def fusible(types: Sequence[str]) -> bool:
    """Can one launch multiply one row with matrices of these types?"""
    kinds = sorted(set(types))
    return len(types) <= MAX_MATRICES and (len(kinds) == 1 or (len(kinds) == 2 and _pair(kinds) is not None))


def scratch_bytes(n: int, width: int, matrices: Sequence[Matrix], swiglu: bool = False, *, exact: bool = False) -> int:
    """What `linear` needs for n rows of this width and these matrices; it does not shrink as n grows."""
    need = 0
    for matrix in matrices:
        if n > 1 and matrix.type == "F32":
            need = max(need, 4 * n * width)
        elif n > (REPEATED if exact else FEW):
            room = _Room(0, n, width, exact, matrix.type)
            rows = room.rows(matrix.n_out * (2 if swiglu else 1))
            need = max(need, room.widened_scale + 4 * rows)
        if n > 1 and matrix.type != "F32" and not exact:
            few = _Room(0, _round_up(min(n, FEW), WIDTHS[-1] if n > ALONE else ALONE), width)
            need = max(need, few.widened + _sums_bytes(min(n, FEW), sum(m.n_out for m in matrices)))
    return need


def linear(
    limits: Limits,
    x: Input,
    matrices: Sequence[Matrix],
    scratch: int = 0,
    *,
    swiglu: bool = False,
    exact: bool = False,
) -> list[Call]:
    """The launches of out = W x (+ bias) (+ residual) for every matrix, to be queued in this order.

    With `swiglu` the two matrices, gate and up, are of one type and shape, and the first one's `out` receives
    silu(gate x) * (up x) (+ the first one's residual). `scratch` is the address of `scratch_bytes(...)`. `exact`: more
    than one row is multiplied with as little loss as one, not in half precision.
    Raises UnsupportedModelError for a type that has no kernels.
    """
    for matrix in matrices:
        if matrix.type not in FORMATS:
            raise UnsupportedModelError(f"tensor type {matrix.type} has no CUDA kernels; use --backend cpu")
    if swiglu and (len(matrices) != 2 or matrices[0].type != matrices[1].type):
        raise ValueError("SwiGLU takes a gate and an up matrix of one type")
    calls: list[Call] = []
    if x.n == 1:
        for group in _groups(matrices):
            calls += _matvec(limits, x, group, swiglu)
        return calls
    floats = [m for m in matrices if m.type == "F32"]
    others = [m for m in matrices if m.type != "F32"]
    if exact and x.n <= REPEATED and others:
        for group in _groups(others):
            calls += _matvec(limits, x, group, swiglu)
        others = []
    if floats and swiglu:  # an activation between two sums: only the matrix-vector kernel does it in float32
        return _matvec(limits, x, floats, swiglu)
    if floats:
        calls += _gemm_float(x, floats, scratch)
    if others and x.n <= FEW and not exact:
        calls += _matmul(limits, x, others, scratch, swiglu)
    elif others:
        calls += _gemm_half(limits, x, others, scratch, swiglu, exact)
    return calls


def expert_linear(
    limits: Limits, x: Input, matrix: Matrix, experts: Experts, scratch: int = 0, *, per_expert: bool
) -> list[Call]:
    """out[t, k] = W[id_k] x for each of a token's experts; out (n, n_used * n_out).

    x has one row a token, or with `per_expert` one part of `width` elements an expert side by side in a token's row.
    `scratch` is the address of `expert_scratch_bytes(...)`.
    """
    if _Grouping.pays(x.n, experts, matrix.type):
        return _grouped(limits, x, matrix, experts, scratch, per_expert)
    return _matvec(limits, x, [matrix], False, experts, x.width if per_expert else 0)


def expert_scratch_bytes(n: int, width: int, kind: str, experts: Experts, *, per_expert: bool) -> int:
    """What `expert_linear` needs for up to n tokens and a matrix of this type."""
    if not _Grouping.pays(n, experts, kind):
        return 0
    return _Grouping(0, n, width, experts, per_expert).end


# --- one row ----------------------------------------------------------------------------------------------------------


def _pair(kinds: Sequence[str]) -> tuple[str, str] | None:
    return next((pair for pair in PAIRS if set(pair) == set(kinds)), None)


def _groups(matrices: Sequence[Matrix]) -> Iterator[list[Matrix]]:
    """Runs of neighbours that one launch takes."""
    group: list[Matrix] = []
    for matrix in matrices:
        if group and not fusible([m.type for m in (*group, matrix)]):
            yield group
            group = []
        group.append(matrix)
    yield group


def _matvec(
    limits: Limits,
    x: Input,
    matrices: Sequence[Matrix],
    swiglu: bool,
    experts: Experts | None = None,
    expert_stride: int = 0,
) -> list[Call]:
    kinds = sorted({m.type for m in matrices})
    kinds = list((_pair(kinds) if len(kinds) > 1 else None) or kinds)
    piece = max(FORMATS[kind].piece for kind in kinds)
    is_float = kinds[0] in FLOATS
    least = 3 if is_float else max(_LEAST_LANES[FORMATS[kind].piece] for kind in kinds)
    stage = max(FORMATS[kind].stage(1 << log2) for kind in kinds for log2 in range(min(least, 5), 6))
    room = limits.shared_per_block - _PARTIALS - _WARPS * stage
    columns = (room // 4 if is_float else room * 2 // 5) // 256 * 256  # that fit shared memory
    if columns <= 0 or (swiglu and x.width > columns):
        raise UnsupportedModelError(
            f"rows of {x.width} elements of {kinds[0]} do not fit {limits.shared_per_block} bytes of shared memory"
        )
    slots = x.n * (experts.n_used if experts else 1)
    tiles = [(m.n_out, FORMATS[m.type].rows // (2 if swiglu else 1)) for m in (matrices[:1] if swiglu else matrices)]
    calls = []
    for begin in range(0, x.width, columns):
        n_in = min(columns, x.width - begin)
        x_bytes = _round_up(n_in, 16) * 4 if is_float else _round_up(n_in, 128) * 2 + n_in // 2
        base = _PARTIALS + x_bytes
        # As many stages as leave room for two blocks a multiprocessor.
        stages = max(1, min(_STAGES, (limits.shared_per_block // 2 - base) // (_WARPS * stage)))
        shared = base + _WARPS * stages * stage
        at_a_time = max(1, min(_PER_MULTIPROCESSOR, limits.shared_per_block // shared))
        capacity = max(1, limits.multiprocessors * at_a_time // slots)
        log2, blocks = _lanes(tiles, -(-n_in // piece), least, capacity)
        second = sum(1 << i for i, m in enumerate(matrices) if m.type == kinds[-1] and len(kinds) > 1)
        arguments = _MATVEC.pack(
            x.address,
            x.norm,
            experts.ids if experts else 0,
            x.width,
            begin,
            n_in,
            x.stride,
            expert_stride,
            experts.stride if experts else 0,
            experts.n_used if experts else 1,
            x.eps,
            len(matrices),
            swiglu,
            log2,
            second,
            x_bytes,
            stages,
            max(FORMATS[kind].stage(min(32, 1 << log2)) for kind in kinds),
        )
        if begin:  # on top of the columns before
            matrices = [m._replace(bias=0, residual=m.out) for m in matrices]
        arguments += _matrices(matrices, experts.bytes if experts else 0)
        name = "matvec_" + "_".join(kinds).lower()
        calls.append(Call(name, (min(blocks, capacity), slots, 1), (_THREADS, 1, 1), shared, (arguments,)))
    return calls


_LEAST_LANES = {64: 3, 32: 4, 16: 5}
"""log2 of the fewest lanes a row may have, by elements of a piece: they read 512 elements at a time or more."""


_TILE_COST = {3: 0.25, 4: 0.25, 5: 0.3, 6: 0.55, 7: 0.9, 8: 1.0}
"""What the end of a tile costs in steps of a warp, by log2 of its lanes: measured on an H200."""


def _lanes(tiles: Sequence[tuple[int, int]], n_pieces: int, least: int, capacity: int) -> tuple[int, int]:
    """(log2 of the lanes that share a tile, blocks) that finish first.

    `tiles` is (rows, rows a tile) of each matrix, `n_pieces` what a row has of which a lane reads one at a time,
    `capacity` how many blocks run at a time.
    """
    best = (0.0, 0, 0)
    for log2 in range(least, 9):
        blocks = sum(-(-n // (rows * (_THREADS >> log2))) for n, rows in tiles)
        rounds = (blocks / capacity + -(-blocks // capacity)) / 2  # blocks that wait for memory fill each other's gaps
        copies = tiles[0][1] << max(0, 5 - log2)  # of a step; each costs some instructions
        cost = rounds * (n_pieces / (1 << log2) * (1 + 0.02 * copies) + _TILE_COST[log2])
        if not best[2] or cost < best[0]:
            best = (cost, log2, blocks)
    return best[1], best[2]


def _matrices(matrices: Sequence[Matrix], expert_bytes: int = 0) -> bytes:
    packed = b"".join(
        _MATRIX.pack(m.weight, m.out, m.bias, m.residual, expert_bytes, m.n_out, m.out_stride) for m in matrices
    )
    return packed.ljust(MAX_MATRICES * _MATRIX.size, b"\0")


# --- more rows --------------------------------------------------------------------------------------------------------


def _split(tiles: Sequence[tuple[int, int]], n_slices: int, capacity: int, warps_log2: int = 3) -> tuple[int, int]:
    """(log2 of the warps that share a tile, blocks) that finish first; as `_lanes`, a warp at a time."""
    best = (0.0, 0, 0)
    for log2 in range(warps_log2 + 1):
        blocks = sum(-(-n // (rows << warps_log2 - log2)) for n, rows in tiles)
        cost = -(-blocks // capacity) * (-(-n_slices // (1 << log2)) + 0.5 + 0.1 * log2)
        if not best[2] or cost < best[0]:
            best = (cost, log2, blocks)
    return best[1], best[2]


class _Room:
    """How scratch is divided: n rows of x as halves and their powers of two, then rows of W and theirs. Exact products
    have a second plane with what halves lose, of x and of quantised W."""

    def __init__(self, scratch: int, n: int, width: int, exact: bool = False, kind: str = "") -> None:
        self.padded = _round_up(width, 256)
        self.x_stride = self.padded * (2 if exact else 1)
        self.w_planes = 2 if exact and kind not in FLOATS else 1
        self.products = (1 + self.w_planes) if exact else 1
        """Planes that are multiplied with each other."""
        self.x = scratch
        self.scale = _round_up(self.x + 2 * n * self.x_stride, 256)
        self.widened = _round_up(self.scale + 4 * n, 256)
        self._at_a_time = max(_TILE, _WIDENED // (2 * self.padded * self.w_planes) // _TILE * _TILE)
        self.widened_scale = self.widened

    def rows(self, n_out: int) -> int:
        """Rows of W in scratch at a time; places their powers of two behind them."""
        rows = min(self._at_a_time, n_out)
        self.widened_scale = _round_up(self.widened + 2 * rows * self.padded * self.w_planes, 256)
        return rows


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def _width(limits: Limits, n: int, kinds: Sequence[str]) -> int:
    """Rows of x a block: the fewest that hold an equal share of all, or as many as shared memory holds stages of."""
    known = [w for w in WIDTHS if w not in MORE_WIDTHS or all(kind in COMMON for kind in kinds)]
    known = [w for w in known if w <= ALONE or all(few_shapes(limits, kind, w) for kind in kinds)]
    share = -(-n // -(-n // known[-1]))
    return next(w for w in known if w >= share)


def _prepare(
    x: Input, out: int, scale: int, rows: int, padded: int, unit_step: int, row_step: int, low: int = 0
) -> Call:
    arguments = _ROWS.pack(
        x.address, x.norm, out, scale, x.n, x.width, x.stride, padded, unit_step, row_step, x.eps, low
    )
    return Call("prepare_rows", (rows, 1, 1), (_THREADS, 1, 1), 0, (arguments,))


def _matmul(limits: Limits, x: Input, matrices: Sequence[Matrix], scratch: int, swiglu: bool) -> list[Call]:
    kinds = list(dict.fromkeys(m.type for m in matrices))
    width = _width(limits, x.n, kinds)
    if width > ALONE:
        return few(limits, x, matrices, scratch, swiglu, width)
    n_rows = _round_up(x.n, width)
    room = _Room(scratch, n_rows, x.width)
    calls = [_prepare(x, room.x, room.scale, n_rows, room.padded, n_rows, 1)]
    for kind in kinds:
        of_kind = [m for m in matrices if m.type == kind]
        piece = 16 if kind in FLOATS else FORMATS[kind].piece
        capacity = max(1, limits.multiprocessors * 2 // (n_rows // width))
        tiles = [(m.n_out, 8 if swiglu else 16) for m in (of_kind[:1] if swiglu else of_kind)]
        split, blocks = _split(tiles, -(-x.width // (4 * piece)), capacity)
        arguments = _MATMUL.pack(room.x, room.scale, x.n, n_rows, x.width, len(of_kind), swiglu, split)
        arguments += _matrices(of_kind)
        calls.append(
            Call(f"mma_{kind.lower()}_{width}", (blocks, n_rows // width, 1), (_THREADS, 1, 1), 0, (arguments,))
        )
    return calls


# --- a few rows -------------------------------------------------------------------------------------------------------


class FewShape(NamedTuple):
    """How `few.cuh` is launched."""

    warps: int
    parts: int
    """Of the columns."""
    part_stages: int
    """Of each of them but the last."""
    stages: int
    """In shared memory."""
    shared: int


def few(
    limits: Limits,
    x: Input,
    matrices: Sequence[Matrix],
    scratch: int,
    swiglu: bool,
    width: int,
    shape: FewShape | None = None,
) -> list[Call]:
    """The launches of `few.cuh` for `width` rows of x a block, in the best shape or a given one."""
    n_rows = _round_up(x.n, width)
    room = _Room(scratch, n_rows, x.width)
    calls = [_prepare(x, room.x, room.scale, n_rows, room.padded, n_rows, 1)]
    for kind in dict.fromkeys(m.type for m in matrices):
        of_kind = [m for m in matrices if m.type == kind]
        rows = tuple(m.n_out for m in (of_kind[:1] if swiglu else of_kind))
        warps, parts, part_stages, stages, shared = shape or few_shape(
            limits, kind, width, n_rows, x.width, rows, swiglu
        )
        arguments = _FEW.pack(
            *(room.x, room.scale, room.widened if parts > 1 else 0, x.n, n_rows, x.width, len(of_kind), swiglu),
            *(parts, part_stages, stages, sum(m.n_out for m in of_kind)),
        )
        arguments += _matrices(of_kind)
        grid = (_few_tiles(rows, warps, swiglu), n_rows // width, parts)
        calls.append(Call(f"mma_{kind.lower()}_{width}", grid, (32 * warps, 1, 1), shared, (arguments,)))
        if parts > 1:
            calls.append(Call("add_parts", (-(-sum(rows) // _THREADS), x.n, 1), (_THREADS, 1, 1), 0, (arguments,)))
    return calls


def _sums_bytes(n: int, rows: int) -> int:
    """Scratch for the sums of n rows of x with so many rows of W, of as many parts of the columns as there may be."""
    return min(_SUMS, 4 * n * rows * _PARTS[-1])


def _few_tiles(rows: Sequence[int], warps: int, swiglu: bool) -> int:
    return sum(-(-n // ((8 if swiglu else 16) * warps)) for n in rows)


@cache
def few_shapes(limits: Limits, kind: str, width: int) -> list[tuple[int, int, int, int]]:
    """(warps of a block, blocks of a multiprocessor at a time, stages, bytes of shared memory) that are possible."""
    form = FORMATS[kind]
    most = 12 if form.piece // 16 * width > 64 or width > 48 else 16  # registers suffice for so many
    found = []
    for warps in (4, 6, 8, 12, 16):
        stage = form.few_columns // 8 * 16 * (width + 2) + warps * 16 * form.few_slot
        room = limits.shared_per_block
        blocks = min(most // warps, (room + 1024) // (2 * stage + 1024))
        if blocks:
            stages = min(4, ((room + 1024) // blocks - 1024) // stage)
            found.append((warps, blocks, stages, max(stages * stage, warps * width * 80)))
    return found


@cache
def few_shape(
    limits: Limits, kind: str, width: int, n_rows: int, n_in: int, rows: tuple[int, ...], swiglu: bool
) -> FewShape:
    """The shape that finishes first, by a model of an H200; `rows` of W of each matrix, with SwiGLU of one.

    In cycles of a multiprocessor: a warp needs so many slots of an instruction for a stage and, alone, some three times
    that; the second-level cache delivers some 20 bytes; a block costs something to begin, and so does `add_parts`.
    """
    form = FORMATS[kind]
    n_stages = -(-n_in // form.few_columns)
    slots = form.few_columns / 64 * (85 + 1.25 * width)
    n_sum = sum(rows) * (2 if swiglu else 1)
    best, least = None, 0.0
    for warps, at_a_time, stages, shared in few_shapes(limits, kind, width):
        tiles = _few_tiles(rows, warps, swiglu) * (n_rows // width)
        copied = form.few_columns * 2 * width + warps * 16 * form.few_columns * form.block_bytes / form.block
        for wanted in _PARTS:
            if wanted > 1 and (wanted > n_stages or 4 * n_rows * n_sum * wanted > _SUMS):
                break
            part_stages = -(-n_stages // wanted)
            parts = -(-n_stages // part_stages)
            full, rest = divmod(tiles * parts, limits.multiprocessors * at_a_time)
            cost = 0.0
            for rounds, blocks in ((full, at_a_time), (1, -(-rest // limits.multiprocessors))):
                if blocks:
                    step = max(blocks * warps * slots / 2.6, 3 * slots, blocks * copied / 20)
                    cost += rounds * (1500 + part_stages * step)
            if parts > 1:
                cost += 2500 + 8 * n_rows * n_sum * parts / 2500
            if best is None or cost < least:
                best, least = FewShape(warps, parts, part_stages, stages, shared), cost
    assert best is not None
    return best


# --- many rows --------------------------------------------------------------------------------------------------------


def _gemm_half(
    limits: Limits, x: Input, matrices: Sequence[Matrix], scratch: int, swiglu: bool, exact: bool
) -> list[Call]:
    room = _Room(scratch, x.n, x.width, exact)
    low = room.padded // 8 if exact else 0
    calls = [_prepare(x, room.x, room.scale, x.n, room.padded, 1, room.x_stride // 8, low)]
    stages, edge = (3, _EDGE) if limits.shared_per_block >= 3 * _STAGE + _EDGE else (2, 0)
    grid_m = -(-x.n // _TILE)
    sides = 2 if swiglu else 1
    for matrix in matrices[:1] if swiglu else matrices:
        room = _Room(scratch, x.n, x.width, exact, matrix.type)
        row_bytes = x.width // FORMATS[matrix.type].block * FORMATS[matrix.type].block_bytes
        as_it_is = matrix.type == "F16" and x.width % 8 == 0 and not swiglu
        step = matrix.n_out if as_it_is else room.rows(sides * matrix.n_out) // sides
        for begin in range(0, matrix.n_out, step):
            n = min(step, matrix.n_out - begin)
            for side in range(0 if as_it_is else sides):
                source = matrices[side] if swiglu else matrix
                arguments = _WIDEN.pack(
                    source.weight + begin * row_bytes,
                    room.widened,
                    room.widened_scale,
                    n,
                    x.width,
                    room.padded,
                    sides,
                    side,
                    room.w_planes,
                )
                calls.append(
                    Call(f"widen_{source.type.lower()}", (-(-n // _WARPS), 1, 1), (_THREADS, 1, 1), 0, (arguments,))
                )
            arguments = _GEMM.pack(
                room.x,
                room.scale,
                matrix.weight if as_it_is else room.widened,
                0 if as_it_is else room.widened_scale,
                matrix.out + 4 * begin,
                matrix.bias and matrix.bias + 4 * begin,
                swiglu and matrices[1].bias and matrices[1].bias + 4 * begin,
                matrix.residual and matrix.residual + 4 * begin,
                x.n,
                sides * n,
                x.width if as_it_is else room.padded,
                room.x_stride,
                x.width if as_it_is else room.padded * room.w_planes,
                matrix.out_stride,
                stages,
                swiglu,
                room.products,
            )
            grid = (grid_m, -(-sides * n // _TILE), 1)
            calls.append(Call("gemm_half", grid, (_THREADS, 1, 1), stages * _STAGE + edge, (arguments,)))
    return calls


def _gemm_float(x: Input, matrices: Sequence[Matrix], scratch: int) -> list[Call]:
    calls = []
    address, stride = x.address, x.stride
    if x.norm:
        arguments = _ROWS.pack(x.address, x.norm, scratch, 0, x.n, x.width, x.stride, x.width, 0, 0, x.eps, 0)
        calls.append(Call("prepare_float_rows", (x.n, 1, 1), (_THREADS, 1, 1), 0, (arguments,)))
        address, stride = scratch, x.width
    for m in matrices:
        arguments = _GEMM.pack(
            *(address, 0, m.weight, 0, m.out, m.bias, 0, m.residual),
            *(x.n, m.n_out, x.width, stride, x.width, m.out_stride, 0, 0, 1),
        )
        grid = (-(-x.n // _FLOAT_TILE), -(-m.n_out // _FLOAT_TILE), 1)
        calls.append(Call("gemm_float", grid, (_THREADS, 1, 1), 0, (arguments,)))
    return calls


# --- experts of many tokens -------------------------------------------------------------------------------------------


class _Grouping:
    """The tiles of n tokens' choices, and how scratch is divided: what `group_experts` writes, then x as halves with
    what they lose, and its powers of two."""

    def __init__(self, scratch: int, n: int, width: int, experts: Experts, per_expert: bool) -> None:
        self.slots = n * experts.n_used
        self.rows = self.slots if per_expert else n
        self.n_tiles = min(self.slots, experts.n_expert + self.slots // _SLOTS)
        self.padded = _round_up(width, 256)
        self.expert = scratch
        self.places = _round_up(self.expert + 4 * self.n_tiles, 256)
        self.x = _round_up(self.places + 4 * self.n_tiles * _SLOTS, 256)
        self.scale = _round_up(self.x + 4 * self.rows * self.padded, 256)
        self.end = self.scale + 4 * self.rows

    @staticmethod
    def pays(n: int, experts: Experts, kind: str) -> bool:
        """Where an expert has two tokens or more, on average."""
        return kind not in _DENSE and n > 1 and n * experts.n_used >= 2 * experts.n_expert


def _grouped(limits: Limits, x: Input, matrix: Matrix, experts: Experts, scratch: int, per_expert: bool) -> list[Call]:
    g = _Grouping(scratch, x.n, x.width, experts, per_expert)
    arguments = _GROUPING.pack(
        *(g.expert, g.places, experts.ids, experts.stride, experts.n_used, g.slots, experts.n_expert, _SLOTS, g.n_tiles)
    )
    calls = [Call("group_experts", (1, 1, 1), (1024, 1, 1), 8 * experts.n_expert, (arguments,))]
    rows = x._replace(n=g.rows, stride=x.width) if per_expert else x
    low = g.padded // 8
    calls.append(_prepare(rows, g.x, g.scale, g.rows, g.padded, 1, 2 * low, low))
    piece = 16 if matrix.type in FLOATS else FORMATS[matrix.type].piece
    capacity = max(1, limits.multiprocessors * 4 // g.n_tiles)
    split, blocks = _split([(matrix.n_out, 16)], -(-x.width // (4 * piece)), capacity, 2)
    arguments = _GROUPED_ARGS.pack(
        *(g.x, g.scale, g.expert, g.places, matrix.weight, experts.bytes, matrix.out),
        *(1 if per_expert else experts.n_used, x.width, matrix.n_out, split),
    )
    grid = (blocks, g.n_tiles, 1)
    calls.append(Call(f"grouped_{matrix.type.lower()}", grid, (32 * _GROUPED_WARPS, 1, 1), 0, (arguments,)))
    return calls
