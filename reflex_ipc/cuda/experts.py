"""Products of experts: each token's one by one, or, where many tokens share an expert, all of an expert's together.

The kernels are `kernels/matvec.cuh`, and `kernels/grouped.cuh` with `kernels/experts.cu`.
"""

from struct import Struct

from reflex_ipc.cuda.formats import FLOATS, FORMATS
from reflex_ipc.cuda.linear import matvec, split_warps
from reflex_ipc.cuda.memory import aligned
from reflex_ipc.cuda.products import Call, Experts, Input, Limits, Matrix, prepare

_SLOTS = 32  # of an expert that are multiplied at once
_WARPS = 4
_DENSE = ("F32", "Q1_0", "Q2_0", "TQ1_0", "TQ2_0")  # types whose experts are not grouped: no model has any

_GROUPING = Struct("<3Q6i")
_GROUPED = Struct("<7Q4i")


def expert_linear(
    limits: Limits, x: Input, matrix: Matrix, experts: Experts, scratch: int = 0, *, per_expert: bool
) -> list[Call]:
    """out[t, k] = W[id_k] x for each of a token's experts; out (n, n_used * n_out).

    x has one row a token, or with `per_expert` one part of `width` elements an expert side by side in a token's row.
    `scratch` is the address of `expert_scratch_bytes(...)`.
    """
    if _Grouping.pays(x.n, experts, matrix.type):
        return _grouped(limits, x, matrix, experts, scratch, per_expert)
    return matvec(limits, x, [matrix], False, experts, x.width if per_expert else 0)


def expert_scratch_bytes(n: int, width: int, kind: str, experts: Experts, *, per_expert: bool) -> int:
    """What `expert_linear` needs for up to n tokens and a matrix of this type."""
    if not _Grouping.pays(n, experts, kind):
        return 0
    return _Grouping(0, n, width, experts, per_expert).end


class _Grouping:
    """The tiles of n tokens' choices, and how scratch is divided: what `group_experts` writes, then x as halves with
    what they lose, and its powers of two."""

    def __init__(self, scratch: int, n: int, width: int, experts: Experts, per_expert: bool) -> None:
        self.slots = n * experts.n_used
        self.rows = self.slots if per_expert else n
        self.n_tiles = min(self.slots, experts.n_expert + self.slots // _SLOTS)
        self.padded = aligned(width, 256)
        self.expert = scratch
        self.places = aligned(self.expert + 4 * self.n_tiles, 256)
        self.x = aligned(self.places + 4 * self.n_tiles * _SLOTS, 256)
        self.scale = aligned(self.x + 4 * self.rows * self.padded, 256)
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
    calls.append(prepare(rows, g.x, g.scale, g.rows, g.padded, 1, 2 * low, low))
    piece = 16 if matrix.type in FLOATS else FORMATS[matrix.type].piece
    capacity = max(1, limits.multiprocessors * 4 // g.n_tiles)
    split, blocks = split_warps([(matrix.n_out, 16)], -(-x.width // (4 * piece)), capacity, 2)
    arguments = _GROUPED.pack(
        *(g.x, g.scale, g.expert, g.places, matrix.weight, experts.bytes, matrix.out),
        *(1 if per_expert else experts.n_used, x.width, matrix.n_out, split),
    )
    grid = (blocks, g.n_tiles, 1)
    calls.append(Call(f"grouped_{matrix.type.lower()}", grid, (32 * _WARPS, 1, 1), 0, (arguments,)))
    return calls
