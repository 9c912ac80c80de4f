"""Products of many rows: weights as halves in scratch, under one plain product.

The kernels are `widen` in `kernels/matmul.cuh` and `kernels/gemm.cu`.
"""

from collections.abc import Sequence
from struct import Struct

from reflex_ipc.cuda.formats import FORMATS
from reflex_ipc.cuda.products import GEMM, THREADS, TILE, WARPS, Call, Input, Limits, Matrix, Scratch, prepare

_STAGE = 32 << 10  # bytes of shared memory of a stage of gemm_half
_EDGE = 1024  # bytes that gemm_half needs beside its stages where it multiplies from shared memory

_WIDEN = Struct("<3Q6i")


def gemm_half(
    limits: Limits, x: Input, matrices: Sequence[Matrix], scratch: int, swiglu: bool, exact: bool
) -> list[Call]:
    """`linear` of many rows: x becomes halves, then of each matrix in turn as many rows as scratch holds become halves
    and are multiplied with it."""
    room = Scratch(scratch, x.n, x.width, exact)
    low = room.padded // 8 if exact else 0
    calls = [prepare(x, room.x, room.scale, x.n, room.padded, 1, room.x_stride // 8, low)]
    stages, edge = (3, _EDGE) if limits.shared_per_block >= 3 * _STAGE + _EDGE else (2, 0)
    grid_m = -(-x.n // TILE)
    sides = 2 if swiglu else 1
    for matrix in matrices[:1] if swiglu else matrices:
        room = Scratch(scratch, x.n, x.width, exact, matrix.type)
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
                    Call(f"widen_{source.type.lower()}", (-(-n // WARPS), 1, 1), (THREADS, 1, 1), 0, (arguments,))
                )
            arguments = GEMM.pack(
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
            grid = (grid_m, -(-sides * n // TILE), 1)
            calls.append(Call("gemm_half", grid, (THREADS, 1, 1), stages * _STAGE + edge, (arguments,)))
    return calls
