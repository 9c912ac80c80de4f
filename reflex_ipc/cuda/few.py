"""Products of 17 to 128 rows, by `kernels/few.cuh`: in which shape, and with which arguments."""

from collections.abc import Sequence
from functools import cache
from struct import Struct
from typing import NamedTuple

from reflex_ipc.cuda.formats import ALONE, COMMON, FORMATS, MORE_WIDTHS, WIDTHS
from reflex_ipc.cuda.memory import aligned
from reflex_ipc.cuda.products import PARTS, SUMS, THREADS, Call, Input, Limits, Matrix, Room, pack_matrices, prepare

_FEW = Struct("<3Q9i4x")


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
    n_rows = aligned(x.n, width)
    room = Room(scratch, n_rows, x.width)
    calls = [prepare(x, room.x, room.scale, n_rows, room.padded, n_rows, 1)]
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
        arguments += pack_matrices(of_kind)
        grid = (_tiles(rows, warps, swiglu), n_rows // width, parts)
        calls.append(Call(f"mma_{kind.lower()}_{width}", grid, (32 * warps, 1, 1), shared, (arguments,)))
        if parts > 1:
            calls.append(Call("add_parts", (-(-sum(rows) // THREADS), x.n, 1), (THREADS, 1, 1), 0, (arguments,)))
    return calls


def _tiles(rows: Sequence[int], warps: int, swiglu: bool) -> int:
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
        tiles = _tiles(rows, warps, swiglu) * (n_rows // width)
        copied = form.few_columns * 2 * width + warps * 16 * form.few_columns * form.block_bytes / form.block
        for wanted in PARTS:
            if wanted > 1 and (wanted > n_stages or 4 * n_rows * n_sum * wanted > SUMS):
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


def few_width(limits: Limits, n: int, kinds: Sequence[str]) -> int:
    """Rows of x a block: the fewest that hold an equal share of all, or as many as shared memory holds stages of."""
    known = [w for w in WIDTHS if w not in MORE_WIDTHS or all(kind in COMMON for kind in kinds)]
    known = [w for w in known if w <= ALONE or all(few_shapes(limits, kind, w) for kind in kinds)]
    share = -(-n // -(-n // known[-1]))
    return next(w for w in known if w >= share)
