"""Matrix products: which kernels, in which shape, with which arguments.

`linear` turns a product of M rows with up to four matrices into calls: a matrix-vector kernel for one row, tensor cores
with weights dequantised on the way for a few, and for many a scratch of half-precision weights under one plain product.
Here is what a short prompt needs; `few`, `gemm` and `experts` are imported by what needs them.
"""

from collections.abc import Iterator, Sequence
from struct import Struct

from reflex_ipc.cuda.formats import FEW_WIDTH, FLOATS, FORMATS, MATMUL_WIDTH, PAIRS, RARE, WHOLE, WIDTHS, widths
from reflex_ipc.cuda.memory import aligned
from reflex_ipc.cuda.products import (
    GEMM,
    MAX_MATRICES,
    THREADS,
    WARPS,
    Call,
    Experts,
    Input,
    Limits,
    Matrix,
    Pages,
    Scratch,
    pack_matrices,
    prepare,
    sums_bytes,
)
from reflex_ipc.errors import UnsupportedModelError

FEW = 128
"""Up to so many rows weights are dequantised on the way; above, into scratch."""

REPEATED = 16
"""Up to so many rows that must be exact are multiplied one by one: what `matvec` reads of a weight for the second row
is in the cache, and two planes of halves are eight times as many bytes."""

_PARTIALS = 1152  # bytes of shared memory that matvec needs beside x and its rings
_STAGES = 2  # of a ring of matvec at most
_PER_MULTIPROCESSOR = 2  # blocks of matvec at a time
_FLOAT_TILE = 64  # of gemm_float
_LARGE = {8: 1 << 28, 16: 1 << 24}
"""Rows of x, of a width of `WIDTHS` -> weights of a call from which on `few` serves so many rows better: an output, or
any product of 8B. Of small models the start of a short prompt would wait for the import of `few`."""

_MATVEC = Struct("<3Q7if7i4x")
_MATMUL = Struct("<2Q6i")


def most_unwidened(matrices: Sequence[Matrix]) -> int:
    """Up to so many rows these weights are dequantised on the way; above, into scratch. Rare types, which are read once
    for every `MATMUL_WIDTH` rows, go there earlier."""
    return FEW // 2 if any(m.type in RARE for m in matrices) else FEW


def fusible(types: Sequence[str]) -> bool:
    """Can one launch multiply one row with matrices of these types?"""
    kinds = sorted(set(types))
    return len(types) <= MAX_MATRICES and (len(kinds) == 1 or (len(kinds) == 2 and _pair(kinds) is not None))


def scratch_bytes(
    limits: Limits, n: int, width: int, matrices: Sequence[Matrix], swiglu: bool = False, *, exact: bool = False
) -> int:
    """What `linear` needs for n rows of this width and these matrices; it does not shrink as n grows."""
    need = 0
    for matrix in matrices:
        if n > 1 and matrix.type == "F32":
            need = max(need, 4 * n * width)
        elif n > (REPEATED if exact else most_unwidened(matrices)):
            room = Scratch(0, n, width, exact, matrix.type)
            rows = room.rows(matrix.n_out * (2 if swiglu else 1))
            need = max(need, room.widened_scale + 4 * rows)
        if n > 1 and matrix.type != "F32" and not exact:
            rows = aligned(min(n, FEW), WIDTHS[-1] if n > MATMUL_WIDTH else MATMUL_WIDTH)
            need = max(need, Scratch(0, rows, width).widened, Pages(0, rows, width).sums)
            if n > MATMUL_WIDTH and limits.cluster == 1:  # clusters add parts up without it
                sums = sums_bytes(min(n, FEW), sum(m.n_out for m in matrices))
                need = max(need, Pages(0, rows, width).sums + sums)
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
            calls += matvec(limits, x, group, swiglu)
        return calls
    floats = [m for m in matrices if m.type == "F32"]
    others = [m for m in matrices if m.type != "F32"]
    if exact and x.n <= REPEATED and others:
        for group in _groups(others):
            calls += matvec(limits, x, group, swiglu)
        others = []
    if floats and swiglu:  # an activation between two sums: only the matrix-vector kernel does it in float32
        return matvec(limits, x, floats, swiglu)
    if floats:
        calls += _gemm_float(x, floats, scratch)
    if others and x.n <= most_unwidened(others) and not exact:
        calls += _matmul(limits, x, others, scratch, swiglu)
    elif others:
        from reflex_ipc.cuda.gemm import gemm_half

        calls += gemm_half(limits, x, others, scratch, swiglu, exact)
    return calls


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


def matvec(
    limits: Limits,
    x: Input,
    matrices: Sequence[Matrix],
    swiglu: bool,
    experts: Experts | None = None,
    expert_stride: int = 0,
) -> list[Call]:
    """`linear` with every row of x by itself: several launches where a row does not fit shared memory, each on top of
    the one before.

    The matrices are of one type, or of two that have a kernel together. With `experts` a token goes to the matrices of
    each of its experts; the x of one is `expert_stride` numbers behind that of the one before, 0 where all have the
    same.
    """
    kinds = sorted({m.type for m in matrices})
    kinds = list((_pair(kinds) if len(kinds) > 1 else None) or kinds)
    piece = max(FORMATS[kind].piece for kind in kinds)
    is_float = kinds[0] in FLOATS
    least = 3 if is_float else max(_LEAST_LANES[FORMATS[kind].piece] for kind in kinds)
    stage = max(FORMATS[kind].stage(1 << log2) for kind in kinds for log2 in range(min(least, 5), 6))
    room = limits.shared_per_block - _PARTIALS - WARPS * stage
    columns = (room // 4 if is_float else room * 2 // 5) // 256 * 256  # that fit shared memory
    if columns <= 0 or (swiglu and x.width > columns):
        raise UnsupportedModelError(
            f"rows of {x.width} elements of {kinds[0]} do not fit {limits.shared_per_block} bytes of shared memory; "
            "use --backend cpu"
        )
    slots = x.n * (experts.n_used if experts else 1)
    tiles = [(m.n_out, FORMATS[m.type].rows // (2 if swiglu else 1)) for m in (matrices[:1] if swiglu else matrices)]
    calls = []
    for begin in range(0, x.width, columns):
        n_in = min(columns, x.width - begin)
        x_bytes = aligned(n_in, 16) * 4 if is_float else aligned(n_in, 128) * 2 + n_in // 2
        base = _PARTIALS + x_bytes
        # As many stages as leave room for two blocks a multiprocessor.
        stages = max(1, min(_STAGES, (limits.shared_per_block // 2 - base) // (WARPS * stage)))
        shared = base + WARPS * stages * stage
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
        arguments += pack_matrices(matrices, experts.bytes if experts else 0)
        name = "matvec_" + "_".join(kinds).lower()
        calls.append(Call(name, (min(blocks, capacity), slots, 1), (THREADS, 1, 1), shared, (arguments,)))
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
        blocks = sum(-(-n // (rows * (THREADS >> log2))) for n, rows in tiles)
        rounds = (blocks / capacity + -(-blocks // capacity)) / 2  # blocks that wait for memory fill each other's gaps
        copies = tiles[0][1] << max(0, 5 - log2)  # of a step; each costs some instructions
        cost = rounds * (n_pieces / (1 << log2) * (1 + 0.02 * copies) + _TILE_COST[log2])
        if not best[2] or cost < best[0]:
            best = (cost, log2, blocks)
    return best[1], best[2]


# --- more rows --------------------------------------------------------------------------------------------------------


def _go_together(limits: Limits, x: Input, matrices: Sequence[Matrix]) -> bool:
    """Do these rows, at most `FEW_WIDTH`, go through `few.cuh`? With the types of `WHOLE`, where four warps multiply
    them together and they meet enough weights."""
    if not limits.together or any(m.type not in WHOLE for m in matrices):
        return False
    width = next(w for w in WIDTHS if w >= x.n)
    return x.width * sum(m.n_out for m in matrices) >= _LARGE[width]


def _matmul(limits: Limits, x: Input, matrices: Sequence[Matrix], scratch: int, swiglu: bool) -> list[Call]:
    kinds = list(dict.fromkeys(m.type for m in matrices))
    if x.n <= MATMUL_WIDTH and _go_together(limits, x, matrices):
        from reflex_ipc.cuda.few import few

        return few(limits, x, matrices, scratch, swiglu, FEW_WIDTH)
    if x.n <= MATMUL_WIDTH:
        width = next(w for w in WIDTHS if w >= x.n and all(w in widths(kind) for kind in kinds))
    else:
        from reflex_ipc.cuda.few import few, few_width

        width = few_width(limits, x.n, kinds)
        if width > MATMUL_WIDTH:
            return few(limits, x, matrices, scratch, swiglu, width)
    n_rows = aligned(x.n, width)
    room = Scratch(scratch, n_rows, x.width)
    calls = [prepare(x, room.x, room.scale, n_rows, room.padded, n_rows, 1)]
    for kind in kinds:
        of_kind = [m for m in matrices if m.type == kind]
        piece = 16 if kind in FLOATS else FORMATS[kind].piece
        capacity = max(1, limits.multiprocessors * 2 // (n_rows // width))
        tiles = [(m.n_out, 8 if swiglu else 16) for m in (of_kind[:1] if swiglu else of_kind)]
        split, blocks = split_warps(tiles, -(-x.width // (4 * piece)), capacity)
        arguments = _MATMUL.pack(room.x, room.scale, x.n, n_rows, x.width, len(of_kind), swiglu, split)
        arguments += pack_matrices(of_kind)
        calls.append(
            Call(f"mma_{kind.lower()}_{width}", (blocks, n_rows // width, 1), (THREADS, 1, 1), 0, (arguments,))
        )
    return calls


def split_warps(tiles: Sequence[tuple[int, int]], n_slices: int, capacity: int) -> tuple[int, int]:
    """(log2 of the warps that share a tile, blocks) that finish first; as `_lanes`, a warp at a time."""
    best = (0.0, 0, 0)
    for log2 in range(WARPS.bit_length()):
        blocks = sum(-(-n // (rows * (WARPS >> log2))) for n, rows in tiles)
        cost = -(-blocks // capacity) * (-(-n_slices // (1 << log2)) + 0.5 + 0.1 * log2)
        if not best[2] or cost < best[0]:
            best = (cost, log2, blocks)
    return best[1], best[2]


# --- float32 weights, more rows ---------------------------------------------------------------------------------------


def _gemm_float(x: Input, matrices: Sequence[Matrix], scratch: int) -> list[Call]:
    calls = []
    address, stride = x.address, x.stride
    if x.norm:
        calls.append(prepare(x, scratch, 0, x.n, x.width, 0, 0)._replace(kernel="prepare_float_rows"))
        address, stride = scratch, x.width
    for m in matrices:
        arguments = GEMM.pack(
            *(address, 0, m.weight, 0, m.out, m.bias, 0, m.residual),
            *(x.n, m.n_out, x.width, stride, x.width, m.out_stride, 0, 0, 1),
        )
        grid = (-(-x.n // _FLOAT_TILE), -(-m.n_out // _FLOAT_TILE), 1)
        calls.append(Call("gemm_float", grid, (THREADS, 1, 1), 0, (arguments,)))
    return calls
