"""Products of experts: each token's one by one, or, where many tokens share an expert, all of an expert's together.

The kernels are `kernels/matvec.cuh`, and `kernels/grouped.cuh` with `kernels/experts.cu`.
"""

from collections.abc import Sequence
from functools import cache
from struct import Struct
from typing import NamedTuple

from reflex_ipc.cuda.formats import FORMATS
from reflex_ipc.cuda.linear import matvec
from reflex_ipc.cuda.memory import aligned
from reflex_ipc.cuda.products import Call, Experts, Input, Limits, Matrix, prepare

WIDTHS = (64, 32, 16)
"""Slots of a tile that are multiplied at once: as many as shared memory holds."""
WARPS = 12
"""Of a block, at most: registers suffice for so many."""

_LEAST_WARPS = 4  # that make it worth while to read so many rows of x
_STATIC = 768  # bytes of shared memory that `grouped` needs beside its stages
UNGROUPED = ("F32", "Q1_0", "Q2_0", "TQ1_0", "TQ2_0")
"""Types whose experts are multiplied one by one: no model has any."""

_GROUPING = Struct("<3Q6i")
_GROUPED = Struct("<8Q4i")


class Shape(NamedTuple):
    """How `grouped.cuh` is launched."""

    warps: int
    width: int
    """Slots of a tile at most."""
    shared: int


def expert_linear(
    limits: Limits,
    x: Input,
    matrices: Sequence[Matrix],
    experts: Experts,
    scratch: int = 0,
    *,
    per_expert: bool,
    is_grouped: bool = False,
    shape: Shape | None = None,
) -> list[Call]:
    """out[t, k] = W[id_k] x for each of a token's experts; out (n, n_used * n_out).

    With two matrices, gate and up, of one type and shape, silu(gate x) * (up x) goes to the first one's `out`. x has
    one row a token, or with `per_expert` one part of `width` elements an expert side by side in a token's row.
    `scratch` is the address of `expert_scratch_bytes(...)`. `is_grouped`: the calls before this one's have put the same
    tokens' choices in order there. `shape`: not the best, but a given one, whose width is that of all tiles.
    """
    if not are_grouped(x.n, experts, matrices[0].type):
        return matvec(limits, x, matrices, len(matrices) > 1, experts, x.width if per_expert else 0)
    width = shape.width if shape else tile_width(limits)
    g = _Grouping(scratch, x.n, x.width, experts, per_expert, width)
    calls = []
    if not is_grouped:
        arguments = _GROUPING.pack(
            *(g.tiles, g.slots, experts.ids, experts.stride, experts.n_used, g.n_slots, experts.n_expert),
            *(width, g.n_tiles),
        )
        calls.append(Call("group_experts", (1, 1, 1), (1024, 1, 1), 8 * experts.n_expert, (arguments,)))
    rows = x._replace(n=g.rows, stride=x.width) if per_expert else x
    low = g.padded // 8
    calls.append(prepare(rows, g.x, g.scale, g.rows, g.padded, 1, 2 * low, low))
    matrix, up = matrices[0], matrices[1].weight if len(matrices) > 1 else 0
    tiles = -(-matrix.n_out // (8 if up else 16))  # of 16 rows of W
    warps, _, shared = shape or grouped_shape(limits, matrix.type, width, tiles)
    arguments = _GROUPED.pack(
        *(g.x, g.scale, g.tiles, g.slots, matrix.weight, up, experts.bytes, matrix.out),
        *(1 if per_expert else experts.n_used, x.width, matrix.n_out, width),
    )
    grid = (-(-tiles // warps), g.n_tiles, 1)
    calls.append(Call(f"grouped_{matrix.type.lower()}", grid, (32 * warps, 1, 1), shared, (arguments,)))
    return calls


def expert_scratch_bytes(n: int, width: int, kind: str, experts: Experts, *, per_expert: bool) -> int:
    """What `expert_linear` needs for up to n tokens and a matrix of this type, on any device."""
    if not are_grouped(n, experts, kind):
        return 0
    return _Grouping(0, n, width, experts, per_expert, WIDTHS[-1]).end


def are_grouped(n: int, experts: Experts, kind: str) -> bool:
    """Whether `expert_linear` takes the tokens of an expert together: where it has two or more, on average."""
    return kind not in UNGROUPED and n > 1 and n * experts.n_used >= 2 * experts.n_expert


class _Grouping:
    """The tiles of n tokens' choices, and how scratch is divided: what `group_experts` writes, then x as halves with
    what they lose, and its powers of two."""

    def __init__(self, scratch: int, n: int, width: int, experts: Experts, per_expert: bool, tile: int) -> None:
        self.n_slots = n * experts.n_used
        self.rows = self.n_slots if per_expert else n
        self.n_tiles = min(self.n_slots, experts.n_expert + self.n_slots // tile)
        self.padded = aligned(width, 256)
        self.tiles = scratch
        self.slots = aligned(self.tiles + 16 * self.n_tiles, 256)
        self.x = aligned(self.slots + 4 * self.n_slots, 256)
        self.scale = aligned(self.x + 4 * self.rows * self.padded, 256)
        self.end = self.scale + 4 * self.rows


@cache
def tile_width(limits: Limits) -> int:
    """Slots of a tile: the same for every type of weights, so that all products of a layer share one grouping."""
    kinds = [kind for kind in FORMATS if kind not in UNGROUPED]
    fits = (w for w in WIDTHS if all(most_warps(limits, kind, w) >= _LEAST_WARPS for kind in kinds))
    return next(fits, WIDTHS[-1])


@cache
def grouped_shape(limits: Limits, kind: str, width: int, tiles: int) -> Shape:
    """As many warps as there can be, but no more than the blocks of so many tiles of 16 rows share out evenly."""
    most = max(1, most_warps(limits, kind, width))
    warps = -(-tiles // -(-tiles // most))
    x, w = _stage(kind, width)
    return Shape(warps, width, 2 * (x + warps * w))


def most_warps(limits: Limits, kind: str, width: int) -> int:
    """Of a block that multiplies so many slots at once."""
    x, w = _stage(kind, width)
    return min(WARPS, ((limits.shared_per_block - _STATIC) // 2 - x) // w)


def _stage(kind: str, width: int) -> tuple[int, int]:
    """Bytes of a stage of `grouped.cuh`: for x, and for a warp's rows of W."""
    form = FORMATS[kind]
    return form.few_columns // 8 * 2 * 16 * (width + 1), 16 * form.slot
